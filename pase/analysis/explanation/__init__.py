"""Why a plan is as it is: what binds each layer, what the next best would cost, and when the choice would change."""

from pase.analysis.explanation.explain import ExplainOptions, explain
from pase.analysis.explanation.findings import Explanation, Flip, LayerExplanation, MemoryBinding, RunnerUp
from pase.analysis.explanation.flips import FARTHEST
from pase.analysis.explanation.nearest import TIE
from pase.analysis.explanation.opaque import Held, held_by_opaque_layers
from pase.analysis.explanation.overview import BriefRunnerUp, LayerOverview, Overview, overview
from pase.analysis.explanation.padding import Padding, worthwhile_padding
from pase.analysis.explanation.parts import Part, PartKind, own_parts
from pase.analysis.explanation.reasons import configuration_text, percent
from pase.analysis.explanation.sensitivity import Sensitivity, sensitivity

__all__ = [
    "FARTHEST",
    "TIE",
    "BriefRunnerUp",
    "ExplainOptions",
    "Explanation",
    "Flip",
    "Held",
    "LayerExplanation",
    "LayerOverview",
    "MemoryBinding",
    "Overview",
    "Padding",
    "Part",
    "PartKind",
    "RunnerUp",
    "Sensitivity",
    "configuration_text",
    "explain",
    "held_by_opaque_layers",
    "overview",
    "own_parts",
    "percent",
    "sensitivity",
    "worthwhile_padding",
]
