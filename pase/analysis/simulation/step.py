"""One training step of a placed plan as a graph of tasks.

Forward in topological order, backward in the reverse of it; an edge's movements go hop by hop, as in an emitted
program. What a layer exchanges as it computes (a softmax's maxima, a recurrent layer's states, of either pass) follows
its forward computation. Gradients of weights are summed once a layer's backward computation is done, beside that of the
layers before it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pase.analysis.simulation.engine import Collective, Compute, Direction, Fabric, Label, Path, PointToPoint, TaskGraph
from pase.costs import ReadTraits, cost_model, layer_traffic
from pase.costs.collectives import Link, hierarchical_all_reduce
from pase.graph import ITEMSIZES, Edge, Operator, Precision, Role
from pase.machine import Machine
from pase.machine.machine import BY_LEVEL, RING
from pase.planning.plan import Plan
from pase.sharding.edges import (
    SharedWeight,
    edge_itemsizes,
    edge_steps,
    joint_sum,
    layer_mesh,
    return_steps,
    shared_weights,
)
from pase.sharding.layouts import shard_points
from pase.sharding.reshard import Pairs, ReshardStep, Stage, all_reduce_stages, point_to_point, sum_groups
from pase.sharding.traffic import Phase, Purpose, Sent, Summed, layer_movements

_UPDATE_FLOP = 2
"""FLOP of gradient descent for each weight: a product and a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Seconds on each device. backward_s: None where no gradient reaches a layer; update_s: where it has no weights."""

    forward_s: float
    backward_s: float | None
    update_s: float | None


def layer_work(plan: Plan, machine: Machine) -> dict[str, LayerWork]:
    """Return the work of every layer, as the `alpha_beta` cost model times it: FLOP or memory, whichever takes longer.

    Of a plan for `step` it is that of the machine's kernels. What waits in a recurrent layer's pipeline counts as work.
    """
    timed_by = "step" if plan.cost_model == "step" else "alpha_beta"
    model = cost_model(timed_by, machine, plan.num_devices, plan.precision)
    owned: set[str] = set()
    found = {}
    for operator in plan.graph.operators:
        gradients = plan.graph.read_gradients(operator)
        splits = np.array([[plan[operator.name].splits[dim] for dim in operator.extents]], dtype=np.int32)
        traits = tuple(ReadTraits(has_gradient=has, is_fed=False, is_owned=True) for has in gradients)
        work = layer_traffic(operator, splits, traits, types=plan.graph.types[operator.name])
        found[operator.name] = LayerWork(
            forward_s=float(model.work(work.forward)[0]),
            backward_s=float(model.work(work.backward)[0]) if any(gradients) else None,
            update_s=_update_s(plan, operator, machine, owned),
        )
    return found


def _update_s(plan: Plan, operator: Operator, machine: Machine, owned: set[str]) -> float | None:
    """Return the time of updating a layer's own weights: a shared one is updated by its first user."""
    mesh = layer_mesh(plan, operator.name)
    trained = [access for access in operator.parameters if access.is_trained]
    own = [access for access in trained if not access.shared or access.shared not in owned]
    owned.update(access.shared for access in own if access.shared)
    points = sum(shard_points(operator, access, mesh) for access in own)
    touched_bytes = _update_bytes(plan.precision) * points
    bandwidth = machine.device.memory_bandwidth_bytes_per_s or float("inf")
    return max(_UPDATE_FLOP * points / machine.peak_flop_per_s(), touched_bytes / bandwidth) if own else None


def _update_bytes(precision: Precision) -> int:
    """Return the bytes that gradient descent touches for each weight: what it updates, twice, and the gradient.

    Where that is a master copy, the weight that is made of it, too.
    """
    masters = ITEMSIZES[precision.masters or precision.parameters]
    return 2 * masters + ITEMSIZES[precision.gradients] + bool(precision.masters) * precision.itemsize


Front = list[tuple[int, ...]]
"""[devices] the tasks after which each one has what is spoken of."""

AllReduce = Callable[["FabricTasks", Label, Sequence[int], int, int, int, Front], None]
"""(network, label, group, points, bytes of a point, times, front) → adds tasks, moves the front on."""


