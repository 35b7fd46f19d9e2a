"""The layers of a plan as rows of a table: the one source of CSV, data frames and what notebooks show."""

from collections.abc import Mapping
from dataclasses import dataclass

from pase.analysis.explanation.reasons import configuration_text
from pase.planning.plan import LayerPlan, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer: the field names are those of the columns, and part of the interface.

    position: in the plan, from 0. parts, replicas: into how many its iteration space is split, and on how many devices
    each part is. Costs are in cost_unit: layer_cost is compute_cost + communication_cost. transfer_cost, forward_bytes,
    backward_bytes: of all that the layer fetches from earlier ones. memory_bytes: on each device.
    """

    position: int
    layer: str
    kind: str
    dims: Mapping[str, int]
    splits: Mapping[str, int]
    configuration: str
    parts: int
    replicas: int
    layer_cost: float
    compute_cost: float
    communication_cost: float
    transfer_cost: float
    cost_unit: str
    forward_bytes: float
    backward_bytes: float
    memory_bytes: float

    @property
    def cost(self) -> float:
        """Return what the layer adds to the plan's total."""
        return self.layer_cost + self.transfer_cost


def layer_rows(plan: Plan) -> tuple[Row, ...]:
    """Return one row for each layer, in the order of the plan; the sum of their costs is the plan's total."""
    return tuple(_row(plan, i, layer) for i, layer in enumerate(plan.layers))


def _row(plan: Plan, position: int, layer: LayerPlan) -> Row:
    return Row(
        position=position,
        layer=layer.name,
        kind=layer.kind,
        dims=layer.dims,
        splits=layer.splits,
        configuration=configuration_text(layer.splits, plan.num_devices),
        parts=layer.num_parts,
        replicas=layer.num_replicas,
        layer_cost=layer.layer_cost,
        compute_cost=layer.compute_cost,
        communication_cost=layer.communication_cost,
        transfer_cost=sum((transfer.cost for transfer in layer.transfers), 0.0),
        cost_unit=plan.cost_unit,
        forward_bytes=sum((transfer.forward_bytes for transfer in layer.transfers), 0.0),
        backward_bytes=sum((transfer.backward_bytes for transfer in layer.transfers), 0.0),
        memory_bytes=layer.memory_bytes,
    )
