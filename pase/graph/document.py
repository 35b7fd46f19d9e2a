"""A graph as a JSON document, and back; reading checks every field and the whole graph."""

from dataclasses import replace
from math import isfinite
from operator import attrgetter
from sys import float_info
from typing import Any

from pase.common.codecs import (
    FLAG,
    NULL,
    NUMBER,
    POSITIVE,
    SCALAR,
    TEXT,
    WHOLE,
    Codec,
    array,
    choice,
    constant,
    defined,
    record,
    row,
    table,
    union,
    wholes,
    wrapped,
)
from pase.common.documents import Field
from pase.errors import GraphError
from pase.graph.body import Body, Borrowed, Constant, InnerDim, ModelInput, ModelOutput, Operand, Step
from pase.graph.graph import Edge, Graph
from pase.graph.operator import (
    Access,
    AllReduce,
    AllToAll,
    Dim,
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
from pase.graph.precision import OF_ITEMSIZE, Precision
from pase.graph.verify import verify

_RECIPE = "forward"
"""The attribute in which plans held what layers compute before they had bodies."""


def _attributes(document: Field) -> tuple[tuple[str, Any], ...]:
    if isinstance(document.value, dict) and _RECIPE in document.value:
        raise document.fail(
            f"has {_RECIPE!r}: the plan is an older version's, which told as text what layers compute; search again"
        )
    return SCALARS.read(document)


def _operand(document: Field) -> Operand:
    match document.value:
        case {"number": "inf" | "-inf" as infinity}:
            return float(infinity)
        case str():
            return document.text()
        case bool():
            pass
        case int() | float() as found if abs(found) <= float_info.max:
            return float(found)
    raise document.fail("is no operand; expected the name of a tensor, or a number")


def _operand_document(operand: Operand) -> Any:
    # JSON has no infinity.
    return operand if isinstance(operand, str) or isfinite(operand) else {"number": str(float(operand))}


# -- tensors

SCALARS = defined("scalars", "Named values", table(SCALAR)).mapped(lambda found: tuple(found.items()), dict)
DIMS = defined("dims", "Iteration space", table(POSITIVE, minProperties=1))
_NAMES = defined("names", "Names of dims", array(TEXT))
_SHAPE = defined("shape", "Shape", wholes(1))
_PART = wrapped("part", record(SliceOf, dim=TEXT, offset=WHOLE, extent=POSITIVE))
_WINDOW = wrapped(
    "window",
    record(Window, out=TEXT, kernel=TEXT, stride=POSITIVE, dilation=POSITIVE, pad=WHOLE, beyond=WHOLE.optional(0)),
)
_AXIS = union(
    "axis", "a dim, a list of dims, null, or an object with 'window' or 'part'", NULL, TEXT, _NAMES, _WINDOW, _PART
)
_AXES = defined("axes", "Axes", array(_AXIS))
_ACCESS_RECORD = record(
    Access,
    tensor=TEXT,
    shape=_SHAPE,
    axes=_AXES.of("index_map"),
    role=choice(Role, Role),
    partial_over=_NAMES.optional(None),
    shared=TEXT.optional(""),
    is_trained=FLAG.optional(True),
    batch=row("blocks and examples", POSITIVE, POSITIVE).optional(None),
)
_ACCESS = defined("access", "Access", _ACCESS_RECORD)
_INTERMEDIATE = record(Intermediate, tensor=TEXT, shape=_SHAPE, axes=_AXES.of("index_map"), kept=WHOLE, working=WHOLE)


def _exchange(of: type[Any], pattern: str, **own: Codec[Any]) -> Codec[Any]:
    back = WHOLE.optional(0, beside="gradient_of")
    common = {"pattern": constant(pattern), "tensor": TEXT, "shape": _SHAPE, "times": POSITIVE, "backward_times": back}
    return record(of, **common, gradient_of=wholes().optional(()), **own)


_EXCHANGE = union(
    "exchange",
    "one of all_reduce, relayout, handoff, all_to_all",
    _exchange(AllReduce, "all_reduce", axes=_AXES.of("index_map"), over=_NAMES),
    _exchange(Relayout, "relayout", written=_AXES.of("index_map"), read=_AXES, is_ring=FLAG.optional(False)),
    _exchange(Handoff, "handoff", axes=_AXES.of("index_map"), across=TEXT),
    _exchange(
        AllToAll,
        "all_to_all",
        axes=_AXES.of("index_map"),
        over=_NAMES,
        copies=POSITIVE.optional(1),
        excess=NUMBER.mapped(float, float).optional(None),
    ),
    tag="pattern",
)
_WORK = record(
    Work,
    dims=array(union("dim of work", "a dim, or an object with 'part'", TEXT, _PART)),
    # As a float even where it was written as a whole number: equal graphs have equal documents.
    flop_per_point=NUMBER.mapped(float, float),
    inputs=array(union("input of work", "the position of a read, or an array of them", WHOLE, wholes())),
    contraction=FLAG,
)

# -- what operators compute

_OPERAND = Codec(read=_operand, write=_operand_document, schema={"type": ["string", "number", "object"]})
_OPTION: Codec[Any] = Codec(
    read=lambda document: document.integers() if isinstance(document.value, list) else document.scalar(),
    write=lambda value: list(value) if isinstance(value, tuple) else value,
    schema={"type": [*SCALAR.schema["type"], "array"], "items": WHOLE.schema},
)
_STEP = record(
    Step,
    result=TEXT,
    function=TEXT,
    operands=array(_OPERAND),
    dims=array(TEXT).optional(()),
    options=table(_OPTION).mapped(lambda found: tuple(found.items()), dict).optional(()),
)
_INNER_DIM = record(
    InnerDim, name=TEXT, extent=POSITIVE, tensor=TEXT.optional(""), axis=WHOLE.optional(0, beside="tensor")
)
_CONSTANT = record(Constant, name=TEXT, dims=array(TEXT), is_given=FLAG.optional(False))
_OF_BODY: dict[str, Codec[Any]] = {
    "steps": array(_STEP),
    "constants": array(_CONSTANT).optional(()),
    "inputs": array(record(ModelInput, read=WHOLE, name=TEXT, shape=_SHAPE)).optional(()),
    "outputs": array(record(ModelOutput, name=TEXT, dims=array(TEXT), shape=_SHAPE)).optional(()),
    "inner": array(_INNER_DIM).optional(()),
    "problem": TEXT.optional(""),
    "untrained": TEXT.optional(""),
    "others": array(TEXT).optional(()),
    "borrowed": array(record(Borrowed, name=TEXT, layer=TEXT, output=WHOLE)).optional(()),
}
_BODY = record(Body, **_OF_BODY, own=defined("own_body", "Own body", record(Body, **_OF_BODY)).optional(None))

# -- graphs

_OPERATOR = record(
    Operator,
    name=TEXT,
    kind=TEXT,
    dims=DIMS.mapped(
        lambda found: tuple(Dim(*item) for item in found.items()), lambda dims: {dim.name: dim.extent for dim in dims}
    ),
    reads=array(_ACCESS),
    writes=array(_ACCESS, minItems=1),
    work=array(_WORK).optional(()),
    unsplittable=_NAMES.optional(()),
    exchanges=array(defined("exchange", "Exchange", _EXCHANGE)).optional(()),
    pipeline=record(Pipeline, stage=TEXT, sequence=TEXT).optional(None),
    intermediates=array(_INTERMEDIATE).optional(()),
    body=defined("body", "Body", _BODY).optional(None),
    attributes=replace(SCALARS, read=_attributes).optional(()),
)
_EDGE = row("producer, output, consumer, input", TEXT, WHOLE, TEXT, WHOLE).mapped(
    lambda ends: Edge(producer=ends[0], output=ends[1], consumer=ends[2], input=ends[3]),
    attrgetter("producer", "output", "consumer", "input"),
)


def _one_type(document: Field) -> Precision:
    size = POSITIVE.read(document)
    if size not in OF_ITEMSIZE:
        raise document.fail(f"is {size}; expected 2, 4 or 8")
    return OF_ITEMSIZE[size]


_WORD_BYTES: Codec[Precision] = Codec(
    read=_one_type, write=attrgetter("itemsize"), schema=POSITIVE.schema, kind=Precision
)
"""Of the numbers that the model itself holds; the policy that it is trained under is the plan's to tell."""


def _verified(graph: Graph, document: Field) -> Graph:
    try:
        return verify(graph)
    except GraphError as error:
        raise document.fail(f"is not a valid graph: {error}") from None


GRAPH = record(
    Graph,
    name=TEXT,
    arguments=SCALARS,
    word_bytes=_WORD_BYTES.of("precision"),
    operators=array(defined("operator", "Operator", _OPERATOR), minItems=1),
    edges=array(_EDGE),
    framework=TEXT.optional(""),
    call=TEXT.optional(""),
    untrained=TEXT.optional(""),
).checked(_verified)


def graph_document(graph: Graph) -> dict[str, Any]:
    """Return the JSON form of a graph; `graph_from_document` returns an equal one."""
    document: dict[str, Any] = GRAPH.write(graph)
    return document


def graph_from_document(document: Field) -> Graph:
    """Return the verified graph of a document; the document's error names the field that is wrong."""
    return GRAPH.read(document)
