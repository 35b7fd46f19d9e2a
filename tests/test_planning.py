"""The whole search: against every strategy of small graphs, against the recurrences, and against data parallelism."""

from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pase import Builder, Graph, Machine, PaseError, SearchOptions, load, load_machine, search
from pase.common.words import quantity
from pase.costs import CostModel, cost_model
from pase.errors import ConfigurationError, CostError, GraphError, MachineError, SolverError
from pase.graph import Edge
from pase.graph.operators import dense, softmax_loss
from pase.models import MODELS
from pase.planning.planner import MAX_DEVICES
from pase.planning.problems import problem_of
from pase.planning.steps import plan_layers, total_cost
from pase.solver import solve
from pase.solver.ordering import ORDERINGS, breadth_first, generate_seq
from scripts.benchmarks.recurrences import find_best_strategy, naive_recurrence
from tests.networks import diamond, every_strategy, slow_machine, small_graph, small_plan, tiny_graph, tiny_plan


def _model(machine: Machine, num_devices: int) -> CostModel:
    return cost_model("paper", machine, num_devices)


def _cheapest(graph: Graph, num_devices: int, machine: Machine) -> float:
    """Return the cost of the cheapest of all strategies, each costed as a whole."""
    model, devices = _model(machine, num_devices), [tuple(range(num_devices))] * len(graph.operators)
    every = every_strategy(graph, num_devices)
    return min(total_cost(plan_layers(graph, num_devices, model, s, devices)) for s in every)


# ------------------------------------------------------------------------------------------------------- the optimum


@pytest.mark.parametrize(
    ("num_devices", "machine"),
    [
        *[(2, load_machine("1080ti")), (2, slow_machine())],
        pytest.param(4, slow_machine(), marks=pytest.mark.full),
    ],
)
def test_no_strategy_of_a_chain_is_cheaper(num_devices: int, machine: Machine) -> None:
    plan = search(tiny_graph(), num_devices, machine=machine)
    assert plan.total_cost == pytest.approx(_cheapest(tiny_graph(), num_devices, machine), rel=1e-12)
    assert plan.exact
    assert plan.lower_bound == plan.total_cost
    assert plan.gap == 0.0


@pytest.mark.parametrize("num_devices", [2, 3])
def test_no_strategy_of_a_diamond_is_cheaper(num_devices: int) -> None:
    machine = slow_machine()
    plan = search(diamond(), num_devices, machine=machine)
    assert plan.total_cost == pytest.approx(_cheapest(diamond(), num_devices, machine), rel=1e-12)
    assert any(layer.num_parts > 1 for layer in plan.layers)


@pytest.mark.parametrize(("name", "num_devices"), [("lenet5", 8), ("alexnet", 8), ("rnnlm", 12), ("mlp", 16)])
def test_the_search_agrees_with_both_recurrences_of_the_paper(name: str, num_devices: int) -> None:
    machine = load_machine("1080ti")
    plan = search(small_graph(name), num_devices, machine=machine, keep_batch=True)
    tables = problem_of(small_graph(name), num_devices, machine, "paper").tables
    fourth = find_best_strategy(tables, generate_seq(tables.neighbours, tables.domain_sizes))
    second = naive_recurrence(tables, breadth_first(tables.neighbours, tables.domain_sizes))
    assert plan.total_cost == pytest.approx(fourth.cost, rel=1e-12)
    assert plan.total_cost == pytest.approx(second.cost, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *[("alexnet", 4), ("rnnlm", 16), ("gpt", 8), ("densenet121", 8)],
        *(pytest.param(name, p, marks=pytest.mark.full) for name in MODELS for p in (4, 8, 16)),
    ],
)
def test_no_network_is_dearer_than_data_parallelism(name: str, num_devices: int) -> None:
    plan = small_plan(name, num_devices)
    assert plan.exact
    batch = [
        {dim: num_devices if dim == "b" else 1 for dim in operator.extents} for operator in small_graph(name).operators
    ]
    for operator, split in zip(small_graph(name).operators, batch, strict=True):
        assert operator.extents.get("b", num_devices) % num_devices == 0
        assert set(split) == set(operator.extents)
    model = _model(load_machine("1080ti"), num_devices)
    theirs = total_cost(plan_layers(small_graph(name), num_devices, model, batch))
    assert plan.baselines["data_parallel"] == pytest.approx(theirs, rel=1e-12)
    assert plan.total_cost <= theirs


