"""Convert graphs to JSON documents and back; reading validates every field and the whole graph."""

import json
from collections.abc import Hashable
from dataclasses import replace
from math import isinf
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType, field, structs

from pase.common.documents import DocumentSource
from pase.common.structs import Document, Finite, Integer, Number, Positive, Scalars, Whole, describes, read, value_of
from pase.errors import GraphError
from pase.graph.body import Body, Borrowed, Constant, InnerDim, ModelInput, ModelOutput, Step
from pase.graph.graph import Edge, Graph
from pase.graph.operator import (
    Access,
    AllReduce,
    AllToAll,
    Dim,
    Exchange,
    Handoff,
    Intermediate,
    Operator,
    Pipeline,
    Relayout,
    Role,
    SliceOf,
    Window,
    Work,
)
from pase.graph.precision import OF_ITEMSIZE
from pase.graph.verify import verify

_RECIPE = "forward"
"""Attribute in which old plans stored the computation of a layer, before layers had bodies."""

_AXIS = "a dim, a list of dims, null, or an object with 'window' or 'part'"

# -- tensors

Dims = Annotated[dict[str, Positive], Meta(min_length=1)]
Names = tuple[str, ...]
Shape = tuple[Positive, ...]


@describes(SliceOf)
class PartDocument(Document):
    """A slice of an iteration dim."""

    part: SliceOf
    """The points from offset on, as many as extent gives."""

    @classmethod
    def of(cls, value: SliceOf, **others: Any) -> Self:
        return cls(part=value, **others)

    def value(self, **others: Any) -> SliceOf:
        return self.part


@describes(Window)
class WindowDocument(Document):
    """A sliding window: output o and kernel point k read element o · stride + k · dilation - pad."""

    out: str
    """Iteration dim of the outputs."""
    kernel: str
    """Iteration dim of the kernel."""
    stride: Positive
    """Elements from one output to the next."""
    dilation: Positive
    """Elements from one kernel point to the next."""
    pad: Whole
    """Number of zeros before the first element."""
    beyond: Whole = 0
    """Number of zeros after the last element at which a window may start; 0 if absent."""


@describes(Window)
class AxisDocument(Document):
    """A sliding window or a slice of an iteration dim."""

    window: WindowDocument | UnsetType = UNSET
    """A sliding window."""
    part: SliceOf | UnsetType = UNSET
    """The points from offset on, as many as extent gives."""

    def __post_init__(self) -> None:
        if (self.window is UNSET) == (self.part is UNSET):
            raise ValueError(f"is not an axis; expected {_AXIS}")

    @classmethod
    def of(cls, value: Window, **others: Any) -> Self:
        return cls(window=WindowDocument.of(value), **others)

    def value(self, **others: Any) -> Any:
        return value_of(self.window or self.part)


Axes = tuple[
    Annotated[
        str | Names | AxisDocument | None,
        Meta(title=_AXIS),
    ],
    ...,
]


@describes(Access)
class AccessDocument(Document):
    """One tensor that an operator reads or writes."""

    tensor: str
    """Its name within the operator."""
    shape: Shape
    """Extent of each dim of the whole tensor."""
    index_map: Axes = field(name="axes")
    """How each dim of the tensor is indexed, one entry per dim."""
    role: Role
    """The role of the tensor for the operator."""
    partial_over: Names | UnsetType = UNSET
    """Dims whose split leaves partial sums of the tensor, or of a read's gradient; if absent, every dim that the access
    lacks."""
    shared: str = ""
    """Name of a parameter that several operators share."""
    is_trained: bool = True
    """Whether the parameter is trained; false if it is frozen."""
    batch: Annotated[tuple[Positive, Positive], Meta(title="blocks and examples")] | UnsetType = UNSET
    """Position of the batch in an input of the network: number of row-major blocks, and of examples in each."""


@describes(Intermediate)
class IntermediateDocument(Document):
    """A temporary tensor of a layer."""

    tensor: str
    """Its name within the operator."""
    shape: Shape
    """Number of elements along each dim of the whole tensor."""
    index_map: Axes = field(name="axes")
    """How each dim of the tensor is indexed, as many as shape has."""
    kept: Whole
    """Number of copies saved for the backward pass."""
    working: Whole
    """Number of further copies that exist at the same time while the layer computes."""


