"""Lowering: from the operators after the passes to the vertices of a graph."""

from pase.importers.lower.build import Lowered, WeightSource, lower

__all__ = ["Lowered", "WeightSource", "lower"]
