"""Values of an ONNX model's weights, each read when it is asked for, from the file or from files beside it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import framework
from pase.importers.onnx.folding import Array
from pase.importers.onnx.model import OnnxModel, open_model
from pase.importers.onnx.roles import is_filled
from pase.importers.onnx.wire import mapped, mark_of


def read_weights(source: Any) -> "OnnxWeights":
    """Return the weights of a model, by the names of its tensors.

    source: a path, or an onnx.ModelProto. Nothing is read before a weight is asked for.
    """
    return OnnxWeights(open_model(source), source)


def read_initialiser(path: str, name: str) -> Array:
    """Return one stored tensor of a model file; ModelError where there is none, or its values cannot be read."""
    weights = read_weights(path)
    if name not in weights:
        raise ModelError(f"{path!r} has no stored tensor {name!r}; names are those of the model's parameters")
    return weights[name]


class OnnxWeights(Mapping[str, Array]):
    """Stored tensors: initialisers, results of Constant, and of ConstantOfShape with a stored shape.

    Values that lie in other files are read from the model's own folder and those within it alone.
    """

    def __init__(self, model: OnnxModel, source: Any) -> None:
        self._source = source
        self._tensors: dict[str, Any] = {str(tensor.name): tensor for tensor in model.graph.initializer}
        self._fills: dict[str, tuple[str, Any]] = {}
        for node in model.graph.node:
            value = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
            if node.op_type == "Constant" and value is not None:
                self._tensors[str(node.output[0])] = value
            elif is_filled(node, self._tensors):
                self._fills[str(node.output[0])] = str(node.input[0]), value

    def __getitem__(self, name: str) -> Array:
        if name in self._fills:
            shape, value = self._fills[name]
            fill = np.zeros(1, dtype=np.float32) if value is None else self._values(name, value)
            return np.full(tuple(int(extent) for extent in self[shape].ravel()), fill.ravel()[0])
        return self._values(name, self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._fills

    def __len__(self) -> int:
        return len(self._tensors) + len(self._fills)

    def _values(self, name: str, tensor: Any) -> Array:
        """Return a tensor's values; those that were left out are read now."""
        onnx = framework("onnx", "onnx")
        helper = framework("onnx.numpy_helper", "onnx")
        try:
            mark = mark_of(tensor.doc_string)
            if mark is None:
                return np.asarray(helper.to_array(tensor))
            found = onnx.TensorProto.FromString(self._bytes(*mark))
            if found.data_location == onnx.TensorProto.EXTERNAL:
                return self._external(name, found)
            return np.asarray(helper.to_array(found))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ModelError(
                f"the values of {name!r} cannot be read: {error}; fetch or export the model again"
            ) from error

    def _bytes(self, start: int, end: int) -> bytes:
        if not isinstance(self._source, str):
            data: bytes = self._source.SerializeToString()
            return data[start:end]
        with mapped(Path(self._source)) as buffer:
            return buffer[start:end]

    def _external(self, name: str, tensor: Any) -> Array:
        """Return values that lie in another file; its path must not lead out of the model's folder."""
        told = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        if not isinstance(self._source, str):
            raise ModelError(f"the values of {name!r} lie in another file; give the path of the model, not its object")
        folder = Path(self._source).resolve().parent
        path = (folder / told.get("location", "")).resolve()
        if folder not in path.parents:
            raise ModelError(
                f"the values of {name!r} are said to lie at {told.get('location')!r}, outside of its folder"
            )
        dtype = np.dtype(framework("onnx.helper", "onnx").tensor_dtype_to_np_dtype(tensor.data_type))
        shape = tuple(int(extent) for extent in tensor.dims)
        count = int(np.prod(shape, dtype=np.int64))
        size = int(told.get("length", count * dtype.itemsize))
        start = int(told.get("offset", 0))
        with mapped(path) as buffer:
            if min(start, count) < 0 or size != count * dtype.itemsize or start + size > len(buffer):
                raise ModelError(
                    f"the values of {name!r} are said to be {size:,} bytes from {start:,} of {path.name!r}, which has "
                    f"{len(buffer):,}; expected {count * dtype.itemsize:,}: fetch the model with its files again"
                )
            return np.frombuffer(buffer[start : start + size], dtype=dtype).reshape(shape)
