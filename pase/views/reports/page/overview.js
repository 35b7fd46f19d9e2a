// The whole drawing in a strip, with a frame round what is in sight; only where not all of it is.

function startOverview() {
  const canvas = byId("overview");
  const later = onFrame(showOverview);
  for (const event of ["view", "drawing", "plan", "theme", "classes"]) when(event, later);
  const go = (event) => {
    if (!(event.buttons & 1)) return;
    const box = canvas.getBoundingClientRect();
    const { left, top, width, height } = drawing();
    const y = top + ((event.clientY - box.top) / box.height) * height;
    const x = left + ((event.clientX - box.left) / box.width) * width;
    view.untouched = false;
    lookAt(fitsAcross() ? view.x : view.width / 2 - x * view.k, view.height / 2 - y * view.k, view.k);
    event.preventDefault();
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    go(event);
  });
  canvas.addEventListener("pointermove", go);
}

function fitsAcross() {
  return drawing().width * view.k <= view.width;
}

// A long strip for long drawings: it need not keep their proportions.
function overviewSize(of) {
  const height = Math.max(60, Math.min(view.height - 24, 320));
  return { height, width: Math.max(36, Math.min(90, (height * of.width) / of.height)) };
}

function showOverview() {
  const of = drawing();
  const seen = sight();
  const hidden = contains(seen, { left: of.left, top: of.top, right: of.left + of.width, bottom: of.top + of.height });
  const [canvas, frame] = [byId("overview"), byId("overview-frame")];
  canvas.hidden = frame.hidden = hidden || of.vertices.length < 2;
  if (canvas.hidden) return;
  const { width, height } = overviewSize(of);
  const key = [now.plan, now.unfolded, isDark(), width, height, ...now.classes].join(" ");
  if (canvas.dataset.key !== key) drawOverview(canvas, of, width, height, key);
  const part = (from, to, size, length) => [Math.max(0, from / size) * length, Math.min(1, to / size) * length];
  const [left, right] = part(seen.left - of.left, seen.right - of.left, of.width, width);
  const [top, bottom] = part(seen.top - of.top, seen.bottom - of.top, of.height, height);
  const place = { right: `${10 + width - right}px`, top: `${10 + top}px`, width: `${Math.max(4, right - left)}px`, height: `${Math.max(4, bottom - top)}px` };
  for (const [name, value] of Object.entries(place)) frame.style.setProperty(name, value);
}

function drawOverview(canvas, of, width, height, key) {
  const sharp = Math.min(2, devicePixelRatio || 1);
  [canvas.width, canvas.height] = [Math.round(width * sharp), Math.round(height * sharp)];
  canvas.style.setProperty("width", `${width}px`);
  canvas.style.setProperty("height", `${height}px`);
  canvas.dataset.key = key;
  const context = canvas.getContext("2d");
  context.scale((width * sharp) / of.width, (height * sharp) / of.height);
  context.translate(-of.left, -of.top);
  const colours = plan().split_classes.map((_, index) => colour(`class-${index}`) || "gray");
  const [leastW, leastH] = [(2 * of.width) / width, of.height / height];
  for (const { layer, left, top, w, h } of of.vertices) {
    const one = plan().layers[layer];
    context.globalAlpha = passes(one) ? 1 : 0.15;
    context.fillStyle = colours[one.class];
    context.fillRect(left, top, Math.max(w, leastW), Math.max(h, leastH));
  }
}
