// Tables behind charts: made when they are opened or printed, of as many rows as somebody would read.

const ROWS = 300;

/** Return a table: columns are {title, isNumber}, rows arrays of texts or nodes, one for each column. */
function table(caption, columns, rows, most = ROWS) {
  const head = columns.map((one) => el("th", { scope: "col", class: one.isNumber ? "number" : null }, one.title));
  const body = el("tbody", null, rows.slice(0, most).map((row) => tableRow(columns, row)));
  const whole = el("div", { class: "table", tabindex: 0, role: "region", "aria-label": caption });
  put(whole, el("table", null, el("caption", null, caption), el("thead", null, el("tr", null, head)), body));
  if (rows.length > most) {
    const more = button(`Show all ${count(rows.length)} rows`, () => {
      put(body, rows.slice(most).map((row) => tableRow(columns, row)));
      more.remove();
    }, { class: "more" });
    put(whole, more);
  }
  return whole;
}

function tableRow(columns, row) {
  const cells = row.map((cell, i) =>
    i === 0
      ? el("th", { scope: "row" }, cell)
      : el("td", { class: columns[i].isNumber ? "number" : null }, cell));
  return el("tr", null, cells);
}

/** Return a closed "as a table", which makes its table when it is opened first. */
function asTable(make, title = "As a table") {
  const details = el("details", { class: "as-table" }, el("summary", null, title));
  details.addEventListener("toggle", () => openTable(details));
  details.makeTable = make;
  return details;
}

function openTable(details) {
  if (details.open && details.childElementCount === 1) put(details, details.makeTable());
}

/** Open all tables, for paper; return what closes them again. */
function openTables() {
  const closed = [...byId("sections").querySelectorAll("details.as-table:not([open])")];
  for (const details of closed) {
    details.open = true;
    openTable(details);
  }
  return () => closed.forEach((details) => (details.open = false));
}

/** Return a button that selects a layer and shows it. */
function layerLink(index, most = 60) {
  const attributes = { class: "link", "data-link": index };
  return button(named(plan().layers[index].name, most), () => chooseLayer(index, "link"), attributes);
}
