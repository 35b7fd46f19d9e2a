"""Sessions beside searches from the start: whatever has changed, what they answer costs the same, proof and all."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

import pase
from pase.costs import choice_tables as costs_tables
from pase.costs import edges as costs_edges
from pase.costs.states import ModeSpace
from pase.errors import ConfigurationError, MachineError, MemoryLimitError, ModelError, PaseError
from pase.planning import session as sessions
from pase.planning.session import Answer, Session
from pase.sharding.shards import enumerate_configurations
from tests.networks import slow_machine, small_graph

Changes = dict[str, Any]


def _fresh(graph: pase.Graph, answer: Answer) -> pase.Plan:
    return pase.search(
        graph,
        answer.step.num_devices,
        machine=answer.machine,
        cost_model=answer.step.cost_model,
        constraints=answer.constraints,
        device_memory_bytes=answer.device_memory_bytes,
    )


def _agrees(graph: pase.Graph, answer: Answer) -> None:
    """Check an answer, and the plan of it, beside a search from the start."""
    fresh, plan = _fresh(graph, answer), answer.plan
    assert answer.total_cost == pytest.approx(fresh.total_cost, rel=1e-12)
    assert plan.total_cost == pytest.approx(fresh.total_cost, rel=1e-12)
    assert (answer.exact, plan.exact, plan.cost_unit) == (fresh.exact, fresh.exact, fresh.cost_unit)
    assert answer.lower_bound == pytest.approx(fresh.lower_bound, rel=1e-12)
    for found in (answer, plan):
        assert dict(found.baselines) == pytest.approx(dict(fresh.baselines), rel=1e-12)
    assert (plan.constraints, plan.device_memory_bytes) == (fresh.constraints, fresh.device_memory_bytes)
    assert {layer.name: dict(layer.splits) for layer in plan} == {k: dict(v) for k, v in answer.splits.items()}


def _pin(random: Random, session: Session) -> Changes:
    step, found = session.answer.step, {}
    for operator in random.sample(step.graph.operators, random.choice([1, 1, 2])):
        splits = random.choice(enumerate_configurations(operator, step.num_devices).tolist())
        text = " ".join(f"{dim}={k}" for dim, k in zip(operator.extents, splits, strict=True) if k > 1)
        found[operator.name] = text or "not split"
    return {"constraints": {"pin": found}}


def _some_changes(random: Random, session: Session) -> Changes:
    least = session.answer.plan.memory.total_bytes
    return random.choice(
        [
            _pin(random, session),
            _pin(random, session),
            {"constraints": {"forbid": {"*": random.choice(["n", "c", "b"])}}},
            {"constraints": {"mesh": {"data": 2, "model": 2}}},
            {"constraints": None},
            {"bandwidth_bytes_per_s": random.uniform(1e8, 1e11)},
            {"flop_per_byte": random.uniform(1, 1e4)},
            {"bandwidth_bytes_per_s": None},
            {"devices": random.choice([4, 8, 16])},
            {"device_memory_bytes": int(least * random.uniform(1, 1.5)), "constraints": None},
            {"device_memory_bytes": None},
        ]
    )


@pytest.mark.parametrize(
    ("name", "cost_model"),
    [
        *[("mlp", "paper"), ("mlp", "alpha_beta"), ("rnnlm", "alpha_beta")],
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [("gpt", "paper"), ("gpt", "alpha_beta"), ("transformer", "alpha_beta")]
        ),
    ],
)
def test_answers_are_those_of_searches_from_the_start(name: str, cost_model: str) -> None:
    graph, random = small_graph(name), Random(f"{name} {cost_model}")
    session = Session(graph, 8, slow_machine(), cost_model=cost_model)
    _agrees(graph, session.answer)
    failures = 0
    for _ in range(9):
        try:
            session.replan(**_some_changes(random, session))
        except PaseError:  # no layer has such a dim, or nothing fits
            failures += 1
        _agrees(graph, session.answer)
        assert session.plan is session.answer.plan
    assert failures < 5


ALL_MODES = ["zero1", "zero2", "zero3", "recompute"]

STEPS: tuple[Changes, ...] = (
    {},
    {"micro_batches": 4},
    {"modes": ALL_MODES},
    {"bandwidth_bytes_per_s": 1e9},
    {"modes": ["zero1", "recompute"]},
    {"constraints": {"pin": {"*_ff_1": "zero1"}, "forbid": {"*_ff_2": "recompute"}}},
    {"constraints": {"tie": ["*_ff_1"]}, "micro_batches": 1},
    {"constraints": None, "devices": 4},
    {"stages": 2, "micro_batches": 2},
    {"stages": "auto", "micro_batches": "auto"},
    {"stages": 1, "micro_batches": 1, "modes": []},
)
WITHIN_MEMORY: tuple[Changes, ...] = (
    {"modes": ALL_MODES},
    {"device_memory_bytes": 0.95},
    {"bandwidth_bytes_per_s": 2e10},
    {"device_memory_bytes": None},
)


@pytest.mark.parametrize(
    ("name", "cost_model", "steps"),
    [
        ("gpt", "step", STEPS),
        ("gpt", "alpha_beta", WITHIN_MEMORY),
        *(pytest.param(name, "alpha_beta", STEPS, marks=pytest.mark.full) for name in ("gpt", "transformer")),
    ],
)
def test_answers_of_steps_are_those_of_searches(name: str, cost_model: str, steps: tuple[Changes, ...]) -> None:
    graph, machine = small_graph(name), slow_machine()
    session = Session(graph, 8, machine, cost_model=cost_model)
    asked: Changes = {}
    for changes in steps:
        if isinstance(changes.get("device_memory_bytes"), float):
            peak = session.plan.peak.bytes
            changes = {**changes, "device_memory_bytes": int(changes["device_memory_bytes"] * peak)}
        asked |= {key: value for key, value in changes.items() if key not in ("bandwidth_bytes_per_s", "devices")}
        answer = session.replan(**changes)
        plan, settings = answer.plan, {**asked, "constraints": asked.get("constraints") or ()}
        fresh = pase.search(graph, answer.step.num_devices, machine=answer.machine, cost_model=cost_model, **settings)
        assert answer.total_cost == pytest.approx(fresh.total_cost, rel=1e-9)
        assert plan.total_cost == pytest.approx(fresh.total_cost, rel=1e-9)
        assert (answer.exact, plan.exact) == (fresh.exact, fresh.exact)
        assert answer.lower_bound == pytest.approx(fresh.lower_bound, rel=1e-9)
        assert dict(answer.baselines) == pytest.approx(dict(fresh.baselines), rel=1e-9)
        assert (plan.micro_batches, plan.device_memory_bytes) == (fresh.micro_batches, fresh.device_memory_bytes)
        own = [(layer.splits, layer.state, layer.is_recomputed, layer.stage) for layer in answer.step.layers]
        assert own == [(layer.splits, layer.state, layer.is_recomputed, layer.stage) for layer in plan]
        assert plan.device_memory_bytes is None or plan.peak.bytes <= plan.device_memory_bytes


def test_layers_of_steps_keep_to_the_modes_that_are_pinned() -> None:
    session = Session(small_graph("gpt"), 8, slow_machine(), cost_model="step", micro_batches=2, modes=ALL_MODES)
    session.replan(constraints={"pin": {"*_ff_1": "zero2"}, "forbid": {"*": "recompute"}})
    assert {layer.state for layer in session.plan if layer.name.endswith("_ff_1")} == {"zero2"}
    session.replan(constraints={"pin": {"*_ff_1": "zero1"}})
    assert {layer.state for layer in session.plan if layer.name.endswith("_ff_1")} == {"zero1"}
    assert not any(layer.is_recomputed for layer in session.replan(modes=["zero1"]).plan)
    with pytest.raises(ConfigurationError, match=r"that leaves layer '.*_ff_1' no state of its weights"):
        session.replan(modes=["recompute"])


def test_a_pin_is_kept_to_until_others_are_given() -> None:
    session = Session(small_graph("transformer"), 8)
    free = session.answer
    pinned = session.replan(constraints={"pin": {"fc": "v=8"}})
    assert pinned.splits["fc"] == {"b": 1, "s": 1, "v": 8, "d": 1} != free.splits["fc"]
    assert session.replan(bandwidth_bytes_per_s=1e9).splits["fc"] == pinned.splits["fc"]
    assert session.replan(bandwidth_bytes_per_s=None).total_cost == pinned.total_cost > free.total_cost
    assert session.replan(constraints={}).total_cost == free.total_cost


def test_splits_that_pins_name_need_not_divide_their_dims() -> None:
    graph = pase.models.build("lenet5", batch=6)
    session = Session(graph, 4, cost_model="alpha_beta")
    free, uneven = session.answer, {"constraints": {"pin": {"conv1": "n=4", "fc1": "not split"}}}
    for changes in ({}, {"bandwidth_bytes_per_s": 1e9}, {"device_memory_bytes": 10**9}):
        answer = session.replan(**uneven, **changes)
        assert (graph["conv1"].extents["n"], answer.splits["conv1"]["n"]) == (6, 4)
        _agrees(graph, answer)
    even = session.replan(constraints=None, bandwidth_bytes_per_s=None, device_memory_bytes=None)
    assert (even.step, even.total_cost) == (free.step, free.total_cost)
    with pytest.raises(ConfigurationError, match=r"pin\.conv1: that leaves layer 'conv1' no configuration"):
        session.replan(devices=2, **uneven)


def test_layers_that_are_tied_are_alike() -> None:
    graph = small_graph("gpt")
    session = Session(graph, 8)
    tied = session.replan(constraints={"pin": {"layer1_ff_1": "b=2 *"}, "tie": ["layer*_ff_1"]})
    assert tied.splits["layer1_ff_1"] == tied.splits["layer2_ff_1"]
    assert tied.splits["layer1_ff_1"]["b"] == 2
    _agrees(graph, tied)


def test_layers_with_other_configurations_to_choose_from_are_tied_by_their_splits() -> None:
    graph = pase.load("mlp", batch=16, arguments={"layers": 2, "inputs": 6, "hidden": 12, "classes": 16})
    sizes = {len(enumerate_configurations(graph[name], 8)) for name in ("fc1", "fc2")}
    assert len(sizes) == 2
    session = Session(graph, 8, slow_machine())
    tied = session.replan(constraints={"tie": ["fc1, fc2"]})
    assert list(tied.splits["fc1"].values()) == list(tied.splits["fc2"].values())
    _agrees(graph, tied)


@pytest.mark.parametrize("cost_model", ["paper", "alpha_beta"])
def test_only_what_changes_is_worked_out_again(cost_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph("gpt")
    session = Session(graph, 8, slow_machine(), cost_model=cost_model)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("this was known already")

    for name in ("traffic_of", "enumerate_configurations", "layer_signatures", "edge_signatures"):
        monkeypatch.setattr(costs_tables, name, never)
    monkeypatch.setattr(costs_edges, "layout_overlap", never)
    slower = session.replan(bandwidth_bytes_per_s=2e9)
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "problem_of_setting", never)
        pinned = session.replan(constraints={"pin": {"fc": "v=8"}})
    monkeypatch.undo()
    _agrees(graph, slower)
    _agrees(graph, pinned)


@pytest.mark.parametrize("name", ["rnnlm", "transformer"])
def test_where_every_transfer_costs_so_much_more_no_search_is_needed(name: str) -> None:
    session = Session(small_graph(name), 8, slow_machine())
    for bandwidth in (1e10, 6e9, 3e9, 2e10):
        answer = session.replan(bandwidth_bytes_per_s=bandwidth)
        (kept,) = session._kept.values()
        free = kept.tables[ModeSpace()].free
        assert free is not None
        assert (answer.exact, free.statistics.sweeps, free.statistics.operations) == (True, 0, 0)
        _agrees(small_graph(name), answer)


def test_another_batch() -> None:
    small, large = (pase.load("mlp", batch=batch) for batch in (64, 256))
    session = Session("mlp", 8, batch=64)
    _agrees(small, session.answer)
    _agrees(large, session.replan(batch=256))
    assert session.replan(batch=64, constraints={"pin": {"fc1": "b=8"}}).splits["fc1"]["b"] == 8


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"bandwidth": 1e9}, ConfigurationError, "bandwidth_bytes_per_s"),
        ({"bandwidth_bytes_per_s": -1.0}, ConfigurationError, "bandwidth_bytes_per_s is -1.0; expected a positive"),
        ({"bandwidth_bytes_per_s": 1e9, "flop_per_byte": 3.0}, ConfigurationError, "give one of them"),
        ({"constraints": {"pin": {"fc9": "n=2"}}}, ConfigurationError, "no layer of 'mlp' is 'fc9'"),
        ({"devices": 0}, ConfigurationError, "0 devices"),
        ({"device_memory_bytes": 1000}, MemoryLimitError, "no strategy of 'mlp' fits"),
        ({"device_memory_bytes": -5}, MemoryLimitError, "expected a whole number"),
        ({"machine": "abacus"}, MachineError, "abacus"),
        ({"batch": 7}, ModelError, "built already"),
        ({"modes": ["zero4"]}, ConfigurationError, "unknown mode 'zero4'"),
        ({"stages": 2}, ConfigurationError, "cost model 'paper' counts FLOP and bytes"),
        ({"micro_batches": 2}, ConfigurationError, "cost model 'paper' counts FLOP and bytes"),
        ({"micro_batches": 0}, ConfigurationError, "micro_batches is 0; expected a whole number"),
        ({"stages": "many"}, ConfigurationError, "stages is 'many'; expected a whole number"),
    ],
)
def test_what_makes_no_sense_leaves_a_session_as_it_was(
    changes: Mapping[str, Any], error: type[PaseError], text: str
) -> None:
    session = Session(small_graph("mlp"), 8)
    before = session.answer
    with pytest.raises(error, match=text.replace("(", r"\(")):
        session.replan(**changes)
    assert session.answer is before
    assert session.replan().total_cost == before.total_cost
