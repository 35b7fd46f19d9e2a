"""Weights, gradients and what optimizers keep in pieces (ZeRO): equality, bytes, sizes and peaks under every state."""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.costs import STATES
from pase.errors import ProgramError
from pase.planning.plan import Plan
from pase.sharding.layouts import PlainDim, device_mesh, in_pieces, layout_of
from pase.sharding.shards import state_dim
from pase.targets.torch.checkpoints import RankCheckpoints, load_checkpoint, save_checkpoint
from pase.targets.torch.parallel import Parallel, parallelize
from pase.targets.torch.parameters import local_of
from pase.targets.torch.program import Program
from pase.targets.torch.script import train
from pase.targets.training.optimisers import Adafactor, Adam
from pase.targets.training.options import TrainingOptions
from tests.runtime.plans import make_plan, placed_plan
from tests.targets.torch.equality import difference, full
from tests.targets.torch.lockstep import added
from tests.targets.torch.modules import floats
from tests.targets.torch.networks import graph_of, predicted
from tests.targets.torch.ranks import Pool
from tests.targets.torch.test_parallel import CASES, _made
from tests.targets.torch.trained import builder_of, events

RELATIVE = 1e-12

OPTIMIZERS: Mapping[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # Gradients that are zero but for rounding (of biases of keys and before norms) are not blown up by this ε.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, foreach=True),
}


class Plain(nn.Module):
    """Products in a row; the last has rows that 2 and 4 do not divide, its bias no dim that they do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def with_states(plan: Plan, *states: str) -> Plan:
    """The same plan with a state for each layer, or one for all."""
    own = states * len(plan.layers) if len(states) == 1 else states
    return replace(plan, layers=tuple(replace(layer, state=s) for layer, s in zip(plan.layers, own, strict=True)))


def with_random_states(plan: Plan, seed: int) -> Plan:
    numbers = random.Random(seed)
    return with_states(plan, *(numbers.choice(STATES) for _ in plan.layers))


def data_parallel(module: nn.Module, batch: Any, world: int, state: str) -> Plan:
    graph = pase.load((module, batch))
    return with_states(make_plan(graph, world, {o.name: {"b": world} for o in graph.operators}), state)


def plain(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return Plain(width).double()


def plain_batch(seed: int = 0, width: int = 8) -> dict[str, Any]:
    return floats(seed, "x", 8, width)


# -- equality


def _trained(module: nn.Module, name: str, optimizer: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Return losses, norms of gradients, and the state after three steps."""
    stepper, losses, norms = OPTIMIZERS[optimizer](module.parameters()), [], []
    for seed in range(3):
        if isinstance(module, Parallel):
            module.traffic.is_counted = not seed
        loss = CASES[name].loss(module(**CASES[name].batch(seed)))
        loss.backward()
        norms.append(float(full(nn.utils.clip_grad_norm_(module.parameters(), 0.5))))
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses, norms, {key: full(x).clone() for key, x in module.state_dict().items()}


def _on_rank(_rank: int, _world: int, name: str, plan: Plan, optimizer: str) -> Any:
    parallel = parallelize((_made(name), CASES[name].batch(0)), plan)
    held = {key for key, _ in (*parallel.named_parameters(), *parallel.named_buffers())}
    found = _trained(parallel.train(), name, optimizer)
    sent = {
        own: count
        for own, count in parallel.traffic.sent.items()
        if count and own.producer not in held and own.consumer != "the model"
    }
    return found, sent, parallel.notes


