"""What layers of a graph compute and send, and what tensors cost between the layouts of two layers."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pase.common.words import quantity, visible
from pase.costs.model import CostModel, PaperCostModel
from pase.costs.traffic import LayerTraffic, ReadTraits, layer_traffic, sum_name
from pase.errors import SolverError
from pase.graph import Access, Edge, Graph, Operator, SliceOf
from pase.sharding.edges import SharedWeight, edge_itemsizes, edge_sides
from pase.sharding.levels import placed_overlap
from pase.sharding.overlap import Overlap, Redistribution, backward_fetch, forward_fetch, layout_overlap, of_classes
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
from pase.tables.cost_tables import EdgeTable

BYTES_OF_COSTS = 200
"""About what a configuration of a layer takes: its cost, work, and messages with their groups of devices."""

_CELLS_AT_ONCE = 1 << 18
"""Transfer costs that are worked out together: some 100 MB."""


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


Ends = tuple[LayerTraffic, LayerTraffic]
"""Traffic of the producer and of the consumer of an edge."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownTransfers:
    """What transfer costs of edges were worked out from, so that they are worked out once for several cost models.

    Attributes:
        overlaps: By kind of edge, and the first of the producer's layouts that are considered together.
        tables: By kind of edge, with the cost model that they were made for.
        traffic: By kind of edge, once costs on a second machine were asked for.
    """

    overlaps: dict[Hashable, dict[int, Overlap]] = field(default_factory=dict)
    tables: dict[Hashable, tuple[CostModel, EdgeTable]] = field(default_factory=dict)
    traffic: dict[Hashable, "EdgeTraffic"] = field(default_factory=dict)

    def table(
        self, kind: Hashable, graph: Graph, edge: Edge, ends: Ends, model: CostModel, room: Allowance
    ) -> EdgeTable:
        """Return the transfer costs of a kind of edge: those of before where these are the same but for a factor."""
        overlaps = self.overlaps.setdefault(kind, {})
        if kind not in self.tables:
            self.tables[kind] = model, edge_cost(graph, edge, *ends, model, room, overlaps)
            return self.tables[kind][1]
        before, table = self.tables[kind]
        if model == before:
            return table
        if isinstance(before, PaperCostModel) and isinstance(model, PaperCostModel) and before.flop_per_byte > 0:
            return replace(table, values=table.values * (model.flop_per_byte / before.flop_per_byte))
        found = self.traffic[kind].cost(model) if kind in self.traffic else None
        if found is None:
            again = between(graph, edge, *ends, model, room, overlaps)
            room.hold(again.num_bytes, f"the transfer costs between {again.sizes_text(graph, edge)}")
            self.traffic[kind] = again.traffic()
            found = self.traffic[kind].cost(model)
            assert found is not None
        self.tables[kind] = model, found
        return found


def held_tables(edges: Sequence[tuple[Graph, Edge, Ends]], model: CostModel, allowance: Allowance) -> list["Between"]:
    """Return what lies between the sides of edges, with memory for all of their tables.

    Raises:
        SolverError: There is not enough; with what all of them would take, and the largest.
    """
    tables = [between(graph, edge, *ends, model, allowance) for graph, edge, ends in edges]
    if tables:
        sizes = [table.num_bytes for table in tables]
        largest = sizes.index(max(sizes))
        graph, edge, _ = edges[largest]
        what = f"the transfer costs between {tables[largest].sizes_text(graph, edge)}"
        if len(tables) > 1:
            what += f", the largest of {len(tables)} tables, and the others"
        allowance.hold(sum(sizes), what)
    return tables


def traffic_of(graph: Graph, operator: Operator, splits: IndexArray) -> LayerTraffic:
    """Return what a layer of a graph computes and communicates under configurations [K, D]."""
    reads, single_use = _read_traits(graph, operator), _single_use(graph, operator)
    return layer_traffic(operator, splits, reads, types=graph.types[operator.name], single_use=single_use)


