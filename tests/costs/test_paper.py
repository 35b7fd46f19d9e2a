"""The `paper` cost model against closed forms of whole networks and of known strategies."""

from collections.abc import Mapping

import numpy as np
import pytest

from pase.costs import PaperCostModel, build_problem, cost_model
from pase.costs.traffic import Communication, PassWork, Pattern
from pase.graph import Builder, Graph
from pase.graph.operators import add_parameter, dense, elementwise
from pase.machine import load_machine
from pase.models import build
from pase.planning.steps import plan_layers, total_cost
from pase.sharding.overlap import Redistribution
from pase.sharding.shards import data_parallel
from tests.networks import small_graph, whole_splits

R = 1000.0
MODEL = PaperCostModel(flop_per_byte=R)


def _cost(
    graph: Graph, num_devices: int, splits: Mapping[str, Mapping[str, int]], model: PaperCostModel = MODEL
) -> float:
    """Total cost of a strategy; layers and dims that are not named are not split."""
    full = whole_splits(graph, splits)
    return total_cost(plan_layers(graph, num_devices, model, full))


def _data_parallel(graph: Graph, num_devices: int, model: PaperCostModel = MODEL) -> float:
    return _cost(
        graph,
        num_devices,
        {o.name: dict(zip(o.extents, data_parallel(graph, o, num_devices), strict=True)) for o in graph.operators},
        model,
    )


def _all_reduce(num_values: float, num_devices: int) -> float:
    return R * 2 * (num_devices - 1) / num_devices * 4 * num_values


# -- one message


def test_messages() -> None:
    sizes, groups = np.array([100.0, 100.0, 100.0]), np.array([1, 2, 8])
    reduced = Communication(tensor="y", pattern=Pattern.ALL_REDUCE, size_bytes=sizes, group=groups, times=3)
    assert MODEL.message(reduced).tolist() == [0, 3 * R * 100, 3 * R * 2 * 7 / 8 * 100]
    for pattern in (Pattern.MOVE, Pattern.HALO):
        moved = Communication(tensor="y", pattern=pattern, size_bytes=sizes, group=groups, times=2)
        assert MODEL.message(moved).tolist() == [2 * R * 100] * 3
    none = np.zeros(3)
    fetch = Redistribution(
        needed_bytes=sizes + 7,
        kept_bytes=none + 7,
        held_bytes=none,
        messages=none,
        sum_members=np.ones((3, 0), dtype=int),
    )
    assert MODEL.transfer(fetch).tolist() == [R * 100] * 3
    assert MODEL.work(PassWork(flop=sizes, touched_bytes=none)).tolist() == [100] * 3


def test_r_is_that_of_the_slowest_link_in_use() -> None:
    machine = load_machine("1080ti")
    assert cost_model("paper", machine, 8) == PaperCostModel(flop_per_byte=11.34e12 / 15.75e9)
    assert cost_model("paper", machine, 9) == PaperCostModel(flop_per_byte=11.34e12 / 12.5e9)
    assert cost_model("paper", machine, 8).unit == "FLOP"


# -- data parallelism of whole networks


def _alexnet_flop(batch: int) -> int:
    """FLOP of a training step of the one-tower AlexNet from its table of layers (Krizhevsky 2014)."""
    convolutions = [(64, 55, 3, 11), (192, 27, 64, 5), (384, 13, 192, 3), (256, 13, 384, 3), (256, 13, 256, 3)]
    flop = 0
    for number, (n, size, c, kernel) in enumerate(convolutions):
        passes = 2 if number == 0 else 3
        # 2 FLOP a multiply-add; bias and ReLU of every output forward, ReLU backward.
        flop += passes * 2 * n * size**2 * c * kernel**2 + (2 + 1) * n * size**2
    for n, size in ((64, 27), (192, 13), (256, 6)):
        flop += 2 * n * size**2 * 9
    for n, c, activation in ((4096, 9216, 1), (4096, 4096, 1), (1000, 4096, 0)):
        flop += 3 * 2 * n * c + n + 2 * n * activation
    return batch * (flop + 2 * 4 * 1000)


@pytest.mark.parametrize("p", [1, 32])
def test_data_parallelism_of_alexnet(p: int) -> None:
    graph = build("alexnet", batch=128)
    expected = _alexnet_flop(128) / p + _all_reduce(61_100_840, p)
    assert _data_parallel(graph, p) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("name", "num_values"),
    [
        ("lenet5", 61_706),
        # The weights (torchvision's resnet101) and each of 52,672 channels' mean and mean square.
        ("resnet101", 44_549_160 + 105_344),
        # Tied embeddings are reduced once (GPT-2 small, BERT-large).
        ("gpt", 124_439_808),
        *(
            pytest.param(name, count, marks=pytest.mark.full)
            for name, count in (("vgg16", 138_357_544), ("bert_large", 335_174_458), ("transformer", 69_701_632))
        ),
        ("rnnlm", 100_000 * 2048 * 2 + 100_000 + 2 * 4 * 2048 * (2 * 2048 + 1)),
    ],
)
def test_data_parallelism_splits_all_work_and_reduces_all_gradients(name: str, num_values: int) -> None:
    graph, p = build(name, batch=64), 32
    alone = _data_parallel(graph, 1)
    assert _data_parallel(graph, p) == pytest.approx(alone / p + _all_reduce(num_values, p), rel=1e-14)


