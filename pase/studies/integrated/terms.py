"""`Terms`: the communication of a step, by what is sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of communication in one training step.

    activation_all_gather: Y_i, forward. input_gradient_all_reduce: of ΔX_i. weight_gradient_all_reduce: of ΔW_i.
    halo_forward, halo_backward: rows at the border of a process's part of an image, of values and of gradients.
    redistribution: of what a layer reads, between grids (Eq. 6).
    """

    activation_all_gather: float = 0.0
    input_gradient_all_reduce: float = 0.0
    weight_gradient_all_reduce: float = 0.0
    halo_forward: float = 0.0
    halo_backward: float = 0.0
    redistribution: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        """Return the sum, term by term."""
        return Terms(**{name: value + getattr(other, name) for name, value in self.as_dict().items()})

    @property
    def time_s(self) -> float:
        """All of them together."""
        return float(sum(astuple(self)))

    def as_dict(self) -> dict[str, float]:
        """Return seconds by the name of the term."""
        return asdict(self)


def total(terms: Iterable[Terms]) -> Terms:
    """Return the sum of any number of terms."""
    return sum(terms, start=Terms())
