"""`source`: calls of PyTorch's own operators, which are verified on tensors without values before any of them runs."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice, product
from math import prod
from typing import Any

import torch

from pase.common.words import short
from pase.errors import ProgramError
from pase.graph.sources import is_source_operator
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.tensor import Dim, Tensor, local

_MOST_ATTEMPTS = 64
"""Combinations of types of the operands that are tried: programs do not know these types."""

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def source(
    operator: str,
    xs: Sequence[Tensor],
    arguments: str,
    layouts: Sequence[Sequence[Sequence[Dim]]],
    *,
    number: int = 0,
    is_index: bool = False,
) -> Tensor:
    """Return the result of an operator of PyTorch's `aten`.

    Args:
        operator: Qualified name, such as "aten.topk.default".
        xs: Its operands.
        arguments: Positional ones and keywords, as JSON; {"operand": i} represents an operand.
        layouts: For each operand, then for the result, the dims that make up each of its dims. Those that the operator
            does not pass through are unsplit on every rank.
        number: Number of the result, of several.
        is_index: Whether it has integers.

    Raises:
        ProgramError: Programs may not call the operator, or for operands of these shapes its result does not have the
            shape and the kind of numbers that the layouts specify.
    """
    function = _function(operator)
    *own, out = [[list(axis) for axis in layout] for layout in layouts]
    xs = [arrange(x, [dim for axis in layout for dim in axis]) for x, layout in zip(xs, own, strict=True)]
    mesh = xs[0].mesh
    shapes = [[prod(map(mesh.part, axis)) for axis in layout] for layout in own]
    dims = [dim for axis in out for dim in axis]
    positional, keywords = json.loads(arguments)
    _check_kinds(operator, function, positional, keywords)

    def result(operands: Sequence[Any]) -> Any:
        given = [_given(item, operands) for item in positional]
        made = function(*given, **{key: _given(item, operands) for key, item in keywords.items()})
        return made[number] if has_several else made

    def compute(*shards: Any) -> Any:
        operands = [shard.reshape(shape) for shard, shape in zip(shards, shapes, strict=True)]
        return result(operands).reshape([mesh.part(dim) for dim in dims])

    has_several = len(function._schema.returns) > 1 or str(function._schema.returns[0].type) != "Tensor"
    expected = [prod(map(mesh.part, axis)) for axis in out]
    problem = ""
    for types in islice(product(*(_types(x) for x in xs)), _MOST_ATTEMPTS):
        empty = [torch.empty(shape, dtype=t, device="meta") for shape, t in zip(shapes, types, strict=True)]
        found = _inferred(result, empty)
        if isinstance(found, torch.Tensor):
            is_right = [*found.shape] == expected and _is_whole(found) == is_index
            if is_right:
                return local(compute, xs, dims, is_index=is_index)
            found = f"its result has shape {[*found.shape]} and type {found.dtype}"
        problem = problem or found
    raise ProgramError(
        f"layer {mesh.layer!r} calls PyTorch's {operator!r} for {'whole numbers' if is_index else 'floats'} of shape "
        f"{short(str(expected))}, but of operands of shapes {short(str(shapes))} {problem}; search the model again"
    )


def _function(operator: str) -> Any:
    """Return an operator of PyTorch; ProgramError for one that programs may not call."""
    if not is_source_operator(operator):
        raise ProgramError(
            f"a layer calls PyTorch's {short(operator)!r}, which is none of the operators that imports write into "
            "plans; search the model again"
        )
    _, packet, overload = operator.split(".")
    function = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(function, torch._ops.OpOverload):
        raise ProgramError(
            f"PyTorch {torch.__version__} has no operator {operator!r}, which a layer calls; search the model again"
        )
    schema = function._schema
    results = {str(value.type) for value in schema.returns}
    if schema.is_mutable or not results or not results <= {"Tensor", "List[Tensor]"}:
        raise ProgramError(f"a layer calls PyTorch's {operator!r}, which does not return tensors alone; search again")
    return function


_ENUMERATIONS = ("ScalarType", "Layout", "MemoryFormat", "Device")
"""Types of arguments that PyTorch also accepts as numbers, with which it indexes tables without a check."""


def _check_kinds(operator: str, function: Any, positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise ProgramError where a number or a text takes the place of a type, a layout or a device."""
    by_name = {argument.name: argument for argument in function._schema.arguments}
    given = [*zip(by_name.values(), positional, strict=False)]
    given += [(by_name[name], item) for name, item in keywords.items() if name in by_name]
    for argument, item in given:
        is_named = any(kind in str(argument.real_type) for kind in _ENUMERATIONS)
        if is_named and item is not None and not isinstance(item, dict):
            raise ProgramError(
                f"a layer calls PyTorch's {operator!r} with {short(repr(item))} for its {argument.name}; expected a "
                "type by its name; search the model again"
            )


def _types(x: Tensor) -> tuple[torch.dtype, ...]:
    """Return the possible types of a tensor: for a constant, the program does not know whether it is an integer."""
    whole = (torch.int64, torch.bool)
    if x.is_index:
        return whole
    real = getattr(torch, x.mesh.program.dtype)
    return (real, _COMPLEX.get(real, torch.complex64), *whole)


def _inferred(result: Any, operands: Sequence[torch.Tensor]) -> torch.Tensor | str:
    """Return the result of an operator on tensors without values; in words, why it has none."""
    try:
        with torch.no_grad():
            found = result(operands)
    except Exception as error:  # noqa: BLE001 operators may raise anything for arguments from a file
        return f"it fails: {short(str(error).strip().partition(chr(10))[0] or type(error).__name__)}"
    return found if isinstance(found, torch.Tensor) else f"its result is a {type(found).__name__}"


def _is_whole(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _given(item: Any, operands: Sequence[Any]) -> Any:
    match item:
        case list():
            return [_given(one, operands) for one in item]
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
