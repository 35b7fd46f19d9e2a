"""Reductions over dims, and what sees one dim as a whole."""

from collections.abc import Mapping
from types import MappingProxyType

from pase.importers.ir import Generic, Identity, Reduce, Step
from pase.importers.onnx.operators.call import Call, Translation, generic, node, place, step


def reduce(call: Call) -> list[Step]:
    """Return a reduction over some dims, or over all where none are told."""
    x = call.x
    rank = len(x.shape)
    axes = call.wholes("axes", 1)
    if not axes and call.whole("noop_with_empty_axes", 0):
        return step(call, Identity(), x)
    over = tuple(sorted({place(axis, rank) for axis in axes})) if axes else tuple(range(rank))
    op = Reduce(function=_FUNCTIONS[call.operator], over=over, keeps_dims=bool(call.whole("keepdims", 1)))
    return step(call, op, x)


def arg(call: Call) -> list[Step]:
    """Return where the maximum or minimum lies along a dim."""
    op = Reduce(function=call.operator.lower(), over=(call.axis(0),), keeps_dims=bool(call.whole("keepdims", 1)))
    return step(call, op, call.x)


def along_axis(call: Call) -> list[Step]:
    """Return what reads one dim as a whole and leaves the others alone: a sort, a sum of all that came before."""
    rank = len(call.x.shape)
    given = call.constant(1)
    is_input = call.operator == "CumSum"
    if is_input and given is None:
        return generic(call, passes=())
    default = -1 if call.operator != "OneHot" else 0
    axis = place(int(given.ravel()[0]), rank) if is_input and given is not None else call.axis(default)
    results = tuple(value for value in call.results if value is not None)
    passes = tuple((i, i) for i in range(rank) if i != axis)
    is_index = not any(value.is_float for value in results)
    return [node(Generic(passes=passes, is_index=is_index), (call.x,), *results)]


_FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "ReduceL1": "norm",
        "ReduceL2": "norm",
        "ReduceLogSum": "logsum",
        "ReduceLogSumExp": "logsumexp",
        "ReduceMax": "max",
        "ReduceMean": "mean",
        "ReduceMin": "min",
        "ReduceProd": "prod",
        "ReduceSum": "sum",
        "ReduceSumSquare": "sum_of_squares",
    }
)

REDUCTIONS: Mapping[str, Translation] = MappingProxyType(
    {
        **dict.fromkeys(_FUNCTIONS, reduce),
        **dict.fromkeys(("ArgMax", "ArgMin"), arg),
        **dict.fromkeys(("TopK", "CumSum", "CumProd", "Hardmax", "LpNormalization"), along_axis),
    }
)
"""By the operator's name."""
