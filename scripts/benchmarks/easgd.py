"""LeNet-5 on the digits with every algorithm on 4 workers to one accuracy: samples, time, communication."""

import argparse
from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

from pase.common.documents import write_atomically
from pase.easgd.algorithms import ALGORITHMS, Exchange, Rates
from scripts.benchmarks.easgd_charts import averaged, figures
from scripts.benchmarks.easgd_runs import Result, Run, train
from scripts.benchmarks.easgd_tables import Reached, settings_table, simulated_table, table
from scripts.benchmarks.easgd_trials import (
    TARGET,
    Bench,
    centre,
    first_worker,
    load_bench,
    mean_of_workers,
    samples_until,
)
from scripts.benchmarks.easgd_tuning import GRIDS, MOST, SAME, tuned
from scripts.benchmarks.tables import ROOT, publish

FOLDER = ROOT / "docs" / "easgd"
SEEDS = (0, 1, 2)
REPEATS = 4
"""Of each seed, for the methods whose arrivals are not ordered: no two of their runs are the same."""
_UNORDERED = (Exchange.FIRST_COME, Exchange.LOCK_FREE)
SIMULATED_SEEDS = tuple(range(8))
NUM_STEPS = 120
"""Of each worker, with the rates of each algorithm."""

COMMON_LEARNING_RATE = 0.05
COMMON_STEPS = 176
COMMON = tuple(name for name in ALGORITHMS if name not in ("sync-easgd1", "sync-easgd2"))
"""Those two take the samples of Sync EASGD3."""
_ELASTIC = 0.225
_MOMENTUM = 0.9

TUNED: Mapping[str, Rates] = MappingProxyType(
    {
        "async-sgd": Rates(learning_rate=0.05),
        "sync-sgd": Rates(learning_rate=0.0315),
        "async-msgd": Rates(learning_rate=0.00397, momentum=0.9),
        "async-easgd": Rates(learning_rate=0.2, rho=1.125),
        "original-easgd": Rates(learning_rate=0.2, rho=0.5),
        "sync-easgd1": Rates(learning_rate=0.2, rho=1.125),
        "async-measgd": Rates(learning_rate=0.05, rho=8.0, momentum=0.9),
    }
)
"""The best setting of each algorithm that is tuned, as `--tune` found it."""


_WHOSE = (centre, mean_of_workers, first_worker)


def rates_of(name: str) -> Rates:
    """Return the rates of an algorithm."""
    return TUNED[SAME.get(name, name)]


def common_rates(name: str) -> Rates:
    """Return the one learning rate of all; the elastic rate η·ρ and the momentum are those of the literature."""
    algorithm = ALGORITHMS[name]
    return Rates(
        learning_rate=COMMON_LEARNING_RATE,
        rho=_ELASTIC / COMMON_LEARNING_RATE if algorithm.has_rho else 0,
        momentum=_MOMENTUM if algorithm.has_momentum else 0,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen."""
    parser.add_argument("--tune", action="store_true", help="find the rates again, which takes long, and show them")


def main(*, write: bool, tune: bool) -> None:
    """Print the tables, or put them and the figures into docs/."""
    bench = load_bench()
    if tune:
        found = {name: tuned(bench, ALGORITHMS[name], grid) for name, grid in GRIDS.items()}
        publish("easgd.md", {"settings": settings_table(found)}, write=write)
        return
    results = _results(bench, {name: rates_of(name) for name in ALGORITHMS}, NUM_STEPS, repeats=REPEATS)
    common = _results(bench, {name: common_rates(name) for name in COMMON}, COMMON_STEPS, test_every=2)
    tables = {
        "comparison": table(results),
        "one learning rate": table(common),
        "simulated": simulated_table(_simulated(bench)),
    }
    publish("easgd.md", tables, write=write)
    if not write:
        return
    FOLDER.mkdir(exist_ok=True)
    points = {name: averaged([run.points for run in result.all_runs]) for name, result in results.items()}
    for name, text in figures(points, target=TARGET, num_examples=357).items():
        write_atomically(FOLDER / name, text)
    print(f"figures written to {FOLDER.relative_to(ROOT)}")


def _results(
    bench: Bench, rates: Mapping[str, Rates], num_steps: int, *, repeats: int = 1, test_every: int = 1
) -> dict[str, Result]:
    """Train with every algorithm; they take turns, seed by seed, so that all meet the same machine."""
    # The first run of a session is slower than others.
    train(bench, "async-sgd", rates["async-sgd"], seed=0, num_steps=5)
    runs: dict[str, dict[int, list[Run]]] = {name: {seed: [] for seed in SEEDS} for name in rates}
    for seed, repeat in product(SEEDS, range(repeats)):
        for name in rates:
            if repeat and ALGORITHMS[name].exchange not in _UNORDERED:
                continue
            run = train(bench, name, rates[name], seed=seed, num_steps=num_steps, test_every=test_every)
            runs[name][seed].append(run)
            print(f"{name}, seed {seed}: {run.reached}", flush=True)
    return {
        name: Result(name=name, rates=rates[name], runs=tuple(map(tuple, own.values()))) for name, own in runs.items()
    }


def _simulated(bench: Bench) -> Reached:
    """Return when the centre, the mean of the workers and a single worker reach the target, one event at a time."""
    reached: dict[str, list[tuple[int | None, ...]]] = {}
    for name in GRIDS:
        whose = _WHOSE if ALGORITHMS[name].has_rho else _WHOSE[:1]
        reached[name] = []
        for seed in SIMULATED_SEEDS:
            found = samples_until(bench, ALGORITHMS[name], TUNED[name], seed=seed, most=MOST, whose=whose)
            reached[name].append(found)
            print(f"{name}, seed {seed}: {found}", flush=True)
    return reached
