"""The figures that every view of a plan shows: what layers cost, what a step is made of, and what it transfers.

Reports, drawings, tables and commands read them here, so that they agree.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pase.common.containers import FrozenDict
from pase.errors import PaseError
from pase.planning.plan import LayerPlan, Plan
from pase.planning.stage_problem import StageProblem, StageSums
from pase.planning.stages import step_flows
from pase.planning.steps import TrainingStep
from pase.sharding.traffic import Flow, Phase

# -- costs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """What a layer costs in a step, all micro-batches together, on each of the devices that it runs on.

    Attributes:
        compute: Forward and backward pass, in the unit of the plan's total, as all costs here.
        recompute: Forward passes that are run again in the backward pass.
        communication: Communication within the layer, with other stages, and of its weights and their gradients.
        transfer: Redistribution on incoming edges, and of weights that an earlier layer shares.
        overlappable_communication: Part of `communication` that can overlap with compute.
        overlappable_transfer: Part of `transfer` that can.
        overlapped_share: Part of both that does overlap and takes no time of its own, 0 to 1.
        share: Part of the time of all devices in a step that the layer takes, 0 to 1.
    """

    compute: float
    recompute: float
    communication: float
    transfer: float
    overlappable_communication: float
    overlappable_transfer: float
    overlapped_share: float
    share: float = 0.0

    @property
    def exposed_communication(self) -> float:
        """`communication` without what overlaps."""
        return self.communication - self.overlapped_share * self.overlappable_communication

    @property
    def exposed_transfer(self) -> float:
        """`transfer` without what overlaps."""
        return self.transfer - self.overlapped_share * self.overlappable_transfer

    @property
    def overlappable(self) -> float:
        """What can overlap with compute, of the layer and of what it fetches."""
        return self.overlappable_communication + self.overlappable_transfer

    @property
    def overlapped(self) -> float:
        """What does overlap."""
        return self.overlapped_share * self.overlappable

    @property
    def paid(self) -> float:
        """What the layer adds to the time of its devices: everything but what overlaps."""
        return self.compute + self.recompute + self.exposed_communication + self.exposed_transfer


COMPUTE, RECOMPUTE, COMMUNICATION, REDISTRIBUTION, WAITING = (
    "compute",
    "recompute",
    "communication",
    "re-sharding",
    "waiting",
)
"""Parts of a step's cost."""

NOTHING = 1e-9
"""Part of what could overlap below which rounding explains what does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFigures:
    """What the layers of a plan cost, and what a step is made of.

    Attributes:
        layers: One entry for each layer, in the order of the plan.
        parts: Cost of each part of a step, by name: means over all devices, exposed communication alone. They sum to
            the plan's total.
        overlapped: Communication that overlaps with compute, the mean over all devices.
        overlappable: Communication that can, likewise.
    """

    layers: tuple[LayerFigures, ...]
    parts: Mapping[str, float]
    overlapped: float
    overlappable: float


def cost_figures(plan: Plan) -> CostFigures:
    """Return what the layers of a plan cost, and what a step is made of."""
    found = list(_staged_layers(plan)) if plan.has_parts else [_plain_layer(plan, layer) for layer in plan.layers]
    groups = plan.num_groups
    of_all_devices = plan.total_cost * groups
    parts = {
        COMPUTE: sum(layer.compute for layer in found) / groups,
        RECOMPUTE: sum(layer.recompute for layer in found) / groups,
        COMMUNICATION: sum(layer.exposed_communication for layer in found) / groups,
        REDISTRIBUTION: sum(layer.exposed_transfer for layer in found) / groups,
    }
    if groups > 1:
        parts[WAITING] = max(0.0, plan.total_cost - sum(parts.values()))
    return CostFigures(
        layers=tuple(replace(one, share=one.paid / of_all_devices if of_all_devices else 0.0) for one in found),
        parts=FrozenDict(parts),
        overlapped=sum(layer.overlapped for layer in found) / groups,
        overlappable=sum(layer.overlappable for layer in found) / groups,
    )


def _plain_layer(plan: Plan, layer: LayerPlan) -> LayerFigures:
    """Return the figures of a layer of a plan whose cost is the sum of its layers' less what overlaps."""
    overlappable = layer.hideable_cost or 0.0
    of_weights = 0.0
    if layer.hideable_cost is not None:
        edges = plan.graph.incoming
        of_weights = sum(each.cost for each in layer.transfers if (layer.name, each.input) not in edges)
    return LayerFigures(
        compute=layer.compute_cost,
        recompute=0.0,
        communication=layer.communication_cost,
        transfer=layer.transfer_cost,
        overlappable_communication=overlappable - of_weights,
        overlappable_transfer=of_weights,
        overlapped_share=plan.hidden_cost / plan.hideable_cost if plan.hideable_cost else 0.0,
    )


def _staged_layers(plan: Plan) -> Iterator[LayerFigures]:
    """Yield the figures of the layers of a plan with micro-batches, stages or modes."""
    step = TrainingStep.of(plan)
    for (problem, choice), sums, (first, stop) in zip(step.problems, step.sums, step.bounds, strict=True):
        yield from _stage_layers(plan.layers[first:stop], problem, choice, sums, plan.micro_batches)