@pytest.mark.parametrize(
    ("name", "world", "seed", "optimizer"),
    [
        *(("language", world, seed, own) for world, seed, own in ((2, 0, "sgd"), (4, 1, "adamw"), (4, 2, "foreach"))),
        *(("picture", world, seed, own) for world, seed, own in ((2, 3, "adamw"), (4, 4, "sgd"))),
        *(("pieces", world, seed, own) for world, seed, own in ((2, 5, "sgd"), (4, 6, "adamw"))),
    ]
    + [
        pytest.param(name, world, seed, ("sgd", "adamw")[seed % 2], marks=pytest.mark.full)
        for name in CASES
        for world in (2, 4)
        for seed in range(10, 15)
    ],
)
def test_a_module_trains_under_random_states(ranks: Pool, name: str, world: int, seed: int, optimizer: str) -> None:
    plan = placed_plan(pase.load((_made(name), CASES[name].batch(0))), world, seed)
    plan = with_random_states(plan, seed)
    losses, norms, state = _trained(_made(name), name, optimizer)
    answers = ranks.run(_on_rank, name, plan, optimizer, world=world)
    for (found_losses, found_norms, found_state), _, _ in answers:
        assert found_losses == pytest.approx(losses, rel=RELATIVE)
        assert found_norms == pytest.approx(norms, rel=RELATIVE)
        assert list(found_state) == list(state)
        wrong = {key: difference(found_state[key], x) for key, x in state.items()}
        assert max(wrong.values()) <= RELATIVE, wrong
    if any(" replicated, not " in note for note in answers[0][2]):
        return
    sent, expected = added([own for _, own, _ in answers]), predicted(plan)
    both = {key: (sent.get(key, 0), expected.get(key, 0)) for key in {*sent, *expected}}
    assert not {key: pair for key, pair in both.items() if pair[0] != pair[1]}


@pytest.mark.parametrize(("name", "state"), [*(("language", state) for state in STATES), ("picture", "zero3")])
def test_data_parallel_training_in_every_state(ranks: Pool, name: str, state: str) -> None:
    plan = data_parallel(_made(name), CASES[name].batch(0), 2, state)
    losses, norms, expected = _trained(_made(name), name, "adamw")
    answers = ranks.run(_on_rank, name, plan, "adamw", world=2)
    for (found, found_norms, found_state), _, notes in answers:
        assert found == pytest.approx(losses, rel=RELATIVE)
        assert found_norms == pytest.approx(norms, rel=RELATIVE)
        assert max(difference(found_state[key], x) for key, x in expected.items()) <= RELATIVE
        assert not any(" replicated, not " in note for note in notes)
    assert added([sent for _, sent, _ in answers]) == predicted(plan)


# -- bytes, with three products of known sizes

NUMBERS = {"first": 8 * 16 + 16, "second": 16 * 8, "last": 8 * 3}
"""Of weights that are cut; the last bias, of 3, is not."""


