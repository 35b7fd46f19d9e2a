"""Parameters as DTensors, and what layers read of them, on ranks, against the whole model's tensors."""

import copy
from math import gcd, prod
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from pase.importers.ir.trace import Piece
from pase.targets.torch.collectives import Groups
from pase.targets.torch.parameters import (
    Leaves,
    Read,
    full_state_dict,
    install,
    keeping,
    mesh_of,
    needs_of,
    part_of,
    state_of,
)
from pase.targets.torch.placements import Storage, storage
from pase.targets.torch.program import Program, Weight
from pase.targets.torch.tensor import Dim
from pase.targets.torch.values import from_tensors
from tests.targets.torch.ranks import Pool


class Model(nn.Module):
    """A table that the last layer shares, a product of three pieces, statistics, a frozen weight, one in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.attention = nn.Module()
        self.attention.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.randn(8, 4), requires_grad=False)
        self.short = nn.Parameter(torch.randn(6, 8, dtype=torch.bfloat16))
        self.unread = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.randn(8), persistent=False)


PLANS: dict[str, list[dict[str, int]]] = {
    # The splits of: table, q and k, v, statistics, frozen, half.
    "data": [{}, {}, {}, {}, {}, {}],
    "rows": [{"v": 4}, {"h": 4}, {"h": 4}, {"c": 4}, {"e": 4}, {"c": 4}],
    "mixed": [{"v": 2, "e": 2}, {"h": 2}, {"h": 2}, {"c": 2}, {"e": 2, "f": 2}, {"n": 2}],
    "sixths": [{"v": 6}, {"h": 2}, {"h": 2}, {"c": 2}, {"e": 2}, {"n": 3, "c": 2}],
    "crossed": [{}, {}, {}, {"c": 4}, {}, {}],
    "unlike": [{"e": 4}, {"h": 4}, {"e": 2}, {"c": 4}, {"f": 2}, {"n": 2, "c": 2}],
}

DEVICES = {("crossed", "norm/mean"): [0, 1, 3, 2]}
"""Ranks of layers that are not in order."""


class Eager(Program):
    """A program that moves at once, to see what is moved."""

    def run(self, module: nn.Module, value: Any, name: str, **meta: Any) -> Any:
        return module(value)


def fitting(splits: dict[str, int], world: int) -> dict[str, int]:
    """As much of some splits as so many ranks allow."""
    found: dict[str, int] = {}
    for dim, wanted in splits.items():
        found[dim] = gcd(wanted, world // prod(found.values()))
    return found


def declared(rank: int, world: int, plan: str) -> tuple[dict[str, Weight], dict[str, Read]]:
    """The weights of a program that reads the model under some splits."""
    program = Eager(rank=rank, num_devices=world, groups=Groups(rank, world))
    table, qk, v, norm, frozen, half = [fitting(splits, world) for splits in PLANS[plan]]

    def weight(name: str, splits: dict[str, int], kind: str, **dims: int) -> None:
        mesh = program.mesh(name, list(splits.items()), DEVICES.get((plan, name)) if world == 4 else None)
        getattr(program, kind)(mesh, name, [Dim(*dim) for dim in dims.items()])

    weight("embed/w", table, "weight", v=12, e=8)
    for name, splits in (("q", qk), ("k", qk), ("v", v)):
        weight(f"{name}/w", splits, "weight", h=4, d=2, e=8)
        weight(f"{name}/b", {key: parts for key, parts in splits.items() if key == "h"}, "weight", h=4, d=2)
    weight("norm/w", norm, "weight", c=8)
    weight("norm/mean", norm, "statistic", c=8)
    weight("frozen/w", frozen, "constant", e=8, f=4)
    weight("half/w", half, "weight", n=6, c=8)
    reads = {
        "embed/w": Read(parameter="head.weight"),
        "norm/w": Read(parameter="norm.weight"),
        "norm/mean": Read(parameter="norm.running_mean"),
        "frozen/w": Read(parameter="frozen"),
        "half/w": Read(parameter="short"),
    }
    for number, name in enumerate("qkv"):
        piece = Piece(dim=0, start=8 * number, size=8)
        reads[f"{name}/w"] = Read(parameter="attention.qkv.weight", piece=piece)
        reads[f"{name}/b"] = Read(parameter="attention.qkv.bias", piece=piece)
    return program.weights, reads


def parallel(rank: int, world: int, plan: str, model: nn.Module) -> tuple[nn.Module, Storage, dict[str, Weight]]:
    weights, reads = declared(rank, world, plan)
    state = state_of(model)
    stored = storage(state.shapes, needs_of(state, weights, reads), world)
    values = from_tensors({**dict(model.named_parameters()), **dict(model.named_buffers())})
    root = nn.Module()
    install(root, state, stored, mesh_of(stored, "cpu"), values)
    return root, stored, weights


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def whole(weight: str, reads: dict[str, Read], model: nn.Module) -> torch.Tensor:
    """What a weight reads of the model, whole."""
    read = reads[weight]
    tensor = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}[read.parameter]
    return tensor if read.piece is None else tensor[read.piece.start : read.piece.start + read.piece.size]


def own_part(tensor: torch.Tensor, weight: Weight, rank: int) -> torch.Tensor:
    box = weight.tensor.layout.by_device[rank]
    return tensor.reshape(weight.tensor.shape)[tuple(slice(*span) for span in box)]


def parts(stored: Storage, weights: dict[str, Weight], root: nn.Module, leaves: Leaves) -> dict[str, torch.Tensor]:
    found = {}
    named = dict(root.named_parameters())
    for name, weight in weights.items():
        reading = stored.readings[name]
        own = named.get(reading.parameter)
        leaf = local_of(root, reading.parameter) if own is None else leaves.of(reading.parameter, own)
        found[name] = part_of(stored, reading, leaf, weight.tensor)
    return found


def local_of(root: nn.Module, name: str) -> torch.Tensor:
    buffer = root.get_buffer(name)
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer


def gathered(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def loss_of(values: dict[str, torch.Tensor], scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient of each element of each weight is that element's own number."""
    return sum(((value.double() * scales[name]).sum() for name, value in values.items()), torch.zeros(()))


