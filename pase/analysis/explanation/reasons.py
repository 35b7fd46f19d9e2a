"""Sentences: why a layer has its configuration, in words that computed numbers choose and fill."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from pase.analysis.explanation.findings import MemoryBinding
from pase.analysis.explanation.parts import Part, PartKind
from pase.common.quantities import quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The part that costs most more under another choice than under a layer's own.

    layer: whose part it is, "" for the layer itself. part: as it is under the other choice. before: the same part
    under the layer's own; None where it costs nothing there.
    """

    layer: str = ""
    part: Part
    before: Part | None

    @property
    def cost(self) -> float:
        """By how much it costs more."""
        return self.part.cost - (self.before.cost if self.before else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Another choice for a layer, in words ("splitting the batch (b=32)"), and what is dearest about it."""

    choice: str
    excess: Excess


def configuration_text(splits: Mapping[str, int], num_devices: int) -> str:
    """Return a configuration in words: "b=4 n=2", with "×4" where four devices hold each part, or "not split"."""
    text = " ".join(f"{dim}={k}" for dim, k in splits.items() if k > 1) or "not split"
    replicas = num_devices // prod(splits.values())
    return text if replicas == 1 else f"{text} ×{replicas}"


def percent(fraction: float) -> str:
    """Return a signed part of a hundred with two digits: "+1.2%"."""
    value = 100 * fraction
    if 0 < abs(value) < 1e-4:
        return f"{'+' if value > 0 else '-'}<0.0001%"
    return f"{value:+.0f}%" if abs(value) >= 9.95 else f"{value:+.2g}%"


def only_reason(layer: str, own: str, *, is_only: bool) -> str:
    """Return the sentence for a layer without another configuration, or (not is_only) without another that fits."""
    return f"{layer}: {own}, its only configuration{'' if is_only else ' for which a strategy was found that fits'}"


def memory_reason(other: str, memory: MemoryBinding, plan_cost: float) -> str:
    """Return what is added to a layer's sentence where its cheaper configuration does not fit."""
    when = "" if memory.is_alone else " together with others"
    return (
        f"; memory binds: {other}{when} would cost {percent(memory.difference / plan_cost)} but takes "
        f"{quantity(memory.needed_bytes, 'B')} on each device, over the limit of {quantity(memory.limit_bytes, 'B')}"
    )


def tie_reason(layer: str, own: str, other: str, contrast: Contrast | None, unit: str) -> str:
    """Return the sentence for a layer whose runner-up costs the same."""
    because = f", because {contrast.choice} would {would(contrast.excess, unit)}" if contrast else ""
    return f"{layer}: {own}{because}; {other} costs the same"


def best_reason(layer: str, own: str, other: str, relative: float, contrast: Contrast | None, unit: str) -> str:
    """Return the sentence for a layer whose configuration is the best; contrast: with another than the runner-up."""
    because = f", because {contrast.choice} would {would(contrast.excess, unit)}" if contrast else ""
    return f"{layer}: {own}{because}; next best {other} costs {percent(relative)}"


def next_best_reason(layer: str, own: str, other: str, relative: float, excess: Excess, unit: str) -> str:
    """Return the sentence for a layer that is compared with its runner-up itself."""
    return f"{layer}: {own}, because the next best, {other}, would {would(excess, unit)}: {percent(relative)} in all"


def not_best_reason(layer: str, own: str, best: str, saved: float, excess: Excess | None, unit: str) -> str:
    """Return the sentence for a layer that a cheapest strategy has otherwise.

    saved: by the best over the cheapest strategy with its own, as a part of the plan's cost; excess: of the latter.
    """
    keeping = f": keeping {own} would {would(excess, unit)}" if excess else ""
    return f"{layer}: {own} is not the best, {best} would save {percent(saved).lstrip('+')} of the plan's cost{keeping}"


def would(excess: Excess, unit: str) -> str:
    """Return what the other choice would do: "all-reduce 151 MB of weight gradients over 32 devices"."""
    part, before = excess.part, excess.before
    action = _ACTIONS[part.kind](part, excess, unit)
    if before is not None and before.size_bytes and part.kind is not PartKind.COMPUTE:
        if before.size_bytes < part.size_bytes:
            over = f" over {before.group}" if before.group not in (0, part.group) else ""
            action += f", not {quantity(before.size_bytes, 'B')}{over}"
        else:  # it is not the bytes: more devices, or links further out
            action += f" at {quantity(excess.cost, unit)} more"
    return f"make {excess.layer} {action}" if excess.layer else action


def _compute(_part: Part, excess: Excess, unit: str) -> str:
    return f"compute {'' if unit == 'FLOP' else 'for '}{quantity(excess.cost, unit)} more on each device"


def _summed(what: str) -> "_Action":
    def action(part: Part, _excess: Excess, _unit: str) -> str:
        return f"all-reduce {quantity(part.size_bytes, 'B')} of {what} over {part.group} devices"

    return action


def _sent(verb: str, what: str) -> "_Action":
    def action(part: Part, _excess: Excess, _unit: str) -> str:
        return f"{verb} {quantity(part.size_bytes, 'B')}{what}{part.other}"

    return action


_Action = Callable[[Part, Excess, str], str]

_ACTIONS: Mapping[PartKind, _Action] = MappingProxyType(
    {
        PartKind.COMPUTE: _compute,
        PartKind.GRADIENTS: _summed("weight gradients"),
        PartKind.PARTIAL_SUMS: _summed("partial sums"),
        PartKind.INPUT_GRADIENTS: _summed("its input's gradient"),
        PartKind.HALO: _sent("exchange", " of halo"),
        PartKind.EXCHANGE: _sent("exchange", " inside it"),
        PartKind.RESHARD_FROM: _sent("re-shard", " from "),
        PartKind.RESHARD_TO: _sent("re-shard", " to "),
        PartKind.SHARED_WEIGHT: _sent("move", " of the weight that it shares with "),
    }
)
