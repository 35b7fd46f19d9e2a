"""A graph as a JSON document, and back; reading checks every field and the whole graph."""

from dataclasses import fields
from math import isfinite
from sys import float_info
from typing import Any

from pase.common.documents import Field
from pase.errors import GraphError
from pase.graph.access import Access, Dim, DimIndex, Role, SliceOf, Window
from pase.graph.body import Body, Constant, InnerDim, ModelInput, ModelOutput, Operand, Step
from pase.graph.graph import Edge, Graph
from pase.graph.operator import AllReduce, Exchange, Handoff, Intermediate, Operator, Pipeline, Relayout
from pase.graph.verify import verify
from pase.graph.work import Work

_RECIPE = "forward"
"""The attribute in which plans held what layers compute before they had bodies."""

_EXCHANGES: dict[str, type[Exchange]] = {"all_reduce": AllReduce, "relayout": Relayout, "handoff": Handoff}


def graph_document(graph: Graph) -> dict[str, Any]:
    """Return the JSON form of a graph; `graph_from_document` returns an equal one."""
    return {
        "name": graph.name,
        "arguments": dict(graph.arguments),
        "word_bytes": graph.itemsize,
        "operators": [_operator_document(operator) for operator in graph.operators],
        "edges": [[edge.producer, edge.output, edge.consumer, edge.input] for edge in graph.edges],
    }


def graph_from_document(document: Field) -> Graph:
    """Return the verified graph of a document; the document's error names the field that is wrong."""
    graph = Graph(
        name=document["name"].text(),
        arguments=tuple((key, field.scalar()) for key, field in document["arguments"].members()),
        itemsize=document["word_bytes"].integer(1),
        operators=tuple(_operator(field) for field in document["operators"].items()),
        edges=tuple(_edge(field) for field in document["edges"].items()),
    )
    try:
        return verify(graph)
    except GraphError as error:
        raise document.fail(f"is not a valid graph: {error}") from None


def _operator_document(operator: Operator) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": operator.name,
        "kind": operator.kind,
        "dims": dict(operator.extents),
        "reads": [_access_document(access) for access in operator.reads],
        "writes": [_access_document(access) for access in operator.writes],
    }
    optional = {
        "work": [_work_document(work) for work in operator.work],
        "unsplittable": list(operator.unsplittable),
        "exchanges": [_exchange_document(exchange) for exchange in operator.exchanges],
        "pipeline": _plain(operator.pipeline) if operator.pipeline else None,
        "intermediates": [_intermediate_document(tensor) for tensor in operator.intermediates],
        "body": _body_document(operator.body) if operator.body else None,
        "attributes": dict(operator.attributes),
    }
    return document | {key: value for key, value in optional.items() if value}


def _operator(document: Field) -> Operator:
    def optional(key: str) -> tuple[Field, ...]:
        field = document.get(key)
        return field.items() if field else ()

    attributes, pipeline, body = (document.get(key) for key in ("attributes", "pipeline", "body"))
    if attributes and isinstance(attributes.value, dict) and _RECIPE in attributes.value:
        raise attributes.fail(
            f"has {_RECIPE!r}: the plan is an older version's, which told as text what layers compute; search again"
        )
    return Operator(
        name=document["name"].text(),
        kind=document["kind"].text(),
        dims=tuple(Dim(name, extent.integer(1)) for name, extent in document["dims"].members()),
        reads=tuple(_access(field) for field in document["reads"].items()),
        writes=tuple(_access(field) for field in document["writes"].items()),
        work=tuple(_work(work) for work in optional("work")),
        unsplittable=tuple(field.text() for field in optional("unsplittable")),
        exchanges=tuple(_exchange(field) for field in optional("exchanges")),
        pipeline=Pipeline(stage=pipeline["stage"].text(), sequence=pipeline["sequence"].text()) if pipeline else None,
        intermediates=tuple(
            Intermediate(
                tensor=field["tensor"].text(),
                shape=_extents(field["shape"]),
                index_map=_axes(field["axes"]),
                kept=field["kept"].integer(),
                working=field["working"].integer(),
            )
            for field in optional("intermediates")
        ),
        body=_body(body) if body else None,
        attributes=tuple((key, field.scalar()) for key, field in attributes.members()) if attributes else (),
    )


