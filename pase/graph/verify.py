"""`verify`: checks that every graph passes before anything is derived from it; and `Builder`, which builds graphs."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from math import isfinite, prod
from types import MappingProxyType

from pase.common.containers import connected
from pase.common.words import listed, short
from pase.errors import GraphError
from pase.graph.body import verify_body
from pase.graph.functions import FUNCTIONS as BODY_FUNCTIONS
from pase.graph.graph import Edge, Graph
from pase.graph.operator import (
    EPILOGUE,
    SCANNED,
    Access,
    AllReduce,
    AllToAll,
    DimIndex,
    Handoff,
    Indexed,
    Operator,
    Relayout,
    Role,
    Scalar,
    SliceOf,
    Window,
    access_dims,
    axis_dims,
    named_dims,
)
from pase.graph.operators.pointwise import ACTIVATIONS, FUNCTIONS
from pase.graph.operators.windows import POOLINGS
from pase.graph.precision import FLOAT32, Precision, precision_of


def verify(graph: Graph) -> Graph:
    """Return the graph; raise GraphError where shapes, accesses, edges or connectivity are wrong."""
    if not graph.operators:
        raise GraphError(f"graph {graph.name!r} is empty; a model needs at least one layer")
    name, count = Counter(operator.name for operator in graph.operators).most_common(1)[0]
    if count > 1:
        raise GraphError(f"{count} layers of graph {graph.name!r} are named {name!r}; names must be unique")
    for position in dict.fromkeys(graph.repeated):
        verify_operator(graph.operators[position])
    _verify_shared(graph)
    _verify_edges(graph)
    _verify_order(graph)
    _verify_connected(graph)
    return graph


def verify_operator(operator: Operator) -> None:
    """Raise GraphError where an operator's accesses do not fit its iteration space, or its attributes its kind."""
    where = f"layer {operator.name!r} ({operator.kind})"
    if not operator.dims:
        raise GraphError(f"{where} has no iteration dims; at least one is needed")
    if len(operator.extents) != len(operator.dims):
        raise GraphError(f"{where} names an iteration dim twice: {', '.join(d.name for d in operator.dims)}")
    for dim in operator.dims:
        if not isinstance(dim.extent, int) or dim.extent < 1:
            raise GraphError(
                f"{where}: dim {dim.name!r} has extent {dim.extent!r}; expected a whole number of 1 or more"
            )
    if not operator.writes:
        raise GraphError(f"{where} writes nothing")
    for access in (*operator.reads, *operator.writes):
        _verify_access(operator, access, where)
        _verify_role(operator, access, where)
    for exchange in operator.exchanges:
        _verify_access(operator, exchange, where)
        if isinstance(exchange, Relayout):
            _verify_access(operator, replace(exchange, index_map=exchange.read), where)
        named = exchange.over if isinstance(exchange, AllReduce | AllToAll) else ()
        named = (exchange.across,) if isinstance(exchange, Handoff) else named
        _verify_known(operator, named, f"{where}: exchange {exchange.tensor!r}")
        _verify_reads(operator, exchange.gradient_of, f"{where}: exchange {exchange.tensor!r}")
        if not 0 <= exchange.backward_times <= (exchange.times if exchange.gradient_of else 0):
            raise GraphError(
                f"{where}: exchange {exchange.tensor!r} takes place {exchange.times} times in a step, "
                f"{exchange.backward_times} of them with the gradients of inputs {exchange.gradient_of}"
            )
        if isinstance(exchange, AllToAll) and (exchange.copies < 1 or (exchange.excess or 0.0) < 0):
            raise GraphError(
                f"{where}: exchange {exchange.tensor!r} is of {exchange.copies} copies and {exchange.excess} rows "
                "above an equal share; expected 1 or more, and 0 or more"
            )
    for tensor in operator.intermediates:
        _verify_access(operator, tensor, where)
        if min(tensor.kept, tensor.working) < 0:
            raise GraphError(
                f"{where} keeps {tensor.kept} and {tensor.working} of {tensor.tensor!r}; expected 0 or more"
            )
    for work in operator.work:
        _verify_known(operator, tuple(d.dim if isinstance(d, SliceOf) else d for d in work.dims), f"{where}: work")
        for part in work.dims:
            if isinstance(part, SliceOf) and (problem := _extent_problem(operator, part, part.extent)):
                raise GraphError(f"{where}: work over a part of a dim, but {problem}")
        _verify_reads(operator, work.reads, f"{where}: work")
    _verify_known(operator, operator.unsplittable, f"{where}: unsplittable")
    if operator.is_fan_out:
        _verify_fan_out(operator, where)
    if operator.pipeline:
        _verify_known(operator, (operator.pipeline.stage, operator.pipeline.sequence), f"{where}: pipeline")
    _verify_attributes(operator)
    if operator.body:
        verify_body(
            operator.body,
            layer=operator.name,
            reads=[access.tensor for access in operator.reads],
            dims=tuple(operator.extents),
        )


