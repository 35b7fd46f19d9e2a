"""Which numbers a layer's sentence is made of: what it is compared with, and what is dearest about that."""

from collections.abc import Iterable, Mapping, Sequence

from pase.analysis.explanation.alternatives import Alternative
from pase.analysis.explanation.findings import RunnerUp
from pase.analysis.explanation.parts import CostParts, Part
from pase.analysis.explanation.reasons import (
    Contrast,
    Excess,
    best_reason,
    configuration_text,
    next_best_reason,
    not_best_reason,
    only_reason,
    tie_reason,
)
from pase.costs import Problem
from pase.costs.configurations import data_parallel
from pase.planning.plan import Plan


class Contrasts:
    """Finds reasons: the layer is compared with data parallelism where its own part is what that would cost.

    Else, and where data parallelism is the runner-up, or its own choice, it is compared with the runner-up.
    """

    def __init__(self, plan: Plan, problem: Problem, choice: tuple[int, ...], parts: CostParts) -> None:
        """Take a plan, its problem, its strategy by configuration index, and what takes its costs apart."""
        self._plan = plan
        self._problem = problem
        self._choice = choice
        self._parts = parts
        self._plan_cost = problem.tables.evaluate(choice)

    def sentence(self, vertex: int, kept: Alternative, runner_up: RunnerUp | None, other: Alternative | None) -> str:
        """Return the sentence of a layer; kept: the cheapest strategy with its own configuration, other: without."""
        name, unit = self._plan.layers[vertex].name, self._plan.cost_unit
        own = self._text(vertex, self._choice[vertex])
        if runner_up is None or other is None:
            return only_reason(name, own, is_only=self._problem.tables.domain_sizes[vertex] == 1)
        relative = runner_up.difference / self._plan_cost if self._plan_cost else 0.0
        next_best = self._text(vertex, other.choice[vertex])
        if relative < 0 and not runner_up.is_tie:
            excess = self._excess(vertex, other.choice, kept.choice)
            return not_best_reason(name, own, next_best, -relative, excess, unit)
        contrast = self._with_data_parallel(vertex)
        if runner_up.is_tie:
            return tie_reason(name, own, next_best, contrast, unit)
        if contrast is None or self._is_data_parallel(vertex, other.choice[vertex]):
            excess = self._excess(vertex, kept.choice, other.choice)
            if excess is not None:
                return next_best_reason(name, own, next_best, relative, excess, unit)
        return best_reason(name, own, next_best, relative, contrast, unit)

    def _text(self, vertex: int, configuration: int) -> str:
        return self.text(self._problem.splits(vertex, configuration))

    def text(self, splits: Mapping[str, int]) -> str:
        """Return a configuration in words."""
        return configuration_text(splits, self._plan.num_devices)

    def _data_parallel(self, vertex: int) -> tuple[int, ...]:
        graph = self._problem.graph
        return data_parallel(graph, graph.operators[vertex], self._plan.num_devices)

    def _is_data_parallel(self, vertex: int, configuration: int) -> bool:
        splits = self._data_parallel(vertex)
        return self._problem.choice(vertex, splits) == configuration

    def _with_data_parallel(self, vertex: int) -> Contrast | None:
        """Return what splitting this layer's batch alone would cost it; None if it is split so, or nothing would."""
        splits = self._data_parallel(vertex)
        configuration = self._problem.choice(vertex, splits)
        if configuration is None or configuration == self._choice[vertex]:
            return None
        choice = (*self._choice[:vertex], configuration, *self._choice[vertex + 1 :])
        excess = self._excess(vertex, self._choice, choice)
        if excess is None or excess.part.other:
            return None  # what an edge costs depends on the neighbours, which would not stay as they are
        text = self._text(vertex, configuration)
        action = "not splitting it" if text.startswith("not split") else f"splitting the batch alone ({text})"
        return Contrast(choice=action, excess=excess)

    def _excess(self, vertex: int, before: Sequence[int], after: Sequence[int]) -> Excess | None:
        """Return the part that costs most more after a change: of the layer, or of others that change with it."""
        found = [_most_more("", self._parts.of(vertex, before), self._parts.of(vertex, after))]
        for v, (b, a) in enumerate(zip(before, after, strict=True)):
            if b != a and v != vertex:
                name = self._plan.layers[v].name
                found.append(_most_more(name, self._parts.of(v, before), self._parts.of(v, after)))
        return max((excess for excess in found if excess), key=lambda excess: excess.cost, default=None)


def _most_more(layer: str, before: Iterable[Part], after: Iterable[Part]) -> Excess | None:
    known = {(part.kind, part.other): part for part in before}
    rises = [Excess(layer=layer, part=part, before=known.get((part.kind, part.other))) for part in after]
    most = max(rises, key=lambda excess: excess.cost, default=None)
    return most if most is not None and most.cost > 0 else None
