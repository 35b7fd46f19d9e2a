"""A step of large training from the costs of one block: micro-batches, pipelines, recomputation, shards of the weights.

Costs of single layers are those of a cost model (`layer_times`): of one micro-batch on the devices that split a layer.
What the search has no choices for is composed of them by closed forms (`step_parts`):

- a pipeline takes what its schedule says (`pase.planning.stages`: 1F1B; interleaved for several chunks a device);
- hand-overs between stages that nothing hides count in each t, v times;
- recomputation: what is computed again, its messages included, counts once more in t;
- gradients: one sum over the replicas at the end of the step, or, where weights lie in shards, gathers and
  reduce-scatters of every layer that hide behind ω of the computation; of these the first gather and the last
  reduce-scatter have nothing to hide behind;
- the optimizer: the bytes that it reads and writes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pase.common.containers import FrozenDict
from pase.costs import AlphaBetaCostModel, cost_model, edge_cost, traffic_of
from pase.costs.collectives import hierarchical_all_gather, hierarchical_all_reduce, hierarchical_reduce_scatter
from pase.graph import Graph, Operator, Precision
from pase.graph.operators import with_fan_outs
from pase.machine import Machine
from pase.planning.stages import step_s
from pase.sharding.edges import SharedWeight, table_edges
from pase.sharding.shards import shard_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of a layer with one micro-batch.

    messages_s: both ways. blocking_s: likewise, of those that nothing hides. weights: numbers of them on a device.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    messages_s: float = 0.0
    blocking_s: float = 0.0
    weights: float = 0.0

    def scaled(self, factor: float) -> "LayerTime":
        """Return so many times the computation; messages and weights stay."""
        return replace(self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s)


def total(layers: Collection[LayerTime]) -> LayerTime:
    """Return the sum of layers that follow one another."""
    return LayerTime(
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers),
        messages_s=sum(layer.messages_s for layer in layers),
        blocking_s=sum(layer.blocking_s for layer in layers),
        weights=sum(layer.weights for layer in layers),
    )


def step_model(machine: Machine, num_devices: int, precision: Precision) -> AlphaBetaCostModel:
    """Return the cost model `step` for some devices."""
    model = cost_model("step", machine, num_devices, precision)
    assert isinstance(model, AlphaBetaCostModel)
    return model


def layer_times(graph: Graph, split: Mapping[str, int], model: AlphaBetaCostModel) -> dict[str, LayerTime]:
    """Return what each layer takes, transfers from the layers before it included.

    Args:
        graph: of one micro-batch of one replica.
        split: into how many parts each dim of that name is split, in every layer that has it; of "s", the sequence,
            only where a layer has no other of them, as norms and residuals do under sequence parallelism.
        model: of the devices that split a layer.
    """
    graph = with_fan_outs(graph)
    does = {}
    for operator in graph.operators:
        row = np.array([[*layer_splits(operator, split).values()]], dtype=np.int32)
        does[operator.name] = traffic_of(graph, operator, row)
    messages = dict.fromkeys(does, 0.0)
    for edge in table_edges(graph):
        if not isinstance(edge, SharedWeight):
            cost = edge_cost(graph, edge, does[edge.producer], does[edge.consumer], model)
            messages[edge.consumer] += float(cost.values[0, 0])
    times = {}
    for operator in graph.operators:
        traffic = does[operator.name]
        times[operator.name] = LayerTime(
            forward_s=float(model.work(traffic.forward)[0]),
            backward_s=float(model.work(traffic.backward)[0]),
            messages_s=messages[operator.name] + sum(float(cost[0]) for cost in model.messages(traffic)),
            weights=sum(float(shard_size(access, traffic.splits)[0]) for access in operator.parameters),
        )
    return times


def layer_splits(
    operator: Operator, tensor: Mapping[str, int], apart: Mapping[str, int] = FrozenDict()
) -> dict[str, int]:
    """Return into how many parts each dim of a layer is split.

    Args:
        operator: the layer.
        tensor: as `layer_times` has it.
        apart: into how many parts each dim of that name is split besides, whatever else is.
    """
    found = {dim: parts for dim, parts in tensor.items() if dim != "s" and dim in operator.extents}
    if operator.is_fan_out:
        # It is read whole where the gradients of its readers are parts of one sum.
        found = {dim: parts for dim, parts in found.items() if dim == "g" and operator.extents[dim] % parts == 0}
    found = found or {"s": tensor.get("s", 1)}
    return {dim: found.get(dim, 1) * apart.get(dim, 1) for dim in operator.extents}


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage has: as many, those that are left over in the middle."""
    least, over = divmod(layers, stages)
    return [least + (1 <= stage <= over) for stage in range(stages)]