def _verify_fan_out(operator: Operator, where: str) -> None:
    reads, writes = operator.reads, operator.writes
    is_one = len(reads) == len(writes) == 1 and reads[0].role is Role.ACTIVATION
    if not is_one or (reads[0].shape, reads[0].index_map) != (writes[0].shape, writes[0].index_map):
        raise GraphError(f"{where} hands on one tensor as it is; expected one input and the same for output")
    unused = set(operator.extents) - access_dims(reads[0])
    if len(unused) != 1 or set(reads[0].partial_over or ()) != unused or writes[0].partial_over != ():
        raise GraphError(
            f"{where} sums the gradient over the one dim that its tensor lacks; it lacks "
            f"{', '.join(sorted(unused)) or 'none'} of {', '.join(operator.extents)}"
        )


def _verify_known(operator: Operator, dims: tuple[str, ...], where: str) -> None:
    for dim in dims:
        if dim not in operator.extents:
            raise GraphError(f"{where} names dim {dim!r}; the iteration space is {', '.join(operator.extents)}")


def _verify_reads(operator: Operator, positions: Iterable[int], where: str) -> None:
    if any(not 0 <= i < len(operator.reads) for i in positions):
        raise GraphError(f"{where} names inputs {tuple(sorted(positions))}; there are {len(operator.reads)} reads")


def _verify_role(operator: Operator, access: Access, where: str) -> None:
    where = f"{where}: tensor {access.tensor!r}"
    _verify_known(operator, access.partial_over or (), where)
    if access.shared and access.role is not Role.PARAMETER:
        raise GraphError(f"{where} is shared as {access.shared!r}; only a parameter can be shared")
    if not access.is_trained and access.role is not Role.PARAMETER:
        raise GraphError(f"{where} is frozen; only a parameter can be")


def _verify_access(operator: Operator, access: Indexed, where: str) -> None:
    where = f"{where}: tensor {access.tensor!r}"
    if len(access.index_map) != len(access.shape):
        raise GraphError(
            f"{where} has {len(access.shape)} dims and {len(access.index_map)} axes; expected one axis for each dim"
        )
    _verify_known(operator, tuple(sorted(named_dims(access))), where)
    used = [dim for axis in access.index_map for dim in axis_dims(axis)]
    if len(set(used)) != len(used):
        raise GraphError(f"{where} indexes two dims by the same iteration dim: {', '.join(used)}")
    for position, (extent, axis) in enumerate(zip(access.shape, access.index_map, strict=True)):
        problem = _extent_problem(operator, axis, extent)
        if problem:
            raise GraphError(f"{where} of shape {access.shape}: dim {position} has extent {extent}, but {problem}")


def _extent_problem(operator: Operator, axis: DimIndex, extent: int) -> str:
    extents = operator.extents
    match axis:
        case None:
            return "" if extent >= 1 else "it must be at least 1"
        case Window():
            if axis.stride < 1 or axis.dilation < 1 or axis.pad < 0 or axis.beyond < 0:
                zeros = f"pad {axis.pad}, zeros after the end {axis.beyond}" if axis.beyond else f"pad {axis.pad}"
                return f"its window has stride {axis.stride}, dilation {axis.dilation}, {zeros}"
            last = (extents[axis.out] - 1) * axis.stride - axis.pad
            return "" if last < extent + axis.beyond else f"window {extents[axis.out]} starts at {last}, past its end"
        case SliceOf():
            inside = axis.offset >= 0 and axis.offset + axis.extent <= extents[axis.dim]
            if not inside:
                piece = f"[{axis.offset}, {axis.offset + axis.extent})"
                return f"the part {piece} is not within {axis.dim} = {extents[axis.dim]}"
            return "" if extent == axis.extent else f"its part has {axis.extent}"
        case _:
            expected = prod(extents[dim] for dim in axis_dims(axis))
            return "" if extent == expected else f"{'·'.join(axis_dims(axis))} = {expected}"


def _verify_shared(graph: Graph) -> None:
    known: dict[str, tuple[str, Access]] = {}
    for operator in graph.operators:
        for access in operator.parameters:
            if not access.shared:
                continue
            first, own = known.setdefault(access.shared, (operator.name, access))
            both = f"layers {first!r} and {operator.name!r} share parameter {access.shared!r}, but one"
            if own.size != access.size:
                raise GraphError(f"{both} has {own.size} values of it and the other {access.size}")
            if own.is_trained != access.is_trained:
                raise GraphError(f"{both} trains it and the other does not")


