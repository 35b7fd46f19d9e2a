"""Bytes that a placed plan moves between devices in a step, by edge, by layer and by pair of devices: no framework.

Edges move what the boxes of their two ends say, on the way back the adjoint. Within a layer, partial sums are added:
each of k devices adds a k-th of them and the others gather it; small ones are added on the first device. Weights
that several layers share go from their first user to the others, their gradients back.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from pase.costs import SharedWeight, shared_weights
from pase.graph import Edge, Operator
from pase.layer_movements import Summed, gradient_phase, gradient_sums, layer_movements
from pase.pairs import Pairs, all_reduce_pairs, moved_pairs
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.kinds import KINDS
from pase.targets.mesh_tensorflow.emitter.traffic import (
    INDEX_BYTES,
    edge_hops,
    joint_sum_of_weight,
    layer_mesh,
    return_hops,
    weight_ends,
)
from pase.targets.mesh_tensorflow.runtime.layouts import layout_of
from pase.targets.mesh_tensorflow.runtime.refine import Hop, hops
from pase.targets.mesh_tensorflow.runtime.traffic import Movement, Phase


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What one tensor moves in one phase: of an edge, or within a layer. bytes_by_pair: (sender, receiver) → bytes."""

    tensor: str
    movement: Movement
    bytes_by_pair: Mapping[tuple[int, int], int]

    @cached_property
    def total_bytes(self) -> int:
        """Between all devices."""
        return sum(self.bytes_by_pair.values())

    @property
    def is_of_edge(self) -> bool:
        """Whether two layers are involved."""
        return self.movement.producer != self.movement.consumer

    def between(self, producer: str, consumer: str) -> "Flow":
        """Return the same flow of other layers that lie alike; what moves within a layer does so in the consumer."""
        ends = Movement(
            producer=producer if self.is_of_edge else consumer, consumer=consumer, phase=self.movement.phase
        )
        return Flow(tensor=self.tensor, movement=ends, bytes_by_pair=self.bytes_by_pair)


def flows(plan: Plan) -> tuple[Flow, ...]:
    """Return what a placed plan moves in a step; RuntimeFailure or EmitError where a layer's splits fit no mesh.

    Words are those of the plan's graph, 4 bytes by default. What an operator exchanges inside itself counts as forward,
    whatever pass it is of.
    """
    moved: dict[Hop, Pairs] = {}
    # Layers that are the same and lie alike have one number.
    numbers: dict[Hashable, int] = {}
    layouts = {
        layer.name: numbers.setdefault((operator.unnamed, tuple(layer.splits.values()), layer.devices), len(numbers))
        for operator, layer in zip(plan.graph.operators, plan.layers, strict=True)
    }
    known: dict[Hashable, tuple[Flow, ...]] = {}
    found: list[Flow] = []

    def add(key: Hashable, producer: str, consumer: str, flows_of: Callable[[], Iterable[Flow]]) -> None:
        # Repeated layers that lie alike move alike: what the first of them moves is worked out once.
        if key not in known:
            known[key] = tuple(flow for flow in flows_of() if flow.bytes_by_pair)
        found.extend(flow.between(producer, consumer) for flow in known[key])

    for edge in plan.graph.edges:
        ends = layouts[edge.producer], edge.output, layouts[edge.consumer], edge.input
        add(
            ("edge", *ends, plan.graph.has_gradient(plan.graph[edge.consumer], edge.input)),
            edge.producer,
            edge.consumer,
            partial(_edge_flows, plan, edge, moved),
        )
    found += (flow for flow in _shared_flows(plan, moved) if flow.bytes_by_pair)
    for operator in plan.graph.operators:
        sums = tuple(
            (phase, gradient_sums(plan, operator, i))
            for i in range(len(operator.reads))
            if (phase := gradient_phase(plan.graph, operator, i))
        )
        add(
            ("layer", layouts[operator.name], sums),
            operator.name,
            operator.name,
            partial(_layer_flows, plan, operator, moved),
        )
    return tuple(found)


def bytes_by_movement(found: Iterable[Flow]) -> dict[Movement, int]:
    """Return the bytes of each edge and each layer, by phase."""
    total: dict[Movement, int] = {}
    for flow in found:
        total[flow.movement] = total.get(flow.movement, 0) + flow.total_bytes
    return total


def _edge_flows(plan: Plan, edge: Edge, moved: dict[Hop, Pairs]) -> Iterator[Flow]:
    consumer = plan.graph[edge.consumer]
    read, has_gradient = consumer.reads[edge.input], plan.graph.has_gradient(consumer, edge.input)
    word_bytes = plan.graph.word_bytes if read.is_differentiable else INDEX_BYTES
    steps = edge_hops(plan, edge)
    back = return_hops(plan, edge, steps) if has_gradient else ()
    if len(steps) > 1 and consumer.kind in KINDS and KINDS[consumer.kind].joins:
        # What comes in another shape is brought to the consumer's devices before it is joined there.
        ends = edge.consumer, edge.consumer
        yield from _both_ways(read.tensor, *ends, steps[-1:], back[:1], moved, word_bytes)
        steps, back = steps[:-1], back[1:]
    yield from _both_ways(read.tensor, edge.producer, edge.consumer, steps, back, moved, word_bytes)


def _both_ways(
    tensor: str,
    producer: str,
    consumer: str,
    steps: Sequence[Hop],
    back: Sequence[Hop],
    moved: dict[Hop, Pairs],
    word_bytes: int,
) -> Iterator[Flow]:
    yield _flow(tensor, producer, consumer, Phase.FORWARD, moved_pairs(steps, moved), word_bytes)
    yield _flow(tensor, producer, consumer, Phase.BACKWARD, moved_pairs(back, moved), word_bytes)


def _shared_flows(plan: Plan, moved: dict[Hop, Pairs]) -> Iterator[Flow]:
    for weight in shared_weights(plan.graph):
        tensor = plan.graph[weight.user].reads[weight.user_read].shared
        ways = shared_hops(plan, weight), shared_return_hops(plan, weight)
        yield from _both_ways(tensor, weight.owner, weight.user, *ways, moved, plan.graph.word_bytes)


def shared_hops(plan: Plan, weight: SharedWeight) -> tuple[Hop, ...]:
    """Return the movements that take a shared weight from its owner to another user of it."""
    owner, user = weight_ends(plan, weight)
    return hops(
        layout_of(owner.mesh, owner.dims, layer=weight.owner), layout_of(user.mesh, user.dims, layer=weight.user)
    )


def shared_return_hops(plan: Plan, weight: SharedWeight) -> tuple[Hop, ...]:
    """Return the movements that take the gradient of a shared weight from another user to its owner."""
    steps = shared_hops(plan, weight)
    return joint_sum_of_weight(plan, weight) or tuple(hop.adjoint for hop in reversed(steps))


def _layer_flows(plan: Plan, operator: Operator, moved: dict[Hop, Pairs]) -> Iterator[Flow]:
    mesh, name = layer_mesh(plan, operator.name), operator.name
    for found in layer_movements(plan, operator, moved):
        pairs = all_reduce_pairs(mesh, found.over, found.points) if isinstance(found, Summed) else found.pairs
        yield _flow(found.tensor, name, name, found.phase, pairs, plan.graph.word_bytes * found.times)


def _flow(tensor: str, producer: str, consumer: str, phase: Phase, points: Pairs, word_bytes: int) -> Flow:
    return Flow(
        tensor=tensor,
        movement=Movement(producer=producer, consumer=consumer, phase=phase),
        bytes_by_pair={ends: count * word_bytes for ends, count in points.items() if count},
    )
