"""Reading an ONNX file without its weights: its wire format is walked, and what large tensors hold is left out.

The format is protocol buffers' (a field is its number and wire type, then its content). Nothing that the file says of
its own lengths is believed before it was checked against what is there.
"""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pase.errors import ModelError

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


def stripped_file(path: Path) -> bytes:
    """Return a model file's bytes without what its large tensors hold.

    Raises ModelError where the file cannot be read, is truncated, or is no ONNX model.
    """
    with mapped(path) as buffer:
        return stripped(buffer, name=str(path))


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
            raise _damaged(name, tag, f"a field is numbered {number}")
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
                raise _damaged(name, tag, f"a field is of wire type {wire}, which ONNX does not use")
        if at > end:
            raise _damaged(name, tag, f"a field of {at - content:,} bytes has {max(0, end - content):,} left")
        yield Field(number=number, wire=wire, tag=tag, start=content, end=at)


def _read_varint(buffer: Buffer, at: int, end: int, name: str) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = 0
    for i in range(10):
        if at + i >= end:
            raise _damaged(name, at, "it ends within a number")
        byte = buffer[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise _damaged(name, at, "a number has more than ten bytes")


def _damaged(name: str, at: int, what: str) -> ModelError:
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
