"""The report of plans as one JSON object: all that its page shows. The page computes no costs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pase._version import __version__
from pase.analysis.explanation import LayerOverview, Overview, Part, PartKind, overview
from pase.errors import PlanError
from pase.planning.plan import LayerPlan, Plan
from pase.planning.planner import Progress
from pase.views.drawing import SplitClasses, split_classes
from pase.views.reports.costs import cost_parts
from pase.views.reports.drawings import drawings
from pase.views.reports.movements import Matrix, Movements, movements
from pase.views.reports.sweep import Sweep
from pase.views.reports.tensors import layer_tensors

SCHEMA_VERSION = 1

COST_PARTS = {
    "compute": (PartKind.COMPUTE,),
    "all-reduce": (PartKind.GRADIENTS, PartKind.PARTIAL_SUMS, PartKind.INPUT_GRADIENTS),
    "halo": (PartKind.HALO,),
    "exchange": (PartKind.EXCHANGE,),
    "re-sharding": (),
}
"""What a layer's cost is made of; re-sharding is that of its incoming edges and of the weights that it shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """A plan, and what the report calls it."""

    name: str
    plan: Plan


def report_document(
    plans: Sequence[NamedPlan],
    *,
    sweep: Sweep | None = None,
    explains: bool = True,
    time_limit_s: float | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the JSON form of a report of one or more plans.

    sweep: costs on other numbers of devices. explains: whether it says why each layer is as it is; time_limit_s: for
    saying so, of all plans together. The same plans give the same object.
    """
    share_s = None if time_limit_s is None else time_limit_s / len(plans)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": __version__,
        "title": ", ".join(dict.fromkeys(named.plan.graph.name for named in plans)),
        "plans": [
            _plan(named, *(_explained(named.plan, share_s, on_progress) if explains else (None, ""))) for named in plans
        ],
        "sweep": None if sweep is None else _values(sweep),
    }


def _values(found: Sweep | Matrix) -> Any:
    """Return a dataclass as JSON values, arrays as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(member) for key, member in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    return plain(asdict(found))


def _explained(plan: Plan, time_limit_s: float | None, on_progress: Progress | None) -> tuple[Overview | None, str]:
    """Return why a plan is as it is, or what stands in the way of saying so."""
    try:
        return overview(plan, time_limit_s=time_limit_s, on_progress=on_progress), ""
    except PlanError as error:  # of configurations that no search looks at
        return None, str(error)


def _plan(named: NamedPlan, why: Overview | None, why_note: str) -> dict[str, Any]:
    plan = named.plan
    classes = split_classes(plan.layers)
    moved, parts = movements(plan), cost_parts(plan)
    orders: dict[tuple[int, ...], int] = {}
    return {
        "name": named.name,
        "model": plan.graph.name,
        "arguments": dict(plan.graph.arguments),
        "num_devices": plan.num_devices,
        "cost_model": plan.cost_model,
        "cost_unit": plan.cost_unit,
        "machine": _machine(plan),
        "total_cost": plan.total_cost,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "exact": plan.exact,
        "baselines": dict(plan.baselines),
        "search": asdict(plan.search),
        "memory": {
            **asdict(plan.memory),
            "total_bytes": plan.memory.total_bytes,
            "limit_bytes": plan.memory_limit_bytes_per_device,
            "optimiser": plan.optimiser,
        },
        "why_note": why_note,
        "cost_parts": list(COST_PARTS),
        "split_classes": [
            {"dims": list(found.dims), "label": found.label, "light": found.light, "dark": found.dark}
            for found in classes.classes
        ],
        "layers": [
            _layer(
                plan,
                number,
                classes,
                moved,
                orders.setdefault(layer.devices, len(orders)),
                parts[number],
                why.layers[number] if why else None,
            )
            for number, layer in enumerate(plan.layers)
        ],
        "device_orders": [list(order) for order in orders],
        "edges": _edges(plan, moved),
        "moved_are": moved.what,
        "traffic": None if moved.matrix is None else _values(moved.matrix),
        "drawings": drawings(plan),
    }


def _machine(plan: Plan) -> dict[str, Any]:
    machine = plan.machine
    return {
        "name": machine.name,
        "device": machine.device.name,
        "flop_per_s": machine.peak_flop_per_s(),
        "memory_bytes": machine.device.memory_bytes,
        "levels": [
            {
                "name": level.name,
                "devices": level.num_devices,
                "latency_s": level.latency_s,
                "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s,
            }
            for level in machine.levels
        ],
    }


def _edges(plan: Plan, moved: Movements) -> list[dict[str, Any]]:
    """Return the graph's edges, in its order, with what moves along them and what that costs."""
    costs = {(layer.name, transfer.input): transfer.cost for layer in plan.layers for transfer in layer.transfers}
    found = []
    for edge in plan.graph.edges:
        forward, backward = moved.edge_bytes[edge.consumer, edge.input]
        found.append(
            {
                "from": plan.index[edge.producer],
                "to": plan.index[edge.consumer],
                "tensor": plan.graph[edge.consumer].reads[edge.input].tensor,
                "forward_bytes": forward,
                "backward_bytes": backward,
                "cost": costs[edge.consumer, edge.input],
            }
        )
    return found


def _layer(
    plan: Plan,
    number: int,
    classes: SplitClasses,
    moved: Movements,
    order: int,
    parts: Sequence[Part],
    why: LayerOverview | None,
) -> dict[str, Any]:
    layer = plan.layers[number]
    return {
        "name": layer.name,
        "kind": layer.kind,
        "dims": [list(dim) for dim in layer.dims.items()],
        "splits": list(layer.splits.values()),
        "replicas": layer.num_replicas,
        "class": classes.of_layer[number],
        "costs": _costs(layer, parts),
        "memory_bytes": layer.memory_bytes,
        "moved_bytes": moved.layer_bytes.get(layer.name, 0),
        "devices": order,
        "tensors": layer_tensors(plan.graph.operators[number], layer.splits),
        "parts": [
            {"name": part.name, "cost": part.cost, "bytes": part.size_bytes, "group": part.group} for part in parts
        ],
        **_why(why, plan.total_cost),
    }


def _costs(layer: LayerPlan, parts: Sequence[Part]) -> list[float]:
    """Return what a layer costs, by `COST_PARTS`."""
    inside = [sum(part.cost for part in parts if part.kind in kinds) for kinds in COST_PARTS.values()]
    inside[-1] = sum(transfer.cost for transfer in layer.transfers)
    return inside


def _why(why: LayerOverview | None, total_cost: float) -> dict[str, Any]:
    runner_up = why.runner_up if why else None
    return {
        "why": why.reason if why else None,
        "why_of": why.like if why else None,
        "num_configurations": why.num_configurations if why else None,
        "runner_up": None
        if runner_up is None
        else {
            "splits": list(runner_up.splits.values()),
            "difference": runner_up.difference,
            "relative": runner_up.difference / total_cost if total_cost else 0.0,
            "is_tie": runner_up.is_tie,
            "exact": runner_up.is_exact,
            "changes": runner_up.num_changes,
        },
    }
