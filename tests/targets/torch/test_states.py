"""Weights, gradients and what optimizers keep in pieces (ZeRO): bytes, sizes and peaks under every state; all modes."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.costs import STATES
from pase.errors import PlanError, ProgramError
from pase.graph import Builder
from pase.graph.operators import dense, embedding, softmax_loss
from pase.planning.plan import Plan
from pase.sharding.layouts import PlainDim, device_mesh, layout_of, sharded_layout
from pase.sharding.shards import shard_dims
from pase.sharding.traffic import held_weights, optimiser_numbers
from pase.targets.jax.parallel import Parallel
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.program import Program
from pase.targets.torch.script import train
from pase.targets.torch.states import local_of
from pase.targets.training.checkpointing import CheckpointFolder
from pase.targets.training.optimisers import Adafactor, make_rule
from pase.targets.training.options import TrainingOptions
from tests.runtime.networks import small, tied
from tests.runtime.options import options
from tests.runtime.plans import data_parallel_plan, make_plan, random_plan
from tests.targets.torch.allocated import least_allocated
from tests.targets.torch.equality import RELATIVE, assert_close, full
from tests.targets.torch.modules import MODULES, floats, made
from tests.targets.torch.networks import graph_of, predicted
from tests.targets.torch.plans import in_modes, in_stages, with_states
from tests.targets.torch.ranks import Pool
from tests.targets.torch.trained import between_layers, builder_of, events


class Plain(nn.Module):
    """Products in a row; 2 and 4 divide no dim of the last one's bias, and the other dim of its weight alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def data_parallel(module: nn.Module, batch: Any, world: int, state: str) -> Plan:
    return with_states(data_parallel_plan(pase.load((module, batch)), world), state)


def again(plan: Plan) -> Plan:
    return replace(plan, layers=tuple(replace(layer, is_recomputed=True) for layer in plan.layers))


def plain(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return Plain(width).double()


def plain_batch(seed: int = 0, width: int = 8) -> dict[str, Any]:
    return floats(seed, "x", 8, width)


# -- bytes, with three products of known sizes

NUMBERS = {"first": 8 * 16 + 16, "second": 16 * 8, "last": 8 * 3 + 4}
"""Of weights as four ranks shard them: the last bias, of 3, is padded to 4."""


def _sent(_rank: int, _world: int, plan: Plan, passes: int) -> dict[tuple[str, str], int]:
    parallel = parallelize((plain(), plain_batch()), plan, check=False)
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


@pytest.mark.parametrize("state", STATES)
def test_bytes_are_those_of_the_closed_forms(ranks: Pool, state: str) -> None:
    """Of micro-batches that are accumulated, too."""
    world, passes = 4, 3
    gathers = {"replicated": 0, "zero1": 1, "zero2": 1, "zero3": 0}[state]
    scatters = {"replicated": 0, "zero1": 1, "zero2": passes, "zero3": passes}[state]
    for found in ranks.run(_sent, data_parallel(plain(), plain_batch(), world, state), passes, world=world):
        for layer, numbers in NUMBERS.items():
            one, update = 8 * numbers * (world - 1) // world, found.get((layer, "update"), 0)
            if state == "replicated":
                # An all-reduce; of the last bias's 3 numbers not every rank adds one.
                assert abs(update - 2 * one) <= (2 * 8 * 3 if layer == "last" else 0)
                continue
            assert update == (gathers + scatters) * one
            if state == "zero3":
                assert found[layer, "forward"] == passes * one
                # The gradient of the model's own input is nobody's: the first layer's weights are not needed for it.
                assert found.get((layer, "backward"), 0) == (0 if layer == "first" else passes * one)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_weights_of_layers_that_are_computed_again_are_gathered_once_more(ranks: Pool, world: int) -> None:
    """In a run of all layers, of three micro-batches."""
    plan = again(data_parallel(plain(), plain_batch(), world, "zero3"))
    for found in ranks.run(_sent, plan, 3, world=world):
        for layer, numbers in NUMBERS.items():
            one = 8 * numbers * (world - 1) // world
            assert found[layer, "forward"] == 2 * 3 * one
            assert found.get((layer, "backward"), 0) == (0 if layer == "first" else 3 * one)


# -- sizes


def _sizes(_rank: int, _world: int, plan: Plan, width: int) -> dict[str, int]:
    parallel = parallelize((plain(width), plain_batch(width=width)), plan, check=False)
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
    parallel(**plain_batch(width=width)).backward()
    local = [local_of(p) for p in parallel.parameters()]
    gradients = [local_of(p.grad) for p in parallel.parameters() if p.grad is not None]
    optimizer.step()
    state = [local_of(x) for own in optimizer.state.values() for x in own.values() if x.ndim]
    # Under zero1 and zero2 the whole parts, too, which the layers compute with.
    wholes = [whole for _, whole, _ in parallel._leaves.kept()]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (*local, *wholes)}
    return {
        "weights": sum(storages.values()),
        "gradients": sum(x.nbytes for x in gradients),
        "optimizer": sum(x.nbytes for x in state),
    }


