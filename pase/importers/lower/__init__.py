"""From the operators that the passes leave to the vertices of a graph."""

from pase.importers.lower.build import Lowered, WeightSource, lower

__all__ = ["Lowered", "WeightSource", "lower"]
