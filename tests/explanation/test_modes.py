"""Explanations of plans with modes, micro-batches, stages and limits: against all strategies, costed anew."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest

import pase
from pase import Plan
from pase.analysis.explanation import ExplainOptions, Explanation, Outcome, PartKind, explain, overview
from pase.common.words import quantity
from pase.errors import MemoryLimitError, PlanError
from pase.planning.constraints import Forbid
from pase.planning.steps import LayerChoice, TrainingStep
from tests.explanation.test_schemes import free_plan
from tests.networks import limited_staged_plan, with_layer
from tests.planning import test_brute_force as brute
from tests.simulation.machines import machine

MOST_LAYERS = 3
"""Of a stage, all of whose strategies are gone through."""

WITHOUT_FLIPS = ExplainOptions(max_solutions=0, time_limit_s=60.0)
QUICK = ExplainOptions(max_solutions=0, time_limit_s=0.01)
"""Where it is no matter what searches find."""

MANY = [pytest.param(stages, range(100, 300), marks=pytest.mark.full) for stages in (1, 2)]


def case_of(seed: int, stages: int) -> brute.Case:
    """A network and options at random, with all modes to choose from."""
    own = brute.random_case(seed)
    return replace(
        own,
        stages=stages,
        devices=2 * stages,
        micro_batches=(1, 2, 4)[seed % 3],
        states=brute.STATES[1:],
        recompute=True,
    )


def searched(case: brute.Case) -> Plan | None:
    """The plan of a case; None where nothing fits."""
    settings: dict[str, Any] = {} if case.limit == inf else {"device_memory_bytes": int(case.limit)}
    try:
        return pase.search(
            brute.graph_of(case),
            devices=case.devices,
            machine=machine((0, case.alpha, 1 / case.beta), flop_per_s=case.flops),
            cost_model="program",
            optimiser=case.optimizer,
            stages=case.stages,
            micro_batches=case.micro_batches,
            modes=[*case.states, "recompute"],
            **settings,
        )
    except MemoryLimitError:
        return None


class Strategies:
    """All strategies of one stage, others as in the plan: what each layer has in them, and what a step costs."""

    def __init__(self, case: brute.Case, plan: Plan, number: int) -> None:
        layers = brute.with_fans(case.layers, everywhere=case.stages > 1)
        fixed = frozenset(layers[place].name for place in brute.places(layers))
        numbers = [own.stage for own in plan]
        starts = [numbers.index(own) for own in range(case.stages)]
        bounds = list(zip(starts, [*starts[1:], len(layers)], strict=True))
        steps = [brute.Step(case, layers, first, stop, 2, fixed) for first, stop in bounds]
        m, own = case.micro_batches, steps[number].figures()
        self.first, stop = bounds[number]
        self.options = [list(steps[number].choices(layer)) for layer in layers[self.first : stop]]
        self.peaks = brute.Peaks(case, steps[number], in_flight=min(m, case.stages - number))
        others = [self._taken(steps[k], plan, bounds[k]) for k in range(case.stages) if k != number]
        times = [own["t"], *(np.full_like(own["t"], t) for t, _ in others)]
        once = [own["o"], *(np.full_like(own["o"], o) for _, o in others)]
        self.costs = sum(times) + (m - 1) * np.maximum.reduce(times) + np.maximum.reduce(once)
        self.order = self.costs.argsort(kind="stable")
        self.known: dict[int, bool] = {}

    @staticmethod
    def _taken(step: brute.Step, plan: Plan, bounds: tuple[int, int]) -> tuple[float, float]:
        """What a stage of the plan takes: of a micro-batch, and once a step."""
        options = [list(step.choices(layer)) for layer in step.layers[slice(*bounds)]]
        chosen = []
        for at, own in enumerate(options):
            layer = plan.layers[bounds[0] + at]
            chosen.append(next(i for i, choice in enumerate(own) if is_in(plan, layer.name, choice, layer)))
        number = np.ravel_multi_index(chosen, [len(own) for own in options])
        figures = step.figures()
        return float(figures["t"][number]), float(figures["o"][number])

    def least(self, at: int, is_asked: Callable[[brute.Choice], bool]) -> float | None:
        """The least cost of the strategies that fit in which a layer has one of some choices."""
        asked = np.array([is_asked(choice) for choice in self.options[at]])
        among = asked[self.peaks.grid[at]]
        return next((float(self.costs[n]) for n in self.order.tolist() if among[n] and self.fits(n)), None)

    def fits(self, number: int) -> bool:
        """Whether the peak of a strategy is within the limit."""
        if number not in self.known:
            self.known[number] = self.peaks.fits(number)
        return self.known[number]


def is_in(plan: Plan, name: str, choice: brute.Choice, layer: Any) -> bool:
    """Whether a layer has a choice. Without weights that devices share no state differs from another."""
    mode = brute.in_mode(plan.graph[name], choice)
    has_states = choice.split == "b" and plan.graph[name].kind == "dense"
    is_alike = mode.state == (layer.state if has_states else "replicated")
    return dict(mode.splits) == dict(layer.splits) and mode.is_recomputed == layer.is_recomputed and is_alike


def differences(case: brute.Case, plan: Plan, found: Explanation) -> Iterator[tuple[bool, float | None, float | None]]:
    """Whether it is proven, what an explanation says of a choice, and what all strategies say: costs of steps."""
    every = [Strategies(case, plan, number) for number in range(case.stages)]
    for layer in found.layers:
        own = every[plan[layer.name].stage]
        at = plan.index[layer.name] - own.first

        def is_split(choice: brute.Choice, name: str = layer.name) -> bool:
            return dict(brute.in_mode(plan.graph[name], choice).splits) == dict(plan[name].splits)

        other = layer.runner_up
        least = own.least(at, lambda choice: not is_split(choice))
        yield other is None or other.is_exact, other and other.total_cost, least
        for outcome in layer.outcomes:

            def is_outcome(choice: brute.Choice, name: str = layer.name, asked: Outcome = outcome) -> bool:
                return is_in(plan, name, choice, asked.choice)

            told = None if outcome.difference is None else found.plan_cost + outcome.difference
            yield outcome.is_exact, told, own.least(at, is_outcome)


@pytest.mark.parametrize(
    ("stages", "seeds"),
    [
        (1, range(1, 19)),
        (2, range(20, 29)),
        *(pytest.param(s, range(100, 300), marks=pytest.mark.full) for s in (1, 2)),
    ],
)
def test_choices_cost_what_the_cheapest_steps_with_them_do(stages: int, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        case = case_of(seed, stages)
        layers = brute.with_fans(case.layers, everywhere=stages > 1)
        if len(layers) > MOST_LAYERS * stages or (stages > 1 and not brute.places(layers)):
            continue
        plan = searched(case)
        if plan is None or max(Counter(layer.stage for layer in plan).values()) > MOST_LAYERS:
            continue
        if seed % 2:  # nothing may need more than the plan
            case = replace(case, limit=float(plan.memory.total_bytes))
            plan = replace(plan, device_memory_bytes=plan.memory.total_bytes)
        if not plan.has_parts:  # is compared with plans without modes
            case = replace(case, states=(), recompute=False)
        found = explain(plan, plan.index, options=WITHOUT_FLIPS)
        assert found.plan_cost == pytest.approx(plan.total_cost, rel=1e-9)
        assert found.is_optimal
        for is_exact, told, least in differences(case, plan, found):
            if told is None or least is None:
                assert (told, least) == (None, None), seed
            elif is_exact:
                assert told == pytest.approx(least, rel=1e-9), seed
            else:
                assert told >= least * (1 - 1e-9), seed
            counts["exact" if is_exact else "bound"] += 1
            counts["nothing fits"] += told is None
    assert counts["exact"] > 4 * counts["bound"]
    assert counts["nothing fits"] > 0


@cache
def explained() -> Explanation:
    """Why the plan in stages is as it is, whatever is found in so little time."""
    return explain(limited_staged_plan(), options=QUICK)


def test_each_mode_alone_is_the_step_that_has_it() -> None:
    """The stage's other layers and all other stages as they are: costs and peaks."""
    plan = limited_staged_plan()
    limit = plan.device_memory_bytes
    assert limit is not None
    found = explained()
    assert [layer.name for layer in found.layers] == [layer.name for layer in plan]
    checked = 0
    for layer in [one for one in found.layers if len(one.outcomes) > 2][::5]:
        for outcome in layer.outcomes:
            step = _step(plan, layer.name, outcome.choice)
            assert outcome.alone_difference == pytest.approx(step.cost - plan.total_cost, abs=1e-9 * plan.total_cost)
            assert outcome.memory_bytes == step.peaks[plan[layer.name].stage].bytes
            assert outcome.fits == (outcome.memory_bytes <= limit)
            checked += 1
    assert checked > 5


