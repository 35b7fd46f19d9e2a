"""Elementwise operators and operators over dims of one tensor: functions, dropout, reductions, softmax and its loss.

The bias and the activation that other operators apply to their results are here, too.
"""

from collections.abc import Sequence

from pase.errors import GraphError, unknown_name
from pase.graph.body import Body, Step
from pase.graph.functions import POINTWISE, Arithmetic, function_of
from pase.graph.functions import REDUCTIONS as KNOWN_REDUCTIONS
from pase.graph.operator import WORK_OF_BODY, Access, AllReduce, Intermediate, Operator, Role, Work, dims_of, extents_of

Shape = tuple[int, ...]
Names = tuple[str, ...]

ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid")
"""Functions that operators apply to their results."""

FUNCTIONS = ("add", "multiply", "relu", "gelu", "tanh")
"""Functions of `elementwise`."""


def check_activation(name: str, activation: str) -> str:
    """Return the activation of a layer, "" for none; GraphError for an unknown function."""
    if activation and activation not in ACTIVATIONS:
        raise GraphError(f"layer {name!r}: {unknown_name('activation', activation, ACTIVATIONS)}")
    return activation


def finished(*steps: Step, has_bias: bool = False, activation: str = "") -> Body:
    """Return the body of some steps, followed by a bias that is added to the last result, and an activation."""
    found = list(steps)
    if has_bias:
        found.append(Step(result="sums", function="add", operands=(found[-1].result, "bias")))
    if activation:
        found.append(Step(result="activated", function=activation, operands=(found[-1].result,)))
    return Body(steps=tuple(found))


# -- functions of points


def elementwise(name: str, *inputs: Shape, dims: Names, function: str = "add", activation: str = "") -> Operator:
    """Return ``y = activation(function(x0, x1, …))``, elementwise; the inputs have equal shapes [dims…].

    Raises GraphError where the function is not in FUNCTIONS, or shapes differ.
    """
    if function not in FUNCTIONS:
        raise GraphError(f"layer {name!r}: unknown function {function!r}; expected one of {', '.join(FUNCTIONS)}")
    if not inputs or len(set(inputs)) != 1 or len(inputs[0]) != len(dims):
        raise GraphError(
            f"layer {name!r} reads shapes {inputs}; expected one or more of one shape, dims {', '.join(dims)}"
        )
    tensors = tuple(f"x{i}" for i in range(len(inputs)))
    fewest, most = POINTWISE[function].operands
    problem = "" if len(inputs) <= most else f"it applies {function!r} to {len(inputs)} tensors; expected one"
    # The sum, or the product, of one tensor is the tensor itself.
    step = Step(result="values", function=function if len(inputs) >= fewest else "identity", operands=tensors)
    return Operator(
        name=name,
        kind="elementwise",
        dims=dims_of(extents_of(name, inputs[0], dims)),
        reads=tuple(Access(tensor=tensor, shape=inputs[0], index_map=dims) for tensor in tensors),
        writes=(Access(tensor="y", shape=inputs[0], index_map=dims),),
        body=Body(problem=problem) if problem else finished(step, activation=activation),
        attributes=(("function", function), ("activation", check_activation(name, activation))),
    )


def add_parameter(name: str, x: Shape, *, dims: Names, over: Names) -> Operator:
    """Return ``y[dims] = x[dims] + p[over]``: a trained tensor added to every point (a learned position embedding)."""
    if len(x) != len(dims) or not set(over) <= set(dims):
        raise GraphError(
            f"layer {name!r} reads shape {x}; expected dims {', '.join(dims)}, "
            f"of which {', '.join(over)} have a parameter"
        )
    extents = extents_of(name, x, dims)
    parameter = Access(tensor="p", shape=tuple(extents[n] for n in over), index_map=over, role=Role.PARAMETER)
    return Operator(
        name=name,
        kind="add_parameter",
        dims=dims_of(extents),
        reads=(Access(tensor="x", shape=x, index_map=dims), parameter),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        body=Body(steps=(Step(result="sums", function="add", operands=("x", "p")),)),
    )


