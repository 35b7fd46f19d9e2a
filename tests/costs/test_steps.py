"""Steps of a loop that is written out: what each costs, and that all of them are costed at once."""

import numpy as np
import pytest

import pase
from pase.costs import build_problem, cost_model
from pase.costs.edges import edge_cost, traffic_of
from pase.graph import Builder, Graph
from pase.graph.operators import concat, dense, elementwise, padded
from pase.machine import load_machine

MACHINE = load_machine("1080ti")


def _steps(count: int) -> Graph:
    """A layer for each of some steps, whose results of one step each are put together."""
    net = Builder("steps")
    x = net.add(dense, "first", net.input((4, 6)), out=(("n", 6),), bias=False)
    parts = []
    for i in range(count):
        y = net.add(dense, f"fc{i}", x, out=(("s", 1), ("n", 8)), bias=False)
        parts.append(net.add(elementwise, f"act{i}", y, dims=("b", "s", "n")))
    whole = net.add(concat, "whole", *parts, dims=("b", "s", "n"), along="s")
    net.add(elementwise, "last", whole, dims=("b", "s", "n"))
    return net.build()


@pytest.mark.parametrize("num_devices", [4, 6])
@pytest.mark.parametrize("model", ["paper", "alpha_beta", "program"])
def test_every_step_costs_what_it_costs_by_itself(num_devices: int, model: str) -> None:
    costs = cost_model(model, MACHINE, num_devices)
    problem = build_problem(_steps(24), num_devices, costs)
    graph = problem.graph
    does = {op.name: traffic_of(graph, op, problem.configurations[graph.index[op.name]]) for op in graph.operators}
    for edge, number in zip(graph.edges, problem.tables.edge_table, strict=True):
        alone, table = edge_cost(graph, edge, does[edge.producer], does[edge.consumer], costs), problem.tables
        found = table.edge_tables[number]
        np.testing.assert_array_equal(
            found.values[np.ix_(found.row_class, found.col_class)],
            alone.values[np.ix_(alone.row_class, alone.col_class)],
            err_msg=f"{edge.producer} -> {edge.consumer}",
        )


def test_tables_are_as_many_whatever_the_number_of_steps() -> None:
    few, many = (build_problem(_steps(count), 4, cost_model("paper", MACHINE, 4)).tables for count in (3, 48))
    assert len(few.edge_tables) == len(many.edge_tables) == 5
    assert len(many.edges) == 3 * 48 + 2


@pytest.mark.parametrize("extent", [1, 2])
def test_where_one_point_stands_changes_nothing_but_where_more_stand_may(extent: int) -> None:
    """Tables of a piece at each place of a dim: of two points, some places lie across parts."""

    def values(offset: int) -> tuple[bytes, ...]:
        net = Builder("padded")
        x = net.add(dense, "fc", net.input((4, 6)), out=(("s", extent), ("n", 8)), bias=False)
        net.add(padded, "pad", x, dims=("b", "s", "n"), before=(0, offset, 0), out=(4, 12, 8))
        tables = build_problem(net.build(), 6, cost_model("paper", MACHINE, 6)).tables
        return tuple(table.values.tobytes() for table in tables.edge_tables)

    distinct = {values(offset) for offset in range(13 - extent)}
    assert (len(distinct) == 1) is (extent == 1)


def test_a_plan_of_steps_adds_up_and_names_each_read() -> None:
    graph = _steps(16)
    plan = pase.search(graph, 4)
    transfers = plan["whole"].transfers
    assert [(t.producer, t.input) for t in transfers] == [(f"act{i}", i) for i in range(16)]
    layers = sum(layer.layer_cost for layer in plan.layers)
    assert plan.total_cost == pytest.approx(layers + sum(t.cost for layer in plan.layers for t in layer.transfers))
