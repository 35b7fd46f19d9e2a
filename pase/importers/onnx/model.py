"""`open_model`: an ONNX model without its weights, checked as far as everything after it relies on.

The wire format of the file, protocol buffers' (a field is its number and wire type, then its content), is walked, and
what large tensors hold is left out. Nothing that the file says of its own lengths is believed before it was checked
against what is there.
"""

import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import framework
from pase.importers.onnx.native import NativeError, native

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
        name = path.stem
        with mapped(path) as buffer:
            data = stripped(buffer, name=str(path))
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
    if not all(isinstance(text, str) for text in _names(proto)):
        raise _damaged(name, "a name in it is no text")
    return proto


def _damaged(name: str, what: str) -> ModelError:
    return ModelError(f"{name!r} is no ONNX model, or is damaged: {what}; fetch or export it again")


_NAMES = frozenset({"name", "op_type", "domain", "input", "output", "attribute", "dim_param"})
"""Fields of texts that are names."""


def _names(message: Any) -> Iterator[Any]:
    """Yield every name in a message; one that is damaged is bytes."""
    for field, value in message.ListFields():
        each = value if hasattr(value, "append") or hasattr(value, "add") else (value,)
        if field.message_type is not None:
            for inner in each:
                yield from _names(inner)
        elif field.name in _NAMES:
            yield from each


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


# -- the wire format

MAX_KEPT_BYTES = 16 * 1024
"""Of one tensor: what is larger is a weight, whose values importing does not need; shapes and axes are smaller."""

_MAX_DEPTH = 48
_MAX_MODEL_BYTES = 1 << 30
"""Of what is left without large tensors."""

_FIXED64, _BYTES = 1, 2
_PAYLOAD = frozenset({4, 5, 6, 7, 9, 10, 11})
"""Fields of a TensorProto that hold its values."""
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_DOC = 1, 2, 8, 12
_TENSOR_EXTERNAL = 13
_MARK = "pase:"

_NESTED: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "model": MappingProxyType({7: "graph", 25: "function"}),
        "graph": MappingProxyType({1: "node", 5: "tensor", 15: "sparse"}),
        "function": MappingProxyType({7: "node", 11: "attribute"}),
        "node": MappingProxyType({5: "attribute"}),
        "attribute": MappingProxyType({5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"}),
        "sparse": MappingProxyType({1: "tensor", 2: "tensor"}),
    }
)
"""Messages that tensors lie in, by the kind of message and the number of the field."""

_LEFT_OUT: Mapping[str, frozenset[int]] = MappingProxyType({"model": frozenset({20}), "graph": frozenset({14})})
"""Fields that importing does not need: how the model was trained, how it was quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field. number, wire: of its tag; start, end: of its content; tag: where the field itself starts."""

    number: int
    wire: int
    tag: int
    start: int
    end: int


Buffer = bytes | mmap.mmap


def stripped(buffer: Buffer, *, name: str) -> bytes:
    """Return a serialised model without what its large tensors hold, each marked with where it lies."""
    found = {field.number for field in _fields(buffer, 0, len(buffer), name)}
    if 7 not in found:
        raise ModelError(f"{name!r} is not an ONNX model: there is no graph in it; export the model to ONNX again")
    parts = list(_kept(buffer, 0, len(buffer), "model", name, 0))
    if sum(map(len, parts)) > _MAX_MODEL_BYTES:
        raise ModelError(f"{name!r} has more than {_MAX_MODEL_BYTES:,} bytes besides its weights; that is no model")
    return b"".join(parts)


def mark_of(doc_string: str) -> tuple[int, int] | None:
    """Return where the tensor lies in its file, (start, end), that `stripped` left out; None for one that is whole."""
    start, colon, end = doc_string.removeprefix(_MARK).partition(":")
    is_mark = doc_string.startswith(_MARK) and colon and start.isdecimal() and end.isdecimal()
    return (int(start), int(end)) if is_mark else None


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Yield a file's bytes, mapped rather than read; ModelError where it cannot be opened or is empty."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{str(path)!r} is empty; expected an ONNX model")
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{str(path)!r} cannot be read: {reason}; give the path of an ONNX model") from error
    with found:
        yield found


def _kept(buffer: Buffer, start: int, end: int, kind: str, name: str, depth: int) -> Iterator[bytes]:
    """Yield what is kept of a message, in order."""
    if depth > _MAX_DEPTH:
        raise ModelError(
            f"{name!r} has graphs more than {_MAX_DEPTH} deep in one another; it is damaged or not a model"
        )
    nested, left_out = _NESTED[kind], _LEFT_OUT.get(kind, frozenset())
    for field in _fields(buffer, start, end, name):
        inner = nested.get(field.number)
        if field.number in left_out:
            continue
        if inner is None or field.wire != _BYTES:
            yield bytes(buffer[field.tag : field.end])
            continue
        if inner == "tensor":
            content = b"".join(_kept_of_tensor(buffer, field.start, field.end, name))
        else:
            content = b"".join(_kept(buffer, field.start, field.end, inner, name, depth + 1))
        yield _tag(field.number, _BYTES) + _varint(len(content)) + content


def _kept_of_tensor(buffer: Buffer, start: int, end: int, name: str) -> Iterator[bytes]:
    """Yield a tensor's type, dims and name; its values too where they are few."""
    payload, size = [], 0
    is_external = False
    for field in _fields(buffer, start, end, name):
        if field.number in _PAYLOAD:
            size += field.end - field.start
            if size <= MAX_KEPT_BYTES:
                payload.append(bytes(buffer[field.tag : field.end]))
        elif field.number in (_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME):
            yield bytes(buffer[field.tag : field.end])
        elif field.number == _TENSOR_EXTERNAL:
            # Where other files are said to be is not even kept.
            is_external = True
    if size <= MAX_KEPT_BYTES and not is_external:
        yield from payload
        return
    mark = f"{_MARK}{start}:{end}".encode()
    yield _tag(_TENSOR_DOC, _BYTES) + _varint(len(mark)) + mark


def _fields(buffer: Buffer, start: int, end: int, name: str) -> Iterator[Field]:
    """Yield the fields of a message that lies in [start, end) of the buffer."""
    at = start
    while at < end:
        tag = at
        key, at = _read_varint(buffer, at, end, name)
        number, wire = key >> 3, key & 7
        if number == 0 or number >= 1 << 29:
            raise _broken(name, tag, f"a field is numbered {number}")
        match wire:
            case 0:
                content = at
                _, at = _read_varint(buffer, at, end, name)
            case 1 | 5:
                content = at
                at += 8 if wire == _FIXED64 else 4
            case 2:
                length, content = _read_varint(buffer, at, end, name)
                at = content + length
            case _:
                raise _broken(name, tag, f"a field is of wire type {wire}, which ONNX does not use")
        if at > end:
            raise _broken(name, tag, f"a field of {at - content:,} bytes has {max(0, end - content):,} left")
        yield Field(number=number, wire=wire, tag=tag, start=content, end=at)


def _read_varint(buffer: Buffer, at: int, end: int, name: str) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = 0
    for i in range(10):
        if at + i >= end:
            raise _broken(name, at, "it ends within a number")
        byte = buffer[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise _broken(name, at, "a number has more than ten bytes")


def _broken(name: str, at: int, what: str) -> ModelError:
    return ModelError(
        f"{name!r} is no ONNX model, or is truncated or damaged: at byte {at:,} {what}; fetch or export it again"
    )


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