class FabricTasks:
    """Adds what moves over a fabric to a task graph."""

    def __init__(self, tasks: TaskGraph, fabric: Fabric) -> None:
        self.tasks, self.fabric = tasks, fabric
        self._paths: dict[tuple[int, int], Path] = {}
        self._times: dict[tuple[float, tuple[int, ...]], float] = {}

    def send(self, label: Label, stage: Stage, point_bytes: int, times: int, front: Front) -> None:
        """Send points between devices, each one when its sender has what it sends."""
        count = self.fabric.num_devices
        # Nearest neighbours first, then those next to them: no device is everyone's first receiver.
        pairs = sorted(stage, key=lambda pair: ((pair[0][1] - pair[0][0]) % count, pair[0][0]))
        ready: dict[int, tuple[int, ...]] = {}
        arrived: dict[int, list[int]] = {}
        for (sender, receiver), points in pairs:
            if not points:
                continue
            if sender not in ready:
                ready[sender] = self.tasks.joined(front[sender])
            path = self._paths.get((sender, receiver))
            if path is None:
                path = self._paths[sender, receiver] = self.fabric.path(sender, receiver)
            message = PointToPoint(
                label, sender, receiver, path, points * point_bytes * times, path.latency_s * times
            )  # positional: there may be a million of them
            arrived.setdefault(receiver, []).append(self.tasks.add(message, ready[sender]))
        for receiver, messages in arrived.items():
            front[receiver] = (*front[receiver], *messages)

    def together(
        self,
        label: Label,
        group: Sequence[int],
        link_bytes: Mapping[int, float],
        duration_s: float,
        latency_s: float,
        level: int,
        front: Front,
    ) -> None:
        """Have a group do something together when all of it are ready; arguments as of `Collective`."""
        links, sizes = tuple(link_bytes), tuple(link_bytes.values())
        collective = Collective(label, tuple(group), links, sizes, duration_s, latency_s, level)
        number = self.tasks.add(collective, {before for device in group for before in front[device]})
        for device in group:
            front[device] = (number,)

    def all_reduce_s(self, size_bytes: float, members: tuple[int, ...]) -> float:
        """Return the closed form's time of an all-reduce of a group that has the links to itself."""
        key = size_bytes, members
        if key not in self._times:
            links, behind, slowest = [], 1, 0.0
            for level, count in zip(self.fabric.levels, members, strict=True):
                slowest = max(slowest, behind / level.bandwidth_bytes_per_s)
                links.append(Link(latency_s=level.latency_s, s_per_byte=slowest))
                behind *= count
            self._times[key] = float(hierarchical_all_reduce(size_bytes, members, links))
        return self._times[key]


def as_programs_do(
    network: FabricTasks, label: Label, group: Sequence[int], points: int, point_bytes: int, times: int, front: Front
) -> None:
    """Each device of a group adds a k-th of the shards and hands the sum to the others; small ones one device adds."""
    for stage in all_reduce_stages(group, points):
        network.send(label, stage, point_bytes, times, front)


def hierarchically(
    network: FabricTasks, label: Label, group: Sequence[int], points: int, point_bytes: int, times: int, front: Front
) -> None:
    """Reduce-scatter within nodes, all-reduce across them, gather within: all together, in the closed form's time.

    Each link carries what a ring sends over it, the least that is possible.
    """
    if not points:
        return
    fabric = network.fabric
    size_bytes = float(points * point_bytes)
    members = group_members(fabric, group)
    sent = link_bytes(size_bytes, members)
    links: dict[int, float] = {}
    for device in group:
        for level, level_bytes in enumerate(sent):
            for direction in Direction if level_bytes else ():
                links[fabric.link(level, device, direction)] = level_bytes * times
    last = max(level for level, count in enumerate(members) if count > 1)
    closed_s = network.all_reduce_s(size_bytes, members)
    busy_s = max(level_bytes / fabric.levels[level].bandwidth_bytes_per_s for level, level_bytes in enumerate(sent))
    duration_s = max(closed_s, busy_s) * times
    network.together(label, group, links, duration_s, duration_s - busy_s * times, last, front)


def in_a_ring(
    network: FabricTasks, label: Label, group: Sequence[int], points: int, point_bytes: int, times: int, front: Front
) -> None:
    """Each of k devices, in the order of their numbers, hands k-ths of the vector to the next, 2 (k - 1) times.

    So gloo does it, and NCCL's ring: all together, as fast as the slowest link that a part goes over.
    """
    if not points:
        return
    fabric, ring = network.fabric, sorted(group)
    rounds = 2 * (len(ring) - 1) * times
    links: dict[int, float] = {}
    last, slowest_s = 0, 0.0
    for sender, receiver in zip(ring, [*ring[1:], ring[0]], strict=True):
        path = fabric.path(sender, receiver)
        last = max(last, path.level)
        for link in path.links:
            links[link] = links.get(link, 0.0) + rounds * points * point_bytes / len(ring)
    for link, size_bytes in links.items():
        slowest_s = max(slowest_s, size_bytes / fabric.links[link].bandwidth_bytes_per_s)
    latency_s = rounds * fabric.levels[last].latency_s
    network.together(label, ring, links, latency_s + slowest_s, latency_s, last, front)


