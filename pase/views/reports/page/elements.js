// Elements made from text alone. Nothing in this program parses text as HTML, so names from a model stay names.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element of an id. */
function byId(id) {
  return document.getElementById(id);
}

/** Make an HTML element; attributes named on… are listeners, `style` an object of properties, and true is an empty one. */
function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an SVG element, in the same way. */
function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  put(node, ...children);
  return node;
}

/** Append children: nodes, texts and numbers, or arrays of them; null is nothing. */
function put(node, ...children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replace all that a node holds. */
function fill(node, ...children) {
  node.textContent = "";
  return put(node, ...children);
}

// Control characters would not be seen, and those of writing direction would turn what stands around them.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

function visible(character) {
  const code = character.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return code === 0x7f ? "\u2421" : "\ufffd";
}

/** Return a name as it can be shown, of at most so many characters. */
function shown(name, most = 400) {
  const all = String(name);
  const text = (all.length > most + 1 ? all.slice(0, most) + "…" : all).replace(UNSEEN, visible);
  return text === "" ? "(no name)" : text.trim() === "" ? "(blank)" : text;
}

/** Return an element that holds a name and keeps its direction of writing to itself. */
function named(name, most) {
  return el("bdi", { class: "name", title: String(name).length > 24 ? shown(name) : null }, shown(name, most));
}

/** Return a button that holds some content. */
function button(content, act, attributes) {
  return el("button", { type: "button", onclick: act, ...attributes }, content);
}

/** Call a function once the browser is ready to draw, however often it is asked to before. */
function onFrame(act) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      act();
    });
  };
}
