"""PyTorch's own calls on shards, and other types of numbers."""

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from pase.errors import ProgramError
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.tensor import Dim, Tensor, local

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
    shapes = [[prod(map(mesh.part, axis)) for axis in layout] for layout in own]
    dims = [dim for axis in out for dim in axis]
    positional, keywords = json.loads(arguments)
    has_several = len(function._schema.returns) > 1

    def compute(*shards: Any) -> Any:
        operands = [shard.reshape(shape) for shard, shape in zip(shards, shapes, strict=True)]
        given = [_told(item, operands) for item in positional]
        found = function(*given, **{key: _told(item, operands) for key, item in keywords.items()})
        return (found[number] if has_several else found).reshape([mesh.part(dim) for dim in dims])

    return local(compute, xs, dims, is_index=is_index)


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
