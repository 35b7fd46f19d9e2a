"""The tables of docs/easgd.md."""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev

from pase.easgd.algorithms import ALGORITHMS, Rates
from scripts.benchmarks.easgd_runs import Result, mean_of_all
from scripts.benchmarks.easgd_tuning import SAME, Found
from scripts.benchmarks.tables import markdown

Reached = Mapping[str, Sequence[tuple[int | None, ...]]]
"""By algorithm and seed: samples of the centre, and of the workers' mean and worker 0 where there is one."""


def table(results: Mapping[str, Result]) -> str:
    """Return a row for each algorithm."""
    headers = [
        *("method", "η", "ρ", "μ", "samples to 97 %, by seed", "mean", "÷ counterpart"),
        *("time to 97 %", "÷ counterpart", "communication"),
    ]
    return markdown(headers, [_row(result, results) for result in results.values()])


def _row(result: Result, results: Mapping[str, Result]) -> list[str]:
    algorithm = ALGORITHMS[result.name]
    other = results.get(algorithm.counterpart)
    return [
        algorithm.title,
        *rates_cells(result.rates),
        ", ".join(_samples(value) for value in result.samples),
        _samples(result.mean_samples),
        "" if other is None else _ratio(result.mean_samples, other.mean_samples),
        "–" if result.mean_time_s is None else f"{result.mean_time_s:.2f} s",
        "" if other is None else _ratio(result.mean_time_s, other.mean_time_s),
        "–" if result.communication is None else f"{result.communication:.0%}",
    ]


def rates_cells(rates: Rates) -> list[str]:
    """Return η, ρ and μ, nothing for those that a method has not."""
    return [f"{rates.learning_rate:g}", f"{rates.rho:.4g}" if rates.rho else "", f"{rates.momentum or '':}"]


def _samples(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _ratio(ours: float | None, others: float | None) -> str:
    return "–" if ours is None or others is None else f"{ours / others:.2f}"


def settings_table(found: Mapping[str, Sequence[Found]]) -> str:
    """Return the setting that was chosen for each algorithm, and the one after it."""
    rows = []
    for name, settings in found.items():
        same = [ALGORITHMS[other].title for other, tuned_one in SAME.items() if tuned_one == name]
        best, second = settings[:2]
        rows.append(
            [
                ", ".join([ALGORITHMS[name].title, *same]),
                *rates_cells(best.rates),
                f"{best.mean:,.0f} ({_each(best)})",
                f"{second.mean:,.0f} ({_called(second.rates)})",
            ]
        )
    return markdown(["methods", "η", "ρ", "μ", "samples to 97 %, mean (each)", "the second best setting"], rows)


def _called(rates: Rates) -> str:
    named = zip(("η", "ρ"), rates_cells(rates), strict=False)
    return ", ".join(f"{symbol} = {value}" for symbol, value in named if value)


def _each(found: Found) -> str:
    return ", ".join(f"{value:,}" for value in found.samples or ())


def simulated_table(reached: Reached) -> str:
    """Return a row for each algorithm, with the means of its seeds."""
    rows = []
    for name, by_seed in reached.items():
        columns = list(zip(*by_seed, strict=True))
        other = reached.get(ALGORITHMS[name].counterpart)
        ratio = _ratio(mean_of_all(columns[0]), mean_of_all([values[0] for values in other])) if other else ""
        cells = [_with_error(values) for values in columns] + [""] * (3 - len(columns))
        rows.append([ALGORITHMS[name].title, cells[0], ratio, *cells[1:]])
    headers = ["samples to 97 %", "the centre, or the master's weights", "÷ counterpart"]
    return markdown([*headers, "the mean of the workers", "worker 0"], rows)


def _with_error(values: Sequence[float | None]) -> str:
    """Return a mean and its standard error; how many did not reach the target, where there are any."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"– ({len(values) - len(known)} of {len(values)} did not)"
    return f"{mean(known):,.0f} ± {stdev(known) / sqrt(len(known)):,.0f}"
