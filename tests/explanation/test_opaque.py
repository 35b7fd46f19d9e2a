"""What layers cost of which nothing is known: a bound on what any of their splits could save."""

from itertools import product
from typing import Any

import pytest

from pase import search
from pase.analysis.advice import held_by_opaque_layers
from pase.graph import Graph, Operator
from pase.graph.operators import dense, opaque, pointwise, softmax_loss
from pase.graph.verify import Builder
from pase.machine import load_machine
from pase.planning.problems import problem_of


def _odd(name: str, x: tuple[int, ...], **options: Any) -> Operator:
    return opaque(name, [x], [x], **options)


def _network(*, is_known: bool, batch: int = 64, flop: float = 4096.0) -> Graph:
    """Two layers with a function between them, which is told, or of which nothing is known."""
    net = Builder("net")
    x = net.add(dense, "first", net.input((batch, 32)), out=(("n", 64),))
    if is_known:
        x = net.add(pointwise, "odd", x, dims=("b", "n"), out=(batch, 64), function="tanh", flop_per_point=flop / 64)
    else:
        x = net.add(_odd, "odd", x, flop=flop * batch, function="aten.odd")
    net.add(softmax_loss, "loss", net.add(dense, "second", x, out=(("n", 32),)))
    return net.build()


def test_the_bound_is_the_optimum_of_what_is_left_with_a_share_of_the_work() -> None:
    """By trying every strategy of the other layers."""
    graph, devices = _network(is_known=False), 4
    plan = search(graph, devices)
    held = held_by_opaque_layers(plan)
    assert held is not None
    assert held.layers == (("odd", "aten.odd"),)
    tables = problem_of(graph, devices, load_machine(plan.machine.name), "paper").tables
    others = [v for v, name in enumerate(tables.vertex_names) if name != "odd"]
    best = min(
        sum(float(tables.layer_costs(v)[c]) for v, c in chosen.items())
        + sum(tables.edge(e).cost(chosen[u], chosen[v]) for e, (u, v) in enumerate(tables.edges) if {u, v} <= {*others})
        for configurations in product(*(range(tables.domain_sizes[v]) for v in others))
        for chosen in [dict(zip(others, configurations, strict=True))]
    )
    # Forward and as much again backward, of 4,096 FLOP for each example.
    assert held.lower_bound == pytest.approx(best + 2 * 4096 * 64 / devices, rel=1e-12)
    assert held.lower_bound < plan.total_cost


@pytest.mark.parametrize(("devices", "flop"), [(2, 1e6), (4, 4096.0), (8, 64.0)])
def test_the_bound_lies_below_what_knowing_the_operator_gives(devices: int, flop: float) -> None:
    known = search(_network(is_known=True, flop=flop), devices)
    unknown = search(_network(is_known=False, flop=flop), devices)
    held = held_by_opaque_layers(unknown)
    assert held is not None
    assert held.lower_bound <= known.total_cost <= unknown.total_cost


def test_nothing_is_said_where_it_costs_nothing() -> None:
    assert held_by_opaque_layers(search(_network(is_known=True), 4)) is None
    assert held_by_opaque_layers(search(_network(is_known=False), 1)) is None
    net = Builder("net")
    x = net.add(dense, "first", net.input((64, 32)), out=(("n", 64),))
    # All that it has passes through.
    x = net.add(_odd, "odd", x, passes=((0, 0), (1, 1)), flop=4096.0)
    net.add(softmax_loss, "loss", net.add(dense, "second", x, out=(("n", 32),)))
    assert held_by_opaque_layers(search(net.build(), 4)) is None