@pytest.mark.parametrize("state", STATES)
def test_a_rank_keeps_what_the_table_says(ranks: Pool, state: str) -> None:
    world, width = 4, 8
    plan = data_parallel(plain(width), plain_batch(width=width), world, state)
    padded = 8 * sum(NUMBERS.values())
    whole = padded - 8
    for rank, found in enumerate(ranks.run(_sizes, plan, width, world=world)):
        # The last rank has nothing of the last bias.
        part = padded // world - 8 * (rank == world - 1)
        # Weights that stay have room for the padding. Shards of the last one, of columns, are beside it.
        stays = padded + 8 * 6
        assert found["weights"] == {"replicated": whole, "zero3": part}.get(state, stays)
        assert found["gradients"] == (whole if state == "replicated" else part)
        assert found["optimizer"] == 2 * (whole if state == "replicated" else part)


def test_an_optimizer_keeps_as_much_as_is_told() -> None:
    for state in STATES:
        plan = data_parallel(plain(), plain_batch(), 4, state)
        numbers = sum(NUMBERS.values()) - 1 if state == "replicated" else sum(NUMBERS.values()) // 4
        assert optimiser_numbers(held_weights(plan), make_rule("adam", {}).slots) == 2 * numbers


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
    module = parallelize((Deep(WIDTH, DEPTH), batch), plan, check=False)
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
    return sum(storages.values()) + least_allocated(step)


def test_the_peak_falls_as_the_table_says(ranks: Pool) -> None:
    batch = {"x": torch.randn(4, WIDTH)}
    one, count = 4 * WIDTH * WIDTH, DEPTH
    found = {}
    for state in ("replicated", "zero2", "zero3", "again"):
        plan = data_parallel(Deep(WIDTH, DEPTH), batch, 4, "zero3" if state == "again" else state)
        plan = again(plan) if state == "again" else plan
        # Gloo's threads free what they have sent when they come to it, on some ranks late.
        found[state] = min(ranks.run(_peak, plan, world=4)) / one
    # Weights and gradients of 12 layers; buckets of gradients that are summed are copies.
    assert 2 * count <= found["replicated"] <= 2.5 * count
    # Gradients in pieces, but for those of layers whose turn it is, what is sent of them and what comes.
    assert count * (1 + 1 / 4) <= found["zero2"] <= count * (1 + 1 / 4) + 7
    # And the weights of a layer and of the next one.
    assert count / 2 <= found["zero3"] <= count / 2 + 9
    # A run of all layers that are computed again keeps none that it gathers.
    assert found["again"] <= count / 2 + 9
    assert found["zero3"] < 0.65 * found["replicated"]


# -- what else training loops do


def _accumulated(module: nn.Module, parallel: Any, batch: Callable[[int], Any]) -> None:
    for seed in range(4):
        module(**batch(seed)).backward()
    with parallel.no_sync():
        for seed in range(2):
            parallel(**batch(seed)).backward()
    parallel(**batch(2)).backward()
    # Without no_sync gradients are summed each time, and added to what is there.
    parallel(**batch(3)).backward()


