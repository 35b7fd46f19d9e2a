// What a layer's other configurations would cost in the whole strategy, and what else would change with each.

function choicesSection(of, index) {
  if (!of.choices) return of.choices_note ? panelPart("Other configurations", el("p", { class: "note" }, shown(of.choices_note, 400))) : null;
  const { splits, changes, lists, layers } = of.choices;
  if (layers[index] === null) return panelPart("Other configurations", el("p", { class: "note" }, `Not reached: ${shown(of.choices_note, 400)}`));
  const list = lists[layers[index]];
  const layer = of.layers[index];
  const items = list.entries.map(([row, more, changed], i) => el("li", null, i === 0
    ? el("p", null, el("b", { class: "config" }, configured(of, layer, splits[row])), " as it is")
    : asTable(() => changesTable(of, index, row, changes[changed]),
      [el("b", { class: "config" }, configured(of, layer, splits[row])), ` ${dearer(of, more)}`])));
  const left = list.num_configurations - items.length;
  return panelPart("Other configurations",
    el("ol", { class: "others" }, items),
    left > 0 ? el("p", { class: "note" }, `The other ${counted(left, "configuration")} cost at least ${dearer(of, list.beyond)}.`) : null,
    el("p", { class: "note" }, "The least that a step costs with each, all other layers free to change. Open one to see which would."),
    of.memory.limit_bytes ? el("p", { class: "note" }, "Some may need more of a device's memory than the limit of the plan.") : null);
}

function configured(of, layer, splits) {
  const product = splits.reduce((all, one) => all * one, 1);
  return configuration(layer, splits, Math.max(1, Math.floor(of.num_devices / product)));
}

function dearer(of, more) {
  return more > 0 ? `+${percent(more, more < 0.01 ? 3 : 1)} · +${cost(more * of.total_cost, of)}` : "the same cost: a tie";
}

// changed: [layer beside this one, its row of splits, …]
function changesTable(of, index, row, changed) {
  if (!changed.length) return el("p", { class: "note" }, "No other layer would change.");
  const rows = [];
  for (let i = 0; i < changed.length; i += 2) {
    const other = of.layers[index + changed[i]];
    rows.push([layerLink(index + changed[i], 40), configuration(other), configured(of, other, of.choices.splits[changed[i + 1]])]);
  }
  const from = configured(of, of.layers[index], of.choices.splits[row]);
  return table(`With ${from}, ${counted(rows.length, "other layer")} would change`, [{ title: "layer" }, { title: "from" }, { title: "to" }], rows);
}
