// Small marks that need no chart: bars of parts, with their colours, and keys to them.

const PART_COLOURS = 8;

/** Return the colour of a kind of cost, as a style value. */
function partColour(index) {
  return `var(--part-${index % PART_COLOURS})`;
}

/** Return a bar of parts side by side: parts are [name, value], and what is left of the whole stays empty. */
function stackedBar(parts, whole, show, className) {
  const label = parts.filter(([, value]) => value > 0).map(([name, value]) => `${name} ${show(value)}`).join(", ");
  const pieces = parts.map(([name, value], i) => el("span", {
    class: "piece",
    title: `${name}: ${show(value)}`,
    style: { "flex-grow": String(whole > 0 ? value / whole : 0), background: partColour(i) },
  }));
  const used = parts.reduce((sum, [, value]) => sum + value, 0);
  pieces.push(el("span", { class: "rest", style: { "flex-grow": String(whole > 0 ? Math.max(0, 1 - used / whole) : 1) } }));
  return el("div", { class: `stacked ${className || ""}`, role: "img", "aria-label": label || "nothing" }, pieces);
}

/** Return the key to the colours of a bar of parts, with what each is. */
function partKey(parts, whole, show) {
  const items = parts.map(([name, value], i) => (value > 0 || parts.length < 3) && el("li", null,
    el("span", { class: "swatch", style: { background: partColour(i) } }),
    `${shown(name, 40)} `, el("b", null, show(value)), whole > 0 ? ` ${percent(value / whole)}` : null));
  return el("ul", { class: "key" }, items);
}

/** Return one bar with its share of the largest. */
function bar(value, most, index = 0) {
  const width = most > 0 ? Math.max(value > 0 ? 0.5 : 0, (100 * value) / most) : 0;
  return el("span", { class: "bar", "aria-hidden": "true" },
    el("span", { style: { width: `${width}%`, background: partColour(index) } }));
}
