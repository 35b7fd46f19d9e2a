"""Why a plan is as it is: what binds each layer, what the next best would cost, and when the choice would change."""

from pase.analysis.explanation.alternatives import every_choice
from pase.analysis.explanation.constrained_search import TIE, Improvement
from pase.analysis.explanation.explain import ExplainOptions, LayerOverview, Overview, explain, overview
from pase.analysis.explanation.sensitivity import FARTHEST, Sensitivity, sensitivity
from pase.analysis.explanation.steps import SchemeOutcome, StepExplanation, StepLayer, explain_step, other_schemes
from pase.analysis.explanation.why_not import (
    Explanation,
    Flip,
    LayerExplanation,
    Part,
    PartKind,
    RunnerUp,
    configuration_text,
    own_parts,
)

__all__ = [
    "FARTHEST",
    "TIE",
    "ExplainOptions",
    "Explanation",
    "Flip",
    "Improvement",
    "LayerExplanation",
    "LayerOverview",
    "Overview",
    "Part",
    "PartKind",
    "RunnerUp",
    "SchemeOutcome",
    "Sensitivity",
    "StepExplanation",
    "StepLayer",
    "configuration_text",
    "every_choice",
    "explain",
    "explain_step",
    "other_schemes",
    "overview",
    "own_parts",
    "sensitivity",
]
