"""`Builder`: write a network as a sequence of layers and get a verified graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from pase.errors import GraphError
from pase.graph.graph import Edge, Graph
from pase.graph.operator import Operator, Scalar
from pase.graph.precision import FLOAT32, Precision, precision_of
from pase.graph.verify import verify, verify_operator

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor while a network is written; producer: None for the network's own input."""

    shape: Shape
    producer: str | None = None
    output: int = 0


OperatorFactory = Callable[..., Operator]
"""A function that makes an operator from its name, the shapes of its inputs and its options."""


class Builder:
    """Collects operators and edges.

    Examples:
        >>> net = Builder("net")
        >>> x = net.input((32, 784))
        >>> x = net.add(dense, "fc1", x, out=(("n", 128),), activation="relu")
        >>> graph = net.build()
    """

    def __init__(self, name: str, *, precision: Precision | str = FLOAT32) -> None:
        self._name = name
        self._precision = precision_of(precision)
        self._operators: list[Operator] = []
        self._edges: list[Edge] = []

    def input(self, shape: Shape) -> Tensor:
        """Return a tensor that the training data supplies."""
        return Tensor(shape=shape)

    def add(self, factory: OperatorFactory, name: str, *inputs: Tensor, **options: object) -> Tensor:
        """Append a layer and return its first output; its first reads are the inputs, in order."""
        operator = factory(name, *(tensor.shape for tensor in inputs), **options)
        verify_operator(operator)
        self._operators.append(operator)
        for position, tensor in enumerate(inputs):
            if tensor.producer is not None:
                self._edges.append(Edge(producer=tensor.producer, output=tensor.output, consumer=name, input=position))
        return Tensor(shape=operator.writes[0].shape, producer=name)

    def reshape(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Return a view of the tensor with another shape: no layer, the edge is seen through."""
        if prod(shape) != prod(tensor.shape):
            raise GraphError(f"a tensor of shape {tensor.shape} cannot be seen as {shape}: sizes differ")
        return replace(tensor, shape=shape)

    def build(self, arguments: Mapping[str, Scalar] | None = None) -> Graph:
        """Return the verified graph; arguments: what the model was built with, recorded in plans."""
        return verify(
            Graph(
                name=self._name,
                operators=tuple(self._operators),
                edges=tuple(self._edges),
                arguments=tuple((arguments or {}).items()),
                precision=self._precision,
            )
        )
