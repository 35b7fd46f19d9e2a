// Printing: light colours, every table open, and the graph cut into columns that fill the page.

const PAGE = { width: 690, height: 880 };
const MOST_COLUMNS = 6;

const paper = { restore: null };

function startPaper() {
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", toScreen);
  // Not every way to print announces itself.
  PAPER.addEventListener("change", () => (PAPER.matches ? toPaper() : toScreen()));
}

function toPaper() {
  if (paper.restore) return;
  applyTheme(true);
  printCharts();
  const close = openTables();
  printGraph();
  paper.restore = close;
}

function toScreen() {
  if (!paper.restore) return;
  paper.restore();
  paper.restore = null;
  byId("paper").textContent = "";
  applyTheme(false);
  resizeCharts();
}

// How many columns make the drawing largest.
function columnsFor({ width, height }) {
  let [found, largest] = [1, 0];
  for (let columns = 1; columns <= MOST_COLUMNS; columns++) {
    const scale = Math.min(PAGE.width / columns / width, PAGE.height / (height / columns), 1);
    if (scale > largest * 1.05) [found, largest] = [columns, scale];
  }
  return found;
}

// Cuts go between layers: no box is cut in two.
function cuts(of, columns) {
  const tops = [...new Set(of.vertices.map((one) => round(one.top - 8)))].sort((a, b) => a - b);
  const found = [of.top];
  for (let i = 1; i < columns; i++) {
    const wanted = of.top + (of.height * i) / columns;
    const free = tops.filter((y) => y > found[found.length - 1] && !of.vertices.some((one) => one.top < y && one.top + one.h > y));
    if (free.length) found.push(free.reduce((nearest, y) => (Math.abs(y - wanted) < Math.abs(nearest - wanted) ? y : nearest)));
  }
  return [...found, of.top + of.height];
}

function printGraph() {
  const of = drawing();
  if (!of.vertices.length) return;
  const groups = { edges: svg("g", { class: "edges" }), vertices: svg("g", { class: "vertices" }) };
  if (of.vertices.length > MANY) paintFar(of, groups);
  else {
    put(groups.edges, of.edges.map(edgeLine));
    put(groups.vertices, of.vertices.map(layerBox));
  }
  const whole = svg("g", { id: "paper-graph" }, svg("g", { class: "blocks" }, of.blocks.map(blockFrame)), groups.edges, groups.vertices, of.blocks.map(blockButton));
  for (const node of whole.querySelectorAll("[id]")) node.removeAttribute("id");
  const at = cuts(of, columnsFor(of));
  const tallest = Math.max(...at.slice(1).map((y, i) => y - at[i]));
  const scale = Math.min(PAGE.width / (at.length - 1) / of.width, PAGE.height / tallest, 1);
  const columns = at.slice(1).map((bottom, i) => svg("svg", {
    class: "graph", role: "img", "aria-label": `Graph, part ${i + 1} of ${at.length - 1}`,
    width: round(of.width * scale), height: round((bottom - at[i]) * scale), viewBox: `${round(of.left)} ${round(at[i])} ${round(of.width)} ${round(bottom - at[i])}`,
  }, i === 0 ? whole : svg("use", { href: "#paper-graph" })));
  fill(byId("paper"), columns);
}
