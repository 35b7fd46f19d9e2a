"""`explain_step`: why a plan with micro-batches, stages or modes of layers is as it is.

What a layer would do otherwise is told of the layer alone, all others as they are: the step's time and its stage's
memory are worked out anew, from the sums of the changed strategy (`StageProblem.sums`), which is exact. Such a plan
lives within a limit on memory that whole stages share, so that a mode that costs more is there to make room for others.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from pase.analysis.explanation.constrained_search import TIE
from pase.analysis.explanation.why_not import configuration_text
from pase.analysis.simulation.pipeline import StagedSimulation, simulate_stages
from pase.common.words import percent, quantity
from pase.costs import REPLICATED, cost_model
from pase.costs.choice_tables import KnownChoices, choice_tables
from pase.costs.memory import keeping
from pase.costs.states import STATES, ModeSpace
from pase.errors import ConfigurationError, PlanError, unknown_name
from pase.graph import Graph
from pase.planning.constraints import allowed, mode_space
from pase.planning.pipelines import schemes, solve_scheme
from pase.planning.plan import LayerPlan, Plan
from pase.planning.planner import Progress, fitting_limit, whole_graph
from pase.planning.spans import Scheme, Setting
from pase.planning.stage_problem import StageProblem, StageSums
from pase.planning.stages import schedule_of
from pase.planning.steps import LayerChoice, Step
from pase.sharding.shards import IndexArray


@dataclass(frozen=True, kw_only=True)
class LayerMode:
    """What a layer could do, all others as they are.

    step_s: of the step; difference_s: to the plan's. limit_bytes: of the plan, infinite without one. is_own: whether
    the plan has it so. step: the step with it; stage: the layer's.
    """

    splits: Mapping[str, int]
    state: str
    is_recomputed: bool
    step_s: float
    difference_s: float
    limit_bytes: float
    is_own: bool
    step: Step = field(repr=False, compare=False)
    stage: int

    @cached_property
    def memory_bytes(self) -> int:
        """The most that is in the memory of a device of the stage."""
        return self.step.peak_of_stage(self.stage).bytes

    @property
    def fits(self) -> bool:
        """Whether that is within the limit."""
        return self.memory_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayer:
    """Why one layer is as it is.

    modes: of its configuration, the plan's among them, the cheapest first. other: the cheapest of its other
    configurations that fits, in the best of its modes; None where there is none, or where these were not looked at.
    """

    name: str
    kind: str
    stage: int
    modes: tuple[LayerMode, ...]
    other: LayerMode | None
    reason: str

    def text(self, mode: LayerMode) -> str:
        """Return a mode in words: "zero1, recomputed"; "kept" where the layer has no weights to hold otherwise."""
        has_states = len({each.state for each in self.modes} | {REPLICATED}) > 1
        return ", ".join([*[mode.state] * has_states, "recomputed" if mode.is_recomputed else "kept"])

    @property
    def own(self) -> LayerMode:
        return next(mode for mode in self.modes if mode.is_own)

    @property
    def held(self) -> LayerMode | None:
        """The cheapest mode of those that would cost less and do not fit."""
        return next((mode for mode in self.modes if mode.difference_s < -TIE * mode.step_s and not mode.fits), None)

    @property
    def runner_up(self) -> LayerMode | None:
        return next((mode for mode in self.modes if not mode.is_own and mode.fits), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """Why a step is as it is. simulation: what its stages do when. limit_bytes: None where memory is not limited."""

    plan: Plan
    simulation: StagedSimulation
    limit_bytes: int | None
    layers: tuple[StepLayer, ...]

    def __getitem__(self, name: str) -> StepLayer:
        """Return what is said of a layer; KeyError if there is nothing."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    @property
    def slowest(self) -> int:
        """The stage that the others wait for."""
        stages = self.simulation.stages
        return max(range(len(stages)), key=lambda number: stages[number].micro_batch_s)

    @property
    def fill(self) -> float:
        """The share of the time that filling and draining the pipeline would take with stages of one length."""
        fill = (self.plan.num_groups - 1) / self.simulation.step.chunks
        return fill / (self.plan.micro_batches + fill)


