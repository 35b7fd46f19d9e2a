"""Cost tables of a graph: what the solver gets, each distinct layer and edge costed once."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pase.common.names import visible
from pase.common.quantities import quantity
from pase.costs.model import CostModel, PaperCostModel
from pase.costs.traffic import LayerTraffic, ReadTraits, layer_traffic, sum_name
from pase.errors import SolverError
from pase.graph import Access, Edge, Graph, Operator, SliceOf
from pase.graph.operators import with_fan_outs
from pase.sharding.configurations import enumerate_configurations
from pase.sharding.edges import SharedWeight, edge_sides, table_edges
from pase.sharding.overlap import Overlap, layout_overlap, redistributions
from pase.sharding.shards import (
    Component,
    FloatArray,
    IndexArray,
    IntArray,
    components,
    distinct_rows,
    split_columns,
    splits_of,
)
from pase.tables.cost_tables import CostTables, EdgeTable

_BYTES_OF_COSTS = 200
"""About what a configuration of a layer takes: its cost, work, and messages with their groups of devices."""

_CELLS_AT_ONCE = 1 << 18
"""Transfer costs that are worked out together: some 100 MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A graph's search problem: its cost tables and, for each vertex, what its table rows stand for.

    graph: the model's, with a fan-out wherever one is needed (`with_fan_outs`).
    """

    graph: Graph
    num_devices: int
    tables: CostTables
    configurations: tuple[IndexArray, ...]

    def splits(self, vertex: int, choice: int) -> dict[str, int]:
        """Return the split factor of each dim of a vertex under one of its configurations."""
        row = self.configurations[vertex][choice]
        return {dim: int(k) for dim, k in zip(self.graph.operators[vertex].extents, row, strict=True)}

    def choice(self, vertex: int, splits: tuple[int, ...]) -> int | None:
        """Return the index of a configuration of a vertex; None if it is not among them."""
        found = np.flatnonzero((self.configurations[vertex] == np.array(splits)).all(axis=1))
        return int(found[0]) if len(found) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCost:
    """compute, communication: [K] parts of the layer cost t_l."""

    compute: FloatArray
    communication: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferBytes:
    """forward, backward: [L_u, L_v] bytes that the device which fetches most must fetch."""

    forward: FloatArray
    backward: FloatArray


class TimeUpError(Exception):
    """The time for making tables is over. bound: no strategy costs less, by the layers that were costed."""

    def __init__(self, bound: float) -> None:
        """Note the bound."""
        super().__init__(bound)
        self.bound = bound


@dataclass(slots=True, kw_only=True)
class Allowance:
    """What making tables may take: until when, by `perf_counter`, and how many bytes they may hold in the end.

    held_bytes: what they hold by now. bound: of what was costed by now, no strategy costs less.
    """

    deadline_s: float = inf
    memory_bytes: float = inf
    held_bytes: int = 0
    bound: float = 0.0

    def check(self) -> None:
        """Raise TimeUpError where the time is over."""
        if perf_counter() > self.deadline_s:
            raise TimeUpError(self.bound)

    def hold(self, num_bytes: int, what: str) -> None:
        """Take memory for a table that is to be made; SolverError where there is not enough."""
        if self.held_bytes + num_bytes > self.memory_bytes:
            raise SolverError(
                f"{what} would take {quantity(num_bytes, 'B')}: with the {quantity(self.held_bytes, 'B')} of tables "
                f"before it that is more than the memory limit of {quantity(self.memory_bytes, 'B')}; use fewer "
                "devices, or give more memory (--memory-limit)"
            )
        self.held_bytes += num_bytes


def build_problem(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    on_progress: Callable[[str, float], None] | None = None,
    *,
    allowance: Allowance | None = None,
    only: Callable[[Graph, Operator], IndexArray] | None = None,
) -> Problem:
    """Return the cost tables of a graph with fan-outs (Eq. 1's t_l and r · t_x for every configuration).

    An edge of the tables is an edge of that graph, in its order, or a weight that two layers share, after them.

    on_progress: called with what is being done and the fraction that is done. only: the configurations, [K, D], that
    are looked at of each layer of that graph; None: every one. Raises ConfigurationError where a layer has too many
    configurations, SolverError where tables need more memory than is allowed, TimeUpError where they take longer.
    """
    return costed(alike(graph, num_devices, only), model, on_progress, allowance=allowance)


@dataclass(frozen=True, kw_only=True, eq=False)
class Alike:
    """Which layers and edges of a graph cost the same, so that each kind of them is costed once, whatever the model.

    graph: with fan-outs. layers: the first layer of each kind. layer_kind: [V] the kind of each. configurations: those
    that are looked at of each kind, None: every one. edges: the first edge of each kind. edge_kind: [E] the kind of
    each. ends: [E] (producer, consumer) by number.
    """

    graph: Graph
    num_devices: int
    layers: tuple[Operator, ...]
    layer_kind: tuple[int, ...]
    configurations: tuple[IndexArray | None, ...]
    edges: tuple[Edge, ...]
    edge_kind: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What costs were worked out from, for the layers and edges of one `Alike`; filled as it is made.

    layers: by kind. overlaps: by kind of edge, and the first of the producer's layouts that are looked at together.
    tables: by kind of edge, with the cost model that they were made for.
    """

    layers: dict[int, LayerTraffic] = field(default_factory=dict)
    overlaps: dict[int, dict[int, Overlap]] = field(default_factory=dict)
    tables: dict[int, tuple[CostModel, EdgeTable]] = field(default_factory=dict)

    def table(self, kind: int, model: CostModel, make: Callable[[], EdgeTable]) -> EdgeTable:
        """Return the transfer costs of a kind of edge: those of before where these are the same but for a factor."""
        if kind in self.tables:
            before, table = self.tables[kind]
            if model == before:
                return table
            if isinstance(before, PaperCostModel) and isinstance(model, PaperCostModel) and before.flop_per_byte > 0:
                return replace(table, values=table.values * (model.flop_per_byte / before.flop_per_byte))
        self.tables[kind] = model, make()
        return self.tables[kind][1]


def alike(graph: Graph, num_devices: int, only: Callable[[Graph, Operator], IndexArray] | None = None) -> Alike:
    """Return which layers and edges of a graph cost the same; only: as for `build_problem`."""
    graph = with_fan_outs(graph)
    kinds, edge_kinds = _Numbered(), _Numbered()
    layers, configurations, layer_kind = [], [], []
    for operator in graph.operators:
        known = None if only is None else only(graph, operator)
        number, is_new = kinds.number((signature(graph, operator), None if known is None else known.tobytes()))
        if is_new:
            layers.append(operator)
            configurations.append(known)
        layer_kind.append(number)
    edges, edge_kind, ends = [], [], []
    for edge in table_edges(graph):
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        number, is_new = edge_kinds.number((layer_kind[u], layer_kind[v], edge_signature(graph, edge)))
        if is_new:
            edges.append(edge)
        edge_kind.append(number)
        ends.append((u, v))
    return Alike(
        graph=graph,
        num_devices=num_devices,
        layers=tuple(layers),
        layer_kind=tuple(layer_kind),
        configurations=tuple(configurations),
        edges=tuple(edges),
        edge_kind=tuple(edge_kind),
        ends=tuple(ends),
    )


def costed(
    kinds: Alike,
    model: CostModel,
    on_progress: Callable[[str, float], None] | None = None,
    *,
    allowance: Allowance | None = None,
    known: Known | None = None,
) -> Problem:
    """Return the cost tables of layers and edges that are sorted by kind; known: of the same kinds, is added to.

    Other arguments and errors as for `build_problem`.
    """
    graph, allowance = kinds.graph, allowance or Allowance()
    layers = Known().layers if known is None else known.layers
    vertex_costs: list[FloatArray] = []
    for number, (operator, chosen) in enumerate(zip(kinds.layers, kinds.configurations, strict=True)):
        if number not in layers:
            found = enumerate_configurations(operator, kinds.num_devices) if chosen is None else chosen
            what = f"the costs of the {len(found):,} configurations of layer {visible(operator.name)}"
            allowance.hold(found.nbytes + _BYTES_OF_COSTS * len(found), what)
            layers[number] = traffic_of(graph, operator, found)
        cost = layer_cost(layers[number], model)
        vertex_costs.append(cost.compute + cost.communication)
        allowance.bound += float(vertex_costs[number].min()) * kinds.layer_kind.count(number)
        allowance.check()
        if on_progress:
            on_progress("costing layers", (number + 1) / len(kinds.layers))
    edge_tables: list[EdgeTable] = []
    firsts = {number: position for position, number in reversed([*enumerate(kinds.edge_kind)])}
    for number, edge in enumerate(kinds.edges):
        u, v = kinds.ends[firsts[number]]
        sides = layers[kinds.layer_kind[u]], layers[kinds.layer_kind[v]]
        if known is None:
            edge_tables.append(edge_cost(graph, edge, *sides, model, allowance))
        else:
            overlaps = known.overlaps.setdefault(number, {})
            make = partial(edge_cost, graph, edge, *sides, model, allowance, overlaps)
            edge_tables.append(known.table(number, model, make))
        if on_progress:
            on_progress("costing edges", (number + 1) / len(kinds.edges))
    tables = CostTables(
        vertex_names=tuple(operator.name for operator in graph.operators),
        vertex_costs=tuple(vertex_costs),
        vertex_table=kinds.layer_kind,
        edges=kinds.ends,
        edge_tables=tuple(edge_tables),
        edge_table=kinds.edge_kind,
    )
    return Problem(
        graph=graph,
        num_devices=kinds.num_devices,
        tables=tables,
        configurations=tuple(layers[number].splits.values for number in kinds.layer_kind),
    )


def traffic_of(graph: Graph, operator: Operator, splits: IndexArray) -> LayerTraffic:
    """Return what a layer of a graph computes and communicates under configurations [K, D]."""
    reads, single_use = _read_traits(graph, operator), _single_use(graph, operator)
    return layer_traffic(operator, splits, reads, itemsize=graph.itemsize, single_use=single_use)


def layer_cost(traffic: LayerTraffic, model: CostModel) -> LayerCost:
    """Return the layer cost t_l of Eq. 1 for the configurations of a layer's traffic."""
    return LayerCost(
        compute=model.work(traffic.forward) + model.work(traffic.backward),
        communication=sum(model.messages(traffic), np.zeros(len(traffic.splits.values))),
    )


def signature(graph: Graph, operator: Operator) -> Hashable:
    """Return what an operator's costs depend on: equal for repeated layers, and for each step of a loop."""
    reads, writes = (tuple(map(_anywhere, accesses)) for accesses in (operator.reads, operator.writes))
    told = operator.unnamed
    if (reads, writes) != (told.reads, told.writes):
        told = replace(told, reads=reads, writes=writes)
    return told, _read_traits(graph, operator), _single_use(graph, operator)


def edge_signature(graph: Graph, edge: Edge) -> Hashable:
    """Return what the costs of an edge depend on besides the signatures of its layers."""
    if isinstance(edge, SharedWeight):
        return edge.output, edge.input
    (producer, write), (consumer, read) = edge_sides(graph, edge)
    is_single = graph.uses[producer.name].get(edge.output, 0) == 1
    has_gradient = graph.has_gradient(consumer, edge.input)
    return replace(_anywhere(write), tensor=""), is_single, replace(_anywhere(read), tensor=""), has_gradient


def _anywhere(access: Access) -> Access:
    """Return an access with its pieces of one point at the first: which one it is tells who has it, not how much moves.

    However a dim is split, one point lies in one part of it whole.
    """
    if not any(isinstance(axis, SliceOf) and axis.extent == 1 for axis in access.index_map):
        return access
    axes = (
        replace(axis, offset=0) if isinstance(axis, SliceOf) and axis.extent == 1 else axis for axis in access.index_map
    )
    return replace(access, index_map=tuple(axes))


def transfer_bytes(graph: Graph, edge: Edge, u_layouts: IndexArray, v_layouts: IndexArray) -> TransferBytes:
    """Return t_x of Eq. 1, both ways, for layouts of the tensor on either side.

    u_layouts: [L_u, components], split factors of the produced tensor's components (`components`);
    v_layouts: [L_v, components] of the consumed one's. Forward, the consumer fetches what it does not hold;
    backward, the producer fetches its gradient likewise, so that t_x(u, v) = t_x(v, u), where it has one.
    """
    u_side, v_side = edge_sides(graph, edge)
    has_gradient = _flows_back(graph, edge)
    common = layout_overlap(_components(*u_side), u_layouts, _components(*v_side), v_layouts, has_gradient=has_gradient)
    forward, backward = redistributions(common, graph.itemsize)
    return TransferBytes(forward=forward.moved_bytes, backward=backward.moved_bytes * has_gradient)


def edge_layouts(graph: Graph, edge: Edge, us: IndexArray, vs: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return how configurations [K_u, D_u] and [K_v, D_v] split the tensor's components on either side."""
    sides = zip(edge_sides(graph, edge), (us, vs), strict=True)
    u, v = (split_columns(_components(op, access), splits_of(op, values)) for (op, access), values in sides)
    return u, v


def edge_cost(
    graph: Graph,
    edge: Edge,
    u: LayerTraffic,
    v: LayerTraffic,
    model: CostModel,
    allowance: Allowance | None = None,
    overlaps: dict[int, Overlap] | None = None,
) -> EdgeTable:
    """Return r · t_x of an edge between all configurations of its two layers, both ways together.

    A reader of a fan-out, or another user of a weight than its owner, sends its gradient back, and all-reduces it on
    its own only where its layout is not that of the other end, or the devices are others that it sums over: that is
    part of the cost. Where both agree nothing is paid: partial sums are added on each device, and the other end's
    all-reduce sums them all (data parallelism reduces a tied weight once).

    allowance: for making it; errors as for `build_problem`. overlaps: as in `Known`, of this edge; is added to.
    """
    allowance = allowance or Allowance()
    (producer, held), (consumer, wanted) = edge_sides(graph, edge)
    u_parts, v_parts = _components(producer, held), _components(consumer, wanted)
    is_weight, flows_back = isinstance(edge, SharedWeight), _flows_back(graph, edge)
    own = v.joint_sums.get(edge.input) if is_weight or producer.is_fan_out else None
    forward_sums = None if is_weight else _members(model, u, sum_name(held.tensor, is_gradient=False))
    backward_sums = _members(model, v, sum_name(wanted.tensor, is_gradient=True)) if own is None else None
    u_more: list[IntArray] = []
    v_more: list[IntArray] = []
    if own is not None:
        own_cost = _cost_of_joint_sum(v, edge.input, model)
        # Over how many devices the other end sums.
        group = u.splits.product(producer.partial_dims(held if is_weight else producer.reads[0]))
        if own.ends_on_edge:
            backward_sums = model.sum_members(v, own).astype(np.int32)
        u_more, v_more = [group], [own.group, np.unique(own_cost, return_inverse=True)[1]]
    u_side, v_side = _side(u_parts, u, forward_sums, u_more), _side(v_parts, v, backward_sums, v_more)
    shape = len(u_side.members), len(v_side.members)
    what = f"{shape[0]:,} layouts of layer {visible(producer.name)} and {shape[1]:,} of layer {visible(consumer.name)}"
    num_bytes = 4 * (len(u_side.class_of) + len(v_side.class_of)) + 8 * shape[0] * shape[1]
    allowance.hold(num_bytes, f"the transfer costs between {what}")
    values, stays = np.empty(shape), np.empty(shape, dtype=np.bool_)
    # Working out a cell takes many times the memory of its cost.
    step = max(1, _CELLS_AT_ONCE // shape[1])
    for first in range(0, len(u_side.layouts), step):
        allowance.check()
        block = slice(first, first + step)
        rows = np.flatnonzero((u_side.layout_of >= block.start) & (u_side.layout_of < block.stop))
        layout_of = u_side.layout_of[rows] - first
        if overlaps is None or first not in overlaps:
            sides = u_parts, u_side.layouts[block], v_parts, v_side.layouts
            common = layout_overlap(*sides, has_gradient=flows_back)
            if overlaps is not None:
                overlaps[first] = common
        else:
            common = overlaps[first]
        # How a sum lies over the machine matters to the way that the sum goes, not to the way back.
        forward, _ = redistributions(common.of_classes(u=layout_of), graph.itemsize, forward_sums=u_side.members[rows])
        _, backward = redistributions(
            common.of_classes(v=v_side.layout_of), graph.itemsize, backward_sums=v_side.members
        )
        values[rows] = model.transfer(forward)[:, v_side.layout_of]
        stays[rows] = forward.moved_bytes[:, v_side.layout_of] == 0
        if flows_back:
            values[rows] += model.transfer(backward)[layout_of]
            stays[rows] &= backward.moved_bytes[layout_of] == 0
    if own is not None:
        is_joint = stays & (group[u_side.first, None] == own.group[v_side.first])
        values = np.where(is_joint, 0.0, values + own_cost[v_side.first])
    return EdgeTable(
        row_class=u_side.class_of.astype(np.int32), col_class=v_side.class_of.astype(np.int32), values=values
    )


def _flows_back(graph: Graph, edge: Edge) -> bool:
    """Return whether a gradient comes back on an edge."""
    return graph.has_gradient(graph[edge.consumer], edge.input)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Side:
    """One side of an edge. layouts: [A, components]. class_of: [K] class of each configuration: a layout, and how a sum
    lies over the machine. layout_of, first: [L] layout and first configuration of each class. members: [L, levels]."""

    layouts: IndexArray
    class_of: NDArray[np.intp]
    layout_of: NDArray[np.intp]
    first: NDArray[np.intp]
    members: IntArray


def _cost_of_joint_sum(traffic: LayerTraffic, read: int, model: CostModel) -> FloatArray:
    """Return the [K] cost of the sum of a read's gradient where the layer makes it, beside all its other messages."""
    sums = traffic.joint_sums
    every = replace(traffic, messages=(*traffic.messages, *sums.values()), joint_sums={})
    return model.messages(every)[len(traffic.messages) + list(sums).index(read)]


def _side(
    parts: tuple[Component, ...], traffic: LayerTraffic, sums: IndexArray | None, more: Sequence[IntArray]
) -> _Side:
    """Return the classes of configurations; more: [K] or [K, columns] what tells them apart besides."""
    layouts, layout_of = distinct_rows(split_columns(parts, traffic.splits))
    members = np.empty((len(layout_of), 0), dtype=np.int32) if sums is None else sums
    rows = np.column_stack([layout_of, members, *more]).astype(np.int32)
    classes, class_of = distinct_rows(rows)
    first = np.zeros(len(classes), dtype=np.intp)
    first[class_of[::-1]] = np.arange(len(class_of))[::-1]
    return _Side(
        layouts=layouts,
        class_of=class_of,
        layout_of=classes[:, 0].astype(np.intp),
        first=first,
        members=classes[:, 1 : 1 + members.shape[1]].astype(np.int64),
    )


def _members(model: CostModel, traffic: LayerTraffic, name: str) -> IndexArray | None:
    """Return [K, levels]: how the devices of a sum that an edge ends lie over the machine; None without one."""
    for message in traffic.messages:
        if message.ends_on_edge and message.tensor == name:
            return model.sum_members(traffic, message).astype(np.int32)
    return None


def _components(operator: Operator, access: Access) -> tuple[Component, ...]:
    return components(access.shape, access.index_map, operator.extents)


def _read_traits(graph: Graph, operator: Operator) -> tuple[ReadTraits, ...]:
    return tuple(
        ReadTraits(
            has_gradient=has_gradient,
            is_fed=(operator.name, position) in graph.incoming,
            is_owned=_is_owned(graph, operator, position),
        )
        for position, (access, has_gradient) in enumerate(
            zip(operator.reads, graph.read_gradients(operator), strict=True)
        )
    )


def _is_owned(graph: Graph, operator: Operator, position: int) -> bool:
    shared, edge = operator.reads[position].shared, graph.incoming.get((operator.name, position))
    return graph.owners[shared] == operator.name if shared else edge is None or not graph[edge.producer].is_fan_out


def _single_use(graph: Graph, operator: Operator) -> tuple[bool, ...]:
    """Return, for each tensor written, whether it is summed, and for one reader alone."""
    uses = graph.uses[operator.name]
    return tuple(bool(operator.partial_dims(w)) and uses.get(i, 0) == 1 for i, w in enumerate(operator.writes))


class _Numbered:
    """Numbers distinct keys in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def number(self, key: object) -> tuple[int, bool]:
        """Return (number, whether the key is new)."""
        is_new = key not in self._numbers
        return self._numbers.setdefault(key, len(self._numbers)), is_new
