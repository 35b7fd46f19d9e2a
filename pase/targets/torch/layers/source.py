"""PyTorch's own calls on shards, rows that go to the matrices of their groups, and other types of numbers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pase.errors import ProgramError
from pase.sharding.boxes import extents
from pase.sharding.layouts import WHOLE, PlainDim, apart, layout_of
from pase.sharding.reshard import ReshardStep
from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.collectives import Move, exchange
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.program import Program
from pase.targets.torch.tensor import Dim, Tensor, local, resolved

_DROPPING = frozenset({"aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"})
"""Operators that drop points where they are told so, which programs do not."""


def cast(x: Tensor, to: str) -> Tensor:
    """Return x in another type of numbers."""
    dtype = getattr(torch, to)
    return local(lambda shard: shard.to(dtype), [x], x.dims)


def source(
    operator: str,
    xs: Sequence[Tensor],
    arguments: str,
    layouts: Sequence[Sequence[Sequence[Dim]]],
    *,
    number: int = 0,
    is_index: bool = False,
) -> Tensor:
    """Return what an operator of PyTorch's `aten` gives of tensors.

    Args:
        operator: By its qualified name.
        xs: Its operands.
        arguments: Positional ones and keywords, as JSON; {"operand": i} stands for an operand.
        layouts: Of each operand, then of the result, the dims that make up each of its dims. Those that the operator
            does not pass through are whole on every rank.
        number: Which of several results it is.
        is_index: Whether it holds whole numbers.

    Raises:
        ProgramError: The operator writes into what it reads, or its result depends on more than its arguments.
    """
    function = _pure(operator)
    *own, out = [[list(axis) for axis in layout] for layout in layouts]
    xs = [arrange(x, [dim for axis in layout for dim in axis]) for x, layout in zip(xs, own, strict=True)]
    mesh = xs[0].mesh
    shapes = [[_points(mesh.part, axis) for axis in layout] for layout in own]
    dims = [dim for axis in out for dim in axis]
    positional, keywords = json.loads(arguments)
    has_several = len(function._schema.returns) > 1

    def compute(*shards: Any) -> Any:
        operands = [shard.reshape(shape) for shard, shape in zip(shards, shapes, strict=True)]
        given = [_told(item, operands) for item in positional]
        found = function(*given, **{key: _told(item, operands) for key, item in keywords.items()})
        return (found[number] if has_several else found).reshape([mesh.part(dim) for dim in dims])

    return local(compute, xs, dims, is_index=is_index)


def _points(part: Callable[[Dim], int], axis: Sequence[Dim]) -> int:
    found = 1
    for dim in axis:
        found *= part(dim)
    return found


def _pure(name: str) -> Any:
    """Return an operator of PyTorch; ProgramError for one that is no pure function."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None) if namespace == "aten" else None
    if not isinstance(found, torch._ops.OpOverload):
        raise ProgramError(f"PyTorch {torch.__version__} has no operator {name!r}, which a layer calls; search again")
    schema = found._schema
    is_random = torch.Tag.nondeterministic_seeded in found.tags and name not in _DROPPING
    kinds = {str(value.type) for value in schema.returns}
    # What has no operand makes its result of a file, or of chance, or is a constant.
    is_of_operands = any("Tensor" in str(argument.type) for argument in schema.arguments)
    is_pure = (
        not schema.is_mutable and not is_random and is_of_operands and {"Tensor", "List[Tensor]"} >= kinds != set()
    )
    if not is_pure or any(str(argument.type) in _OUTSIDE for argument in schema.arguments):
        raise ProgramError(
            f"a layer calls PyTorch's {name!r}, which is no function of its operands alone; programs call no others"
        )
    return found


_OUTSIDE = frozenset({"Storage", "Generator", "Stream", "QScheme"})
"""Types of arguments of operators that reach beyond their operands."""


def _told(item: Any, operands: Sequence[Any]) -> Any:
    """Return an argument as PyTorch takes it."""
    match item:
        case list():
            return [_told(one, operands) for one in item]
        case {"operand": place}:
            return operands[place]
        case {"dtype": name}:
            return getattr(torch, name)
        case {"number": text}:
            return float(text)
        case {"device": _}:
            return operands[0].device
        case _:
            return item