def reading_and_gradients(rank: int, world: int, plan: str) -> list[str]:
    model = model_of()
    root, stored, weights = parallel(rank, world, plan, model)
    _, reads = declared(rank, world, plan)
    leaves = Leaves()
    values = parts(stored, weights, root, leaves)
    for name, weight in weights.items():
        assert torch.equal(values[name], own_part(whole(name, reads, model), weight, rank)), name
    # Whole tensors, bit for bit, under all names that the model has.
    full = full_state_dict(root, on_all=True)
    assert list(full) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(full[name], value), name
    assert full["head.weight"] is full["embed.weight"]
    assert [name for name, _ in root.named_parameters()] == [name for name, _ in model.named_parameters()]
    # A gradient that is whole on every rank, of every element another one; in two backward passes.
    scales = {name: torch.arange(1.0, 97.0)[: whole(name, reads, model).numel()].double() for name in weights}
    scales = {name: scale.reshape(whole(name, reads, model).shape) for name, scale in scales.items()}
    for _ in range(2):
        values = parts(stored, weights, root, leaves)
        own = {name: own_part(scales[name], weight, rank) for name, weight in weights.items()}
        loss_of(values, own).backward()
    expected = {name: whole(name, reads, model) for name in weights}
    (2 * loss_of(expected, scales)).backward()
    # All are of one kind, as foreach optimizers and clipping want them: plain where nothing is split.
    is_split = {"data": False, "mixed": world > 1}.get(plan, isinstance(next(root.parameters()), DTensor))
    for (name, found), (_, want) in zip(root.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(found, DTensor) == is_split, name
        assert (found.grad is None) == (want.grad is None), name
        if found.grad is not None:
            assert isinstance(found.grad, DTensor) == is_split, name
            assert not is_split or found.grad.placements == found.placements, name
            assert torch.equal(gathered(found.grad), want.grad), name
    return [own.note for own in stored.stored.values() if own.note]


@pytest.mark.parametrize(("plan", "world"), [("mixed", 1), *((plan, world) for plan in PLANS for world in (2, 4))])
def test_layers_read_their_parts_and_gradients_are_the_models(ranks: Pool, plan: str, world: int) -> None:
    notes = ranks.run(reading_and_gradients, plan, world=world)[0]
    # Pieces that are split in different dims, parts on ranks in no order of digits: these are no placements.
    assert bool(notes) == ((plan == "unlike" and world > 1) or (plan == "crossed" and world == 4)), notes


# -- what training loops do with parameters


def scales_of(reads: dict[str, Read], model: nn.Module, step: int = 0) -> dict[str, torch.Tensor]:
    """Factors of a loss, of each weight as the model has it whole."""
    draw = torch.Generator().manual_seed(step)
    shapes = {name: whole(name, reads, model).shape for name in reads}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def own_scales(scales: dict[str, torch.Tensor], weights: dict[str, Weight], rank: int) -> dict[str, torch.Tensor]:
    return {name: own_part(scales[name], weight, rank) for name, weight in weights.items()}


OPTIMIZERS: dict[str, Any] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def training(rank: int, world: int, plan: str, optimizer: str, set_to_none: bool) -> None:
    model = model_of().double()
    root, stored, weights = parallel(rank, world, plan, model)
    _, reads = declared(rank, world, plan)
    leaves = Leaves()
    ours, theirs = (OPTIMIZERS[optimizer](module.parameters()) for module in (root, model))
    for step in range(3):
        scales = scales_of(reads, model, step)
        # Gradients are set to nothing between the passes, as loops do.
        values = parts(stored, weights, root, leaves)
        ours.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad(set_to_none=set_to_none)
        loss_of(values, own_scales(scales, weights, rank)).backward()
        loss_of({name: whole(name, reads, model) for name in weights}, scales).backward()
        norm = gathered(nn.utils.clip_grad_norm_(root.parameters(), 1.0))
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 1.0), rtol=1e-12, atol=0)
        ours.step()
        theirs.step()
    for name, value in full_state_dict(root, on_all=True).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("plan", "optimizer", "set_to_none"),
    [
        ("mixed", "fused", True),
        ("unlike", "momentum", True),
        ("unlike", "foreach", False),
    ],
)
def test_optimizers_step_and_clip(ranks: Pool, plan: str, optimizer: str, set_to_none: bool) -> None:
    ranks.run(training, plan, optimizer, set_to_none)


