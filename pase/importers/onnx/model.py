"""`open_model`: an ONNX model without its weights, checked as far as everything after it relies on."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import framework
from pase.importers.onnx.native import NativeError, native
from pase.importers.onnx.wire import mark_of, stripped, stripped_file

MIN_OPSET = 7
_MAX_NODES = 1_000_000
"""Of a model whose functions are written out."""

_DTYPES: tuple[str, ...] = (
    *("undefined", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16"),
    *("float64", "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8", "float8", "float8", "float8"),
    *("uint4", "int4", "float4", "float8", "uint2", "int2"),
)
"""By ONNX's number of an element type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A tensor that a model declares. dims: extents, names of those that are left open, None for those without one."""

    name: str
    dims: tuple[int | str | None, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class OnnxModel:
    """name: of the file. proto: the ModelProto, large tensors without values. num_operators: of its main graph."""

    name: str
    proto: Any
    num_operators: int

    @property
    def graph(self) -> Any:
        """The main graph."""
        return self.proto.graph

    @cached_property
    def opsets(self) -> Mapping[str, int]:
        """Versions of the operators by domain."""
        return {plain_domain(entry.domain): int(entry.version) for entry in self.proto.opset_import}

    @cached_property
    def inputs(self) -> tuple[Declared, ...]:
        """What the model is fed: inputs that no initialiser gives a value to."""
        given = {tensor.name for tensor in self.graph.initializer}
        return tuple(declared(info) for info in self.graph.input if info.name not in given)


def open_model(source: Any) -> OnnxModel:
    """Return the model in a file or in an onnx.ModelProto; no weight is read.

    Raises ModelError where the file is no ONNX model, or one of operators that are too old.
    """
    onnx = framework("onnx", "onnx")
    if isinstance(source, str):
        path = Path(source)
        name, data = path.stem, stripped_file(path)
    else:
        name = source.graph.name or "model"
        data = stripped(source.SerializeToString(), name=name)
    proto = _parsed(onnx, data, name)
    _check(onnx, proto, name)
    num_operators = len(proto.graph.node)
    if proto.functions:
        proto = _with_functions_written_out(proto, name)
    return OnnxModel(name=name, proto=proto, num_operators=num_operators)


def declared(info: Any) -> Declared:
    """Return what a ValueInfoProto declares; ModelError where it is no tensor, or one of unknown rank."""
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        raise ModelError(f"{info.name!r} is declared as a {kind or 'value of no type'}; only tensors can be imported")
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        raise ModelError(f"tensor {info.name!r} has no shape; export the model with the shapes of its inputs")
    dims: list[int | str | None] = []
    for dim in tensor.shape.dim:
        # Exporters write 0, -1, "?" or "unk__12" where they do not know.
        extent = int(dim.dim_value) if dim.HasField("dim_value") else 0
        dims.append(extent if extent > 0 else (None if _UNNAMED.fullmatch(dim.dim_param) else str(dim.dim_param)))
    return Declared(name=str(info.name), dims=tuple(dims), dtype=dtype_name(tensor.elem_type))


_UNNAMED = re.compile(r"|\?|-1|None|unk(__\d+)?")


def dtype_name(number: int) -> str:
    """Return the name of an element type."""
    return _DTYPES[number] if 0 < number < len(_DTYPES) else "undefined"


def dtype_number(name: str) -> int:
    """Return ONNX's number of an element type."""
    plain = "float8" if name.startswith("float8") else name
    return _DTYPES.index(plain) if plain in _DTYPES else 0


def plain_domain(domain: str) -> str:
    """Return a domain; that of ONNX itself has two names."""
    return "" if domain == "ai.onnx" else str(domain)


def values_of(tensor: Any) -> "np.ndarray[Any, Any] | None":
    """Return what a tensor holds; None where that was left out, is no array of numbers, or does not fit its dims."""
    if mark_of(tensor.doc_string) is not None or any(extent < 0 for extent in tensor.dims):
        return None
    numpy_helper = framework("onnx.numpy_helper", "onnx")
    try:
        found = np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError, AttributeError):
        return None
    return found if found.dtype != object and found.shape == tuple(tensor.dims) else None