def _body_document(body: Body) -> dict[str, Any]:
    document: dict[str, Any] = {
        "steps": [_step_document(step) for step in body.steps],
        "constants": [{"name": item.name, "dims": list(item.dims)} for item in body.constants],
        "inputs": [{"read": item.read, "name": item.name, "shape": list(item.shape)} for item in body.inputs],
        "outputs": [{"name": item.name, "dims": list(item.dims), "shape": list(item.shape)} for item in body.outputs],
        "inner": [
            {"name": dim.name, "extent": dim.extent} | ({"tensor": dim.tensor, "axis": dim.axis} if dim.tensor else {})
            for dim in body.inner
        ],
        "problem": body.problem,
        "untrained": body.untrained,
    }
    return {key: value for key, value in document.items() if value or key == "steps"}


def _step_document(step: Step) -> dict[str, Any]:
    document: dict[str, Any] = {
        "result": step.result,
        "function": step.function,
        "operands": [_operand_document(operand) for operand in step.operands],
    }
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in step.options}
    optional = {"dims": list(step.dims), "options": options}
    return document | {key: value for key, value in optional.items() if value}


def _operand_document(operand: Operand) -> Any:
    # JSON has no infinity.
    return operand if isinstance(operand, str) or isfinite(operand) else {"number": str(float(operand))}


def _body(document: Field) -> Body:
    def optional(key: str) -> tuple[Field, ...]:
        field = document.get(key)
        return field.items() if field else ()

    problem, untrained = document.get("problem"), document.get("untrained")
    return Body(
        steps=tuple(_step(field) for field in document["steps"].items()),
        constants=tuple(
            Constant(name=field["name"].text(), dims=_names(field["dims"])) for field in optional("constants")
        ),
        inputs=tuple(
            ModelInput(read=field["read"].integer(), name=field["name"].text(), shape=_extents(field["shape"]))
            for field in optional("inputs")
        ),
        outputs=tuple(
            ModelOutput(name=field["name"].text(), dims=_names(field["dims"]), shape=_extents(field["shape"]))
            for field in optional("outputs")
        ),
        inner=tuple(_inner_dim(field) for field in optional("inner")),
        problem=problem.text() if problem else "",
        untrained=untrained.text() if untrained else "",
    )


def _inner_dim(document: Field) -> InnerDim:
    tensor, axis = document.get("tensor"), document.get("axis")
    return InnerDim(
        name=document["name"].text(),
        extent=document["extent"].integer(),
        tensor=tensor.text() if tensor else "",
        axis=axis.integer() if axis else 0,
    )


def _step(document: Field) -> Step:
    dims, options = document.get("dims"), document.get("options")
    return Step(
        result=document["result"].text(),
        function=document["function"].text(),
        operands=tuple(_operand(field) for field in document["operands"].items()),
        dims=_names(dims) if dims else (),
        options=tuple(
            (key, field.integers() if isinstance(field.value, list) else field.scalar())
            for key, field in options.members()
        )
        if options
        else (),
    )


def _operand(document: Field) -> Operand:
    match document.value:
        case {"number": "inf" | "-inf" as infinity}:
            return float(infinity)
        case str():
            return document.text()
        case bool():
            pass
        case int() | float() as number if abs(number) <= float_info.max:
            return float(number)
    raise document.fail("is no operand; expected the name of a tensor, or a number")


def _work(document: Field) -> Work:
    return Work(
        dims=tuple(_dim_or_part(field) for field in document["dims"].items()),
        flop_per_point=document["flop_per_point"].number(),
        inputs=tuple(
            field.integers() if isinstance(field.value, list) else field.integer()
            for field in document["inputs"].items()
        ),
        contraction=document["contraction"].boolean(),
    )


def _dim_or_part(document: Field) -> str | SliceOf:
    axis = _axis(document)
    if not isinstance(axis, str | SliceOf):
        raise document.fail("is no dim of work; expected a dim, or an object with 'part'")
    return axis


def _intermediate_document(tensor: Intermediate) -> dict[str, Any]:
    return {
        "tensor": tensor.tensor,
        "shape": list(tensor.shape),
        "axes": [_axis_document(axis) for axis in tensor.index_map],
        "kept": tensor.kept,
        "working": tensor.working,
    }


def _plain(value: Pipeline) -> dict[str, Any]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {key: list(item) if isinstance(item, tuple) else item for key, item in found.items()}


def _work_document(work: Work) -> dict[str, Any]:
    return {
        "dims": [_axis_document(dim) for dim in work.dims],
        # As a float even where it was written as a whole number: equal graphs have equal documents.
        "flop_per_point": float(work.flop_per_point),
        "inputs": [list(origin) if isinstance(origin, tuple) else origin for origin in work.inputs],
        "contraction": work.contraction,
    }


def _access_document(access: Access) -> dict[str, Any]:
    document: dict[str, Any] = {
        "tensor": access.tensor,
        "shape": list(access.shape),
        "axes": [_axis_document(axis) for axis in access.index_map],
        "role": str(access.role),
    }
    if access.partial_over is not None:
        document["partial_over"] = list(access.partial_over)
    if access.shared:
        document["shared"] = access.shared
    if access.batch is not None:
        document["batch"] = list(access.batch)
    return document