def _passes(module: nn.Module, parallel: Any, batch: Callable[[int], Any]) -> None:
    """Two forward passes before the backward passes, one of which goes twice; weights frozen in part."""
    for each in (module, parallel):
        first, second = each(**batch(0)), each(**batch(1))
        (first + 2 * second).backward(retain_graph=True)
        second.backward()
        each.get_parameter("layers.2.weight").requires_grad_(False)
        each(**batch(2)).backward()


def _gradients(_rank: int, _world: int, does: Any, name: str, plan: Plan) -> list[tuple[Any, Any]]:
    module, batch = made(name), MODULES[name].batch
    parallel = parallelize((copy.deepcopy(module), batch(0)), plan, check=False)
    does(module, parallel, batch)
    pairs = zip(module.parameters(), parallel.parameters(), strict=True)
    return [(own.grad, full(other.grad)) for own, other in pairs]


@pytest.mark.parametrize(
    ("does", "name", "state"),
    [
        (_accumulated, "gpt", "random"),
        *((_accumulated, "mlp", "zero2"), (_passes, "mlp", "zero1"), (_passes, "mlp", "zero3")),
        *(
            pytest.param(does, "mlp", state, marks=pytest.mark.full)
            for does, state in ((_accumulated, "zero1"), (_accumulated, "zero3"), (_passes, "zero2"))
        ),
    ],
)
def test_gradients_are_the_modules_however_passes_go(ranks: Pool, does: Any, name: str, state: str) -> None:
    given = made(name), MODULES[name].batch(0)
    if state == "random":
        plan = in_modes(random_plan(pase.load(given), 2, 6), 3, again=0.0)
    else:
        plan = data_parallel(*given, 2, state)
    for pairs in ranks.run(_gradients, does, name, plan, world=2):
        for expected, found in pairs:
            if expected.norm() > 1e-12:
                assert_close(found, expected, "gradient")


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


@pytest.mark.parametrize(
    "state", [pytest.param(state, marks=[pytest.mark.full] if state == "zero2" else []) for state in STATES]
)
def test_weights_are_those_that_were_set_last(ranks: Pool, state: str) -> None:
    plan = data_parallel(plain(), plain_batch(), 2, state)
    for found in ranks.run(_evaluated, plan, world=2):
        *exact, (low, expected) = found
        for own, alone in exact:
            assert own == pytest.approx(alone, rel=RELATIVE)
        assert low == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_a_compiled_module_trains_in_modes(ranks: Pool) -> None:
    plan = again(data_parallel(plain(), plain_batch(), 2, "zero3"))
    module = plain()
    loss = module(**plain_batch(1))
    loss.backward()
    for found, gradients in ranks.run(_compiled, plan, world=2):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        for gradient, parameter in zip(gradients, module.parameters(), strict=True):
            assert_close(gradient, parameter.grad, "gradient")


def _compiled(_rank: int, _world: int, plan: Plan) -> Any:
    module = parallelize((plain(), plain_batch()), plan)
    with warnings.catch_warnings():
        # PyTorch's compiler itself looks for gradients of what is no leaf, and makes objects of functions.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|.*should not be instantiated")
        loss = torch.compile(module, backend="aot_eager")(**plain_batch(1))
        loss.backward()
    return loss.item(), [full(parameter.grad).clone() for parameter in module.parameters()]


# -- emitted programs


def _losses(found: Sequence[list[dict[str, Any]]]) -> list[float]:
    losses: list[float] = found[0][-1]["losses"]
    return losses


