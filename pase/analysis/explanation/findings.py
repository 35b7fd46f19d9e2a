"""What an explanation says: of every layer, and of the whole plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pase.analysis.explanation.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The cheapest strategy in which a layer has another configuration.

    difference: its cost less that of the cheapest strategy that keeps the layer's own; below 0 where the layer's own is
    not the best. is_tie: they cost the same. is_exact: whether that is proven. changes: the other layers
    whose configuration differs with it, and what it becomes. alone, alone_difference: the best other configuration
    while all other layers stay as they are (None where none fits), and what that costs more than the plan.
    """

    splits: Mapping[str, int]
    total_cost: float
    difference: float
    is_tie: bool
    is_exact: bool
    changes: tuple[tuple[str, dict[str, int]], ...]
    alone: dict[str, int] | None
    alone_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """scale: by how much slower the links are when the layer's choice changes; splits: what it becomes."""

    scale: float
    splits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBinding:
    """A configuration that a layer would have at a lower cost if it fitted.

    difference: what it costs more than the plan, below 0. is_alone: with all other layers as they are; else in the
    cheapest strategy without a limit. needed_bytes, limit_bytes: on each device.
    """

    splits: Mapping[str, int]
    difference: float
    is_alone: bool
    needed_bytes: float
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExplanation:
    """Why a layer has its configuration.

    parts: of the cost it has a say in, the dearest first. best: its configuration in the cheapest strategy, which is
    its own where `is_best`. kept_total_cost: of the cheapest strategy with its own. runner_up: None where it has no
    other configuration that fits. memory: None where memory makes no difference to it. below, above: the nearest flips
    with faster and slower links; None where there is none. reason: one sentence.
    """

    name: str
    kind: str
    splits: Mapping[str, int]
    num_configurations: int
    parts: tuple[Part, ...]
    is_best: bool
    best: Mapping[str, int]
    kept_total_cost: float
    runner_up: RunnerUp | None
    memory: MemoryBinding | None
    below: Flip | None
    above: Flip | None
    reason: str

    @property
    def binding(self) -> Part | None:
        """The part that costs most; None where the layer costs nothing."""
        return self.parts[0] if self.parts else None

    @property
    def share(self) -> float:
        """The binding part's share of all parts, 0 to 1."""
        return self.parts[0].cost / sum(part.cost for part in self.parts) if self.parts else 0.0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan is as it is.

    optimum_cost: of the cheapest strategy found now; is_proven: whether it is proven to be cheapest. is_optimal:
    the plan costs no more than that. flop_per_byte: r of Eq. 1, None for a cost model in seconds. searched: the
    scales, from and to, within which flips are complete.
    """

    plan_cost: float
    optimum_cost: float
    is_optimal: bool
    is_proven: bool
    cost_unit: str
    flop_per_byte: float | None
    searched: tuple[float, float]
    layers: tuple[LayerExplanation, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each explained layer by name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    def __getitem__(self, name: str) -> LayerExplanation:
        """Return what is said of a layer."""
        return self.layers[self.index[name]]

    def relative(self, difference: float) -> float:
        """Return a difference in cost as a part of the plan's cost."""
        return difference / self.plan_cost if self.plan_cost else 0.0