def pointwise(
    name: str, *inputs: Shape, dims: Names, out: Shape, function: str, flop_per_point: float = 1.0, mixes: Names = ()
) -> Operator:
    """Return ``y[dims] = function(x0, x1, …)``, elementwise.

    Args:
        name: Name of the operator.
        inputs: Shapes that are broadcast to `out`, [dims…], as in NumPy.
        dims: Names of the output's dims.
        out: Shape of the output.
        function: Function of an imported model, or several separated by commas.
        flop_per_point: FLOP for each point.
        mixes: Dims along which points depend on each other; they cannot be split.

    Raises:
        GraphError: A shape cannot be broadcast.
    """
    reads = []
    for i, shape in enumerate(inputs):
        last = tuple(zip(dims[len(dims) - len(shape) :], out[len(out) - len(shape) :], strict=True))
        if len(shape) > len(out) or any(extent not in (1, full) for extent, (_, full) in zip(shape, last, strict=True)):
            raise GraphError(f"layer {name!r} reads shape {shape}, which cannot be broadcast to {out}")
        axes = tuple(None if extent < full else dim for extent, (dim, full) in zip(shape, last, strict=True))
        reads.append(Access(tensor=f"x{i}", shape=shape, index_map=axes))
    functions = tuple(function.split(","))
    return Operator(
        name=name,
        kind="pointwise",
        dims=dims_of(extents_of(name, out, dims)),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=out, index_map=dims),),
        # The front end gives the FLOP of a function, as it knows more functions than body steps have.
        work=function_work(dims, functions, flop_per_point, len(reads)),
        unsplittable=mixes,
        body=None if mixes else _chain(functions, len(reads)),
        attributes=(("function", function),),
    )


def _chain(functions: Sequence[str], num_reads: int) -> Body | None:
    """Return a function of all tensors followed by functions of its result; None where one is unknown."""
    operands = tuple(f"x{i}" for i in range(num_reads))
    steps: list[Step] = []
    for i, function in enumerate(functions):
        known = POINTWISE.get(function)
        if known is None or not known.operands[0] <= len(operands) <= known.operands[1]:
            return None
        steps.append(Step(result=f"y{i}", function=function, operands=operands))
        operands = (steps[-1].result,)
    return Body(steps=tuple(steps))


def function_work(dims: Names, functions: Names, flop_per_point: float, num_reads: int) -> tuple[Work, ...]:
    """Return the work of a chain of functions applied to tensors that an operator reads.

    The gradient of a sum is a copy. A product, like any other function of several tensors, works again for each factor.
    Where there are several functions and tensors, a product has two factors that may depend on any of these.
    """
    every = tuple(range(num_reads))
    are_sums = [function_of(function).counts is Arithmetic.SUM for function in functions]
    num_sums = sum(are_sums)
    if len(functions) == 1:
        return (Work(dims=dims, flop_per_point=flop_per_point, inputs=() if num_sums else every),)
    # Further operations are attributed to the first function, which may have many inputs.
    others = len(functions) - num_sums if are_sums[0] else flop_per_point - num_sums
    others = max(0.0, min(flop_per_point, others))
    products = min(others, sum(function in ("multiply", "divide") for function in functions)) if num_reads > 1 else 0.0
    works = (
        Work(dims=dims, flop_per_point=flop_per_point - others),
        Work(dims=dims, flop_per_point=others - products, inputs=(every,)),
        Work(dims=dims, flop_per_point=products, inputs=(every, every)),
    )
    return tuple(work for work in works if work.flop_per_point)


