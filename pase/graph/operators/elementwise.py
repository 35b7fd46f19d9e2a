"""`elementwise`: operators that work point by point on one or more tensors of one shape."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, Role
from pase.graph.body import POINTWISE, Body, Step
from pase.graph.operator import Operator
from pase.graph.operators.activations import check_activation, finished

FUNCTIONS = ("add", "multiply", "relu", "gelu", "tanh")


def elementwise(
    name: str, *inputs: tuple[int, ...], dims: tuple[str, ...], function: str = "add", activation: str = ""
) -> Operator:
    """Return ``y = activation(function(x0, x1, …))``, point by point; inputs: shapes [dims…], all alike.

    function: one of FUNCTIONS. Raises GraphError where it is another, or where shapes differ.
    """
    if function not in FUNCTIONS:
        raise GraphError(f"layer {name!r}: unknown function {function!r}; expected one of {', '.join(FUNCTIONS)}")
    if not inputs or len(set(inputs)) != 1 or len(inputs[0]) != len(dims):
        raise GraphError(
            f"layer {name!r} reads shapes {inputs}; expected one or more of one shape, dims {', '.join(dims)}"
        )
    shape = inputs[0]
    tensors = tuple(f"x{i}" for i in range(len(inputs)))
    fewest, most = POINTWISE[function]
    problem = "" if len(inputs) <= most else f"it applies {function!r} to {len(inputs)} tensors; expected one"
    # The sum, and the product, of one tensor is the tensor itself.
    step = Step(result="values", function=function if len(inputs) >= fewest else "identity", operands=tensors)
    body = Body(problem=problem) if problem else finished(step, activation=activation)
    return Operator(
        name=name,
        kind="elementwise",
        dims=tuple(Dim(n, e) for n, e in zip(dims, shape, strict=True)),
        reads=tuple(Access(tensor=tensor, shape=shape, index_map=dims) for tensor in tensors),
        writes=(Access(tensor="y", shape=shape, index_map=dims),),
        body=body,
        attributes=(("function", function), ("activation", check_activation(name, activation))),
    )


def add_parameter(name: str, x: tuple[int, ...], *, dims: tuple[str, ...], over: tuple[str, ...]) -> Operator:
    """Return ``y[dims] = x[dims] + p[over]``: a trained tensor added to every point (a learned position embedding)."""
    if len(x) != len(dims) or not set(over) <= set(dims):
        raise GraphError(
            f"layer {name!r} reads shape {x}; expected dims {', '.join(dims)}, "
            f"of which {', '.join(over)} have a parameter"
        )
    extents = dict(zip(dims, x, strict=True))
    parameter = Access(tensor="p", shape=tuple(extents[n] for n in over), index_map=over, role=Role.PARAMETER)
    return Operator(
        name=name,
        kind="add_parameter",
        dims=tuple(Dim(n, e) for n, e in extents.items()),
        reads=(Access(tensor="x", shape=x, index_map=dims), parameter),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        body=Body(steps=(Step(result="sums", function="add", operands=("x", "p")),)),
    )
