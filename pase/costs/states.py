"""How the devices that hold the same part of a weight hold its state: whole, or in shards (ZeRO); what that takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.costs.memory import (
    Parts,
    held_parts,
)
from pase.graph import Access, AllReduce, Operator
from pase.sharding.shards import (
    Splits,
    shard_dims,
    sharded_extents,
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

    @property
    def recomputes(self) -> bool:
        """Whether any layer may be recomputed."""
        return self.recompute or any(own.recompute for own in self.layers.values())

    def of(self, layer: str) -> "ModeSpace":
        """Return the modes that a layer may have."""
        return self.layers.get(layer) or replace(self, layers=FrozenDict())


EVERY_MODE = ModeSpace(states=STATES, recompute=True)


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
