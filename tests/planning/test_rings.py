"""Rings as choices of single layers: tables beside those of graphs with rings, every strategy of a network that mixes
both ways, and searches beside those in which all attention goes one way."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

import pase
from pase.costs import Problem, StepMemory, cost_model, memory_of_layers
from pase.costs.choice_tables import ChoiceTables, KnownChoices, choice_tables
from pase.costs.choices import CRITERIA
from pase.costs.memory import keeping
from pase.costs.states import ModeSpace
from pase.graph import Builder, Graph
from pase.graph.operators import attention, concat, dense, with_fan_outs
from pase.graph.operators.products import with_fused_attention, with_rings
from pase.graph.verify import Tensor
from pase.planning.memory_limit import limit_of
from pase.planning.planner import whole_graph
from pase.planning.steps import chosen_layers, plan_layers, total_cost
from tests.networks import small_graph, whole_splits
from tests.simulation.machines import machine

WIDTH = 8
MACHINE = machine((0, 1e-6, 1e9), flop_per_s=1e12)


def _attended(net: Builder, name: str, steps: int, heads: int = 1) -> Tensor:
    x = net.input((1, steps, WIDTH))
    wide: dict[str, Any] = {"lead": ("b", "s"), "reduce": ("d",), "out": (("h", heads), ("k", WIDTH)), "bias": False}
    q, k, v = (net.add(dense, f"{name}_{of}", x, **wide) for of in ("query", "key", "value"))
    return net.add(attention, name, q, k, v, causal=True, is_fused=True)


@cache
def _two_lengths() -> Graph:
    """Attention of a short and of a long sequence, whose results are joined."""
    net = Builder("lengths")
    both = _attended(net, "short", 64), _attended(net, "long", 16384)
    joined = net.add(concat, "joined", *both, dims=("b", "s", "h", "k"), along="s")
    net.add(dense, "output", joined, lead=("b", "s", "h"), reduce=("k",), out=(("d", WIDTH),), bias=False)
    return net.build()


@cache
def _in_a_row() -> Graph:
    """Attention that reads queries of another, and a tensor that two of its reads share."""
    net = Builder("row")
    first = _attended(net, "first", 64, heads=2)
    second = net.add(attention, "second", first, first, first, is_fused=True)
    third = net.add(attention, "third", second, first, first, is_fused=True)
    net.add(dense, "output", third, lead=("b", "s"), reduce=("h", "k"), out=(("d", WIDTH),))
    return net.build()


def _rings(graph: Graph) -> list[str]:
    return [operator.name for operator in graph.operators if operator.ring is not None]


def _tables(graph: Graph, space: ModeSpace, **more: Any) -> ChoiceTables:
    model = cost_model("step", MACHINE, 4, graph.precision)
    return choice_tables(
        graph, 4, model, space, known=KnownChoices(), keeps=keeping(graph), is_whole=True, micro_batches=2, **more
    )


def _some_choice(tables: ChoiceTables, numbers: Random) -> list[int]:
    """Any choice, of attention as often a ring as none."""
    found = []
    for layer in tables.layers:
        among = np.flatnonzero(layer.ring == numbers.choice(np.unique(layer.ring).tolist()))
        found.append(int(numbers.choice(among.tolist())))
    return found


def _same_choice(tables: ChoiceTables, other: ChoiceTables, choice: Sequence[int]) -> list[int]:
    """A choice in other tables, of a graph that has the rings."""
    found = []
    for one, two, c in zip(tables.layers, other.layers, choice, strict=True):
        is_same = (two.rows == one.rows[c]) & (two.state == one.state[c]) & (two.again == one.again[c])
        found.append(int(np.flatnonzero(is_same)[0]))
    return found


@pytest.mark.parametrize("name", ["row", "transformer"])
@pytest.mark.parametrize("modes", [{}, {"states": ("replicated", "zero1", "zero3"), "recompute": True}])
def test_tables_with_rings_to_choose_are_those_of_the_graph_that_has_them(name: str, modes: dict[str, Any]) -> None:
    graph = with_fan_outs(_in_a_row() if name == "row" else with_fused_attention(small_graph(name)))
    assert keeping(with_rings(graph)) == keeping(graph)
    tables, numbers = _tables(graph, ModeSpace(rings=True, **modes), has_passes=True), Random(name)
    rings = [bool(layer.ring.any()) for layer in tables.layers]
    assert sum(rings) == len(_rings(with_rings(graph))) > 1
    only = {op.name: rows for op, rows in zip(graph.operators, tables.configurations, strict=True)}
    for _ in range(2):
        choice = _some_choice(tables, numbers)
        names = {op.name for op, own, c in zip(graph.operators, tables.layers, choice, strict=True) if own.ring[c]}
        ringed = with_rings(graph, names)
        assert {*_rings(ringed)} == names
        other = _tables(ringed, ModeSpace(**modes), only=only, has_passes=True)
        same = _same_choice(tables, other, choice)
        for _ in range(4):
            weights = np.array([numbers.random() for _ in CRITERIA])
            costs = tables.weighed(weights).evaluate(choice), other.weighed(weights).evaluate(same)
            assert costs[0] == pytest.approx(costs[1], rel=1e-12)
        for one, two, (u, v) in zip(tables.edges, other.edges, tables.ends, strict=True):
            at = one.cost.row_class[choice[u]], one.cost.col_class[choice[v]]
            there = two.cost.row_class[same[u]], two.cost.col_class[same[v]]
            assert one.moved is not None
            assert two.moved is not None
            assert one.moved.forward[at] == two.moved.forward[there]
            assert one.moved.backward[at] == two.moved.backward[there]


@pytest.mark.parametrize("modes", [{}, {"states": ("replicated", "zero1"), "recompute": True}])
def test_what_rings_hold(modes: dict[str, Any]) -> None:
    """Peaks are those of the graph that has the rings; in no turn do sums come to more, and in some to nearly all."""
    graph, numbers = with_fan_outs(_in_a_row()), Random(7)
    tables = _tables(graph, ModeSpace(rings=True, **modes))
    limit = limit_of(Problem.of(tables, 2), 1, "adam")
    for _ in range(6):
        choice = _some_choice(tables, numbers)
        names = {op.name for op, own, c in zip(graph.operators, tables.layers, choice, strict=True) if own.ring[c]}
        layers = chosen_layers(tables, choice)
        peak = memory_of_layers(with_rings(graph, names), layers, optimiser="adam", micro_batches=2).peak()
        assert limit.peak(choice) == peak
        usage = limit.usage(peak.turn)
        total = sum(float(own[c]) for own, c in zip(usage.layers, choice, strict=True))
        for table, (u, v) in zip(usage.edges, tables.ends, strict=True):
            total += 0.0 if table is None else table.cost(choice[u], choice[v])
        total += sum(max(float(own[c]) for own, c in zip(group, choice, strict=True)) for group in usage.peaks)
        assert total <= peak.bytes
        if not modes:
            ringed = with_rings(graph, names)
            alone = StepMemory(
                graph=ringed,
                keeps=keeping(ringed),
                configurations=[rows[own.rows[c]][None] for rows, own, c in _chosen(tables, choice)],
                optimiser="adam",
                micro_batches=2,
            ).usage(peak.turn)
            exact = sum(float(own[0]) for own in alone.layers)
            exact += sum(table.cost(0, 0) for table in alone.edges if table is not None)
            exact += sum(max(float(own[0]) for own in group) for group in alone.peaks)
            assert total == exact


def _chosen(tables: ChoiceTables, choice: Sequence[int]) -> list[tuple[Any, Any, int]]:
    return list(zip(tables.configurations, tables.layers, choice, strict=True))


@pytest.mark.parametrize("cost_model_name", ["alpha_beta", "step"])
def test_the_cheapest_of_all_strategies_mixes_both_ways(cost_model_name: str) -> None:
    """Two layers of attention, as rings and not; the others, and that of few queries, are split by tokens."""
    graph, devices = _two_lengths(), 4
    around = {op.name: {"s": devices} for op in graph.operators if op.kind in ("dense", "concat")}
    model = cost_model(cost_model_name, MACHINE, devices)
    ways = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
    costs = {}
    for names in [(), ("short",), ("long",), ("short", "long")]:
        ringed = with_fan_outs(with_rings(graph, names))
        for short, long in product([(4, 1)], ways):
            own = {"short": dict(zip("st", short, strict=True)), "long": dict(zip("st", long, strict=True))}
            if any(own[name]["t"] > 1 for name in names):
                continue
            splits = whole_splits(ringed, {**around, **own})
            layers = plan_layers(ringed, devices, model, splits, [tuple(range(devices))] * len(splits))
            costs[names, short, long] = total_cost(layers)
    constraints = {
        "pin": dict.fromkeys((*around, "short"), f"s={devices}"),
        "forbid": {"long": "k"},
    }
    options: dict[str, Any] = {"machine": MACHINE, "cost_model": cost_model_name, "constraints": constraints}
    plan = pase.search(graph, devices, attention="auto", **options)
    assert plan.exact
    assert plan.total_cost == pytest.approx(min(costs.values()), rel=1e-12)
    assert min(costs, key=lambda key: costs[key])[0] == ("long",)
    assert _rings(plan.graph) == ["long"]
    for way in ("gather", "ring"):
        assert plan.total_cost < pase.search(graph, devices, attention=way, **options).total_cost


def _long(name: str, steps: int) -> Graph:
    small = {"layers": 2, "steps": steps, "model_width": 64, "heads": 4, "vocabulary": 64}
    small |= {} if name == "gpt" else {"hidden": 64}
    return pase.load(name, batch=4, arguments=small)


CASES: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("gpt", 8, "alpha_beta", {}),
    ("transformer", 16, "step", {}),
    ("gpt", 8, "step", {"micro_batches": 2, "modes": ["zero1", "recompute"]}),
)
MORE_CASES: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("gpt", 16, "alpha_beta", {}),
    ("gpt", 8, "step", {}),
    ("gpt", 16, "step", {}),
    ("transformer", 8, "alpha_beta", {}),
    ("transformer", 16, "alpha_beta", {}),
    ("transformer", 8, "step", {}),
    ("gpt", 8, "alpha_beta", {"stages": 2, "micro_batches": 2, "modes": ["recompute"]}),
    ("gpt", 8, "step", {"stages": 2, "micro_batches": 4, "schedule": "interleaved"}),
    ("transformer", 8, "step", {"stages": 2, "micro_batches": 2}),
)


@pytest.mark.parametrize(
    ("name", "devices", "model", "settings"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_CASES)],
)
def test_more_ways_cost_no_more(name: str, devices: int, model: str, settings: dict[str, Any], tmp_path: Any) -> None:
    """Than all attention one way; and the plan is what its file says."""
    graph = with_fused_attention(_long(name, 4096))
    options: dict[str, Any] = {"machine": MACHINE, "cost_model": model, "keep_batch": True, **settings}
    both = [pase.search(graph, devices, attention=way, **options) for way in ("gather", "ring")]
    found = pase.search(graph, devices, attention="auto", **options)
    assert found.total_cost <= min(plan.total_cost for plan in both) * (1 + 1e-9)
    assert found.lower_bound <= found.total_cost
    found.save(tmp_path / "plan.json")
    again = pase.load_plan(tmp_path / "plan.json")
    assert again.graph == found.graph
    assert again.layers == found.layers
    if found.micro_batches > 1 and not settings.get("stages"):
        assert _rings(whole_graph(found, lambda _: graph)) == _rings(found.graph)


def test_within_a_limit_on_memory_more_ways_cost_no_more() -> None:
    graph = with_fused_attention(_long("gpt", 4096))
    options: dict[str, Any] = {"machine": MACHINE, "cost_model": "alpha_beta", "optimiser": "adam", "keep_batch": True}
    free = pase.search(graph, 8, attention="auto", **options)
    limit = int(0.95 * free.peak.bytes)
    gathered, rings, found = (
        pase.search(graph, 8, attention=way, device_memory_bytes=limit, **options) for way in ("gather", "ring", "auto")
    )
    assert found.exact
    assert found.peak.bytes <= limit
    assert free.total_cost < found.total_cost <= min(gathered.total_cost, rings.total_cost) * (1 + 1e-9)