def hiding_layers(graph: Graph) -> tuple[tuple[bool, bool], ...]:
    """Return, for each layer, whether its sums of weights' gradients can hide, and whether it can hide others'.

    The backward pass goes from the last layer to the first. A sum can hide while a layer before its own is still to be
    gone back through; the computation of a layer hides something if a layer after it has weights.
    """
    goes_back = {operator.name: any(graph.read_gradients(operator)) for operator in graph.operators}
    is_before: dict[str, bool] = {}
    for operator in graph.operators:
        above = [edge.producer for i in range(len(operator.reads)) if (edge := graph.incoming.get((operator.name, i)))]
        is_before[operator.name] = any(goes_back[name] or is_before[name] for name in above)
    has_weights: dict[str, bool] = {}
    for operator in reversed(graph.operators):
        below = [edge.consumer for edge in graph.outgoing.get(operator.name, ())]
        has_weights[operator.name] = any(
            has_weights[name] or any(access.is_trained for access in graph[name].parameters) for name in below
        )
    return tuple((is_before[operator.name], has_weights[operator.name]) for operator in graph.operators)


def layer_signatures(graph: Graph) -> Iterator[Hashable]:
    """Yield what the costs of each operator depend on: equal for repeated layers, and for each step of a loop."""
    anywhere: dict[int, Operator] = {}
    for operator, like in zip(graph.operators, graph.repeated, strict=True):
        if like not in anywhere:
            reads, writes = (tuple(map(_anywhere, accesses)) for accesses in (operator.reads, operator.writes))
            anywhere[like] = replace(operator.unnamed, reads=reads, writes=writes)
        traits, single_use = _read_traits(graph, operator), _single_use(graph, operator)
        yield anywhere[like], graph.types[operator.name], traits, single_use


def edge_signatures(graph: Graph, edges: Iterable[Edge]) -> Iterator[Hashable]:
    """Yield what the costs of each edge depend on besides the signatures of its layers."""
    unnamed: dict[tuple[int, str, int], Access] = {}
    for edge in edges:
        if isinstance(edge, SharedWeight):
            yield edge.output, edge.input
            continue
        (producer, write), (consumer, read) = edge_sides(graph, edge)
        u, v = (graph.repeated[graph.index[operator.name]] for operator in (producer, consumer))
        ends = (u, "write", edge.output), (v, "read", edge.input)
        for end, access in zip(ends, (write, read), strict=True):
            if end not in unnamed:
                unnamed[end] = replace(_anywhere(access), tensor="")
        is_single = len(graph.readers[edge.producer, edge.output]) == 1
        yield unnamed[ends[0]], is_single, unnamed[ends[1]], graph.has_gradient(consumer, edge.input)


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
    there, back = edge_itemsizes(graph, edge)
    backward = backward_fetch(common, back).moved_bytes * has_gradient
    return TransferBytes(forward=forward_fetch(common, there).moved_bytes, backward=backward)


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
    table = between(graph, edge, u, v, model, allowance, overlaps)
    table.allowance.hold(table.num_bytes, f"the transfer costs between {table.sizes_text(graph, edge)}")
    return table.total()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeTraffic:
    """What an edge's costs follow from: its fetches, of which few differ, so that these are costed once each.

    stays: [L_u, L_v] where nothing moves; None where it makes no difference. blocks: rows of the table, and, each
    way, (the fetches that differ, [1, N], and which of them each pair of classes has). fanouts: of the levels of the
    machine.
    """

    between: "Between"
    stays: NDArray[np.bool_] | None
    blocks: tuple[tuple[NDArray[np.intp], tuple[tuple[Redistribution, IndexArray], ...]], ...]
    fanouts: tuple[int, ...]

    def cost(self, model: CostModel) -> EdgeTable | None:
        """Return what `edge_cost` does, but for the numbers of classes; None where other classes are told apart."""
        own_cost = self.between.own_cost_under(model)
        of, first = self.between.v.class_of, self.between.v.first
        if model.fanouts != self.fanouts or (own_cost is not None and (own_cost != own_cost[first][of]).any()):
            return None
        values = np.empty(self.between.shape)
        for rows, ways in self.blocks:
            values[rows] = sum(model.transfer(fetches)[0].take(which) for fetches, which in ways)
        return self.between.table(values, self.stays, own_cost)