def test_an_emitted_program_trains_in_states(ranks: Pool) -> None:
    graph = graph_of("mlp")
    names = [operator.name for operator in graph.operators]
    plan = make_plan(graph, 4, {name: {"b": 2 if i % 2 else 4} for i, name in enumerate(names)})
    states = (*STATES[1:] * len(names),)[: len(names)]
    plan, alone = with_states(plan, *states), make_plan(graph, 1, {})
    source = pase.emit(plan, target="torch")
    assert f'state="{states[0]}")' in source
    options = TrainingOptions(steps=3, dtype="float64", rule=Adafactor())
    expected = _losses(ranks.run(events, pase.emit(alone, target="torch"), options, world=1))
    found = ranks.run(events, source, options, True, world=4)
    assert _losses(found) == pytest.approx(expected, rel=RELATIVE)
    done = next(event for event in found[0] if event["event"] == "done")
    assert done["measured_bytes"] == sum(predicted(plan).values())


@pytest.mark.parametrize(
    ("name", "world", "stages", "count", "seed"),
    [
        ("mlp", 4, 2, 2, 3),
        ("tied", 2, 2, 4, 4),
        pytest.param("mlp", 2, 1, 4, 1, marks=pytest.mark.full),
        pytest.param("transformer", 4, 2, 2, 6, marks=pytest.mark.full),
    ],
)
def test_an_emitted_program_trains_in_all_modes(
    ranks: Pool, name: str, world: int, stages: int, count: int, seed: int
) -> None:
    """In stages a table of two layers stands twice, and is not cut.

    Bytes of weights that ranks hold otherwise than layers read them are left out; under most seeds of the transformer
    their gradients are summed in every micro-batch, too.
    """
    graph = tied() if name == "tied" else small(name)
    if stages > 1:
        plan = in_stages(graph, world, stages, count, "gpipe" if name == "tied" else "1f1b", seed)
    else:
        plan = replace(data_parallel_plan(graph, world), micro_batches=count)
    plan = plan if name == "tied" else in_modes(plan, seed)
    alone = pase.emit(replace(make_plan(graph, 1, {}), micro_batches=count), target="torch")
    expected = ranks.run(events, alone, options(3), False, count, world=1)[0]
    found = ranks.run(events, pase.emit(plan, target="torch"), options(3), True, count, world=world)[0]
    assert found[-1]["losses"] == pytest.approx(expected[-1]["losses"], rel=RELATIVE)
    accuracies = [[event["accuracy"] for event in own if event["event"] == "step"] for own in (found, expected)]
    assert accuracies[0] == accuracies[1]
    done = next(event for event in found if event["event"] == "done")
    assert between_layers(done, plan) == sum(predicted(plan).values())


def _tied_in_turns() -> Plan:
    """A table that two stages of one group of ranks read, and a third one of the other group stands between."""
    net = Builder("tied in turns")
    x = net.add(embedding, "first", net.input((4, 6)), vocabulary=12, size=8, shared="table")
    x = net.add(dense, "up", x, lead=("b", "s"), out=(("e", 6),), reduce=("d",))
    x = net.add(dense, "down", x, lead=("b", "s"), out=(("d", 8),), reduce=("e",))
    x = net.add(dense, "fc", x, lead=("b", "s"), out=(("v", 12),), reduce=("d",), shared="table")
    net.add(softmax_loss, "loss", x, dims=("b", "s", "v"))
    plan = make_plan(net.build(), 2, {})
    stages = {"first": 0, "up": 1, "down": 2, "fc": 2}
    layers = [replace(layer, stage=stages.get(layer.name, 3), splits=dict.fromkeys(layer.splits, 1)) for layer in plan]
    layers = [replace(layer, devices=(layer.stage % 2,)) for layer in layers]
    return replace(plan, layers=tuple(layers), num_groups=2, micro_batches=4, schedule="interleaved")


def test_an_emitted_program_has_a_weight_in_several_stages_of_a_group(ranks: Pool) -> None:
    plan = _tied_in_turns()
    given = replace(options(3), rule=make_rule("adam", {}))
    alone = pase.emit(replace(make_plan(plan.graph, 1, {}), micro_batches=4), target="torch")
    expected = _losses(ranks.run(events, alone, given, False, 4, world=1))
    found = ranks.run(events, pase.emit(plan, target="torch"), given, False, 4, world=2)
    assert _losses(found) == pytest.approx(expected, rel=RELATIVE)
    assert expected[-1] < expected[0]


