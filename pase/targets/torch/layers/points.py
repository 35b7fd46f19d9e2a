"""Elementwise functions of tensors with named dims: a tensor that lacks a dim is broadcast along it.

`dropout` also depends on the index of each point.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from pase.errors import ProgramError
from pase.graph.functions import TypeRule, function_of
from pase.sharding.layouts import named
from pase.targets.torch.tensor import Dim, Tensor, in_float32, in_order, joined_dims, local
from pase.targets.training.counted import ROUND, WORD, layer_key, threshold

_CONSTANT = frozenset({"ceil", "floor", "floor_divide", "round", "sign"})
_COMPARED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "equal": torch.eq,
        "not_equal": torch.ne,
        "less": torch.lt,
        "less_equal": torch.le,
        "greater": torch.gt,
        "greater_equal": torch.ge,
    }
)
_LINEAR = frozenset({"identity", "negate"})
"""Linear functions, which commute with reductions of partial sums."""


def _folded(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *xs: reduce(function, xs)


def _bound(function: Callable[[Any, Any], Any], clamp: str) -> Callable[..., Any]:

    def found(*xs: Any) -> Any:
        tensors = [x for x in xs if not isinstance(x, float | int)]
        numbers = [x for x in xs if isinstance(x, float | int)]
        whole = reduce(function, tensors)
        return torch.clamp(whole, **{clamp: max(numbers) if clamp == "min" else min(numbers)}) if numbers else whole

    return found


def _where(condition: Any, x: Any, y: Any) -> Any:
    return torch.where(condition != 0, x, y)


def _compared(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def found(x: Any, y: Any) -> Any:
        if isinstance(x, float | int):
            x = torch.full_like(y, x)
        return function(x, y).type_as(x)

    return found


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "abs": torch.abs, "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "asinh": torch.asinh,
        "atan": torch.atan, "atanh": torch.atanh, "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh,
        "erf": torch.erf, "erfc": torch.erfc, "exp": torch.exp, "expm1": torch.expm1, "floor": torch.floor,
        "gelu": functional.gelu, "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "hard_swish": functional.hardswish, "identity": lambda x: x, "log": torch.log, "log1p": torch.log1p,
        "log_sigmoid": functional.logsigmoid, "mish": functional.mish, "negate": torch.neg,
        "reciprocal": torch.reciprocal, "relu": torch.relu, "relu6": functional.relu6, "round": torch.round,
        "rsqrt": torch.rsqrt, "selu": torch.selu, "sigmoid": torch.sigmoid, "sign": torch.sign,
        "silu": functional.silu, "sin": torch.sin, "sinh": torch.sinh, "softsign": functional.softsign,
        "sqrt": torch.sqrt, "square": torch.square, "tan": torch.tan, "tanh": torch.tanh,
        "tanh_shrink": functional.tanhshrink,
        "add": _folded(lambda x, y: x + y), "multiply": _folded(lambda x, y: x * y),
        "average": lambda *xs: reduce(lambda x, y: x + y, xs) / len(xs),
        "maximum": _bound(torch.maximum, "min"), "minimum": _bound(torch.minimum, "max"),
        "subtract": lambda x, y: x - y, "divide": lambda x, y: x / y, "power": lambda x, y: x**y,
        "floor_divide": lambda x, y: torch.floor(x / y),
        "prelu": lambda x, slope: torch.relu(x) - slope * torch.relu(-x), "leaky_relu": functional.leaky_relu,
        "elu": functional.elu, "celu": functional.celu,
        "thresholded_relu": lambda x, least: functional.threshold(x, least, 0.0),
        "clip": torch.clamp, "hard_sigmoid": lambda x, slope, offset: torch.clamp(x * slope + offset, 0.0, 1.0),
        "quick_gelu": lambda x, alpha: x * torch.sigmoid(alpha * x),
        "softplus": lambda x, beta=1.0: functional.softplus(x, beta=beta, threshold=40.0), "where": _where,
    }
    | {name: _compared(function) for name, function in _COMPARED.items()}
)  # fmt: skip
"""Implementations of functions on tensors with aligned dims, and on numbers."""


def apply(function: str, *operands: Tensor | float) -> Tensor:
    """Return a function of tensors of one mesh and numbers; its dims are those of all tensors, in order.

    Raises ProgramError for a function that is not known, and for dims of one name with different extents.
    """
    if function_of(function).types is TypeRule.FLOAT32:
        operands = tuple(in_float32(x) if isinstance(x, Tensor) else x for x in operands)
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if function not in _FUNCTIONS or not tensors:
        names = ", ".join(_FUNCTIONS)
        raise ProgramError(f"{function!r} of {len(tensors)} tensors cannot be computed; use {names}")
    if function == "add" and len(tensors) == len(operands) == 2:
        return tensors[0] + tensors[1]
    dims = joined_dims(tensors)
    compute = _FUNCTIONS[function]

    def of_shards(*shards: Any) -> Any:
        rest = iter(shards)
        own = [in_order(next(rest), x, dims) if isinstance(x, Tensor) else x for x in operands]
        found = compute(*own)
        return found.detach() if function in _CONSTANT else found

    is_scaled = function == "multiply" and len(tensors) == 1
    is_scaled |= function == "divide" and len(tensors) == 1 and isinstance(operands[0], Tensor)
    is_index = all(x.is_index for x in tensors) and all(
        isinstance(x, Tensor) or float(x).is_integer() for x in operands
    )
    return local(
        of_shards,
        tensors,
        dims,
        is_linear=is_scaled or function in _LINEAR,
        is_index=is_index and function not in ("divide", "average", "floor_divide"),
    )


class _Functions:
    """Functions of points, by name: ``fn.add(x, y)``."""

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return partial(apply, name)


fn = _Functions()


def arrange(x: Tensor, dims: Sequence[Dim]) -> Tensor:
    """Return a tensor with its dims in another order; it is repeated along those that it lacks."""
    dims = tuple(dims)
    if x.dims == dims:
        return x
    if any(dim.size > 1 for dim in x.dims if dim not in dims):
        raise ProgramError(f"layer {x.mesh.layer!r}: {named(x.dims)} cannot be laid out as {named(dims)}")
    shape = tuple(map(x.mesh.part, dims))
    is_longer = any(dim not in x.dims and dim.size > 1 for dim in dims)

    def compute(shard: Any) -> Any:
        shard = in_order(shard, x, dims, keeps_rank=True)
        return shard.expand(shape) if is_longer else shard

    return local(compute, [x], dims, is_linear=True, is_index=x.is_index)


def dropout(x: Tensor, key: Any, *, rate: float, of: str = "") -> Tensor:
    """Return ``x / (1 - rate)`` where a point is kept and 0 where it is dropped, the same points in the gradient.

    key: the step's `Program.mask_key`. The mask depends on it, a name (`of`, by default x's layer) and the points'
    indices in the whole tensor. Where the program does not train, the result is x.
    """
    if not 0 <= rate < 1:
        raise ProgramError(f"layer {x.mesh.layer!r} drops a fraction of {rate}; give a rate from 0 to below 1")
    if not x.mesh.program.trains or rate == 0:
        return x
    if x.mesh.program.drops_nothing:
        return local(lambda shard: shard * (1 / (1 - rate)), [x], x.dims)
    first, second = (int(word) for word in layer_key(of or x.mesh.layer))

    def masked(shard: Any) -> Any:
        drawn = _drawn(shard, x, (key[0] ^ first, key[1] ^ second))
        return shard.masked_fill(drawn < threshold(rate), 0.0) * (1 / (1 - rate))

    return local(masked, [x], x.dims)


def _drawn(shard: Any, x: Tensor, key: tuple[Any, Any]) -> Any:
    """Return a word of 32 bits for each point of a shard, in 64 bits."""
    number: Any = 0
    rest = x.size
    for place, dim in enumerate(x.dims):
        rest //= dim.size
        begin = x.mesh.begin(dim)
        along = torch.arange(begin * rest, (begin + x.mesh.part(dim)) * rest, rest, device=shard.device)
        along = along.reshape([-1] + [1] * (len(x.dims) - 1 - place))
        number = along if place == 0 else number + along
    low = number if x.size <= WORD else number & (WORD - 1)
    words = _mixed(low ^ key[0]) ^ key[1]
    return _mixed(words if x.size <= WORD else words ^ _mixed(number >> 32))


def _mixed(words: Any) -> Any:
    for shift, factor in ROUND:
        words = words ^ (words >> shift)
        words = words if factor == 1 else (words * factor) & (WORD - 1)
    return words


def cast(x: Tensor, to: str) -> Tensor:
    """Return x in another type of numbers."""
    dtype = getattr(torch, to)
    return local(lambda shard: shard.to(dtype), [x], x.dims)
