// A step of micro-batches and stages: when each stage works on which micro-batch, and what it holds meanwhile.

const ROW_HEIGHT = 30;
const NUMBERED_SHARE = [0.018, 0.07];
const TICKS = [5, 2];

function stagesSection() {
  const of = plan();
  if (!of.stages) return of.stages_note ? section("stages", "Stages", el("p", null, shown(of.stages_note, 400))) : null;
  const { stages } = of.stages;
  const title = stages.length > 1 ? "Stages" : "Micro-batches";
  return section("stages", title, el("p", null, stepSentence(of)), timeline(of), worksKey(of), stagesTable(of));
}

function stepSentence(of) {
  const { step_time_s: step, closed_form_s: closed, waiting_share: waiting, stages } = of.stages;
  const over = closed > 0 ? step / closed - 1 : 0;
  const beside = Math.abs(over) < 5e-5 ? "as the closed form says"
    : `${percent(Math.abs(over), 2)} ${over > 0 ? "more" : "less"} than the closed form says, ${quantity(closed, "s")}`;
  const through = stages.length > 1 ? ` through ${counted(stages.length, "stage")} (${shown(of.schedule, 40)})` : "";
  const waits = stages.length > 1 ? ` Devices wait ${percent(waiting)} of the time.` : "";
  return `${count(of.micro_batches)} micro-batch${of.micro_batches === 1 ? "" : "es"}${through}, pass by pass: ${quantity(step, "s")}, ${beside}.${waits}`;
}

/** Return the passes as bars over time, a row for each stage; of long steps the first ones. */
function timeline(of) {
  const { passes, num_passes: all, step_time_s: step, works, stages } = of.stages;
  const isWhole = passes.length === all;
  const end = isWhole ? step : passes[passes.length - 1][3];
  const shownEnd = end > 0 ? end : 1;
  const isNarrow = Number(innerWidth < 560);
  const bars = passes.filter(([, , , begin]) => isWhole || begin < end).map(([stage, work, number, begin, until]) => {
    const from = (100 * begin) / shownEnd;
    const width = (100 * (Math.min(until, shownEnd) - begin)) / shownEnd;
    const what = number === null ? works[work] : `${works[work]}, micro-batch ${number}`;
    const top = stage * ROW_HEIGHT + 4;
    const bar = svg("rect", { x: `${from}%`, y: top, width: `${width}%`, height: ROW_HEIGHT - 8, class: "pass", style: { fill: partColour(work) } },
      svg("title", null, `stage ${stage}: ${what}; ${quantity(until - begin, "s")}, from ${quantity(begin, "s")}`));
    const isNumbered = number !== null && width > 100 * NUMBERED_SHARE[isNarrow];
    return [bar, isNumbered ? svg("text", { x: `${from + width / 2}%`, y: top + 15, "text-anchor": "middle", class: "pass-number" }, number) : null];
  });
  const height = stages.length * ROW_HEIGHT;
  const last = TICKS[isNarrow];
  const ticks = [...Array(last + 1).keys()].map((tick) => {
    const at = `${(100 * tick) / last}%`;
    const anchor = tick === 0 ? "start" : tick === last ? "end" : "middle";
    return [svg("line", { x1: at, x2: at, y1: 0, y2: height, class: "tick" }),
      svg("text", { x: at, y: height + 15, "text-anchor": anchor, class: "tick-time" }, quantity((shownEnd * tick) / last, "s"))];
  });
  const names = el("div", { class: "rows", "aria-hidden": "true" }, stages.map(({ stage }) =>
    el("span", { style: { height: `${ROW_HEIGHT}px` } }, stages.length > 1 ? `stage ${stage}` : "step")));
  const label = `What each stage does over time; the table below says how much: ${stages.map((one) => `stage ${one.stage} waits ${quantity(one.waiting_s, "s")}`).join(", ")}`;
  return [
    el("div", { class: "timeline" }, names,
      svg("svg", { width: "100%", height: height + 20, role: "img", "aria-label": label }, ticks, bars)),
    isWhole ? null : el("p", { class: "note" }, `The first ${quantity(end, "s")} of ${quantity(step, "s")}.`),
  ];
}

function worksKey(of) {
  const items = worksDone(of).map((work) => el("li", null,
    el("span", { class: "swatch", style: { background: partColour(work) } }), shown(of.stages.works[work], 40)));
  return el("ul", { class: "key" }, items);
}

// The numbers of the works that any stage does; each has its colour whether others are done or not.
function worksDone(of) {
  return [...of.stages.works.keys()].filter((work) => of.stages.stages.some((one) => one.times_s[work] > 0));
}

function stagesTable(of) {
  const number = (title) => ({ title, isNumber: true });
  const { works, stages, step_time_s: step } = of.stages;
  const done = worksDone(of);
  const columns = [{ title: "stage" }, { title: "layers" }, number("devices"),
    ...done.map((work) => number(shown(works[work], 40))), number("busy in a step"), number("waits in a step"), number("micro-batches in flight"), number("memory on each device")];
  return table(`Stages of ${shown(of.name, 80)}: what a micro-batch takes of each, and what it does in a step`, columns,
    stages.map((one) => [
      count(one.stage), el("div", { class: "of-stage" }, layerLink(one.layers[0], 30), " … ", layerLink(one.layers[1], 30), ` (${count(one.num_layers)})`), ranges(span(one.devices)),
      ...done.map((work) => (one.times_s[work] > 0 ? quantity(one.times_s[work], "s") : "–")), quantity(one.busy_s, "s"),
      `${quantity(one.waiting_s, "s")} · ${percent(one.waiting_s / step)}`, count(one.in_flight), bytes(one.memory_bytes),
    ]));
}

function span([first, last]) {
  return [...Array(last - first + 1).keys()].map((number) => first + number);
}
