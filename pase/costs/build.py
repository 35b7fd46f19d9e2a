"""Cost tables of a graph: what the solver gets, each distinct layer and edge costed once."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np

from pase.configurations import Configurations, enumerate_configurations
from pase.costs.layouts import Component, FloatArray, IndexArray, components, distinct_rows, split_columns, splits_of
from pase.costs.model import CostModel
from pase.costs.overlap import volumes
from pase.costs.sharing import SharedWeight, shared_traffic, shared_weights
from pase.costs.traffic import ReadTraits, layer_traffic
from pase.graph import Access, Edge, Graph, Operator
from pase.tables import CostTables, EdgeTable


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A graph's search problem: its cost tables and, for each vertex, what its table rows stand for."""

    graph: Graph
    num_devices: int
    tables: CostTables
    configurations: tuple[Configurations, ...]

    def splits(self, vertex: int, choice: int) -> dict[str, int]:
        """Return the split factor of each dim of a vertex under one of its configurations."""
        row = self.configurations[vertex].splits[choice]
        return {dim: int(k) for dim, k in zip(self.graph.operators[vertex].extents, row, strict=True)}

    def choice(self, vertex: int, splits: tuple[int, ...]) -> int | None:
        """Return the index of a configuration of a vertex; None if it is not among them."""
        found = np.flatnonzero((self.configurations[vertex].splits == np.array(splits)).all(axis=1))
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


def build_problem(
    graph: Graph, num_devices: int, model: CostModel, on_progress: Callable[[str, float], None] | None = None
) -> Problem:
    """Return the cost tables of a graph (Eq. 1's t_l and r · t_x for every configuration).

    An edge of the tables is an edge of the graph, in its order, or a weight that two layers share, after them.

    on_progress: called with what is being done and the fraction that is done. Raises ConfigurationError
    where a layer has too many configurations.
    """
    kinds = _Numbered()
    vertex_costs: list[FloatArray] = []
    configurations: list[Configurations] = []
    vertex_table = []
    for position, operator in enumerate(graph.operators):
        number, is_new = kinds.number(signature(graph, operator))
        if is_new:
            found = enumerate_configurations(operator, num_devices)
            cost = layer_cost(graph, operator, found.splits, model)
            configurations.append(found)
            vertex_costs.append(cost.compute + cost.communication)
        vertex_table.append(number)
        if on_progress:
            on_progress("costing layers", (position + 1) / len(graph.operators))
    edge_kinds = _Numbered()
    edge_tables: list[EdgeTable] = []
    edge_table = []
    for position, edge in enumerate(graph.edges):
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        number, is_new = edge_kinds.number((vertex_table[u], edge.output, vertex_table[v], edge.input))
        if is_new:
            us, vs = configurations[vertex_table[u]].splits, configurations[vertex_table[v]].splits
            edge_tables.append(_edge_table(graph, edge, us, vs, model))
        edge_table.append(number)
        if on_progress:
            on_progress("costing edges", (position + 1) / len(graph.edges))
    edges = [(graph.index[edge.producer], graph.index[edge.consumer]) for edge in graph.edges]
    for weight in shared_weights(graph):
        u, v = graph.index[weight.owner], graph.index[weight.user]
        number, is_new = edge_kinds.number((vertex_table[u], weight.owner_read, vertex_table[v], weight.user_read, "w"))
        if is_new:
            us, vs = configurations[vertex_table[u]].splits, configurations[vertex_table[v]].splits
            edge_tables.append(_shared_table(graph, weight, us, vs, model))
        edges.append((u, v))
        edge_table.append(number)
    tables = CostTables(
        vertex_names=tuple(operator.name for operator in graph.operators),
        vertex_costs=tuple(vertex_costs),
        vertex_table=tuple(vertex_table),
        edges=tuple(edges),
        edge_tables=tuple(edge_tables),
        edge_table=tuple(edge_table),
    )
    return Problem(
        graph=graph,
        num_devices=num_devices,
        tables=tables,
        configurations=tuple(configurations[number] for number in vertex_table),
    )


