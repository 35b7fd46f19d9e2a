"""What moved between devices in a step, by edge and layer, beside what was predicted: as JSON has it."""

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from pase.sharding.traffic import Movement, Phase

NOTHING_MOVED: Mapping[str, Any] = MappingProxyType(
    {"predicted_bytes": 0, "measured_bytes": 0}
    | {phase.value: {"predicted_bytes": 0, "measured_bytes": 0} for phase in Phase}
)
"""The bytes of an edge or a layer that moves nothing, as JSON has them."""


def tabulated(predicted: Mapping[Movement, int], measured: Mapping[Movement, int]) -> dict[str, list[dict[str, Any]]]:
    """Return rows of edges and of layers, predicted beside measured, with their phases; as JSON has them."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for movement in dict.fromkeys([*predicted, *measured]):
        row = rows.setdefault((movement.producer, movement.consumer), deepcopy(dict(NOTHING_MOVED)))
        for part in (row, row[movement.phase]):
            part["predicted_bytes"] += predicted.get(movement, 0)
            part["measured_bytes"] += measured.get(movement, 0)
    kept = {key: row for key, row in rows.items() if row["predicted_bytes"] or row["measured_bytes"]}
    return {
        "edges": [{"producer": u, "consumer": v} | row for (u, v), row in kept.items() if u != v],
        "layers": [{"name": u} | row for (u, v), row in kept.items() if u == v],
    }
