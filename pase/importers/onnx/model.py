"""Open ONNX models: validate them (`open_model`), find which stored floats are trained, and read values on demand.

ONNX distinguishes weights from other constants only by their use. Values are stored in the file or in external files,
none of which is opened before a value is requested."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import first_line, framework
from pase.importers.ir.call import Array
from pase.importers.ir.trace import FLOATS
from pase.importers.isolated import NativeError, native

MIN_OPSET = 7
MAX_READ_BYTES = 16 * 1024
"""Limit for one tensor: larger ones are weights, whose values importing does not need; shapes and axes are smaller."""

_MAX_FILE_BYTES = (1 << 31) - 1
"""Of a protocol buffer."""

_MAX_DEPTH = 100
"""Of messages within messages: that of a file that protocol buffers read."""

_MAX_NODES = 100_000
"""Limit for a model with its functions inlined, which few lines can expand to any number of nodes."""

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
    """An ONNX model; name: of the file. num_operators: of its main graph, before inlining the model's functions."""

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
        """Inputs of the model without an initialiser."""
        given = {tensor.name for tensor in self.graph.initializer}
        return tuple(declared(info) for info in self.graph.input if info.name not in given)


def open_model(source: Any) -> OnnxModel:
    """Return the model in a file or in an onnx.ModelProto, which is not modified.

    Raises ModelError where the file is not an ONNX model, or uses operators that are too old.
    """
    is_file = isinstance(source, str)
    name = Path(source).stem if is_file else source.graph.name or "model"
    proto = _read(source) if is_file else source
    if not all(isinstance(text, str) for text in _names(proto, name)):
        raise _damaged(name, "a name in it is not text")
    _check(proto, name)
    num_operators = len(proto.graph.node)
    if proto.functions:
        proto = _with_functions_inlined(proto, name)
    return OnnxModel(name=name, proto=proto, num_operators=num_operators)