def loading(rank: int, world: int, plan: str) -> None:
    model = model_of()
    root, stored, weights = parallel(rank, world, plan, model)
    _, reads = declared(rank, world, plan)
    leaves = Leaves()
    before = parts(stored, weights, root, leaves)
    other = model_of(1)
    # A plain state_dict of the model itself.
    found = root.load_state_dict(other.state_dict())
    assert not found.missing_keys
    assert not found.unexpected_keys
    for name, weight in weights.items():
        own = own_part(whole(name, reads, other), weight, rank)
        # What leaves shared with their parameters before, they share now.
        assert stored.readings[name].steps or torch.equal(before[name], own)
        assert torch.equal(parts(stored, weights, root, leaves)[name], own)
    assert dict(root.named_parameters())["embed.weight"] is root.get_parameter("head.weight")
    # Its own state_dict, back again; and one in place of its parameters.
    root.load_state_dict(parallel(rank, world, plan, model)[0].state_dict())
    root.load_state_dict(other.state_dict(), assign=True)
    for name, weight in weights.items():
        after = parts(stored, weights, root, leaves)[name]
        assert torch.equal(after, own_part(whole(name, reads, other), weight, rank))
    with pytest.raises(RuntimeError, match=r"size mismatch for attention\.qkv\.weight"):
        root.load_state_dict({**other.state_dict(), "attention.qkv.weight": torch.zeros(24, 9)})
    with pytest.raises(RuntimeError, match="Missing key"):
        root.load_state_dict({})


@pytest.mark.parametrize("plan", ["mixed", "unlike"])
def test_state_dicts_of_the_model_load(ranks: Pool, plan: str) -> None:
    ranks.run(loading, plan)