def layer_cost(graph: Graph, operator: Operator, splits: IndexArray, model: CostModel) -> LayerCost:
    """Return the layer cost t_l of Eq. 1 for configurations [K, D]."""
    traffic = layer_traffic(operator, splits, _read_traits(graph, operator), word_bytes=graph.word_bytes)
    communication = np.zeros(len(splits))
    for message in traffic.messages:
        communication = communication + model.message(message)
    return LayerCost(compute=model.compute(traffic.flop), communication=communication)


def signature(graph: Graph, operator: Operator) -> Hashable:
    """Return what an operator's costs depend on: equal for repeated layers."""
    return replace(operator, name=""), _read_traits(graph, operator)


def edge_sides(graph: Graph, edge: Edge) -> tuple[tuple[Operator, Access], tuple[Operator, Access]]:
    """Return (producer, its write) and (consumer, its read)."""
    producer, consumer = graph[edge.producer], graph[edge.consumer]
    return (producer, producer.writes[edge.output]), (consumer, consumer.reads[edge.input])


def transfer_bytes(graph: Graph, edge: Edge, u_layouts: IndexArray, v_layouts: IndexArray) -> TransferBytes:
    """Return t_x of Eq. 1, both ways, for layouts of the tensor on either side.

    u_layouts: [L_u, components], split factors of the produced tensor's components (`components`);
    v_layouts: [L_v, components] of the consumed one's. Forward, the consumer fetches what it does not hold;
    backward, the producer fetches its gradient likewise, so that t_x(u, v) = t_x(v, u). Indices have no gradient.
    """
    u_side, v_side = edge_sides(graph, edge)
    common = volumes(_components(*u_side), u_layouts, _components(*v_side), v_layouts)
    forward = np.maximum(common.consumed - common.kept_forward, 0.0) * graph.word_bytes
    backward = np.maximum(common.produced - common.kept_backward, 0.0) * graph.word_bytes
    return TransferBytes(forward=forward, backward=backward * v_side[1].is_differentiable)


def edge_layouts(graph: Graph, edge: Edge, us: IndexArray, vs: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return how configurations [K_u, D_u] and [K_v, D_v] split the tensor's components on either side."""
    sides = zip(edge_sides(graph, edge), (us, vs), strict=True)
    u, v = (split_columns(_components(op, access), splits_of(op, values)) for (op, access), values in sides)
    return u, v


def _edge_table(graph: Graph, edge: Edge, us: IndexArray, vs: IndexArray, model: CostModel) -> EdgeTable:
    u_columns, v_columns = edge_layouts(graph, edge, us, vs)
    u_layouts, row_class = distinct_rows(u_columns)
    v_layouts, col_class = distinct_rows(v_columns)
    moved = transfer_bytes(graph, edge, u_layouts, v_layouts)
    return EdgeTable(
        row_class=row_class.astype(np.int32),
        col_class=col_class.astype(np.int32),
        values=model.transfer(moved.forward) + model.transfer(moved.backward),
    )


def _shared_table(graph: Graph, weight: SharedWeight, us: IndexArray, vs: IndexArray, model: CostModel) -> EdgeTable:
    traffic = shared_traffic(graph, weight, us, vs)
    moved = model.transfer(traffic.forward_bytes) + model.transfer(traffic.backward_bytes)
    return EdgeTable(
        row_class=traffic.row_class.astype(np.int32),
        col_class=traffic.col_class.astype(np.int32),
        values=moved + model.message(traffic.reduction) * traffic.is_reduced,
    )


def _components(operator: Operator, access: Access) -> tuple[Component, ...]:
    return components(access.shape, access.axes, operator.extents)


def _read_traits(graph: Graph, operator: Operator) -> tuple[ReadTraits, ...]:
    return tuple(
        ReadTraits(
            has_gradient=graph.has_gradient(operator, position),
            is_fed=(operator.name, position) in graph.incoming,
            is_owned=not access.shared or graph.owners[access.shared] == operator.name,
        )
        for position, access in enumerate(operator.reads)
    )


class _Numbered:
    """Numbers distinct keys in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def number(self, key: object) -> tuple[int, bool]:
        """Return (number, whether the key is new)."""
        is_new = key not in self._numbers
        return self._numbers.setdefault(key, len(self._numbers)), is_new