@pytest.mark.parametrize("name", ["lenet5", "transformer", "resnet101"])
@pytest.mark.parametrize("num_devices", [4, 6])
def test_a_plan_is_one_that_its_devices_can_run(name: str, num_devices: int) -> None:
    plan = small_plan(name, num_devices)
    assert [layer.name for layer in plan.layers] == list(plan.graph.index)
    for layer, operator in zip(plan.layers, plan.graph.operators, strict=True):
        assert layer.dims == operator.extents
        assert list(layer.splits) == list(layer.dims)
        assert all(layer.dims[dim] % factor == 0 for dim, factor in layer.splits.items())
        assert all(layer.splits[dim] == 1 for dim in operator.unsplittable)
        assert layer.num_parts * layer.num_replicas == num_devices
        assert sorted(layer.devices) == list(range(num_devices))
        assert layer.layer_cost == layer.compute_cost + layer.communication_cost
        moved = [(edge.producer, edge.input) for edge in plan.graph.edges if edge.consumer == layer.name]
        for position, access in enumerate(operator.reads):
            users = [op.name for op in plan.graph.operators if access.shared in {a.shared for a in op.reads}]
            if access.shared and layer.name != users[0]:
                moved.append((users[0], position))
        assert [(t.producer, t.input) for t in layer.transfers] == moved
    assert plan.total_cost == pytest.approx(
        sum(layer.layer_cost for layer in plan.layers) + sum(t.cost for layer in plan.layers for t in layer.transfers)
    )


def test_one_device_has_nothing_to_send() -> None:
    plan = search(small_graph("lenet5"), 1)
    assert all(set(layer.splits.values()) == {1} for layer in plan.layers)
    assert sum(layer.communication_cost for layer in plan.layers) == 0
    assert plan.total_cost == plan.baselines["data_parallel"]


# ----------------------------------------------------------------------------------------------------------- options


def _without_times(plan: Any) -> Any:
    return replace(plan, search=replace(plan.search, time_s=0.0))


def test_the_same_search_has_the_same_result() -> None:
    again = search(small_graph("transformer"), 8)
    assert _without_times(again) == _without_times(small_plan("transformer", 8))


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_every_ordering_leads_to_the_optimum(ordering: str) -> None:
    plan = search(small_graph("transformer"), 4, ordering=ordering)
    assert plan.search.ordering == ordering
    assert plan.total_cost == pytest.approx(small_plan("transformer", 4).total_cost, rel=1e-12)


def test_a_search_without_time_still_answers() -> None:
    best = small_plan("transformer", 16)
    plan = search(small_graph("transformer"), 16, time_limit_s=1e-9)
    assert plan.total_cost >= best.total_cost * (1 - 1e-12)
    assert plan.lower_bound <= best.total_cost * (1 + 1e-12)
    assert plan.total_cost <= plan.baselines["data_parallel"]
    assert not plan.exact
    assert 0 < plan.gap == pytest.approx(1 - plan.lower_bound / plan.total_cost)


