"""Weights that two layers share: what moves between their layouts, worked out by hand."""

import pytest

from pase.costs import PaperCostModel, build_problem
from pase.graph import Access, Builder, Dim, Edge, Graph, Operator, Role
from pase.graph.operators import dense, embedding, softmax_loss
from pase.planning.plan import Transfer
from pase.planning.steps import plan_layers, total_cost
from pase.sharding.edges import shared_weights

B, S, V, D = 8, 4, 32, 16
WEIGHT_BYTES = 4 * V * D
R = 10.0


def _tied() -> Graph:
    net = Builder("tied")
    x = net.add(embedding, "tokens", net.input((B, S)), vocabulary=V, size=D, shared="table")
    x = net.add(dense, "fc", x, lead=("b", "s"), reduce=("d",), out=(("v", V),), bias=False, shared="table")
    net.add(softmax_loss, "softmax", x, dims=("b", "s", "v"))
    return net.build()


def _sharing(owner: dict[str, int], user: dict[str, int], num_devices: int = 4) -> Transfer:
    graph = _tied()
    splits = [
        {dim: chosen.get(dim, 1) for dim in operator.extents}
        for operator, chosen in zip(graph.operators, (owner, user, {}), strict=True)
    ]
    layers = plan_layers(graph, num_devices, PaperCostModel(flop_per_byte=R), splits)
    (sharing,) = (t for t in layers[1].transfers if t.input == 1)
    assert sharing.producer == "tokens"
    return sharing


def _all_reduce(size_bytes: float, group: int) -> float:
    return R * 2 * (group - 1) / group * size_bytes


def test_the_first_user_owns_the_weight() -> None:
    (weight,) = shared_weights(_tied())
    assert (weight.producer, weight.output, weight.consumer, weight.input) == ("tokens", 1, "fc", 1)


@pytest.mark.parametrize("split", [{"b": 4}, {"v": 4}, {"d": 4}, {"b": 2, "v": 2}, {"s": 2, "d": 2}])
def test_equal_layouts_share_for_nothing(split: dict[str, int]) -> None:
    sharing = _sharing(split, split)
    assert (sharing.cost, sharing.forward_bytes, sharing.backward_bytes) == (0, 0, 0)


def test_a_transposed_use_is_told_by_its_dims() -> None:
    # tokens holds all rows of half the columns, fc all columns of half the rows: a quarter is in common.
    sharing = _sharing({"d": 2}, {"v": 2})
    assert sharing.forward_bytes == sharing.backward_bytes == WEIGHT_BYTES / 4
    assert sharing.cost == R * WEIGHT_BYTES / 2


def test_a_user_with_another_layout_reduces_its_own_gradient() -> None:
    sharing = _sharing({"b": 4}, {"b": 2, "v": 2})
    # Forward every device has the whole weight; backward the owner fetches the half that it did not compute.
    assert (sharing.forward_bytes, sharing.backward_bytes) == (0, WEIGHT_BYTES / 2)
    assert sharing.cost == R * WEIGHT_BYTES / 2 + _all_reduce(WEIGHT_BYTES / 2, 2)


def test_equal_shards_whose_partial_sums_differ_are_reduced_apart() -> None:
    # The owner sums over four devices; the user has the whole gradient on two of them twice.
    sharing = _sharing({"b": 4}, {"b": 2})
    assert (sharing.forward_bytes, sharing.backward_bytes) == (0, 0)
    assert sharing.cost == _all_reduce(WEIGHT_BYTES, 2)


def test_uses_with_dims_of_other_names_are_matched_in_order() -> None:
    net = Builder("stack")
    x = net.add(dense, "first", net.input((B, D)), out=(("n", D),), bias=False, shared="w")
    net.add(dense, "second", x, reduce=("n",), out=(("m", D),), bias=False, shared="w")
    graph = net.build()
    model = PaperCostModel(flop_per_byte=R)
    splits = [{"b": 1, "n": 2, "c": 1}, {"b": 1, "m": 2, "n": 1}]
    (aligned,) = (t for t in plan_layers(graph, 2, model, splits)[1].transfers if t.input == 1)
    assert aligned.cost == 0
    # Columns in halves on one side, rows on the other: a quarter of the matrix is in common.
    splits = [{"b": 1, "n": 2, "c": 1}, {"b": 1, "m": 1, "n": 2}]
    (crossed,) = (t for t in plan_layers(graph, 2, model, splits)[1].transfers if t.input == 1)
    assert crossed.forward_bytes == crossed.backward_bytes == 4 * D * D / 4


def test_a_shared_weight_that_every_device_holds_whole_costs_nothing_between_equal_layers() -> None:
    """Positions that two layers of a T5 add to their scores: no iteration dim indexes either dim of the table."""
    x = Access(tensor="x", shape=(B, D), index_map=("b", "d"))
    table = Access(tensor="positions", shape=(V, 3), index_map=(None, None), role=Role.PARAMETER, shared="positions")
    layers = [
        Operator(
            name=name,
            kind="opaque",
            dims=(Dim("b", B), Dim("d", D)),
            reads=(x, table),
            writes=(Access(tensor="y", shape=(B, D), index_map=("b", "d")),),
        )
        for name in ("first", "second")
    ]
    edge = Edge(producer="first", output=0, consumer="second", input=0)
    problem = build_problem(
        Graph(name="positions", operators=tuple(layers), edges=(edge,)), 4, PaperCostModel(flop_per_byte=R)
    )
    costs = problem.tables.edge(1).dense()
    assert costs.shape == (problem.tables.domain_sizes)
    assert costs.diagonal().tolist() == [0.0] * len(costs)


def test_tables_and_plans_agree_on_every_pair() -> None:
    graph = _tied()
    problem = build_problem(graph, 4, PaperCostModel(flop_per_byte=R))
    assert problem.tables.edges == ((0, 1), (1, 2), (0, 1))
    for u in range(problem.tables.domain_sizes[0]):
        for v in range(problem.tables.domain_sizes[1]):
            choice = (u, v, 0)
            splits = [problem.splits(vertex, c) for vertex, c in enumerate(choice)]
            layers = plan_layers(graph, 4, PaperCostModel(flop_per_byte=R), splits)
            assert problem.tables.evaluate(choice) == pytest.approx(total_cost(layers), rel=1e-12)
