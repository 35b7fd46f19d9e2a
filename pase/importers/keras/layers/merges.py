"""Layers that bring several tensors together, point by point or end to end."""

from pase.importers.ir import Concat, Identity, Pointwise, Value
from pase.importers.keras.layers.call import Call, Translation


def merge(call: Call, *functions: str) -> None:
    """Write a function of all tensors; those of fewer dims get dims of one element after the batch."""
    tensors = call.tensors
    if len(tensors) == 1:
        call.emit(Identity(), tensors[0])
        return
    rank = max(len(value.shape) for value in tensors)
    seen = [_of_rank(call, value, rank) for value in tensors]
    call.emit(Pointwise(functions=functions, flop_per_point=len(tensors) - 2 + len(functions)), *seen)


def concatenate(call: Call) -> None:
    """Write tensors end to end."""
    tensors = call.tensors
    if len(tensors) == 1:
        call.emit(Identity(), tensors[0])
        return
    call.emit(Concat(dim=call.operation.axis % len(call.result.shape)), *tensors)


def _of_rank(call: Call, value: Value, rank: int) -> Value:
    return call.reshaped(value, (*value.shape[:1], *(1,) * (rank - len(value.shape)), *value.shape[1:]))


def _merge(*functions: str) -> Translation:
    def translation(call: Call) -> None:
        merge(call, *functions)

    return translation


MERGES: dict[str, Translation] = {
    "Add": _merge("add"),
    "Average": _merge("add", "divide"),
    "Concatenate": concatenate,
    "Maximum": _merge("maximum"),
    "Minimum": _merge("minimum"),
    "Multiply": _merge("multiply"),
    "Subtract": _merge("subtract"),
}
"""Layers."""