def explain_step(
    plan: Plan, layers: Iterable[str] | None = None, *, on_progress: Progress | None = None
) -> StepExplanation:
    """Return why a plan with micro-batches, stages or modes of layers is as it is.

    Args:
        plan: the plan.
        layers: which to explain, by name, other configurations of theirs looked at, too; None: all, as to their modes.
        on_progress: called with what is being done and the fraction that is done.

    Raises:
        PlanError: the plan has no such layer, or groups of devices have several stages.
    """
    simulation = simulate_stages(plan)
    wanted = list(plan.index if layers is None else layers)
    work = _Work(plan, simulation.step)
    found = []
    for number, name in enumerate(wanted):
        if name not in plan.index:
            raise PlanError(unknown_name("layer", name, plan.index))
        found.append(work.layer(plan[name], is_whole=layers is not None))
        if on_progress:
            on_progress("looking at other modes", (number + 1) / len(wanted))
    return StepExplanation(plan=plan, simulation=simulation, limit_bytes=plan.device_memory_bytes, layers=tuple(found))


class _Work:
    """What is known of a step while its layers are explained one after the other."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self.plan, self.step = plan, step
        self.modes = mode_space(ModeSpace(states=STATES, recompute=True), plan.constraints, plan.graph)
        self.left = allowed(plan.constraints, plan.graph, step.group)
        self.limit = inf if plan.device_memory_bytes is None else plan.device_memory_bytes

    def layer(self, layer: LayerPlan, *, is_whole: bool) -> StepLayer:
        """Return what is said of a layer; is_whole: whether other configurations are looked at."""
        number = layer.stage
        problem, choice = self.step.problems[number]
        at = self.plan.index[layer.name] - self.step.bounds[number][0]
        rows = np.array([list(layer.splits.values())], dtype=np.int32)
        own = choice[at]
        modes = sorted(
            self._modes(layer, problem, choice, at, rows, own), key=lambda mode: (mode.difference_s, not mode.is_own)
        )
        other = self._other(layer, at) if is_whole else None
        found = StepLayer(name=layer.name, kind=layer.kind, stage=number, modes=tuple(modes), other=other, reason="")
        return replace(found, reason=self._reason(layer, found))

    def _modes(
        self,
        layer: LayerPlan,
        problem: StageProblem,
        choice: tuple[int, ...],
        at: int,
        rows: IndexArray,
        own: int | None,
    ) -> Iterator[LayerMode]:
        """Yield what each choice of a layer takes, [rows] its configurations."""
        modes, may = problem.tables.layers[at], self.modes.of(layer.name)
        for c in range(len(modes)):
            is_allowed = STATES[modes.state[c]] in may.states and (may.recompute or not modes.again[c])
            if c != own and not is_allowed:
                continue
            sums = problem.sums((*choice[:at], c, *choice[at + 1 :]))
            others = self._sums(layer.stage, sums)
            step = self.step.cost_of(others)
            splits = dict(zip(layer.splits, rows[modes.rows[c]].tolist(), strict=True))
            state, is_again = STATES[modes.state[c]], bool(modes.again[c])
            yield LayerMode(
                splits=splits,
                state=state,
                is_recomputed=is_again,
                step_s=step,
                difference_s=step - self.step.cost,
                limit_bytes=self.limit,
                is_own=c == own,
                step=self.step.with_layer(
                    self.plan.index[layer.name],
                    LayerChoice(splits=splits, state=state, is_recomputed=is_again, stage=layer.stage),
                ),
                stage=layer.stage,
            )

    def _sums(self, number: int, sums: StageSums) -> list[StageSums]:
        """Return those of all stages, with other ones of a stage."""
        return [*self.step.sums[:number], sums, *self.step.sums[number + 1 :]]

    def _other(self, layer: LayerPlan, at: int) -> LayerMode | None:
        """Return the cheapest other configuration that fits, in the best mode."""
        step, number = self.step, layer.stage
        graph = step.stages[number]
        first, beyond = step.bounds[number]
        rows = {
            operator.name: np.array([list(own.splits.values())], dtype=np.int32)
            for operator, own in zip(graph.operators, step.layers[first:beyond], strict=True)
        }
        rows[layer.name] = self.left.configurations(step.graph, graph.operators[at])
        problem, choice = step.problems[number]
        tables = choice_tables(
            graph,
            step.group,
            cost_model(step.cost_model, step.machine, step.group, step.graph.precision),
            ModeSpace(states=STATES, recompute=True),
            known=KnownChoices(),
            keeps=keeping(step.graph),
            only=rows,
            optimiser=step.optimiser,
            links=step.links[number],
            micro_batches=step.micro_batches,
            is_whole=True,
            has_passes=True,
        )
        opened = replace(problem, tables=tables)
        every = self._modes(layer, opened, choice, at, rows[layer.name], None)
        others = (mode for mode in every if mode.splits != dict(layer.splits))
        return next((mode for mode in sorted(others, key=lambda mode: mode.difference_s) if mode.fits), None)

    def _reason(self, layer: LayerPlan, found: StepLayer) -> str:
        own, held, runner_up = found.own, found.held, found.runner_up
        what = f"{layer.name}: {configuration_text(layer.splits, len(layer.devices))}, {found.text(own)}"

        def more(mode: LayerMode) -> str:
            share = mode.difference_s / self.step.cost
            return "the same" if abs(share) <= TIE else percent(share)

        if runner_up is not None and runner_up.difference_s < -TIE * self.step.cost:
            gap = f"within the search's gap of {self.plan.gap:.2%}" if self.plan.gap else "the plan is not the best"
            return f"{what}, although {found.text(runner_up)} fits and costs {more(runner_up)}: {gap}"
        if held is not None:
            over = quantity(held.memory_bytes - self.limit, "B")
            return f"{what}, because {found.text(held)} ({more(held)}) would need {over} more than its devices may"
        if runner_up is None:
            alone = len(found.modes) == 1
            return f"{what}, {'its only mode' if alone else 'because no other mode fits'}"
        spared = own.memory_bytes - runner_up.memory_bytes
        room = (
            f" and {'spare' if spared > 0 else 'need'} {quantity(abs(spared), 'B')}{'' if spared > 0 else ' more'}"
            if abs(spared) >= 1
            else ""
        )
        return f"{what}, because the next best, {found.text(runner_up)}, would cost {more(runner_up)}{room}"


# -- other numbers of stages and of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOutcome:
    """The cheapest step of other numbers of stages and micro-batches. step_s: None where none is known to fit.

    bound_s: none takes less; of the plan's own, its lower bound. is_own: whether the plan has these. chunks: stages of
    each group of devices, as in the plan: `stages` is the number of groups.
    """

    stages: int
    micro_batches: int
    chunks: int
    step_s: float | None
    bound_s: float
    is_own: bool


def other_schemes(
    plan: Plan, *, space: ModeSpace | None = None, whole: Graph | None = None, on_progress: Progress | None = None
) -> tuple[SchemeOutcome, ...]:
    """Return what the next smaller and larger numbers of stages and micro-batches would take, each searched.

    Args:
        plan: whose numbers they are compared with.
        space: modes to choose from; None: those that layers of the plan have.
        whole: the graph of the whole batch; needed of models that are no built-in networks.
        on_progress: called with what is being done and the fraction that is done.

    Raises:
        PlanError: the graph of the whole batch is not known.
    """
    states = {layer.state for layer in plan}
    whole = whole_graph(plan) if whole is None else whole
    space = space or ModeSpace(
        states=tuple(state for state in STATES if state == REPLICATED or state in states),
        recompute=any(layer.is_recomputed for layer in plan),
    )
    own = Scheme(stages=plan.num_groups, micro_batches=plan.micro_batches, chunks=plan.num_stages // plan.num_groups)
    setting = Setting(
        graph=whole,
        num_devices=plan.num_devices,
        machine=plan.machine,
        cost_model=plan.cost_model,
        space=mode_space(space, plan.constraints, plan.graph),
        optimiser=plan.optimiser,
        limit_bytes=float(plan.device_memory_bytes or fitting_limit(plan.machine, plan.cost_model) or inf),
        schedule=schedule_of(own.chunks),
        constraints=plan.constraints,
    )
    every = [each for each in schemes(setting, None, None) if each.chunks == own.chunks]
    stages = _neighbours({each.stages for each in every}, own.stages)
    counts = _neighbours({each.micro_batches for each in every}, own.micro_batches)
    asked = [replace(own, stages=number) for number in stages] + [replace(own, micro_batches=m) for m in counts]
    asked = [each for each in asked if each in every]
    found = [
        SchemeOutcome(
            stages=own.stages,
            micro_batches=own.micro_batches,
            chunks=own.chunks,
            step_s=plan.total_cost,
            bound_s=plan.lower_bound,
            is_own=True,
        )
    ]
    for number, scheme in enumerate(asked):
        if on_progress:
            on_progress("searching other schemes", number / len(asked))
        try:
            best = solve_scheme(setting, scheme)
        except ConfigurationError:  # not every divisor of the batch is one of what each layer has of it
            continue
        found.append(
            SchemeOutcome(
                stages=scheme.stages,
                micro_batches=scheme.micro_batches,
                chunks=scheme.chunks,
                step_s=best.cost if best.parts else None,
                bound_s=best.bound,
                is_own=False,
            )
        )
    return tuple(sorted(found, key=lambda each: (each.stages, each.micro_batches)))


def _neighbours(numbers: Set[int], own: int) -> list[int]:
    """Return the next smaller number and the next larger one, as far as there are any."""
    smaller, larger = (n for n in numbers if n < own), (n for n in numbers if n > own)
    return [n for n in (max(smaller, default=None), min(larger, default=None)) if n is not None]
