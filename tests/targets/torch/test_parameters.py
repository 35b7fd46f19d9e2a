"""Parameters as DTensors, and what layers read of them, on ranks, against the whole model's tensors."""

from math import gcd, prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pase.importers.ir import Piece
from pase.targets.torch.collectives import Groups
from pase.targets.torch.parameters import (
    Leaves,
    Read,
    full_state_dict,
    install,
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
    "unlike": [{"e": 4}, {"h": 4}, {"e": 2}, {"c": 4}, {"f": 2}, {"n": 2, "c": 2}],
}


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
        mesh = program.mesh(name, list(splits.items()))
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
    return tensor.reshape([dim.size for dim in weight.tensor.dims])[tuple(slice(*span) for span in box)]


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
    for (name, found), (_, want) in zip(root.named_parameters(), model.named_parameters(), strict=True):
        assert (found.grad is None) == (want.grad is None), name
        if found.grad is not None:
            assert isinstance(found.grad, DTensor)
            assert found.grad.placements == found.placements
            assert torch.equal(found.grad.full_tensor(), want.grad), name
    return list(stored.notes)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layers_read_their_parts_and_gradients_are_the_models(ranks: Pool, plan: str, world: int) -> None:
    notes = ranks.run(reading_and_gradients, plan, world=world)[0]
    # Pieces that are split in different dims, and nothing else, are no placement.
    assert bool(notes) == (plan == "unlike" and world > 1), notes
