// What starts when, and what is made anew for another plan.

const SECTIONS = [stagesSection, costsSection, memorySection, trafficSection, besideSection, sweepSection];

function showSections() {
  dropCharts();
  const made = SECTIONS.map((make) => make()).filter(Boolean);
  fill(byId("sections"), made);
  const all = [byId("graph"), ...made];
  fill(byId("contents"), all.map((one) => el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
}

startTheme();
startSummary();
startViewport();
startPaint();
startOverview();
startPointer();
startJourney();
startLegend();
startFinder();
startPanel();
startHelp();
startPaper();
firstView();
paint();
performance.mark("pase-ready");

when("plan", () => {
  showSections();
  drawLater();
});
addEventListener("DOMContentLoaded", () => {
  showSections();
  startCharts();
});
