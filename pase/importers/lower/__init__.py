"""From the operators that the passes leave to the vertices of a graph."""

from pase.importers.lower.build import LOWER, Lowered, Read, lower
from pase.importers.lower.weights import WeightSource

__all__ = ["LOWER", "Lowered", "Read", "WeightSource", "lower"]