COLLECTIVES: Mapping[str, AllReduce] = MappingProxyType(
    {BY_LEVEL: hierarchically, RING: in_a_ring, "program": as_programs_do}
)
"""How sums travel: what adds one of them to a task graph."""


def group_members(fabric: Fabric, group: Sequence[int]) -> tuple[int, ...]:
    """Return [levels] how many groups of the level before take part in a group of each level: in the fullest one."""
    members, inner = [], list(group)
    for level in fabric.levels:
        outer: dict[int, int] = {}
        for device in inner:
            place = device // level.num_devices if level.num_devices else 0
            outer[place] = outer.get(place, 0) + 1
        members.append(max(outer.values()))
        # One device stands for each group from here on.
        inner = [place * level.num_devices for place in outer]
    return tuple(members)


def link_bytes(size_bytes: float, members: Sequence[int]) -> tuple[float, ...]:
    """Return [levels] the bytes over each link of a level, one way, in a ring at every level: 2 (k - 1) / k of a share.

    Whatever goes over an outer level goes over the inner ones too, a share behind each of their links. No level beyond
    the last one with several members carries anything.
    """
    found = []
    for level in range(len(members)):
        share, total = size_bytes, 0.0
        for count in members[level:]:
            total += 2 * (count - 1) / count * share
            share /= count
        found.append(total)
    return tuple(found)


def build_step(
    plan: Plan, work: dict[str, LayerWork], network: FabricTasks, way: AllReduce, *, overlaps: bool
) -> TaskGraph:
    """Return the tasks of a step. overlaps: whether gradients of weights are summed while the backward pass goes on."""
    builder = _Builder(plan, work, network, way)
    builder.forward()
    builder.backward()
    builder.update(overlaps=overlaps)
    return network.tasks


