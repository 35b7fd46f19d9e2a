// How a tensor lies over the devices: which devices hold which part, drawn as a grid.

const MOST_CELLS = 64;
const MOST_ACROSS = 32;
const MOST_DOWN = 16;
const GRID = { width: 340, left: 30, top: 18 };

/** Return which devices hold each part of a tensor: "row,column,…" of part numbers → devices, in the order of the parts. */
function holders(of, layer, tensor) {
  const order = of.device_orders[layer.devices];
  const held = new Map();
  order.forEach((device, position) => {
    // Position is row-major over what is split, then over replicas.
    const digits = new Array(layer.splits.length).fill(0);
    let rest = Math.floor(position / layer.replicas);
    for (let i = layer.splits.length - 1; i >= 0; i--) {
      digits[i] = rest % layer.splits[i];
      rest = Math.floor(rest / layer.splits[i]);
    }
    const part = tensor.dims.map((dim) => dim.by.reduce((number, i) => number * layer.splits[i] + digits[i], 0));
    const key = part.map((number, i) => Math.min(number, tensor.dims[i].parts - 1)).join();
    if (!held.has(key)) held.set(key, []);
    held.get(key).push(device);
  });
  return held;
}

/** Return what is said of a tensor, and its drawing. */
function tensorFigure(of, layer, tensor) {
  const held = holders(of, layer, tensor);
  const parts = tensor.dims.reduce((product, dim) => product * dim.parts, 1);
  const copies = of.device_orders[layer.devices].length / Math.max(1, held.size);
  const shape = tensor.dims.map((dim) => `${dim.label ? `${shown(dim.label, 24)} ` : ""}${count(dim.extent)}`).join(" × ") || "one number";
  const each = copies > 1 ? `each on ${count(copies)} devices` : "each on a device of its own";
  const said = parts === 1 ? `whole on ${copies > 1 ? `all ${count(copies)} devices` : "its device"}` : `${count(parts)} parts, ${each}`;
  return el("figure", { class: "tensor" },
    el("figcaption", null, named(tensor.name, 60), el("span", { class: "role" }, shown(tensor.role, 20)),
      el("div", { class: "shape" }, shape), el("div", { class: "said" }, said)),
    parts > 1 ? grid(of, tensor, held, `${shown(tensor.name, 60)}: ${shape}; ${said}`) : null);
}

// Rows and columns are the two dims that are split most, in the tensor's own order; one alone runs across.
function gridAxes(tensor) {
  const split = tensor.dims.map((dim, index) => ({ ...dim, index })).filter((dim) => dim.parts > 1);
  const most = [...split].sort((a, b) => b.parts - a.parts).slice(0, 2).sort((a, b) => a.index - b.index);
  const [down, across] = most.length > 1 ? most : [null, most[0]];
  return { down, across, others: split.filter((dim) => !most.some((one) => one.index === dim.index)) };
}

// How many parts along each axis share a cell.
function coarseness(rows, columns) {
  let [byRow, byColumn] = [Math.ceil(rows / MOST_DOWN), Math.ceil(columns / MOST_ACROSS)];
  while (Math.ceil(rows / byRow) * Math.ceil(columns / byColumn) > MOST_CELLS) {
    if (rows / byRow >= columns / byColumn) byRow *= 2;
    else byColumn *= 2;
  }
  return [byRow, byColumn];
}

function grid(of, tensor, held, label) {
  const { down, across, others } = gridAxes(tensor);
  const [byRow, byColumn] = coarseness(down ? down.parts : 1, across.parts);
  const cells = new Map();
  for (const [key, devices] of held) {
    const part = key.split(",").map(Number);
    const [row, column] = [down ? Math.floor(part[down.index] / byRow) : 0, Math.floor(part[across.index] / byColumn)];
    const cell = `${row},${column}`;
    if (!cells.has(cell)) cells.set(cell, []);
    for (const device of devices) cells.get(cell).push(device);
  }
  const rows = down ? Math.ceil(down.parts / byRow) : 1;
  const columns = Math.ceil(across.parts / byColumn);
  const size = { w: (GRID.width - GRID.left - 2) / columns, h: rows === 1 ? 30 : Math.max(13, Math.min(26, 150 / rows)) };
  const height = GRID.top + rows * size.h + 2;
  const write = wayToWrite([...cells.values()], size);
  const boxes = [...cells].map(([key, devices]) => cellBox(of, key.split(",").map(Number), devices, size, write));
  const axis = (dim) => `${shown(dim.label || `dim ${dim.index}`, 20)} ${count(dim.extent)} in ${count(dim.parts)}`;
  const picture = svg("svg", { class: "grid", viewBox: `0 0 ${GRID.width} ${round(height)}`, role: "img", "aria-label": label },
    svg("text", { x: GRID.left, y: 12, class: "axis" }, `${axis(across)} →`),
    down ? svg("text", { class: "axis", "text-anchor": "end", transform: `translate(20 ${GRID.top}) rotate(-90)` }, fitted(`← ${axis(down)}`, Math.max(40, rows * size.h), 11)) : null,
    boxes);
  const notes = [
    byRow * byColumn > 1 ? `Drawn coarser: each cell is ${count(byRow * byColumn)} of ${count(tensor.dims.reduce((all, dim) => all * dim.parts, 1))} parts.` : "",
    others.length ? `Each cell is cut further: ${others.map((dim) => `${shown(dim.label || `dim ${dim.index}`, 20)} in ${dim.parts}`).join(", ")}.` : "",
  ].filter(Boolean);
  return [picture, notes.length ? el("p", { class: "note" }, notes.join(" ")) : null];
}

// How devices are written in cells, the longest first; one way for all cells of a grid.
const WRITTEN = [
  (devices) => ranges(devices),
  (devices) => ranges(devices, 2),
  (devices) => (devices.length > 1 ? `${first(devices)} +${devices.length - 1}` : `${devices[0]}`),
];
const CELL_TEXT = 10;

function first(devices) {
  return devices.reduce((least, device) => Math.min(least, device));
}

function fitsAcrossCell(text, { w }) {
  return measured(text, CELL_TEXT) <= w - 3;
}

function fitsUpright(text, { w, h }) {
  return w >= 9 && measured(text, CELL_TEXT) <= h - 3;
}

function wayToWrite(cells, size) {
  const fit = (way, fits) => cells.every((devices) => fits(way(devices), size));
  return WRITTEN.find((way) => fit(way, fitsAcrossCell)) || WRITTEN.find((way) => fit(way, fitsUpright)) || WRITTEN[WRITTEN.length - 1];
}

// A cell is coloured by its first device, so that what lies alike in two tensors looks alike.
function cellBox(of, [row, column], devices, size, write) {
  const [x, y] = [GRID.left + column * size.w, GRID.top + row * size.h];
  const text = write(devices);
  const isAcross = fitsAcrossCell(text, size);
  const middle = `translate(${round(x + size.w / 2)} ${round(y + size.h / 2)})${isAcross ? "" : " rotate(-90)"}`;
  const hue = String(Math.round((first(devices) * 300) / Math.max(1, of.num_devices)));
  return svg("g", { class: "cell", "data-devices": devices.join(" ") },
    svg("title", null, `${devices.length > 1 ? "devices" : "device"} ${ranges(devices, 12)}`),
    svg("rect", { x: round(x), y: round(y), width: round(size.w), height: round(size.h), style: { "--hue": hue } }),
    isAcross || fitsUpright(text, size)
      ? svg("text", { transform: middle, "text-anchor": "middle", dy: 3.5, "font-size": CELL_TEXT }, text) : null);
}
