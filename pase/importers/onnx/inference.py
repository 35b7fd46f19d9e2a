"""`Inference`: the shapes of an operator's results, by ONNX's own shape inference of that one operator."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from pase.errors import ModelError
from pase.importers.front_end import framework
from pase.importers.ir import Value
from pase.importers.onnx.model import OnnxModel, declared, dtype_name, dtype_number
from pase.importers.onnx.native import Native, NativeError
from pase.importers.onnx.operators.results import WHOLE_RESULTS, shape_of_result
from pase.importers.onnx.tensors import Rebatch, Tensors

_MAX_DATA = 4096
"""Elements of a constant that shapes can follow from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An operator whose results are asked for. node: as in the model; inputs, outputs: names, "" for those left out."""

    node: Any
    operator: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def where(self) -> str:
        """The operator, for messages."""
        return f"operator {self.operator} {self.name!r}" + (f" of domain {self.domain}" if self.domain else "")


class Inference:
    """Infers results while operators are walked."""

    def __init__(self, model: OnnxModel, tensors: Tensors, native: Native, rebatch: Rebatch | None) -> None:
        self._model = model
        self._native = native
        self._tensors = tensors
        self._rebatch = rebatch
        self._declared = {str(i.name): i for i in (*model.graph.value_info, *model.graph.output)}
        self._types: dict[str, bytes] = {}
        self._onnx = framework("onnx", "onnx")
        self._newest = framework("onnx.defs", "onnx").onnx_opset_version()

    def results(self, request: Request, read: frozenset[str]) -> list[Value | None]:
        """Return an operator's results; ModelError where their shapes do not follow from those of its inputs.

        read: names of the tensors that anything reads.
        """
        types = self._inferred(request)
        found: list[Value | None] = []
        for position, output in enumerate(request.outputs):
            inferred = types.get(output)
            # What nobody reads need not be known: dropout's mask, running statistics of the training mode.
            is_left_out = not output or (position > 0 and output not in read and not _has_shape(inferred))
            found.append(None if is_left_out else self._result(request, position, inferred))
        if request.operator == "Reshape" and found and found[0] is not None:
            before = self._tensors.values[request.inputs[0]]
            if prod(before.shape) != prod(found[0].shape):
                raise ModelError(self._unfit(request, before, found[0]))
        return found

    def _unfit(self, request: Request, before: Value, after: Value) -> str:
        reason = "the file is damaged"
        if self._rebatch is not None:
            reason = "the batch is written into the model there: export it with a batch that is left open"
        return f"{request.where} makes {list(after.shape)} of {list(before.shape)}; {reason}"

    def _inferred(self, request: Request) -> Mapping[str, Any]:
        """Return the types of an operator's results as ONNX's own shape inference has them, by name."""
        own = self._onnx.NodeProto()
        own.CopyFrom(request.node)
        own.input[:], own.output[:] = request.inputs, request.outputs
        given = [name for name in request.inputs if name]
        constants = self._tensors.constants
        newest = self._newest if not request.domain else 1 << 30
        try:
            found = self._native.infer(
                (request.operator, min(self._model.opsets.get(request.domain, 1), newest), request.domain),
                own.SerializeToString(),
                {name: self._type(self._tensors.values[name]) for name in given},
                {name: self._data(name) for name in given if name in constants and constants[name].size <= _MAX_DATA},
                {str(entry.domain): int(entry.version) for entry in self._model.proto.opset_import},
                int(self._model.proto.ir_version),
            )
        except NativeError as error:
            shapes = ", ".join(str(list(self._tensors.values[name].shape)) for name in given)
            text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            hint = "; the batch may be written into the model: export it with one left open" if self._rebatch else ""
            raise ModelError(f"{request.where} cannot take tensors of shapes {shapes}: {text}{hint}") from error
        return {name: self._onnx.TypeProto.FromString(text) for name, text in (found or {}).items()}

    def _type(self, value: Value) -> bytes:
        if value.name not in self._types:
            helper = framework("onnx.helper", "onnx")
            made = helper.make_tensor_type_proto(dtype_number(value.dtype), list(value.shape))
            self._types[value.name] = made.SerializeToString()
        return self._types[value.name]

    def _data(self, name: str) -> bytes:
        made = framework("onnx.numpy_helper", "onnx").from_array(self._tensors.constants[name], name)
        data: bytes = made.SerializeToString()
        return data

    def _result(self, request: Request, position: int, inferred: Any) -> Value:
        """Return a result, as inferred, as declared in the file, or as what is known of the operator has it."""
        output = request.outputs[position]
        dims: tuple[int | None, ...] | None = None
        dtype = dtype_name(inferred.tensor_type.elem_type) if inferred is not None else ""
        if _has_shape(inferred):
            dims = tuple(int(d.dim_value) if d.HasField("dim_value") else None for d in inferred.tensor_type.shape.dim)
        told = self._told(output)
        if told is not None and (dims is None or len(dims) == len(told.shape)):
            known = dims or (None,) * len(told.shape)
            dims = tuple(t if d is None else d for d, t in zip(known, told.shape, strict=True))
            dtype = dtype or told.dtype
        values = [self._tensors.values[name] if name else None for name in request.inputs]
        if dims is None:
            dims = shape_of_result(request.operator, position, values, request.attributes)
        if dims is None:
            raise ModelError(
                f"nothing tells the shape of {output!r}, which {request.where} makes; write it into the file's "
                "value_info"
            )
        shape = tuple(extent for extent in dims if extent is not None)
        if len(shape) < len(dims):
            raise ModelError(
                f"the shape of {output!r}, which {request.where} makes, depends on values: dim {dims.index(None)} is "
                "not known; export the model up to there, without it (a selection by a mask, found objects)"
            )
        is_whole = (request.operator, position) in WHOLE_RESULTS
        first = (
            "int32"
            if is_whole
            else next((value.dtype for value in values if value is not None and value.is_float), "float32")
        )
        return Value(name=output, shape=shape, dtype=dtype or first)

    def _told(self, output: str) -> Value | None:
        """Return a tensor as the file declares it, with the new batch; None where it does not, or leaves dims open."""
        info = self._declared.get(output)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        found = declared(info)
        dims = [self._tensors.symbols.get(dim) if isinstance(dim, str) else dim for dim in found.dims]
        if any(dim is None for dim in dims):
            return None
        shape = tuple(dim for dim in dims if dim is not None)
        if self._rebatch is not None and shape[:1] == (self._rebatch.old,):
            shape = (self._rebatch.new, *shape[1:])
        return Value(name=output, shape=shape, dtype=found.dtype)


def _has_shape(inferred: Any) -> bool:
    return inferred is not None and inferred.HasField("tensor_type") and inferred.tensor_type.HasField("shape")
