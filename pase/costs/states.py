"""How the devices that hold the same part of a weight hold its state: whole, or in shards (ZeRO); what that takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.costs.memory import (
    LayerMemory,
    Parts,
    held_parts,
    num_points,
    state_size,
)
from pase.graph import ITEMSIZES, Access, AllReduce, Graph, Operator
from pase.sharding.shards import (
    IntArray,
    Splits,
    shard_dims,
    sharded_extents,
    shards_in_order,
)

REPLICATED = "replicated"
STATES = (REPLICATED, "zero1", "zero2", "zero3")
"""How the devices that hold the same part of a weight hold it: whole, with the optimizer's state in parts; with the
gradient in parts, too; with the weight in parts, too, which is gathered when the layer's turn comes."""

SCATTERED_OFTEN, GATHERED_OFTEN = ("zero2", "zero3"), ("zero3",)
"""States in which gradients are reduced and scattered, and weights gathered, for each micro-batch, not once a step."""

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSpace:
    """Which modes there are to choose from.

    states: in `STATES`; layers that have no weights to hold in parts are `REPLICATED` in any case. recompute: whether
    layers may be recomputed. rings: whether attention may pass keys and values round, too, where its sequence is split.
    layers: of some layers, by name, what they have instead.
    """

    states: tuple[str, ...] = (REPLICATED,)
    recompute: bool = False
    rings: bool = False
    layers: Mapping[str, "ModeSpace"] = field(default_factory=FrozenDict, hash=False)

    @property
    def is_plain(self) -> bool:
        """Whether there is one mode: weights replicated, nothing recomputed."""
        return self.states == (REPLICATED,) and not self.recompute

    def without_rings(self) -> "ModeSpace":
        """Return the modes that there are without rings to choose."""
        return replace(self, rings=False, layers=FrozenDict({n: own.without_rings() for n, own in self.layers.items()}))

    def of(self, layer: str) -> "ModeSpace":
        """Return the modes that a layer may have."""
        return self.layers.get(layer) or replace(self, layers=FrozenDict())


def sharded(operator: Operator, position: int, splits: Splits) -> BoolArray:
    """Return [K] whether the devices that all-reduce the gradient of a weight can shard its state over themselves."""
    access = operator.reads[position]
    group = splits.product(operator.partial_dims(access))
    part = [size for _, size in held_parts(operator, access, splits)]
    found: BoolArray = np.broadcast_to(shard_dims(part, group) >= 0, len(splits.values))
    return found & access.is_trained & (not access.shared) & ~sums_moments(operator, splits)


def shard_parts(operator: Operator, weight: Access, splits: Splits) -> Parts:
    """Return the largest shard of a device's part of a weight, of those of the devices that add up its gradient."""
    parts = held_parts(operator, weight, splits)
    group = splits.product(operator.partial_dims(weight))
    sizes = sharded_extents([size for _, size in parts], group)
    return [(extent, size) for (extent, _), size in zip(parts, sizes, strict=True)]


def sums_moments(operator: Operator, splits: Splits) -> BoolArray:
    """Return [K] whether a batch normalisation's moments are sums over devices.

    The gradient of what it reads needs those of its weights then, whole and summed.
    """
    found: BoolArray = np.zeros(len(splits.values), dtype=np.bool_)
    for exchange in operator.exchanges if operator.kind == "batch_norm" else ():
        found |= splits.product(exchange.over if isinstance(exchange, AllReduce) else ()) > 1
    return found


def can_be_in_parts(operator: Operator, splits: Splits) -> bool:
    """Return whether the state of any weight of a layer can lie in parts, under any of some configurations."""
    return any(
        bool(sharded(operator, position, splits).any())
        for position, read in enumerate(operator.reads)
        if read in operator.parameters
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBytes:
    """[K] bytes of the weights of a layer whose state can be sharded.

    Attributes:
        replicated: [3, K] of the weights, their gradients and the optimizer's state where every device has all of its
            part.
        sharded: [3, K] of these where a device has a shard, the largest one.
        gathered: Of the weights as they are gathered: as many shards as devices, all as long as the largest.
        apart: Of the weights' shards that do not follow one another in memory.
    """

    replicated: IntArray
    sharded: IntArray
    gathered: IntArray
    apart: IntArray

    @classmethod
    def of(cls, graph: Graph, operator: Operator, splits: Splits, optimiser: str) -> "ShardedBytes":
        """Return those of a layer under its configurations."""
        precision, num = graph.precision, len(splits.values)
        replicated, shards = np.zeros((3, num), dtype=np.int64), np.zeros((3, num), dtype=np.int64)
        gathered, apart = np.zeros((2, num), dtype=np.int64)
        for position, read in enumerate(operator.reads):
            if read not in operator.parameters:
                continue
            is_sharded = sharded(operator, position, splits)
            shard = shard_parts(operator, read, splits)
            for total, parts in ((replicated, held_parts(operator, read, splits)), (shards, shard)):
                points = num_points(parts, num) * is_sharded
                total[0] += points * precision.itemsize
                total[1] += points * ITEMSIZES[precision.gradients]
                total[2] += state_size(parts, num, precision, optimiser) * is_sharded
            count = splits.product(operator.partial_dims(read))
            own = num_points(shard, num) * precision.itemsize * is_sharded
            gathered += own * count
            in_order = shards_in_order([size for _, size in held_parts(operator, read, splits)], count)
            apart += own * ~in_order
        return cls(replicated=replicated, sharded=shards, gathered=gathered, apart=apart)


def state_bytes(
    graph: Graph, operator: Operator, splits: Splits, memory: LayerMemory, state: str, optimiser: str
) -> tuple[IntArray, IntArray, IntArray]:
    """Return [K] what a layer's weights, their gradients and the optimizer's state take; memory: where all is whole."""
    return bytes_in_state(ShardedBytes.of(graph, operator, splits, optimiser), memory, state)


def bytes_in_state(sizes: ShardedBytes, memory: LayerMemory, state: str) -> tuple[IntArray, IntArray, IntArray]:
    """Return [K] bytes of a layer's weights, of their gradients and of the optimizer's state in one state."""
    weights, gradients, moments = memory.weights, memory.gradients, memory.optimiser
    if state == REPLICATED:
        return weights, gradients, moments
    # A device that has all of its part has room in it for what is gathered, and its shard in it or beside it.
    held = sizes.sharded[0] if state in GATHERED_OFTEN else sizes.gathered + sizes.apart
    weights = weights - sizes.replicated[0] + held
    if state in SCATTERED_OFTEN:
        gradients = gradients - sizes.replicated[1] + sizes.sharded[1]
    return weights, gradients, moments - sizes.replicated[2] + sizes.sharded[2]
