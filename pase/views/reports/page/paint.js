// The graph as SVG. Near: an element for each layer in sight. Far: one path for all layers of a class, which stays
// quick however many there are.

const MANY = 700;
const MARGIN = 0.6;

const painted = { root: null, world: null, groups: {}, drawing: null, far: null, seen: null, nodes: new Map(), lines: new Map() };
const pen = document.createElement("canvas").getContext("2d");

function startPaint() {
  const groups = ["blocks", "edges", "vertices", "buttons", "marks"].map((name) => [name, svg("g", { class: name })]);
  painted.groups = Object.fromEntries(groups);
  painted.world = svg("g", { id: "world" }, groups.map(([, group]) => group));
  painted.root = svg("svg", { class: "graph", role: "group", "aria-label": "Layers" }, painted.world);
  byId("view").append(painted.root);
  const later = onFrame(paint);
  when("view", later);
  when("layer", () => repaint(later));
  when("classes", () => repaint(later));
  when("cursor", () => repaint(later));
  when("hits", () => repaint(later));
}

function repaint(later) {
  painted.stale = true;
  later();
}

/** Bring what is drawn up to date with what is looked at. */
function paint() {
  painted.world.setAttribute("transform", `translate(${round(view.x)} ${round(view.y)}) scale(${view.k})`);
  painted.root.classList.toggle("tiny", view.k < 0.42);
  const shownNow = drawing();
  if (painted.drawing !== shownNow) clear(shownNow);
  const inSight = sight();
  const covered = painted.seen && contains(painted.seen, inSight);
  if (!covered || painted.zoomed !== view.k) see(shownNow);
  if (painted.stale) mark(shownNow);
}

function contains(outer, inner) {
  return outer.left <= inner.left && outer.top <= inner.top && outer.right >= inner.right && outer.bottom >= inner.bottom;
}

function clear(next) {
  painted.drawing = next;
  painted.seen = painted.far = null;
  painted.nodes.clear();
  painted.lines.clear();
  for (const group of Object.values(painted.groups)) group.textContent = "";
  put(painted.groups.blocks, next.blocks.map(blockFrame));
  put(painted.groups.buttons, next.blocks.map(blockButton));
  painted.stale = true;
}

function see(of) {
  const region = sight(MARGIN);
  const vertices = within(of.vertices, region, (one) => [one.left, one.top, one.left + one.w, one.top + one.h]);
  const far = vertices.length > MANY;
  if (far !== painted.far) {
    painted.nodes.clear();
    painted.lines.clear();
    painted.groups.vertices.textContent = painted.groups.edges.textContent = "";
    if (far) paintFar(of, painted.groups);
    painted.far = far;
    painted.stale = true;
  }
  painted.seen = region;
  painted.zoomed = view.k;
  if (far) return;
  keep(painted.nodes, vertices, painted.groups.vertices, (i) => layerBox(of.vertices[i], i));
  const edges = within(of.edges, region, (one) => [one.left, one.top, one.right, one.bottom]);
  keep(painted.lines, edges, painted.groups.edges, (i) => edgeLine(of.edges[i], i));
}

function within(things, region, box) {
  const found = [];
  things.forEach((thing, index) => {
    const [left, top, right, bottom] = box(thing);
    if (right >= region.left && left <= region.right && bottom >= region.top && top <= region.bottom) found.push(index);
  });
  return found;
}

// Elements stay as long as they are in sight.
function keep(elements, wanted, group, make) {
  const set = new Set(wanted);
  for (const [index, element] of elements) {
    if (set.has(index)) continue;
    element.remove();
    elements.delete(index);
  }
  for (const index of wanted) {
    if (elements.has(index)) continue;
    const element = make(index);
    elements.set(index, element);
    group.append(element);
    painted.stale = true;
  }
}

/** Return a layer's box: stripe and tint for what is split, name, configuration, and its share of the cost. */
function layerBox(vertex, index) {
  const layer = plan().layers[vertex.layer];
  const fills = `var(--class-${layer.class}, var(--line))`;
  const size = Math.min(13, vertex.h * (vertex.h < 30 ? 0.5 : 0.32));
  const two = vertex.h >= 30;
  const times = vertex.count > 1 ? ` ×${vertex.count}` : "";
  const room = vertex.w - 18;
  const line = (text, y, name) => svg("text", { class: name, x: round(vertex.left + 12), y: round(y), "font-size": round(name === "config" ? size * 0.88 : size) }, text);
  return svg("g", {
    class: "vertex", id: `vertex-${index}`, "data-layer": vertex.layer, role: "img",
    "aria-label": spoken(vertex), style: { "--own": fills },
  },
    svg("rect", { class: "paper", ...rectangle(vertex), rx: 4 }),
    svg("rect", { class: "tint", ...rectangle(vertex), rx: 4 }),
    svg("path", { class: "stripe", d: `M${round(vertex.left + 5)} ${round(vertex.top)}v${round(vertex.h)}h-1a4 4 0 0 1 -4 -4v${round(8 - vertex.h)}a4 4 0 0 1 4 -4z` }),
    line(fitted(shown(layer.name, 120), room - measured(times, size), size, true) + times, vertex.y + (two ? -size * 0.38 : size * 0.36), "name"),
    two ? line(fitted(configuration(layer), room, size * 0.88), vertex.y + size * 0.82, "config") : null,
    vertex.share > 0.004 ? svg("rect", {
      class: "share", x: round(vertex.left + 12), y: round(vertex.top + vertex.h - 5), height: 2.5, rx: 1, width: round(Math.max(1, room * vertex.share)),
    }) : null,
  );
}

