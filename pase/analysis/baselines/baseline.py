"""`Baseline`: a strategy to compare with, as a rule that finds it in the space of a search problem."""

from collections.abc import Callable
from dataclasses import dataclass

from pase.costs import Problem
from pase.machine import Machine

Choose = Callable[[Problem, Machine], tuple[int, ...] | None]
"""Returns the configuration index of each vertex; None where the strategy does not apply to the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A strategy that others use or suggest.

    source: where it is from. needs: what a network must have for it to apply. choose: finds it.
    """

    name: str
    description: str
    source: str
    needs: str
    choose: Choose
