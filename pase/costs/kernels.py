"""What the kernels of a layer take on a device: how many there are, what each computes and touches, how long that is.

A matrix product of m × k by k × n runs at the machine's share of the peak for its type, less what small extents cost:
m ÷ (m + h), likewise for n, and k ÷ (k + d), h and d being the machine's, less where the type's peak is. All else runs
by the bytes that it touches. Each kernel takes some time to launch. `pase.machine.Kernels` has the figures; cost model
`step` alone asks for them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pase.common.containers import FrozenDict
from pase.graph import Intermediate, LayerTypes, Operator, Role, SliceOf, Window, Work
from pase.graph.functions import POINTWISE, Arithmetic, KernelClass, function_of
from pase.graph.operator import axis_dims, split_dim
from pase.machine import Kernels
from pase.sharding.shards import FloatArray, Splits, shard_size

PRODUCTS, CONVOLUTIONS, ATTENTION = "products", "convolutions", "attention"
"""What multiplies, by the share of the peak that it reaches."""

MEMORY, NORMS, FUNCTIONS = KernelClass.MEMORY, KernelClass.NORMS, KernelClass.FUNCTIONS
"""What goes by bytes, by the share of the memory's bandwidth that it reaches."""

_ATTENTION = "attention"
"""The kind of operators that are that, whatever steps tell it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """[K] products of matrices: FLOP of all; rows, columns and depth of each; how many of them follow one another.

    what: of `PRODUCTS`, `CONVOLUTIONS`, `ATTENTION`.
    """

    what: str
    flop: FloatArray
    rows: FloatArray
    columns: FloatArray
    depth: FloatArray
    launches: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassKernels:
    """The kernels of one pass over a layer.

    products: what multiplies. other_flop: [K] of all else. what: how goes what the layer reads and writes, of `MEMORY`,
    `NORMS`, `FUNCTIONS`. more: of each kernel besides, how it goes, and the [K] bytes that it touches.
    """

    products: tuple[Product, ...]
    other_flop: FloatArray
    what: str
    more: tuple[tuple[str, FloatArray], ...] = ()


def layer_kernels(
    operator: Operator,
    splits: Splits,
    has_gradient: Sequence[bool],
    types: LayerTypes,
    flop: Sequence[FloatArray],
    *,
    written: FloatArray,
) -> tuple[PassKernels, PassKernels]:
    """Return the kernels of a layer's forward and backward pass.

    Args:
        operator: the layer.
        splits: its configurations.
        has_gradient: of each read.
        types: of its tensors.
        flop: [K] FLOP on the busiest device, of each piece of its work.
        written: [K] elements of the largest shard of its first write.
    """
    forward: list[Product] = []
    backward: list[Product] = []
    others, others_back = np.zeros(len(splits.values)), np.zeros(len(splits.values))
    for work, amount in zip(operator.work, flop, strict=True):
        if work.contraction:
            product, gradients = _products(operator, work, splits, has_gradient, amount)
            forward.append(product)
            backward += gradients
        else:
            others, others_back = others + amount, others_back + amount * work.num_gradients(has_gradient)
    written = written * types.write_bytes(0)
    first, steps = _steps(operator)
    there = [(what, number * written) for what, number, _ in steps if number]
    back = [(what, number * written) for what, _, number in steps if number]
    for made in operator.intermediates:
        size = shard_size(made, splits) * types.intermediate_bytes(made)
        # What is kept is written once and read once. Scores: a product writes them, their softmax reads and writes
        # them, and a product reads that; backward likewise, with what was kept of each.
        numbers = (4, 6) if operator.kind == _ATTENTION and made.working else (made.kept, made.kept)
        there.append((NORMS, numbers[0] * size))
        back.append((NORMS, numbers[1] * size))
    return (
        PassKernels(products=tuple(forward), other_flop=others, what=first, more=tuple(there)),
        PassKernels(
            products=tuple(backward), other_flop=others_back, what=first, more=tuple(back if any(has_gradient) else ())
        ),
    )


def pass_seconds(
    kernels: PassKernels,
    figures: Kernels,
    *,
    touched_bytes: FloatArray,
    product_flop_per_s: float,
    figures_flop_per_s: float,
    flop_per_s: float,
    bytes_per_s: float,
) -> FloatArray:
    """Return the [K] seconds of a pass.

    Args:
        kernels: of the pass.
        figures: of the machine.
        touched_bytes: [K] what the layer reads and writes.
        product_flop_per_s: the peak for the type that products are in.
        figures_flop_per_s: the peak for the type that the figures are of.
        flop_per_s: the peak for all else.
        bytes_per_s: the peak of the device's memory.
    """
    computing = kernels.other_flop / flop_per_s
    launches: FloatArray = np.full(len(touched_bytes), float(len(kernels.more) + (not kernels.products)))
    for product in kernels.products:
        share = getattr(figures, product.what) * _filled(product, figures, product_flop_per_s / figures_flop_per_s)
        # Where extents are so small that units for products are all but idle, those for all else do as well.
        computing = computing + product.flop / np.maximum(product_flop_per_s * share, flop_per_s * figures.least)
        launches = launches + product.launches
    waiting: FloatArray = np.maximum(computing, _touching_s(kernels.what, touched_bytes, figures, bytes_per_s))
    for what, size_bytes in kernels.more:
        waiting = waiting + _touching_s(what, size_bytes, figures, bytes_per_s)
    return np.where(waiting > 0, waiting + launches * figures.launch_s, 0.0)


def _touching_s(what: str, size_bytes: FloatArray, figures: Kernels, bytes_per_s: float) -> FloatArray:
    """Return the seconds in which a kernel reads and writes so many bytes, and more for those beyond the caches."""
    seconds: FloatArray = size_bytes / (bytes_per_s * getattr(figures, what))
    if figures.beyond is None:
        return seconds
    return seconds + np.maximum(size_bytes - figures.cache_bytes, 0.0) / (bytes_per_s * figures.beyond)


def _filled(product: Product, figures: Kernels, slowness: float) -> FloatArray:
    """Return what a product of these extents reaches of one whose extents are without bound."""
    # Attention in one kernel sums over the features of a head, which its share knows of, and over keys.
    share: FloatArray = np.ones(len(product.flop))
    if product.what != ATTENTION:
        share = product.depth / (product.depth + slowness * figures.half_depth)
    for extent in (product.rows, product.columns):
        share = share * extent / (extent + slowness * figures.half_extent)
    return share


def _products(
    operator: Operator, work: Work, splits: Splits, has_gradient: Sequence[bool], flop: FloatArray
) -> tuple[Product, list[Product]]:
    """Return the product of the forward pass, and those of the backward pass: a gradient each."""
    over = {dim.dim if isinstance(dim, SliceOf) else dim for dim in work.dims}
    in_turn = _in_turn(operator) & over
    pieces = {dim.dim: dim.extent for dim in work.dims if isinstance(dim, SliceOf)}
    launches = _points(in_turn, splits, pieces)
    left = work.origins[0] if work.origins else ()
    right = [read for origin in work.origins[1:] for read in origin if origin != left] or [*left]
    own = [read for read in left if operator.reads[read].role is not Role.PARAMETER] or left
    ours, theirs = _dims(operator, own) & over - in_turn, _dims(operator, right) & over - in_turn
    kept = {dim for write in operator.writes for axis in write.index_map for dim in axis_dims(axis)}
    is_windowed = any(isinstance(axis, Window) for read in operator.reads for axis in read.index_map)
    what = CONVOLUTIONS if is_windowed else PRODUCTS
    extents: tuple[Collection[str], ...]
    if operator.kind == _ATTENTION:
        # Scores, or the sum that they weigh, for one head; in one kernel all are told by their scores.
        queries, keys = _dims(operator, (0,)), _dims(operator, (1,))
        if operator.ring is not None:
            # Keys come round, all of them.
            there, here = map(split_dim, operator.ring.changes[0])
            keys = keys - {there} | {here}
        is_fused = not any(made.working for made in operator.intermediates)
        what = ATTENTION if is_fused else PRODUCTS
        size = (queries & keys) - set(_named(operator.intermediates))
        makes_scores = is_fused or len(left) == 1
        extents = (queries - keys, keys - queries, size) if makes_scores else (queries - keys, size, keys - queries)
    else:
        extents = (ours - theirs) | (over - ours - theirs - in_turn), theirs - ours, (ours & theirs) - kept
    rows, columns, depth = (_points(dims, splits) for dims in extents)
    if what == ATTENTION and operator.attribute("causal", False):
        # Blocks of later keys are left out; where queries or keys are split, a mask is computed with instead.
        num_queries, num_keys = (prod(splits.extents[dim] for dim in dims) for dims in extents[:2])
        is_whole = (rows == num_queries) & (columns == num_keys)
        flop = np.where(is_whole, flop * (1 - (num_queries - 1) / (2 * num_keys)), flop)

    def product(*extents: FloatArray) -> Product:
        return Product(what=what, flop=flop, rows=extents[0], columns=extents[1], depth=extents[2], launches=launches)

    backward = []
    for position, origin in enumerate(work.origins):
        if any(has_gradient[read] for read in origin):
            # The gradient of the left operand is summed over the columns, that of the right one over the rows.
            turned = (rows, depth, columns) if position == 0 else (depth, columns, rows)
            backward.append(product(*((rows, columns, depth) if what == ATTENTION else turned)))
    forward = product(rows, columns, depth)
    if what == ATTENTION and backward and len(left) == 1:
        # Scores are not kept, but computed again.
        backward.append(forward)
    return forward, backward


def _dims(operator: Operator, reads: Iterable[int]) -> set[str]:
    """Return the dims that index any of some reads, those within windows included."""
    axes = [axis for read in reads for axis in operator.reads[read].index_map]
    inside = {axis.kernel for axis in axes if isinstance(axis, Window)}
    return inside | {dim for axis in axes for dim in axis_dims(axis)}


def _points(dims: Collection[str], splits: Splits, pieces: Mapping[str, int] = FrozenDict()) -> FloatArray:
    """Return the [K] points of some dims on a device; pieces: extents of those that are not worked on whole."""
    found = np.ones(len(splits.values))
    for dim in dims:
        found = found * np.ceil(pieces.get(dim, splits.extents[dim]) / splits.of(dim))
    return found


def _in_turn(operator: Operator) -> set[str]:
    """Return the dims whose points follow one another: a product for each."""
    found = {operator.pipeline.stage, operator.pipeline.sequence} if operator.pipeline else set[str]()
    return found | {"s"} if operator.kind == "recurrent" else found


def _named(made: Iterable[Intermediate]) -> list[str]:
    return [dim for own in made for axis in own.index_map for dim in axis_dims(axis)]


def _steps(operator: Operator) -> tuple[str, list[tuple[str, int, int]]]:
    """Return how the first kernel goes and, of each besides, that and how many tensors it touches, there and back.

    These are as large as the result. Backward: what was kept, a gradient that comes, one that goes.
    """
    weights = {read.tensor for read in operator.reads if read.role is Role.PARAMETER}
    steps = operator.body.steps if operator.body and operator.kind != _ATTENTION else ()
    multiplies = any(work.contraction for work in operator.work)
    found: list[tuple[str, int, int]] = []
    for step in steps:
        tensors = [operand for operand in step.operands if isinstance(operand, str)]
        known = function_of(step.function)
        is_sum = known.counts is Arithmetic.SUM
        if known.kernel is KernelClass.NORMS:
            found.append((NORMS, 2, 3))
        elif step.function not in POINTWISE or step.function == "identity" or weights.issuperset(tensors):
            continue
        elif multiplies and is_sum and not weights.isdisjoint(tensors):
            # A product adds its bias itself; its gradient is the sum of the one that comes.
            found.append((MEMORY, 0, 1))
        else:
            found.append((known.kernel, 2, 0 if is_sum else 3))
    if multiplies:
        return MEMORY, found
    # The first one reads what the layer reads, and writes what it writes.
    return (found[0][0], found[1:]) if found else (MEMORY, [])
