"""Random masks that depend on the seed, the layer's name, the step and a point's number alone, never on a strategy.

A counter-based generator: point i of a tensor, row-major in the whole of it, is hashed with a key of the layer and the
step, so that each device draws the points that it holds. Keys are drawn on the host and fed with every step.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

Key = np.ndarray[Any, np.dtype[np.int64]]

NOTHING_DROPPED: Key = np.array([-1, -1], np.int64)
"""The key of a step that keeps every point as it is, to evaluate what was trained."""

WORD = 2**32

ROUND = ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1))
"""Right shifts to be added without carry and factors, of a mixing of 32 bits that was searched for its low bias
(Wellons, hash prospector); below 2**31, so that products fit 63 bits and signed integers do."""


def step_key(seed: int, step: int) -> Key:
    """Return two words of 32 bits for a step, numbered from 0."""
    return _words(f"step {seed} {step}".encode())


def layer_key(name: str) -> Key:
    """Return two words of 32 bits for a layer."""
    return _words(b"layer " + name.encode("utf-8", "surrogatepass"))


def threshold(rate: float) -> int:
    """Return the word below which a point is dropped."""
    return min(round(rate * WORD), WORD - 1)


def kept(name: str, shape: tuple[int, ...], rate: float, key: Key) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which points of a whole tensor a layer keeps in the step of a key."""
    if key[0] < 0:
        return np.ones(shape, np.bool_)
    numbers = np.arange(int(np.prod(shape)), dtype=np.uint64)
    return (words(numbers, key ^ layer_key(name)) >= np.uint32(threshold(rate))).reshape(shape)


def words(numbers: np.ndarray[Any, np.dtype[np.uint64]], key: Key) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return random words of 32 bits of the points with these numbers, each a function of its number and the key."""
    # Words of 32 bits wrap around by themselves here.
    first, second = key.astype(np.uint32)
    low, high = (numbers % WORD).astype(np.uint32), (numbers // WORD).astype(np.uint32)
    return _mixed(_mixed(low ^ first) ^ second ^ _mixed(high))


def _mixed(words: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    for shift, factor in ROUND:
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words


def _words(text: bytes) -> Key:
    def parts() -> Iterator[int]:
        digest = hashlib.blake2b(text, digest_size=8).digest()
        yield int.from_bytes(digest[:4], "little")
        yield int.from_bytes(digest[4:], "little")

    return np.fromiter(parts(), np.int64)
