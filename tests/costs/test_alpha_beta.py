"""The `alpha_beta` cost model against closed forms worked out by hand, one effect at a time."""

from dataclasses import replace
from itertools import permutations, product
from math import gcd, log2, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.costs import AlphaBetaCostModel, build_problem, cost_model, traffic_of
from pase.costs.alpha_beta import layer_members, level_fanouts, level_members
from pase.errors import MachineError
from pase.graph import Builder, Graph
from pase.graph.operators import add_parameter, conv2d, dense, elementwise, embedding, softmax_loss
from pase.machine import Machine, load_machine
from pase.models import build
from pase.planning.planner import SearchOptions, search
from pase.planning.steps import plan_layers, total_cost
from pase.sharding.shards import data_parallel
from tests.networks import small_graph, whole_splits
from tests.simulation.machines import machine

FLOPS, A1, B1, A2, B2 = 1e12, 1e-5, 1e-10, 5e-5, 1e-9


def _machine(memory_bandwidth: float | None = None) -> Machine:
    levels = (8, A1, 1 / B1), (0, A2, 1 / B2)
    return machine(*levels, flop_per_s=FLOPS, memory_bandwidth_bytes_per_s=memory_bandwidth)


def _cost(graph: Graph, p: int, machine: Machine, **splits: dict[str, int]) -> float:
    full = whole_splits(graph, splits)
    return total_cost(plan_layers(graph, p, cost_model("alpha_beta", machine, p), full))


def _free(graph: Graph, p: int, **splits: dict[str, int]) -> float:
    """What is left when nothing is communicated: seconds of computing."""
    full = whole_splits(graph, splits)
    layers = plan_layers(graph, p, cost_model("alpha_beta", _machine(), p), full)
    return sum(layer.compute_cost for layer in layers)


def _sum_s(n: float, *levels: tuple[int, float, float]) -> float:
    """Seconds of an all-reduce over powers of two, (devices, α, β) at each level.

    At each level some halve the vector between them, and gather it back; the others double what is left.
    """
    ways = []
    for shares in product(*([2**i for i in range(int(log2(count)) + 1)] for count, _, _ in levels)):
        time, left = 0.0, n
        for share, (_, alpha, beta) in zip(shares, levels, strict=True):
            time += 2 * (log2(share) * alpha + (share - 1) / share * left * beta)
            left /= share
        for share, (count, alpha, beta) in zip(shares, levels, strict=True):
            time += log2(count / share) * (alpha + left * beta)
        ways.append(time)
    return min(ways)


# -- work


def test_work_takes_the_longer_of_computing_and_touching() -> None:
    net = Builder("one layer")
    net.add(dense, "fc", net.input((64, 256)), out=(("n", 128),), bias=False)
    graph = net.build()
    flop, words = 2 * 64 * 256 * 128, 64 * 256 + 256 * 128 + 64 * 128
    # Forward one product; backward one more, for the weight alone (training data has no gradient).
    assert _cost(graph, 1, _machine()) == pytest.approx(2 * flop / FLOPS)
    slow = _machine(memory_bandwidth=1e6)
    assert _cost(graph, 1, slow) == pytest.approx((4 * words + 4 * (words + 256 * 128)) / 1e6)
    # Half as fast again at computing as at touching: both passes are bound by what they touch.
    one = flop / FLOPS
    both = 1.5 * one + 1.5 * one * (words + 256 * 128) / words
    assert _cost(graph, 1, _machine(memory_bandwidth=4 * words / (1.5 * one))) == pytest.approx(both)


def test_p_devices_compute_a_p_th_each() -> None:
    graph = build("alexnet", batch=128)
    split = {o.name: dict(zip(o.extents, data_parallel(graph, o, 16), strict=True)) for o in graph.operators}
    assert _free(graph, 16, **split) == pytest.approx(_free(graph, 1) / 16)


# -- sums


