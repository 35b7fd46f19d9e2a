"""`open_model`: an ONNX model, checked as far as everything after it relies on; no file beside it is opened."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import first_line, framework
from pase.importers.onnx.native import NativeError, native

MIN_OPSET = 7
MAX_READ_BYTES = 16 * 1024
"""Of one tensor: what is larger is a weight, whose values importing does not need; shapes and axes are smaller."""

_MAX_FILE_BYTES = (1 << 31) - 1
"""Of a protocol buffer."""

_MAX_DEPTH = 100
"""Of messages within messages: that of a file that protocol buffers read."""

_MAX_NODES = 100_000
"""Of a model whose functions are written out: few lines can stand for any number."""

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
    """name: of the file. num_operators: of its main graph, before the model's functions were written out."""

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
    """Return the model in a file or in an onnx.ModelProto, which is left as it is.

    Raises ModelError where the file is no ONNX model, or one of operators that are too old.
    """
    is_file = isinstance(source, str)
    name = Path(source).stem if is_file else source.graph.name or "model"
    proto = _read(source) if is_file else source
    if not all(isinstance(text, str) for text in _names(proto, name)):
        raise _damaged(name, "a name in it is no text")
    _check(proto, name)
    num_operators = len(proto.graph.node)
    if proto.functions:
        proto = _with_functions_written_out(proto, name)
    return OnnxModel(name=name, proto=proto, num_operators=num_operators)


def _read(path: str) -> Any:
    try:
        size = Path(path).stat().st_size
        if not size:
            raise ModelError(f"{path!r} is empty; expected an ONNX model")
        if size > _MAX_FILE_BYTES:
            raise ModelError(
                f"{path!r} has {size:,} bytes; an ONNX model has at most 2 GiB: save it with its weights in files "
                "beside it (onnx.save_model with save_as_external_data=True)"
            )
        return framework("onnx", "onnx").load_model(path, "protobuf", load_external_data=False)
    except (OSError, ValueError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ModelError(f"{path!r} cannot be read: {reason}; give the path of an ONNX model") from error
    except framework("google.protobuf.message", "onnx").DecodeError as error:
        raise _damaged(path, str(error).strip()) from error


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
    """Return what a small tensor holds; None where it is large, lies in another file, or does not fit its dims."""
    helper, numpy_helper = framework("onnx.helper", "onnx"), framework("onnx.numpy_helper", "onnx")
    try:
        size = prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if size > MAX_READ_BYTES or tensor.data_location or any(extent < 0 for extent in tensor.dims):
            return None
        found = np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError, AttributeError):
        return None
    return found if found.dtype != object and found.shape == tuple(tensor.dims) else None


def _damaged(name: str, what: str) -> ModelError:
    return ModelError(f"{name!r} is no ONNX model, or is truncated or damaged: {what}; fetch or export it again")


_NAMES = frozenset({"name", "op_type", "domain", "input", "output", "attribute", "dim_param"})
"""Fields of texts that are names."""


def _names(message: Any, model: str, depth: int = 0) -> Iterator[Any]:
    """Yield every name in a message; one that is damaged is bytes. ModelError where messages lie too deep in it."""
    if depth > _MAX_DEPTH:
        raise _damaged(model, f"messages lie more than {_MAX_DEPTH} deep in one another")
    if hasattr(message, "raw_data"):  # whose fields may be large
        yield message.name
        return
    for field, value in message.ListFields():
        each = value if hasattr(value, "append") or hasattr(value, "add") else (value,)
        if field.message_type is not None:
            for inner in each:
                yield from _names(inner, model, depth + 1)
        elif field.name in _NAMES:
            yield from each


def graphs_within(node: Any) -> Iterator[Any]:
    """Yield the graphs that an operator has as attributes: those of control flow."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _check(proto: Any, name: str) -> None:
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
    onnx = framework("onnx", "onnx")
    stored = list(proto.graph.initializer)
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.initializer[:]
    # Weights stay here: ONNX's own code is told of them what it names them.
    bare.graph.initializer.extend(
        onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims) for tensor in stored
    )
    try:
        with native() as process:
            found = onnx.ModelProto.FromString(process.ask("inline", bare.SerializeToString()))
    except NativeError as error:
        raise _damaged(name, f"its functions cannot be written out ({str(error).strip()})") from error
    if len(found.graph.node) > _MAX_NODES:
        raise ModelError(
            f"{name!r} has {len(found.graph.node):,} operators when its functions are written out; expected at most "
            f"{_MAX_NODES:,}: export a part of it"
        )
    del found.graph.initializer[:]
    found.graph.initializer.extend(stored)
    return found
