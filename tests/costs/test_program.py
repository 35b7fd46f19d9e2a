"""The `program` cost model: sums in pieces between all pairs of devices, against counts of what programs send."""

from dataclasses import replace

import numpy as np
import pytest

from pase.analysis.simulation.simulation import simulate
from pase.costs import cost_model
from pase.costs.alpha_beta import AlphaBetaCostModel, pairwise_all_reduce
from pase.costs.collectives import Link
from pase.machine import load_machine
from pase.models import build
from pase.planning.planner import search
from pase.sharding.layouts import device_mesh
from pase.sharding.reshard import all_reduce_pairs

WORDS = 4096


@pytest.mark.parametrize(("inside", "outside"), [(4, 1), (1, 4), (2, 2), (4, 2), (8, 4)])
def test_a_device_gets_what_a_program_sends_it(inside: int, outside: int) -> None:
    node = 8
    p = node * outside
    group = [(d // inside) * node + d % inside for d in range(inside * outside)]
    rest = [d for d in range(p) if d not in group]
    splits = [("k", len(group)), ("others", 1)] if not rest else [("k", len(group))]
    mesh = device_mesh("layer", splits, len(group), list(range(len(group))))
    pairs = all_reduce_pairs(mesh, ["k"], dict.fromkeys(mesh.devices, WORDS))
    received = dict.fromkeys((0, 1), 0)
    for (sender, receiver), points in pairs.items():
        if receiver == 0:
            received[int(group[sender] // node != group[receiver] // node)] += points
    # No latency, and one second a byte at one level alone: the seconds are the bytes over it.
    for level in (0, 1):
        links = [Link(latency_s=0.0, s_per_byte=float(i == level)) for i in (0, 1)]
        members = [np.array([inside]), np.array([outside])]
        found = pairwise_all_reduce(np.array([float(WORDS)]), members, links)
        assert found.tolist() == pytest.approx([received[level]])
    messages = [Link(latency_s=1.0, s_per_byte=0.0)] * 2
    assert pairwise_all_reduce(np.array([1.0]), members, messages).tolist() == [2 * (len(group) - 1)]


def test_nothing_to_sum_takes_no_time() -> None:
    links = [Link(latency_s=1.0, s_per_byte=1.0)]
    assert pairwise_all_reduce(np.array([0.0, 8.0]), [np.array([4, 1])], links).tolist() == [0, 0]


def test_on_one_node_large_sums_cost_what_alpha_beta_says() -> None:
    # Halving and doubling sends as many bytes as all pairs do; without latencies nothing else differs.
    machine = load_machine("v100")
    machine = replace(machine, levels=tuple(replace(level, latency_s=0.0) for level in machine.levels))
    for name in ("alexnet", "rnnlm"):
        plans = [search(build(name), 8, machine=machine, cost_model=m) for m in MODELS]
        assert plans[0].baselines["data_parallel"] == pytest.approx(plans[1].baselines["data_parallel"], rel=1e-9)


MODELS = ("alpha_beta", "program")


@pytest.mark.parametrize(
    ("name", "p"), [pytest.param("transformer", 16, marks=pytest.mark.full), ("rnnlm", 16), ("alexnet", 32)]
)
def test_on_several_nodes_its_strategies_are_faster_as_programs(name: str, p: int) -> None:
    graph, machine = build(name), load_machine("1080ti")
    steps = {
        model: simulate(search(graph, p, machine=machine, cost_model=model), collectives="program").step_time_s
        for model in ("paper", "program")
    }
    assert steps["program"] < 0.95 * steps["paper"]


def test_it_is_dearer_than_alpha_beta_between_nodes() -> None:
    machine = load_machine("1080ti")
    graph = build("gpt", arguments={"layers": 2})
    costs = [search(graph, 32, machine=machine, cost_model=model).baselines["data_parallel"] for model in MODELS]
    assert costs[1] > 2 * costs[0]
    assert isinstance(cost_model("program", machine, 32), AlphaBetaCostModel)
