"""Execution: how the vertices of an imported model are computed, for programs of its forward pass."""

from pase.importers.execution.build import Execution, with_bodies

__all__ = ["Execution", "with_bodies"]
