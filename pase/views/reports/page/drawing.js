// A drawing as the graph's painter needs it: where each layer is, how wide each edge, what is under a point.

const THINNEST = 1.2;
const WIDEST = 7;

const drawings = new Map();

/** Return the drawing that is shown, with what follows from it; made once. */
function drawing() {
  const key = `${now.plan} ${now.unfolded}`;
  if (!drawings.has(key)) drawings.set(key, prepared(plan(), now.unfolded ? plan().drawings.full : plan().drawings.folded));
  return drawings.get(key);
}

function prepared(of, raw) {
  const at = new Int32Array(of.layers.length).fill(-1);
  raw.vertices.forEach((vertex, index) => {
    for (const member of vertex.members || [vertex.layer]) at[member] = index;
    at[vertex.layer] = index;
  });
  const most = Math.max(1, ...chunked(of.edges.filter((edge) => !edge.is_weight).map((edge) => edge.forward_bytes + edge.backward_bytes)));
  const dearest = Math.max(1e-300, ...chunked(of.layers.map(layerCost)));
  const vertices = raw.vertices.map((vertex) => ({
    ...vertex, left: vertex.x - vertex.w / 2, top: vertex.y - vertex.h / 2, share: layerCost(of.layers[vertex.layer]) / dearest,
  }));
  const edges = raw.edges.map((edge) => preparedEdge(edge, of, at, most));
  const box = bounds(vertices, edges, raw.blocks || []);
  const beside = vertices.map(() => []);
  edges.forEach((edge, index) => {
    if (edge.from >= 0) beside[edge.from].push(index);
    if (edge.to >= 0 && edge.to !== edge.from) beside[edge.to].push(index);
  });
  return { vertices, edges, blocks: raw.blocks || [], ...box, at, beside, most };
}

// What the drawing covers: frames and edges may reach beyond the boxes.
function bounds(vertices, edges, blocks) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  const take = (l, t, r, b) => [left, top, right, bottom] = [Math.min(left, l), Math.min(top, t), Math.max(right, r), Math.max(bottom, b)];
  for (const one of vertices) take(one.left, one.top, one.left + one.w, one.top + one.h);
  for (const one of edges) take(one.left, one.top, one.right, one.bottom);
  for (const { x, y, w, h } of blocks) take(x, y - 14, x + w, y + h);
  if (left > right) return { left: 0, top: 0, width: 1, height: 1 };
  return { left: left - 6, top: top - 6, width: right - left + 12, height: bottom - top + 12 };
}

// Math.max takes no argument list of any length; the largest of each thousand does.
function chunked(values) {
  const largest = [];
  for (let i = 0; i < values.length; i += 1000) largest.push(Math.max(...values.slice(i, i + 1000)));
  return largest;
}

function preparedEdge(edge, of, at, most) {
  const members = edge.edges.map((number) => of.edges[number]);
  const [forward, backward] = ["forward_bytes", "backward_bytes"].map((key) => Math.max(0, ...members.map((one) => one[key])));
  const xs = edge.points.map(([x]) => x);
  const ys = edge.points.map(([, y]) => y);
  return {
    ...edge, forward, backward, members,
    from: members.length ? at[members[0].from] : -1,
    to: members.length ? at[members[0].to] : -1,
    width: edgeWidth(forward + backward, most),
    left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys),
  };
}

/** Return how wide an edge is drawn that moves so many bytes, when the largest moves `most`. */
function edgeWidth(size, most) {
  return size > 0 ? THINNEST + (WIDEST - THINNEST) * Math.sqrt(Math.min(1, size / most)) : THINNEST;
}

/** Return an edge as an SVG path: straight pieces with rounded corners. */
function edgePath(points) {
  const at = (i) => `${round(points[i][0])} ${round(points[i][1])}`;
  let path = `M${at(0)}`;
  for (let i = 1; i < points.length - 1; i++) {
    const [before, here, after] = [points[i - 1], points[i], points[i + 1]];
    const reach = Math.min(14, distance(before, here) / 2, distance(here, after) / 2);
    path += `L${towards(here, before, reach)}Q${at(i)} ${towards(here, after, reach)}`;
  }
  return points.length > 1 ? `${path}L${at(points.length - 1)}` : path;
}

function towards(from, to, reach) {
  const part = reach / (distance(from, to) || 1);
  return `${round(from[0] + (to[0] - from[0]) * part)} ${round(from[1] + (to[1] - from[1]) * part)}`;
}

function distance([ax, ay], [bx, by]) {
  return Math.hypot(bx - ax, by - ay);
}

function round(value) {
  return Math.round(value * 10) / 10;
}

/** Return the vertex at a point of the drawing, or -1. */
function vertexAt(x, y) {
  return drawing().vertices.findIndex(({ left, top, w, h }) => x >= left && x <= left + w && y >= top && y <= top + h);
}

/** Return the edge nearest to a point and within reach of it, or -1. */
function edgeAt(x, y, reach) {
  let [nearest, best] = [-1, reach];
  drawing().edges.forEach((edge, index) => {
    if (x < edge.left - reach || x > edge.right + reach || y < edge.top - reach || y > edge.bottom + reach) return;
    for (let i = 1; i < edge.points.length; i++) {
      const away = distanceTo(edge.points[i - 1], edge.points[i], x, y) - edge.width / 2;
      if (away < best) [nearest, best] = [index, away];
    }
  });
  return nearest;
}

function distanceTo([ax, ay], [bx, by], x, y) {
  const [dx, dy] = [bx - ax, by - ay];
  const part = Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(x - ax - part * dx, y - ay - part * dy);
}
