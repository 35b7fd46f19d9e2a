"""Steps of large language models that others have measured, beside what the cost model `step` makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from scripts.benchmarks.large_steps import StepParts
from scripts.benchmarks.published_steps import (
    PeakMemory,
    Row,
    machine_of,
    measured_s,
    model_flop,
    predicted,
    published_steps,
    torchtitan_memory,
    torchtitan_step,
)
from scripts.benchmarks.simulation import spearman
from scripts.benchmarks.tables import markdown, publish

PEAK_FLOP_PER_S = {"a100": 312e12, "h100": 989.4e12}
"""By which MFU is told: of float16 and bfloat16, whatever the products are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row beside its prediction. factor: fitted to the rows of other sources (`leave_one_out`)."""

    row: Row
    parts: StepParts
    factor: float = 1.0

    @property
    def source(self) -> str:
        """Which of the three sources it is from."""
        return next(name for name, text in SOURCES.items() if text in self.row.source)

    @property
    def step_s(self) -> float:
        """The predicted seconds."""
        return self.factor * self.parts.step_s

    @property
    def error(self) -> float:
        """Of the predicted seconds: negative where the prediction is too fast."""
        return self.step_s / measured_s(self.row) - 1

    def mfu(self, step_s: float) -> float:
        """Return the share of the peak that the model's own FLOP, without recomputation, make of such a step."""
        return model_flop(self.row) / (step_s * self.row.gpus * PEAK_FLOP_PER_S[MACHINES[self.source]])


SOURCES = {"SC'21": "SC'21", "recomputation": "2205.05198", "torchtitan": "torchtitan"}
MACHINES = {"SC'21": "a100", "recomputation": "a100", "torchtitan": "h100"}


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/published.md."""
    found = [Outcome(row=row, parts=predicted(row)) for row in published_steps()]
    fitted = leave_one_out(found)
    tables = {source: _rows([each for each in fitted if each.source == source], found) for source in SOURCES}
    tables["parts"] = _parts(found)
    tables["errors"] = _errors(found, fitted)
    tables["figures"] = _figures(found)
    tables["memory"] = _memory([row for row in published_steps() if row.memory_gib])
    publish("published.md", tables, write=write)


def leave_one_out(found: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes with the factor that other sources tell: the median of their measured ÷ predicted."""
    fitted = []
    for each in found:
        others = [other for other in found if other.source != each.source]
        factor = median(measured_s(other.row) / other.parts.step_s for other in others)
        fitted.append(replace(each, factor=factor))
    return fitted


def _rows(fitted: Sequence[Outcome], found: Sequence[Outcome]) -> str:
    plain = {each.row.id: each for each in found}
    rows = []
    for each in fitted:
        row, seconds = each.row, measured_s(each.row)
        rows.append(
            [
                str(row.id),
                row.model,
                str(row.gpus),
                _scheme(row),
                f"{seconds:.2f}",
                f"{plain[row.id].step_s:.2f}",
                f"{plain[row.id].error:+.1%}",
                f"{each.step_s:.2f}",
                f"{each.error:+.1%}",
                f"{each.mfu(seconds):.1%}",
                f"{each.mfu(each.step_s):.1%}",
            ]
        )
    headers = ["row", "model", "GPUs", "scheme", "measured, s", "predicted, s", "error"]
    return markdown([*headers, "with the factor, s", "error", "MFU, measured", "predicted"], rows)


def _scheme(row: Row) -> str:
    if row.parallelism:
        return f"{row.parallelism}, {row.seq:,} tokens, batch {row.local_batch}; {row.notes}"
    chunks = f", {row.vp} chunks" if row.vp > 1 else ""
    return f"t {row.tp}, p {row.pp}{chunks}, d {row.dp}, {row.mbs} of {row.gbs}; {row.recompute}"


def _parts(found: Sequence[Outcome]) -> str:
    names = [field.name for field in fields(StepParts)]
    rows = [
        [str(each.row.id), *(f"{getattr(each.parts, name) / each.parts.step_s:.1%}" for name in names)]
        for each in found
    ]
    return markdown(["row", *(name.removesuffix("_s").replace("_", " ") for name in names)], rows)


def _errors(found: Sequence[Outcome], fitted: Sequence[Outcome]) -> str:
    groups: dict[str, Callable[[Outcome], bool]] = {
        name: lambda each, name=name: each.source == name  # type: ignore[misc]
        for name in SOURCES
    }
    groups["both of Megatron-LM's"] = lambda each: MACHINES[each.source] == "a100"
    groups["all"] = lambda _: True
    rows = []
    for name, belongs in groups.items():
        cells = [name]
        for outcomes in (found, fitted):
            chosen = [each for each in outcomes if belongs(each)]
            errors = [each.error for each in chosen]
            mfu = [each.mfu(measured_s(each.row)) for each in chosen], [each.mfu(each.step_s) for each in chosen]
            cells += [
                f"{median(map(abs, errors)):.1%}",
                f"{max(errors, key=abs):+.1%}",
                f"{spearman(*mfu):.3f}",
            ]
        rows.append([*cells[:4], f"{chosen[0].factor:.3f}" if name in SOURCES else "", *cells[4:]])
    headers = ["rows of", "median absolute error", "worst", "ρ of MFU"]
    return markdown([*headers, "factor", *(f"with it: {header}" for header in headers[1:])], rows)


FIGURES = {
    "0.6, and 0.6 ÷ 0.8 of 0.35: as here": (0.6, 0.6 / 0.8 * 0.35),
    "0.6 and 0.35: attention as on an H100 of 700 W": (0.6, 0.35),
    "0.78 and 0.35: torchao's later figure": (0.78, 0.35),
    "0.8 and 0.35: the preset of an H100 of 700 W": (0.8, 0.35),
}
"""Shares of the H100's peak that products reach, and attention, by where they are from."""


def _figures(found: Sequence[Outcome]) -> str:
    rows = []
    for name, figures in FIGURES.items():
        machine = machine_of("h100", figures)
        others = [
            replace(each, parts=torchtitan_step(each.row, machine)) if each.source == "torchtitan" else each
            for each in found
        ]
        cells = [name]
        for outcomes in (others, leave_one_out(others)):
            chosen = [each.error for each in outcomes if each.source == "torchtitan"]
            everywhere = [abs(each.error) for each in outcomes]
            mfu = [each.mfu(measured_s(each.row)) for each in outcomes], [each.mfu(each.step_s) for each in outcomes]
            cells += [f"{median(map(abs, chosen)):.1%}", f"{max(chosen, key=abs):+.1%}", f"{median(everywhere):.1%}"]
            cells.append(f"{spearman(*mfu):.3f}")
        rows.append(cells)
    headers = ["torchtitan's rows: median", "worst", "all rows: median", "ρ of MFU"]
    return markdown(["products, attention", *headers, *(f"with the factor: {header}" for header in headers)], rows)


def _memory(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        peak = torchtitan_memory(row)
        parts = (getattr(peak, field.name) / 2**30 for field in fields(PeakMemory))
        found = peak.total / 2**30
        error = f"{found / row.memory_gib - 1:+.1%}"
        numbers = (f"{part:.1f}" for part in parts)
        cells.append(
            [str(row.id), row.model, row.parallelism, *numbers, f"{found:.1f}", f"{row.memory_gib:.1f}", error]
        )
    headers = ["row", "model", "scheme", *(field.name for field in fields(PeakMemory))]
    return markdown([*headers, "predicted, GiB", "published", "error"], cells)
