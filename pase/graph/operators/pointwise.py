"""`pointwise`: a function of tensors that are broadcast to one shape, point by point."""

from collections.abc import Sequence

from pase.errors import GraphError
from pase.graph.access import Access, Dim
from pase.graph.body import POINTWISE, Body, Step
from pase.graph.operator import Operator
from pase.graph.work import Work


def pointwise(
    name: str,
    *inputs: tuple[int, ...],
    dims: tuple[str, ...],
    out: tuple[int, ...],
    function: str,
    flop_per_point: float = 1.0,
    mixes: tuple[str, ...] = (),
) -> Operator:
    """Return ``y[dims] = function(x0, x1, …)``; inputs: shapes that are broadcast to `out`, [dims…], as NumPy does.

    mixes: dims along which points read each other after all; they cannot be split. Raises GraphError where a shape
    cannot be broadcast.
    """
    reads = []
    for i, shape in enumerate(inputs):
        last = tuple(zip(dims[len(dims) - len(shape) :], out[len(out) - len(shape) :], strict=True))
        if len(shape) > len(out) or any(extent not in (1, full) for extent, (_, full) in zip(shape, last, strict=True)):
            raise GraphError(f"layer {name!r} reads shape {shape}, which cannot be broadcast to {out}")
        axes = tuple(None if extent < full else dim for extent, (dim, full) in zip(shape, last, strict=True))
        reads.append(Access(tensor=f"x{i}", shape=shape, index_map=axes))
    return Operator(
        name=name,
        kind="pointwise",
        dims=tuple(Dim(n, e) for n, e in zip(dims, out, strict=True)),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=out, index_map=dims),),
        work=function_work(dims, tuple(function.split(",")), flop_per_point, len(reads)),
        unsplittable=mixes,
        body=None if mixes else _body(function.split(","), len(reads)),
        attributes=(("function", function),),
    )


def _body(functions: Sequence[str], num_reads: int) -> Body | None:
    """Return a function of all tensors and those that are applied to its result; None where one is not known."""
    operands = tuple(f"x{i}" for i in range(num_reads))
    steps: list[Step] = []
    for i, function in enumerate(functions):
        fewest, most = POINTWISE.get(function, (1, 0))
        if not fewest <= len(operands) <= most:
            return None
        steps.append(Step(result=f"y{i}", function=function, operands=operands))
        operands = (steps[-1].result,)
    return Body(steps=tuple(steps))


_SUMS = frozenset({"add", "subtract"})
_PRODUCTS = frozenset({"multiply", "divide"})


def function_work(
    dims: tuple[str, ...], functions: tuple[str, ...], flop_per_point: float, num_reads: int
) -> tuple[Work, ...]:
    """Return the work of functions that follow one another on tensors that an operator reads.

    The gradient of a sum is a copy. A product works again for each factor, as any other function of several tensors
    does; where there are several functions and tensors, a product is of two numbers that may come of any of these.
    """
    every = tuple(range(num_reads))
    num_sums = sum(function in _SUMS for function in functions)
    if len(functions) == 1:
        return (Work(dims=dims, flop_per_point=flop_per_point, inputs=() if num_sums else every),)
    # What is more than one a function is the first one's, which may have many inputs.
    others = len(functions) - num_sums if functions[0] in _SUMS else flop_per_point - num_sums
    others = max(0.0, min(flop_per_point, others))
    products = min(others, sum(function in _PRODUCTS for function in functions)) if num_reads > 1 else 0.0
    works = (
        Work(dims=dims, flop_per_point=flop_per_point - others),
        Work(dims=dims, flop_per_point=others - products, inputs=(every,)),
        Work(dims=dims, flop_per_point=products, inputs=(every, every)),
    )
    return tuple(work for work in works if work.flop_per_point)
