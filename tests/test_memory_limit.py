"""Searches within the memory of a device: against every strategy of small graphs, and on every built-in network."""

import re
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from pase import Graph, Plan, SearchOptions, load, load_machine, search
from pase.common.words import quantity
from pase.costs import cost_model
from pase.errors import CostError, MemoryLimitError, SolverError
from pase.graph.operators import with_fan_outs
from pase.machine import Machine
from pase.models import MODELS
from pase.planning import planner
from pase.planning.memory_limit import lightest_within, limit_of
from pase.planning.planner import WITHOUT_LIMIT
from pase.planning.problems import problem_of
from pase.planning.steps import plan_layers, total_cost
from pase.sharding.shards import data_parallel
from tests.networks import diamond, every_strategy, slow_machine, small_graph, small_plan, tiny_graph
from tests.plain_memory import plain_memory


def _peak_bytes(graph: Graph, splits: list[dict[str, int]], optimiser: str) -> int:
    return plain_memory(graph, splits, optimiser).peak().bytes


@pytest.mark.parametrize("graph", [tiny_graph(), diamond(inputs=3, outputs=3)], ids=["chain", "ring"])
def test_no_strategy_that_fits_is_cheaper(graph: Graph) -> None:
    machine = slow_machine()
    model = cost_model("paper", machine, 2)
    whole = with_fan_outs(graph)
    every = [
        (
            _peak_bytes(whole, strategy, "momentum"),
            total_cost(plan_layers(whole, 2, model, strategy, [(0, 1)] * len(strategy))),
        )
        for strategy in every_strategy(whole, 2)
    ]
    sizes = sorted({size for size, _ in every})
    before = inf
    for limit in [*sizes[:: max(1, len(sizes) // 6)], sizes[-1]]:
        options = SearchOptions(device_memory_bytes=limit, optimiser="momentum")
        plan = search(graph, 2, machine=machine, options=options)
        assert plan.exact
        assert plan.memory.total_bytes <= limit == plan.device_memory_bytes
        assert plan.total_cost == pytest.approx(min(cost for size, cost in every if size <= limit), rel=1e-12)
        assert plan.total_cost <= before
        before = plan.total_cost
    least = rf"the least (that one takes is|found takes) {quantity(sizes[0], 'B')}, "
    with pytest.raises(MemoryLimitError, match=least + ".*1.00 B too much"):
        search(graph, 2, machine=machine, options=replace(options, device_memory_bytes=sizes[0] - 1))


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("graph", [tiny_graph(), diamond(inputs=3, outputs=3)], ids=["chain", "ring"])
def test_no_strategy_takes_less_than_the_bound_on_the_lightest(graph: Graph, optimiser: str) -> None:
    whole = with_fan_outs(graph)
    sizes = [_peak_bytes(whole, strategy, optimiser) for strategy in every_strategy(whole, 2)]
    problem = problem_of(graph, 2, slow_machine(), "paper")
    limit = limit_of(problem, 1, optimiser)
    lightest, least = lightest_within(problem.tables, limit)
    assert 0 < least <= min(sizes) <= limit.peak(lightest).bytes


def _least_bytes(graph: Graph, num_devices: int) -> int:
    """Return what the error says of a limit of one byte."""
    with pytest.raises(MemoryLimitError, match=r"no strategy of '\w+' fits 1.00 B on each of") as raised:
        search(graph, num_devices, device_memory_bytes=1, optimiser="adam")
    found = re.search(r"(?:one takes is|found takes) ([\d.]+) (\w+),", str(raised.value))
    assert found is not None
    number, unit = found.groups()
    return int(float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("alexnet", "rnnlm", "gpt") else [pytest.mark.full]) for name in MODELS],
)
def test_every_network_within_half_of_what_it_needs_beyond_the_least(name: str) -> None:
    graph, free = small_graph(name), small_plan(name, 8)
    most = replace(free, optimiser="adam").memory.total_bytes
    limit = (_least_bytes(graph, 8) + most) // 2
    plan = search(graph, 8, device_memory_bytes=limit, optimiser="adam")
    assert plan.memory.total_bytes <= limit < most
    assert plan.exact
    assert plan.lower_bound == plan.total_cost >= free.total_cost
    assert plan.baselines[WITHOUT_LIMIT] == pytest.approx(free.total_cost, rel=1e-12)


@pytest.mark.parametrize("model", ["alpha_beta", "paper"])
def test_a_limit_under_either_cost_model(model: str) -> None:
    graph, options = small_graph("transformer"), SearchOptions(cost_model=model, optimiser="adam")
    free = search(graph, 8, options=options)
    before = free
    for share in (0.99, 0.97, 0.95):
        limit = int(share * free.memory.total_bytes)
        plan = search(graph, 8, options=replace(options, device_memory_bytes=limit))
        assert plan.exact
        assert plan.memory.total_bytes <= limit
        assert plan.total_cost >= before.total_cost >= free.total_cost == plan.baselines[WITHOUT_LIMIT]
        before = plan


def test_a_limit_that_does_not_bind_changes_nothing_but_what_is_said_of_it() -> None:
    free = small_plan("transformer", 8)
    plan = search(small_graph("transformer"), 8, device_memory_bytes=10**12)
    assert plan.layers == free.layers
    assert plan.memory == free.memory
    assert (plan.total_cost, plan.exact, plan.lower_bound) == (free.total_cost, True, free.total_cost)
    assert plan.baselines == free.baselines | {WITHOUT_LIMIT: free.total_cost}
    assert (free.device_memory_bytes, plan.device_memory_bytes) == (None, 10**12)


def test_a_limit_at_exactly_what_the_best_strategy_needs_is_met_by_it() -> None:
    free = small_plan("alexnet", 8)
    size = free.memory.total_bytes
    plan = search(small_graph("alexnet"), 8, device_memory_bytes=size)
    assert plan.layers == free.layers
    less = search(small_graph("alexnet"), 8, device_memory_bytes=size - 1)
    assert less.memory.total_bytes < size
    assert less.total_cost > free.total_cost


def _data_parallel_bytes(graph: Graph, num_devices: int) -> int:
    splits = [dict(zip(op.extents, data_parallel(graph, op, num_devices), strict=True)) for op in graph.operators]
    return _peak_bytes(graph, splits, "adam")


def test_a_search_that_is_cut_short_returns_what_fits_and_no_data_parallelism_that_does_not() -> None:
    graph = load("rnnlm")
    limit = _data_parallel_bytes(graph, 8) - 1
    options = SearchOptions(device_memory_bytes=limit, optimiser="adam", time_limit_s=1e-9)
    plan = search(graph, 8, options=options)
    assert not plan.exact
    assert 0 < plan.gap <= 1
    assert plan.memory.total_bytes <= limit
    best = search(graph, 8, options=replace(options, time_limit_s=None))
    assert best.exact
    assert plan.lower_bound <= best.total_cost <= plan.total_cost
    assert plan.baselines[WITHOUT_LIMIT] <= plan.total_cost


def test_nothing_fits_says_by_how_much_and_which_layer_binds_and_what_would_do() -> None:
    """Weights [1024, 2048] and [2048, 16] and their biases, with gradients: halves of them take 8.53 MB.

    fc1 keeps half of its own, 8.40 MB, the data and half of its result, 32.8 kB each.
    """
    graph = load("mlp", arguments={"layers": 2, "batch": 8, "inputs": 1024, "hidden": 2048, "classes": 16})
    with pytest.raises(MemoryLimitError) as raised:
        search(graph, 2, device_memory_bytes=5_000_000)
    text = str(raised.value)
    assert text.startswith("no strategy of 'mlp' fits 5.00 MB on each of 2 devices: the least that one takes is 8.6")
    assert "MB too much; layer 'fc1' binds with 8.46 MB of it (98%)" in text
    assert "; 4 devices would do (no smaller batch does: weights with their gradients and state take 8.53 MB)" in text
    plan = search(graph, 4, device_memory_bytes=5_000_000)
    assert plan.memory.total_bytes <= 5_000_000
    kept = r"\(no smaller batch does: weights with their gradients and state take 8.53 MB\)$"
    with pytest.raises(MemoryLimitError, match=kept):
        search(graph, 2, device_memory_bytes=1_000)


def test_a_larger_state_needs_more_and_is_recorded() -> None:
    plans: list[Plan] = [search(small_graph("mlp"), 4, optimiser=name) for name in ("sgd", "momentum", "adam")]
    sgd, momentum, adam = (plan.memory for plan in plans)
    # The update works with two tensors as large as the largest weight, the gradients of activations gone.
    largest = 2 * 4 * 64 * 64
    assert [plan.optimiser for plan in plans] == ["sgd", "momentum", "adam"]
    assert (sgd.optimiser_bytes, momentum.optimiser_bytes) == (0, sgd.weights_bytes)
    assert adam.optimiser_bytes == 2 * sgd.weights_bytes
    assert (adam.buffers_bytes, plans[2].peak.phase) == (largest, "update")


@pytest.mark.parametrize("limit", [0, -5, 1.5, "8GB"])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(MemoryLimitError, match=r"the memory of a device is .*; expected a whole number of bytes"):
        search(tiny_graph(), 4, device_memory_bytes=limit)


def test_other_options_are_checked_as_ever() -> None:
    with pytest.raises(CostError, match="unknown optimiser 'adma'"):
        search(tiny_graph(), 4, optimiser="adma")
    with pytest.raises(SolverError, match="the time limit is 0 s"):
        search(tiny_graph(), 4, device_memory_bytes=10**9, time_limit_s=0)


def test_the_devices_of_a_machine_are_a_limit() -> None:
    machine = load_machine("1080ti")
    plan = search(
        load("rnnlm", batch=128), 4, machine=machine, device_memory_bytes=machine.device.memory_bytes, optimiser="adam"
    )
    assert plan.exact
    assert plan.memory.total_bytes <= machine.device.memory_bytes < _data_parallel_bytes(plan.graph, 4)


def _with_memory(size_bytes: int) -> Machine:
    machine = load_machine("1080ti")
    return replace(machine, device=replace(machine.device, memory_bytes=size_bytes))


def test_under_step_the_cheapest_is_told_where_nothing_is_known_to_fit() -> None:
    free = search("alexnet", 8, machine="1080ti", cost_model="step")
    plan = search("alexnet", 8, machine=_with_memory(1000), cost_model="step")
    assert (plan.total_cost, plan.exact, plan.device_memory_bytes) == (free.total_cost, True, None)


# -- the peak under a limit


def _wide() -> Graph:
    """One weight is nearly all there is."""
    return load("mlp", batch=8, arguments={"inputs": 1024, "hidden": 1024, "layers": 2, "classes": 16})


@pytest.mark.parametrize(("optimiser", "limit"), [("adamw", 9_000_000), ("adafactor", 9_000_000)])
def test_the_update_is_within_the_limit(optimiser: str, limit: int) -> None:
    """AdamW reaches 1.43 times the limit, Adafactor 1.89 times: two tensors of the size of the largest weight more."""
    options = SearchOptions(cost_model="alpha_beta", optimiser=optimiser, device_memory_bytes=limit)
    try:
        plan = search(_wide(), 2, machine="h100", options=options)
    except MemoryLimitError:
        return
    assert plan.peak.bytes <= limit


def test_the_update_is_within_nine_tenths_of_a_device() -> None:
    """Under `step`, a plan that is searched again within nine tenths of the memory has its peak there, or says so."""
    machine = load_machine("h100")
    machine = replace(machine, device=replace(machine.device, memory_bytes=10_000_000))
    plan = search(_wide(), 2, machine=machine, cost_model="step", optimiser="adamw")
    assert plan.device_memory_bytes is None or plan.peak.bytes <= plan.device_memory_bytes


def test_reductions_of_gradients_are_within_the_limit() -> None:
    """The peak is 413 MB: a gradient of 67 MB, what the reduction before it sends and receives, and gathered weights.

    All layers but the first and the last are sharded; gradients of these two are of one bucket.
    """
    arguments = {"inputs": 16, "hidden": 4096, "layers": 8, "classes": 16}
    pins = {"fc1": "b=8", "fc8": "b=8"} | {f"fc{i}": "b=8 zero3" for i in range(2, 8)}
    options = SearchOptions(cost_model="alpha_beta", modes=("recompute", "zero1", "zero2", "zero3"))
    settings: dict[str, Any] = {"machine": "h100", "constraints": {"pin": pins}, "options": options}
    graph = load("mlp", batch=64, arguments=arguments)
    plan = search(graph, 8, device_memory_bytes=413_000_000, **settings)
    assert plan.exact
    assert 412_000_000 < plan.peak.bytes <= 413_000_000
    with pytest.raises(MemoryLimitError, match="no strategy of 'mlp' is known that fits"):
        search(graph, 8, device_memory_bytes=410_000_000, **settings)


def test_a_plan_tells_by_how_much_its_peak_is_over_the_limit() -> None:
    plan = small_plan("alexnet", 8)
    assert plan.share_of_limit == 0.0
    within, over = (replace(plan, device_memory_bytes=size) for size in (2 * plan.peak.bytes, plan.peak.bytes // 2))
    assert within.share_of_limit == pytest.approx(0.5)
    assert "over the memory limit" not in repr(within)
    assert over.share_of_limit == pytest.approx(2.0)
    assert repr(over).endswith(", proven optimal within the limit, peak 100.0% over the memory limit>")


def test_where_nothing_fits_it_is_said_with_which_modes_as_many_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said is what a search with those settings finds; its peak is within the limit."""
    monkeypatch.setattr(planner, "PROPOSAL_S", 120.0)  # on a busy machine the search for it takes longer
    arguments = {"layers": 2, "model_width": 64, "heads": 4, "steps": 32, "vocabulary": 96}
    graph = load("gpt", batch=8, arguments=arguments)
    settings: dict[str, Any] = {"machine": "a100", "cost_model": "alpha_beta"}
    limit = int(0.7 * _least(graph))
    with pytest.raises(MemoryLimitError, match=r"devices would do.*; or keep these 4 with --m") as raised:
        search(graph, 4, device_memory_bytes=limit, **settings)
    told = str(raised.value).split("keep these 4 with ")[1]
    flags, found = told.split(": ")
    asked = dict(zip(flags.split()[::2], flags.split()[1::2], strict=True))
    modes = tuple(asked["--modes"].split(",")) if "--modes" in asked else ()
    count = int(asked.get("--micro-batches", 1))
    plan = search(graph, 4, device_memory_bytes=limit, micro_batches=count, modes=modes, **settings)
    free = search(graph, 4, **settings)
    assert plan.peak.bytes <= limit
    assert found == (
        f"{quantity(plan.peak.bytes, 'B')}, at {plan.total_cost / free.total_cost:.2f} × the cost without a limit"
    )


def _least(graph: Graph) -> float:
    """Return the lowest peak of a strategy on 4 devices, as the error says it."""
    with pytest.raises(MemoryLimitError, match=r"the least (that one takes is|found takes) ") as raised:
        search(graph, 4, machine="a100", cost_model="alpha_beta", device_memory_bytes=1)
    found = re.search(r"(?:one takes is|found takes) ([\d.]+) (\w+),", str(raised.value))
    assert found is not None
    number, unit = found.groups()
    return float(number) * {"kB": 1e3, "MB": 1e6}[unit]