class ExchangeDocument(Document, tag_field="pattern", kw_only=True):
    """Communication inside an operator."""

    tensor: str
    """Name of the tensor."""
    shape: Shape
    """Number of elements along each dim."""
    times: Positive
    """Number of times in one training step, forward and backward together."""
    backward_times: Whole | UnsetType = UNSET
    """Number of these that only occur if one of the reads in gradient_of has a gradient; 0 if absent."""
    gradient_of: tuple[Whole, ...] = ()
    """Reads, by position, whose gradients it is a part of."""
    index_map: Axes = field(name="axes")
    """How each dim of the tensor is indexed."""

    @classmethod
    def of(cls, value: Exchange, **others: Any) -> Self:
        return super().of(value, backward_times=value.backward_times if value.gradient_of else UNSET, **others)


@describes(AllReduce)
class AllReduceDocument(ExchangeDocument, tag="all_reduce", kw_only=True):
    """A tensor that is reduced inside the operator."""

    over: Names
    """Dims whose split makes the exchange necessary."""


@describes(Relayout)
class RelayoutDocument(ExchangeDocument, tag="relayout", kw_only=True):
    """A tensor that is written in one layout and read in another."""

    index_map: Axes = field(name="written")
    """How each dim is indexed where the tensor is written."""
    read: Axes
    """How each dim is indexed where the tensor is read."""
    is_ring: bool = False
    """Whether parts circulate in a ring of devices, overlapped with the computation; false if absent."""


@describes(Handoff)
class HandoffDocument(ExchangeDocument, tag="handoff", kw_only=True):
    """A tensor that is sent to the next part along a split dim."""

    across: str
    """Dim along which parts send to the next part."""


@describes(AllToAll)
class AllToAllDocument(ExchangeDocument, tag="all_to_all", kw_only=True):
    """Rows that are routed to devices by the data (expert parallelism)."""

    over: Names
    """Dims whose split makes the exchange necessary."""
    copies: Positive = 1
    """Number of rows that may be copies of one row, which is sent to a device once; 1 if absent."""
    excess: Number | UnsetType = UNSET
    """Excess of the devices with most rows over an equal share, as a fraction of it; absent for rows in any order."""


@describes(Work)
class WorkDocument(Document):
    """Work done once for each point of some iteration dims."""

    dims: tuple[Annotated[str | PartDocument, Meta(title="a dim, or an object with 'part'")], ...]
    """The dims that it runs over."""
    flop_per_point: Number
    """FLOP of the forward pass for each point."""
    inputs: tuple[Annotated[Whole | tuple[Whole, ...], Meta(title="the position of a read, or an array of them")], ...]
    """For each operand, the read or the reads that it is computed from: if one of them has a gradient, the backward
    pass does the same work again."""
    contraction: bool
    """Whether it is multiply-add work, not elementwise work."""

    @classmethod
    def of(cls, value: Work, **others: Any) -> Self:
        # Converted to float even where it was written as an integer: equal graphs have equal documents.
        return super().of(value, flop_per_point=float(value.flop_per_point), **others)


# -- what operators compute


class InfinityDocument(Document):
    """An infinite number, which JSON cannot represent."""

    number: Literal["inf", "-inf"]
    """Its sign."""

    @classmethod
    def of(cls, value: float, **others: Any) -> Self:
        return cls(number="inf" if value > 0 else "-inf", **others)

    def value(self, **others: Any) -> float:
        return float(self.number)


Operand = Annotated[str | Finite | InfinityDocument, Meta(title="the name of a tensor, or a number")]
Option = Annotated[str | Integer | Finite | bool | tuple[Whole, ...], Meta(title="text, a number, or true or false")]


