"""Costs by tables, which searches add up, against those of whole plans, under every cost model."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pase import search
from pase.costs import build_problem, cost_model
from pase.machine import Machine, load_machine
from pase.planning.problems import problem_of
from pase.planning.steps import plan_layers, total_cost
from tests.costs.test_kernels import place
from tests.costs.test_step import slow
from tests.costs.test_step_ring import rings
from tests.networks import small_graph, tiny_graph
from tests.simulation.machines import machine

SEVERAL = ["alexnet", "rnnlm", "gpt"]
FLAT, NODES = load_machine("1080ti"), machine((4, 1e-6, 1e9), (0, 5e-6, 1e8))
ROOFLINE = replace(NODES, device=replace(NODES.device, memory_bandwidth_bytes_per_s=1e11))
FOUR = (rings().levels[0], replace(rings().levels[1], num_devices=4))
CASES = [
    *((name, "alpha_beta", ROOFLINE) for name in (*SEVERAL, "densenet121")),
    *((name, model, NODES) for model in ("program", "ring") for name in SEVERAL),
    *((name, "paper", FLAT) for name in SEVERAL),
    *(pytest.param(name, "paper", FLAT, marks=pytest.mark.full) for name in ("transformer", "inception_v3")),
    *((name, "step", where) for where in (slow(share=0.8), rings(), place()) for name in SEVERAL),
]


@pytest.mark.parametrize(("name", "model", "where"), CASES)
def test_tables_and_plans_agree(name: str, model: str, where: Machine) -> None:
    graph, p = small_graph(name), 8
    costs, rng = cost_model(model, where, p), np.random.default_rng(p)
    problem = build_problem(graph, p, costs)
    for _ in range(2):
        choice = tuple(int(rng.integers(n)) for n in problem.tables.domain_sizes)
        splits = [problem.splits(vertex, c) for vertex, c in enumerate(choice)]
        layers = plan_layers(problem.graph, p, costs, splits, [tuple(range(p))] * len(choice))
        assert total_cost(layers) == pytest.approx(problem.tables.evaluate(choice), rel=1e-12)


@pytest.mark.parametrize(
    "places",
    [
        [slow(flop_per_s=flop_per_s) for flop_per_s in (1e8, 1e9, 3e9, 1e10, 1e11)],
        [replace(rings(speed), levels=FOUR) for speed in (1e7, 1e8, 1e9)],
        [place(launch_s=launch_s) for launch_s in (0.0, 1e-3)],
    ],
    ids=["overlap", "rings", "kernels"],
)
def test_no_strategy_of_a_small_network_is_cheaper(places: list[Machine]) -> None:
    num_hidden = 0
    for where in places:
        tables = problem_of(tiny_graph(), 4, where, "step").tables
        every = [tables.evaluate(choice) for choice in product(*map(range, tables.domain_sizes))]
        plan = search(tiny_graph(), 4, machine=where, cost_model="step")
        assert plan.exact
        assert plan.total_cost == pytest.approx(min(every), rel=1e-9)
        num_hidden += plan.hidden_cost > 0
    assert num_hidden
