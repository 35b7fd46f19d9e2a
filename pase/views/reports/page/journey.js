// The graph from the keyboard: arrows walk along edges, Enter opens, and everything is said aloud.

function startJourney() {
  now.cursor = -1;
  const box = byId("view");
  const keys = {
    ArrowDown: () => walk(nextAlong("from", "to")),
    ArrowUp: () => walk(nextAlong("to", "from")),
    ArrowRight: () => walk(nextBeside(1)),
    ArrowLeft: () => walk(nextBeside(-1)),
    Home: () => walk(extreme(-1)),
    End: () => walk(extreme(1)),
    Enter: open,
    " ": open,
    "+": () => zoomBy(1.4),
    "=": () => zoomBy(1.4),
    "-": () => zoomBy(1 / 1.4),
    0: fit,
    u: () => folds() && unfold(!now.unfolded),
  };
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  box.addEventListener("focus", () => {
    if (now.cursor < 0 && box.matches(":focus-visible")) walk(start());
  });
  when("layer", () => {
    if (now.layer === null) return;
    now.cursor = drawing().at[now.layer];
    if (now.from === "search") centre(now.cursor);
    else reveal(now.cursor);
    sayCursor();
  });
  when("plan", () => renew(true));
  when("drawing", () => renew(false));
}

// After another drawing: the same layer, if one is selected, or its beginning.
function renew(isOtherPlan) {
  now.cursor = now.layer === null ? -1 : drawing().at[now.layer];
  if (now.cursor >= 0) centre(now.cursor, false);
  else {
    view.untouched = true;
    firstView();
  }
  if (isOtherPlan) byId("said").textContent = shown(plan().name, 80);
  tell("cursor");
}

function open() {
  if (now.cursor < 0) return walk(start());
  chooseLayer(drawing().vertices[now.cursor].layer, "keys");
  return byId("panel").focus({ preventScroll: true });
}

function start() {
  return now.layer !== null ? drawing().at[now.layer] : extreme(-1);
}

function extreme(sign) {
  return best((one) => sign * one.y * 1e4 - one.x);
}

// The vertex with the largest score; -1 where none has any.
function best(score) {
  let [found, most] = [-1, -Infinity];
  drawing().vertices.forEach((one, index) => {
    const value = score(one, index);
    if (value !== null && value > most) [found, most] = [index, value];
  });
  return found;
}

function nextAlong(here, there) {
  if (now.cursor < 0) return start();
  const of = drawing();
  const ends = of.beside[now.cursor].map((index) => of.edges[index]).filter((edge) => edge[here] === now.cursor && !edge.back).map((edge) => edge[there]);
  const from = of.vertices[now.cursor];
  const near = new Set(ends.filter((end) => end >= 0 && end !== now.cursor));
  return best((one, index) => (near.has(index) ? -Math.abs(one.x - from.x) - Math.abs(one.y - from.y) : null));
}

function nextBeside(sign) {
  if (now.cursor < 0) return start();
  const from = drawing().vertices[now.cursor];
  return best((one) => {
    const [across, down] = [sign * (one.x - from.x), Math.abs(one.y - from.y)];
    return across > 1 && down < (one.h + from.h) / 2 ? -across - down : null;
  });
}

function walk(vertex) {
  if (vertex < 0) return;
  now.cursor = vertex;
  reveal(vertex);
  tell("cursor");
  sayCursor();
}

function sayCursor() {
  const one = drawing().vertices[now.cursor];
  if (one) byId("said").textContent = spoken(one);
}

/** Unfold the repeats and look at the block that was there. */
function unfoldAt(block) {
  const { x, y, w, h } = drawing().blocks[block];
  const inside = drawing().vertices.filter((one) => one.x > x && one.x < x + w && one.y > y && one.y < y + h);
  const first = inside.reduce((upper, one) => (upper && upper.y <= one.y ? upper : one), null);
  unfold(true);
  if (!first) return;
  now.cursor = drawing().at[first.layer];
  centre(now.cursor, false);
  tell("cursor");
  byId("view").focus({ preventScroll: true });
}
