"""`softmax_loss`: softmax over the classes and the mean cross-entropy with the labels, the end of a training graph."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, Role
from pase.graph.body import Body, Step
from pase.graph.operator import AllReduce, Intermediate, Operator


def softmax_loss(name: str, x: tuple[int, ...], *, dims: tuple[str, ...] = ("b", "n")) -> Operator:
    """Return softmax cross-entropy of logits x, shape [dims…], classes last; labels: [dims without the last].

    The loss is the mean over all points. A split of the classes all-reduces three numbers for each point
    forward (maximum, sum of exponentials, the label's logit); backward, each device needs only its own classes.
    """
    if len(x) != len(dims):
        raise GraphError(f"layer {name!r} reads shape {x}; expected dims {', '.join(dims)}")
    points, classes = dims[:-1], dims[-1]
    return Operator(
        name=name,
        kind="softmax_loss",
        dims=tuple(Dim(n, e) for n, e in zip(dims, x, strict=True)),
        reads=(
            Access(tensor="x", shape=x, index_map=dims),
            Access(tensor="labels", shape=x[:-1], index_map=points, role=Role.INDEX),
        ),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        intermediates=(
            Intermediate(tensor="log_sums", shape=x[:-1], index_map=points, kept=1, working=3),
            # The powers, forward; the softmax and the labels, one of their classes each, backward.
            Intermediate(tensor="softmax", shape=x, index_map=dims, working=2),
        ),
        exchanges=(AllReduce(tensor="extremes", shape=x[:-1], index_map=points, over=(classes,), times=3),),
        body=Body(steps=(Step(result="loss", function="softmax_loss", operands=("x", "labels"), dims=dims),)),
    )
