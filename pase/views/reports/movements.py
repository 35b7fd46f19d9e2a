"""What a plan moves, as a report shows it: along each edge, within each layer, and from device to device."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pase.errors import PaseError
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.runtime.traffic import Phase
from pase.traffic import Flow, flows

MOST_GROUPS = 64
"""Rows of the table of devices; where there are more devices, a row is a group of them."""

MOST_DEVICES = 256
"""Of more of them not every pair is looked at: the plan's own prediction of the busiest device stands in."""

EXACT, PREDICTED = "between all devices", "to the busiest device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Bytes from group to group of consecutive devices: groups of them, of group_size each, called label.

    bytes: (from, to, bytes), those of 0 left out; from a group to itself, what its devices send one another.
    """

    groups: int
    group_size: int
    label: str
    bytes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Movements:
    """what: what the bytes are. edge_bytes: (forward, backward) by consumer and input. layer_bytes: within a layer.

    matrix: None where costs alone say what moves: of very many devices, or where no program has a plan's layouts.
    """

    what: str
    edge_bytes: Mapping[tuple[str, int], tuple[int, int]]
    layer_bytes: Mapping[str, int]
    matrix: Matrix | None


def movements(plan: Plan) -> Movements:
    """Return what a step of a plan moves."""
    if plan.num_devices > MOST_DEVICES:
        return _predicted(plan)
    try:
        found = flows(plan)
    except PaseError:
        return _predicted(plan)
    total = _Totals(found)
    by_flow: dict[tuple[str, str, str], list[int]] = {}
    layers: dict[str, int] = {}
    for flow in found:
        ends, size = flow.movement, total.bytes_of(flow)
        if flow.is_of_edge:
            both = by_flow.setdefault((ends.producer, ends.consumer, flow.tensor), [0, 0])
            both[ends.phase is not Phase.FORWARD] += size
        else:
            layers[ends.consumer] = layers.get(ends.consumer, 0) + size
    edges = {}
    for edge in plan.graph.edges:
        tensor = plan.graph[edge.consumer].reads[edge.input].tensor
        forward, backward = by_flow.get((edge.producer, edge.consumer, tensor), (0, 0))
        edges[edge.consumer, edge.input] = forward, backward
    return Movements(what=EXACT, edge_bytes=edges, layer_bytes=layers, matrix=_matrix(plan, total.bytes_by_pair()))


def _predicted(plan: Plan) -> Movements:
    edges = {
        (layer.name, transfer.input): (round(transfer.forward_bytes), round(transfer.backward_bytes))
        for layer in plan.layers
        for transfer in layer.transfers
    }
    return Movements(what=PREDICTED, edge_bytes=edges, layer_bytes={}, matrix=None)


class _Totals:
    """Sums over flows; those of repeated layers have one table of bytes, which is looked at once."""

    def __init__(self, found: Sequence[Flow]) -> None:
        self._times = Counter(id(flow.bytes_by_pair) for flow in found)
        self._table = {id(flow.bytes_by_pair): flow.bytes_by_pair for flow in found}
        self._sum = {key: sum(table.values()) for key, table in self._table.items()}

    def bytes_of(self, flow: Flow) -> int:
        return self._sum[id(flow.bytes_by_pair)]

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for key, table in self._table.items():
            times = self._times[key]
            for ends, size in table.items():
                found[ends] = found.get(ends, 0) + times * size
        return found


def _matrix(plan: Plan, pairs: Mapping[tuple[int, int], int]) -> Matrix:
    size, label = _grouping(plan)
    table: dict[tuple[int, int], int] = {}
    for (sender, receiver), moved in pairs.items():
        ends = sender // size, receiver // size
        table[ends] = table.get(ends, 0) + moved
    return Matrix(
        groups=-(-plan.num_devices // size),
        group_size=size,
        label=label,
        bytes=tuple((*ends, moved) for ends, moved in sorted(table.items())),
    )


def _grouping(plan: Plan) -> tuple[int, str]:
    """Return how many devices a row stands for, and what such a group is called: a level of the machine's if it can."""
    if plan.num_devices <= MOST_GROUPS:
        return 1, "device"
    for level in plan.machine.levels_spanned(plan.num_devices)[:-1]:
        if level.num_devices and plan.num_devices <= MOST_GROUPS * level.num_devices:
            return level.num_devices, level.name
    return -(-plan.num_devices // MOST_GROUPS), "group"