class _Builder:
    """Adds layer by layer to a task graph. A front says for each device after which tasks it has something."""

    def __init__(self, plan: Plan, work: dict[str, LayerWork], network: FabricTasks, way: AllReduce) -> None:
        self._plan, self._graph, self._work = plan, plan.graph, work
        self._network, self._way = network, way
        self._devices = range(plan.num_devices)
        self._moved: dict[ReshardStep, Pairs] = {}
        operators = plan.graph.operators
        self._within: dict[tuple[str, Purpose], list[Summed | Sent]] = {}
        self._sums: dict[tuple[str, int], list[Summed | Sent]] = {}  # of the gradient of a read
        for operator in operators:
            for found in layer_movements(plan, operator):
                if isinstance(found, Summed) and found.read is not None:
                    self._sums.setdefault((operator.name, found.read), []).append(found)
                else:
                    self._within.setdefault((operator.name, found.purpose), []).append(found)
        self._gradients = {op.name: plan.graph.read_gradients(op) for op in operators}
        self._hops = {(edge.consumer, edge.input): edge_steps(plan, edge) for edge in plan.graph.edges}
        self._shared: dict[tuple[str, int], SharedWeight] = {
            (weight.consumer, weight.input): weight for weight in shared_weights(plan.graph)
        }
        self._computed: dict[str, Front] = {}  # after the forward pass of a layer and what it exchanges
        self._written: dict[str, Front] = {}  # with the sums of its outputs
        self._read_gradients: dict[tuple[str, int], Front] = {}
        self._went_back: dict[str, Front] = {}

    # -- passes

    def forward(self) -> None:
        for operator in self._graph.operators:
            name = operator.name
            ready = self._nothing()
            for position in range(len(operator.reads)):
                edge = self._graph.incoming.get((name, position))
                if edge is not None:
                    front = list(self._written[edge.producer])
                    self._carry(front, self._hops[name, position], edge, Phase.FORWARD)
                    _extend(ready, front)
                if (name, position) in self._shared:
                    weight = self._shared[name, position]
                    front = self._nothing()
                    self._carry(front, edge_steps(self._plan, weight), weight, Phase.FORWARD)
                    _extend(ready, front)
            front = self._compute(name, Phase.FORWARD, self._work[name].forward_s, ready)
            self._move(front, operator, self._within.get((name, Purpose.EXCHANGE), ()))
            self._computed[name] = list(front)
            self._move(front, operator, self._within.get((name, Purpose.OUTPUT), ()))
            self._written[name] = front

    def backward(self) -> None:
        """Add the backward pass: of every layer after those that it feeds."""
        for operator in reversed(self._graph.operators):
            name = operator.name
            time_s = self._work[name].backward_s
            if time_s is None:
                continue
            ready = list(self._computed[name])
            for edge in self._graph.outgoing.get(name, ()):
                gradient = self._read_gradients.get((edge.consumer, edge.input))
                if gradient is not None:
                    front = list(gradient)
                    hops = return_steps(self._plan, edge, self._hops[edge.consumer, edge.input])
                    self._carry(front, hops, edge, Phase.BACKWARD)
                    _extend(ready, front)
            front = self._went_back[name] = self._compute(name, Phase.BACKWARD, time_s, ready)
            for position, read in enumerate(operator.reads):
                if self._gradients[name][position] and read.role is not Role.PARAMETER:
                    own = list(front)
                    self._move(own, operator, self._sums.get((name, position), ()))
                    self._read_gradients[name, position] = own

    def update(self, *, overlaps: bool) -> None:
        """Add the sums of weights' gradients and the updates."""
        fronts = {name: list(front) for name, front in self._went_back.items()}
        if not overlaps:
            done = self._nothing()
            for front in fronts.values():
                _extend(done, front)
            done = [self._network.tasks.joined(front) for front in done]
            for front in fronts.values():
                _extend(front, done)
        ready = {name: self._nothing() for name in fronts}
        added: dict[tuple[str, int], Front] = {}  # to the gradient of a weight, before it is summed
        for operator in reversed(self._graph.operators):
            name = operator.name
            for position, read in enumerate(operator.reads):
                if read.role is not Role.PARAMETER or not read.is_trained:
                    continue
                front = list(fronts[name])
                weight = self._shared.get((name, position))
                if weight is not None and joint_sum(self._plan, weight):
                    _extend(added.setdefault((weight.producer, weight.output), self._nothing()), front)
                    continue
                # The owner of a weight comes before its other users, and thus after them here.
                _extend(front, added.get((name, position), ()))
                self._move(front, operator, self._sums.get((name, position), ()))
                if weight is not None:
                    back = return_steps(self._plan, weight, edge_steps(self._plan, weight))
                    self._carry(front, back, weight, Phase.BACKWARD)
                _extend(ready[weight.producer if weight else name], front)
        for name, front in ready.items():
            time_s = self._work[name].update_s
            if time_s is not None:
                self._compute(name, Phase.UPDATE, time_s, front)

    # -- parts of them

    def _nothing(self) -> Front:
        return [() for _ in self._devices]

    def _compute(self, name: str, phase: Phase, time_s: float, ready: Front) -> Front:
        label = Label(producer=name, consumer=name, tensor="", phase=phase)
        tasks = self._network.tasks
        return [(tasks.add(Compute(label, device, time_s), ready[device]),) for device in self._devices]

    def _move(self, front: Front, operator: Operator, movements: Iterable[Summed | Sent]) -> None:
        """Add what moves within a layer, one after the other."""
        for found in movements:
            label = Label(producer=operator.name, consumer=operator.name, tensor=found.tensor, phase=found.phase)
            match found:
                case Sent():
                    self._network.send(label, found.pairs.items(), found.itemsize, found.times, front)
                case Summed():
                    for group in sum_groups(layer_mesh(self._plan, operator.name), found.over):
                        self._way(
                            self._network, label, group, found.points[group[0]], found.itemsize, found.times, front
                        )

    def _carry(self, front: Front, steps: Iterable[ReshardStep], moved: Edge, phase: Phase) -> None:
        """Add what moves from layer to layer, step by step: along an edge, or of a weight that both use."""
        read = self._graph[moved.consumer].reads[moved.input]
        tensor = read.shared if isinstance(moved, SharedWeight) else read.tensor
        label = Label(producer=moved.producer, consumer=moved.consumer, tensor=tensor, phase=phase)
        point_bytes = edge_itemsizes(self._graph, moved)[phase is Phase.BACKWARD]
        for step in steps:
            # Repeated layers move alike: each distinct movement is looked at once.
            if step not in self._moved:
                self._moved[step] = point_to_point(step)
            self._network.send(label, self._moved[step].items(), point_bytes, 1, front)


def _extend(front: Front, more: Sequence[tuple[int, ...]]) -> None:
    for device, tasks in enumerate(more):
        if tasks:
            front[device] = tuple(dict.fromkeys((*front[device], *tasks)))
