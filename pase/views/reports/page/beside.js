// Several plans beside each other: their sums, where the cost goes in each, and which layers they configure otherwise.

function besideSection() {
  const { plans } = report;
  if (plans.length < 2) return null;
  const units = new Set(plans.map((of) => of.cost_unit));
  const note = units.size > 1 ? "Costs of these plans are in different units, so they cannot be compared." : null;
  return section("beside", "Plans beside each other",
    sumsTable(plans, units.size === 1),
    note ? el("p", { class: "note" }, note) : chart({
      label: `Cost of each plan by what it pays for: ${plans.map((of) => `${shown(of.name, 60)} ${cost(of.total_cost, of)}`).join(", ")}`,
      height: plans.length * 36 + 76, option: () => besideOption(plans), press: (index) => choosePlan(index),
    }),
    note ? null : asTable(() => partsOfPlans(plans)),
    differences(plans));
}

function sumsTable(plans, comparable) {
  const least = Math.min(...plans.map((of) => of.total_cost));
  const number = (title) => ({ title, isNumber: true });
  const columns = [{ title: "plan" }, number("devices"), number("cost of a step"), comparable ? number("of the cheapest") : null, { title: "certificate" },
    number("memory of a device"), number("moved"), number("data parallelism"), number("search")];
  const rows = plans.map((of, index) => [
    button(named(of.name, 60), () => choosePlan(index), { class: "link", "data-plan-link": index }),
    count(of.num_devices), cost(of.total_cost, of), comparable ? times(of.total_cost / least) : null, of.certificate, bytes(of.memory.total_bytes),
    bytes(of.moved_bytes), gain(of) === null ? "–" : times(gain(of)), duration(of.search.time_s),
  ]);
  const kept = columns.map(Boolean);
  return table("Sums of each plan", columns.filter(Boolean), rows.map((row) => row.filter((_, i) => kept[i])));
}

function partNames(plans) {
  return [...new Set(plans.flatMap((of) => of.step_parts.map(([name]) => name)))];
}

// The parts of a step of all plans, in the order in which they first appear.
function allParts(plans) {
  const names = partNames(plans);
  const sums = plans.map((of) => new Map(of.step_parts));
  return names.map((name) => [name, sums.map((one) => one.get(name) || 0)]).filter(([, values]) => values.some((value) => value > 0));
}

function besideOption(plans) {
  const parts = allParts(plans);
  const order = partNames(plans);
  const room = innerWidth < 560 ? 84 : 150;
  return {
    grid: { left: room + 10, right: 76, top: 36, bottom: 28 },
    legend: topLegend(parts.map(([name]) => shown(name, 40))),
    xAxis: amountAxis((value) => cost(value, plans[0]), { splitNumber: innerWidth < 560 ? 2 : 6 }),
    yAxis: nameAxis(plans.map((of) => of.name), { inverse: true, axisLabel: { width: room } }),
    series: parts.map(([name, values], index) => ({
      type: "bar", stack: "all", name: shown(name, 40), barMaxWidth: 22, cursor: "pointer", data: values,
      itemStyle: { color: partPaint(order.indexOf(name)) },
      label: { show: index === parts.length - 1, position: "right", color: colour("ink"), formatter: ({ dataIndex }) => cost(plans[dataIndex].total_cost, plans[dataIndex]) },
    })),
    tooltip: {
      trigger: "axis", axisPointer: { type: "shadow" },
      formatter: (points) => tipNodes(shown(plans[points[0].dataIndex].name, 60),
        parts.map(([name, values]) => `${shown(name, 40)}: ${cost(values[points[0].dataIndex], plans[0])}`)),
    },
  };
}

function partsOfPlans(plans) {
  const parts = allParts(plans);
  return table("Cost of each plan by what it pays for",
    [{ title: "plan" }, ...parts.map(([name]) => ({ title: shown(name, 40), isNumber: true }))],
    plans.map((of, index) => [named(of.name, 60), ...parts.map(([, values]) => cost(values[index], of))]));
}

function differences(plans) {
  const byName = plans.map((of) => new Map(of.layers.map((layer) => [layer.name, layer])));
  const shared = plans[0].layers.filter((layer) => byName.every((layers) => layers.has(layer.name)));
  if (!shared.length) return el("p", { class: "note" }, "These plans have no layer in common.");
  const configurations = (layer) => byName.map((layers) => configuration(layers.get(layer.name)));
  const different = shared.filter((layer) => new Set(configurations(layer)).size > 1);
  const title = `${counted(different.length, "layer")} of ${count(shared.length)} in common ${different.length === 1 ? "has" : "have"} different configurations`;
  if (!different.length) return el("p", null, `All ${counted(shared.length, "layer")} in common have the same configuration.`);
  const rows = different.map((layer) => [differentLayer(layer.name), ...configurations(layer)]);
  return el("details", { class: "as-table", open: different.length <= 40 }, el("summary", null, title),
    table(title, [{ title: "layer" }, ...plans.map((of) => ({ title: shown(of.name, 40) }))], rows, 100));
}

function differentLayer(name) {
  return button(named(name, 60), () => chooseLayer(plan().layers.findIndex((layer) => layer.name === name), "link"), { class: "link" });
}