def _step(plan: Plan, name: str, choice: LayerChoice) -> TrainingStep:
    """The step in which one layer has another choice."""
    return with_layer(TrainingStep.of(plan), plan.index[name], choice)


def test_each_layer_has_the_mode_that_the_plan_says() -> None:
    plan = limited_staged_plan()
    for layer in explained().layers:
        own = plan[layer.name]
        assert (layer.choice.splits, layer.choice.stage) == (own.splits, own.stage)
        assert layer.choice.is_recomputed == own.is_recomputed
        (outcome,) = [one for one in layer.outcomes if one.is_own] or [None]
        assert outcome is None or (outcome.fits and outcome.alone_difference == 0)


def test_reasons_say_what_memory_keeps_a_layer_from() -> None:
    plan = limited_staged_plan()
    limit = plan.device_memory_bytes
    assert limit is not None
    found = explained()
    held = [layer for layer in found.layers if layer.memory is not None and layer.memory.is_alone]
    assert any(plan[layer.name].is_recomputed for layer in held)
    for layer in held:
        assert layer.memory is not None
        step = _step(plan, layer.name, layer.memory.choice)
        assert layer.memory.needed_bytes == step.peaks[layer.choice.stage].bytes > limit
        assert layer.memory.difference == pytest.approx(step.cost - plan.total_cost, abs=1e-9 * plan.total_cost)
        assert layer.memory.difference < 0
        assert f"over the limit of {quantity(limit, 'B')}" in layer.reason


