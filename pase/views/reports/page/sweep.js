// Cost against the number of devices: both axes logarithmic, so that perfect scaling is a straight line down.

const SYMBOLS = ["circle", "rect", "triangle", "diamond", "pin", "arrow"];

function sweepSection() {
  const { sweep } = report;
  if (!sweep || !sweep.devices.length) return null;
  const show = (value) => quantity(value, sweep.cost_unit);
  const of = sweep.model ? ` of ${shown(sweep.model, 60)}` : "";
  return section("sweep", `Cost${of} against the number of devices`,
    el("p", null, scalingSentence(sweep)),
    chart({ label: `Cost of a step on ${sweep.devices.join(", ")} devices; the table behind holds the same`, height: 380, option: () => sweepOption(sweep, show) }),
    asTable(() => sweepTable(sweep, show)));
}

function scalingSentence({ devices, strategies }) {
  const [first] = strategies;
  const known = devices.map((_, i) => i).filter((i) => first && first.total_cost[i] > 0);
  if (known.length < 2) return "";
  const [from, to] = [known[0], known[known.length - 1]];
  const speedup = first.total_cost[from] / first.total_cost[to];
  const ideal = devices[to] / devices[from];
  return `From ${count(devices[from])} to ${counted(devices[to], "device")}, a step gets ${times(speedup)} cheaper with ${shown(first.name, 40)}: ${percent(speedup / ideal, 0)} of perfect scaling.`;
}

function perfect({ devices, strategies }) {
  const start = devices.findIndex((_, i) => strategies[0] && strategies[0].total_cost[i] > 0);
  return start < 0 ? [] : devices.map((number) => [number, (strategies[0].total_cost[start] * devices[start]) / number]);
}

function sweepOption(sweep, show) {
  const { devices, strategies } = sweep;
  const series = strategies.map((one, index) => ({
    type: "line", name: shown(one.name, 40), symbol: SYMBOLS[index % SYMBOLS.length], symbolSize: 8, connectNulls: false,
    itemStyle: { color: partPaint(index) }, lineStyle: { color: partPaint(index), width: index === 0 ? 2.5 : 1.5 },
    data: one.total_cost.map((value, i) => [devices[i], value > 0 ? value : null]),
  }));
  series.push({
    type: "line", name: "perfect scaling", symbol: "none", itemStyle: { color: colour("soft") },
    lineStyle: { color: colour("soft"), type: "dashed", width: 1 }, data: perfect(sweep), tooltip: { show: false },
  });
  return {
    grid: { left: innerWidth < 560 ? 78 : 96, right: 20, top: 40, bottom: 44 },
    legend: topLegend(series.map(({ name }) => name)),
    xAxis: {
      type: "log", logBase: 2, name: "devices", nameLocation: "middle", nameGap: 28, nameTextStyle: { color: colour("soft") },
      min: devices[0], max: devices.length > 1 ? devices[devices.length - 1] : devices[0] * 2,
      axisLabel: { color: colour("soft"), formatter: (value) => count(value) }, splitLine: { lineStyle: { color: colour("faint") } },
      axisLine: { lineStyle: { color: colour("line") } },
    },
    yAxis: amountAxis(show, { type: "log" }),
    series,
    tooltip: {
      trigger: "axis",
      formatter: (points) => tipNodes(counted(points[0].value[0], "device"),
        points.map(({ seriesName, value }) => `${seriesName}: ${show(value[1])}`)),
    },
  };
}

// Whether it is proven, or why there is nothing to prove.
function outcome(exact, problem) {
  if (problem) return shown(problem, 400);
  if (exact === undefined || exact === null) return "–";
  return exact ? "proven optimal" : "not proven optimal";
}

function sweepTable(sweep, show) {
  const { devices, strategies, memory_bytes: memory = [], exact = [], search_time_s: searchTime = [], problems = [], stages = [], micro_batches: parts = [] } = sweep;
  const hasParts = [...stages, ...parts].some((value) => value > 1);
  const number = (title) => ({ title, isNumber: true });
  const ofStep = hasParts ? [number("stages"), number("micro-batches")] : [];
  const columns = [number("devices"), ...strategies.map((one) => number(shown(one.name, 40))), ...ofStep, number("memory of a device"), { title: "certificate" }, number("search")];
  const rows = devices.map((size, i) => [
    count(size), ...strategies.map((one) => (one.total_cost[i] > 0 ? show(one.total_cost[i]) : "–")),
    ...(hasParts ? [stages[i], parts[i]].map((value) => (value > 0 ? count(value) : "–")) : []),
    memory[i] > 0 ? bytes(memory[i]) : "–", outcome(exact[i], problems[i]), duration(searchTime[i]),
  ]);
  return table(`Cost of a step by the number of devices`, columns, rows);
}
