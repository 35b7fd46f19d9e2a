"""`Tensors`: what is known of a model's tensors while its operators are walked, in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.ir import Value
from pase.importers.onnx.folding import Array
from pase.importers.onnx.model import Declared, dtype_name, values_of
from pase.importers.onnx.operators.call import Call

Shape = tuple[int, ...]

_MAX_ELEMENTS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that an attribute holds; array: None where its values were left out."""

    shape: Shape
    dtype: str
    array: Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A call, and the domain of its operator."""

    call: Call
    domain: str


@dataclass(frozen=True, kw_only=True)
class Walked:
    """calls: in order, without what was worked out. values: all tensors by name. constants: those that are known.

    outputs: of the model. changes: what was changed for another batch.
    """

    calls: tuple[Placed, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Array]
    outputs: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebatch:
    """A walk with the exported batch, the old one, for a walk with a new one."""

    reference: Walked
    old: int
    new: int


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """values: by name. constants: values that are known. symbols: what the names of dims stand for.

    trained: names of the weights, which are no constants even where their values are known.
    """

    trained: frozenset[str]
    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)

    def define(self, value: Value) -> None:
        """Add a tensor; ModelError where there is one of its name, or its shape is none."""
        if value.name in self.values:
            raise ModelError(f"two tensors are named {value.name!r}; the file is damaged")
        if any(extent < 0 for extent in value.shape) or prod(value.shape) > _MAX_ELEMENTS:
            raise ModelError(f"tensor {value.name!r} has shape {value.shape}; the file is damaged")
        self.values[value.name] = value

    def feed(self, given: Declared, shape: Shape) -> None:
        """Add an input, and what the names of its dims stand for."""
        self.define(Value(name=given.name, shape=shape, dtype=given.dtype))
        self.symbols.update({d: e for d, e in zip(given.dims, shape, strict=True) if isinstance(d, str)})

    def store(self, name: str, tensor: Any) -> None:
        """Add an initialiser."""
        self.define(Value(name=name, shape=tuple(tensor.dims), dtype=dtype_name(tensor.data_type)))
        found = values_of(tensor)
        if found is not None:
            self.constants[name] = found

    def know(self, name: str, array: Array) -> None:
        """Add a tensor whose values are known."""
        self.define(Value(name=name, shape=array.shape, dtype=str(array.dtype)))
        self.constants[name] = array

    def know_shape(self, name: str, shape: Shape) -> str:
        """Add a shape as a tensor; return its name."""
        self.know(name, np.asarray(shape, dtype=np.int64))
        return name

    def known(self, name: str) -> Array | None:
        """Return the values of a tensor that is a constant."""
        return None if name in self.trained else self.constants.get(name)
