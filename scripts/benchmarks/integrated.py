"""Gholami et al. 2018 from its equations alone: Figs. 5 to 10, and what its text states beside what follows."""

from pase.common.documents import write_atomically
from pase.studies.integrated.chain import CONVENTIONS, Options, with_conventions
from pase.studies.integrated.equations import Grid, Role
from pase.studies.integrated.study import Study
from scripts.benchmarks.integrated_figures import (
    BEYOND_PROCESSES,
    STRONG_BATCH,
    STRONG_PROCESSES,
    WEAK,
    beyond,
    convolutions_beyond,
    figures,
    studied,
)
from scripts.benchmarks.integrated_statements import implied_computation, statements
from scripts.benchmarks.tables import ROOT, markdown, publish

FOLDER = ROOT / "docs" / "integrated"


def main(*, write: bool) -> None:
    """Print the tables, or put them and the figures into docs/."""
    publish("integrated.md", tables(), write=write)
    if not write:
        return
    FOLDER.mkdir(exist_ok=True)
    for name, text in figures().items():
        write_atomically(FOLDER / name, text)
    print(f"figures written to {FOLDER.relative_to(ROOT)}")


def tables() -> dict[str, str]:
    """Return the tables of docs/integrated.md by name."""
    return {
        "statements": markdown(
            ["where", "what the text states", "paper", "ours", "does it follow?"],
            [[s.where, s.what, s.paper, s.ours, s.verdict] for s in statements()],
        ),
        "computation": markdown(
            ["where", "communication, whole step", "so that a step computes for"],
            [list(r) for r in implied_computation()],
        ),
        "strong scaling": _scaling([(p, STRONG_BATCH) for p in STRONG_PROCESSES]),
        "weak scaling": _scaling(list(WEAK)),
        "beyond the batch": _beyond(),
        "readings": _readings(),
        "conventions": markdown(
            ["convention", "default", "what it means"],
            [[f"`{name}`", "yes" if getattr(Options(), name) else "no", text] for name, text in CONVENTIONS.items()],
        ),
    }


def _scaling(settings: list[tuple[int, int]]) -> str:
    rows = []
    for num_processes, batch in settings:
        found = studied(num_processes, batch)
        cells = [str(num_processes), str(batch), _ms(found.pure_model.time_s), _ms(found.pure_batch.time_s)]
        rows.append([*cells, *(_best(found, variant) for variant in ("same_grid", "dense_only", "per_layer"))])
    headers = ["P", "B", "pure model, ms", "pure batch, ms"]
    return markdown([*headers, "one grid (Figs. 6, 9)", "dense layers alone (Fig. 7)", "Eq. 9, layer by layer"], rows)


def _best(found: Study, variant: str) -> str:
    best = found.best(variant)
    assert best is not None
    return f"{best.grid}: {_ms(best.time_s)} ms, {found.speedup(best.time_s):.2f}×"


def _beyond() -> str:
    rows = []
    for num_processes in BEYOND_PROCESSES:
        best = min(beyond(num_processes), key=lambda candidate: candidate.terms.time_s)
        domain, model = (convolutions_beyond(num_processes, role).time_s for role in (Role.DOMAIN, Role.MODEL))
        everywhere = studied(num_processes, 512).best("same_grid")
        assert everywhere is not None
        rows.append(
            [
                str(num_processes),
                str(best.convolutions),
                _ms(domain),
                _ms(model),
                str(best.grid),
                _ms(best.terms.time_s),
                f"{everywhere.grid}: {_ms(everywhere.time_s)}",
            ]
        )
    headers = ["P", "convolutions on", "they share rows, ms", "or weights, ms", "dense layers on", "in all, ms"]
    return markdown([*headers, "Eq. 8 on its best grid, ms"], rows)


def _readings() -> str:
    """Return what the two headline speedups become where one convention is read otherwise; two for the nearest."""
    rows = [["as documented", *_headlines(Options())]]
    for name in CONVENTIONS:
        changed = with_conventions({name: not getattr(Options(), name)})
        cells = _headlines(changed)
        if cells != rows[0][1:]:
            rows.append([f"`{name}={'yes' if getattr(changed, name) else 'no'}`", *cells])
    nearest = with_conventions({"output_before_pooling": False, "input_gradient": False})
    rows.append(["`output_before_pooling=no` and `input_gradient=no`", *_headlines(nearest)])
    rows.append(["version 1 of the paper", *_headlines(Options(), version=1)])
    headers = ["Fig. 6(d), 16x32 (paper: 5.0×)", "its best grid", "Fig. 7(d), 16x32", "best (paper: 9.7×)"]
    return markdown(["reading", *headers], rows)


def _headlines(options: Options, *, version: int = 2) -> list[str]:
    found = studied(512, STRONG_BATCH, version=version, options=options)
    cells = []
    for variant in ("same_grid", "dense_only"):
        candidates, best = found.candidates.get(variant, ()), found.best(variant)
        named = next((c for c in candidates if c.grid == Grid(16, 32)), None)
        cells.append(f"{found.speedup(named.time_s):.2f}×" if named else "–")
        cells.append(f"{found.speedup(best.time_s):.2f}× on {best.grid}" if best else "–")
    return cells


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.2f}"