def _stage_layers(
    layers: Sequence[LayerPlan], problem: StageProblem, choice: Sequence[int], sums: StageSums, micro_batches: int
) -> Iterator[LayerFigures]:
    tables = problem.tables
    of_layers, of_weights = [0.0] * len(layers), [0.0] * len(layers)
    if tables.hides:
        for v, (modes, c) in enumerate(zip(tables.layers, choice, strict=True)):
            of_layers[v] = micro_batches * float(modes.figures.streamed[c]) + float(modes.figures.summed[c])
        for (u, v), edge in zip(tables.ends, tables.edges, strict=True):
            if edge.is_weight:
                of_weights[v] += micro_batches * float(edge.cost.cost(choice[u], choice[v]))
    overlap = overlap_of(sums, micro_batches)
    for v, (layer, modes, c) in enumerate(zip(layers, tables.layers, choice, strict=True)):
        assert modes.passes is not None
        recompute = micro_batches * float(modes.passes.remade[c])
        yield LayerFigures(
            compute=layer.compute_cost,
            recompute=recompute,
            # `communication_cost` is all that is not compute.
            communication=max(0.0, layer.communication_cost - recompute),
            transfer=layer.transfer_cost,
            overlappable_communication=of_layers[v],
            overlappable_transfer=of_weights[v],
            overlapped_share=overlap.share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationOverlap:
    """How communication of a step overlaps with compute.

    Attributes:
        overlappable: What can overlap.
        exposed: What of it does not.
    """

    overlappable: float
    exposed: float

    @property
    def share(self) -> float:
        """The share that does overlap, 0 to 1."""
        share = 1 - self.exposed / self.overlappable if self.overlappable else 0.0
        return share if share > NOTHING else 0.0


def overlap_of(sums: StageSums, micro_batches: int) -> CommunicationOverlap:
    """Return how communication of a stage overlaps in a step, by what its strategy takes."""
    return CommunicationOverlap(
        overlappable=micro_batches * sums.streamed + sums.summed,
        exposed=micro_batches * (sums.micro_batch - sums.repeated) + sums.step - sums.once,
    )


# -- bytes

MOST_DEVICES = 256
"""Of more devices the bytes between all pairs are not worked out."""

BETWEEN_ALL = "between all devices"
BUSIEST = "to the device that receives most, along edges alone"
SCOPES = (BETWEEN_ALL, BUSIEST)
"""What bytes of a step are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """What two layers that share a weight transfer in a step: `producer` has it, `consumer` reads it, too."""

    producer: str
    consumer: str
    weight: str
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a step of a plan transfers, all micro-batches together.

    Attributes:
        what: `BETWEEN_ALL`, or `BUSIEST` for very many devices and for plans that no program can lay out.
        edges: (forward, backward) of each edge of the graph, in its order.
        weights: One entry for each pair of layers that share a weight and transfer it.
        layers: By name, bytes within each layer; None where they are not known.
        flows: All of them with their pairs of devices; () where they are not known.
    """

    what: str
    edges: tuple[tuple[int, int], ...]
    weights: tuple[WeightBytes, ...]
    layers: Mapping[str, int] | None
    flows: tuple[Flow, ...]

    @property
    def total(self) -> int:
        """All bytes."""
        of_weights = sum(each.forward_bytes + each.backward_bytes for each in self.weights)
        return sum(map(sum, self.edges)) + of_weights + sum((self.layers or {}).values())


def step_bytes_of(plan: Plan) -> StepBytes:
    """Return what a step of a plan transfers."""
    if plan.num_devices > MOST_DEVICES:
        return _predicted(plan)
    try:
        flows = step_flows(plan)
    except PaseError:
        return _predicted(plan)
    sizes: dict[int, int] = {}  # repeated layers share their tables of pairs
    of_edges: dict[tuple[str, str, str], list[int]] = {}
    layers: Counter[str] = Counter()
    for flow in flows:
        table = id(flow.bytes_by_pair)
        if table not in sizes:
            sizes[table] = flow.total_bytes
        ends = flow.movement
        if flow.is_of_edge:
            both = of_edges.setdefault((ends.producer, ends.consumer, flow.tensor), [0, 0])
            both[ends.phase is not Phase.FORWARD] += sizes[table]
        else:
            layers[ends.consumer] += sizes[table]
    edges = []
    for edge in plan.graph.edges:
        tensor = plan.graph[edge.consumer].reads[edge.input].tensor
        forward, backward = of_edges.pop((edge.producer, edge.consumer, tensor), (0, 0))
        edges.append((forward, backward))
    return StepBytes(
        what=BETWEEN_ALL,
        edges=tuple(edges),
        weights=tuple(
            WeightBytes(
                producer=producer, consumer=consumer, weight=weight, forward_bytes=forward, backward_bytes=backward
            )
            for (producer, consumer, weight), (forward, backward) in of_edges.items()
        ),
        layers=FrozenDict(layers),
        flows=flows,
    )


def _predicted(plan: Plan) -> StepBytes:
    """Return what the cost model predicts for the device that receives most."""
    by_read = {
        (layer.name, transfer.input): (round(transfer.forward_bytes), round(transfer.backward_bytes))
        for layer in plan.layers
        for transfer in layer.transfers
    }
    edges = tuple(by_read[edge.consumer, edge.input] for edge in plan.graph.edges)
    return StepBytes(what=BUSIEST, edges=edges, weights=(), layers=None, flows=())
