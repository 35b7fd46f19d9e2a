// The parts of the panel, from the data of one layer.

const LISTED_MEMBERS = 6;
const LISTED_TENSORS = 12;
const LISTED_NEIGHBOURS = 10;

function standsFor(index) {
  const of = drawing();
  const vertex = of.vertices[of.at[index]];
  const others = (vertex ? vertex.members || [] : []).filter((member) => member !== index);
  if (!others.length) return null;
  const links = others.slice(0, LISTED_MEMBERS).map((member) => [layerLink(member, 30), " "]);
  const more = others.length - LISTED_MEMBERS;
  return el("p", { class: "note" }, `One of ${count(others.length + 1)} equal layers that are drawn once: `, links,
    more > 0 ? `and ${count(more)} more` : null);
}

function whySection(of, layer) {
  const note = layer.why ? "" : of.why_note || "";
  if (!layer.why && !note) return null;
  const said = layer.why && layer.why_of && layer.why_of !== layer.name ? `Found for ${shown(layer.why_of, 60)}, which this repeats.` : note;
  return panelPart("Why",
    layer.why ? el("p", { class: "why" }, shown(layer.why, 4000)) : null,
    said ? el("p", { class: "note" }, shown(said, 400)) : null);
}

function costSection(of, layer) {
  const whole = layerCost(layer);
  const most = Math.max(...layer.costs, 0);
  const rows = of.cost_parts.map((name, part) => (layer.costs[part] > 0) && el("tr", null,
    el("th", { scope: "row" }, shown(name, 40)),
    el("td", { class: "number" }, cost(layer.costs[part], of)),
    el("td", { class: "wide" }, bar(layer.costs[part], most, part))));
  return panelPart("Cost",
    el("p", null, el("b", null, cost(whole, of)), ` a step${hasStages(of) ? " on the devices of its stage" : ""}, ${percent(layer.share)} of ${hasStages(of) ? "the time of all devices" : "all"}`,
      layer.overlapped > 0 ? `; ${cost(layer.overlapped, of)} more overlaps with compute` : null),
    whole > 0 ? el("table", { class: "bars" }, el("tbody", null, rows)) : null,
    el("p", null, el("b", null, bytes(layer.memory_bytes)), " of memory on each device",
      layer.moved_bytes === null ? null : ["; ", el("b", null, bytes(layer.moved_bytes)), ` moved within the layer, ${shown(of.moved_are, 80)}`]),
    layer.parts && layer.parts.length ? partsTable(of, layer) : null);
}

function partsTable(of, layer) {
  const whole = layer.parts.reduce((sum, part) => sum + part.cost, 0);
  const number = (title) => ({ title, isNumber: true });
  const overlaps = layer.parts.some((part) => part.overlapped > 0);
  return asTable(() => table("What the layer itself does, without its edges",
    [{ title: "part" }, number("cost"), ...(overlaps ? [number("of it overlapped")] : []), number("share of these"), number("bytes of a device"), number("devices")],
    layer.parts.map((part) => [shown(part.name, 80), cost(part.cost, of), ...(overlaps ? [cost(part.overlapped, of)] : []), whole > 0 ? percent(part.cost / whole) : "–",
      part.bytes ? bytes(part.bytes) : "–", part.group > 1 ? count(part.group) : "–"])), "In detail");
}

function runnerUpSection(of, layer) {
  const next = layer.runner_up;
  if (!next) return layer.num_configurations === 1 ? panelPart("Runner-up", el("p", null, "It has no other configuration.")) : null;
  const product = next.splits.reduce((all, one) => all * one, 1);
  const replicas = Math.max(1, Math.floor(of.num_devices / (of.num_groups || 1) / product));
  // A mode is named where either of the two has another than the usual one.
  const modes = [
    next.state !== layer.state ? next.state : next.state !== "replicated" && next.state,
    next.is_recomputed ? "recomputed" : layer.is_recomputed && "kept",
  ].filter(Boolean).map((mode) => ` ${shown(mode, 20)}`).join("");
  const bound = next.exact ? "" : "at most ";
  const difference = next.is_tie ? "costs the same: a tie"
    : `costs ${bound}${cost(next.difference, of)} more a step (+${percent(next.relative, next.relative < 0.01 ? 2 : 1)} in all)`;
  const others = next.changes > 0 ? `, with ${counted(next.changes, "other layer")} configured anew` : "";
  return panelPart("Runner-up",
    el("p", null, el("b", { class: "config" }, configuration(layer, next.splits, replicas) + modes), ` ${difference}${others}.`),
    el("p", { class: "note" }, `The best of the other ${counted(layer.num_configurations - 1, "configuration")} of this layer, all others free to change.`));
}

function spaceSection(of, layer) {
  const rows = layer.dims.map(([name, extent], i) => {
    const split = layer.splits[i];
    return el("tr", { class: split > 1 ? "is-split" : null },
      el("th", { scope: "row" }, named(name, 40)), el("td", { class: "number" }, count(extent)),
      el("td", { class: "number" }, split > 1 ? `÷ ${count(split)}` : "–"),
      el("td", { class: "number" }, count(Math.ceil(extent / split))));
  });
  const part = (of.micro_batches || 1) > 1 ? el("p", { class: "note" }, `Of one of ${count(of.micro_batches)} micro-batches.`) : null;
  const replicas = layer.replicas > 1 ? el("p", { class: "note" }, `Every part is on ${count(layer.replicas)} devices.`) : null;
  return panelPart("Iteration space", el("table", null,
    el("thead", null, el("tr", null, ["dim", "extent", "split", "a device's"].map((title, i) => el("th", { scope: "col", class: i ? "number" : null }, title)))),
    el("tbody", null, rows)), part, replicas);
}

function tensorSection(of, layer) {
  if (!layer.tensors.length) return null;
  const figures = layer.tensors.slice(0, LISTED_TENSORS).map((tensor) => tensorFigure(of, layer, tensor));
  const more = layer.tensors.length - LISTED_TENSORS;
  return panelPart("How its tensors lie over the devices", figures,
    more > 0 ? el("p", { class: "note" }, `and ${counted(more, "more tensor")}`) : null,
    el("p", { class: "note" }, "Numbers are devices: 0 +3 is device 0 and three more. Cells of one colour begin with the same device."));
}

function neighbourSection(of, index) {
  const { into, out } = neighbours(index);
  const item = ([edge, other], arrow) => el("li", null, `${arrow} `, layerLink(other, 40),
    edge.tensor ? el("span", { class: "role" }, `${shown(edge.tensor, 30)}${edge.is_weight ? " (shared weight)" : ""}`) : null,
    el("span", { class: "amount" }, edge.forward_bytes + edge.backward_bytes > 0
      ? `${bytes(edge.forward_bytes)} + ${bytes(edge.backward_bytes)}` : "nothing moves",
    edge.cost > 0 ? ` · ${cost(edge.cost, of)}` : null));
  const items = [...into.map((one) => [one, "from"]), ...out.map((one) => [one, "to"])].map(([one, arrow]) => item(one, arrow));
  if (!items.length) return null;
  const rest = items.slice(LISTED_NEIGHBOURS);
  return panelPart("Neighbours", el("ul", { class: "neighbours" }, items.slice(0, LISTED_NEIGHBOURS)),
    rest.length ? el("details", null, el("summary", null, `${count(rest.length)} more`), el("ul", { class: "neighbours" }, rest)) : null,
    el("p", { class: "note" }, `Bytes of a step, forward + backward, ${shown(of.moved_are, 80)}.`));
}