def _read(path: str) -> Any:
    try:
        size = Path(path).stat().st_size
        if not size:
            raise ModelError(f"{path!r} is empty; expected an ONNX model")
        if size > _MAX_FILE_BYTES:
            raise ModelError(
                f"{path!r} has {size:,} bytes; an ONNX model has at most 2 GiB: save it with its weights in "
                "external files (onnx.save_model with save_as_external_data=True)"
            )
        return framework("onnx", "onnx").load_model(path, "protobuf", load_external_data=False)
    except (OSError, ValueError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ModelError(f"{path!r} cannot be read: {reason}; give the path of an ONNX model") from error
    except framework("google.protobuf.message", "onnx").DecodeError as error:
        raise _damaged(path, str(error).strip()) from error


def declared(info: Any) -> Declared:
    """Return the declaration of a ValueInfoProto; ModelError where it is not a tensor, or has unknown rank."""
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        raise ModelError(f"{info.name!r} is declared as a {kind or 'value of no type'}; only tensors can be imported")
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        raise ModelError(f"tensor {info.name!r} has no shape; export the model with the shapes of its inputs")
    dims: list[int | str | None] = []
    for dim in tensor.shape.dim:
        # Exporters write 0, -1, "?" or "unk__12" for unknown extents.
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
    """Return the values of a small tensor; None where it is large, external, or inconsistent with its dims."""
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
    return ModelError(f"{name!r} is not an ONNX model, or is truncated or damaged: {what}; fetch or export it again")


_NAMES = frozenset({"name", "op_type", "domain", "input", "output", "attribute", "dim_param"})
"""Fields of texts that are names."""


def _names(message: Any, model: str, depth: int = 0) -> Iterator[Any]:
    """Yield every name in a message; damaged ones are bytes. ModelError where messages are nested too deeply."""
    if depth > _MAX_DEPTH:
        raise _damaged(model, f"messages are nested more than {_MAX_DEPTH} deep")
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
    """Raise ModelError where operators are older than supported, or their version is missing."""
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


def _with_functions_inlined(proto: Any, name: str) -> Any:
    """Return the model with every call of a model-local function inlined."""
    onnx = framework("onnx", "onnx")
    stored = list(proto.graph.initializer)
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.initializer[:]
    # Weights stay in this process: ONNX's own code only receives their names.
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


# -- which stored floats are trained


def _positions(*families: tuple[str, set[int]]) -> Mapping[str, frozenset[int]]:
    return MappingProxyType({name: frozenset(found) for names, found in families for name in names.split()})


_WEIGHTS = _positions(
    ("Conv ConvTranspose Gemm", {1, 2}),
    ("MatMul FusedMatMul Einsum", {0, 1}),
    ("BatchNormalization InstanceNormalization GroupNormalization LayerNormalization RMSNormalization", {1, 2}),
    ("PRelu", {1}),
    ("Gather", {0}),
    ("LSTM GRU RNN", {1, 2, 3, 7}),
)
"""Positions at which even a single float is a weight, by the operator."""

_STATES = _positions(
    ("BatchNormalization", {3, 4}),
    ("Resize Upsample Clip Dropout Pow OneHot RotaryEmbedding", {1, 2, 3}),
    ("LSTM GRU RNN", {4, 5, 6}),
    ("Pad RoiAlign", {2}),
    ("Equal Less LessOrEqual Greater GreaterOrEqual", {0, 1}),
    ("Shape Size Range ConstantOfShape", {0, 1, 2}),
    ("Attention", {3}),
    ("SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss", {2}),
)
"""Input positions that are never trained: running statistics, initial states, bounds, masks."""

_WHOLE_RESULTS = frozenset({"Shape", "Size", "NonZero", "ArgMax", "ArgMin"})


_OF_POSITIONS = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Concat", "Where"})
"""Operators that compute tables of positions: angles, masks."""


_VIEWS = frozenset(
    {
        "Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu",
        "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose results are what their first input is."""

_ON_SCORES = frozenset({"Add", "Sub", "Mul", "Div", "Where", "Cast", "Reshape"})
"""Operators that may occur between the product of queries and keys and the softmax."""


def trained(graph: Any) -> frozenset[str]:
    """Return the names of the stored floats that are weights.

    Floats of more than one element are weights, unless they are read only as states (running statistics, an initial
    state, a mask of attention scores), or only together with positions (the frequencies of a rotary embedding). Scalars
    are weights where an operator has only weights, or as the bias of a product with one unit.
    """
    reader = _Reader(graph)
    for node in _nodes(graph):
        reader.see(node)
    return frozenset(reader.weights)


class _Reader:
    """Visits operators in order, and records how each reads stored tensors."""

    def __init__(self, graph: Any) -> None:
        self._stored = {str(name): shape for name, shape in _stored_floats(graph)}
        # Names under which stored floats are known, and those floats.
        self._same = {name: name for name in self._stored}
        # What is computed of positions, tokens and shapes alone; of constants alone; the scores of attention; products
        # of one unit.
        self._whole = {info.name for info in graph.input if info.name not in self._stored and not _is_float(info)}
        self._neutral = {str(tensor.name) for tensor in graph.initializer} - set(self._stored)
        self._scores: set[str] = set()
        self._narrow: set[str] = set()
        self._as_weight: set[str] = set()
        self._as_other: set[str] = set()

    @property
    def weights(self) -> Iterator[str]:
        """The stored floats that are weights."""
        for name, shape in self._stored.items():
            if name in self._as_weight or (name in self._as_other and prod(shape) > 1):
                yield name

    def see(self, node: Any) -> None:
        """See the next operator."""
        if node.op_type in _VIEWS and node.input and node.input[0] in self._same:
            self._same.update({str(output): self._same[node.input[0]] for output in node.output})
            return
        given = [str(name) for name in node.input if name]
        tables = [self._same[name] for name in given if name in self._same]
        others = [name for name in given if name not in self._same and name not in self._neutral]
        if not others and not tables:
            self._neutral.update(name for name in node.output if name not in self._stored)
        many = [name for name in tables if prod(self._stored[name]) > 1]
        is_table = bool(others) and all(name in self._whole for name in others)
        is_table = is_table and all(_can_be_table(node.op_type, self._stored[name]) for name in many)
        is_mask = node.op_type == "Add" and len(others) == 1 and others[0] in self._scores
        for position, name in enumerate(node.input):
            if name not in self._same:
                continue
            is_bias = node.op_type == "Add" and any(other in self._narrow for other in others)
            if is_table or is_mask or position in _STATES.get(node.op_type, ()):
                continue
            is_weight = is_bias or position in _WEIGHTS.get(node.op_type, ())
            (self._as_weight if is_weight else self._as_other).add(self._same[name])
        self._follow(node, others, tables, is_table=is_table)

    def _follow(self, node: Any, others: list[str], tables: list[str], *, is_table: bool) -> None:
        """Record the properties of the results."""
        if is_table or node.op_type in _WHOLE_RESULTS:
            self._whole.update(node.output)
        if node.op_type == "MatMul":
            if len(others) == 2 and not tables and not any(name in self._whole for name in others):
                self._scores.update(node.output)
            if any(self._stored[name][-1:] == (1,) for name in tables):
                self._narrow.update(node.output)
        elif node.op_type in _ON_SCORES and any(name in self._scores for name in others):
            self._scores.update(node.output)


def _can_be_table(operator: str, shape: tuple[int, ...]) -> bool:
    """Whether a float that meets only positions there is a constant: where a weight would make little sense."""
    return operator in _OF_POSITIONS or (operator == "MatMul" and sum(extent > 1 for extent in shape) <= 1)


def _is_float(info: Any) -> bool:
    return dtype_name(info.type.tensor_type.elem_type) in FLOATS


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield operators, those of branches before the one that branches."""
    for node in graph.node:
        for inner in graphs_within(node):
            yield from _nodes(inner)
        yield node


def _stored(graph: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, tensor, name of a shape) of stored tensors: initialisers, Constants, and filled constants.

    The last kind is one value (None for 0) filled to a stored shape; the name is "" for the others.
    """
    shapes = {tensor.name for tensor in graph.initializer}
    yield from ((str(tensor.name), tensor, "") for tensor in graph.initializer)
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        if plain_domain(node.domain) or not node.output:
            continue
        if node.op_type == "Constant" and value is not None:
            yield str(node.output[0]), value, ""
        elif node.op_type == "ConstantOfShape" and node.input and node.input[0] in shapes:
            yield str(node.output[0]), value, str(node.input[0])


def _stored_floats(graph: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of stored floats, those of branches too; of a filled one only that it is more than one."""
    for name, tensor, shape in _stored(graph):
        if tensor is None or dtype_name(tensor.data_type) in FLOATS:
            yield name, (2,) if shape else tuple(tensor.dims)
    for node in graph.node:
        for inner in graphs_within(node):
            yield from _stored_floats(inner)


# -- values


def read_weights(source: Any) -> "OnnxWeights":
    """Return the weights of a model, by the names of its tensors.

    source: a path, or an onnx.ModelProto. External files are only read when a weight is requested.
    """
    folder = Path(source).resolve().parent if isinstance(source, str) else None
    return OnnxWeights(open_model(source).graph, folder)


class OnnxWeights(Mapping[str, Array]):
    """Stored tensors: initialisers, results of Constant, and of ConstantOfShape with a stored shape.

    External values are only read from the model's own folder and its subfolders.
    """

    def __init__(self, graph: Any, folder: Path | None) -> None:
        self._folder = folder
        self._stored = {name: (tensor, shape) for name, tensor, shape in _stored(graph)}

    def __getitem__(self, name: str) -> Array:
        tensor, shape = self._stored[name]
        found = np.zeros(1, np.float32) if tensor is None else self._values(name, tensor)
        return np.broadcast_to(found.ravel()[0], tuple(map(int, self[shape].ravel()))) if shape else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _values(self, name: str, tensor: Any) -> Array:
        if tensor.data_location and self._folder is None:
            raise ModelError(
                f"the values of {name!r} are stored in another file; give the path of the model, not its object"
            )
        try:
            return np.asarray(framework("onnx.numpy_helper", "onnx").to_array(tensor, str(self._folder)))
        except Exception as error:  # of ONNX's C++, which opens external files, too
            raise ModelError(
                f"the values of {name!r} cannot be read: {error}; fetch or export the model again, with its files"
            ) from error