def _sent(_rank: int, _world: int, plan: Plan, passes: int) -> dict[tuple[str, str], int]:
    parallel = parallelize((plain(), plain_batch()), plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(2):
        parallel.traffic.sent.clear()
        parallel.traffic.is_counted = True
        with parallel.no_sync():
            for _ in range(passes - 1):
                parallel(**plain_batch()).backward()
        parallel(**plain_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {(own.consumer, own.phase.value): count for own, count in parallel.traffic.sent.items() if count}


@pytest.mark.parametrize(("world", "passes"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("state", STATES)
def test_bytes_are_those_of_the_closed_forms(ranks: Pool, state: str, world: int, passes: int) -> None:
    """Of micro-batches that are accumulated, too."""
    plan = data_parallel(plain(), plain_batch(), world, state)
    gathers = {"replicated": 0, "zero1": 1, "zero2": 1, "zero3": 0}[state]
    scatters = {"replicated": 0, "zero1": 1, "zero2": passes, "zero3": passes}[state]
    for found in ranks.run(_sent, plan, passes, world=world):
        for layer, numbers in NUMBERS.items():
            one = 8 * numbers * (world - 1) // world
            bias = 8 * 3 if layer == "last" else 0
            if state == "replicated":
                # An all-reduce; of 3 numbers not every rank adds one.
                assert abs(found[layer, "update"] - 2 * (one + bias * (world - 1) / world)) <= 2 * bias
                continue
            update = found[layer, "update"]
            assert (gathers + scatters) * one <= update <= (gathers + scatters) * one + 2 * bias
            if state == "zero3":
                assert found[layer, "forward"] == passes * one
                # The gradient of the model's own input is nobody's: the first layer's weights are not needed for it.
                assert found.get((layer, "backward"), 0) == (0 if layer == "first" else passes * one)


# -- sizes


def _sizes(_rank: int, _world: int, plan: Plan, width: int) -> dict[str, int]:
    parallel = parallelize((plain(width), plain_batch(width=width)), plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
    parallel(**plain_batch(width=width)).backward()
    local = [local_of(p) for p in parallel.parameters()]
    gradients = [local_of(p.grad) for p in parallel.parameters() if p.grad is not None]
    optimizer.step()
    state = [local_of(x) for own in optimizer.state.values() for x in own.values() if x.ndim]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}
    return {
        "weights": sum(storages.values()),
        "gradients": sum(x.nbytes for x in gradients),
        "optimizer": sum(x.nbytes for x in state),
    }


@pytest.mark.parametrize("state", STATES)
def test_a_rank_keeps_what_the_table_says(ranks: Pool, state: str) -> None:
    world, width = 4, 8
    plan = data_parallel(plain(width), plain_batch(width=width), world, state)
    whole, part = 8 * (sum(NUMBERS.values()) + 3), 8 * (sum(NUMBERS.values()) // world + 3)
    for found in ranks.run(_sizes, plan, width, world=world):
        assert found["weights"] == (part if state == "zero3" else whole)
        assert found["gradients"] == (whole if state == "replicated" else part)
        assert found["optimizer"] == 2 * (whole if state == "replicated" else part)


class Deep(nn.Module):
    """Equal products, whose weights are far larger than what flows between them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = functional.relu(layer(x))
        return x.square().mean()


WIDTH, DEPTH = 256, 12


def _peak(_rank: int, _world: int, plan: Plan) -> int:
    """Return the most that is allocated in a step, and lies in memory before it."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, WIDTH)}
    module = parallelize((Deep(WIDTH, DEPTH), batch), plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        module(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    storages = {}
    for parameter in module.parameters():
        storage = local_of(parameter).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    peaks = []
    # Gloo's threads free what they have sent when they come to it, in some steps late.
    for _ in range(12):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
        assert profiled.profiler is not None
        found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
        peaks.append(max(accumulate(changes)))
    return sum(storages.values()) + min(peaks)


def test_the_peak_falls_as_the_table_says(ranks: Pool) -> None:
    batch = {"x": torch.randn(4, WIDTH)}
    one, count = 4 * WIDTH * WIDTH, DEPTH
    found = {}
    for state in ("replicated", "zero2", "zero3"):
        plan = data_parallel(Deep(WIDTH, DEPTH), batch, 4, state)
        # Gloo's threads free what they have sent when they come to it, on some ranks late.
        found[state] = min(ranks.run(_peak, plan, world=4)) / one
    # Weights and gradients of 12 layers; buckets of gradients that are summed are copies.
    assert 2 * count <= found["replicated"] <= 2.5 * count
    # Gradients in pieces, but for those of layers whose turn it is, what is sent of them and what comes.
    assert count * (1 + 1 / 4) <= found["zero2"] <= count * (1 + 1 / 4) + 7
    # And the weights of a layer and of the next one.
    assert count / 2 <= found["zero3"] <= count / 2 + 9
    assert found["zero3"] < 0.65 * found["replicated"]


# -- what else training loops do


def _accumulated(_rank: int, _world: int, plan: Plan) -> list[tuple[Any, Any]]:
    case, module = CASES["language"], _made("language")
    parallel = parallelize((copy.deepcopy(module), case.batch(0)), plan)
    for seed in range(4):
        case.loss(module(**case.batch(seed))).backward()
    with parallel.no_sync():
        for seed in range(2):
            case.loss(parallel(**case.batch(seed))).backward()
    case.loss(parallel(**case.batch(2))).backward()
    # Without no_sync gradients are summed each time, and added to what is there.
    case.loss(parallel(**case.batch(3))).backward()
    pairs = zip(module.parameters(), parallel.parameters(), strict=True)
    return [(own.grad, full(other.grad)) for own, other in pairs]


@pytest.mark.parametrize("state", ["zero1", "zero2", "zero3", "random"])
def test_gradients_accumulate(ranks: Pool, state: str) -> None:
    plan = data_parallel(_made("language"), CASES["language"].batch(0), 2, "replicated")
    plan = with_random_states(plan, 3) if state == "random" else with_states(plan, state)
    for pairs in ranks.run(_accumulated, plan, world=2):
        for expected, found in pairs:
            if expected.norm() > 1e-12:
                assert difference(found, expected) < RELATIVE


def _evaluated(_rank: int, _world: int, plan: Plan) -> list[tuple[float, float]]:
    module = plain()
    parallel = parallelize((copy.deepcopy(module), plain_batch()), plan)
    found = []

    def compare(*, trains: bool = False) -> None:
        module.train(trains)
        parallel.train(trains)
        with torch.set_grad_enabled(trains):
            found.append((parallel(**plain_batch(1)).item(), module(**plain_batch(1)).item()))

    for each in (module, parallel):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)
        each(**plain_batch()).backward()
        optimizer.step()
    compare()
    # What tells nobody that it changes weights.
    for each in (module, parallel):
        for parameter in each.parameters():
            parameter.data.mul_(0.5)
    compare()
    with torch.no_grad():
        for each in (module, parallel):
            torch._foreach_mul_(list(each.parameters()), 0.5)
    compare()
    compare(trains=True)
    parallel.load_state_dict({key: 2 * x for key, x in module.state_dict().items()})
    module.load_state_dict({key: 2 * x for key, x in module.state_dict().items()})
    compare(trains=True)
    parallel.zero_grad()
    twin, alone = copy.deepcopy(parallel), copy.deepcopy(module)
    for each in (twin, alone):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(**plain_batch()).backward()
        optimizer.step()
    found.append((twin(**plain_batch(1)).item(), alone(**plain_batch(1)).item()))
    compare()
    parallel.float()
    module.float()
    with torch.no_grad():
        x = plain_batch(1)["x"].float()
        found.append((parallel(x).item(), module(x).item()))
    return found


@pytest.mark.parametrize("state", STATES)
def test_weights_are_those_that_were_set_last(ranks: Pool, state: str) -> None:
    plan = data_parallel(plain(), plain_batch(), 2, state)
    for found in ranks.run(_evaluated, plan, world=2):
        *exact, (low, expected) = found
        for own, alone in exact:
            assert own == pytest.approx(alone, rel=RELATIVE)
        assert low == pytest.approx(expected, rel=1e-6)


def _passes(_rank: int, _world: int, plan: Plan) -> list[tuple[Any, Any]]:
    """Two forward passes before the backward passes, one of which goes twice; weights frozen in part."""
    module = plain()
    parallel = parallelize((copy.deepcopy(module), plain_batch()), plan)
    for each in (module, parallel):
        first, second = each(**plain_batch()), each(**plain_batch(1))
        (first + 2 * second).backward(retain_graph=True)
        second.backward()
        each.second.weight.requires_grad_(False)
        each(**plain_batch(2)).backward()
    pairs = zip(module.parameters(), parallel.parameters(), strict=True)
    return [(own.grad, full(other.grad)) for own, other in pairs]


@pytest.mark.parametrize("state", ["zero1", "zero2", "zero3"])
def test_several_passes_and_frozen_weights(ranks: Pool, state: str) -> None:
    plan = data_parallel(plain(), plain_batch(), 2, state)
    for pairs in ranks.run(_passes, plan, world=2):
        for expected, found in pairs:
            assert difference(found, expected) < RELATIVE


def _saved(_rank: int, _world: int, plan: Plan, folder: str) -> None:
    parallel = parallelize((plain(), plain_batch()), plan)
    optimizer = OPTIMIZERS["adamw"](parallel.parameters())
    for seed in range(2):
        parallel(**plain_batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, parallel, optimizer, step=2)


def _loaded(_rank: int, _world: int, plan: Plan, folder: str) -> list[float]:
    torch.manual_seed(9)
    parallel = parallelize((Plain().double(), plain_batch()), plan)
    optimizer = OPTIMIZERS["adamw"](parallel.parameters())
    assert load_checkpoint(folder, parallel, optimizer) is not None
    losses = []
    for seed in range(2, 4):
        loss = parallel(**plain_batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("before", "after"), [("zero1", "zero3"), ("zero3", "replicated"), ("replicated", "zero2")])
def test_checkpoints_go_from_any_state_to_any(ranks: Pool, tmp_path: Path, before: str, after: str) -> None:
    module = plain()
    optimizer, losses = OPTIMIZERS["adamw"](module.parameters()), []
    for seed in range(4):
        loss = module(**plain_batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ranks.run(_saved, data_parallel(plain(), plain_batch(), 4, before), str(tmp_path), world=4)
    for found in ranks.run(_loaded, data_parallel(plain(), plain_batch(), 2, after), str(tmp_path), world=2):
        assert found == pytest.approx(losses[2:], rel=RELATIVE)


# -- emitted programs


def _losses(found: Sequence[list[dict[str, Any]]]) -> list[float]:
    losses: list[float] = found[0][-1]["losses"]
    return losses


@pytest.mark.parametrize("rule", [Adam(), Adafactor()])
def test_an_emitted_program_trains_in_states(ranks: Pool, rule: Any) -> None:
    graph = graph_of("mlp")
    plan = placed_plan(graph, 4, 3)
    names = [layer.name for layer in plan.layers]
    plan = make_plan(graph, 4, {name: {"b": 2 if i % 2 else 4} for i, name in enumerate(names)})
    states = (*STATES[1:] * len(names),)[: len(names)]
    plan, alone = with_states(plan, *states), make_plan(graph, 1, {})
    source = pase.emit(plan, target="torch")
    assert f'state="{states[0]}")' in source
    options = TrainingOptions(steps=3, dtype="float64", rule=rule)
    expected = _losses(ranks.run(events, pase.emit(alone, target="torch"), options, world=1))
    found = ranks.run(events, source, options, True, world=4)
    assert _losses(found) == pytest.approx(expected, rel=RELATIVE)
    done = next(event for event in found[0] if event["event"] == "done")
    assert done["measured_bytes"] == sum(predicted(plan).values())


def _kept(_rank: int, world: int, source: str, steps: int, folder: Path, resume: str | None) -> list[float]:
    options = TrainingOptions(steps=steps, dtype="float64", rule=Adafactor())
    checkpointing = RankCheckpoints(folder=folder, resume=resume)
    return train(builder_of(source), options, num_devices=world, checkpointing=checkpointing)


def test_an_emitted_program_goes_on_in_other_states(ranks: Pool, tmp_path: Path) -> None:
    graph = graph_of("mlp")
    plan = make_plan(graph, 4, {o.name: {"b": 4} for o in graph.operators})
    first, second = (pase.emit(with_states(plan, state), target="torch") for state in ("zero3", "zero1"))
    alone = ranks.run(_kept, pase.emit(make_plan(graph, 1, {}), target="torch"), 4, tmp_path / "alone", None, world=1)
    ranks.run(_kept, first, 2, tmp_path / "states", None, world=4)
    for found in ranks.run(_kept, second, 4, tmp_path / "states", "newest", world=4):
        assert found == pytest.approx(alone[0][2:], rel=RELATIVE)


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"layer 'fc': unknown state 'zero4': did you mean"):
        Program(rank=0, num_devices=2).mesh("fc", [], state="zero4")


# -- how parts are cut


def _notes(_rank: int, _world: int, plan: Plan) -> tuple[str, ...]:
    return parallelize((plain(), plain_batch()), plan).notes


def test_what_no_ranks_can_cut_is_replicated_and_noted(ranks: Pool) -> None:
    for notes in ranks.run(_notes, data_parallel(plain(), plain_batch(), 2, "zero2"), world=2):
        assert [note for note in notes if "zero2" in note] == [
            "weight 'last/bias' is replicated, not zero2: 2 ranks cut no dim of its part [3] evenly"
        ]


def test_parts_are_cut_along_the_first_dim_that_divides() -> None:
    assert state_dim((3, 8, 4), 4) == 1
    assert state_dim((12, 8), 4) == 0
    assert state_dim((3, 5), 2) is None
    assert state_dim((), 2) is None
    mesh = device_mesh("fc", [("n", 2), ("b", 2)], 4, [3, 0, 1, 2])
    layout = layout_of(mesh, [PlainDim("n", 8), PlainDim("c", 3)])
    found = in_pieces(layout, [[3, 0], [1, 2]], 0).by_device
    assert found == {0: ((0, 2), (0, 3)), 3: ((2, 4), (0, 3)), 1: ((4, 6), (0, 3)), 2: ((6, 8), (0, 3))}
