// Mouse and fingers on the graph: drag, wheel, pinch, click, and what is said under the pointer.

const CLICK = 5;

function startPointer() {
  const box = byId("view");
  const pointers = new Map();
  let moved = 0;
  const at = (event) => {
    const { left, top } = box.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };

  box.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.target.closest(".block-button")) return;
    pointers.set(event.pointerId, at(event));
    moved = 0;
  });
  box.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return pointers.size ? undefined : hover(at(event));
    const [before, here] = [pointers.get(event.pointerId), at(event)];
    moved += distance(before, here);
    if (moved < CLICK) return undefined;
    box.setPointerCapture(event.pointerId);
    box.classList.add("dragging");
    hideTip();
    const others = [...pointers].filter(([id]) => id !== event.pointerId);
    pointers.set(event.pointerId, here);
    if (!others.length) return panBy(here[0] - before[0], here[1] - before[1]);
    const [, other] = others[0];
    const middle = [(here[0] + other[0]) / 2, (here[1] + other[1]) / 2];
    panBy((here[0] - before[0]) / 2, (here[1] - before[1]) / 2);
    return zoomBy(distance(here, other) / Math.max(1, distance(before, other)), ...middle);
  });
  const lift = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    box.classList.remove("dragging");
    if (event.type === "pointerup" && moved < CLICK && !pointers.size) click(at(event));
  };
  box.addEventListener("pointerup", lift);
  box.addEventListener("pointercancel", lift);
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("wheel", (event) => {
    // Without Ctrl the wheel belongs to the page, until the graph is clicked: nobody is caught in it.
    if (!event.ctrlKey && !event.metaKey && !box.matches(":focus-within")) return hint("Click the graph, or hold Ctrl, to zoom with the wheel");
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? view.height : 1;
    hideTip();
    return zoomBy(Math.exp(-Math.max(-300, Math.min(300, event.deltaY * unit)) * 0.0018), ...at(event));
  }, { passive: false });
}

function inDrawing([x, y]) {
  return [(x - view.x) / view.k, (y - view.y) / view.k];
}

function click(point) {
  const vertex = vertexAt(...inDrawing(point));
  byId("view").focus({ preventScroll: true });
  now.cursor = vertex;
  chooseLayer(vertex < 0 ? null : drawing().vertices[vertex].layer, "graph");
}

const hover = (() => {
  let last = null;
  const later = onFrame(() => last && showTip(last));
  return (point) => {
    last = point;
    later();
  };
})();

function showTip(point) {
  const here = inDrawing(point);
  const vertex = vertexAt(...here);
  const edge = vertex < 0 ? edgeAt(...here, 7 / view.k) : -1;
  byId("view").classList.toggle("over", vertex >= 0);
  if (vertex < 0 && edge < 0) return hideTip();
  const tip = fill(byId("tip"), vertex >= 0 ? vertexTip(drawing().vertices[vertex]) : edgeTip(drawing().edges[edge]));
  tip.hidden = false;
  const [x, y] = point;
  const left = x + 14 + tip.offsetWidth > view.width ? Math.max(4, x - 14 - tip.offsetWidth) : x + 14;
  const top = y + 14 + tip.offsetHeight > view.height ? Math.max(4, y - 14 - tip.offsetHeight) : y + 14;
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${top}px`);
  return undefined;
}

function hideTip() {
  byId("tip").hidden = true;
}

function vertexTip(vertex) {
  const layer = plan().layers[vertex.layer];
  const all = vertex.count > 1 ? ` ×${vertex.count}` : "";
  return [
    el("b", null, shown(layer.name, 80), all), ` ${shown(layer.kind, 30)}`,
    el("div", null, space(layer)),
    el("div", null, el("b", null, configuration(layer)), ` · ${className(layer.class)}`),
    el("div", null, `${vertex.count > 1 ? "each " : ""}${cost(layerCost(layer))}, ${percent(layer.share)} of all · ${bytes(layer.memory_bytes)} on a device`),
  ];
}

function edgeTip(edge) {
  const [one] = edge.members;
  if (!one) return [];
  const names = [one.from, one.to].map((index) => shown(plan().layers[index].name, 60));
  const more = edge.members.length > 1 ? `, and ${counted(edge.members.length - 1, "more edge")} like it` : "";
  const size = edge.forward + edge.backward > 0
    ? `${bytes(edge.forward)} forward + ${bytes(edge.backward)} backward` : "nothing moves";
  return [el("b", null, `${names[0]} → ${names[1]}`), more, el("div", null, size)];
}

const hint = (() => {
  let timer = 0;
  return (text) => {
    const box = byId("hint");
    box.textContent = text;
    box.hidden = false;
    clearTimeout(timer);
    timer = setTimeout(() => (box.hidden = true), 1600);
  };
})();
