// Costs, memory and moved bytes by layer: bars beside the names, in the graph's order or by size.

const BARS = 24;
const BAR_HEIGHT = 22;

const MEASURES = {
  cost: { title: "cost of a step", show: cost, series: (of) => of.cost_parts.map((name, part) => [name, (layer) => layer.costs[part]]) },
  memory: { title: "memory on each device", show: bytes, series: () => [["memory", (layer) => layer.memory_bytes]] },
  moved: { title: "bytes moved within the layer", show: bytes, series: () => [["moved bytes", (layer) => layer.moved_bytes || 0]] },
};

function costsSection() {
  const of = plan();
  const looked = { measure: "cost", order: of.drawings.folded.vertices.length > 2 * BARS ? "size" : "graph", repeats: folds() ? "together" : "each" };
  const height = () => Math.min(BARS, rowsOf(of, looked).length) * BAR_HEIGHT + 70;
  const box = chart({
    label: `Bars of the cost of each layer of ${shown(of.name, 80)}; the table behind holds the same`,
    height: height(), option: () => barsOption(of, looked), press: (index) => chooseLayer(rowsOf(of, looked)[index].layer, "link"),
  });
  const choose = (name, values) => el("label", null, `${name} `, el("select", {
    onchange: (event) => {
      looked[name.toLowerCase()] = event.target.value;
      redraw(box, height());
    },
  }, values.map(([value, text]) => el("option", { value, selected: looked[name.toLowerCase()] === value }, text))));
  return section("costs", "By layer",
    el("div", { class: "choices" },
      choose("Measure", Object.entries(MEASURES).filter(([key]) => key !== "moved" || knowsMoved(of)).map(([key, { title }]) => [key, title])),
      choose("Order", [["graph", "as in the graph"], ["size", "largest first"]]),
      folds() ? choose("Repeats", [["together", "added up"], ["each", "each by itself"]]) : null),
    box, asTable(() => layersTable(of)));
}

// Of very many devices, bytes within layers are not known.
function knowsMoved(of) {
  return of.layers.every((layer) => layer.moved_bytes !== null);
}

// What is summed over repeats that are drawn once.
function summed(of, members, value) {
  return members.reduce((sum, member) => sum + value(of.layers[member]), 0);
}

/** Return the rows of the chart, {layer, members}, in the order that was chosen. */
function rowsOf(of, looked) {
  const rows = looked.repeats === "together"
    ? of.drawings.folded.vertices.map(({ layer, members = [layer] }) => ({ layer, members })).sort((a, b) => a.layer - b.layer)
    : of.layers.map((_, layer) => ({ layer, members: [layer] }));
  if (looked.order === "graph") return rows;
  const { series } = MEASURES[looked.measure];
  const sizes = new Map(rows.map((row) => [row, series(of).reduce((sum, [, value]) => sum + summed(of, row.members, value), 0)]));
  return rows.sort((a, b) => sizes.get(b) - sizes.get(a) || a.layer - b.layer);
}

function rowName(of, { layer, members }) {
  return members.length > 1 ? `${shown(of.layers[layer].name, 40)} ×${members.length}` : of.layers[layer].name;
}

function barsOption(of, looked) {
  const { series, show } = MEASURES[looked.measure];
  const rows = rowsOf(of, looked);
  const all = series(of).map(([name, value], index) => ({ name: shown(name, 40), value, paint: partPaint(index) }));
  const parts = all.filter(({ value }) => of.layers.some((layer) => value(layer) > 0));
  const narrow = innerWidth < 560;
  const room = narrow ? 84 : 170;
  const long = rows.length > BARS;
  return {
    grid: { left: room + 10, right: long ? 44 : 18, top: 36, bottom: 28 },
    legend: parts.length > 1 ? topLegend(parts.map(({ name }) => name)) : undefined,
    xAxis: amountAxis((value) => show(value), { splitNumber: narrow ? 3 : 6 }),
    yAxis: nameAxis(rows.map((row) => rowName(of, row)), { inverse: true, axisLabel: { width: room } }),
    series: parts.map(({ name, value, paint }) => ({
      type: "bar", name, stack: "all", barMaxWidth: 15, cursor: "pointer", itemStyle: { color: paint },
      data: rows.map((row) => summed(of, row.members, value)),
    })),
    dataZoom: long ? barsZoom() : undefined,
    tooltip: {
      trigger: "axis", axisPointer: { type: "shadow" },
      formatter: (points) => barTip(of, rows[points[0].dataIndex], parts, show),
    },
  };
}

// The wheel stays the page's, unless Shift or Ctrl is held.
function barsZoom() {
  const bounds = { yAxisIndex: 0, startValue: 0, endValue: BARS - 1 };
  return [
    {
      type: "slider", width: 14, right: 8, showDetail: false, brushSelect: false, ...bounds,
      borderColor: colour("line"), fillerColor: colour("filler"), handleStyle: { color: colour("raised"), borderColor: colour("soft") },
      moveHandleStyle: { color: colour("soft") }, dataBackground: { areaStyle: { color: colour("faint") }, lineStyle: { color: colour("line") } },
    },
    { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: "shift", moveOnMouseMove: false, preventDefaultMouseMove: false, ...bounds },
  ];
}

function barTip(of, row, parts, show) {
  const amounts = parts.map(({ name, value }) => [name, summed(of, row.members, value)]).filter(([, amount]) => amount > 0);
  const layer = of.layers[row.layer];
  const lines = [configuration(layer), modes(of, layer), ...amounts.map(([name, amount]) => `${name}: ${show(amount)}`)];
  return tipNodes(shown(rowName(of, row), 80), lines.filter(Boolean));
}

function layersTable(of) {
  const number = (title) => ({ title, isNumber: true });
  const hasModes = of.layers.some((layer) => modes(of, layer));
  const overlaps = of.layers.some((layer) => layer.overlapped > 0);
  const paid = of.cost_parts.map((_, part) => part).filter((part) => of.layers.some((layer) => layer.costs[part] > 0));
  const columns = [{ title: "layer" }, { title: "kind" }, { title: spaceTitle(of) }, { title: "configuration" },
    ...(hasModes ? [{ title: "mode" }] : []),
    ...paid.map((part) => number(shown(of.cost_parts[part], 40))), number("cost"), ...(overlaps ? [number("overlapped besides")] : []),
    number(hasStages(of) ? "share of all devices' time" : "share"), number("memory on each device"), ...(knowsMoved(of) ? [number("moved within, in a step")] : [])];
  const rows = of.layers.map((layer, index) => [
    layerLink(index), shown(layer.kind, 40), space(layer), configuration(layer), ...(hasModes ? [modes(of, layer) || "–"] : []),
    ...paid.map((part) => (layer.costs[part] > 0 ? cost(layer.costs[part], of) : "–")),
    cost(layerCost(layer), of), ...(overlaps ? [cost(layer.overlapped, of)] : []), percent(layer.share), bytes(layer.memory_bytes),
    ...(knowsMoved(of) ? [bytes(layer.moved_bytes)] : []),
  ]);
  return table(`Layers of ${shown(of.name, 80)}${hasStages(of) ? ": costs of a step on the devices of a layer's stage" : ""}`, columns, rows);
}
