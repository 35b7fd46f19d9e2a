"""What else a layer could have, what that would cost, and the sentence that says why it does not have it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from pase.analysis.explanation.alternatives import Alternative
from pase.analysis.explanation.constrained_search import TIE, Improvement
from pase.analysis.explanation.cost_parts import CostParts, Part, PartKind, Rise
from pase.analysis.explanation.planned_stages import PlannedStage
from pase.common.words import percent, quantity
from pase.costs import REPLICATED
from pase.planning.plan import configuration_text
from pase.planning.steps import LayerChoice
from pase.sharding.edges import LayerMode
from pase.sharding.shards import data_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The cheapest strategy in which a layer has another configuration, or its own in another mode.

    Attributes:
        choice: What the layer has in it.
        total_cost: Of the strategy.
        difference: Its cost less that of the cheapest strategy that keeps the layer as it is; below 0 where that is not
            the best.
        is_tie: Whether they cost the same.
        is_exact: Whether that is proven.
        more_bytes: How much more a device of the layer's stage needs than under the plan; None where that was not
            worked out.
        changes: The other layers that differ with it, and what they have then; None where that was not worked out.
        alone: The best such choice while all other layers stay as they are; None where none fits, or where that was not
            worked out.
        alone_difference: What that costs more than the plan.
        rises: What the difference is made of, less what overlaps more (`hidden`); () where that was not worked out.
        hidden: What overlaps with compute, or with other stages, more than with the layer's own choice.
    """

    choice: LayerChoice
    total_cost: float
    difference: float
    is_tie: bool
    is_exact: bool
    more_bytes: int | None = None
    changes: tuple[tuple[str, LayerChoice], ...] | None = None
    alone: LayerChoice | None = None
    alone_difference: float = 0.0
    rises: tuple[Rise, ...] = ()
    hidden: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Where a layer's choice changes with the speed of links.

    Attributes:
        scale: By how much slower the links are then.
        choice: What it becomes.
    """

    scale: float
    choice: LayerChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBinding:
    """What a layer would have at a lower cost if it fitted.

    Attributes:
        choice: What it would have.
        difference: What it costs more than the plan, below 0.
        is_alone: Whether all other layers stay as they are; else it is of the cheapest strategy without a limit.
        needed_bytes: On each device.
        limit_bytes: The most that may be there.
    """

    choice: LayerChoice
    difference: float
    is_alone: bool
    needed_bytes: int
    limit_bytes: int

    @property
    def excess_bytes(self) -> int:
        """By how much that is over the limit."""
        return self.needed_bytes - self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step takes in which a layer has some choice.

    Attributes:
        choice: Of the layer.
        is_own: Whether the plan has it.
        difference: What the cheapest strategy with it that fits costs more than the plan; None where none is known.
        is_exact: Whether that is proven.
        alone_difference: What it costs more with all other layers as they are.
        stage: That the layer is of.
        strategy: Of the stage, with all other layers as they are.
    """

    choice: LayerChoice
    is_own: bool
    difference: float | None
    is_exact: bool
    alone_difference: float
    stage: PlannedStage = field(repr=False, compare=False)
    strategy: tuple[int, ...] = field(repr=False)

    @cached_property
    def memory_bytes(self) -> int:
        """The most that is in the memory of a device of the stage, with all other layers as they are."""
        return self.stage.bytes_needed(self.strategy)

    @property
    def fits(self) -> bool:
        """Whether that is within the plan's limit."""
        return self.memory_bytes <= (self.stage.plan.device_memory_bytes or self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExplanation:
    """Why a layer has its configuration, and its mode.

    Attributes:
        name: Of the layer.
        like: The repeated layer whose alternatives these are; its own name where they are its own.
        kind: Of the layer.
        choice: What the plan has.
        num_configurations: That it could have.
        parts: Of the cost that it has a say in, the one of which most is paid first.
        is_best: Whether its choice is part of a cheapest strategy.
        best: What it has in one.
        kept_total_cost: Of the cheapest strategy with its own choice.
        runner_up: The cheapest with another configuration; None where it has no other that fits.
        other_mode: The cheapest with its own configuration in another mode; None likewise, and for plans without modes.
        memory: None where memory makes no difference to it.
        below: Nearest flip with faster links; None where there is none.
        above: Nearest flip with slower links.
        outcomes: Of all modes of its configuration; () for plans without modes.
        reason: One sentence.
    """

    name: str
    like: str
    kind: str
    choice: LayerChoice
    num_configurations: int
    parts: tuple[Part, ...]
    is_best: bool
    best: LayerChoice
    kept_total_cost: float
    runner_up: RunnerUp | None
    other_mode: RunnerUp | None
    memory: MemoryBinding | None
    below: Flip | None
    above: Flip | None
    outcomes: tuple[Outcome, ...]
    reason: str

    @property
    def binding(self) -> Part | None:
        """The part of which most is paid; None where nothing is."""
        return self.parts[0] if self.parts and self.parts[0].paid > 0 else None

    @property
    def share(self) -> float:
        """The binding part's share of all that is paid, 0 to 1."""
        paid = sum(part.paid for part in self.parts)
        return self.parts[0].paid / paid if paid else 0.0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan is as it is.

    Attributes:
        plan_cost: Of a step.
        optimum_cost: Of the cheapest strategy found now; of several stages, in which one of them differs from the plan.
        is_optimal: Whether the plan costs no more than that.
        is_proven: Whether that is proven to be cheapest.
        cost_unit: Of all costs.
        flop_per_byte: r of Eq. 1; None for a cost model in seconds.
        searched: The scales, from and to, within which flips are complete.
        has_flips: Whether flips were looked for.
        layers: That were asked for.
        improvement: What to change first; None where nothing is.
    """

    plan_cost: float
    optimum_cost: float
    is_optimal: bool
    is_proven: bool
    cost_unit: str
    flop_per_byte: float | None
    searched: tuple[float, float]
    has_flips: bool
    layers: tuple[LayerExplanation, ...]
    improvement: Improvement | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The part that costs most more under another choice than under a layer's own.

    Attributes:
        layer: Whose part it is, "" for the layer itself.
        part: As it is under the other choice.
        before: The same part under the layer's own; None where it costs nothing there.
        paid: By how much more of it is paid, as far as one part can be told from the others: where all communication
            that can overlap does under the other choice, of communication what cannot; elsewhere, of computation what
            nothing overlaps with.
    """

    layer: str = ""
    part: Part
    before: Part | None
    paid: float

    @property
    def cost(self) -> float:
        return self.part.cost - (self.before.cost if self.before else 0.0)


def choice_text(choice: LayerMode, num_devices: int, other: LayerMode | None = None) -> str:
    """Return a layer's configuration and mode in words: "b=4 n=2 zero1 recomputed".

    What is usual is left out, unless another choice that it is compared with differs in it.
    """
    words = [configuration_text(choice.splits, num_devices)]
    if choice.state != REPLICATED or (other is not None and other.state != REPLICATED):
        words.append(choice.state)
    if choice.is_recomputed or (other is not None and other.is_recomputed):
        words.append("recomputed" if choice.is_recomputed else "kept")
    return " ".join(words)


def mode_text(choice: LayerMode, other: LayerMode) -> str:
    """Return the mode of a choice in words, as far as it differs from another's: "zero1 kept"."""
    words = [choice.state] * (choice.state != other.state)
    if choice.is_recomputed != other.is_recomputed:
        words.append("recomputed" if choice.is_recomputed else "kept")
    return " ".join(words)


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


def _recompute(_part: Part, excess: Excess, unit: str) -> str:
    return f"recompute for {quantity(excess.cost, unit)} more on each device"


def _of_stages(_part: Part, excess: Excess, unit: str) -> str:
    return f"exchange {quantity(excess.cost, unit)} more with other stages"


def _collective(verb: str, what: str) -> "_Action":
    def action(part: Part, _excess: Excess, _unit: str) -> str:
        return f"{verb} {quantity(part.size_bytes, 'B')} of {what} over {part.group} devices"

    return action


def _sent(verb: str, what: str) -> "_Action":
    def action(part: Part, _excess: Excess, _unit: str) -> str:
        return f"{verb} {quantity(part.size_bytes, 'B')}{what}{part.other}"

    return action


_Action = Callable[[Part, Excess, str], str]

_ACTIONS: Mapping[PartKind, _Action] = MappingProxyType(
    {
        PartKind.COMPUTE: _compute,
        PartKind.GRADIENTS: _collective("all-reduce", "weight gradients"),
        PartKind.PARTIAL_SUMS: _collective("all-reduce", "partial sums"),
        PartKind.INPUT_GRADIENTS: _collective("all-reduce", "its input's gradient"),
        PartKind.HALO: _sent("exchange", " of halo"),
        PartKind.EXCHANGE: _sent("exchange", " inside it"),
        PartKind.RESHARD_FROM: _sent("re-shard", " from "),
        PartKind.RESHARD_TO: _sent("re-shard", " to "),
        PartKind.SHARED_WEIGHT: _sent("move", " of the weight that it shares with "),
        PartKind.RECOMPUTE: _recompute,
        PartKind.SCATTERED_GRADIENTS: _collective("reduce-scatter", "weight gradients"),
        PartKind.GATHERED_WEIGHTS: _collective("all-gather", "weights"),
        PartKind.STAGES: _of_stages,
    }
)


class Reasons:
    """Finds reasons: the layer is compared with data parallelism where its own part is what that would cost.

    Else, and where data parallelism is the runner-up, or its own choice, it is compared with the runner-up.
    """

    def __init__(self, stage: PlannedStage, parts: CostParts) -> None:
        """Take a stage of a plan and what takes its costs apart."""
        self._stage = stage
        self._problem = stage.problem
        self._choice = stage.choice
        self._parts = parts
        self._plan_cost = stage.cost(stage.choice)
        self._unit = stage.plan.cost_unit

    def sentence(
        self,
        vertex: int,
        kept: Alternative,
        other: Alternative | None,
        runner_up: RunnerUp | None,
        other_mode: RunnerUp | None,
        memory: MemoryBinding | None,
    ) -> str:
        """Return the sentence of a layer; kept: the cheapest strategy with its own choice, other: the runner-up."""
        own = self._stage.layer(vertex, self._choice[vertex])
        name = self._problem.graph.operators[vertex].name
        of_configuration = self._of_configuration(vertex, own, kept, other, runner_up)
        return f"{name}: {of_configuration}{self._of_mode(own, other_mode)}{self._of_memory(own, memory)}"

    def _of_configuration(
        self, vertex: int, own: LayerChoice, kept: Alternative, other: Alternative | None, runner_up: RunnerUp | None
    ) -> str:
        text = self.text(own)
        if runner_up is None or other is None:
            is_only = self._stage.num_configurations(vertex) == 1
            among = " within the constraints" if is_only and self._stage.plan.constraints else ""
            return f"{text}, its only configuration{among if is_only else ' for which a strategy was found that fits'}"
        relative = self._relative(runner_up.difference)
        next_best = self.text(runner_up.choice, own)
        if relative < 0 and not runner_up.is_tie:
            excess = self._excess(vertex, other.choice, kept.choice)
            keeping = f": keeping {text} would {would(excess, self._unit)}" if excess else ""
            return f"{text} is not the best, {next_best} would save {_saved(relative)} of the plan's cost{keeping}"
        at_most = "" if runner_up.is_exact else "at most "
        because = self._against_data_parallel(vertex, own)
        if runner_up.is_tie:
            return f"{text}{because}; {next_best} costs the same"
        if not because or self._data_parallel(vertex, own) == other.choice[vertex]:
            excess = self._excess(vertex, kept.choice, other.choice)
            if excess is not None:
                action = would(excess, self._unit) + self._hides(kept.choice, other.choice)
                return (
                    f"{text}, because the next best, {next_best}, would {action}: {at_most}{percent(relative)} in all"
                )
        return f"{text}{because}; next best {next_best} costs {at_most}{percent(relative)}"

    def _of_mode(self, own: LayerChoice, other: RunnerUp | None) -> str:
        """Return what another mode would cost and need; "" where there is none."""
        if other is None:
            return ""
        mode, relative = mode_text(other.choice, own), self._relative(other.difference)
        if relative < 0 and not other.is_tie:
            return f"; {mode} would save {_saved(relative)}"
        more = other.more_bytes or 0
        memory = f" and {'needs' if more > 0 else 'spares'} {quantity(abs(more), 'B')}" if more else ""
        at_most = "" if other.is_exact else "at most "
        return f"; {mode} costs {'the same' if other.is_tie else at_most + percent(relative)}{memory}"

    def _of_memory(self, own: LayerChoice, memory: MemoryBinding | None) -> str:
        """Return which choice costs less and does not fit; "" where there is none."""
        if memory is None:
            return ""
        is_mode = memory.choice.splits == own.splits
        what = mode_text(memory.choice, own) if is_mode else self.text(memory.choice, own)
        when = "" if memory.is_alone else " together with others"
        return (
            f"; memory binds: {what}{when} would cost {percent(self._relative(memory.difference))} but takes "
            f"{quantity(memory.needed_bytes, 'B')} on each device, {quantity(memory.excess_bytes, 'B')} over the limit "
            f"of {quantity(memory.limit_bytes, 'B')}"
        )

    def _relative(self, difference: float) -> float:
        return difference / self._plan_cost if self._plan_cost else 0.0

    def text(self, choice: LayerChoice, other: LayerChoice | None = None) -> str:
        return choice_text(choice, self._problem.num_devices, other)

    def _data_parallel(self, vertex: int, own: LayerChoice) -> int | None:
        """Return the choice of a layer that splits its batch alone, in its own mode."""
        graph = self._problem.graph
        splits = data_parallel(graph, graph.operators[vertex], self._problem.num_devices)
        return self._problem.choice(vertex, splits, own.state, is_recomputed=own.is_recomputed)

    def _against_data_parallel(self, vertex: int, own: LayerChoice) -> str:
        """Return what splitting this layer's batch alone would cost it; "" if it is split so, or nothing would."""
        configuration = self._data_parallel(vertex, own)
        if configuration is None or configuration == self._choice[vertex]:
            return ""
        choice = (*self._choice[:vertex], configuration, *self._choice[vertex + 1 :])
        excess = self._excess(vertex, self._choice, choice)
        if excess is None or excess.part.other:
            return ""  # what an edge costs depends on the neighbours, which would not stay as they are
        text = configuration_text(self._problem.splits(vertex, configuration), self._problem.num_devices)
        action = "not splitting it" if text.startswith("not split") else f"splitting the batch alone ({text})"
        return f", because {action} would {would(excess, self._unit)}{self._hides(self._choice, choice)}"

    def _hides(self, before: Sequence[int], after: Sequence[int]) -> str:
        """Return what is said of how much more, or less, is hidden after a change; "" where that stays."""
        more = self._parts.hidden_more(before, after)
        if abs(more) <= TIE * self._plan_cost:
            return ""
        return f", with {quantity(abs(more), self._unit)} {'more' if more > 0 else 'less'} hidden"

    def _excess(self, vertex: int, before: Sequence[int], after: Sequence[int]) -> Excess | None:
        """Return the part of which most more is paid after a change: of the layer, or of others that change with it."""
        all_hides = self._parts.overlap(after).exposed <= 0

        def most_more(layer: str, v: int) -> Excess | None:
            return _most_more(layer, self._parts.of(v, before), self._parts.of(v, after), all_hides=all_hides)

        found = [most_more("", vertex)]
        for v, (b, a) in enumerate(zip(before, after, strict=True)):
            if b != a and v != vertex:
                found.append(most_more(self._problem.graph.operators[v].name, v))
        return max((excess for excess in found if excess), key=lambda excess: excess.paid, default=None)


def _saved(relative: float) -> str:
    return percent(-relative).lstrip("+")


def _most_more(layer: str, before: Iterable[Part], after: Iterable[Part], *, all_hides: bool) -> Excess | None:
    def paid(part: Part) -> float:
        return part.cost - (part.hideable if all_hides else part.cover)

    known = {(part.kind, part.other): part for part in before}
    rises = []
    for part in after:
        own = known.get((part.kind, part.other))
        excess = Excess(layer=layer, part=part, before=own, paid=paid(part) - (paid(own) if own else 0.0))
        if excess.cost > 0 and excess.paid > 0:
            rises.append(excess)
    return max(rises, key=lambda excess: excess.paid, default=None)
