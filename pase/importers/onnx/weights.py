"""Which of a model's stored floats are trained, and their values, each read when it is asked for.

ONNX tells weights from other constants by nothing but their use. Values lie in the file or in files beside it.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import framework
from pase.importers.ir.call import Array
from pase.importers.ir.trace import FLOATS
from pase.importers.onnx.model import dtype_name, graphs_within, open_model, plain_domain


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
"""Positions at which nothing is trained: running statistics, first states, bounds, masks."""

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
"""Operators that lie between the product of queries and keys and the softmax."""


def trained(graph: Any) -> frozenset[str]:
    """Return the names of the stored floats that are weights.

    Those are all of more than one element that are not read as states alone (running statistics, a recurrent layer's
    first state, a mask of attention's scores), or only together with positions and the like (the frequencies of a
    rotary embedding); and single ones where an operator has nothing but weights, or as the bias of a product of one
    unit.
    """
    reader = _Reader(graph)
    for node in _nodes(graph):
        reader.see(node)
    return frozenset(reader.weights)


class _Reader:
    """Sees operators in order, and how each reads what is stored."""

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
        """Note what the results are."""
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
    """Yield (name, tensor, name of a shape) of what is stored: initialisers, Constants, and what stands for a weight.

    The last is one value (None for 0) filled to a shape that is stored; "" for the others.
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

    source: a path, or an onnx.ModelProto. No file beside it is read before a weight is asked for.
    """
    folder = Path(source).resolve().parent if isinstance(source, str) else None
    return OnnxWeights(open_model(source).graph, folder)


class OnnxWeights(Mapping[str, Array]):
    """Stored tensors: initialisers, results of Constant, and of ConstantOfShape with a stored shape.

    Values that lie in other files are read from the model's own folder and those within it alone.
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
            raise ModelError(f"the values of {name!r} lie in another file; give the path of the model, not its object")
        try:
            return np.asarray(framework("onnx.numpy_helper", "onnx").to_array(tensor, str(self._folder)))
        except Exception as error:  # of ONNX's C++, which opens files beside the model's, too
            raise ModelError(
                f"the values of {name!r} cannot be read: {error}; fetch or export the model again, with its files"
            ) from error