@pytest.mark.parametrize("p", [2, 8, 32])
def test_data_parallelism_all_reduces_every_gradient_over_all_levels(p: int) -> None:
    graph = build("alexnet", batch=128)
    split = {o.name: dict(zip(o.extents, data_parallel(graph, o, p), strict=True)) for o in graph.operators}
    inner, outer = min(p, 8), max(p // 8, 1)
    expected = _free(graph, p, **split)
    for parameter in (4 * a.size for o in graph.operators for a in o.parameters):
        # Eight devices send at once over the node's one link.
        expected += _sum_s(parameter, (inner, A1, B1), (outer, A2, 8 * B2))
    assert _cost(graph, p, _machine(), **split) == pytest.approx(expected, rel=1e-9)


def _pair() -> Graph:
    """y = x w, then something pointwise: where w's rows are split y is a partial sum."""
    net = Builder("pair")
    x = net.add(add_parameter, "before", net.input((512, 256)), dims=("b", "d"), over=("b", "d"))
    x = net.add(dense, "fc", x, out=(("n", 1024),), bias=False)
    net.add(elementwise, "after", x, dims=("b", "d"), function="relu")
    return net.build()


def test_a_sum_of_which_each_device_needs_a_part_is_scattered() -> None:
    graph, n = _pair(), 4 * 512 * 1024
    scatter = 3 * A1 + 7 / 8 * n * B1
    split = {"before": {"d": 8}, "fc": {"c": 8}}
    # c = 8: y is a partial sum; the next layer reads an eighth of it, whole rows or whole columns, on each device.
    for part in ({"b": 8}, {"d": 8}, {"b": 2, "d": 4}):
        forward = _cost(graph, 8, _machine(), **split, after=part) - _free(graph, 8, **split, after=part)
        # Backward every device needs the whole gradient, of which it has an eighth.
        backward = 7 * A1 + 7 / 8 * n * B1
        assert forward == pytest.approx(scatter + backward, rel=1e-9)


def test_a_sum_that_every_device_needs_is_gathered_and_half_of_one_from_four() -> None:
    graph, n = _pair(), 4 * 512 * 1024
    scatter = 3 * A1 + 7 / 8 * n * B1
    # Half of it: gathered from four, and backward the other half of the gradient.
    half = 2 * A1 + 3 / 4 * (n / 2) * B1 + A1 + n / 2 * B1
    for after, beyond in (({}, scatter), ({"b": 2}, half)):
        split = {"before": {"d": 8}, "fc": {"c": 8}, "after": after}
        found = _cost(graph, 8, _machine(), **split) - _free(graph, 8, **split)
        assert found == pytest.approx(scatter + beyond, rel=1e-9)


def test_the_gradient_of_what_a_layer_reads_is_scattered_likewise() -> None:
    graph, n = _pair(), 4 * 512 * 256
    for before, gather in (({"b": 8}, 0.0), ({}, 3 * A1 + 7 / 8 * n * B1)):
        split = {"before": before, "fc": {"n": 8}, "after": {"d": 8}}
        found = _cost(graph, 8, _machine(), **split) - _free(graph, 8, **split)
        forward = 7 * A1 + 7 / 8 * n * B1 if before else 0.0  # all of x on every device
        assert found == pytest.approx(forward + 3 * A1 + 7 / 8 * n * B1 + gather, rel=1e-9)


def test_a_sum_with_two_readers_is_all_reduced_where_it_is() -> None:
    net = Builder("two readers")
    x = net.add(add_parameter, "before", net.input((512, 256)), dims=("b", "d"), over=("b", "d"))
    x = net.add(dense, "fc", x, out=(("n", 1024),), bias=False)
    net.add(elementwise, "one", x, dims=("b", "d"), function="relu")
    net.add(elementwise, "other", x, dims=("b", "d"), function="relu")
    graph, n = net.build(), 4 * 512 * 1024
    split = {"before": {"d": 8}, "fc": {"c": 8}, "one": {"b": 8}, "other": {"b": 8}}
    found = _cost(graph, 8, _machine(), **split) - _free(graph, 8, **split)
    assert found == pytest.approx(_sum_s(n, (8, A1, B1)) + 2 * (7 * A1 + 7 / 8 * n * B1), rel=1e-9)


def test_heavy_sums_keep_to_a_node_and_light_ones_go_between_nodes() -> None:
    net = Builder("one product")
    x = net.add(add_parameter, "before", net.input((1024, 64)), dims=("b", "d"), over=("b", "d"))
    net.add(dense, "fc", x, out=(("n", 64),), bias=False)
    graph = net.build()
    # b = 4 sums 4 · 64 · 8 bytes of gradients in each of 8 groups; n = 8 sums 4 · 256 · 64 bytes of x's gradient.
    split = {"before": {"b": 4}, "fc": {"b": 4, "n": 8}}
    (operator,) = [o for o in graph.operators if o.name == "fc"]
    row = np.array([[split["fc"].get(dim, 1) for dim in operator.extents]], dtype=np.int32)
    members = layer_members(traffic_of(graph, operator, row), (8, 4))
    found = {dim: members[:, 0, i].tolist() for i, dim in enumerate(operator.extents)}
    assert found == {"b": [1, 4], "n": [8, 1], "c": [1, 1]}
    gradient = 2 * (A2 + 4 * 64 * 8 * 8 * B2)  # recursive doubling: eight groups share each node's link
    x_bytes = 4 * 256 * 64
    inside = 2 * (3 * A1 + 7 / 8 * x_bytes * B1)
    cost = _cost(graph, 32, _machine(), **split) - _free(graph, 32, **split)
    assert cost == pytest.approx(gradient + inside, rel=1e-9)


# -- halos and re-sharding


def test_a_halo_is_one_message_from_each_neighbour() -> None:
    net = Builder("convolutions")
    x = net.add(conv2d, "one", net.input((8, 3, 32, 32)), out=4, kernel=3, padding=1, bias=False)
    net.add(conv2d, "two", x, out=4, kernel=3, padding=1, bias=False)
    graph = net.build()
    for split, neighbours in (({"h": 2}, 1), ({"h": 4}, 2), ({"h": 2, "w": 2}, 3), ({"h": 4, "w": 2}, 5)):
        p = prod(split.values())
        two = _cost(graph, p, _machine(), one=split, two=split) - _free(graph, p, one=split, two=split)
        size = 32 // split["h"], 32 // split.get("w", 1)
        rows = min(split["h"] - 1, 2), min(split.get("w", 1) - 1, 2)
        halo = 4 * 8 * 4 * ((size[0] + rows[0]) * (size[1] + rows[1]) - size[0] * size[1])
        weights = sum(
            min(log2(p) * (A1 + n * B1), 2 * log2(p) * A1 + 2 * (p - 1) / p * n * B1)
            for n in (4 * 4 * 3 * 9, 4 * 4 * 4 * 9)
        )
        assert two == pytest.approx(weights + 2 * (neighbours * A1 + halo * B1), rel=1e-9)


def test_resharding_fetches_from_its_own_node_first() -> None:
    net = Builder("transposed")
    x = net.add(add_parameter, "rows", net.input((512, 512)), dims=("b", "d"), over=("b", "d"))
    net.add(elementwise, "columns", x, dims=("b", "d"), function="relu")
    graph, n = net.build(), 4 * 512 * 512
    split = {"rows": {"b": 32}, "columns": {"d": 32}}
    found = _cost(graph, 32, _machine(), **split) - _free(graph, 32, **split)
    # 31 pieces of n / 32²: 7 from the node, 24 over the link that its 8 devices share; and the gradient back.
    piece = n / 32**2
    assert found == pytest.approx(2 * (7 * (A1 + piece * B1) + 24 * (A2 + piece * 8 * B2)), rel=1e-9)


def test_messages_are_those_of_the_device_that_fetches_most() -> None:
    net = Builder("halves to thirds")
    x = net.add(dense, "halves", net.input((6, 12)), out=(("n", 6),), bias=False)
    net.add(dense, "thirds", x, out=(("n", 6),), bias=False)
    graph = net.build()
    split = {"halves": {"n": 2}, "thirds": {"c": 3}}
    splits = whole_splits(graph, split)
    machine_of_latency = machine((0, A1, 1e30), flop_per_s=FLOPS)
    _, layer = plan_layers(graph, 6, cost_model("alpha_beta", machine_of_latency, 6), splits)
    # The middle third lies in both halves, of which the device has one; and one half in two thirds.
    assert layer.transfers[0].cost == pytest.approx(2 * A1, rel=1e-9)


# -- the whole


@pytest.mark.parametrize("name", [pytest.param("alexnet", marks=pytest.mark.full), "rnnlm"])
def test_costs_grow_with_every_figure_of_the_machine(name: str) -> None:
    graph, p = build(name, batch=64), 16
    where = _machine(memory_bandwidth=4e11)
    plan = search(graph, p, machine=where, cost_model="alpha_beta")
    assert plan.exact
    assert plan.cost_unit == "s"
    assert plan.total_cost <= plan.baselines["data_parallel"]
    for worse in (
        replace(where, device=replace(where.device, peak_flop_per_s={"float32": FLOPS / 2})),
        replace(where, device=replace(where.device, memory_bandwidth_bytes_per_s=2e11)),
        replace(where, levels=tuple(replace(level, latency_s=2 * level.latency_s) for level in where.levels)),
        replace(where, levels=(where.levels[0], replace(where.levels[1], bandwidth_bytes_per_s=0.5 / B2))),
    ):
        other = search(graph, p, machine=worse, cost_model="alpha_beta")
        assert plan.total_cost <= other.total_cost <= 2 * plan.total_cost * (1 + 1e-12)


@pytest.mark.parametrize("name", ["rnnlm", "gpt"])
def test_communication_is_linear_in_the_machines_figures(name: str) -> None:
    graph, p = small_graph(name), 16
    where = _machine(memory_bandwidth=4e11)
    slower = replace(
        where,
        levels=tuple(
            replace(lv, latency_s=3 * lv.latency_s, bandwidth_bytes_per_s=lv.bandwidth_bytes_per_s / 3)
            for lv in where.levels
        ),
    )
    free = AlphaBetaCostModel.of(where, p)
    free = replace(free, links=tuple(replace(link, latency_s=0.0, s_per_byte=0.0) for link in free.links))
    one, three, none = (
        build_problem(graph, p, model)
        for model in (cost_model("alpha_beta", where, p), cost_model("alpha_beta", slower, p), free)
    )
    for vertex in range(len(graph.operators)):
        a, b, c = (x.tables.layer_costs(vertex) for x in (none, one, three))
        np.testing.assert_allclose(c - a, 3 * (b - a), rtol=1e-9, atol=1e-15)


def test_a_shared_embedding_costs_what_its_layouts_differ_by() -> None:
    net = Builder("tied")
    tokens = net.add(embedding, "table", net.input((64, 8)), vocabulary=512, size=64, shared="table")
    out = net.add(dense, "head", tokens, lead=("b", "s"), reduce=("d",), out=(("v", 512),), bias=False, shared="table")
    net.add(softmax_loss, "loss", out, dims=("b", "s", "v"))
    graph = net.build()
    machine = _machine()
    together = {"table": {"b": 8}, "head": {"b": 8}, "loss": {"b": 8}}
    n = 4 * 512 * 64
    found = _cost(graph, 8, machine, **together) - _free(graph, 8, **together)
    # One all-reduce for both uses: halved between two, doubled between four, gathered.
    assert found == pytest.approx(4 * A1 + (1 + 2 / 2) * n * B1, rel=1e-9)


def test_devices_that_do_not_fill_their_nodes_are_refused() -> None:
    with pytest.raises(MachineError, match="12"):
        search(build("mlp", batch=24), 12, machine=load_machine("1080ti"), cost_model="alpha_beta")


# -- how axes lie over levels


@given(
    splits=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=4),
    weights=st.lists(st.floats(0, 1e6), min_size=4, max_size=4),
    node=st.sampled_from([2, 4, 8]),
    nodes=st.sampled_from([2, 4, 8]),
)
def test_every_axis_is_taken_apart_and_every_level_is_filled(
    splits: list[int], weights: list[float], node: int, nodes: int
) -> None:
    weight = np.array([weights[: len(splits)]])
    members = level_members(np.array([splits], dtype=np.int32), weight, (node, nodes))[:, 0]
    assert members.prod(axis=0).tolist() == splits
    assert members[0].prod() == min(prod(splits), node)
    # What is heavier lies inside before anything lighter does.
    for heavy, light in permutations(range(len(splits)), 2):
        if weight[0, heavy] > weight[0, light] and members[0, light] > 1:
            assert members[0, heavy] == splits[heavy] or gcd(splits[heavy], node) == members[0, heavy]