function rectangle({ left, top, w, h }) {
  return { x: round(left), y: round(top), width: round(w), height: round(h) };
}

/** Return what is said of a vertex to who does not see it. */
function spoken(vertex) {
  const layer = plan().layers[vertex.layer];
  const times = vertex.count > 1 ? `, stands for ${vertex.count} layers` : "";
  return `${shown(layer.name, 80)}, ${shown(layer.kind, 40)}, ${configuration(layer)}, ${cost(layerCost(layer))}${times}`;
}

function measured(text, size, bold = false) {
  pen.font = `${bold ? 600 : 400} 100px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;
  return (pen.measureText(text).width * size) / 100;
}

// As much of a text as there is room for.
function fitted(text, room, size, bold = false) {
  if (measured(text, size, bold) <= room) return text;
  let [least, most] = [0, text.length - 1];
  while (least < most) {
    const half = Math.ceil((least + most) / 2);
    if (measured(shortened(text, half), size, bold) <= room) least = half;
    else most = half - 1;
  }
  return shortened(text, least);
}

// Names differ at their ends as often as at their beginnings, so what goes is the middle.
function shortened(text, length) {
  const tail = Math.floor(length * 0.45);
  return `${text.slice(0, length - tail)}…${tail ? text.slice(-tail) : ""}`;
}

function edgeLine(edge, index) {
  return svg("path", {
    class: `edge${edge.back ? " back" : ""}${edge.forward + edge.backward > 0 ? "" : " still"}`,
    d: edgePath(edge.points), "stroke-width": round(edge.width), "data-edge": index,
  });
}

function blockFrame({ x, y, w, h }) {
  return svg("rect", { class: "frame", x: round(x), y: round(y), width: round(w), height: round(h), rx: 10 });
}

// On the frame's upper left: how often the block is repeated, and what unfolds it.
function blockButton(block, index) {
  const label = `×${block.count} ${now.unfolded ? "fold" : "unfold"}`;
  const width = measured(label, 12, true) + 20;
  const [x, y] = [block.x + 12, block.y - 12];
  const act = () => (now.unfolded ? unfold(false) : unfoldAt(index));
  const press = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    act();
  };
  return svg("g", {
    class: "block-button", role: "button", tabindex: 0, "aria-label": `${label}: layers that repeat as a block`,
    onclick: act, onkeydown: press,
  },
    svg("rect", { x: round(x), y: round(y), width: round(width), height: 24, rx: 12 }),
    svg("text", { x: round(x + 10), y: round(y + 16), "font-size": 12 }, label));
}

// Nothing but paths: an element for each class, and for each of a few widths of edges.
function paintFar(of, groups) {
  const boxes = new Map();
  for (const { layer, left, top, w, h } of of.vertices) {
    const index = plan().layers[layer].class;
    const path = `M${round(left)} ${round(top)}h${round(w)}v${round(h)}h${round(-w)}z`;
    boxes.set(index, (boxes.get(index) || "") + path);
  }
  const lines = new Map();
  for (const edge of of.edges) {
    const width = Math.ceil(edge.width);
    const path = `M${edge.points.map(([x, y]) => `${round(x)} ${round(y)}`).join("L")}`;
    lines.set(width, (lines.get(width) || "") + path);
  }
  put(groups.edges, [...lines].map(([width, d]) => svg("path", { class: "edge", "stroke-width": width, d })));
  put(groups.vertices, [...boxes].map(([index, d]) => svg("path", {
    class: "boxes", "data-class": index, d, style: { fill: `var(--class-${index}, var(--line))` },
  })));
}

// What is selected, found or filtered.
function mark(of) {
  painted.stale = false;
  const chosen = now.layer === null ? -1 : of.at[now.layer];
  for (const [index, element] of painted.nodes) {
    element.classList.toggle("dim", !passes(plan().layers[of.vertices[index].layer]));
    element.classList.toggle("chosen", index === chosen);
  }
  const hot = new Set(chosen < 0 ? [] : of.beside[chosen]);
  for (const [index, element] of painted.lines) {
    element.classList.toggle("hot", hot.has(index));
    const [from, to] = [of.edges[index].from, of.edges[index].to];
    const passed = [from, to].every((end) => end < 0 || passes(plan().layers[of.vertices[end].layer]));
    element.classList.toggle("dim", !passed);
  }
  for (const element of painted.groups.vertices.querySelectorAll(".boxes")) {
    element.classList.toggle("dim", !passes({ class: Number(element.dataset.class) }));
  }
  const rings = [...new Set(foundVertices())].map((index) => ring(of.vertices[index], "hit"));
  if (chosen >= 0) rings.push(ring(of.vertices[chosen], "chosen"));
  if (now.cursor >= 0 && now.cursor !== chosen && of.vertices[now.cursor]) rings.push(ring(of.vertices[now.cursor], "cursor"));
  fill(painted.groups.marks, rings);
}

function ring({ left, top, w, h }, name) {
  const wide = name === "cursor" ? 6 : 3;
  return svg("rect", { class: `ring ${name}`, x: round(left - wide), y: round(top - wide), width: round(w + 2 * wide), height: round(h + 2 * wide), rx: 6 });
}