def _verify_edges(graph: Graph) -> None:
    fed: set[tuple[str, int]] = set()
    for edge in graph.edges:
        where = f"edge from {edge.producer!r} to {edge.consumer!r}"
        for end in (edge.producer, edge.consumer):
            if end not in graph.index:
                raise GraphError(f"{where}: there is no layer {end!r} in graph {graph.name!r}")
        producer, consumer = graph[edge.producer], graph[edge.consumer]
        if not 0 <= edge.output < len(producer.writes):
            raise GraphError(f"{where}: output {edge.output} does not exist; there are {len(producer.writes)}")
        if not 0 <= edge.input < len(consumer.reads):
            raise GraphError(f"{where}: input {edge.input} does not exist; there are {len(consumer.reads)}")
        read, written = consumer.reads[edge.input], producer.writes[edge.output]
        if read.role is Role.PARAMETER:
            raise GraphError(
                f"{where}: {read.tensor!r} is a parameter; an edge can only feed an activation or an index"
            )
        if read.size != written.size:
            raise GraphError(
                f"{where}: the producer writes shape {written.shape}, the consumer reads shape {read.shape}"
            )
        if (edge.consumer, edge.input) in fed:
            raise GraphError(f"{where}: input {edge.input} has two producers")
        fed.add((edge.consumer, edge.input))


def _verify_order(graph: Graph) -> None:
    predecessors: dict[str, set[str]] = {operator.name: set() for operator in graph.operators}
    for edge in graph.edges:
        predecessors[edge.consumer].add(edge.producer)
    try:
        tuple(TopologicalSorter(predecessors).static_order())
    except CycleError as error:
        raise GraphError(
            f"graph {graph.name!r} has a cycle: {' -> '.join(error.args[1])}; a model must be acyclic"
        ) from None
    for edge in graph.edges:
        if graph.index[edge.producer] >= graph.index[edge.consumer]:
            raise GraphError(
                f"layer {edge.consumer!r} stands before {edge.producer!r}, which feeds it; order them topologically"
            )


def _verify_connected(graph: Graph) -> None:
    first, *others = connected(graph.index, ((edge.producer, edge.consumer) for edge in graph.edges))
    if others:
        raise GraphError(
            f"graph {graph.name!r} is not connected: {sum(map(len, others))} of {len(graph.operators)} layers, "
            f"{others[0][0]!r} the first, share no path with {first[0]!r}; search each part on its own"
        )


# -- attributes: which ones each kind of operator may have, and their types; one line for each kind with attributes
#
# Kinds that are not listed belong to other front ends: no program is emitted for them, and their attributes are
# unknown. The key is the kind, not the body: plan files without bodies have attributes, too.


@dataclass(frozen=True, slots=True)
class Attribute:
    """Constraint on an attribute: `expected` describes it in messages, `fits` checks a value of some operator."""

    expected: str
    fits: Callable[[Operator, Scalar], bool]


def _one_of(*words: str) -> Attribute:
    shown = ", ".join(repr(word) for word in words)
    return _text(f"one of {shown}", lambda _, value: value in words)


def _whole(fewest: int) -> Attribute:
    return Attribute(
        f"a whole number of {fewest} or more",
        lambda _, value: isinstance(value, int) and not isinstance(value, bool) and value >= fewest,
    )


def _text(expected: str, fits: Callable[[Operator, str], bool]) -> Attribute:
    return Attribute(expected, lambda operator, value: isinstance(value, str) and fits(operator, value))


_FLAG = Attribute("true or false", lambda _, value: isinstance(value, bool))
_RATE = Attribute("a number from 0.0 to below 1.0", lambda _, value: isinstance(value, float) and 0 <= value < 1)
_NUMBER = Attribute("a number with a decimal point", lambda _, value: isinstance(value, float) and isfinite(value))
_DIM = _text("one of its dims", lambda operator, value: value in operator.extents)
_LABEL = _text("a line of at most 60 characters", lambda _, value: value == short(value))
_NAMES = _text(
    "names of functions that front ends have, with commas between them",
    lambda _, value: not value or IMPORTED_FUNCTIONS.issuperset(value.split(",")),
)

OTHER_FUNCTION = "other"
"""Name of a front end's function that is not in IMPORTED_FUNCTIONS."""

