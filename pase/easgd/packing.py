"""`Packing`: all weights of a network in one contiguous vector (Section 5.2), and where each of them lies in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from pase.easgd.equations import Array
from pase.errors import TrainingError

_BIAS = "bias"
"""The last part of the name of an array that travels with the one before it, of its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The arrays of a vector, in their order. names, shapes: one for each. dtype: of all of them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each array."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def num_weights(self) -> int:
        """Numbers in the vector, n."""
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the vector."""
        return self.num_weights * np.dtype(self.dtype).itemsize

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each array begins and ends."""
        return tuple(pairwise(accumulate(self.sizes, initial=0)))

    def pack(self, arrays: Mapping[str, Array]) -> Array:
        """Return a vector [n] of arrays by name; TrainingError where one is missing, unknown or of another shape."""
        if set(arrays) != set(self.names):
            name = min(set(arrays) ^ set(self.names))
            how = "there is no" if name in self.names else "there is no use for"
            raise TrainingError(f"{how} weight {name!r}; the network has {', '.join(self.names)}")
        vector = np.empty(self.num_weights, self.dtype)
        for name, shape, (begin, end) in zip(self.names, self.shapes, self.bounds, strict=True):
            if np.shape(arrays[name]) != shape:
                raise TrainingError(
                    f"weight {name!r} has shape {list(np.shape(arrays[name]))}; the network has {list(shape)}"
                )
            vector[begin:end] = np.ravel(arrays[name])
        return vector

    def unpack(self, vector: Array) -> dict[str, Array]:
        """Return the arrays of a vector [n] by name: views, nothing is copied. TrainingError for another length."""
        if vector.shape != (self.num_weights,):
            raise TrainingError(
                f"a vector of shape {list(vector.shape)} is not that of the network, which has {self.num_weights} "
                "weights"
            )
        return {
            name: vector[begin:end].reshape(shape)
            for name, shape, (begin, end) in zip(self.names, self.shapes, self.bounds, strict=True)
        }

    def layout(self, *, packed: bool) -> tuple[tuple[int, int], ...]:
        """Return the (begin, end) of each message: one for all, or one for each weight array, its bias inside."""
        if packed:
            return ((0, self.num_weights),)
        pieces: list[tuple[int, int]] = []
        before = ""
        for name, (begin, end) in zip(self.names, self.bounds, strict=True):
            layer, _, own = name.rpartition("/")
            if pieces and own == _BIAS and layer == before:
                pieces[-1] = (pieces[-1][0], end)
            else:
                pieces.append((begin, end))
            before = layer
        return tuple(pieces)
