// Finding layers by name or kind: type to narrow, Enter for one after the other.

const LISTED = 12;

const search = { hits: [], at: -1 };

function startFinder() {
  const input = byId("find");
  input.addEventListener("input", () => find(input.value));
  input.addEventListener("keydown", (event) => {
    const step = event.key === "ArrowDown" || (event.key === "Enter" && !event.shiftKey) ? 1
      : event.key === "ArrowUp" || event.key === "Enter" ? -1 : 0;
    if (step) go(step);
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  input.addEventListener("blur", () => setTimeout(() => listHits(false), 150));
  input.addEventListener("focus", () => listHits(true));
  when("plan", () => find(input.value));
}

function find(text) {
  const wanted = text.trim().toLowerCase();
  const { layers } = plan();
  search.hits = wanted === "" ? [] : layers.flatMap((layer, index) =>
    `${shown(layer.name, 20000)}\n${shown(layer.kind)}`.toLowerCase().includes(wanted) ? [index] : []);
  // Names that begin with it come first.
  const begins = (index) => (layers[index].name.toLowerCase().startsWith(wanted) ? 0 : 1);
  search.hits.sort((a, b) => begins(a) - begins(b) || a - b);
  search.at = -1;
  listHits(true);
  tell("hits");
}

function go(step) {
  const { hits } = search;
  if (!hits.length) return;
  search.at = search.at < 0 ? (step > 0 ? 0 : hits.length - 1) : (search.at + step + hits.length) % hits.length;
  chooseLayer(hits[search.at], "search");
  listHits(true);
}

function leave() {
  byId("find").value = "";
  find("");
  byId("view").focus();
}

/** Return the vertices that stand for what was found. */
function foundVertices() {
  return search.hits.map((layer) => drawing().at[layer]).filter((vertex) => vertex >= 0);
}

function listHits(isOpen) {
  const { hits, at } = search;
  const [input, list] = [byId("find"), byId("hits")];
  const text = input.value.trim();
  byId("found").textContent = text === "" ? "" : !hits.length ? "none" : at < 0 ? count(hits.length) : `${at + 1} of ${count(hits.length)}`;
  const first = Math.max(0, Math.min(at - 4, hits.length - LISTED));
  const items = hits.slice(first, first + LISTED).map((index, i) => el("li", {
    role: "option", id: `hit-${index}`, "aria-selected": String(first + i === at),
    onpointerdown: (event) => {
      event.preventDefault();
      search.at = first + i;
      chooseLayer(index, "search");
      listHits(false);
    },
  }, named(plan().layers[index].name, 60), el("span", { class: "kind" }, shown(plan().layers[index].kind, 30))));
  fill(list, items);
  if (hits.length > first + LISTED) put(list, el("li", { class: "rest", role: "presentation" }, `and ${count(hits.length - first - LISTED)} more`));
  const isShown = isOpen && items.length > 0 && document.activeElement === input;
  list.hidden = !isShown;
  input.setAttribute("aria-expanded", String(isShown));
  if (isShown && at >= 0) input.setAttribute("aria-activedescendant", `hit-${hits[at]}`);
  else input.removeAttribute("aria-activedescendant");
}
