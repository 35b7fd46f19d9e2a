"""Ours beside the others: never dearer, for every built-in network, number of devices and cost model."""

import itertools

import pytest

from pase import Graph, load, load_machine
from pase.analysis.baselines.compare import OURS, compare
from pase.analysis.baselines.mcmc import Sampling
from pase.analysis.baselines.registry import BASELINES, chosen
from pase.costs import COST_MODELS
from pase.errors import ConfigurationError
from pase.graph import Scalar
from pase.models import MODELS
from pase.planning.planner import search
from pase.planning.problems import data_parallel_cost, problem_of
from pase.planning.steps import total_cost
from pase.solver import solve
from tests.networks import small_graph, tiny_graph

DEVICES = (16,)

SHALLOW: dict[str, dict[str, Scalar]] = {
    "transformer": {"layers": 2},
    "transformer_big": {"layers": 1},
    "resnet101": {"blocks": "1,2,1,1"},
    "densenet121": {"blocks": "1,2,1,1"},
    "inception_v3": {"blocks": "1,2,1"},
    "bert_large": {"layers": 2},
    "gpt": {"layers": 2},
}
"""Fewer of the layers that a network repeats; all at their true sizes, so that costs of layers are the true ones."""


ALL = [(model, cost_model) for model in MODELS for cost_model in COST_MODELS]
SOME = ALL[:: len(COST_MODELS) + 1]
"""Of the pairs, those that have every network and every cost model."""


@pytest.mark.parametrize(
    ("model", "cost_model", "numbers"),
    [*((*pair, DEVICES) for pair in SOME), *(pytest.param(*pair, (8, 32, 64), marks=pytest.mark.full) for pair in ALL)],
)
def test_ours_is_never_dearer_than_a_baseline(model: str, cost_model: str, numbers: tuple[int, ...]) -> None:
    graph = load(model, arguments=SHALLOW.get(model, {}))
    machine = load_machine("1080ti")
    others = chosen(sampling=Sampling(steps=300, start="data_parallel"))
    num_compared = 0
    for devices in numbers:
        problem = problem_of(graph, devices, machine, cost_model)
        ours = solve(problem.tables)
        assert ours.exact
        for baseline in others:
            choice = baseline.choose(problem, machine)
            if choice is not None:
                cost = problem.tables.evaluate(choice)
                assert ours.cost <= cost * (1 + 1e-12), (baseline.name, devices)
                num_compared += 1
    assert num_compared >= 2 * len(numbers)


@pytest.mark.parametrize("cost_model", ["paper", "step"])
def test_figures_of_a_comparison_are_those_of_its_plans(cost_model: str) -> None:
    graph, machine = small_graph("gpt"), load_machine("1080ti")
    found = compare(graph, 8, machine=machine, cost_model=cost_model)
    assert [contender.name for contender in found.contenders] == [
        OURS, "data_parallel", "mesh_tensorflow", "megatron", "mcmc",
    ]  # fmt: skip
    assert [baseline.name for baseline in found.absent] == ["owt", "rnn", "integrated_grid"]
    for contender in found.contenders:
        plan = contender.plan
        assert contender.compute + contender.communication == pytest.approx(plan.total_cost, rel=1e-12)
        assert total_cost(plan.layers) == pytest.approx(plan.total_cost, rel=1e-12)
        assert plan.lower_bound == pytest.approx(found.contenders[0].plan.total_cost, rel=1e-12)
        assert plan.exact == (plan.gap == 0)
        assert contender.search_time_s >= 0
    searched = search(graph, 8, machine=machine, cost_model=cost_model)
    assert found.contenders[0].plan.total_cost == pytest.approx(searched.total_cost, rel=1e-12)
    problem = problem_of(graph, 8, machine, cost_model)
    assert found.contenders[1].plan.total_cost == pytest.approx(data_parallel_cost(problem), rel=1e-12)
    assert found.contenders[1].ratio_to_data_parallel == pytest.approx(1.0, rel=1e-12)


def test_memory_is_counted_by_hand_for_data_parallelism() -> None:
    """Weights whole, a quarter of what is kept of the batch, gradients and the copies of the bucket that sums them."""
    graph = tiny_graph()
    found = compare(graph, 4, machine=load_machine("1080ti"), baselines=chosen(["data_parallel"]))
    weights = graph.num_parameters
    batch, inputs = 2, 8
    # Gradients are one bucket, which is summed behind the backward pass: of the batch data and labels are there.
    assert found.contenders[1].memory_bytes == 4 * (3 * weights + batch * (inputs + 1))


def test_a_strategy_as_cheap_as_ours_is_known_to_be_optimal() -> None:
    graph = load("gpt", arguments={"layers": 1})
    found = compare(graph, 8, machine=load_machine("1080ti"), baselines=chosen(["data_parallel"]))
    ours, other = found.contenders
    assert other.plan.total_cost == pytest.approx(ours.plan.total_cost, rel=1e-12)
    assert other.plan.exact


def test_only_some_baselines_in_the_order_of_all() -> None:
    assert [entry.name for entry in chosen(["mcmc", "owt"])] == ["owt", "mcmc"]
    assert [entry.name for entry in chosen()] == list(BASELINES)
    with pytest.raises(ConfigurationError, match="unknown baseline 'own': did you mean 'owt'"):
        chosen(["owt", "own"])


def test_what_cannot_be_searched_cannot_be_compared() -> None:
    with pytest.raises(ConfigurationError, match="no layer of 'mlp' can be split over 3 devices"):
        compare(small_graph("mlp"), 3, machine=load_machine("1080ti"))


def _speedup(graph: Graph, devices: int, baseline: str) -> tuple[float, float]:
    """Return (ours, a baseline) as the cost of data parallelism ÷ their own."""
    found = compare(graph, devices, machine=load_machine("1080ti"), baselines=chosen([baseline]))
    ours, other = (1 / contender.ratio_to_data_parallel for contender in found.contenders)
    return ours, other


@pytest.mark.parametrize(
    ("model", "expert"),
    [
        *[("alexnet", "owt"), ("rnnlm", "rnn"), ("transformer", "mesh_tensorflow")],
        pytest.param("inception_v3", "owt", marks=pytest.mark.full),
    ],
)
def test_experts_beat_data_parallelism_and_ours_beats_the_experts(model: str, expert: str) -> None:
    """PaSE, Fig. 6a, its four networks at p = 32: ours > expert's > data parallelism."""
    ours, other = _speedup(load(model), 32, expert)
    assert ours > other > 1


def test_one_weird_trick_gathers_between_dense_layers_and_ours_does_not() -> None:
    """PaSE, section IV-D: splitting the out-channels alone leads to a high volume of all-gathers between them."""
    found = compare(load("alexnet"), 32, machine=load_machine("1080ti"), baselines=chosen(["owt"]))
    between = [
        sum(transfer.cost for name in ("fc2", "fc3") for transfer in contender.plan[name].transfers)
        for contender in found.contenders
    ]
    assert between[0] == 0 < between[1]
    dense = [found.contenders[0].plan[name].splits for name in ("fc1", "fc2", "fc3")]
    for first, second in itertools.pairwise(dense):
        assert first["n"] == second["c"] > 1