_FURTHER_FUNCTIONS = """
    add_of_multiple addcdiv addcmul all and angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax
    argmin atan2 bernoulli bessel_i0e bessel_i1e binary_cross_entropy bitwise_and bitwise_or bounded_relu cast cbrt
    clz complex conj copysign count deg2rad deviation digamma divide_no_nan eq erf_inv erfinv exp2 exponential flip
    fliplr flipud float_power fmax fmin fmod frac ge gt hard_shrink hard_silu hard_tanh hardsigmoid hardswish
    hardtanh heaviside hypot i0 igamma igammac imag is_finite isclose isfinite isinf isnan le lerp lgamma log10 log2
    logaddexp logaddexp2 logical_xor logit logsum logsumexp lt masked_fill mod nan_to_num ne nextafter norm not
    ones_like or polar polygamma population_count prod rad2deg random_gamma_grad real regularized_incomplete_beta
    rem remainder roll rotary rrelu sgn shift shift_left shift_right_arithmetic shift_right_logical shrink signbit
    sinc soft_shrink sparse_plus sparse_sigmoid squareplus subtract_of_multiple sum_of_squares threshold tril trilu
    triu trunc variance xlogy xor zeros_like zeta
"""

IMPORTED_FUNCTIONS: frozenset[str] = frozenset({*BODY_FUNCTIONS, OTHER_FUNCTION, *_FURTHER_FUNCTIONS.split()})
"""Names of elementwise functions and of reductions that front ends give to imported operators."""

_ACTIVATED = {"activation": _one_of("", *ACTIVATIONS)}
_NORMALISATION = {"epsilon": _NUMBER, "groups": _whole(1)}

ATTRIBUTES: Mapping[str, Mapping[str, Attribute]] = MappingProxyType(
    {
        kind: attributes
        for kinds, attributes in (
            ("add_parameter contract embedding experts fan_out global_pool outputs padded piece reorder", {}),
            ("softmax_loss", {}),
            ("attention", {"causal": _FLAG}),
            ("batch_norm layer_norm", {**_ACTIVATED, **_NORMALISATION}),
            ("concat gather", {"along": _DIM}),
            ("conv1d conv2d conv3d", {**_ACTIVATED, "groups": _whole(1)}),
            ("dense", _ACTIVATED),
            ("dropout", {"rate": _RATE}),
            ("elementwise", {"function": _one_of(*FUNCTIONS), **_ACTIVATED}),
            ("group_norm instance_norm response_norm rms_norm statistics", _NORMALISATION),
            ("lstm", {"layers": _whole(1), "units": _whole(1)}),
            ("opaque", {"function": _LABEL}),
            ("pointwise reduction", {"function": _NAMES}),
            ("pool1d pool2d pool3d", {"reduction": _one_of(*POOLINGS), "count_padding": _FLAG}),
            (
                "recurrent",
                {"cell": _one_of("", "lstm", "gru", "rnn"), "layers": _whole(1), "units": _whole(1)}
                | {"directions": _whole(1)},
            ),
            ("softmax", {"over": _DIM, "is_log": _FLAG}),
            ("transposed_convolution", {"groups": _whole(1)}),
        )
        for kind in kinds.split()
    }
)
"""Constraints on the attributes of each kind, by name; all attributes are optional."""

IMPORTED: Mapping[str, Attribute] = MappingProxyType({EPILOGUE: _NAMES, SCANNED: _LABEL})
"""Attributes that imported operators of every kind may have in addition."""


def _verify_attributes(operator: Operator) -> None:
    """Raise GraphError where an operator's kind does not have an attribute, or its value is invalid."""
    own = ATTRIBUTES.get(operator.kind)
    for name, value in operator.attributes:
        attribute = IMPORTED.get(name) or (own or {}).get(name)
        where = f"layer {short(operator.name)!r} ({short(operator.kind)}): attribute {short(name)!r}"
        if attribute is None and own is not None:
            known = listed(tuple(own), most=len(own)) or "none"
            raise GraphError(f"{where} is not an attribute of its kind; expected {known}")
        if attribute is not None and not attribute.fits(operator, value):
            raise GraphError(f"{where} is {short(repr(value))}; expected {attribute.expected}")


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a network under construction; `producer` is None for an input of the network."""

    shape: Shape
    producer: str | None = None
    output: int = 0


OperatorFactory = Callable[..., Operator]
"""A function that creates an operator from its name, the shapes of its inputs and its options."""


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
        """Return a tensor that is an input of the network, from the training data."""
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
        """Return a view of the tensor with another shape: not a layer, as edges see through reshapes."""
        if prod(shape) != prod(tensor.shape):
            raise GraphError(f"a tensor of shape {tensor.shape} cannot be reshaped to {shape}: sizes differ")
        return replace(tensor, shape=shape)

    def build(self, arguments: Mapping[str, Scalar] | None = None) -> Graph:
        """Return the verified graph; `arguments` are those that the model was built with, recorded in plans."""
        return verify(
            Graph(
                name=self._name,
                operators=tuple(self._operators),
                edges=tuple(self._edges),
                arguments=tuple((arguments or {}).items()),
                precision=self._precision,
            )
        )