def _access(document: Field) -> Access:
    role = document["role"]
    if role.value not in list(Role):
        raise role.fail(f"is {role.value!r}; expected one of {', '.join(Role)}")
    partial, shared, batch = (document.get(key) for key in ("partial_over", "shared", "batch"))
    return Access(
        tensor=document["tensor"].text(),
        shape=_extents(document["shape"]),
        index_map=_axes(document["axes"]),
        role=Role(role.text()),
        partial_over=_names(partial) if partial else None,
        shared=shared.text() if shared else "",
        batch=_batch(batch) if batch else None,
    )


def _batch(document: Field) -> tuple[int, int]:
    found = document.integers(1)
    if len(found) != 2:
        raise document.fail(f"has {len(found)} entries; expected blocks and examples")
    return found[0], found[1]


def _exchange_document(exchange: Exchange) -> dict[str, Any]:
    name = next(name for name, kind in _EXCHANGES.items() if isinstance(exchange, kind))
    common: dict[str, Any] = {"pattern": name, "tensor": exchange.tensor, "shape": list(exchange.shape)}
    common["times"] = exchange.times
    if exchange.gradient_of:
        common |= {"backward_times": exchange.backward_times, "gradient_of": list(exchange.gradient_of)}
    match exchange:
        case AllReduce():
            return common | {"axes": [_axis_document(a) for a in exchange.index_map], "over": list(exchange.over)}
        case Relayout():
            return common | {
                "written": [_axis_document(a) for a in exchange.written],
                "read": [_axis_document(a) for a in exchange.read],
            }
        case Handoff():
            return common | {"axes": [_axis_document(a) for a in exchange.index_map], "across": exchange.across}


def _exchange(document: Field) -> Exchange:
    pattern = document["pattern"]
    back = document.get("backward_times")
    common: dict[str, Any] = {
        "tensor": document["tensor"].text(),
        "shape": _extents(document["shape"]),
        "times": document["times"].integer(1),
        "backward_times": back.integer() if back else 0,
        "gradient_of": document["gradient_of"].integers() if back else (),
    }
    kind = _EXCHANGES.get(pattern.text())
    if kind is AllReduce:
        return AllReduce(index_map=_axes(document["axes"]), over=_names(document["over"]), **common)
    if kind is Relayout:
        return Relayout(written=_axes(document["written"]), read=_axes(document["read"]), **common)
    if kind is Handoff:
        return Handoff(index_map=_axes(document["axes"]), across=document["across"].text(), **common)
    raise pattern.fail(f"is {pattern.value!r}; expected one of {', '.join(_EXCHANGES)}")


def _edge(document: Field) -> Edge:
    ends = document.items()
    if len(ends) != 4:
        raise document.fail(f"has {len(ends)} entries; expected producer, output, consumer, input")
    producer, output, consumer, position = ends
    return Edge(producer=producer.text(), output=output.integer(), consumer=consumer.text(), input=position.integer())


def _axis_document(axis: DimIndex) -> Any:
    match axis:
        case Window():
            window = {field.name: getattr(axis, field.name) for field in fields(axis)}
            return {"window": {name: value for name, value in window.items() if name != "beyond" or value}}
        case SliceOf():
            return {"part": {field.name: getattr(axis, field.name) for field in fields(axis)}}
        case tuple():
            return list(axis)
        case _:
            return axis


def _axes(document: Field) -> tuple[DimIndex, ...]:
    return tuple(_axis(field) for field in document.items())


def _axis(document: Field) -> DimIndex:
    match document.value:
        case None:
            return None
        case str():
            return document.text()
        case list():
            return _names(document)
        case {"window": _}:
            window = document["window"]
            return Window(
                out=window["out"].text(),
                kernel=window["kernel"].text(),
                stride=window["stride"].integer(1),
                dilation=window["dilation"].integer(1),
                pad=window["pad"].integer(),
                beyond=beyond.integer() if (beyond := window.get("beyond")) else 0,
            )
        case {"part": _}:
            part = document["part"]
            return SliceOf(dim=part["dim"].text(), offset=part["offset"].integer(), extent=part["extent"].integer(1))
    raise document.fail("is no axis; expected a dim, a list of dims, null, or an object with 'window' or 'part'")


def _names(document: Field) -> tuple[str, ...]:
    return tuple(field.text() for field in document.items())


def _extents(document: Field) -> tuple[int, ...]:
    return document.integers(1)
