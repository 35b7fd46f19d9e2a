"""docs/easgd.md: the simulation that rates are chosen with takes the runtime's steps, and a pair keeps the bar."""

import re
from collections import Counter
from itertools import islice
from statistics import mean
from xml.etree import ElementTree

import numpy as np
import pytest

from pase.easgd.actors import Gradient
from pase.easgd.algorithms import ALGORITHMS, Rates
from pase.easgd.job import Job, begun
from pase.easgd.ranks import train_in_threads
from scripts.benchmarks.easgd import TUNED, rates_of
from scripts.benchmarks.easgd_charts import COLOURS, Point, averaged, figures
from scripts.benchmarks.easgd_runs import Result, Run
from scripts.benchmarks.easgd_tables import rates_cells, simulated_table, table
from scripts.benchmarks.easgd_trials import NUM_WORKERS, _as_they_come, load_bench, moments, samples_until
from scripts.benchmarks.easgd_tuning import GRIDS, SAME
from scripts.benchmarks.tables import ROOT
from tests.training.objectives import quadratics

PAGE = (ROOT / "docs" / "easgd.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["original-easgd", "sync-easgd1", "sync-sgd"])
def test_simulated_steps_are_those_of_the_runtime(name: str) -> None:
    algorithm, num_steps = ALGORITHMS[name], 7
    job = Job(
        algorithm=algorithm, rates=Rates(learning_rate=0.1, rho=0.6), num_workers=NUM_WORKERS, num_steps=num_steps
    )
    objectives, start = quadratics(NUM_WORKERS, noise=0.3), np.zeros(5)
    outcome = train_in_threads(job, begun(job, start), objectives=objectives)
    for moment in moments(algorithm, job.rates, objectives, start, seed=0):
        if moment.num_gradients == num_steps * NUM_WORKERS:
            assert np.array_equal(moment.centre, outcome.centre)
            break


class Slope:
    """The same gradient everywhere."""

    batch_size = 1

    def gradient(self, weights: np.ndarray, _step: int) -> Gradient:
        return Gradient(loss=0.0, vector=np.array([-3.0]))


@pytest.mark.parametrize("name", ["original-easgd", "sync-easgd1"])
def test_on_a_slope_the_centre_goes_at_p_of_p_plus_1_of_the_speed_behind_the_workers(name: str) -> None:
    rates, algorithm = Rates(learning_rate=0.1, rho=2.0), ALGORITHMS[name]
    rounds = [
        moment
        for moment in islice(moments(algorithm, rates, [Slope()] * 4, np.zeros(1), seed=0), 4000)
        if moment.num_gradients % 4 == 0
    ]
    speed = (rounds[-1].centre - rounds[-2].centre)[0]
    assert speed == pytest.approx(0.1 * 3 * 4 / 5, rel=1e-9)
    if algorithm.is_synchronous:
        ahead = (rounds[-1].workers[0].weights - rounds[-1].centre)[0]
        assert ahead == pytest.approx(3 / (2.0 * 5), rel=1e-9)
        assert ahead / speed == pytest.approx(1 / (0.1 * 2.0 * 4), rel=1e-9)


def test_drawn_arrivals_serve_everybody_and_are_the_same_for_a_seed() -> None:
    drawn = list(islice(_as_they_come(NUM_WORKERS, 3), 4000))
    assert drawn == list(islice(_as_they_come(NUM_WORKERS, 3), 4000))
    assert drawn != list(islice(_as_they_come(NUM_WORKERS, 4), 4000))
    assert all(900 < count < 1100 for count in Counter(drawn).values())


def test_every_algorithm_has_rates_and_as_many_settings_were_tried_for_each() -> None:
    assert {*GRIDS, *SAME} == set(ALGORITHMS) == set(COLOURS)
    assert {len(list(grid)) for grid in GRIDS.values()} == {9}
    assert set(TUNED) == set(GRIDS)
    for name, rates in TUNED.items():
        assert rates in list(GRIDS[name]), f"the rates of {name} are none that were tried: scripts/bench easgd --tune"


def test_the_page_has_the_rates() -> None:
    (shown,) = re.findall(r"<!-- comparison -->\n(.*?)<!-- /comparison -->", PAGE, re.DOTALL)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.strip().splitlines()[2:]]
    assert [row[:4] for row in rows] == [
        [each.title, *rates_cells(rates_of(name))] for name, each in ALGORITHMS.items()
    ]
    for name in ("all.svg", "pairs.svg"):
        assert f"(easgd/{name})" in PAGE
        assert ElementTree.parse(ROOT / "docs" / "easgd" / name).getroot().tag == f"{SVG}svg"


