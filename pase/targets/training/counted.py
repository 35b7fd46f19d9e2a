"""Counter-based random numbers: each one depends on a key and its index in the whole tensor, never on a strategy.

Word i of a row-major tensor is a hash of i and a key, so each device generates just its own shard. Dropout keeps a
point whose word is at or above a threshold; the keys of layers and steps are computed on the host and fed with every
step. Normal numbers are generated in cache-sized blocks on several threads: a word gives the quantile, and the inverse
of the distribution is Wichura's PPND7 (1988, AS 241), accurate to the last places of float32. Only sums, products,
quotients and square roots of float32 are used, which every machine rounds identically: replicas on different machines
are equal bit for bit.

Initial weights are generated unsplit on the host, from the seed and the parameter's name.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, product
from math import log, prod, sqrt
from typing import Any

import numpy as np

from pase.errors import GraphError, ProgramError
from pase.graph import Access, Graph, Operator
from pase.graph.operator import access_dims, named_dims
from pase.sharding.boxes import Range
from pase.sharding.traffic import parameter_name

Key = np.ndarray[Any, np.dtype[np.int64]]

NOTHING_DROPPED: Key = np.array([-1, -1], np.int64)
"""Key of a step without dropout, for evaluation."""

WORD = 2**32

ROUND = ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1))
"""Shifts for xorshift steps and multipliers of a 32-bit mixing function with low bias (Wellons, hash prospector). The
multipliers are below 2**31, so that products fit in 63 bits, and thus in signed integers."""


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
    """Return the mask of the points that a layer keeps in the step of a key, for a whole tensor."""
    if key[0] < 0:
        return np.ones(shape, np.bool_)
    numbers = np.arange(int(np.prod(shape)), dtype=np.uint64)
    return (words(numbers, key ^ layer_key(name)) >= np.uint32(threshold(rate))).reshape(shape)


def words(numbers: np.ndarray[Any, np.dtype[np.uint64]], key: Key) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return 32-bit random words of the points with these indices; each depends on its index and the key only."""
    # 32-bit words wrap around by themselves here.
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


Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Words = np.ndarray[Any, np.dtype[np.uint32]]

BLOCK = 1 << 16
"""Number of elements generated together."""


def normal_part(
    shape: Sequence[int], held: Sequence[Sequence[Range]], key: Key, *, mean: float, deviation: float, threads: int = 1
) -> Floats:
    """Return a part of a tensor of normal random numbers, float32.

    Args:
        shape: Shape of the whole tensor.
        held: For each dim the ranges that make up the part, in order.
        key: Two words; different keys give independent numbers.
        mean: Mean of the distribution.
        deviation: Its standard deviation; 0 gives the mean everywhere.
        threads: Maximum number of threads; the result does not depend on it.
    """
    return _drawn(shape, held, _Maker.normal, key, mean, deviation, threads)


def uniform_part(
    shape: Sequence[int], held: Sequence[Sequence[Range]], key: Key, *, low: float, high: float, threads: int = 1
) -> Floats:
    """Return a part of a tensor of random numbers uniformly distributed from `low` to `high`; see `normal_part`."""
    return _drawn(shape, held, _Maker.uniform, key, (low + high) / 2, high - low, threads)


def _drawn(
    shape: Sequence[int],
    held: Sequence[Sequence[Range]],
    make: Callable[["_Maker", int, int, Sequence[int]], Floats],
    key: Key,
    mean: float,
    scale: float,
    threads: int,
) -> Floats:
    part = np.empty([sum(high - low for low, high in runs) for runs in held], np.float32)
    if scale == 0:
        part[...] = mean
        return part
    threads = max(1, min(threads, part.size // BLOCK))

    def fill(first: int) -> None:
        maker = _Maker(key)
        for start, stride, block in islice(_blocks(part, shape, held), first, None, threads):
            np.multiply(make(maker, start, stride, block.shape), np.float32(scale), out=block)
            if mean:
                block += np.float32(mean)

    if threads == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, range(threads)))
    return part


