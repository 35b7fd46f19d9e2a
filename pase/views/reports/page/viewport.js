// Which part of the drawing is looked at, and how large: screen = drawing × k + (x, y).

const LARGEST = 3;
const READABLE = 0.72;
const GLIDE_MS = 160;
const NARROW = matchMedia("(max-width: 46rem)");
const SHEET = 0.56;

const view = { x: 0, y: 0, k: 1, width: 0, height: 0, untouched: true, gliding: 0 };

/** Return the scale at which the whole drawing is seen. */
function fittingScale() {
  const { width, height } = drawing();
  return Math.min((view.width - 24) / Math.max(width, 1), (view.height - 24) / Math.max(height, 1), 1.4);
}

function smallestScale() {
  return Math.min(0.25, fittingScale() * 0.8);
}

/** Show the whole drawing. */
function fit() {
  const k = fittingScale();
  const { left, top, width, height } = drawing();
  lookAt(view.width / 2 - (left + width / 2) * k, view.height / 2 - (top + height / 2) * k, k);
}

/** Show the whole drawing where it can be read then, otherwise its beginning. */
function firstView() {
  const whole = fittingScale();
  if (whole >= READABLE) return fit();
  // The overview stands on the right then.
  const of = drawing();
  const room = NARROW.matches ? view.width : view.width - overviewSize(of).width - 20;
  const wide = (room - 24) / of.width;
  const k = Math.min(1, Math.max(wide, READABLE));
  const highest = of.vertices.reduce((best, one) => (one.y < best.y ? one : best), of.vertices[0]);
  const middle = wide >= k || !highest ? of.left + of.width / 2 : highest.x;
  return lookAt(room / 2 - middle * k, 14 - of.top * k, k);
}

/** Look at some part at once. */
function lookAt(x, y, k) {
  cancelAnimationFrame(view.gliding);
  // Something of the drawing always stays in sight.
  const { left, top, width, height } = drawing();
  const [edgeX, edgeY] = [Math.min(80, view.width / 3), Math.min(80, view.height / 3)];
  view.k = Math.max(smallestScale(), Math.min(LARGEST, k));
  view.x = Math.max(edgeX - (left + width) * view.k, Math.min(view.width - edgeX - left * view.k, x));
  view.y = Math.max(edgeY - (top + height) * view.k, Math.min(view.height - edgeY - top * view.k, y));
  tell("view");
}

/** Move by so many pixels. */
function panBy(dx, dy) {
  view.untouched = false;
  lookAt(view.x + dx, view.y + dy, view.k);
}

/** Zoom by a factor; the point (x, y) of the screen stays where it is. */
function zoomBy(factor, x = view.width / 2, y = view.height / 2) {
  view.untouched = false;
  const k = Math.max(smallestScale(), Math.min(LARGEST, view.k * factor));
  lookAt(x - ((x - view.x) * k) / view.k, y - ((y - view.y) * k) / view.k, k);
}

/** Bring a vertex into the middle, at a scale at which it can be read. */
function centre(vertex, glides = true) {
  const one = drawing().vertices[vertex];
  if (!one) return;
  view.untouched = false;
  const k = Math.max(view.k, 0.8);
  glide(view.width / 2 - one.x * k, seenHeight() / 2 - one.y * k, k, glides);
}

// On a phone an open panel covers the lower part of the screen.
function seenHeight() {
  if (now.layer === null || !NARROW.matches) return view.height;
  return Math.max(100, Math.min(view.height, innerHeight * (1 - SHEET) - 60));
}

/** Bring a vertex into sight, if it is out of it. */
function reveal(vertex) {
  const one = drawing().vertices[vertex];
  if (!one) return;
  const [left, top] = [one.left * view.k + view.x, one.top * view.k + view.y];
  const inside = left > 8 && top > 8 && left + one.w * view.k < view.width - 8 && top + one.h * view.k < seenHeight() - 8;
  if (!inside || view.k < 0.45) centre(vertex);
}

function glide(x, y, k, glides) {
  cancelAnimationFrame(view.gliding);
  if (!glides || matchMedia("(prefers-reduced-motion: reduce)").matches) return lookAt(x, y, k);
  const from = { ...view };
  const start = performance.now();
  const step = (time) => {
    const part = Math.min(1, Math.max(0, (time - start) / GLIDE_MS));
    const eased = part * (2 - part);
    lookAt(from.x + (x - from.x) * eased, from.y + (y - from.y) * eased, from.k + (k - from.k) * eased);
    if (part < 1) view.gliding = requestAnimationFrame(step);
  };
  view.gliding = requestAnimationFrame(step);
  return undefined;
}

/** Return the part of the drawing that is in sight, with so much more on each side, as a part of it. */
function sight(more = 0) {
  const [w, h] = [view.width / view.k, view.height / view.k];
  const [left, top] = [-view.x / view.k - more * w, -view.y / view.k - more * h];
  return { left, top, right: left + w * (1 + 2 * more), bottom: top + h * (1 + 2 * more) };
}

function startViewport() {
  const box = byId("canvas");
  new ResizeObserver(() => {
    if (PAPER.matches || !box.clientWidth) return;
    const grown = { dx: (box.clientWidth - view.width) / 2, dy: (box.clientHeight - view.height) / 2 };
    [view.width, view.height] = [box.clientWidth, box.clientHeight];
    if (view.untouched) firstView();
    else lookAt(view.x + grown.dx, view.y + grown.dy, view.k);
  }).observe(box);
  [view.width, view.height] = [box.clientWidth, box.clientHeight];
  byId("zoom-in").addEventListener("click", () => zoomBy(1.4));
  byId("zoom-out").addEventListener("click", () => zoomBy(1 / 1.4));
  byId("fit").addEventListener("click", () => {
    fit();
    view.untouched = true;
  });
}