@pytest.mark.parametrize("model", ["paper", "step"])
def test_a_time_limit_covers_the_making_of_tables(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph("transformer")
    best = search(graph, 16, cost_model=model)
    looks, cut, bounds = 1, True, []
    while cut:  # a clock that runs out after ever more looks at it, as tables are made
        left = iter([0.0] * looks)
        monkeypatch.setattr("pase.costs.edges.perf_counter", lambda left=left: next(left, inf))
        solved = Mock(side_effect=solve)
        monkeypatch.setattr("pase.planning.planner.solve", solved)
        plan = search(graph, 16, cost_model=model, time_limit_s=1e9)
        cut = max(solved.call_args.args[0].domain_sizes) == 1
        if cut:
            assert not plan.exact
            assert plan.total_cost == plan.baselines["data_parallel"] == best.baselines["data_parallel"]
            assert 0 < plan.lower_bound <= best.total_cost
            bounds.append(plan.lower_bound)
        looks = 2 * looks + 1
    assert len(bounds) > 3
    assert bounds == sorted(bounds)
    assert (plan.total_cost, plan.exact) == (best.total_cost, True)


def test_data_parallelism_that_does_not_fit_is_not_what_a_search_cut_short_returns() -> None:
    options = SearchOptions(time_limit_s=1e-9, device_memory_bytes=10)
    with pytest.raises(SolverError, match="no strategy is known that fits the memory of a device: give more time"):
        search(small_graph("transformer"), 16, options=options)
    plan = search(small_graph("transformer"), 16, options=replace(options, device_memory_bytes=10**15))
    assert plan.baselines["without_memory_limit"] == plan.total_cost == plan.baselines["data_parallel"]


def test_a_memory_limit_covers_the_tables() -> None:
    graph = small_graph("transformer")
    needed = problem_of(graph, 16, load_machine("1080ti"), "paper").tables.num_bytes
    for limit, what in (
        (1, "the costs of the [0-9,]+ configurations of layer"),
        (needed, "the transfer costs between"),
    ):
        with pytest.raises(SolverError, match=f"{what} .* more than the memory limit of .*; use fewer devices"):
            search(graph, 16, solver_memory_bytes=limit)
    assert search(graph, 16, solver_memory_bytes=20 * needed).exact


def test_tables_that_do_not_fit_are_refused_before_any_edge_is_costed() -> None:
    """With what all of them take; the sizes follow from numbers of layouts, which are known first."""
    graph, told = small_graph("transformer"), set[str]()
    tables = problem_of(graph, 16, load_machine("1080ti"), "alpha_beta").tables
    sizes = [table.values.nbytes + table.row_class.nbytes + table.col_class.nbytes for table in tables.edge_tables]
    largest = max(tables.edge_tables, key=lambda table: table.values.nbytes).values.shape
    text = (
        f"the transfer costs between {largest[0]:,} layouts of layer .* and {largest[1]:,} of layer .*, the largest of "
        f"{len(sizes)} tables, and the others would take {quantity(sum(sizes), 'B')}: .* more than the memory limit"
    )
    with pytest.raises(SolverError, match=text):
        search(
            graph,
            16,
            cost_model="alpha_beta",
            solver_memory_bytes=sum(sizes) - 1,
            on_progress=lambda what, _: told.add(what),
        )
    assert told == {"costing layers"}


@pytest.mark.parametrize("model", ["paper", "step"])
def test_large_tables_are_made_piece_by_piece(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine = small_graph("transformer"), slow_machine()
    whole = problem_of(graph, 8, machine, model).tables
    monkeypatch.setattr("pase.costs.edges._CELLS_AT_ONCE", 10)
    pieces = problem_of(graph, 8, machine, model).tables
    for one, other in zip(whole.edge_tables, pieces.edge_tables, strict=True):
        np.testing.assert_array_equal(one.dense(), other.dense())


def test_a_machine_is_given_by_name_or_as_itself(tmp_path: Any) -> None:
    by_name = search(tiny_graph(), 4, machine="2080ti")
    assert _without_times(search(tiny_graph(), 4, machine=load_machine("2080ti"))) == _without_times(by_name)
    assert by_name.machine.name == "2080ti"
    assert search(tiny_graph(), 4).machine.name == "1080ti"
    assert by_name.total_cost != tiny_plan().total_cost


def test_faster_links_make_a_strategy_cheaper_and_slower_ones_dearer() -> None:
    machine = load_machine("1080ti")
    costs = []
    for factor in (0.25, 1.0, 4.0):
        levels = tuple(replace(lv, bandwidth_bytes_per_s=lv.bandwidth_bytes_per_s * factor) for lv in machine.levels)
        costs.append(search(small_graph("alexnet"), 16, machine=replace(machine, levels=levels)).total_cost)
    assert costs[0] > costs[1] > costs[2]


def test_progress_is_told_in_fractions() -> None:
    told: list[tuple[str, float]] = []
    search(small_graph("transformer"), 8, on_progress=lambda what, fraction: told.append((what, fraction)))
    assert {"costing layers", "costing edges"} <= {what for what, _ in told}
    assert all(0 <= fraction <= 1 for _, fraction in told)
    layers = [fraction for what, fraction in told if what == "costing layers"]
    assert layers == sorted(layers)
    assert layers[-1] == 1


def test_a_batch_that_nothing_divides_can_be_kept() -> None:
    graph = load("mlp", batch=7)
    plan = search(graph, 4, keep_batch=True)
    assert all(layer.splits["b"] == 1 for layer in plan.layers)
    assert any(layer.num_parts > 1 for layer in plan.layers)
    assert plan.baselines["data_parallel"] >= plan.total_cost


def test_numbers_of_numpy_are_numbers() -> None:
    plan = search(tiny_graph(), np.int64(4), machine=slow_machine())  # type: ignore[arg-type]
    assert type(plan.num_devices) is int
    assert _without_times(plan) == _without_times(tiny_plan())


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("graph", "devices", "message"),
    [
        *(("mlp", devices, rf"^{devices} devices were asked for; expected a whole number of 1") for devices in (0, -3)),
        *(
            ("mlp", devices, r"devices were asked for; expected a whole number of 1 or more")
            for devices in (7.5, "8", None, [8])
        ),
        *(
            ("mlp", devices, rf"^{devices} devices were asked for; at most {MAX_DEVICES}")
            for devices in (MAX_DEVICES + 1, 2**60, 10**30)
        ),
        ("alexnet", 1_000_003, r"no layer of 'alexnet' can be split over 1000003 .* that 2 divides$"),
        (load("mlp", batch=7), 4, r"a batch of 7 cannot be split over 4 devices: .* such as 8"),
    ],
)
def test_numbers_of_devices_that_make_no_sense_are_refused(graph: str | Graph, devices: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        search(graph, devices)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (SearchOptions(cost_model="papre"), CostError, r"unknown cost model 'papre': did you mean 'paper'"),
        (SearchOptions(ordering="genseq"), SolverError, r"unknown ordering 'genseq'.* generate_seq"),
        (SearchOptions(time_limit_s=0), SolverError, r"the time limit is 0 s; give a positive number"),
        (SearchOptions(time_limit_s=float("nan")), SolverError, r"the time limit is nan s"),
        (SearchOptions(solver_memory_bytes=-1), SolverError, r"the memory limit is -1 bytes; give a positive number"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: SearchOptions, error: type[PaseError], message: str) -> None:
    with pytest.raises(error, match=message):
        search(tiny_graph(), 4, options=options)


@pytest.mark.parametrize("machine", ["1080tii", "", "../1080ti", "1080TI"])
def test_an_unknown_machine_is_refused(machine: str) -> None:
    with pytest.raises(MachineError, match=r"unknown machine .* known machines are 1080ti, 2080ti"):
        search(tiny_graph(), 4, machine=machine)


def test_a_cyclic_graph_is_refused() -> None:
    layers = tuple(dense(name, (8, 4), out=(("n", 4),)) for name in ("one", "two"))
    edges = tuple(Edge(producer=a, output=0, consumer=b, input=0) for a, b in (("one", "two"), ("two", "one")))
    graph = Graph(name="ring", operators=layers, edges=edges)
    with pytest.raises(GraphError, match=r"graph 'ring' has a cycle: .*one.* a model must be acyclic"):
        search(graph, 4)


def test_figures_beyond_all_measure_are_refused() -> None:
    machine = load_machine("1080ti")
    device = replace(machine.device, peak_flop_per_s={"float32": 1e308})
    levels = tuple(replace(level, bandwidth_bytes_per_s=1e-300) for level in machine.levels)
    with pytest.raises(PaseError, match=r"layer costs .* hold NaN|infinite"):
        search(tiny_graph(), 4, machine=replace(machine, device=device, levels=levels))


def test_a_graph_without_a_batch_can_be_searched() -> None:
    net = Builder("net")
    x = net.add(dense, "fc", net.input((6, 4)), lead=("x",), out=(("n", 8),))
    net.add(softmax_loss, "loss", x, dims=("x", "n"))
    plan = search(net.build(), 2, machine=slow_machine())
    assert plan.total_cost <= plan.baselines["data_parallel"]
    assert list(plan["fc"].dims) == ["x", "n", "c"]
