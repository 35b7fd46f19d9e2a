"""Megatron's space gone through whole: every step that it allows of a transformer, on the costs of a search.

t devices split heads, hidden units and vocabularies, and may split what is between these (norms, residuals) along the
sequence; p groups of devices have a stage each, or v in turns (interleaved), whose computation is as even as cuts
allow; d replicas; m micro-batches; all layers recomputed, attention alone, or none; weights in one of ZeRO's states;
one choice for all layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from pase.analysis.baselines.rules import ATTENTION, TransformerDims, largest_split, largest_splits, transformer_dims
from pase.costs import StepMemory, cost_model
from pase.costs.choice_tables import KnownChoices, choices_of_layers
from pase.costs.choices import LayerChoices
from pase.costs.states import EVERY_MODE, STATES
from pase.errors import ConfigurationError
from pase.graph import Operator
from pase.planning.pipelines import work_s
from pase.planning.spans import Setting, batch_of, even_cuts, works_s
from pase.planning.stage_problem import StageSums, together
from pase.planning.stages import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from pase.planning.steps import LayerChoice, TrainingStep
from pase.sharding.shards import FloatArray, IntArray, divisors


class Degrees(NamedTuple):
    """How a step is spread. tensor: t; by_sequence: whether what is between is split; stages: p; chunks: v."""

    tensor: int
    by_sequence: bool
    stages: int
    chunks: int
    replicas: int
    micro_batches: int

    def __str__(self) -> str:
        by_sequence, chunks = " by sequence" * self.by_sequence, f" × {self.chunks}" * (self.chunks > 1)
        return f"t {self.tensor}{by_sequence}, p {self.stages}{chunks}, d {self.replicas}, m {self.micro_batches}"


class Mode(NamedTuple):
    """What all layers have in common. state: of weights. again: which layers are recomputed."""

    state: str
    again: str

    def is_again(self, operator: Operator, *, is_first: bool) -> bool:
        """Return whether a layer is recomputed; is_first: whether it is where a block begins."""
        return not is_first if self.again == "all" else self.again == operator.kind

    def __str__(self) -> str:
        return self.state + f", {self.again} recomputed" * bool(self.again)


MODES = tuple(Mode(*each) for each in product(STATES, ("", ATTENTION, "all")))


class Found(NamedTuple):
    """A step that fits, and what it costs."""

    cost: float
    degrees: Degrees
    mode: Mode

    def __str__(self) -> str:
        return f"{self.degrees}, {self.mode}"


def steps(setting: Setting) -> Iterator[Found]:
    """Yield the steps of a transformer that fit, but those that cannot be cheaper than one before.

    Those with the least bounds come first: by their work shared out evenly, then by what their layers take.
    """
    best = inf
    waiting = [(_even_s(setting, degrees), 0, degrees) for degrees in _all_degrees(setting)]
    heapify(waiting)
    while waiting and waiting[0][0] < best:
        bound, level, degrees = heappop(waiting)
        step = _step(setting, degrees)
        if level == 0:
            least = min((cost for cost, _ in _least(setting, degrees, step)), default=inf)
            heappush(waiting, (max(bound, least), 1, degrees))
            continue
        for cost, mode in sorted(_costs(setting, degrees, step)):
            if cost < best and _in_mode(setting, step, mode).peak.bytes <= setting.limit_bytes:
                best = cost
                yield Found(cost, degrees, mode)


@cache
def dims_of(setting: Setting) -> TransformerDims | None:
    """Return what the rule speaks of, of the graph with cuts; None where it is no transformer."""
    return transformer_dims(batch_of(setting.graph, 1, has_cuts=True).graph)


def _all_degrees(setting: Setting) -> Iterator[Degrees]:
    dims, batch = dims_of(setting), batch_of(setting.graph, 1, has_cuts=True)
    assert dims is not None
    split = dims.heads | dims.hidden
    extents = {batch.graph[name].extents[dim] for (name, dim), number in dims.classes.items() if number in split}
    blocks = sum(operator.kind == ATTENTION for operator in batch.graph.operators)
    for m, p in product(divisors(setting.batch), divisors(setting.num_devices)):
        if p > len(batch.at) + 1 or _work_s(setting, m) == inf:
            continue
        turns = [v for v in divisors(blocks) if v == 1 or (p > 1 and not m % p and not blocks % (p * v))]
        for t, v in product(divisors(setting.num_devices // p), turns):
            d = setting.num_devices // p // t
            if not (setting.batch // m % d or any(extent % t for extent in extents)):
                yield from (Degrees(t, by_sequence, p, v, d, m) for by_sequence in (False, True)[: 1 + (t > 1)])


@cache
def _work_s(setting: Setting, m: int) -> float:
    """Return what one of m micro-batches takes on one device; infinite where there are none."""
    try:
        return work_s(setting, m)
    except ConfigurationError:
        return inf  # experts


def _even_s(setting: Setting, degrees: Degrees) -> float:
    _, _, p, v, _, m = degrees
    return (m + (p - 1) / v) * _work_s(setting, m) / setting.num_devices


@cache
def _splits(setting: Setting, degrees: Degrees) -> list[dict[str, int]]:
    """Return into how many parts each dim of each layer is split."""
    dims, batch = dims_of(setting), batch_of(setting.graph, degrees.micro_batches, has_cuts=True)
    assert dims is not None
    known = {}
    for kind, operator in zip(batch.kinds, batch.graph.operators, strict=True):
        if kind not in known:
            known[kind] = _splits_of(operator, dims, degrees)
    return [known[kind] for kind in batch.kinds]


def _splits_of(operator: Operator, dims: TransformerDims, degrees: Degrees) -> dict[str, int]:
    t, tensor = degrees.tensor, dims.vocabulary | dims.hidden | dims.heads
    found = largest_splits(operator, dims.classes, [(dims.batch, degrees.replicas), (tensor, t)])
    is_whole = not any(dims.classes[operator.name, dim] in tensor for dim in operator.extents)
    for parts in operator.reads[0].partial_over or () if operator.is_fan_out else ():
        # Where the gradients of its readers are parts of one sum, each device has one.
        found[parts] = largest_split(operator, parts, t)
        is_whole = found[parts] == 1
    if is_whole and degrees.by_sequence:
        found |= largest_splits(operator, dims.classes, [(dims.sequence, t)])
    return dict.fromkeys(operator.extents, 1) | found


def _step(setting: Setting, degrees: Degrees) -> TrainingStep:
    """Return a step with all weights whole, and nothing recomputed."""
    m, num = degrees.micro_batches, degrees.stages * degrees.chunks
    graph = batch_of(setting.graph, m, has_cuts=True).graph
    stages = np.searchsorted(_even_cuts(setting, m, num), np.arange(len(graph.operators)), side="right").tolist()
    splits = _splits(setting, degrees._replace(stages=1, chunks=1))
    return TrainingStep(
        graph=graph,
        num_devices=setting.num_devices,
        machine=setting.machine,
        cost_model=setting.cost_model,
        optimiser=setting.optimiser,
        micro_batches=m,
        schedule=("", ONE_FORWARD_ONE_BACKWARD, INTERLEAVED)[(degrees.stages > 1) + (degrees.chunks > 1)],
        layers=tuple(
            LayerChoice(splits=own, state=STATES[0], is_recomputed=False, stage=stage)
            for own, stage in zip(splits, stages, strict=True)
        ),
        chunks=degrees.chunks,
    )


@cache
def _even_cuts(setting: Setting, m: int, num: int) -> list[int]:
    batch = batch_of(setting.graph, m, has_cuts=True)
    return even_cuts(batch.at, works_s(batch.graph, setting.cost_model, setting.machine), num)


def _in_mode(setting: Setting, step: TrainingStep, mode: Mode) -> TrainingStep:
    """Return a step whose layers have a mode."""
    fixed = batch_of(setting.graph, step.micro_batches, has_cuts=True).fixed
    layers = [
        replace(layer, state=mode.state, is_recomputed=mode.is_again(operator, is_first=operator.name in fixed))
        for layer, operator in zip(step.layers, step.graph.operators, strict=True)
    ]
    return replace(step, layers=tuple(layers))


def _costs(setting: Setting, degrees: Degrees, step: TrainingStep) -> Iterator[tuple[float, Mode]]:
    """Yield what a step takes in each mode."""
    fixed = batch_of(setting.graph, degrees.micro_batches, has_cuts=True).fixed
    for mode in MODES:
        sums = []
        for graph, (problem, _) in zip(step.stages, step.problems, strict=True):
            both = zip(problem.tables.layers, graph.operators, strict=True)
            sums.append(problem.sums([_choice(modes, mode, op, is_first=op.name in fixed) for modes, op in both]))
        yield step.cost_of(sums), mode


def _least(setting: Setting, degrees: Degrees, step: TrainingStep) -> Iterator[tuple[float, Mode]]:
    """Yield what a step takes at least in each mode in which it may fit: its layers, without what is between them."""
    columns, kinds = _layer_figures(setting, degrees._replace(chunks=1))
    firsts = [first for first, _ in step.bounds]
    for k, mode in enumerate(MODES):
        sums = [StageSums(*row) for row in np.add.reduceat(columns[kinds, k], firsts).tolist()]
        if max(_least_bytes(step, sums)) <= setting.limit_bytes:
            yield step.cost_of(sums), mode


def _least_bytes(step: TrainingStep, sums: Sequence[StageSums]) -> Iterator[float]:
    """Yield what a device of each group has in memory at least when a micro-batch begins to go back."""
    most = max(step.micro_batches - 1, 1)
    for group, own in enumerate(step.under_way):
        held = np.array(sums[group :: step.num_groups])
        yield StageSums(*together(held, np.minimum(own, most)).tolist()).least_bytes(1)


@cache
def _layer_figures(setting: Setting, degrees: Degrees) -> tuple[FloatArray, IntArray]:
    """Return [kinds, modes, criteria] of layers, and [V] the kind of each."""
    batch = batch_of(setting.graph, degrees.micro_batches, has_cuts=True)
    operators, devices = batch.graph.operators, setting.num_devices // degrees.stages
    alike = [(kind, operator.name in batch.fixed) for kind, operator in zip(batch.kinds, operators, strict=True)]
    first = {key: v for v, key in reversed(list(enumerate(alike)))}
    chosen = sorted(first.values())
    splits = _splits(setting, degrees._replace(stages=1))
    costed = choices_of_layers(
        batch.graph,
        devices,
        cost_model(setting.cost_model, setting.machine, devices, batch.graph.precision),
        EVERY_MODE,
        known=KnownChoices(),
        only={operators[v].name: np.array([[*splits[v].values()]], dtype=np.int32) for v in chosen},
        hides=batch.hides,
        among=frozenset(operators[v].name for v in chosen),
        micro_batches=degrees.micro_batches,
        is_whole=True,
    )
    memory = StepMemory(
        graph=batch.graph,
        keeps=batch.keeps,
        configurations=[np.array([[*own.values()]], dtype=np.int32) for own in splits],
        optimiser=setting.optimiser,
        micro_batches=degrees.micro_batches,
    )
    columns = []
    for v, modes in zip(chosen, (layer.choices for layer in costed), strict=True):
        lasting = memory.lasting(v, modes, has_casts=False).astype(np.float64)
        held = modes.holding(lasting, memory.waiting(v, modes).astype(np.float64)).columns
        columns.append([held[_choice(modes, mode, operators[v], is_first=alike[v][1])] for mode in MODES])
    number = {alike[v]: n for n, v in enumerate(chosen)}
    return np.array(columns), np.array([number[key] for key in alike])


def _choice(modes: LayerChoices, mode: Mode, operator: Operator, *, is_first: bool) -> int:
    nearness = modes.nearness(mode.state, is_recomputed=mode.is_again(operator, is_first=is_first))
    return int(nearness.argmax())
