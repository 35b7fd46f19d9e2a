"""Parameters as DTensors, and what layers read of them, on ranks, against the whole model's tensors."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

import pytest
import torch
from torch import nn
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
from pase.targets.torch.states import local_of
from pase.targets.torch.tensor import Dim
from pase.targets.torch.values import from_tensors
from tests.targets.torch.equality import full
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


@dataclass(frozen=True, kw_only=True)
class OnRank:
    """A model under some splits on a rank, and what the weights of layers read of it."""

    rank: int
    model: nn.Module
    root: nn.Module
    stored: Storage
    weights: dict[str, Weight]
    reads: dict[str, Read]
    leaves: Leaves = field(default_factory=Leaves)

    def whole(self, name: str, model: nn.Module | None = None) -> torch.Tensor:
        """What a weight reads of the model, or of another one, whole."""
        read, model = self.reads[name], model or self.model
        tensor = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}[read.parameter]
        return tensor if read.piece is None else tensor[read.piece.start : read.piece.start + read.piece.size]

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank's layer has of a tensor that is as large as a weight."""
        tensor, weight = tensor.detach(), self.weights[name]
        box = weight.tensor.layout.by_device[self.rank]
        return tensor.reshape(weight.tensor.shape)[tuple(slice(*span) for span in box)]

    def values(self) -> dict[str, torch.Tensor]:
        """What layers have of their weights, by the weights' names."""
        found, named = {}, dict(self.root.named_parameters())
        for name, weight in self.weights.items():
            reading = self.stored.readings[name]
            key = reading.parameter
            leaf = self.leaves.of(key, named[key]) if key in named else local_of(self.root.get_buffer(key))
            found[name] = part_of(self.stored, reading, leaf, weight.tensor)
        return found

    def scales(self, step: int = 0) -> dict[str, torch.Tensor]:
        """Factors of a loss, of each weight as the model has it whole."""
        draw = torch.Generator().manual_seed(step)
        return {name: torch.randn(self.whole(name).shape, generator=draw, dtype=torch.float64) for name in self.reads}

    def loss(self, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(self.values(), {name: self.part(name, scale) for name, scale in scales.items()})

    def loss_alone(self, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        """That of the model by itself."""
        return loss_of({name: self.whole(name) for name in self.weights}, scales)

    def assert_has(self, model: nn.Module) -> None:
        """Layers have the values of a model, bit for bit."""
        for name, value in self.values().items():
            assert torch.equal(value, self.part(name, self.whole(name, model))), name


def loss_of(values: dict[str, torch.Tensor], scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient of each element of each weight is that element's own number."""
    return sum(((value.double() * scales[name]).sum() for name, value in values.items()), torch.zeros(()))


def on_rank(rank: int, world: int, plan: str, model: nn.Module | None = None) -> OnRank:
    model = model or model_of()
    weights, reads = declared(rank, world, plan)
    state = state_of(model)
    stored = storage(state.shapes, needs_of(state, weights, reads), world)
    values = from_tensors({**dict(model.named_parameters()), **dict(model.named_buffers())})
    root = nn.Module()
    install(root, state, stored, mesh_of(stored, "cpu"), values)
    return OnRank(rank=rank, model=model, root=root, stored=stored, weights=weights, reads=reads)


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def reading_and_gradients(rank: int, world: int, plan: str) -> list[str]:
    own = on_rank(rank, world, plan)
    root, model = own.root, own.model
    own.assert_has(model)
    # Whole tensors, bit for bit, under all names that the model has.
    whole = full_state_dict(root, on_all=True)
    assert list(whole) == list(model.state_dict())
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    assert whole["head.weight"] is whole["embed.weight"]
    assert [name for name, _ in root.named_parameters()] == [name for name, _ in model.named_parameters()]
    # A gradient that is whole on every rank, of every element another one; in two backward passes.
    scales = {name: own.whole(name) for name in own.weights}
    scales = {name: torch.arange(1.0, x.numel() + 1).reshape(x.shape).double() for name, x in scales.items()}
    for _ in range(2):
        own.loss(scales).backward()
    (2 * own.loss_alone(scales)).backward()
    # All are of one kind, as foreach optimizers and clipping want them: plain where nothing is split.
    is_split = {"data": False, "mixed": world > 1}.get(plan, isinstance(next(root.parameters()), DTensor))
    for (name, found), (_, want) in zip(root.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(found, DTensor) == is_split, name
        assert (found.grad is None) == (want.grad is None), name
        if found.grad is not None:
            assert isinstance(found.grad, DTensor) == is_split, name
            assert not is_split or found.grad.placements == found.placements, name
            assert torch.equal(full(found.grad), want.grad), name
    return [stored.note for stored in own.stored.stored.values() if stored.note]


@pytest.mark.parametrize(("plan", "world"), [("mixed", 1), *((plan, world) for plan in PLANS for world in (2, 4))])
def test_layers_read_their_parts_and_gradients_are_the_models(ranks: Pool, plan: str, world: int) -> None:
    notes = ranks.run(reading_and_gradients, plan, world=world)[0]
    # Pieces that are split in different dims, parts on ranks in no order of digits: these are no placements.
    assert bool(notes) == ((plan == "unlike" and world > 1) or (plan == "crossed" and world == 4)), notes


# -- what training loops do with parameters

OPTIMIZERS: dict[str, Any] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def training(rank: int, world: int, plan: str, optimizer: str, set_to_none: bool) -> None:
    own = on_rank(rank, world, plan, model_of().double())
    both = own.root, own.model
    ours, theirs = (OPTIMIZERS[optimizer](module.parameters()) for module in both)
    for step in range(3):
        # Gradients are set to nothing between the passes, as loops do.
        scales, loss = own.scales(step), own.loss(own.scales(step))
        ours.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad(set_to_none=set_to_none)
        loss.backward()
        own.loss_alone(scales).backward()
        norms = [full(nn.utils.clip_grad_norm_(module.parameters(), 1.0)) for module in both]
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        ours.step()
        theirs.step()
    for name, value in full_state_dict(own.root, on_all=True).items():
        torch.testing.assert_close(value, own.model.state_dict()[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("plan", "optimizer", "set_to_none"),
    [("mixed", "fused", True), ("unlike", "momentum", True), ("unlike", "foreach", False)],
)
def test_optimizers_step_and_clip(ranks: Pool, plan: str, optimizer: str, set_to_none: bool) -> None:
    ranks.run(training, plan, optimizer, set_to_none)


def loading(rank: int, world: int, plan: str) -> None:
    own, other = on_rank(rank, world, plan), model_of(1)
    root, before = own.root, own.values()
    # A plain state_dict of the model itself.
    found = root.load_state_dict(other.state_dict())
    assert not found.missing_keys
    assert not found.unexpected_keys
    own.assert_has(other)
    for name, value in before.items():
        # What leaves shared with their parameters before, they share now.
        assert own.stored.readings[name].steps or torch.equal(value, own.part(name, own.whole(name, other)))
    assert dict(root.named_parameters())["embed.weight"] is root.get_parameter("head.weight")
    # Its own state_dict, back again; and one in place of its parameters.
    root.load_state_dict(on_rank(rank, world, plan).root.state_dict())
    own.assert_has(own.model)
    root.load_state_dict(other.state_dict(), assign=True)
    own.assert_has(other)
    with pytest.raises(RuntimeError, match=r"size mismatch for attention\.qkv\.weight"):
        root.load_state_dict({**other.state_dict(), "attention.qkv.weight": torch.zeros(24, 9)})
    with pytest.raises(RuntimeError, match="Missing key"):
        root.load_state_dict({})


def copied_and_converted(rank: int, world: int, plan: str) -> None:
    own, other = on_rank(rank, world, plan), model_of(1)
    root, model = own.root, own.model
    averaged = torch.optim.swa_utils.AveragedModel(
        root, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=False
    )
    averaged.update_parameters(root)
    root.load_state_dict(other.state_dict())
    averaged.update_parameters(root)
    means = full_state_dict(averaged.module, on_all=True)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(means[name], (parameter.data + other.state_dict()[name]) / 2, msg=name)
    twin = copy.deepcopy(root)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    own.assert_has(other)
    # In another type, leaves are other ones; gradients have that type.
    root.to(torch.float64)
    assert {value.dtype for value in own.values().values()} == {torch.float64}
    own.loss(own.scales()).backward()
    grad = root.get_parameter("embed.weight").grad
    assert isinstance(grad, DTensor)
    assert torch.equal(grad.full_tensor(), own.scales()["embed/w"])
    # Frozen later on, a parameter has no gradient.
    root.zero_grad()
    root.get_parameter("norm.weight").requires_grad_(False)
    own.loss(own.scales()).backward()
    assert root.get_parameter("norm.weight").grad is None
    assert root.get_parameter("embed.weight").grad is not None


def hooked(rank: int, world: int, plan: str) -> None:
    own, seen = on_rank(rank, world, plan), list[bool]()
    own.root.get_parameter("norm.weight").register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    own.loss(own.scales()).backward()
    assert seen == [True]
    assert all(leaf.leaf.grad is None for leaf in own.leaves._made.values())
    # A statistic is written where it was read.
    for value, momentum in ((torch.arange(8.0), 1.0), (torch.arange(8.0) * 5, 0.25)):
        buffer = local_of(own.root.get_buffer("norm.running_mean"))
        keep = keeping(own.stored, own.stored.readings["norm/mean"], Groups(rank, world))
        keep(buffer, own.part("norm/mean", value), momentum)
    assert torch.equal(full_state_dict(own.root, on_all=True)["norm.running_mean"], torch.arange(8.0) * 2)
    assert (full_state_dict(own.root) == {}) == (rank > 0)


@pytest.mark.parametrize(
    ("does", "plan"),
    [
        *((does, plan) for does in (loading, copied_and_converted) for plan in ("mixed", "unlike")),
        *((hooked, plan) for plan in ("mixed", "crossed")),
    ],
)
def test_what_training_loops_do_with_parameters(ranks: Pool, does: Callable[..., None], plan: str) -> None:
    """Load state_dicts; copy, average and convert; have hooks, and statistics kept."""
    ranks.run(does, plan)