def test_equal_axes_leave_the_batch_outside() -> None:
    members = level_members(np.array([[4, 4]], dtype=np.int32), np.zeros((1, 2)), (4, 4))
    assert members[:, 0].tolist() == [[1, 4], [4, 1]]


def test_numbers_that_are_no_powers_of_two() -> None:
    members = level_members(np.array([[6, 2], [3, 4]], dtype=np.int32), np.array([[2.0, 1.0]] * 2), (4, 3))
    assert members.prod(axis=0).tolist() == [[6, 2], [3, 4]]
    assert members[0].tolist() == [[2, 2], [1, 4]]
    assert level_fanouts([4, 8], 32) == (4, 2, 4)


# -- two levels against one


@pytest.mark.parametrize("name", [pytest.param("alexnet", marks=pytest.mark.full), "rnnlm"])
def test_two_levels_keep_more_inside_a_node_than_a_flat_machine(name: str) -> None:
    from pase.analysis.differences import bytes_by_level
    from pase.sharding.traffic import flows

    graph, p = build(name), 32
    machine = load_machine("1080ti")
    # A slow network between nodes, against a machine whose every link is as the nodes' own.
    slow = replace(machine.levels[1], bandwidth_bytes_per_s=machine.levels[0].bandwidth_bytes_per_s / 8)
    inside = replace(machine.levels[0], num_devices=0)
    crossing = []
    for levels in ((machine.levels[0], slow), (inside,)):
        options = SearchOptions(cost_model="alpha_beta")
        plan = search(graph, p, machine=replace(machine, levels=levels), options=options)
        totals = [bytes_by_level(flow.bytes_by_pair, (machine.levels[0], slow)) for flow in flows(plan)]
        crossing.append(sum(level[1] for level in totals))
    assert crossing[0] < crossing[1]


