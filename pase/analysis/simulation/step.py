"""One training step of a placed plan as a graph of tasks.

Forward in topological order, backward in the reverse of it; an edge's movements go hop by hop, as in an emitted
program. What a layer exchanges as it computes (a softmax's maxima, a recurrent layer's states, of either pass) follows
its forward computation. Gradients of weights are summed once a layer's backward computation is done, beside that of the
layers before it.
"""

from collections.abc import Iterable, Sequence

from pase.analysis.simulation.collectives import AllReduce, Front, Network
from pase.analysis.simulation.tasks import Compute, Label, TaskGraph
from pase.analysis.simulation.work import LayerWork
from pase.costs import SharedWeight, shared_weights
from pase.graph import Edge, Operator, Role
from pase.layer_movements import Purpose, Sent, Summed, layer_movements
from pase.pairs import Pairs, hop_pairs, sum_groups
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.traffic import (
    INDEX_BYTES,
    edge_hops,
    joint_sum_of_weight,
    layer_mesh,
    return_hops,
)
from pase.targets.mesh_tensorflow.runtime.refine import Hop
from pase.targets.mesh_tensorflow.runtime.traffic import Phase
from pase.traffic import shared_hops, shared_return_hops


def build_step(
    plan: Plan, work: dict[str, LayerWork], network: Network, way: AllReduce, *, overlaps: bool
) -> TaskGraph:
    """Return the tasks of a step. overlaps: whether gradients of weights are summed while the backward pass goes on."""
    builder = _Builder(plan, work, network, way)
    builder.forward()
    builder.backward()
    builder.update(overlaps=overlaps)
    return network.tasks


class _Builder:
    """Adds layer by layer to a task graph. A front says for each device after which tasks it has something."""

    def __init__(self, plan: Plan, work: dict[str, LayerWork], network: Network, way: AllReduce) -> None:
        self._plan, self._graph, self._work = plan, plan.graph, work
        self._network, self._way = network, way
        self._devices = range(plan.num_devices)
        self._moved: dict[Hop, Pairs] = {}
        operators = plan.graph.operators
        self._within: dict[tuple[str, Purpose], list[Summed | Sent]] = {}
        self._sums: dict[tuple[str, int], list[Summed | Sent]] = {}  # of the gradient of a read
        for operator in operators:
            for found in layer_movements(plan, operator, self._moved):
                if isinstance(found, Summed) and found.read is not None:
                    self._sums.setdefault((operator.name, found.read), []).append(found)
                else:
                    self._within.setdefault((operator.name, found.purpose), []).append(found)
        self._gradients = {op.name: plan.graph.read_gradients(op) for op in operators}
        self._hops = {(edge.consumer, edge.input): edge_hops(plan, edge) for edge in plan.graph.edges}
        self._shared: dict[tuple[str, int], SharedWeight] = {
            (weight.user, weight.user_read): weight for weight in shared_weights(plan.graph)
        }
        self._computed: dict[str, Front] = {}  # after the forward pass of a layer and what it exchanges
        self._written: dict[str, Front] = {}  # with the sums of its outputs
        self._read_gradients: dict[tuple[str, int], Front] = {}
        self._went_back: dict[str, Front] = {}

    # -- passes

    def forward(self) -> None:
        """Add the forward pass."""
        for operator in self._graph.operators:
            name = operator.name
            ready = self._nothing()
            for position in range(len(operator.reads)):
                edge = self._graph.incoming.get((name, position))
                if edge is not None:
                    front = list(self._written[edge.producer])
                    self._carry(front, self._hops[name, position], self._edge_label(edge, Phase.FORWARD), edge)
                    _extend(ready, front)
                if (name, position) in self._shared:
                    weight = self._shared[name, position]
                    front = self._nothing()
                    label = self._shared_label(weight, Phase.FORWARD)
                    self._carry_weight(front, shared_hops(self._plan, weight), label)
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
                    hops = return_hops(self._plan, edge, self._hops[edge.consumer, edge.input])
                    self._carry(front, hops, self._edge_label(edge, Phase.BACKWARD), edge)
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
                if read.role is not Role.PARAMETER:
                    continue
                front = list(fronts[name])
                weight = self._shared.get((name, position))
                if weight is not None and joint_sum_of_weight(self._plan, weight):
                    _extend(added.setdefault((weight.owner, weight.owner_read), self._nothing()), front)
                    continue
                # The owner of a weight comes before its other users, and thus after them here.
                _extend(front, added.get((name, position), ()))
                self._move(front, operator, self._sums.get((name, position), ()))
                if weight is not None:
                    back = shared_return_hops(self._plan, weight)
                    self._carry_weight(front, back, self._shared_label(weight, Phase.BACKWARD))
                _extend(ready[weight.owner if weight else name], front)
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
        word_bytes = self._graph.word_bytes
        for found in movements:
            label = Label(producer=operator.name, consumer=operator.name, tensor=found.tensor, phase=found.phase)
            match found:
                case Sent():
                    self._network.send(label, found.pairs.items(), word_bytes, found.times, front)
                case Summed():
                    for group in sum_groups(layer_mesh(self._plan, operator.name), found.over):
                        self._way(self._network, label, group, found.points, word_bytes, found.times, front)

    def _carry(self, front: Front, hops: Iterable[Hop], label: Label, edge: Edge) -> None:
        read = self._graph[edge.consumer].reads[edge.input]
        self._hop_by_hop(front, hops, label, self._graph.word_bytes if read.is_differentiable else INDEX_BYTES)

    def _carry_weight(self, front: Front, hops: Sequence[Hop], label: Label) -> None:
        self._hop_by_hop(front, hops, label, self._graph.word_bytes)

    def _hop_by_hop(self, front: Front, hops: Iterable[Hop], label: Label, point_bytes: int) -> None:
        for hop in hops:
            # Repeated layers move alike: each distinct movement is looked at once.
            if hop not in self._moved:
                self._moved[hop] = hop_pairs(hop)
            self._network.send(label, self._moved[hop].items(), point_bytes, 1, front)

    def _edge_label(self, edge: Edge, phase: Phase) -> Label:
        tensor = self._graph[edge.consumer].reads[edge.input].tensor
        return Label(producer=edge.producer, consumer=edge.consumer, tensor=tensor, phase=phase)

    def _shared_label(self, weight: SharedWeight, phase: Phase) -> Label:
        tensor = self._graph[weight.user].reads[weight.user_read].shared
        return Label(producer=weight.owner, consumer=weight.user, tensor=tensor, phase=phase)


def _extend(front: Front, more: Sequence[tuple[int, ...]]) -> None:
    for device, tasks in enumerate(more):
        if tasks:
            front[device] = tuple(dict.fromkeys((*front[device], *tasks)))