Ways = list[tuple[Redistribution, tuple[NDArray[np.intp], int]]]
"""What moves forward and, where a gradient does, back: fetches of classes on one side and layouts on the other, with
the layout of each class there, and the axis of these."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Between:
    """What lies between the two sides of an edge, under a cost model.

    u_parts, v_parts: how either side indexes the tensor. itemsizes: bytes of a number, there and back. own_cost:
    [K_v] of the sum of a gradient that the consumer makes on its own where it is not joined with the other end's;
    read: of which input of its, None without one; group: [K_u] over how many devices the other end sums. allowance,
    overlaps: as for `edge_cost`.
    """

    model: CostModel
    allowance: Allowance
    overlaps: dict[int, Overlap] | None

    flows_back: bool
    u_parts: tuple[Component, ...]
    v_parts: tuple[Component, ...]
    itemsizes: tuple[int, int]
    u: "_Side"
    v: "_Side"
    consumer: LayerTraffic
    read: int | None
    own_cost: FloatArray | None
    group: IntArray

    @property
    def shape(self) -> tuple[int, int]:
        """(L_u, L_v)."""
        return len(self.u.members), len(self.v.members)

    @property
    def num_bytes(self) -> int:
        """What the table will take."""
        return 4 * (len(self.u.class_of) + len(self.v.class_of)) + 8 * self.shape[0] * self.shape[1]

    def sizes_text(self, graph: Graph, edge: Edge) -> str:
        """Return how many layouts either side has, with the names of the layers."""
        (producer, _), (consumer, _) = edge_sides(graph, edge)
        of_producer = f"{self.shape[0]:,} layouts of layer {visible(producer.name)}"
        return f"{of_producer} and {self.shape[1]:,} of layer {visible(consumer.name)}"

    def total(self) -> EdgeTable:
        """Return what an edge costs; while it is made, no other array is as large but one of flags."""
        values = np.empty(self.shape)
        stays = self.nothing_known
        for rows, ways in self.fetches():
            forward, *backward = (of_classes(self.model.transfer(fetch), *of) for fetch, of in ways)
            values[rows] = sum(backward, forward)
            self.note_still(stays, rows, ways)
        return self.table(values, stays, self.own_cost)

    def costs(self) -> tuple[EdgeTable, FloatArray, TransferBytes]:
        """Return what an edge costs, [L_u, L_v] what of it is paid forward, and the bytes that are moved."""
        there, back = np.empty(self.shape), np.zeros(self.shape)
        moved = TransferBytes(forward=np.empty(self.shape), backward=np.zeros(self.shape))
        stays = self.nothing_known
        for rows, ways in self.fetches():
            totals = zip((there, back), (moved.forward, moved.backward), strict=True)
            for (total, size), (fetch, of) in zip(totals, ways, strict=False):
                total[rows] = of_classes(self.model.transfer(fetch), *of)
                size[rows] = of_classes(fetch.moved_bytes, *of)
            self.note_still(stays, rows, ways)
        return self.table(there + back, stays, self.own_cost), there, moved

    def traffic(self) -> "EdgeTraffic":
        """Return what an edge's costs follow from on machines with the same levels."""
        stays, blocks = self.nothing_known, []
        for rows, ways in self.fetches():
            distinct = [(*fetch.distinct(), of) for fetch, of in ways]
            blocks.append((rows, tuple((fetches, of_classes(which, *of)) for fetches, which, of in distinct)))
            self.note_still(stays, rows, ways)
        return EdgeTraffic(between=self, stays=stays, blocks=tuple(blocks), fanouts=self.model.fanouts)

    @property
    def nothing_known(self) -> NDArray[np.bool_] | None:
        """[L_u, L_v] for where nothing moves; None where it makes no difference."""
        return None if self.read is None else np.empty(self.shape, dtype=np.bool_)

    def note_still(self, stays: NDArray[np.bool_] | None, rows: NDArray[np.intp], ways: "Ways") -> None:
        """Note where nothing moves between some of the producer's classes and the consumer's."""
        if stays is not None:
            stays[rows] = np.logical_and.reduce([of_classes(fetch.moved_bytes, *of) == 0 for fetch, of in ways])

    def fetches(self) -> Iterator[tuple[NDArray[np.intp], "Ways"]]:
        """Yield some of the producer's classes, and what moves between them and the consumer's."""
        u, v = self.u, self.v
        # Working out a cell takes many times the memory of its cost.
        step = max(1, _CELLS_AT_ONCE // self.shape[1])
        for first in range(0, len(u.layouts), step):
            self.allowance.check()
            block = slice(first, first + step)
            rows = np.flatnonzero((u.layout_of >= block.start) & (u.layout_of < block.stop))
            layout_of = u.layout_of[rows] - first
            common = (self.overlaps or {}).get(first)
            if common is None:
                sides = self.u_parts, u.layouts[block], self.v_parts, v.layouts
                common = layout_overlap(*sides, has_gradient=self.flows_back)
                if self.overlaps is not None:
                    self.overlaps[first] = common
            # How a sum lies over the machine matters to the way that the sum goes, not to the way back.
            there, back = self.itemsizes
            forward = forward_fetch(common, there).of_classes(layout_of, 0, u.members[rows])
            ways: Ways = [(forward, (v.layout_of, 1))]
            if self.flows_back:
                backward = backward_fetch(common, back).of_classes(v.layout_of, 1, v.members)
                ways.append((backward, (layout_of, 0)))
            yield rows, ways

    def own_cost_under(self, model: CostModel) -> FloatArray | None:
        """Return `own_cost` under another cost model."""
        return None if self.read is None else _cost_of_joint_sum(self.consumer, self.read, model)

    def table(self, values: FloatArray, stays: NDArray[np.bool_] | None, own_cost: FloatArray | None) -> EdgeTable:
        """Return the table of an edge from what its transfers cost, and from where nothing moves; [L_u, L_v] both."""
        u, v = self.u, self.v
        if self.read is not None and own_cost is not None:
            assert stays is not None
            own = self.consumer.joint_sums[self.read]
            is_joint = stays & (self.group[u.first, None] == own.group[v.first])
            values += own_cost[v.first]
            values[is_joint] = 0.0
        return EdgeTable(row_class=u.class_of.astype(np.int32), col_class=v.class_of.astype(np.int32), values=values)


def between(
    graph: Graph,
    edge: Edge,
    u: LayerTraffic,
    v: LayerTraffic,
    model: CostModel,
    allowance: Allowance | None = None,
    overlaps: dict[int, Overlap] | None = None,
) -> Between:
    """Return what lies between the sides of an edge, before any of it is costed; arguments as for `edge_cost`.

    Where the devices of both sides are given, that is what they fetch; else what they do under the best assignment.
    """
    allowance = allowance or Allowance()
    (producer, held), (consumer, wanted) = edge_sides(graph, edge)
    u_parts, v_parts = _components(producer, held), _components(consumer, wanted)
    is_weight = isinstance(edge, SharedWeight)
    own = v.joint_sums.get(edge.input) if is_weight or producer.is_fan_out else None
    forward_sums = None if is_weight else _members(model, u, sum_name(held.tensor, is_gradient=False))
    backward_sums = _members(model, v, sum_name(wanted.tensor, is_gradient=True)) if own is None else None
    own_cost, group = None, np.ones(len(u.splits.values), dtype=np.int64)
    u_more: list[IntArray] = []
    v_more: list[IntArray] = []
    if own is not None:
        own_cost = _cost_of_joint_sum(v, edge.input, model)
        group = u.splits.product(producer.partial_dims(held if is_weight else producer.reads[0]))
        if own.ends_on_edge:
            backward_sums = model.sum_members(v, own).astype(np.int32)
        u_more, v_more = [group], [own.group, np.unique(own_cost, return_inverse=True)[1]]
    u_side, v_side = _side(u_parts, u, forward_sums, u_more), _side(v_parts, v, backward_sums, v_more)
    if u.axes and v.axes:
        overlaps = {0: placed_overlap(u_parts, u.axes, v_parts, v.axes, model.fanouts)}
    return Between(
        model=model,
        allowance=allowance,
        overlaps=overlaps,
        flows_back=_flows_back(graph, edge),
        u_parts=u_parts,
        v_parts=v_parts,
        itemsizes=edge_itemsizes(graph, edge),
        u=u_side,
        v=v_side,
        consumer=v,
        read=None if own is None else edge.input,
        own_cost=own_cost,
        group=group,
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
    return components(access, operator.extents)


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
    return tuple(
        bool(operator.partial_dims(write)) and len(graph.readers.get((operator.name, output), ())) == 1
        for output, write in enumerate(operator.writes)
    )
