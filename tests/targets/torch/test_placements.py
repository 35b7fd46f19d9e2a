"""What ranks hold of parameters, in terms of DTensor, against the elements that layers' layouts give them."""

import random
from itertools import permutations, product
from math import prod

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pase.errors import ProgramError
from pase.sharding.layouts import Layout, PlainDim, device_mesh, layout_of
from pase.targets.torch.parameters import placements_of
from pase.targets.torch.placements import Need, Split, Storage, Stored, chunk_part, held_of, is_gathered, storage
from pase.targets.torch.values import cut
from tests.targets.torch.ranks import Pool


def layout(dims: dict[str, int], splits: dict[str, int], num_ranks: int, devices: list[int] | None = None) -> Layout:
    mesh = device_mesh("layer", list(splits.items()), num_ranks, devices)
    return layout_of(mesh, [PlainDim(name, extent) for name, extent in dims.items()])


def elements(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def wanted(need: Need, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """The elements of the parameter that a rank's layer has, by the box of its layout."""
    piece = elements(shape)[tuple(slice(*span) for span in need.box)].reshape(need.layout.shape)
    return piece[tuple(slice(*span) for span in need.layout.by_device[rank])]


def said(stored: Stored, sizes: tuple[int, ...], rank: int) -> torch.Tensor:
    """The elements that PyTorch gives a rank, one axis of the mesh after the other, by its own placements."""
    coordinate = list(product(*map(range, sizes)))[rank]
    x = elements(stored.shape)
    for placement, size, at in zip(placements_of(stored.splits), sizes, coordinate, strict=True):
        if not placement.is_replicate():
            x = placement._split_tensor(x, size, with_padding=False)[0][at]
    return x


def check(shapes: dict[str, tuple[int, ...]], needs: dict[str, list[Need]], num_ranks: int, **options: bool) -> Storage:
    """Return what ranks hold, which is what PyTorch says they do, and has what each layer reads."""
    found = storage(shapes, needs, num_ranks, **options)
    assert prod(found.sizes) == num_ranks
    for name, stored in found.stored.items():
        for rank in range(num_ranks):
            held = cut(elements(shapes[name]), stored.held[rank])
            assert torch.equal(held, said(stored, found.sizes, rank)), (name, rank, found.sizes, stored)
            for need in needs.get(name, []):
                reading = found.readings[need.weight]
                want = wanted(need, shapes[name], rank)
                if not reading.steps:
                    part = held[tuple(slice(*span) for span in reading.cuts[rank])]
                    assert torch.equal(part.reshape(want.shape), want)
                else:
                    # What is moved there is in the rank's shard already, whatever goes back.
                    assert set(want.flatten().tolist()) <= set(held.flatten().tolist())
    return found


def need(
    weight: str,
    dims: dict[str, int],
    splits: dict[str, int],
    num_ranks: int,
    devices: list[int] | None = None,
    *,
    shape: tuple[int, ...] = (),
    first: int = 0,
) -> Need:
    """What a layer reads: rows of a parameter, from a first one, of as many points in each dim or of another shape."""
    rows, *rest = shape or tuple(dims.values()) or (0,)
    box = ((first, first + rows), *((0, extent) for extent in rest)) if dims else ()
    return Need(weight=weight, box=box, layout=layout(dims, splits, num_ranks, devices))


def notes(found: Storage) -> list[str]:
    return [stored.note for stored in found.stored.values() if stored.note]


def placed(found: Storage, name: str = "w") -> list[str]:
    return [str(p) for p in placements_of(found.stored[name].splits)]


def test_even_splits_are_shards_on_one_axis() -> None:
    found = check({"w": (8, 6)}, {"w": [need("layer/w", {"n": 8, "c": 6}, {"n": 4}, 4)]}, 4)
    assert (found.sizes, placed(found), notes(found)) == ((4,), ["S(0)"], [])


def test_two_layers_share_axes_where_both_can_be_said() -> None:
    first = need("a/w", {"n": 8, "c": 6}, {"n": 2, "c": 2}, 4)
    second = need("b/w", {"n": 8}, {"n": 4}, 4, [0, 2, 1, 3])
    found = check({"a": (8, 6), "b": (8,)}, {"a": [first], "b": [second]}, 4)
    # Ranks 0, 2, 1, 3 have the quarters: the second digit of the rank is the coarser one.
    assert (found.sizes, placed(found, "b"), notes(found)) == ((2, 2), ["_S(0, 2)", "S(0)"], [])


def test_a_dim_of_two_split_by_the_inner_one_lies_apart() -> None:
    shape = (12, 5)
    needs = {"w": [need("layer/w", {"h": 3, "k": 4, "e": 5}, {"k": 2}, 2, shape=shape)]}
    found = check({"w": shape}, needs, 2)
    assert found.stored["w"].held[1] == (((2, 4), (6, 8), (10, 12)), ((0, 5),))
    assert not found.stored["w"].is_contiguous
    together = check({"w": shape}, needs, 2, apart=False)
    assert together.stored["w"].held[0] == whole_held(shape)
    assert "'w'" in notes(together)[0]


def whole_held(shape: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(((0, extent),) for extent in shape)


def test_pieces_of_one_parameter_that_are_split_alike_are_one_shard() -> None:
    pieces = [need(f"{name}/w", {"n": 4, "c": 6}, {"n": 4}, 4, first=4 * i) for i, name in enumerate("qkv")]
    found = check({"qkv": (12, 6)}, {"qkv": pieces}, 4)
    assert (placed(found, "qkv"), notes(found)) == (["_S(0, 3)"], [])


def test_pieces_that_are_split_otherwise_are_taken_by_moves() -> None:
    shape, dims = (8, 6), {"n": 4, "c": 6}
    found = check({"w": shape}, {"w": [need("a/w", dims, {"n": 2}, 2), need("b/w", dims, {"c": 2}, 2, first=4)]}, 2)
    assert found.stored["w"].held == (whole_held(shape), whole_held(shape))
    assert "a/w, b/w read" in notes(found)[0]
    # Each rank has the gradient of half of each piece, and misses the other's half.
    assert found.stored["w"].moved == 8 * 6


def test_axes_that_all_layers_agree_on_stay_split() -> None:
    dims = {"n": 8, "c": 8}
    found = check({"w": (8, 8)}, {"w": [need("a/w", dims, {"n": 2, "c": 2}, 4), need("b/w", dims, {"n": 2}, 4)]}, 4)
    assert placed(found) == ["S(0)", "R"]
    assert found.readings["b/w"].steps == ()
    assert found.readings["a/w"].steps


def test_a_diagonal_is_held_whole() -> None:
    # Axis by axis nothing can be said of parts that go with the sum of two digits.
    found = check({"w": (4,)}, {"w": [need("layer/w", {"n": 4}, {"n": 4}, 4, [0, 1, 3, 2])]}, 4)
    assert (found.stored["w"].splits, found.stored["w"].moved) == ((Split(0), None), 4)


def test_weights_that_read_nothing_split_and_scalars() -> None:
    check({"w": ()}, {"w": [need("layer/w", {}, {"n": 2}, 2)]}, 2)
    found = storage({"unread": (3, 2)}, {}, 6)
    assert (found.stored["unread"].held[5], found.sizes) == (whole_held((3, 2)), (6,))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6, 8])
def test_random_layouts(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    shares = []
    for _ in range(6):
        shapes: dict[str, tuple[int, ...]] = {}
        needs: dict[str, list[Need]] = {}
        for number in range(3):
            name = f"w{number}"
            shape, own = random_needs(draw, num_ranks, name)
            shapes[name], needs[name] = shape, own
        shares += [not stored.note for stored in check(shapes, needs, num_ranks).stored.values()]
        check(shapes, needs, num_ranks, apart=False)
    assert any(shares)


def random_needs(draw: random.Random, num_ranks: int, name: str) -> tuple[tuple[int, ...], list[Need]]:
    """A parameter whose pieces or readers are split at random, on ranks in an order of digits or in any."""
    dims = {"a": draw.choice([24, 48]), "b": draw.choice([2, 6, 12]), "c": 24}
    merged = draw.choice([(("a",), ("b",), ("c",)), (("a", "b"), ("c",)), (("a",), ("b", "c")), (("a", "b", "c"),)])
    shape = tuple(prod(dims[dim] for dim in group) for group in merged)
    count = draw.choice([1, 1, 2, 3])
    is_pieces = draw.random() < 0.5
    readers, splits, devices = [], random_splits(draw, dims, num_ranks), random_devices(draw, num_ranks)
    for reader in range(count):
        if draw.random() < 0.3:
            splits, devices = random_splits(draw, dims, num_ranks), random_devices(draw, num_ranks)
        low = reader * shape[0] if is_pieces else 0
        box = ((low, low + shape[0]), *((0, extent) for extent in shape[1:]))
        readers.append(Need(weight=f"{name}-{reader}", box=box, layout=layout(dims, splits, num_ranks, devices)))
    return (shape[0] * (count if is_pieces else 1), *shape[1:]), readers


def random_splits(draw: random.Random, dims: dict[str, int], num_ranks: int) -> dict[str, int]:
    ways = [
        split
        for split in product(*(range(1, num_ranks + 1) for _ in dims))
        if num_ranks % prod(split) == 0 and all(n % k == 0 for n, k in zip(dims.values(), split, strict=True))
    ]
    return dict(zip(dims, draw.choice(ways), strict=True))


def random_devices(draw: random.Random, num_ranks: int) -> list[int]:
    if draw.random() < 0.3:
        return draw.sample(range(num_ranks), num_ranks)
    digits = {1: (), 2: (2,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}[num_ranks]
    order = draw.choice(list(permutations(range(len(digits)))))
    return torch.arange(num_ranks).reshape(digits).permute(order).flatten().tolist()


def test_what_is_held_of_reshaped_tensors() -> None:
    assert held_of((6, 4), (24,), ((0, 12),)) == (((0, 3),), ((0, 4),))
    assert held_of((6, 4), (24,), ((4, 6),)) == (((1, 2),), ((0, 2),))
    assert held_of((6, 4), (24,), ((2, 6),)) is None
    assert held_of((24,), (6, 4), ((1, 3), (1, 2))) == (((5, 6), (9, 10)),)
    assert held_of((1, 6), (6, 1), ((2, 4), (0, 1))) == (((0, 1),), ((2, 4),))


def test_a_weight_of_another_model_is_told() -> None:
    needs = {"w": [need("layer/w", {"n": 8, "c": 6}, {"n": 2}, 2)]}
    with pytest.raises(ProgramError, match=r"parameter 'w' has shape \[8, 5\]; weight 'layer/w' of shape \[8, 6\]"):
        storage({"w": (8, 5)}, needs, 2)
    with pytest.raises(ProgramError, match="on ranks"):
        storage({"w": (8, 6)}, needs, 4)


def _gathered(rank: int, _world: int, sizes: tuple[int, ...], every: list[list[Split]]) -> list[bool]:
    """Whether PyTorch puts together again what a rank and the others hold of a tensor, for each way of splitting it."""
    mesh = DeviceMesh("cpu", torch.arange(prod(sizes)).reshape(sizes))
    found = []
    for splits in every:
        whole, runs = torch.arange(48.0), ((0, 48),)
        for split, size, at in zip(splits, sizes, mesh.get_coordinate() or (), strict=True):
            part = chunk_part(runs, split.chunks, size, at)
            assert part is not None
            runs = part
        local = torch.cat([whole[low:high] for low, high in runs])
        tensor = DTensor.from_local(local, mesh, placements_of(splits), run_check=False, shape=whole.shape, stride=(1,))
        try:
            found.append(torch.equal(tensor.full_tensor(), whole))
        except RuntimeError:
            found.append(False)
    return found


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((2, 2, 2), marks=pytest.mark.full)])
def test_axes_are_said_only_where_pytorch_puts_together_what_they_split(ranks: Pool, sizes: tuple[int, ...]) -> None:
    every = list(product((1, 2, 4), repeat=len(sizes)))
    told = ranks.run(_gathered, sizes, [[Split(0, n) for n in factors] for factors in every], world=prod(sizes))
    right = [factors for number, factors in enumerate(every) if all(own[number] for own in told)]
    assert [factors for factors in every if is_gathered(factors, sizes)] == right
    assert {(1,) * len(sizes), (*[1] * (len(sizes) - 1), 4)} <= {*right} < {*every}
