"""Layer costs from the definition (docs/method.md), element by element: every device, point and number that it touches.

Nothing of `pase.costs` or of an operator's accesses is used: what a layer computes is written here anew, as a loop nest
and, for each of its tensors, the element that a point touches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

Points = Mapping[str, NDArray[np.int64]]
"""For each dim, the coordinate of every point."""

ITEMSIZES = 4


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a layer.

    shape: of the whole. at: from points to (index along each dim). loops: dims of the loop nest that touch it; a bias
    is added once everything has been summed. parts: for each of its dims, the loop dim by whose parts devices own it,
    or two where it is their product (groups of channels).
    """

    shape: tuple[int, ...]
    at: Callable[[Points], Sequence[NDArray[np.int64]]]
    loops: tuple[str, ...]
    parts: tuple[str | tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Numbers that a layer sums inside itself: so many for each point of some dims, summed over others, so often."""

    count: int
    per: tuple[str, ...]
    over: tuple[str, ...]
    forward: int
    backward: int = 0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer by its definition.

    extents: of the loop nest. fixed: dims that no configuration splits. output, inputs, weights: its tensors.
    work: (dims, FLOP a point forward, what it costs again backward: a name of `inputs` or `weights` for each time).
    inner: what it sums inside itself.
    """

    extents: Mapping[str, int]
    output: Tensor
    inputs: Mapping[str, Tensor]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    work: tuple[tuple[tuple[str, ...], float, tuple[str, ...]], ...] = ()
    inner: tuple[Inner, ...] = ()
    fixed: tuple[str, ...] = ()


def even_part(extent: int, parts: int, number: int) -> range:
    """The indices of one of so many even parts: the first ones have one more where they cannot be equal."""
    small, larger = divmod(extent, parts)
    begin = number * small + min(number, larger)
    return range(begin, begin + small + (number < larger))


def configurations(layer: Layer, num_devices: int) -> Iterator[dict[str, int]]:
    """Every tuple of factors that divide their extents and whose product divides the number of devices."""
    choices = [
        [1] if dim in layer.fixed else [k for k in range(1, num_devices + 1) if extent % k == 0]
        for dim, extent in layer.extents.items()
    ]
    for factors in product(*choices):
        if num_devices % prod(factors) == 0:
            yield dict(zip(layer.extents, factors, strict=True))


def flop(layer: Layer, splits: Mapping[str, int], trained_inputs: bool) -> float:
    """FLOP of one step on the device that does most: forward, and again for each operand that has a gradient."""
    most = 0.0
    for device in product(*(range(k) for k in splits.values())):
        own = dict(zip(splits, device, strict=True))
        total = 0.0
        for dims, forward, backward in layer.work:
            points = prod(len(even_part(layer.extents[dim], splits[dim], own[dim])) for dim in dims)
            again = sum(name in layer.weights or trained_inputs for name in backward)
            total += points * forward * (1 + again)
        most = max(most, total)
    return most


def sent_bytes(layer: Layer, splits: Mapping[str, int], *, is_fed: bool, trained_inputs: bool) -> float:
    """Bytes of a step's messages: all-reduces at 2 (k - 1) / k · n, what neighbours lend each other at n."""
    devices = list(product(*(range(k) for k in splits.values())))
    coordinates = [dict(zip(splits, device, strict=True)) for device in devices]
    # Forward: devices that add to the same elements of the output have partial sums of them.
    total = _reduced([_touched(layer, layer.output, splits, own) for own in coordinates])
    for weight in layer.weights.values():
        # Devices that differ in what does not touch a weight (a bias and the dims summed before) have one gradient.
        distinct = {tuple(own[dim] for dim in weight.loops): own for own in coordinates}
        total += _reduced([_touched(layer, weight, splits, own) for own in distinct.values()])
    for tensor in layer.inputs.values():
        owned = [_owned(layer, tensor, splits, own) for own in coordinates]
        if trained_inputs:
            total += _reduced(owned)
        if is_fed:
            needed = [_touched(layer, tensor, splits, own) for own in coordinates]
            lacking = max(len(need - have) for need, have in zip(needed, owned, strict=True))
            total += ITEMSIZES * lacking * (1 + trained_inputs)
    for inner in layer.inner:
        group = prod(splits[dim] for dim in inner.over)
        size = ITEMSIZES * inner.count * prod(len(even_part(layer.extents[d], splits[d], 0)) for d in inner.per)
        times = inner.forward + inner.backward * trained_inputs
        total += times * 2 * (group - 1) / group * size
    return total


def _reduced(sets: Sequence[frozenset[int]]) -> float:
    """Bytes of the all-reduces among devices that hold the same elements; the group that sends most counts."""
    groups: dict[frozenset[int], int] = {}
    for elements in sets:
        groups[elements] = groups.get(elements, 0) + 1
    return max(2 * (k - 1) / k * ITEMSIZES * len(elements) for elements, k in groups.items())


def _touched(layer: Layer, tensor: Tensor, splits: Mapping[str, int], own: Mapping[str, int]) -> frozenset[int]:
    """The elements of a tensor that a device's points touch; what lies in the padding is none."""
    ranges = [np.array(even_part(layer.extents[dim], splits[dim], own[dim])) for dim in tensor.loops]
    grid = np.meshgrid(*ranges, indexing="ij")
    points = {dim: axis.reshape(-1) for dim, axis in zip(tensor.loops, grid, strict=True)}
    index = [np.broadcast_to(i, grid[0].size) for i in tensor.at(points)]
    inside = np.logical_and.reduce([(i >= 0) & (i < extent) for i, extent in zip(index, tensor.shape, strict=True)])
    flat = np.ravel_multi_index([i[inside] for i in index], tensor.shape)
    return frozenset(np.unique(flat).tolist())


def _owned(layer: Layer, tensor: Tensor, splits: Mapping[str, int], own: Mapping[str, int]) -> frozenset[int]:
    """The even part of an input that a device holds before anything is lent."""
    ranges = []
    for extent, dim in zip(tensor.shape, tensor.parts, strict=True):
        if isinstance(dim, str):
            ranges.append(np.array(even_part(extent, splits[dim], own[dim]), dtype=np.int64))
            continue
        outer, inner = (np.array(even_part(layer.extents[d], splits[d], own[d]), dtype=np.int64) for d in dim)
        ranges.append((outer[:, None] * layer.extents[dim[1]] + inner).reshape(-1))
    grid = np.meshgrid(*ranges, indexing="ij")
    return frozenset(np.ravel_multi_index([axis.reshape(-1) for axis in grid], tensor.shape).tolist())


def dense(batch: int, made: int, summed: int, *, activation: bool, bias: bool) -> Layer:
    """y[b, n] = f(Σ_c x[b, c] · w[c, n] + bias[n])."""
    every, out = ("b", "n", "c"), ("b", "n")
    weights = {"w": Tensor(shape=(summed, made), at=lambda i: (i["c"], i["n"]), loops=every)}
    if bias:
        weights["bias"] = Tensor(shape=(made,), at=lambda i: (i["n"],), loops=out)
    return Layer(
        extents={"b": batch, "n": made, "c": summed},
        output=Tensor(shape=(batch, made), at=lambda i: (i["b"], i["n"]), loops=every),
        inputs={"x": Tensor(shape=(batch, summed), at=lambda i: (i["b"], i["c"]), loops=every, parts=("b", "c"))},
        weights=weights,
        work=(
            (every, 2, ("x", "w")),
            # A sum with the bias costs one addition and nothing backward; a function costs one each way.
            *(((out, 1, ()),) if bias else ()),
            *(((out, 1, ("w",)),) if activation else ()),
        ),
    )


def convolution(
    batch: int,
    channels: int,
    made: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    *,
    groups: int = 1,
) -> Layer:
    """y[b, (g, n), o…] = Σ_c,k… x[b, (g, c), o · stride + k · dilation - padding …] · w[(g, n), c, k…] + bias[g, n]."""
    outs, kernels = (("h", "w")[-len(size) :], ("r", "s")[-len(size) :])
    length = dict(zip(outs, size, strict=True))
    positions = {
        o: (length[o] + 2 * p - d * (k - 1) - 1) // s + 1
        for o, k, s, d, p in zip(outs, kernel, stride, dilation, padding, strict=True)
    }
    n, c = made // groups, channels // groups
    extents = {"b": batch, **({"g": groups} if groups > 1 else {}), "n": n, **positions, "c": c}
    extents |= dict(zip(kernels, kernel, strict=True))
    every = tuple(extents)
    written = tuple(dim for dim in every if dim not in {"c", *kernels})

    channel: str | tuple[str, str] = ("g", "c") if groups > 1 else "c"

    def group(i: Points) -> NDArray[np.int64]:
        return i["g"] if groups > 1 else np.zeros(1, dtype=np.int64)

    def read(i: Points) -> list[NDArray[np.int64]]:
        windows = zip(outs, kernels, stride, dilation, padding, strict=True)
        return [i["b"], group(i) * c + i["c"], *(i[o] * s + i[k] * d - p for o, k, s, d, p in windows)]

    return Layer(
        extents=extents,
        output=Tensor(
            shape=(batch, made, *positions.values()),
            at=lambda i: [i["b"], group(i) * n + i["n"], *(i[o] for o in outs)],
            loops=every,
        ),
        inputs={"x": Tensor(shape=(batch, channels, *size), at=read, loops=every, parts=("b", channel, *outs))},
        weights={
            "w": Tensor(
                shape=(made, c, *kernel),
                at=lambda i: [group(i) * n + i["n"], i["c"], *(i[k] for k in kernels)],
                loops=every,
            ),
            "bias": Tensor(shape=(made,), at=lambda i: [group(i) * n + i["n"]], loops=written),
        },
        work=((every, 2, ("x", "w")), (written, 1, ())),
    )


def pooling(batch: int, channels: int, size: int, kernel: int, stride: int, padding: int) -> Layer:
    """y[b, c, o] = max_k x[b, c, o · stride + k - padding]; one operation for each element of each window."""
    out = (size + 2 * padding - kernel) // stride + 1
    every = ("b", "c", "w", "s")
    return Layer(
        extents={"b": batch, "c": channels, "w": out, "s": kernel},
        output=Tensor(shape=(batch, channels, out), at=lambda i: (i["b"], i["c"], i["w"]), loops=every),
        inputs={
            "x": Tensor(
                shape=(batch, channels, size),
                at=lambda i: (i["b"], i["c"], i["w"] * stride + i["s"] - padding),
                loops=every,
                parts=("b", "c", "w"),
            )
        },
        work=((every, 1, ("x",)),),
        fixed=("s",),
    )


def pointwise(shape: tuple[int, ...], function: str, num_inputs: int, *, activation: bool) -> Layer:
    """y[i] = f(x0[i] ∘ x1[i] ∘ …)."""
    names = tuple("bcd"[: len(shape)])
    tensor = Tensor(shape=shape, at=lambda i: [i[d] for d in names], loops=names, parts=names)
    inputs = {f"x{i}": tensor for i in range(num_inputs)}
    own = {"add": (num_inputs - 1, ()), "multiply": (num_inputs - 1, tuple(inputs))}.get(function, (1, ("x0",)))
    return Layer(
        extents=dict(zip(names, shape, strict=True)),
        output=tensor,
        inputs=inputs,
        work=((names, *own), *(((names, 1, ("x0",)),) if activation else ())),
    )


def look_up(batch: int, steps: int, vocabulary: int, width: int) -> Layer:
    """y[b, s, d] = table[x[b, s], d]: a device adds what it has of the table; work is that of the look-ups."""
    every, points = ("b", "s", "d", "v"), ("b", "s", "d")
    return Layer(
        extents={"b": batch, "s": steps, "d": width, "v": vocabulary},
        output=Tensor(shape=(batch, steps, width), at=lambda i: (i["b"], i["s"], i["d"]), loops=every),
        inputs={},
        weights={"table": Tensor(shape=(vocabulary, width), at=lambda i: (i["v"], i["d"]), loops=every)},
        work=((points, 1, ("table",)),),
    )


def row_normalisation(batch: int, steps: int, width: int) -> Layer:
    """y[b, s, d] = (x - mean) / deviation · scale[d] + shift[d]: two numbers a row, summed forward, and backward."""
    names = ("b", "s", "d")
    row = Tensor(shape=(width,), at=lambda i: (i["d"],), loops=names)
    x = Tensor(shape=(batch, steps, width), at=lambda i: [i[d] for d in names], loops=names, parts=names)
    return Layer(
        extents={"b": batch, "s": steps, "d": width},
        output=x,
        inputs={"x": x},
        weights={"scale": row, "shift": row},
        # Subtract, square, divide, backward as much if x has a gradient; a product of two factors; a sum.
        work=((names, 3, ("x",)), (names, 1, ("x", "scale")), (names, 1, ())),
        inner=(Inner(count=2, per=("b", "s"), over=("d",), forward=1, backward=1),),
    )


def class_loss(batch: int, classes: int) -> Layer:
    """Softmax over the classes, and the loss: maximum, sum and the label's logit of each example summed forward."""
    names = ("b", "n")
    x = Tensor(shape=(batch, classes), at=lambda i: (i["b"], i["n"]), loops=names, parts=names)
    return Layer(
        extents={"b": batch, "n": classes},
        output=x,
        inputs={"x": x},
        # Subtract the maximum, exponentiate, add up, divide.
        work=((names, 4, ("x",)),),
        inner=(Inner(count=1, per=("b",), over=("n",), forward=3),),
    )