def _blocks(part: Floats, shape: Sequence[int], held: Sequence[Sequence[Range]]) -> Iterator[tuple[int, int, Floats]]:
    """Yield the blocks of a part: index of the first element, index stride between rows, and the destination."""
    extents, runs = _merged(shape, held)
    part = part.reshape([sum(high - low for low, high in own) for own in runs])
    strides = [prod(extents[dim + 1 :]) for dim in range(len(extents))]
    row = strides[-2]
    places = [_placed(own) for own in runs]
    for *outer, (low, begin, num_rows), (first, column, length) in product(*places):
        width = min(length, BLOCK)
        height = max(1, BLOCK // width)
        for point in product(*(range(count) for _, _, count in outer)):
            numbers = [own + at for (own, _, _), at in zip(outer, point, strict=True)]
            base = sum(number * stride for number, stride in zip(numbers, strides[:-2], strict=True))
            there = part[tuple(own + at for (_, own, _), at in zip(outer, point, strict=True))]
            for i in range(0, num_rows, height):
                rows = there[begin + i : begin + min(i + height, num_rows)]
                for j in range(0, length, width):
                    start = base + (low + i) * row + first + j
                    yield start, row, rows[:, column + j : column + min(j + width, length)]


def _merged(shape: Sequence[int], held: Sequence[Sequence[Range]]) -> tuple[list[int], list[Sequence[Range]]]:
    """Merge adjacent dims that are contiguous in the part; return as few extents and lists of ranges as possible.

    A dim that is held completely merges with the one before it.
    """
    extents: list[int] = [1, 1]
    merged: list[Sequence[Range]] = [((0, 1),)] * 2
    for extent, runs in zip(shape, held, strict=True):
        if tuple(runs) == ((0, extent),):
            extents[-1] *= extent
            merged[-1] = [(low * extent, high * extent) for low, high in merged[-1]]
        else:
            extents.append(extent)
            merged.append(runs)
    unneeded = 0
    while len(extents) - unneeded > 2 and extents[unneeded] == 1:
        unneeded += 1
    return extents[unneeded:], merged[unneeded:]


def _placed(runs: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return for each range its start, its start within the part, and its length."""
    found, begin = [], 0
    for low, high in runs:
        if low < high:
            found.append((low, begin, high - low))
        begin += high - low
    return found


# -- numbers of one block

_HALF = np.float32(2.0**-32)
# Wichura's PPND7, a and b for the middle and c and d for the tails.
_A = (3.3871327179, 50.434271938, 159.29113202, 59.109374720)
_B = (1.0, 17.895169469, 78.757757664, 67.187563600)
_C = (1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103)
_D = (1.0, 0.73700164250, 0.12021132975)


@dataclass(slots=True)
class _Maker:
    """Generates blocks of random numbers for a key; `words`, `others` and `floats` are scratch arrays."""

    key: Key
    words: Words = field(default_factory=lambda: np.empty(BLOCK, np.uint32))
    others: Words = field(default_factory=lambda: np.empty(BLOCK, np.uint32))
    floats: Floats = field(default_factory=lambda: np.empty((3, BLOCK), np.float32))
    columns: Words = field(default_factory=lambda: np.arange(BLOCK, dtype=np.uint32))

    def normal(self, start: int, stride: int, shape: Sequence[int]) -> Floats:
        """Return normal numbers for rows of elements; they are overwritten by the next call.

        Args:
            start: Index of the first element.
            stride: Difference of the indices of the first elements of consecutive rows.
            shape: Number of rows and of elements in each.
        """
        return self._inverse(self.uniform(start, stride, shape).reshape(-1)).reshape(*shape)

    def uniform(self, start: int, stride: int, shape: Sequence[int]) -> Floats:
        """Return uniform numbers from -1/2 to 1/2 likewise: (word + 1/2) / 2**32, in the order of integers."""
        height, width = shape
        self._hash(start, stride, height, width)
        found = self.floats[0, : height * width]
        found[...] = self.words[: height * width].view(np.int32)
        found *= _HALF
        found += _HALF / 2
        return found.reshape(height, width)

    def _hash(self, start: int, stride: int, height: int, width: int) -> None:
        count = height * width
        found, other = self.words[:count], self.others[:count]
        last = start + (height - 1) * stride + width - 1
        if start // WORD != last // WORD:
            beginnings = np.uint64(start) + np.uint64(stride) * np.arange(height, dtype=np.uint64)
            numbers: Any = beginnings[:, None] + np.arange(width, dtype=np.uint64)
            found[...] = words(numbers.reshape(-1), self.key)
            return
        first, second = self.key.astype(np.uint32)
        high = np.full(1, start // WORD, np.uint32)
        _mix(high, np.empty_like(high))
        # 32-bit words wrap around by themselves here.
        rows = np.uint32(start % WORD) + np.uint32(stride % WORD) * np.arange(height, dtype=np.uint32)
        np.add(rows[:, None], self.columns[:width], out=found.reshape(height, width))
        found ^= first
        _mix(found, other)
        found ^= second ^ high
        _mix(found, other)

    def _inverse(self, q: Floats) -> Floats:
        """Replace the uniform numbers in place by the inverse of the normal distribution."""
        count = q.size
        places = self.words[:count].view(np.int32)
        r, below = self.floats[1:, :count]
        above = self.others[:count].view(np.float32)
        np.multiply(q, q, out=r)
        np.subtract(np.float32(0.180625), r, out=r)
        _polynomial(_A, r, above)
        above /= _polynomial(_B, r, below)
        q *= above
        tails = np.flatnonzero(r < 0)
        own = places[tails]
        # Tail probability of either tail, computed from integers.
        share = ((2**31 - 1) - (own ^ (own >> 31))).astype(np.float32)
        share += np.float32(0.5)
        share *= _HALF
        depth = np.sqrt(_minus_log(share))
        depth -= np.float32(1.6)
        value = _polynomial(_C, depth, np.empty_like(depth)) / _polynomial(_D, depth, np.empty_like(depth))
        q[tails] = np.where(own < 0, -value, value)
        return q


def _mix(values: Words, other: Words) -> None:
    """Mix words in place, as dropout masks do; `other` is a scratch array of the same size."""
    for shift, factor in ROUND:
        np.right_shift(values, np.uint32(shift), out=other)
        values ^= other
        if factor != 1:
            values *= np.uint32(factor)


def _polynomial(factors: Sequence[float], x: Floats, out: Floats) -> Floats:
    *others, last = factors
    np.multiply(x, np.float32(last), out=out)
    for factor in reversed(others[1:]):
        out += np.float32(factor)
        out *= x
    out += np.float32(others[0])
    return out


def _minus_log(x: Floats) -> Floats:
    """Return -log(x) of normal floats, by the series of artanh around √2, because library functions may differ."""
    bits = x.view(np.int32)
    exponent = ((bits >> 23) - 127).astype(np.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(np.float32)
    root = np.float32(sqrt(2))
    s = (mantissa - root) / (mantissa + root)
    series = _polynomial([1, 1 / 3, 1 / 5, 1 / 7, 1 / 9], s * s, np.empty_like(s))
    found: Floats = -(exponent + np.float32(0.5)) * np.float32(log(2)) - np.float32(2) * s * series
    return found


# -- initial weights


def weight_name(graph: Graph, operator: Operator, access: Access) -> str:
    """Return the name of an imported model's parameter in a file of weights: that of its first reader."""
    name = parameter_name(operator, access)
    owner, first = next((o, a) for o in graph.operators for a in o.parameters if parameter_name(o, a) == name)
    return f"{owner.name}/{first.tensor}"


def shared_order(graph: Graph, operator: Operator, access: Access) -> tuple[int, ...]:
    """Return [rank] for each dim of a parameter, the corresponding dim in the layer that declares it.

    A layer may use another one's weight transposed (a projection tied to an embedding). Dims correspond by name, except
    in imported models, which have the order of the stored weight. Raises GraphError where two layers share a weight
    name but neither names of dims nor shapes agree.
    """
    name = parameter_name(operator, access)
    owner, first = next((o, a) for o in graph.operators for a in o.parameters if parameter_name(o, a) == name)
    same = tuple(range(len(access.shape)))
    if first.shape == access.shape and (graph.is_imported or first.index_map == access.index_map):
        return same
    if set(first.index_map) == set(access.index_map):
        order = tuple(first.index_map.index(axis) for axis in access.index_map)
        if tuple(first.shape[i] for i in order) == access.shape:
            return order
    # Dims of extent 1 may be anywhere.
    large, ones = ([i for i, extent in enumerate(first.shape) if (extent > 1) == own] for own in (True, False))
    if [first.shape[i] for i in large] == [extent for extent in access.shape if extent > 1]:
        if len(first.shape) != len(access.shape):
            return same
        places = iter(large), iter(ones)
        return tuple(next(places[extent == 1]) for extent in access.shape)
    raise GraphError(
        f"layers {owner.name!r} and {operator.name!r} share weight {name!r} with shapes {first.shape} and "
        f"{access.shape}; give them the same dims in the same order, or equal names"
    )


def initial_deviation(operator: Operator, access: Access) -> float:
    """Return the standard deviation of a parameter's initial values, rounded as it is written in a program.

    1 / sqrt(fan-in) for a contraction's weight (LeCun et al. 1998), 1 / sqrt(columns) for a table, and 0 for additive
    parameters. For all weights of a recurrent layer 1 / sqrt(3 units), that of PyTorch's uniform initialisation.
    """
    if operator.kind == "recurrent" and "e" in operator.extents:
        return float(f"{sqrt(1 / (3 * operator.extents['e'])):.4g}")
    produced = frozenset[str]().union(*(access_dims(write) for write in operator.writes))
    summed = [dim for dim in operator.dims if dim.name in named_dims(access) and dim.name not in produced]
    if not summed:
        return 0.0
    looked_up = all(dim.name not in named_dims(read) for dim in summed for read in operator.reads if read is not access)
    fan = access.shape[-1] if looked_up else prod(dim.extent for dim in summed)
    return float(f"{sqrt(1 / fan):.4g}")


def initial_moments(operator: Operator, access: Access) -> tuple[float, float]:
    """Return the mean and the standard deviation of a parameter's initial values; scales are initialised to ones."""
    deviation = initial_deviation(operator, access)
    steps = operator.body.steps if operator.body else ()
    products = ("multiply", "batch_norm", "normalise")
    scales = any(step.function in products and access.tensor in step.operands[:2] for step in steps)
    return (1.0 if scales and not deviation else 0.0), deviation


def initial_value(
    name: str, shape: tuple[int, ...], deviation: float, seed: int, mean: float = 0.0
) -> np.ndarray[Any, Any]:
    """Return normally distributed float32 values; all are the mean if the standard deviation is 0."""
    if deviation == 0:
        return np.full(shape, mean, np.float32)
    values = generator(name, seed).standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    return values + np.float32(mean) if mean else values


def given_value(name: str, shape: tuple[int, ...], values: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the value of a weight or a constant from a file of weights; ProgramError where it is missing."""
    if name not in values:
        raise ProgramError(
            f"the weights have no array {name!r}; write them from the model with: pase weights MODEL -o weights.npz"
        )
    array = values[name]
    if array.size != prod(shape):
        raise ProgramError(
            f"weight {name!r} has shape {list(array.shape)}; expected as many values as {list(shape)} has: the weights "
            "are of another model"
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise ProgramError(f"weight {name!r} is of type {array.dtype}; expected floating-point numbers")
    return array.reshape(shape)


def generator(name: str, seed: int) -> np.random.Generator:
    """Return the random generator that belongs to a name."""
    return np.random.default_rng([seed, zlib.crc32(name.encode("utf-8", "surrogatepass"))])
