"""How splits go through views and operators, against the elements that each part holds, counted one by one."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
import torch

from pase.importers.torch.sharding_rules import sharding_rule
from pase.targets.torch.propagation import Dims, lies_alike, propagated, refined
from pase.targets.torch.tensor import Dim

B, S, H, K = Dim("b", 6), Dim("s", 4), Dim("h", 4), Dim("k", 3)


def held(
    dims: Sequence[Dim], splits: Mapping[str, int], point: Mapping[str, int]
) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """The numbers, in a tensor whose dims these are, of the elements that the part at a point has, row-major."""
    numbers = np.arange(prod(dim.size for dim in dims)).reshape([dim.size for dim in dims])
    for axis, dim in enumerate(dims):
        parts = np.array_split(np.arange(dim.size), splits.get(dim.name, 1))
        # The larger parts come first, as everywhere.
        numbers = numbers.take(parts[point.get(dim.name, 0)], axis)
    return numbers.ravel()


def points(splits: Mapping[str, int]) -> list[dict[str, int]]:
    return [dict(zip(splits, each, strict=True)) for each in product(*map(range, splits.values()))]


@pytest.mark.parametrize("splits", [{}, {"b": 2}, {"b": 3}, {"h": 2}, {"h": 4}, {"b": 2, "h": 2}, {"s": 2, "k": 3}])
@pytest.mark.parametrize(
    ("dims", "extents"),
    [
        ((B, S), (24,)), ((B, S), (6, 4)), ((B, S), (2, 3, 4)), ((B, S), (12, 2)), ((B, S), (3, 8)),
        ((H, K), (2, 2, 3)), ((H, K), (12,)), ((H, K), (2, 6)), ((H, K), (4, 3)), ((B, H, K), (12, 2, 3)),
    ],
)  # fmt: skip
def test_what_is_refined_has_the_same_elements_in_every_part(
    dims: tuple[Dim, ...], extents: tuple[int, ...], splits: Mapping[str, int]
) -> None:
    found = refined(dims, extents, splits)
    if found is None:
        return
    assert [prod(dim.size for dim in own) for own in found] == list(extents)
    flat = [dim for own in found for dim in own]
    for point in points(splits):
        assert (held(dims, splits, point) == held(flat, splits, point)).all()


def test_what_does_not_fit_is_not_refined() -> None:
    assert refined([B, S], (8, 3), {}) is None
    # A part of 3 of the 6 points is no half of 2 outer ones.
    assert refined([B], (2, 3), {"b": 3}) is None
    assert refined([B], (2, 3), {"b": 2}) == ((Dim("b", 2),), (Dim("b*2", 3),))


@pytest.mark.parametrize("seed", range(40))
def test_tensors_lie_alike_only_where_parts_have_the_same_elements(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def drawn() -> tuple[Dim, ...]:
        chain = [[2, 2, 3], [4, 3], [2, 6], [12], [3, 4], [2, 3, 2]][draw.integers(6)]
        names = draw.permutation(["b", "s", "x", "y"])
        return tuple(Dim(str(name), size) for name, size in zip(names, chain, strict=False))

    one, other, splits = drawn(), drawn(), {"b": 2, "s": 2}
    is_same = all(held(one, splits, point).tolist() == held(other, splits, point).tolist() for point in points(splits))
    assert is_same or not lies_alike((one,), (other,), splits)


def test_where_names_of_what_is_not_split_differ_tensors_lie_alike() -> None:
    one, other = (B, Dim("x", 2), Dim("y", 3)), (B, Dim("z", 6))
    assert lies_alike((one,), (other,), {"b": 2})
    assert not lies_alike((one,), (other,), {"b": 2, "x": 2})
    assert not lies_alike((one,), ((Dim("z", 6), B),), {"b": 2})


def _of(function: object, *shapes: tuple[int, ...]) -> object:
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return sharding_rule(function, tensors, {})


def test_a_product_over_a_split_dim_gives_parts_of_sums() -> None:
    x: Dims = ((B,), (S,))
    w: Dims = ((Dim("n", 8),), (S,))
    found = propagated(_of(torch.ops.aten.linear.default, (6, 4), (8, 4)), [x, w], {"b": 2, "s": 2})
    assert (found.sums, found.results, found.gathered) == ({"s"}, (((B,), (Dim("n", 8),)),), ())


def test_an_operand_that_is_split_otherwise_is_brought() -> None:
    x: Dims = ((B,), (S,))
    found = propagated(_of(torch.ops.aten.add.Tensor, (6, 4), (4,)), [x, ((Dim("b", 4),),)], {"b": 2, "s": 2})
    # The smaller one is split by the name that splits the larger one's other dim.
    assert (found.operands, found.gathered) == ((x, ((S,),)), (1,))


def test_a_name_splits_one_dim_of_an_operator() -> None:
    x: Dims = ((Dim("n", 4),), (S,))
    y: Dims = ((S,), (Dim("n", 4),))
    found = propagated(_of(torch.ops.aten.mm.default, (4, 4), (4, 4)), [x, y], {"n": 2})
    assert found.results[0][0] == (Dim("n", 4),)
    assert all(dim.name != "n" for dim in found.results[0][1])
    assert found.gathered == (1,)