def _run(scale: float, errors: tuple[float, ...]) -> Run:
    points = tuple(Point(num_samples=64.0 * k, time_s=scale * k, error=e) for k, e in enumerate(errors, 1))
    return Run(points=points, communication=0.25)


def test_a_row_has_the_first_test_that_reached_the_target_and_the_ratio_of_means() -> None:
    ours = Result(
        name="async-easgd",
        rates=Rates(learning_rate=0.2, rho=2),
        runs=((_run(2, (0.5, 0.03, 0.01)), _run(2, (0.03,))), (_run(2, (0.5, 0.04, 0.02)),)),
    )
    others = Result(
        name="async-sgd",
        rates=Rates(learning_rate=0.1),
        runs=((_run(1, (0.01, 0.5, 0.5)),), (_run(1, (0.01, 0.5, 0.5)),)),
    )
    row = table({"async-easgd": ours, "async-sgd": others}).splitlines()[2]
    assert row == "| Async EASGD | 0.2 | 2 |  | 96, 192 | 144 | 2.25 | 4.00 s | 4.00 | 25% |"
    never = Result(name="async-sgd", rates=others.rates, runs=(*others.runs, (_run(1, (0.5, 0.5)),)))
    assert never.mean_samples is None
    assert "| 96, 192 | 144 | – | 4.00 s | – |" in table({"async-easgd": ours, "async-sgd": never})


def test_figures_hold_every_method_and_cut_off_nothing_but_what_is_beyond_them() -> None:
    run = tuple(Point(num_samples=100.0 * k, time_s=0.1 * k, error=0.9 / k) for k in range(1, 40))
    drawn = figures(dict.fromkeys(ALGORITHMS, averaged([run, run])), target=0.97, num_examples=357)
    texts = {name: [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text")] for name, svg in drawn.items()}
    assert {algorithm.title for algorithm in ALGORITHMS.values()} <= set(texts["all.svg"])
    assert sum(text == "samples" for text in texts["pairs.svg"]) == 5
    lines = [e for e in ElementTree.fromstring(drawn["all.svg"]).iter(f"{SVG}polyline") if e.get("fill") == "none"]
    assert len(lines) == 2 * len(ALGORITHMS)
    assert all(len(line.get("points", "").split()) == 39 for line in lines)


def test_seeds_that_did_not_reach_the_target_are_told() -> None:
    rows = simulated_table(
        {"async-sgd": [(100,), (300,)], "async-easgd": [(200, 150, 400), (260, 150, None)]}
    ).splitlines()
    assert rows[2] == "| Async SGD | 200 ± 100 |  |  |  |"
    assert rows[3] == "| Async EASGD | 230 ± 30 | 1.15 | 150 ± 0 | – (1 of 2 did not) |"


@pytest.mark.full
def test_sync_easgd_keeps_to_the_samples_of_sync_sgd() -> None:
    """To a lower accuracy than the page's, with two of its seeds, so that it is quick; both need the same samples."""
    bench = load_bench()

    def samples(name: str) -> float:
        found = [
            samples_until(bench, ALGORITHMS[name], rates_of(name), seed=seed, most=12_288, target=0.95, test_every=4)
            for seed in (1, 2)
        ]
        assert all(reached for (reached,) in found)
        return mean(reached or 0 for (reached,) in found)

    assert samples("sync-easgd1") <= 1.2 * samples("sync-sgd")
