"""Why a plan is as it is: what binds each layer, what the next best would cost, and when the choice would change."""

from pase.analysis.explanation.alternatives import every_choice
from pase.analysis.explanation.constrained_search import TIE, Improvement
from pase.analysis.explanation.cost_parts import CostParts, Part, PartKind
from pase.analysis.explanation.explain import ExplainOptions, LayerOverview, Overview, explain, overview
from pase.analysis.explanation.schemes import SchemeOutcome, other_schemes
from pase.analysis.explanation.sensitivity import FARTHEST, Sensitivity, sensitivity
from pase.analysis.explanation.why_not import (
    Explanation,
    Flip,
    LayerExplanation,
    Outcome,
    RunnerUp,
    choice_text,
)

__all__ = [
    "FARTHEST",
    "TIE",
    "CostParts",
    "ExplainOptions",
    "Explanation",
    "Flip",
    "Improvement",
    "LayerExplanation",
    "LayerOverview",
    "Outcome",
    "Overview",
    "Part",
    "PartKind",
    "RunnerUp",
    "SchemeOutcome",
    "Sensitivity",
    "choice_text",
    "every_choice",
    "explain",
    "other_schemes",
    "overview",
    "sensitivity",
]
