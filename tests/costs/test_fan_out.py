"""What fan-outs cost, against docs/method.md worked out element by element for every strategy of small networks.

Sharing nothing with `pase.costs`: layouts are what each device of a row-major mesh holds, and where two layouts are the
same for some assignment of devices nothing moves. Links are all that costs here; FLOP are left out on both sides.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

import pytest

from pase.costs import PaperCostModel, build_problem
from pase.graph import Access, Builder, Graph, Operator
from pase.graph.operators import attention, dense, elementwise, layer_norm, softmax_loss
from pase.planning.steps import plan_layers
from pase.solver import solve
from tests.networks import small_graph, whole_splits

Splits = Mapping[str, int]
R = 1.0
MODEL = PaperCostModel(flop_per_byte=R)


def fork() -> Graph:
    """A layer read by two that can leave its gradient in parts and one that cannot."""
    net = Builder("fork")
    x = net.add(dense, "root", net.input((4, 4)), out=(("n", 4),), bias=False)
    left = net.add(dense, "left", x, out=(("n", 4),), bias=False)
    right = net.add(dense, "right", x, out=(("n", 4),), bias=False)
    net.add(elementwise, "add", left, right, x, dims=("b", "n"))
    return net.build()


def _all_reduce(size_bytes: float, group: int) -> float:
    return 2 * (group - 1) / group * size_bytes


def _lacked(operator: Operator, access: Access, split: Splits) -> int:
    """Over how many devices the tensor, or its gradient, is summed: dims that the access has not, unless it says."""
    named = {axis for axis in access.index_map if isinstance(axis, str)}
    over = set(operator.extents) - named if access.partial_over is None else set(access.partial_over)
    return prod(split[dim] for dim in over)


def _layout(access: Access, split: Splits) -> tuple[int, ...]:
    return tuple(split[axis] for axis in access.index_map if isinstance(axis, str))


def _moved(u: tuple[int, ...], v: tuple[int, ...], size: int) -> float:
    """Bytes that move between layouts on powers of two: part less common part, either way."""
    common = size / prod(max(a, b) for a, b in zip(u, v, strict=True))
    return 4 * ((size / prod(v) - common) + (size / prod(u) - common))


def by_hand(graph: Graph, splits: Mapping[str, Splits]) -> float:
    """Bytes of all messages of a network of dense layers and sums, by docs/method.md."""
    total = 0.0
    for operator in graph.operators:
        split = splits[operator.name]
        for write in operator.writes:
            total += _all_reduce(4 * write.size / prod(_layout(write, split)), _lacked(operator, write, split))
        for position, read in enumerate(operator.reads):
            edge = graph.incoming.get((operator.name, position))
            fed_by = graph[edge.producer] if edge else None
            if edge is None and read not in operator.parameters:
                continue
            own = _all_reduce(4 * read.size / prod(_layout(read, split)), _lacked(operator, read, split))
            if fed_by is None:
                total += own
                continue
            (write,) = fed_by.writes
            above, below = _layout(write, splits[fed_by.name]), _layout(read, split)
            if fed_by.kind == "fan_out":
                (over,) = set(fed_by.extents) - {axis for axis in write.index_map if isinstance(axis, str)}
                if above == below and splits[fed_by.name][over] == _lacked(operator, read, split):
                    own = 0.0  # added on each device, and summed by the fan-out
            total += own + _moved(above, below, read.size)
    return total


def _configurations(operator: Operator, num_devices: int) -> Iterator[Splits]:
    factors = [[k for k in (1, 2, 4) if extent % k == 0] for extent in operator.extents.values()]
    for chosen in product(*factors):
        if num_devices % prod(chosen) == 0:
            yield dict(zip(operator.extents, chosen, strict=True))


def test_every_strategy_costs_what_the_definition_says() -> None:
    problem = build_problem(fork(), 2, MODEL)
    domains = [list(_configurations(operator, 2)) for operator in problem.graph.operators]
    assert [len(domain) for domain in domains] == list(problem.tables.domain_sizes)
    free = build_problem(fork(), 2, PaperCostModel(flop_per_byte=0.0)).tables
    names = [operator.name for operator in problem.graph.operators]
    costs = []
    for strategy in product(*domains):
        choice = [problem.choice(v, tuple(split.values())) for v, split in enumerate(strategy)]
        found = tuple(index for index in choice if index is not None)
        expected = by_hand(problem.graph, dict(zip(names, strategy, strict=True)))
        assert problem.tables.evaluate(found) - free.evaluate(found) == pytest.approx(expected, abs=1e-9)
        costs.append(free.evaluate(found) + expected)
    assert len(costs) == 4 * 4 * 4 * 4 * 3
    assert solve(problem.tables).cost == pytest.approx(min(costs), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_strategies_of_a_transformer_cost_what_the_definition_says_of_its_projections(seed: int) -> None:
    """Edges and layer costs around the fan-outs of a small GPT on 8 devices, for configurations drawn at random."""
    import random

    numbers = random.Random(seed)
    problem = build_problem(small_graph("gpt"), 8, MODEL)
    graph = problem.graph
    choice = [numbers.randrange(size) for size in problem.tables.domain_sizes]
    splits = {o.name: problem.splits(v, choice[v]) for v, o in enumerate(graph.operators)}
    handed = [operator for operator in graph.operators if operator.is_fan_out]
    assert handed
    for operator in handed:
        split, (over,) = splits[operator.name], operator.partial_dims(operator.reads[0])
        layer = problem.tables.layer_costs(graph.index[operator.name])[choice[graph.index[operator.name]]]
        part = 4 * operator.reads[0].size / prod(_layout(operator.reads[0], split))
        assert layer == pytest.approx(_all_reduce(part, split[over]))
        for number, edge in enumerate(graph.edges):
            if edge.producer == operator.name:
                reader, own = graph[edge.consumer], splits[edge.consumer]
                read = reader.reads[edge.input]
                group = _lacked(reader, read, own)
                expected = _moved(_layout(read, split), _layout(read, own), read.size)
                if expected or group != split[over]:
                    expected += _all_reduce(4 * read.size / prod(_layout(read, own)), group)
                ends = graph.index[edge.producer], graph.index[edge.consumer]
                assert problem.tables.edge(number).cost(*(choice[v] for v in ends)) == pytest.approx(expected)


def block(batch: int, steps: int, width: int, heads: int) -> Graph:
    """A layer of Megatron-LM (Shoeybi et al. 2019, Fig. 3), between a projection and a loss that are not split."""
    net = Builder("block")
    bsd, lead = ("b", "s", "d"), ("b", "s")
    x = net.add(dense, "before", net.input((batch, steps, 2)), lead=lead, reduce=("c",), out=(("d", width),))
    y = net.add(layer_norm, "norm_1", x)
    split = (("h", heads), ("k", width // heads))
    q, k, v = (net.add(dense, n, y, lead=lead, reduce=("d",), out=split) for n in "qkv")
    y = net.add(attention, "attention", q, k, v)
    y = net.add(dense, "o", y, lead=lead, reduce=("h", "k"), out=(("d", width),))
    x = net.add(elementwise, "add_1", x, y, dims=bsd)
    y = net.add(layer_norm, "norm_2", x)
    y = net.add(dense, "up", y, lead=lead, reduce=("d",), out=(("e", 4 * width),), activation="gelu")
    y = net.add(dense, "down", y, lead=lead, reduce=("e",), out=(("d", width),))
    x = net.add(elementwise, "add_2", x, y, dims=bsd)
    net.add(softmax_loss, "loss", x, dims=bsd)
    return net.build()


@pytest.mark.parametrize("ways", [2, 4])
def test_the_layer_of_megatron_has_four_all_reduces(ways: int) -> None:
    """Two forward and two backward of b · s · d words each (Shoeybi et al. 2019, section 3), and nothing else."""
    batch, steps, width = 2, 8, 16
    problem = build_problem(block(batch, steps, width, heads=4), ways, MODEL)
    own = {name: {"h": ways} for name in ("q", "k", "v", "attention", "o")} | {n: {"e": ways} for n in ("up", "down")}
    own |= {operator.name: {"g": ways} for operator in problem.graph.operators if operator.is_fan_out}
    assert "norm_1_fan_out" in own
    splits = whole_splits(problem.graph, own)
    layers = plan_layers(problem.graph, ways, MODEL, splits)
    found = sum(layer.communication_cost + sum(t.cost for t in layer.transfers) for layer in layers)
    assert found == pytest.approx(4 * _all_reduce(4 * batch * steps * width, ways), rel=1e-12)


def test_where_readers_differ_each_sums_its_own() -> None:
    """q by heads, k and v by the batch: no two leave parts of one kind, and the fan-out has nothing to sum."""
    problem = build_problem(block(4, 8, 16, heads=4), 4, MODEL)
    own = {"q": {"h": 4}, "k": {"b": 4}, "v": {"b": 2, "h": 2}}
    splits = whole_splits(problem.graph, own)
    layers = plan_layers(problem.graph, 4, MODEL, splits)
    cost = {
        layer.name: sum(t.cost for t in layer.transfers if t.producer == "norm_1_fan_out")
        for layer in layers
        if layer.name in own
    }
    whole = 4 * 4 * 8 * 16
    assert cost["q"] == pytest.approx(_all_reduce(whole, 4))
    assert cost["k"] == pytest.approx(whole * 3 / 4)
    assert cost["v"] == pytest.approx(_all_reduce(whole / 2, 2) + whole / 2)
