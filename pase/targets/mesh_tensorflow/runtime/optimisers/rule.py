"""`Rule`: what an update rule is; `Maths`: the operations on arrays that rules need beyond ``+ - * /``."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pase.errors import RuntimeFailure


class Maths(Protocol):
    """Operations on the arrays of one weight, wherever its shards are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the weight."""

    def sqrt(self, x: Any) -> Any:
        """Return the square root of each element."""

    def at_least(self, x: Any, floor: float) -> Any:
        """Return the larger of each element and a number."""

    def mean(self, x: Any, dims: Sequence[int]) -> Any:
        """Return the mean over some of the weight's dims, which the result lacks; over all shards where they are split.

        Arrays that lack dims are multiplied and divided with others dim by dim, each dim of the weight by itself.
        """


class Rule(Protocol):
    """How a weight follows from its gradient: a pure function of arrays, and what it keeps between steps.

    Options are the fields of the class, so that the command line and checkpoints can list them.
    """

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return, by name, which of a weight's dims each array that is kept for it has; they begin as zeros."""

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return the numbers of a step, counted from 1, that all weights share."""

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight and the new state."""


def check_range(rule: str, option: str, value: float, *, low: float = 0.0, below: float | None = None) -> None:
    """Raise RuntimeFailure where an option of a rule is not in [low, below)."""
    if not low <= value < (float("inf") if below is None else below):
        expected = f"{low:g} or more" if below is None else f"from {low:g} to below {below:g}"
        raise RuntimeFailure(f"{option} of optimiser {rule} is {value:g}; expected {expected}")
