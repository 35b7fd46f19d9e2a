// The head of the page: what was found in one sentence, the facts behind it, and where the cost goes in all.

function startSummary() {
  byId("brand").textContent = `PaSE ${report.tool_version || ""}`;
  if (report.plans.length > 1) fill(byId("plans"), planTabs());
  when("plan", showSummary);
  showSummary();
}

function planTabs() {
  const tabs = report.plans.map((one, index) => el("button", {
    type: "button", role: "tab", class: "tab", "data-plan": index, "aria-controls": "main",
    onclick: () => choosePlan(index),
  }, named(one.name, 40), el("span", { class: "tab-cost" }, cost(one.total_cost, one))));
  const list = el("div", { role: "tablist", "aria-label": "Plans", class: "tabs" }, tabs);
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    choosePlan((now.plan + step + tabs.length) % tabs.length);
    tabs[now.plan].focus();
  });
  const mark = () => tabs.forEach((tab, index) => {
    tab.setAttribute("aria-selected", String(index === now.plan));
    tab.tabIndex = index === now.plan ? 0 : -1;
  });
  when("plan", mark);
  mark();
  return list;
}

function sentence(of) {
  const better = gain(of);
  const against = better === null ? ""
    : better > 1.005 ? `, ${times(better)} better than data parallelism`
    : better > 0.995 ? ", as good as data parallelism" : `, ${times(1 / better)} worse than data parallelism`;
  const on = `${count(of.num_devices)} × ${shown(of.machine.device, 80)}`;
  return [named(of.model, 80), ` on ${on}: `, el("strong", null, `${cost(of.total_cost, of)} a step`),
    `, ${of.certificate}${against}`];
}

function facts(of) {
  const { memory, search } = of;
  const capacity = memory.limit_bytes || of.machine.memory_bytes;
  const given = Object.entries(of.arguments).map(([name, value]) => `${shown(name, 40)} ${shown(value, 40)}`).join(", ");
  const types = (of.precision || "float32") === "float32" ? "" : `, in ${shown(of.precision, 40)}`;
  const proof = of.exact ? `nothing${of.scope} is cheaper` : `nothing costs less than ${cost(of.lower_bound, of)}`;
  return [
    ["Cost of a step", cost(of.total_cost, of), `under the ${shown(of.cost_model, 40)} cost model${types}; ${proof}`],
    ["Data parallelism", cost(of.baselines.data_parallel ?? NaN, of), gain(of) === null ? "" : Math.abs(gain(of) - 1) < 0.005 ? "as good as this plan" : `${times(gain(of))} this plan`],
    ["Memory of a device", el("span", { class: memory.total_bytes > capacity ? "bad" : null }, bytes(memory.total_bytes)),
      !capacity ? "" : `${hasStages(of) ? "in the stage that needs most, " : ""}${percent(memory.total_bytes / capacity, 0)} of ${bytes(capacity)}${memory.total_bytes > capacity ? ": does not fit" : ""}`],
    ["Moved in a step", bytes(of.moved_bytes), of.moved_are],
    of.stages && ["Step", `${count(of.micro_batches)} micro-batch${of.micro_batches === 1 ? "" : "es"}`, throughStages(of)],
    ["Search", duration(search.time_s), of.stages ? "" : `${shown(search.ordering, 40)}, largest dependent set ${search.largest_dependent_set}`],
    ["Layers", count(of.layers.length), given],
  ].filter(Boolean);
}

function throughStages(of) {
  if (of.num_groups === 1) return "";
  return `through ${count(of.num_groups)} stages of ${counted(of.num_devices / of.num_groups, "device")} (${shown(of.schedule, 40)})`;
}

// What the parts are of, where that is not plain: they add up to a step.
function partsNote(of) {
  const notes = [
    hasStages(of) && "Means over the devices of all stages.",
    of.overlapped > 0 && `Besides, ${cost(of.overlapped, of)} of communication overlaps with compute and takes no time of its own.`,
  ].filter(Boolean);
  return notes.length ? el("p", { class: "note" }, notes.join(" ")) : null;
}

function showSummary() {
  const of = plan();
  const tiles = facts(of).map(([name, value, note]) => el("div", { class: "fact" },
    el("dt", null, name), el("dd", null, el("b", null, value), note ? el("span", null, note) : null)));
  const parts = of.step_parts;
  const show = (value) => cost(value, of);
  fill(byId("summary"),
    el("h1", null, sentence(of)),
    el("dl", { class: "facts" }, tiles),
    el("div", { class: "where" }, stackedBar(parts, of.total_cost, show), partKey(parts, of.total_cost, show), partsNote(of)),
  );
}
