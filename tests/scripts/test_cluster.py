"""The benchmark on a cluster: Megatron's splits of a chain, what figures are made of times, tables of made-up ones."""

from dataclasses import replace

import pytest

from pase import evaluate, load
from pase.machine import Overlap
from pase.planning.steps import total_cost
from scripts.benchmarks.cluster import (
    BY_NODES,
    DATA_PARALLEL,
    MEGATRON,
    MODELS,
    NETWORKS,
    OURS,
    Setting,
    Timed,
    document,
    pairs_of_products,
    strategies,
    tables,
)
from tests.simulation.machines import machine

MACHINE = replace(
    machine((2, 1e-4, 5e7), (8, 5e-4, 2.5e7), flop_per_s=3e10),
    collectives="ring",
    overlap=Overlap(share=0.6, source="a test"),
)


def timed(name: str, predicted_s: float, *times_s: float) -> Timed:
    """Of a placed plan a tenth more is predicted, and updates take 10 ms."""
    times = tuple((time_s, time_s + 0.01) for time_s in times_s)
    return Timed(name=name, predicted_s=predicted_s, placed_s=1.1 * predicted_s, times_s=times)


def setting(*ours_s: float) -> Setting:
    return Setting(
        model="alexnet",
        network=NETWORKS[0],
        timed=(
            timed(OURS, 0.4, *ours_s),
            timed(BY_NODES, 0.4, 0.45, 0.55),
            timed(DATA_PARALLEL, 1.0, 1.2, 0.8, 1.1),
            timed(MEGATRON, 0.8, 1.0),
            timed("random 0", 2.0, 3.0),
        ),
    )


def test_the_middle_step_counts() -> None:
    assert timed("a", 1.0, 9.0, 1.0, 2.0).measured_s == 2.0


def test_how_far_a_searched_strategy_is_behind_those_that_were_not_searched() -> None:
    assert setting(0.5).behind == pytest.approx(-0.5)
    assert setting(1.02).behind == pytest.approx(0.02)
    # The other searched one is no rival.
    assert setting(0.9).behind == pytest.approx(-0.1)
    assert setting(0.9).behind_others(BY_NODES) == pytest.approx(-0.5)


def test_speedups_are_over_data_parallelism() -> None:
    assert setting(0.55).speedup(OURS) == pytest.approx((2.0, 2.5))
    assert setting(0.55).speedup(MEGATRON) == pytest.approx((1.1, 1.25))
    assert setting(0.55).correlations == pytest.approx((1, 1), abs=0.06)


def test_tables_count_what_is_fastest() -> None:
    found = tables([setting(0.5), setting(1.02), setting(1.5)], [(NETWORKS[0], MACHINE)])
    assert "| settings in which the searched strategy is the fastest | 1 of 3 |" in found["summary"]
    assert "| the same, or as fast up to 3% | 2 of 3 |" in found["summary"]
    assert "| the most that it is behind | +50.0% |" in found["summary"]
    assert "| the one searched by `alpha_beta` is the fastest | 3 of 3 |" in found["summary"]
    for cells in ("500 (400, 440) | 500 (400, 440) | 1100 (1000, 1100)", "1000 (800, 880) | 3000 (2000, 2200)"):
        assert cells in found["steps"]
    # By a fifth or a third too short, all but data parallelism's 9 % and the one that was made the fastest.
    assert "| T within 10% of the measured step | 3 of 15 |" in found["summary"]
    assert "| the placed T within 10% of the measured step | 3 of 15 |" in found["summary"]
    assert "| what comes after the sums: median, largest | 10 ms, 10 ms |" in found["summary"]
    assert "| alexnet | 4 | 200 / 50 | 2.20 | 2.50 | 1.10 | 1.652 |" in found["figure 6"]
    assert "| 4 | 200 / 50 | 400.0 / 200.0 | 100 µs / 500 µs | 30.0 GFLOP/s |" in found["machines"]


def test_all_times_are_kept() -> None:
    (found,) = document([setting(0.5, 0.7)])
    assert (found["model"], found["processes"], found["links_mbit_per_s"]) == ("alexnet", 4, "200 / 50")
    expected = {"predicted_s": 0.4, "placed_s": pytest.approx(0.44), "times_s": ((0.5, 0.51), (0.7, 0.71))}
    assert found["strategies"][OURS] == expected


def test_of_each_two_products_the_first_is_split_by_columns_and_the_second_by_rows() -> None:
    graph = load("mlp", arguments={"batch": 8, "inputs": 8, "hidden": 8, "classes": 8, "layers": 3})
    found = dict(zip([operator.name for operator in graph.operators], pairs_of_products(graph, 4, 2), strict=True))
    assert [found[name] for name in ("fc1", "fc2", "fc3")] == [{"n": 2, "b": 2}, {"c": 2, "b": 2}, {"b": 4}]


@pytest.mark.parametrize(
    "model", ["mlp", *(pytest.param(name, marks=pytest.mark.full) for name in MODELS if name != "mlp")]
)
def test_every_strategy_is_predicted_and_the_searched_one_is_the_cheapest(model: str) -> None:
    plans = strategies(load(model, arguments=MODELS[model]), 4, MACHINE)
    assert list(plans) == [OURS, BY_NODES, DATA_PARALLEL, MEGATRON, "random 0", "random 1", "random 2"]
    costs = {name: total_cost(plan.layers) for name, plan in plans.items()}
    assert min(costs, key=costs.__getitem__) == OURS
    assert {plan.cost_model for plan in plans.values()} == {"step"}
    # A placement serves all layers at once: data parallelism's has nothing to choose.
    assert plans[DATA_PARALLEL].placed_cost == pytest.approx(costs[DATA_PARALLEL], rel=1e-12)
    assert all(plan.placed_cost >= costs[name] * (1 - 1e-9) for name, plan in plans.items())
    assert plans[MEGATRON].layers != plans[DATA_PARALLEL].layers


def test_moves_of_a_placed_plan_by_hand() -> None:
    """From features to batch: a device fetches 2 × 2 points from each other one, there and back."""
    graph = load("mlp", arguments={"batch": 8, "inputs": 8, "hidden": 8, "classes": 8, "layers": 2})
    pinned = {"pin": {"fc1": "n=4"}, "rest": "data_parallel"}
    plan = evaluate(graph, pinned, 4, machine=MACHINE, cost_model="step")
    one_way_s = 1e-4 + 16 / 5e7 + 2 * (5e-4 + 2 * 16 / 2.5e7)
    assert sum(transfer.cost for transfer in plan["fc2"].transfers) == pytest.approx(2 * one_way_s)
    # Of the sums that remain, over the batch, none lies otherwise.
    assert plan.placed_cost == pytest.approx(plan.total_cost, rel=1e-12)


def test_links_are_from_50_megabit_to_a_gigabit_and_there_are_ten_settings() -> None:
    rates = [rate for network in NETWORKS for rate in (network.rank_bits_per_s, network.node_bits_per_s)]
    assert (min(rates), max(rates)) == (5e7, 1e9)
    assert {network.num_ranks for network in NETWORKS} == {4, 8}
    assert len(NETWORKS) * len(MODELS) >= 10
