// What the colours and widths mean; its colours are buttons that show only the layers which they stand for.

function startLegend() {
  when("plan", showLegend);
  when("classes", markLegend);
  when("drawing", showLegend);
  when("drawing", showUnfold);
  when("plan", showUnfold);
  byId("unfold").addEventListener("click", () => unfold(!now.unfolded));
  showLegend();
  showUnfold();
}

function showLegend() {
  const of = plan();
  const members = of.split_classes.map(() => 0);
  for (const layer of of.layers) members[layer.class] += 1;
  const items = of.split_classes.map((one, index) => members[index] > 0 && button([
    el("span", { class: "swatch", style: { background: `var(--class-${index})` } }),
    named(className(index), 40), el("span", { class: "members" }, count(members[index])),
  ], () => toggleClass(index), { class: "class", "data-class": index, "aria-pressed": "false", title: `Show only layers of which this is split: ${className(index)}` }));
  fill(byId("legend"),
    el("div", { role: "group", "aria-label": "What is split; press to show only those layers", class: "classes" },
      el("span", { class: "legend-title" }, "Split:"), items),
    widthKey());
  markLegend();
}

function widthKey() {
  const { most } = drawing();
  if (most <= 1) return el("div", { class: "widths" }, "No bytes move along edges");
  const line = (size, className, text) => [
    svg("svg", { width: 26, height: 10, viewBox: "0 0 26 10", "aria-hidden": "true" },
      svg("path", { class: `edge ${className}`, d: "M1 5H25", "stroke-width": edgeWidth(size, most) })),
    el("span", null, text)];
  return el("div", { class: "widths" }, el("span", { class: "legend-title" }, `Moved along an edge in a step, ${shown(plan().moved_are, 80)}:`),
    line(0, "still", "0 B"), line(most / 8, "", bytes(most / 8)), line(most, "", bytes(most)),
    drawing().edges.some((edge) => edge.back) ? [line(0, "back", "to the next repeat")] : null);
}

function toggleClass(index) {
  if (!now.classes.delete(index)) now.classes.add(index);
  tell("classes");
}

function markLegend() {
  for (const item of byId("legend").querySelectorAll(".class")) {
    item.setAttribute("aria-pressed", String(now.classes.has(Number(item.dataset.class))));
  }
}

function showUnfold() {
  const item = byId("unfold");
  item.hidden = !folds();
  item.setAttribute("aria-pressed", String(now.unfolded));
  item.textContent = now.unfolded ? "Fold repeats" : `Unfold all ${count(plan().layers.length)} layers`;
}