def grouped(x: Tensor, weights: Tensor, ends: Tensor, dims: Sequence[Dim]) -> Tensor:
    """Return rows, each times the matrix of the group that it lies in.

    Where groups are split, ranks gather all rows, and compute those of their own groups: where these lie is not known
    before. The others are zero there, and what is made of each part of the rows is added where that part belongs.

    Args:
        x: The rows, as many for each group as if all had the same.
        weights: A matrix for each group.
        ends: Before which row, counted over all, each group ends.
        dims: The groups, the rows of a group, the columns and the features.
    """
    group, row, column, feature = dims
    mesh = x.mesh
    x = arrange(resolved(x), [group, row, feature])
    weights = arrange(weights, [group, column, feature])
    where = (row.size, mesh.begin(row), mesh.begin(group))

    def compute(rows: Any, weights: Any, ends: Any) -> Any:
        rows = _with_all_groups(rows, x, group)
        # It goes by values, which are not there while a program is traced.
        made = rows.tracer.create_proxy("call_function", rows_of_groups, (rows, weights, ends, *where), {})
        return _with_all_groups(made, replace(x, dims=(group, row, column)), group, is_sum=True)

    return local(compute, [x, weights, ends], [group, row, column], partial_over=[feature.name])


def _with_all_groups(value: Any, x: Tensor, group: Dim, *, is_sum: bool = False) -> Any:
    """Return a shard of x with the points of all groups, from the ranks that have those of others.

    is_sum: whether it is the way back: of what these ranks make of all groups, the sums of this one's.
    """
    mesh = x.mesh
    program = mesh.program
    if mesh.devices.size(group.name) == 1:
        return value
    assert isinstance(program, Program)
    own = [PlainDim(dim.name, dim.size) for dim in x.dims]
    every = [PlainDim(WHOLE, group.size) if dim.name == group.name else dim for dim in own]
    # Ranks that differ in more than their groups have nothing for each other.
    numbers = {position: i for i, alike in enumerate(mesh.devices.groups([group.name])) for position in alike}
    held, made = (
        apart(((numbers[i], box) for i, box in enumerate(layout.boxes)), layout.devices)
        for layout in (layout_of(mesh.devices, dims, layer=mesh.layer) for dims in (own, every))
    )
    step = ReshardStep(made, held) if is_sum else ReshardStep(held, made)
    before, after = (extents(layout.by_device[program.rank][1:]) for layout in (step.source, step.target))
    move = Move(
        movement=Movement.within(mesh.layer, Phase.FORWARD),
        traffic=program.traffic,
        held=before,
        made=after,
        there=[exchange(step, program.groups)],
        back=[exchange(step.adjoint, program.groups)],
        # What a layer exchanges as it computes counts as forward, whatever pass it is of.
        phase_back=Phase.FORWARD,
    )
    return program.run(move, value, "sum_of_groups" if is_sum else "all_groups")


def rows_of_groups(x: Any, weights: Any, ends: Any, size: int, first_row: int, first_group: int) -> Any:
    """Return [g, m, n] of rows x [g, m, k], those of some groups times their weights [e, n, k], zeros for the others.

    Args:
        x: Rows of all groups, `size` of which a group has if all have as many; of these the ones from `first_row` on.
        weights: Of the groups from `first_group` on.
        ends: Before which row, counted over all, each group ends.
        size: Rows of a group.
        first_row: The first of x among them.
        first_group: The first of weights.
    """
    groups, count, _ = x.shape
    numbers = torch.arange(groups, device=x.device)[:, None] * size + first_row
    numbers = (numbers + torch.arange(count, device=x.device)).flatten()
    bounds = [0, *torch.searchsorted(numbers, ends.flatten().to(numbers.dtype)).tolist()]
    own = bounds[first_group : first_group + weights.shape[0] + 1]
    rows = x.reshape(groups * count, -1)
    parts = [rows[begin:end] @ matrix.t() for begin, end, matrix in zip(own, own[1:], weights, strict=False)]
    made = torch.cat(
        [rows.new_zeros(own[0], weights.shape[1]), *parts, rows.new_zeros(len(rows) - own[-1], weights.shape[1])]
    )
    return made.reshape(groups, count, -1)