def test_constraints_hold_for_what_could_be_otherwise() -> None:
    plan = free_plan(modes=("zero1", "zero2"), constraints=(Forbid(layers=("*",), modes=("zero3", "recompute")),))
    for layer in explain(plan, options=QUICK).layers:
        assert {outcome.choice.state for outcome in layer.outcomes} <= {"replicated", "zero1", "zero2"}
        assert not any(outcome.choice.is_recomputed for outcome in layer.outcomes)
    pinned = replace(plan, constraints=(Forbid(layers=("fc2",), dims=("c", "n")),))
    other = explain(pinned, ["fc2"], options=QUICK)["fc2"].runner_up
    assert other is None or (other.choice.splits["n"], other.choice.splits["c"]) == (1, 1)


def test_parts_are_what_layers_of_a_step_cost() -> None:
    plan = limited_staged_plan()
    assert {layer.state for layer in plan} > {"replicated"}
    for layer, own in zip(overview(plan, time_limit_s=0.0).layers, plan, strict=True):
        assert sum(part.cost for part in layer.parts) == pytest.approx(own.layer_cost, rel=1e-9)
        compute = sum(part.cost for part in layer.parts if part.kind is PartKind.COMPUTE)
        assert compute == pytest.approx(own.compute_cost, rel=1e-9)
        assert any(part.kind is PartKind.RECOMPUTE for part in layer.parts) == (own.is_recomputed and compute > 0)


def test_a_glance_says_what_explanations_say() -> None:
    plan = free_plan()
    found = explain(plan, options=WITHOUT_FLIPS)
    for brief in overview(plan).layers:
        assert brief.reason == found[brief.like].reason
    with pytest.raises(PlanError, match="unknown layer 'fc9'"):
        explain(plan, ["fc9"])
