"""Fig. 5 of Gholami et al. 2018: which process holds what of the three products of a layer, on a grid of 2 x 3."""

from scripts.benchmarks.charts import svg

ROWS, COLUMNS = 2, 3
SHADES = (("#fddbc7", "#f4a582", "#d6604d"), ("#d1e5f0", "#92c5de", "#4393c3"))
UNIT = 30
GAP = 34


def multiplication() -> str:
    """Return the drawing: forward pass, gradient of the input, gradient of the weights."""
    lines = [
        ("Y = W X: no communication; then each column of processes gathers its Y", _weights(), _batch("X"), _both("Y")),
        ("ΔX = Wᵀ ΔY: partial sums, added up within each column", _transposed(), _both("ΔY"), _batch("ΔX")),
        ("ΔW = ΔY Xᵀ: partial sums, added up within each row", _both("ΔY"), _batch_transposed(), _weights("ΔW")),
    ]
    body = []
    y = 24.0
    for title, left, right, product in lines:
        body.append(f"<text x='12' y='{y:g}'>{title}</text>")
        x = 12.0
        for (drawn, width), sign in ((left, "×"), (right, "="), (product, "")):
            body.append(f"<g transform='translate({x:g} {y + 10:g})'>{drawn}</g>")
            body.append(f"<text x='{x + width + 12:g}' y='{y + 60:g}' font-size='16'>{sign}</text>")
            x += width + GAP
        y += 140
    return svg(430, y, body)


Drawn = tuple[str, float]


def _weights(name: str = "W") -> Drawn:
    """[d_i, d_(i-1)]: split by rows, each part on all processes of a row."""
    cells = [(0.0, i * 1.5, 3.0, 1.5, SHADES[i][1], f"P{i}*") for i in range(ROWS)]
    return _drawn(name, cells, 3)


def _transposed() -> Drawn:
    cells = [(i * 1.5, 0.0, 1.5, 3.0, SHADES[i][1], f"P{i}*") for i in range(ROWS)]
    return _drawn("Wᵀ", cells, 3)


def _batch(name: str) -> Drawn:
    """[d_(i-1), B]: split by columns, each part on all processes of a column."""
    cells = [(j * 1.0, 0.0, 1.0, 3.0, "#e0e0e0", f"P*{j}") for j in range(COLUMNS)]
    return _drawn(name, cells, 3)


def _batch_transposed() -> Drawn:
    cells = [(0.0, j * 1.0, 3.0, 1.0, "#e0e0e0", f"P*{j}") for j in range(COLUMNS)]
    return _drawn("Xᵀ", cells, 3)


def _both(name: str) -> Drawn:
    """[d_i, B]: one block for each process."""
    cells = [(j * 1.0, i * 1.5, 1.0, 1.5, SHADES[i][j], f"P{i}{j}") for i in range(ROWS) for j in range(COLUMNS)]
    return _drawn(name, cells, 3)


def _drawn(name: str, cells: list[tuple[float, float, float, float, str, str]], width: float) -> Drawn:
    parts = []
    for x, y, w, h, colour, label in cells:
        box = f"x='{x * UNIT:g}' y='{y * UNIT:g}' width='{w * UNIT:g}' height='{h * UNIT:g}'"
        parts.append(f"<rect {box} fill='{colour}' stroke='black' stroke-width='0.6'/>")
        middle = f"x='{(x + w / 2) * UNIT:g}' y='{(y + h / 2) * UNIT + 4:g}'"
        parts.append(f"<text {middle} text-anchor='middle' font-size='10'>{label}</text>")
    parts.append(f"<text x='{width * UNIT / 2:g}' y='{3 * UNIT + 14:g}' text-anchor='middle'>{name}</text>")
    return "".join(parts), width * UNIT
