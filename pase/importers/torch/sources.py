"""PyTorch's own calls, for computations that steps cannot express: text without tensors, and dims that pass through."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, prod
from typing import Any

from pase.graph.sources import ARGUMENT_TYPES, is_source_operator
from pase.importers.ir import ops
from pase.importers.ir.call import Call, as_list
from pase.importers.ir.trace import SourceOperator, Step, Value

_DROPPING = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention"})

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Dims along which points are independent: of each operand, of each result; -1 for none."""


def source_of(torch: Any, node: Any, call: Call, step: Step, made: Mapping[str, Any]) -> SourceOperator | None:
    """Return the call of an exported program's node, which a single step of its translation represents; None for none.

    Args:
        torch: PyTorch.
        node: Node of the program.
        call: Its translation.
        step: Step of the translation.
        made: Values of the trace, by the names of the program's nodes.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not is_source_operator(str(target)):
        return None
    if target._schema.is_mutable:
        return None
    # Recurrent layers and attention only have dropout in training, and are traced in evaluation mode.
    is_traced = call.name in _DROPPING and not call.get("dropout_p", 0.0)
    if torch.Tag.nondeterministic_seeded in target.tags and not is_traced:
        return None
    inputs = [use.value for use in step.inputs]
    values = {value.name: value for value in call.tensors}
    if not set(values) <= set(inputs) or {v.name for v in step.outputs} != {v.name for v in call.results}:
        return None
    try:
        arguments = json.dumps(_text([*node.args], made, inputs)), json.dumps(_text(dict(node.kwargs), made, inputs))
    except ValueError:
        return None
    if not set(inputs) <= set(values):
        return None
    operands = [values[name] for name in inputs]
    results = [value if isinstance(value, Value) else None for value in call.outputs]
    return SourceOperator(
        operator=str(target),
        arguments="[{}, {}]".format(*arguments),
        results=tuple(value.name if value is not None else "" for value in results),
        passes=tuple(_passes(call, step, operands, results)),
        is_exact=_is_exact(call),
    )


def _text(argument: Any, made: Mapping[str, Any], inputs: Sequence[str]) -> Any:
    """Return an argument in text form; ValueError for one that has none."""
    if hasattr(argument, "op") and hasattr(argument, "name"):
        value = made.get(argument.name)
        if not isinstance(value, Value) or value.name not in inputs:
            raise ValueError("it is none of the operands")
        return {"operand": inputs.index(value.name)}
    if isinstance(argument, list | tuple):
        return [_text(item, made, inputs) for item in argument]
    if isinstance(argument, dict):
        kept = {key: item for key, item in argument.items() if key not in ("layout", "memory_format", "pin_memory")}
        return {key: _text(item, made, inputs) for key, item in sorted(kept.items())}
    if isinstance(argument, float) and not isfinite(argument):
        return {"number": str(argument)}
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    name = str(argument).removeprefix("torch.")
    if type(argument).__name__ == "dtype" and name in ARGUMENT_TYPES:
        return {"dtype": name}
    if type(argument).__name__ == "device":
        return {"device": ""}
    if type(argument).__name__ in ("layout", "memory_format"):
        return None
    raise ValueError(f"{argument!r} has no text form")


# -- operators that a translation computes differently


def _is_exact(call: Call) -> bool:
    name = call.name
    if "pad" in name and name not in ("pad", "constant_pad_nd"):
        return False
    if name in ("pad", "constant_pad_nd"):
        return call.get("mode", "constant") == "constant" and not call.get("value", 0)
    if name.startswith("avg_pool"):
        return call.get("divisor_override") is None and not call.get("ceil_mode", False)
    return not (name == "div" and call.get("rounding_mode") == "trunc")


# -- dims that pass through


def _passes(call: Call, step: Step, operands: Sequence[Value], results: Sequence[Value | None]) -> Iterator[Group]:
    """Yield the dims along which each point of the results only depends on the same point of the operands."""
    if not operands:
        return
    name, rank = call.name, len(operands[0].shape)
    along: Sequence[int] | None = None
    match step.op:
        case ops.Pointwise(mixes=()) if name not in _BY_PLACE:
            yield from _of_points(operands, results)
        case ops.Pointwise(mixes=mixes):
            along = mixes or (-2, -1)
        case ops.Reduce(over=over, keeps_dims=keeps):
            for i in range(rank):
                if i not in over:
                    after = i if keeps else i - sum(dim < i for dim in over)
                    yield (i, *(-1 for _ in operands[1:])), tuple(-1 if r is None else after for r in results)
        case ops.Convolve() if rank == len(_first(results).shape) and operands[0].shape[0] > 1:
            # Filters may be as many as the examples, whose dim theirs is not.
            yield (0, *(-1 for _ in operands[1:])), tuple(-1 if value is None else 0 for value in results)
        case ops.Attention() if rank == len(_first(results).shape):
            along = range(1, rank)
        case ops.Normalise(kind="group"):
            along = range(1, rank)
        case ops.Normalise(kind="layer" | "rms", over=over):
            along = over
        case ops.Softmax(dim=dim) | ops.Gather(dim=dim):
            along = (dim,)
        case ops.Pool(spatial=spatial):
            along = spatial
        case ops.Pad(before=before):
            after_it = _first(results).shape
            along = [i for i, first in enumerate(before) if first or operands[0].shape[i] != after_it[i]]
        case ops.Recurrent(is_batch_first=is_batch_first):
            batch = 0 if is_batch_first else 1
            states = {value.name for value in as_list(call.get("hx", [])) if isinstance(value, Value)}
            yield (
                (batch, *(1 if value.name in states else -1 for value in operands[1:])),
                (batch, *(-1 if value is None else 1 for value in results[1:])),
            )
        case ops.Generic(passes=passes) if name in ("index", "_unsafe_index"):
            for i, after in passes:
                yield (i, *(-1 for _ in operands[1:])), (after,)
        case _ if name in _ALONG_ONE:
            along = as_list(call.get("dim", -1))
        case _ if name in _BATCHED:
            along = range(1, rank)
        case _ if name.lstrip("_").startswith(("adaptive", "upsample")):
            along = range(rank - int(next(c for c in name if c.isdigit())), rank)
    if along is not None:
        yield from _other_dims([dim % max(1, rank) for dim in along], operands, results)


def _first(results: Sequence[Value | None]) -> Value:
    return next(value for value in results if value is not None)


def _of_points(operands: Sequence[Value], results: Sequence[Value | None]) -> Iterator[Group]:
    out = _first(results)
    for back in range(1, len(out.shape) + 1):
        extent = out.shape[-back]
        if extent == 1 or any(value is None or value.shape != out.shape for value in results):
            continue
        yield (
            tuple(len(v.shape) - back if len(v.shape) >= back and v.shape[-back] == extent else -1 for v in operands),
            tuple(len(out.shape) - back for _ in results),
        )


def _other_dims(over: Sequence[int], operands: Sequence[Value], results: Sequence[Value | None]) -> Iterator[Group]:
    """Yield the dims of the first operand except some, where operands of its rank and all results have the same."""
    first = operands[0]
    for i, extent in enumerate(first.shape):
        if i in over or extent == 1:
            continue
        own = [_along(value, first, i) for value in operands]
        after = [-1 if value is None else i for value in results]
        fits = all(value is None or value.shape[i : i + 1] == (extent,) for value in results)
        if fits and None not in own:
            yield tuple(dim for dim in own if dim is not None), tuple(after)


def _along(value: Value, first: Value, dim: int) -> int | None:
    """Return the dim of an operand that corresponds to one of the first, -1 for none; None where it is unknown."""
    if len(value.shape) == len(first.shape):
        extent = value.shape[dim]
        return dim if extent == first.shape[dim] else -1 if extent == 1 else None
    # Numbers, indices along the dim that the operator works along, and weights of such.
    return -1 if prod(value.shape) == 1 or len(value.shape) <= 1 else None


_BY_PLACE = frozenset({"tril", "triu"})
"""Functions of points that go by where in the last two dims these are."""

_ALONG = """
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk msort kthvalue mode scatter scatter_add scatter_reduce
    index_add index_copy index_fill diff index_select
"""
_ALONG_ONE = frozenset(_ALONG.split())
"""Operators along the dim that they name, the last one by default; without a name no dim passes through."""

_BATCHED = frozenset({"im2col", "col2im", "grid_sampler", "grid_sampler_2d"})
"""Operators that only preserve the batch dim."""