# -- levels of equal links


def _levels(*levels: tuple[int, float, float]) -> Machine:
    """A machine of levels: devices in a group, α, and what each of them has of the link while all send, 1 / β."""
    within = (1, *(count for count, _, _ in levels))
    counts = (*within[1:-1], 0)
    return machine(
        *((counts[i], alpha, within[i] / beta) for i, (_, alpha, beta) in enumerate(levels)), flop_per_s=FLOPS
    )


SIZES = [
    *[(2, 4), (4, 12)],
    *(pytest.param(*size, marks=pytest.mark.full) for size in [(4, 8), (3, 6), (8, 24), (8, 64)]),
]
NETWORKS = [pytest.param("lenet5", marks=pytest.mark.full), "rnnlm", "gpt"]


def _tables(name: str, model: str, p: int, machine: Machine) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Every cost of a network: of its layers under all configurations, and of its edges between them."""
    tables = build_problem(small_graph(name), p, cost_model(model, machine, p)).tables
    edges = (table.values[np.ix_(table.row_class, table.col_class)] for table in tables.edge_tables)
    return [*tables.vertex_costs, *edges]


@pytest.mark.parametrize("model", ["alpha_beta", "program"])
@pytest.mark.parametrize(("node", "p"), SIZES)
@pytest.mark.parametrize("name", NETWORKS)
def test_levels_of_equal_links_are_one_and_slower_ones_make_nothing_cheaper(
    name: str, node: int, p: int, model: str
) -> None:
    flat = _tables(name, model, p, _levels((p, A1, B1)))
    for found, expected in zip(_tables(name, model, p, _levels((node, A1, B1), (p, A1, B1))), flat, strict=True):
        np.testing.assert_array_equal(found, expected)
    for alpha, beta in ((A1, 1.001 * B1), (1.001 * A1, B1), (3 * A1, 40 * B1)):
        slower = _tables(name, model, p, _levels((node, A1, B1), (p, alpha, beta)))
        for found, expected in zip(slower, flat, strict=True):
            assert (found >= expected * (1 - 1e-12)).all()


def test_a_sum_that_every_device_needs_is_scattered_and_gathered() -> None:
    graph, n = _pair(), 4 * 512 * 1024
    split = {"before": {"d": 8}, "fc": {"c": 8}, "after": {}}
    found = _cost(graph, 8, _machine(), **split) - _free(graph, 8, **split)
    assert found == pytest.approx(2 * (3 * A1 + 7 / 8 * n * B1), rel=1e-9)


def test_half_of_a_sum_is_gathered_from_four() -> None:
    graph, n = _pair(), 4 * 512 * 1024
    split = {"before": {"d": 8}, "fc": {"c": 8}, "after": {"b": 2}}
    found = _cost(graph, 8, _machine(), **split) - _free(graph, 8, **split)
    scatter = 3 * A1 + 7 / 8 * n * B1
    gather = 2 * A1 + 3 / 4 * (n / 2) * B1
    back = A1 + n / 2 * B1  # the other half of the gradient
    assert found == pytest.approx(scatter + gather + back, rel=1e-9)


def test_layouts_that_agree_move_nothing() -> None:
    graph = _pair()
    split = {"before": {"b": 8}, "fc": {"b": 8}, "after": {"b": 8}}
    gradient = 4 * 256 * 1024
    found = _cost(graph, 8, _machine(), **split) - _free(graph, 8, **split)
    assert found == pytest.approx(_sum_s(gradient, (8, A1, B1)))