@describes(Step)
class StepDocument(Document):
    """One tensor and the function that computes it."""

    result: str
    """Its name within the layer."""
    function: str
    """Function that computes it."""
    operands: tuple[Operand, ...]
    """Tensors by name, and numbers; an infinite number as an object."""
    dims: Names = ()
    """Iteration dims that the function is over, or that the result has."""
    options: dict[str, Option] = field(default_factory=dict)
    """Further options of the function."""

    @classmethod
    def of(cls, value: Step, **others: Any) -> Self:
        operands = (InfinityDocument.of(x) if isinstance(x, float) and isinf(x) else x for x in value.operands)
        return super().of(value, operands=tuple(operands), options=dict(value.options), **others)

    def value(self, **others: Any) -> Any:
        return super().value(options=tuple(self.options.items()), **others)


@describes(InnerDim)
class InnerDimDocument(Document):
    """A dim of a body that is not in the iteration space."""

    name: str
    """Its name within the layer."""
    extent: Positive
    """Number of points."""
    tensor: str = ""
    """Weight whose dim it is, which every device holds completely."""
    axis: Whole | UnsetType = UNSET
    """Position of the dim in that weight."""

    @classmethod
    def of(cls, value: InnerDim, **others: Any) -> Self:
        return super().of(value, axis=value.axis if value.tensor else UNSET, **others)


@describes(Body)
class OwnBodyDocument(Document):
    """The computation of a layer, step by step; the last step gives its output."""

    steps: tuple[StepDocument, ...]
    """Tensors in the order in which they are computed."""
    constants: tuple[Constant, ...] = ()
    """Tensors that are not trained."""
    inputs: tuple[ModelInput, ...] = ()
    """Inputs of the model that the layer reads."""
    outputs: tuple[ModelOutput, ...] = ()
    """Outputs of the model that the layer computes."""
    inner: tuple[InnerDimDocument, ...] = ()
    """Dims that steps use in addition to the iteration space; they cannot be split."""
    problem: str = ""
    """Why the computation cannot be expressed as steps."""
    untrained: str = ""
    """Why the steps differ from those of training."""
    others: Names = ()
    """Further results of the layer, in the order of its writes; empty for one that is not expressed."""
    borrowed: tuple[Borrowed, ...] = ()
    """Integer tensors computed by other layers, which every device holds completely."""


@describes(Body)
class BodyDocument(OwnBodyDocument):
    """The computation of a layer, step by step; the last step gives its output."""

    own: OwnBodyDocument | UnsetType = UNSET
    """Body for the model's own framework, where only that computes it, or computes it differently."""


# -- graphs


@describes(Operator)
class OperatorDocument(Document):
    """A layer: an iteration space and how it indexes its tensors."""

    name: str
    """Name, unique in the graph."""
    kind: str
    """Kind of the layer, such as conv2d."""
    dims: Dims
    """Iteration space: extent of each iteration dim, in order."""
    reads: tuple[AccessDocument, ...]
    """Tensors that it reads: inputs and parameters."""
    writes: Annotated[tuple[AccessDocument, ...], Meta(min_length=1)]
    """Tensors that it writes."""
    work: tuple[WorkDocument, ...] = ()
    """Floating-point work."""
    unsplittable: Names = ()
    """Dims that must not be split."""
    exchanges: tuple[AllReduceDocument | RelayoutDocument | HandoffDocument | AllToAllDocument, ...] = ()
    """Communication within the layer that does not follow from the accesses."""
    pipeline: Pipeline | UnsetType = UNSET
    """Dims whose splits run as a wavefront: each part waits for the previous one in both dims."""
    intermediates: tuple[IntermediateDocument, ...] = ()
    """Temporary tensors of the layer."""
    body: BodyDocument | UnsetType = UNSET
    """The computation of the layer, if it is expressed as steps."""
    attributes: Scalars = field(default_factory=dict)
    """Further attributes for executors, such as the activation."""

    def __post_init__(self) -> None:
        if _RECIPE in self.attributes:
            raise ValueError(
                f"has the attribute {_RECIPE!r}: the plan is an older version's, which described as text what layers "
                "compute; search again"
            )

    @classmethod
    def of(cls, value: Operator, **others: Any) -> Self:
        return super().of(value, dims=dict(value.extents), attributes=dict(value.attributes), **others)

    def value(self, **others: Any) -> Any:
        return super().value(
            dims=tuple(Dim(*item) for item in self.dims.items()), attributes=tuple(self.attributes.items()), **others
        )