@pytest.mark.parametrize("name", ["alexnet", "rnnlm"])
def test_no_configuration_beats_its_share_of_the_work(name: str) -> None:
    # With free communication each layer costs at least 1 / p of what it costs alone, and one reaches at most that.
    graph = small_graph(name)
    problem = build_problem(graph, 8, PaperCostModel(flop_per_byte=0.0))
    costly = build_problem(graph, 8, MODEL)
    for vertex in range(len(graph.operators)):
        costs, found = problem.tables.layer_costs(vertex), problem.configurations[vertex]
        alone = costs[np.flatnonzero((found == 1).all(axis=1))[0]]
        assert (costs >= alone / found.prod(axis=1) * (1 - 1e-14)).all()
        assert costs.min() == pytest.approx(alone / 8)
        assert (costly.tables.layer_costs(vertex) >= costs).all()
    assert all(not table.values.any() for table in problem.tables.edge_tables)


# -- known strategies


def test_a_residual_and_a_branch_each_cost_their_own_edge() -> None:
    batch, d, k = 16, 64, 4
    net = Builder("residual")
    x = net.add(add_parameter, "x", net.input((batch, d)), dims=("b", "d"), over=("b", "d"))
    net.add(elementwise, "twice", x, x, dims=("b", "d"))
    graph = net.build()
    splits = {"x": {"b": k}, "twice": {"d": k}}
    free = _cost(graph, k, splits, PaperCostModel(flop_per_byte=0.0))
    one_way = R * 4 * (batch * d / k - batch * d / k**2)
    assert _cost(graph, k, splits) - free == pytest.approx(2 * 2 * one_way)


# -- tables


def test_layers_that_are_alike_share_one_table() -> None:
    problem = build_problem(build("gpt", arguments={"layers": 12}), 8, MODEL)
    tables = problem.tables
    first, last = (
        [v for v, name in enumerate(tables.vertex_names) if name.startswith(f"{block}_")]
        for block in _blocks(tables.vertex_names)
    )
    assert len(first) == len(last) > 5
    for one, other in zip(first, last, strict=True):
        assert tables.layer_costs(one) is tables.layer_costs(other)
        assert problem.configurations[one] is problem.configurations[other]
    # Twice as many layers make no more tables.
    deeper = build_problem(build("gpt", arguments={"layers": 24}), 8, MODEL).tables
    assert len(deeper.vertex_costs) == len(tables.vertex_costs)
    assert len(deeper.edge_tables) == len(tables.edge_tables)


def _blocks(names: tuple[str, ...]) -> tuple[str, str]:
    """Names of the second and the last of the repeated blocks."""
    blocks = [name.split("_")[0] for name in names if name.split("_")[0][-1].isdigit()]
    distinct = list(dict.fromkeys(blocks))
    return distinct[1], distinct[-1]


def test_a_pair_split_by_columns_then_by_rows_needs_one_all_reduce_each_way() -> None:
    # Shoeybi et al. 2019, Fig. 3: y = f(x a) b with a's columns and b's rows split needs none in between.
    batch, d, e, k = 16, 64, 256, 8
    net = Builder("mlp")
    x = net.add(add_parameter, "before", net.input((batch, d)), dims=("b", "d"), over=("b", "d"))
    x = net.add(dense, "a", x, out=(("n", e),), activation="relu", bias=False)
    x = net.add(dense, "b", x, out=(("n", d),), bias=False)
    net.add(elementwise, "after", x, dims=("b", "d"), function="relu")
    graph = net.build()
    splits = {"a": {"n": k}, "b": {"c": k}}
    free = _cost(graph, k, splits, PaperCostModel(flop_per_byte=0.0))
    assert _cost(graph, k, splits) - free == pytest.approx(2 * _all_reduce(batch * d, k))
    # By columns twice, the tensor in between is gathered too, and its gradient is summed.
    twice = {"a": {"n": k}, "b": {"n": k}}
    gathered = R * 4 * batch * (e - e / k)
    after = R * 4 * batch * (d - d / k)
    assert _cost(graph, k, twice) - free == pytest.approx(
        _all_reduce(batch * d, k) + gathered + _all_reduce(batch * e, k) + after
    )


@pytest.mark.parametrize("name", ["alexnet", "inception_v3", "rnnlm", "transformer", "densenet121", "gpt"])
def test_without_communication_p_devices_are_p_times_as_fast(name: str) -> None:
    free, graph = PaperCostModel(flop_per_byte=0.0), small_graph(name)
    assert _data_parallel(graph, 16, free) == pytest.approx(_data_parallel(graph, 1, free) / 16, rel=1e-14)