def copied_and_converted(rank: int, world: int, plan: str) -> None:
    model = model_of()
    root, stored, weights = parallel(rank, world, plan, model)
    _, reads = declared(rank, world, plan)
    leaves = Leaves()
    averaged = torch.optim.swa_utils.AveragedModel(
        root, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=False
    )
    averaged.update_parameters(root)
    other = model_of(1)
    root.load_state_dict(other.state_dict())
    averaged.update_parameters(root)
    for (name, value), first, second in zip(
        full_state_dict(averaged.module, on_all=True).items(),
        model.state_dict().values(),
        other.state_dict().values(),
        strict=True,
    ):
        if name in dict(model.named_parameters()):
            torch.testing.assert_close(value, (first + second) / 2, msg=name)
    twin = copy.deepcopy(root)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    for name, weight in weights.items():
        now = parts(stored, weights, root, leaves)[name]
        assert torch.equal(now, own_part(whole(name, reads, other), weight, rank)), name
    # In another type, leaves are other ones; gradients have that type.
    root.to(torch.float64)
    values = parts(stored, weights, root, leaves)
    assert {value.dtype for value in values.values()} == {torch.float64}
    scales = scales_of(reads, model)
    loss_of(values, own_scales(scales, weights, rank)).backward()
    grad = root.get_parameter("embed.weight").grad
    assert grad is not None
    assert isinstance(grad, DTensor)
    assert torch.equal(grad.full_tensor(), scales["embed/w"])
    # Frozen later on, a parameter has no gradient.
    root.zero_grad()
    root.get_parameter("norm.weight").requires_grad_(False)
    loss_of(parts(stored, weights, root, leaves), own_scales(scales, weights, rank)).backward()
    assert root.get_parameter("norm.weight").grad is None
    assert root.get_parameter("embed.weight").grad is not None


@pytest.mark.parametrize("plan", ["mixed", "unlike"])
def test_parameters_are_copied_averaged_and_converted(ranks: Pool, plan: str) -> None:
    ranks.run(copied_and_converted, plan)


def hooked(rank: int, world: int, plan: str) -> None:
    model = model_of()
    root, stored, weights = parallel(rank, world, plan, model)
    _, reads = declared(rank, world, plan)
    seen = []
    root.get_parameter("norm.weight").register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    scales = own_scales(scales_of(reads, model), weights, rank)
    leaves = Leaves()
    values = parts(stored, weights, root, leaves)
    loss_of(values, scales).backward()
    assert seen == [True]
    assert all(leaf.leaf.grad is None for leaf in leaves._made.values())
    # A statistic is written where it was read.
    for value, momentum in ((torch.arange(8.0), 1.0), (torch.arange(8.0) * 5, 0.25)):
        own = own_part(value, weights["norm/mean"], rank)
        buffer = local_of(root, "norm.running_mean")
        keeping(stored, stored.readings["norm/mean"], Groups(rank, world))(buffer, own, momentum)
    assert torch.equal(full_state_dict(root, on_all=True)["norm.running_mean"], torch.arange(8.0) * 2)
    assert (full_state_dict(root) == {}) == (rank > 0)


@pytest.mark.parametrize("plan", ["mixed", "crossed"])
def test_hooks_statistics_and_sums(ranks: Pool, plan: str) -> None:
    ranks.run(hooked, plan)


def test_leaves_pass_through_graphs() -> None:
    weights, reads = declared(0, 1, "data")
    state = state_of(model_of())
    stored = storage(state.shapes, needs_of(state, weights, reads), 1)
    graph = fx.Graph()
    leaf = fx.Proxy(graph.placeholder("leaf"), fx.proxy.GraphAppendingTracer(graph))
    graph.output(part_of(stored, stored.readings["k/w"], leaf, weights["k/w"].tensor).node)
    module = fx.GraphModule(nn.Module(), graph)
    qkv = torch.randn(24, 8)
    assert torch.equal(module(qkv), qkv[8:16].reshape(4, 2, 8))
