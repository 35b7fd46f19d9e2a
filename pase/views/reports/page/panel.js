// The panel beside the graph: all about one layer, or which layers cost most while none is selected.

const LISTED_COSTLIEST = 8;

function startPanel() {
  when("layer", showPanel);
  when("plan", showPanel);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && now.layer !== null && !byId("help").open) closePanel();
  });
  showPanel();
}

function closePanel() {
  const inside = byId("panel").contains(document.activeElement);
  chooseLayer(null, "keys");
  if (inside) byId("view").focus({ preventScroll: true });
}

function showPanel() {
  const panel = byId("panel");
  const isOpen = now.layer !== null;
  panel.classList.toggle("open", isOpen);
  document.body.classList.toggle("panel-open", isOpen);
  fill(panel, isOpen ? layerPanel(plan(), now.layer) : costliest(plan()));
  panel.setAttribute("aria-label", isOpen ? `Layer ${shown(plan().layers[now.layer].name, 80)}` : "Costliest layers");
  panel.scrollTop = 0;
  if (isOpen && now.from !== "keys") bringGraphIntoSight();
}

// What was chosen far down the page is shown up there; on a phone the graph has the upper part to itself.
function bringGraphIntoSight() {
  const { top, bottom } = byId("canvas").getBoundingClientRect();
  if (NARROW.matches) byId("canvas").scrollIntoView({ block: "start" });
  else if (bottom < 120 || top > innerHeight - 120) byId("graph").scrollIntoView({ block: "start" });
}

// Repeated layers count together, as they are drawn once.
function costliest(of) {
  const sums = of.drawings.folded.vertices.map(({ layer, members = [layer] }) =>
    [summed(of, members, layerCost), layer, members.length, summed(of, members, (one) => one.share)]);
  const order = sums.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
  const most = order.length ? order[0][0] : 0;
  const items = order.slice(0, LISTED_COSTLIEST).map(([value, index, number, share]) => el("li", null,
    el("span", null, layerLink(index, 40), number > 1 ? ` ×${count(number)}` : null),
    el("span", { class: "config" }, configuration(of.layers[index])),
    el("span", { class: "amount" }, `${cost(value, of)} · ${percent(share)}`), bar(value, most)));
  return [
    el("h3", null, "Costliest layers"),
    el("ol", { class: "costliest" }, items),
    hasStages(of) ? el("p", { class: "note" }, "Costs of a step on the devices of a layer's stage; shares of the time of all devices.") : null,
    el("p", { class: "note" }, "Select a layer in the graph to see its configuration, why it was chosen, and how its tensors lie over the devices."),
  ];
}

function layerPanel(of, index) {
  const layer = of.layers[index];
  return [
    el("div", { class: "panel-head" },
      el("h3", null, named(layer.name, 12000)),
      button("×", closePanel, { class: "close", "aria-label": "Close", "aria-keyshortcuts": "Escape" })),
    el("p", { class: "what" }, el("span", { class: "kind" }, shown(layer.kind, 60)),
      el("span", { class: "swatch", style: { background: `var(--class-${layer.class})` } }),
      el("b", { class: "config" }, configuration(layer)), modes(of, layer) ? el("span", { class: "modes" }, ` ${modes(of, layer)}`) : null),
    standsFor(index),
    whySection(of, layer),
    costSection(of, layer),
    runnerUpSection(of, layer),
    choicesSection(of, index),
    spaceSection(of, layer),
    tensorSection(of, layer),
    neighbourSection(of, index),
  ];
}

function panelPart(title, ...content) {
  return el("section", { class: "part" }, el("h4", null, title), content);
}
