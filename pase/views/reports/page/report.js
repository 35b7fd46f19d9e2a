// What is shown: the document, which plan and layer are looked at, and who wants to know when that changes.

const report = JSON.parse(byId("pase-data").textContent);

const now = { plan: 0, layer: null, unfolded: false, classes: new Set(), listeners: new Map() };

/** Call a function whenever something of that name happens: plan, layer, drawing, classes, theme. */
function when(event, act) {
  if (!now.listeners.has(event)) now.listeners.set(event, []);
  now.listeners.get(event).push(act);
}

function tell(event) {
  for (const act of now.listeners.get(event) || []) act();
}

/** Return the plan that is looked at. */
function plan() {
  return report.plans[now.plan];
}

/** Look at another plan; its layer of the same name stays selected. */
function choosePlan(index) {
  if (index === now.plan) return;
  const name = now.layer === null ? null : plan().layers[now.layer].name;
  now.plan = index;
  const same = plan().layers.findIndex((layer) => layer.name === name);
  now.layer = same < 0 ? null : same;
  now.classes.clear();
  if (!folds()) now.unfolded = false;
  tell("plan");
}

/** Select a layer, or none; `from` says where that was asked for: graph, keys, link or chart. */
function chooseLayer(layer, from) {
  now.layer = layer;
  now.from = from;
  tell("layer");
}

/** Show every layer by itself, or repeated blocks once. */
function unfold(unfolded) {
  if (now.unfolded === unfolded) return;
  now.unfolded = unfolded;
  tell("drawing");
}

/** Return whether the plan's graph has repeated blocks that are drawn once. */
function folds() {
  return plan().drawings.folded.vertices.length < plan().drawings.full.vertices.length;
}

/** Return whether a layer passes the legend's filter. */
function passes(layer) {
  return now.classes.size === 0 || now.classes.has(layer.class);
}

/** Return a cost in the plan's unit. */
function cost(value, of = plan()) {
  return quantity(value, of.cost_unit);
}

/** Return what a layer pays by itself and on the edges into it: what overlaps with compute is not in it. */
function layerCost(layer) {
  return layer.costs.reduce((sum, one) => sum + one, 0);
}

/** Return a configuration as the command line writes it: "b=16 n=2 ×4", "not split ×32". */
function configuration(layer, splits = layer.splits, replicas = layer.replicas) {
  const parts = layer.dims.flatMap(([name], i) => (splits[i] > 1 ? [`${shown(name, 24)}=${splits[i]}`] : []));
  return `${parts.join(" ") || "not split"}${replicas > 1 ? ` ×${replicas}` : ""}`;
}

/** Return what a layer does besides being split: "stage 1 · zero3 · recomputed"; nothing where no layer does. */
function modes(of, layer) {
  const found = [hasStages(of) && `stage ${layer.stage}`, layer.state && layer.state !== "replicated" && layer.state, layer.is_recomputed && "recomputed"];
  return found.filter(Boolean).join(" · ");
}

/** Return an iteration space: "b=128 n=64". */
function space(layer) {
  return layer.dims.map(([name, extent]) => `${shown(name, 24)}=${extent}`).join(" ");
}

/** Return how a class of splits is called. */
function className(index) {
  return shown(plan().split_classes[index].label || "not split", 60);
}

/** Return the edges into a layer and out of it: [edge, layer at its other end]. */
function neighbours(index) {
  const into = plan().edges.filter((edge) => edge.to === index).map((edge) => [edge, edge.from]);
  const out = plan().edges.filter((edge) => edge.from === index).map((edge) => [edge, edge.to]);
  return { into, out };
}

/** Return whether groups of devices have stages of their own, so that a layer runs on some of the devices. */
function hasStages(of) {
  return (of.num_groups || 1) > 1;
}

/** Return the title of iteration spaces: a layer computes one micro-batch at a time. */
function spaceTitle(of) {
  return (of.micro_batches || 1) > 1 ? "iteration space of a micro-batch" : "iteration space";
}

/** Return how many times as much data parallelism costs; null if that is not known. */
function gain(of) {
  const other = of.baselines.data_parallel;
  return other > 0 && of.total_cost > 0 ? other / of.total_cost : null;
}
