"""Drawings of graphs: where everything stands, which parts repeat, and what colours say. No framework, no files."""

from pase.views.drawing.arrangement import Arrangement, Frame, arranged
from pase.views.drawing.folding import FoldedEdge, FoldedGraph, Repeat, fold, folded
from pase.views.drawing.layered import Drawing, layered
from pase.views.drawing.plans import DrawnPlan, SplitClass, SplitClasses, certificate_text, drawn_plan, split_classes

__all__ = [
    "Arrangement",
    "Drawing",
    "DrawnPlan",
    "FoldedEdge",
    "FoldedGraph",
    "Frame",
    "Repeat",
    "SplitClass",
    "SplitClasses",
    "arranged",
    "certificate_text",
    "drawn_plan",
    "fold",
    "folded",
    "layered",
    "split_classes",
]