def _kept(_rank: int, world: int, source: str, steps: int, folder: Path, resume: str | None) -> list[float]:
    options = TrainingOptions(steps=steps, dtype="float64", rule=Adafactor())
    checkpointing = CheckpointFolder(folder=folder, resume=resume)
    return train(builder_of(source), options, num_devices=world, checkpointing=checkpointing)


def test_an_emitted_program_goes_on_in_other_states(ranks: Pool, tmp_path: Path) -> None:
    graph = graph_of("mlp")
    plan = data_parallel_plan(graph, 4)
    first, second = (pase.emit(with_states(plan, state), target="torch") for state in ("zero3", "zero1"))
    alone = ranks.run(_kept, pase.emit(make_plan(graph, 1, {}), target="torch"), 4, tmp_path / "alone", None, world=1)
    ranks.run(_kept, first, 2, tmp_path / "states", None, world=4)
    for found in ranks.run(_kept, second, 3, tmp_path / "states", "newest", world=4):
        assert found == pytest.approx(alone[0][2:3], rel=RELATIVE)
    stages = pase.emit(in_stages(graph, 2, 2, 1, "gpipe", 1), target="torch")
    for found in ranks.run(_kept, stages, 4, tmp_path / "states", "newest", world=2):
        assert found == pytest.approx(alone[0][3:], rel=RELATIVE)


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"layer 'fc': unknown state 'zero4': did you mean"):
        Program(rank=0, num_devices=2).mesh("fc", [], state="zero4")


# -- how parts are cut


def _notes(_rank: int, _world: int, plan: Plan) -> tuple[str, ...]:
    return parallelize((plain(), plain_batch()), plan).notes


def test_parts_are_sharded_along_the_dim_whose_shards_are_smallest() -> None:
    assert shard_dims((3, 8, 4), 4) == 1
    assert shard_dims((12, 8), 4) == 0
    assert shard_dims((3, 5), 2) == 1  # 3 x 3 of 15 elements; 2 x 5 are more.
    assert shard_dims((3,), 2) == 0
    assert shard_dims((), 2) == shard_dims((1, 1), 2) == shard_dims((8,), 1) == -1
    mesh = device_mesh("fc", [("n", 2), ("b", 2)], 4, [3, 0, 1, 2])
    layout = layout_of(mesh, [PlainDim("n", 8), PlainDim("c", 3)])
    found = sharded_layout(layout, [[3, 0], [1, 2]], 0).by_device
    assert found == {0: ((0, 2), (0, 3)), 3: ((2, 4), (0, 3)), 1: ((4, 6), (0, 3)), 2: ((6, 8), (0, 3))}


# -- other targets


@pytest.mark.parametrize(
    ("changes", "of_layer", "match"),
    [
        ({}, {"state": "zero1"}, r"holds the weights of layer 'fc1' in pieces \(zero1\)"),
        ({}, {"is_recomputed": True}, "recomputes layer 'fc1'"),
        ({"micro_batches": 2}, {}, "has 2 micro-batches in a step"),
        ({"num_groups": 2, "micro_batches": 1}, {"stage": 1}, "has 2 stages"),
    ],
)
def test_other_targets_refuse(changes: dict[str, Any], of_layer: dict[str, Any], match: str) -> None:
    plan = random_plan(small("mlp"), 2, 1)
    layers = (replace(plan["fc1"], **of_layer), *plan.layers[1:])
    plan = replace(plan, layers=layers, **changes)
    with pytest.raises(PlanError, match=f"the plan {match}; a program for mesh_tensorflow takes no such plan"):
        pase.emit(plan, target="mesh_tensorflow")
    pytest.importorskip("jax")
    with pytest.raises(PlanError, match=f"the plan {match}; JAX takes no such plan"):
        Parallel(lambda x: x, plan, mesh=None)