def _unnamed(operator: OperatorDocument) -> Hashable:
    """Return a key that is equal for layers that differ in their names only."""
    unnamed = structs.replace(operator, name="")
    try:
        return msgspec.json.encode(unnamed)
    except UnicodeEncodeError:
        # Python's JSON also accepts surrogates.
        return repr(unnamed)


@describes(Graph)
class GraphDocument(Document):
    """A weakly connected, directed acyclic graph of operators."""

    name: str
    """Name of the model."""
    arguments: Scalars
    """Arguments that the model was built with."""
    word_bytes: Annotated[Literal[2, 4, 8], Meta(extra_json_schema={"type": "integer"})]
    """Size of an element of every float tensor that the model itself holds, in bytes."""
    operators: Annotated[tuple[OperatorDocument, ...], Meta(min_length=1)]
    """The vertices, in topological order."""
    edges: tuple[Annotated[tuple[str, Whole, str, Whole], Meta(title="producer, output, consumer, input")], ...]
    """The tensors that flow between operators: producer, position among its writes, consumer, position among its
    reads."""
    framework: str = ""
    """Framework of the model: torch, jax, keras or onnx; empty for a network built with this package."""
    call: str = ""
    """Arguments of the model call, as JSON, with shapes and types in place of tensors; for torch only."""
    untrained: str = ""
    """Why an emitted program would train the model differently from the model itself; empty if it would not."""

    @classmethod
    def of(cls, value: Graph, **others: Any) -> Self:
        edges = tuple((edge.producer, edge.output, edge.consumer, edge.input) for edge in value.edges)
        return super().of(
            value, arguments=dict(value.arguments), word_bytes=value.precision.itemsize, edges=edges, **others
        )

    def value(self, **others: Any) -> Graph:
        """Return the verified graph; GraphError where the document does not describe a valid one."""
        first: dict[Hashable, Operator] = {}
        operators = list[Operator]()
        for document in self.operators:
            # Repeated layers, which large models consist of, are converted once.
            key = _unnamed(document)
            if key not in first:
                first[key] = document.value()
            operator = first[key]
            operators.append(operator if operator.name == document.name else replace(operator, name=document.name))
        graph = Graph(
            name=self.name,
            arguments=tuple(self.arguments.items()),
            precision=OF_ITEMSIZE[self.word_bytes],
            operators=tuple(operators),
            edges=tuple(Edge(producer=u, output=i, consumer=v, input=j) for u, i, v, j in self.edges),
            framework=self.framework,
            call=self.call,
            untrained=self.untrained,
        )
        return verify(graph)


def canonical_text(graph: GraphDocument) -> str:
    """Return a graph as JSON with sorted keys, without white space and with every character beyond ASCII escaped."""
    known: dict[Hashable, dict[str, str]] = {}
    operators = []
    for operator in graph.operators:
        # Repeated layers are written once.
        key = _unnamed(operator)
        if key not in known:
            known[key] = _members(operator)
        operators.append(_object({**known[key], "name": _text(operator.name)}))
    return _object({**_members(structs.replace(graph, operators=())), "operators": f"[{','.join(operators)}]"})


def _members(document: Document) -> dict[str, str]:
    return {name: _text(member) for name, member in msgspec.to_builtins(document).items()}


def _object(members: dict[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{members[name]}' for name in sorted(members)) + "}"


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def graph_document(graph: Graph) -> dict[str, Any]:
    """Return the JSON form of a graph; `graph_from_document` returns an equal one."""
    return GraphDocument.of(graph).builtins()


def graph_from_document(document: object, source: DocumentSource) -> Graph:
    """Return the verified graph of a document; the source's error names the invalid field."""
    found = read(GraphDocument, document, source)
    try:
        return found.value()
    except GraphError as error:
        raise source.fail("", f"is not a valid graph: {error}") from None
