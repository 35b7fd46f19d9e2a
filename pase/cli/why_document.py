"""The JSON form of an explanation: why layers have their configurations, for programs."""

from collections.abc import Sequence
from typing import Any

from pase.analysis.explanation import Explanation, Flip, LayerExplanation, MemoryBinding, Part, RunnerUp, Sensitivity


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """Return what is said of the whole plan."""
    low, high = explanation.searched
    return {
        "total_cost": explanation.plan_cost,
        "is_optimal": explanation.is_optimal,
        "optimum": {"total_cost": explanation.optimum_cost, "exact": explanation.is_proven},
        "flop_per_byte": explanation.flop_per_byte,
        "flips_searched": {"from_scale": low, "to_scale": high},
    }


def why_document(layer: LayerExplanation, explanation: Explanation) -> dict[str, Any]:
    """Return what is said of one layer."""
    return {
        "reason": layer.reason,
        "is_best": layer.is_best,
        "best": layer.best,
        "kept_total_cost": layer.kept_total_cost,
        "memory": None if layer.memory is None else _memory_document(layer.memory, explanation),
        "num_configurations": layer.num_configurations,
        "binding": None if layer.binding is None else layer.binding.name,
        "binding_share": layer.share,
        "parts": [_part_document(part) for part in layer.parts],
        "runner_up": None if layer.runner_up is None else _runner_up_document(layer.runner_up, explanation),
        "flips": {
            "below": _flip_document(layer.below, explanation),
            "above": _flip_document(layer.above, explanation),
        },
    }


def sensitivity_document(found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """Return what each changed figure of the machine does."""
    return [
        {
            "figure": one.figure,
            "factor": one.factor,
            "is_used": one.is_used,
            "relative_time_change": one.time_change,
            "relative_regret": one.regret,
            "moves": [{"name": name, "splits": splits} for name, splits in one.moves],
            "exact": one.is_proven,
        }
        for one in found
    ]


def _part_document(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "kind": str(part.kind),
        "layer": part.other or None,
        "cost": part.cost,
        "bytes": part.size_bytes,
        "devices": part.group or None,
    }


def _runner_up_document(runner_up: RunnerUp, explanation: Explanation) -> dict[str, Any]:
    return {
        "splits": runner_up.splits,
        "total_cost": runner_up.total_cost,
        "difference": runner_up.difference,
        "relative_difference": explanation.relative(runner_up.difference),
        "is_tie": runner_up.is_tie,
        "exact": runner_up.is_exact,
        "changes": [{"name": name, "splits": splits} for name, splits in runner_up.changes],
        "others_kept": None
        if runner_up.alone is None
        else {
            "splits": runner_up.alone,
            "difference": runner_up.alone_difference,
            "relative_difference": explanation.relative(runner_up.alone_difference),
        },
    }


def _memory_document(memory: MemoryBinding, explanation: Explanation) -> dict[str, Any]:
    return {
        "splits": memory.splits,
        "difference": memory.difference,
        "relative_difference": explanation.relative(memory.difference),
        "others_kept": memory.is_alone,
        "needed_bytes": memory.needed_bytes,
        "limit_bytes": memory.limit_bytes,
    }


def _flip_document(flip: Flip | None, explanation: Explanation) -> dict[str, Any] | None:
    if flip is None:
        return None
    ratio = None if explanation.flop_per_byte is None else flip.scale * explanation.flop_per_byte
    return {"scale": flip.scale, "flop_per_byte": ratio, "splits": flip.splits}