def _parsed(onnx: Any, data: bytes, name: str) -> Any:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's implementations raise errors of their own classes
        raise _damaged(name, str(error).strip()) from error
    if not all(isinstance(text, str) for text in _texts(proto)):
        raise _damaged(name, "a name in it is no text")
    return proto


def _damaged(name: str, what: str) -> ModelError:
    return ModelError(f"{name!r} is no ONNX model, or is damaged: {what}; fetch or export it again")


def _texts(proto: Any) -> Iterator[Any]:
    """Yield every name; one that is damaged is bytes."""
    for entry in proto.opset_import:
        yield entry.domain
    for graph in _graphs(proto.graph):
        yield graph.name
        for tensor in graph.initializer:
            yield tensor.name
        for info in (*graph.input, *graph.output, *graph.value_info):
            yield info.name
            yield from (dim.dim_param for dim in info.type.tensor_type.shape.dim)
        yield from _texts_of_nodes(graph.node)
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output, *function.attribute)
        yield from _texts_of_nodes(function.node)


def _texts_of_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def graphs_within(node: Any) -> Iterator[Any]:
    """Yield the graphs that an operator has as attributes: those of control flow."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and those within it."""
    yield graph
    for node in graph.node:
        for inner in graphs_within(node):
            yield from _graphs(inner)


def _check(onnx: Any, proto: Any, name: str) -> None:
    """Raise ModelError where operators are older than what is known of, or their version is not told."""
    if not proto.graph.node:
        raise ModelError(f"{name!r} has no operators; expected a model")
    versions = {plain_domain(entry.domain): entry.version for entry in proto.opset_import}
    uses_onnx = any(plain_domain(node.domain) == "" for node in proto.graph.node)
    if uses_onnx and versions.get("", 0) < MIN_OPSET:
        found = f"of opset {versions['']}" if "" in versions else "of no opset"
        raise ModelError(
            f"{name!r} has operators {found}; expected {MIN_OPSET} or newer: export it again, or convert it with "
            "onnx.version_converter"
        )


def _with_functions_written_out(proto: Any, name: str) -> Any:
    """Return the model with every call of a function of its own replaced by that function's operators."""
    sizes: dict[tuple[str, str], int] = {}
    functions = {(plain_domain(f.domain), str(f.name)): f for f in proto.functions}

    def size(key: tuple[str, str], callers: tuple[tuple[str, str], ...]) -> int:
        if key in callers or len(callers) > 64:
            raise ModelError(f"function {key[1]!r} of {name!r} calls itself, or lies too deep; ONNX allows neither")
        if key not in sizes:
            sizes[key] = _written_out(functions[key].node, lambda inner: size(inner, (*callers, key)), functions)
        return sizes[key]

    total = _written_out(proto.graph.node, lambda key: size(key, ()), functions)
    if total > _MAX_NODES:
        raise ModelError(f"{name!r} has {total:,} operators when its functions are written out; expected a model")
    try:
        with native() as process:
            data = process.inline(proto.SerializeToString())
    except NativeError as error:
        raise _damaged(name, f"its functions cannot be written out ({str(error).strip()})") from error
    return _parsed(framework("onnx", "onnx"), data, name)


def _written_out(nodes: Any, size: Callable[[tuple[str, str]], int], functions: Mapping[tuple[str, str], Any]) -> int:
    """Return how many operators these are when functions are written out."""
    inner = [other for node in nodes for graph in graphs_within(node) for g in _graphs(graph) for other in g.node]
    keys = [(plain_domain(node.domain), str(node.op_type)) for node in (*nodes, *inner)]
    return sum(size(key) if key in functions else 1 for key in keys)
