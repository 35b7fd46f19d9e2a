"""From the operators that the passes leave to the vertices of a graph."""

from pase.importers.lower.build import LOWER, Lowered, WeightSource, lower

__all__ = ["LOWER", "Lowered", "WeightSource", "lower"]