def dropout(name: str, x: Shape, *, dims: Names, rate: float) -> Operator:
    """Return ``y = x / (1 - rate)`` where a point is kept, 0 where it is dropped; all dims of x, [dims…], can be split.

    Which points are dropped depends on the seed, the layer's name, the step and the point, not on the strategy, so that
    nothing is transferred.

    Args:
        name: Name of the operator.
        x: Shape of the input.
        dims: Names of its dims.
        rate: Probability that a point is dropped (Srivastava et al. 2014).

    Raises:
        GraphError: The rate is outside [0, 1), or the rank of x does not fit.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise GraphError(f"layer {name!r} drops a fraction of {rate!r}; expected a rate from 0 to below 1")
    told = (("rate", float(rate)),)
    return Operator(
        name=name,
        kind="dropout",
        dims=dims_of(extents_of(name, x, dims)),
        reads=(Access(tensor="x", shape=x, index_map=dims),),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        # The backward pass draws the mask again, from 64-bit integers.
        intermediates=(Intermediate(tensor="drawn", shape=x, index_map=dims, working=6),),
        body=Body(steps=(Step(result="kept", function="dropout", operands=("x",), dims=dims, options=told),)),
        attributes=told,
    )


# -- over dims of a tensor


def reduction(name: str, x: Shape, *, dims: Names, over: Names, function: str) -> Operator:
    """Return ``y = function over some dims of x[dims]``; GraphError where x lacks these dims."""
    extents = _reduced(name, x, dims, over)
    kept = tuple(dim for dim in dims if dim not in over)
    is_known = function in KNOWN_REDUCTIONS
    return Operator(
        name=name,
        kind="reduction",
        dims=dims_of(extents),
        reads=(Access(tensor="x", shape=x, index_map=dims),),
        writes=(Access(tensor="y", shape=tuple(extents[dim] for dim in kept), index_map=kept),),
        # A function without body steps is assumed to read each number once, like the others.
        work=WORK_OF_BODY if is_known else (Work(dims=dims, flop_per_point=1, inputs=(0,)),),
        body=Body(steps=(Step(result="reduced", function=function, operands=("x",), dims=over),)) if is_known else None,
        attributes=(("function", function),),
    )


def softmax(name: str, x: Shape, *, dims: Names, over: str, is_log: bool = False) -> Operator:
    """Return the softmax of x[dims] over one dim.

    A split of that dim all-reduces the maximum and the sum of each row in the forward pass, and the sum of its gradient
    in the backward pass.
    """
    extents = _reduced(name, x, dims, (over,))
    kept = tuple(dim for dim in dims if dim != over)
    rows = AllReduce(
        tensor="rows",
        shape=tuple(extents[dim] for dim in kept),
        index_map=kept,
        over=(over,),
        times=3,
        backward_times=1,
        gradient_of=(0,),
    )
    step = Step(result="shares", function="log_softmax" if is_log else "softmax", operands=("x",), dims=(over,))
    return Operator(
        name=name,
        kind="softmax",
        dims=dims_of(extents),
        reads=(Access(tensor="x", shape=x, index_map=dims),),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        exchanges=(rows,),
        body=Body(steps=(step,)),
        attributes=(("over", over), ("is_log", is_log)),
    )


def _reduced(name: str, x: Shape, dims: Names, over: Names) -> dict[str, int]:
    if len(x) != len(dims) or not set(over) <= set(dims):
        raise GraphError(f"layer {name!r} reads shape {x} with dims {', '.join(dims)}, of which {', '.join(over)} go")
    return extents_of(name, x, dims)


def softmax_loss(name: str, x: Shape, *, dims: Names = ("b", "n")) -> Operator:
    """Return softmax cross-entropy of logits x, shape [dims…], classes last; labels: [dims without the last].

    The loss is the mean over all points, the end of a training graph. A split of the classes all-reduces three numbers
    for each point forward (maximum, sum of exponentials, the label's logit). In the backward pass each device only
    needs its own.
    """
    extents = extents_of(name, x, dims)
    points, classes = dims[:-1], dims[-1]
    return Operator(
        name=name,
        kind="softmax_loss",
        dims=dims_of(extents),
        reads=(
            Access(tensor="x", shape=x, index_map=dims),
            Access(tensor="labels", shape=x[:-1], index_map=points, role=Role.INDEX),
        ),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        intermediates=(
            Intermediate(tensor="log_sums", shape=x[:-1], index_map=points, kept=1, working=3),
            # Forward, the exponentials; backward, the softmax and the labels of this device's classes.
            Intermediate(tensor="softmax", shape=x, index_map=dims, working=2),
        ),
        exchanges=(AllReduce(tensor="extremes", shape=x[:-1], index_map=points, over=(classes,), times=3),),
        body=Body(steps=(Step(result="loss", function="softmax_loss", operands=("x", "labels"), dims=dims),)),
    )
