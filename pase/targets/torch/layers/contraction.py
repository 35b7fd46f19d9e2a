"""Sums of products: of tensors over the dims that the result lacks, and of a table with the indices of its rows."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch.nn import functional

from pase.errors import ProgramError
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.tensor import Dim, Tensor, local, one_mesh, shaped


def product(*operands: Any) -> Tensor:
    """Return the sum of products of tensors over the dims that the last operand, those of the result, lacks."""
    *tensors, out = operands
    names = {dim.name for dim in out}
    summed = {name for x in tensors for name in x.names} - names
    own: set[str] = set().union(*(x.names for x in tensors))
    known = [dim for dim in out if dim.name in own]
    return replace(arrange(_product(tensors, known, summed), out), is_product=True)


def _product(tensors: Sequence[Tensor], out: Sequence[Dim], summed: set[str]) -> Tensor:
    if len(tensors) == 2:
        found = _linear(tensors[0], tensors[1], out, summed)
        if found is not None:
            return found
    letters = {name: ascii_letters[i] for i, name in enumerate(dict.fromkeys(n for x in tensors for n in x.names))}
    terms = ["".join(letters[name] for name in x.names) for x in tensors]
    equation = f"{','.join(terms)}->{''.join(letters[dim.name] for dim in out)}"
    return local(lambda *shards: torch.einsum(equation, *shards), tensors, out, partial_over=summed)


def _linear(x: Tensor, weights: Tensor, out: Sequence[Dim], summed: set[str]) -> Tensor | None:
    """Return the product as PyTorch's linear function, where it is one: batch dims, then what is summed, then outputs.

    x of batch and summed dims, and weights of summed and output dims, each together.
    """
    batch = [dim for dim in x.dims if dim.name not in summed]
    inner = [dim for dim in weights.dims if dim.name in summed]
    outer = [dim for dim in weights.dims if dim.name not in summed]
    is_alike = {*x.dims} == {*batch, *inner} and list(out) == [*batch, *outer] and bool(batch and inner and outer)
    if not is_alike or any(dim in batch for dim in outer):
        return None
    is_turned = weights.dims == (*inner, *outer)
    if not is_turned and weights.dims != (*outer, *inner):
        return None
    x = arrange(x, [*batch, *inner])
    part = x.mesh.part
    shapes = [tuple(map(part, dims)) for dims in (batch, inner, outer)]
    num_inner, num_outer = map(prod, shapes[1:])

    def compute(x: Any, matrix: Any) -> Any:
        x = shaped(x, (*shapes[0], *shapes[1]), (*shapes[0], num_inner))
        if is_turned:
            matrix = shaped(matrix, weights.shard, (num_inner, num_outer)).t()
        else:
            matrix = shaped(matrix, weights.shard, (num_outer, num_inner))
        y = functional.linear(x, matrix)
        y.node.meta["biased"] = [dim.name for dim in outer]
        return shaped(y, (*shapes[0], num_outer), (*shapes[0], *shapes[2]))

    return local(compute, [x, weights], out, partial_over=summed)


def lookup(table: Tensor, indices: Tensor, rows: Dim, *columns: Dim, frozen: int = -1) -> Tensor:
    """Return rows of a table by index: dims of the indices, then the columns'; frozen: a row that gets no gradient.

    A rank looks up the indices that fall in its rows and leaves zeros for the others; a split of the rows leaves
    partial sums.
    """
    table = arrange(table, [rows, *columns])
    mesh = one_mesh([table, indices])
    begin, num_rows = mesh.begin(rows), mesh.part(rows)
    row, found_in = tuple(map(mesh.part, columns)), indices.shard

    def looked_up(table: Any, indices: Any) -> Any:
        table = shaped(table, (num_rows, *row), (num_rows, prod(row)))
        if num_rows == rows.size:
            found = functional.embedding(indices.long(), table, padding_idx=frozen if frozen >= 0 else None)
        else:
            places = indices.long() - begin
            is_inside = (places >= 0) & (places < num_rows)
            is_own = 0 <= frozen - begin < num_rows
            found = functional.embedding(
                torch.where(is_inside, places, 0), table, padding_idx=frozen - begin if frozen >= 0 and is_own else None
            )
            found = found * is_inside.unsqueeze(-1).type_as(found)
        return shaped(found, (*found_in, prod(row)), (*found_in, *row))

    return local(looked_up, [table, indices], (*indices.dims, *columns), partial_over=[rows.name])


def pick(x: Tensor, places: Tensor, along: Dim) -> Tensor:
    """Return elements of x along a dim, at places that the other dims have each its own; places: dims [b, …].

    Where the places have a dim that x lacks, several elements are taken for each point of the others. A rank takes
    those that fall in its part of the dim and leaves zeros for the others; a split of it leaves partial sums.
    """
    lacking = [dim for dim in x.dims if dim not in places.dims and dim != along]
    if any(dim.size > 1 for dim in lacking):
        raise ProgramError(f"layer {x.mesh.layer!r} picks points of a tensor whose dims the places lack")
    x = arrange(x, [*places.dims, along])
    begin, size = x.mesh.begin(along), x.mesh.part(along)

    def picked(x: Any, places: Any) -> Any:
        own = places.long() - begin
        is_inside = (own >= 0) & (own < size)
        found = x.gather(-1, torch.where(is_inside, own, 0).unsqueeze(-1)).squeeze(-1)
        return torch.where(is_inside, found, 0)

    return local(picked, [x, places], places.dims, partial_over=[along.name])