def exposed_s(communication_s: float, cover_s: float, overlap: float) -> float:
    """Return what does not hide: max(0, A - ω B)."""
    return max(0.0, communication_s - overlap * cover_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a step is spread over devices.

    stages: of the pipeline; chunks: of layers on a device of it. micro_batches: in a step, of one replica. replicas:
    that share the batch. shards: that the weights of a stage lie in, 1 where every replica has them whole.
    tensor: devices that split each layer. hand_over_bytes: from stage to stage, one way, of a micro-batch, of what all
    devices of a stage hold. is_async: whether messages within layers hide behind these. gradient_bytes,
    weight_bytes: of a number as it is summed, and gathered. optimizer_bytes: that the optimizer touches, for a weight.
    adding_bytes: that are touched where a micro-batch's gradient is added to the sum of those before, for a weight.
    is_gathered: whether what a stage gets must be gathered from its devices' parts. gather_bytes, scatter_bytes: that
    are touched beside what is sent, where weights are gathered and their gradients scattered, for a weight.
    """

    stages: int
    chunks: int
    micro_batches: int
    replicas: int
    shards: int
    tensor: int
    hand_over_bytes: float
    is_async: bool = False
    gradient_bytes: int
    weight_bytes: int
    optimizer_bytes: int
    adding_bytes: int = 0
    is_gathered: bool = False
    gather_bytes: int = 0
    scatter_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of a step, which add up.

    compute_s: forward and backward, sums over micro-batches included. again_s: recomputation. messages_s: within
    layers, as far as they do not hide. hand_over_s: between stages. bubble_s: waiting in the pipeline. shards_s:
    gathers and sums of weights, as far as they do not hide. update_s: the optimizer.
    """

    compute_s: float
    again_s: float
    messages_s: float
    hand_over_s: float
    bubble_s: float
    shards_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """All of the step."""
        parts = self.compute_s, self.again_s, self.messages_s, self.hand_over_s
        return sum(parts) + self.bubble_s + self.shards_s + self.update_s


def step_parts(
    block: LayerTime,
    again: LayerTime,
    ends: tuple[LayerTime, LayerTime],
    layers: int,
    scheme: Scheme,
    model: AlphaBetaCostModel,
    *,
    bytes_per_s: float,
) -> StepParts:
    """Return what a step takes.

    Args:
        block: one layer of the model, with one micro-batch.
        again: what of it is computed once more; of its messages, those one way.
        ends: what comes before the first block, and after the last one.
        layers: how many blocks there are.
        scheme: how the step is spread.
        model: of as many devices as a stage has; its first level is a node.
        bytes_per_s: of the device's memory, as the optimizer reaches it.
    """
    first, last = ends
    spread = stage_layers(layers, scheme.stages * scheme.chunks)
    on_device = [sum(spread[device :: scheme.stages]) for device in range(scheme.stages)]
    own = max(on_device)
    messages = block.messages_s + again.messages_s
    if scheme.is_async:
        computing = block.forward_s + block.backward_s + again.forward_s
        messages = exposed_s(messages, computing, model.overlap)
    adding_s = scheme.adding_bytes / bytes_per_s
    messages += block.blocking_s + again.blocking_s
    compute_s = own * (block.forward_s + block.backward_s + adding_s * block.weights)
    again_s, messages_s = own * again.forward_s, own * messages
    hand_over_s = 0.0
    if scheme.stages > 1:
        # Each device of a stage hands over its part; the next stage gathers it.
        link = model.links[-1]
        part = scheme.hand_over_bytes / scheme.tensor
        one_way = link.latency_s + part * link.s_per_byte
        if scheme.is_gathered:
            one_way += float(hierarchical_all_gather(scheme.hand_over_bytes, [scheme.tensor], model.links[:1]))
        hand_over_s = 2 * scheme.chunks * one_way
    layer_s = (compute_s + again_s + messages_s) / own
    extra_s = [layer.forward_s + layer.backward_s + layer.messages_s + adding_s * layer.weights for layer in ends]
    stages_s = [count * layer_s + hand_over_s for count in on_device]
    stages_s[0] += extra_s[0]
    stages_s[-1] += extra_s[1]
    m = scheme.micro_batches
    whole_s = step_s(stages_s, [0.0], m, scheme.chunks)
    end_s = max(stages_s) - own * layer_s - hand_over_s
    weights = own * block.weights + max(first.weights, last.weights)
    if scheme.stages == 1 and scheme.shards > 1:
        weights = own * block.weights + first.weights + last.weights
    return StepParts(
        compute_s=m * (compute_s + end_s),
        again_s=m * again_s,
        messages_s=m * messages_s,
        hand_over_s=m * hand_over_s,
        bubble_s=whole_s - m * max(stages_s),
        shards_s=_shards_s(block, weights, m * (compute_s + again_s), scheme, model)
        + weights * (_gathers(scheme) * scheme.gather_bytes + scheme.scatter_bytes) / bytes_per_s,
        update_s=weights / scheme.shards * scheme.optimizer_bytes / bytes_per_s,
    )


def _shards_s(block: LayerTime, weights: float, cover_s: float, scheme: Scheme, model: AlphaBetaCostModel) -> float:
    """Return the time of sums of gradients, and of gathers of weights that lie in shards, that does not hide."""
    inside = max(1, min(scheme.replicas, model.fanouts[0] // scheme.tensor)) if len(model.links) > 1 else 1
    if len(model.links) == 1:
        inside = scheme.replicas
    members = [inside, scheme.replicas // inside][: len(model.links)]
    links = model.links
    if scheme.shards == 1:
        return float(hierarchical_all_reduce(weights * scheme.gradient_bytes, members, links))

    def time(count: float) -> tuple[float, float]:
        gather = float(hierarchical_all_gather(count * scheme.weight_bytes, members, links))
        return gather, float(hierarchical_reduce_scatter(count * scheme.gradient_bytes, members, links))

    gather, scatter = time(block.weights)
    all_gather, all_scatter = time(weights)
    hidden = _gathers(scheme) * (all_gather - gather) + all_scatter - scatter
    return gather + scatter + exposed_s(hidden, cover_s, model.overlap)


def _gathers(scheme: Scheme) -> int:
    """Return how often weights are gathered: in a pipeline they stay so through the step, else once for either pass."""
    return 1 if scheme.stages > 1 else 2
