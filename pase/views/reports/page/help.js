// The keys, what this file is, and the licences of what it carries.

const KEYS = [
  ["/", "find a layer by name or kind"],
  ["Enter", "in the search: the next hit; in the graph: open the layer"],
  ["↑ ↓ ← →", "walk along the edges, and between layers side by side"],
  ["Home, End", "the first and the last layer"],
  ["+  −  0", "zoom in, zoom out, fit the graph"],
  ["u", "unfold or fold repeated blocks"],
  ["Esc", "close the panel, or leave the search"],
  ["?", "these keys"],
];

function startHelp() {
  const dialog = byId("help");
  const rows = KEYS.map(([key, what]) => el("tr", null, el("th", { scope: "row" }, key), el("td", null, what)));
  put(dialog, el("h2", { id: "help-title" }, "Keys"), el("table", null, el("tbody", null, rows)),
    el("p", { class: "note" }, "The first six work in the graph: click it, or reach it with Tab. Drag moves it, the wheel zooms it once it is clicked, two fingers pinch it."),
    button("Close", () => dialog.close(), { class: "close-help" }));
  byId("keys").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, select, textarea");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.key === "?") dialog.showModal();
    else if (event.key === "/") byId("find").focus();
    else return;
    event.preventDefault();
  });
  startFooter();
}

function startFooter() {
  const licences = el("details", null, el("summary", null, "Licences of what this file carries"));
  licences.addEventListener("toggle", () => {
    if (licences.childElementCount === 1) put(licences, el("pre", { tabindex: 0 }, JSON.parse(byId("pase-licences").textContent)));
  });
  put(byId("footer"), el("p", null, `Made by PaSE ${shown(report.tool_version || "", 40)}. This file holds all that it shows and loads nothing. Charts are drawn by Apache ECharts.`), licences);
}
