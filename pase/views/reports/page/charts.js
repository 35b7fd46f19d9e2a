// Charts by ECharts: drawn one after the other when the browser has time, in the page's colours; a table is behind each.

const charts = { all: new Set(), library: null };

/** Called once the library is there, which comes after the graph so as not to keep it waiting. */
function startCharts() {
  charts.library = globalThis.echarts;
  new ResizeObserver(onFrame(() => {
    if (!PAPER.matches) resizeCharts();
  })).observe(byId("sections"));
  when("theme", () => charts.all.forEach((one) => one.instance && setOption(one)));
  drawLater();
}

// One chart in each pause, so that none holds up a click.
function drawLater() {
  const next = [...charts.all].find((one) => !one.instance);
  if (!charts.library || !next) return;
  const pause = globalThis.requestIdleCallback || ((act) => setTimeout(act, 30));
  pause(() => {
    if (charts.all.has(next)) drawChart(next);
    drawLater();
  }, { timeout: 300 });
}

/** Return a chart: `option` makes ECharts' option anew, `label` says what is seen, `press` is told the data's index. */
function chart({ label, height, option, press, paperWidth = 680 }) {
  const box = el("div", { class: "chart", role: "img", "aria-label": label, style: { height: `${height}px` } });
  const one = { box, option, press, paperWidth, instance: null };
  box.chart = one;
  charts.all.add(one);
  return box;
}

function drawChart(one) {
  if (one.instance || !charts.library) return;
  one.instance = charts.library.init(one.box, null, { renderer: "svg" });
  if (one.press) one.instance.on("click", (event) => one.press(event.dataIndex));
  setOption(one);
}

function setOption(one) {
  const common = {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour("ink") },
    tooltip: { confine: true, ...tooltipStyle(), ...one.option().tooltip },
  };
  one.instance.setOption({ ...one.option(), ...common }, true);
}

function tooltipStyle() {
  return {
    backgroundColor: colour("raised"), borderColor: colour("line"), textStyle: { color: colour("ink"), fontSize: 12 },
    transitionDuration: 0,
  };
}

/** Draw a chart anew, after what it shows has changed. */
function redraw(box, height) {
  if (height) box.style.setProperty("height", `${height}px`);
  if (!box.chart.instance) return;
  box.chart.instance.resize();
  setOption(box.chart);
}

function resizeCharts(isPaper) {
  for (const { instance, paperWidth } of charts.all) if (instance) instance.resize({ width: isPaper ? paperWidth : "auto" });
}

/** Forget all charts, before others take their place. */
function dropCharts() {
  for (const { instance } of charts.all) if (instance) instance.dispose();
  charts.all.clear();
}

/** Draw all charts for paper. */
function printCharts() {
  for (const one of charts.all) drawChart(one);
  resizeCharts(true);
}

/** Return an axis of amounts. */
function amountAxis(show, more) {
  return {
    type: "value",
    axisLabel: { color: colour("soft"), formatter: (value) => show(value), hideOverlap: true },
    splitLine: { lineStyle: { color: colour("faint") } },
    axisLine: { show: false },
    ...more,
  };
}

/** Return an axis of names. */
function nameAxis(names, more) {
  return {
    type: "category",
    data: names.map((name) => shown(name, 60)),
    axisLabel: { color: colour("ink"), interval: 0, overflow: "truncate", ...(more && more.axisLabel) },
    axisTick: { show: false },
    axisLine: { lineStyle: { color: colour("line") } },
    ...Object.fromEntries(Object.entries(more || {}).filter(([key]) => key !== "axisLabel")),
  };
}

/** Return the colour of a kind of cost, for ECharts. */
function partPaint(index) {
  return colour(`part-${index % PART_COLOURS}`);
}

/** Return a legend on top. */
function topLegend(names) {
  return { data: names, top: 0, left: 0, icon: "roundRect", itemWidth: 12, itemHeight: 12, textStyle: { color: colour("ink") }, type: "scroll" };
}

/** Return what a tooltip shows: a title and lines, as nodes; no text is ever parsed. */
function tipNodes(title, lines) {
  return el("div", { class: "chart-tip" }, el("b", null, title), lines.map((line) => el("div", null, line)));
}

/** Return a section of the page. */
function section(id, title, ...content) {
  return el("section", { id, "aria-labelledby": `${id}-title`, tabindex: -1 }, el("h2", { id: `${id}-title` }, title), content);
}
