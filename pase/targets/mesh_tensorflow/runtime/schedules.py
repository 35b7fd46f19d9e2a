"""Learning rates: a function of the step, with a linear warm-up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, pi, sqrt
from types import MappingProxyType

from pase.errors import RuntimeFailure, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate of every step.

    peak: the rate after the warm-up, which rises from peak / warmup_steps to it in a straight line. kind: what follows,
    a name of `SCHEDULES`. num_steps: until a cosine reaches `final`. decay_every, decay_factor: of the steps.
    Raises RuntimeFailure for a value out of range.
    """

    peak: float
    kind: str = "constant"
    warmup_steps: int = 0
    num_steps: int = 1
    final: float = 0.0
    decay_every: int = 1
    decay_factor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise RuntimeFailure(unknown_name("schedule", self.kind, SCHEDULES))
        if not 0 < self.peak < float("inf"):
            raise RuntimeFailure(f"the learning rate is {self.peak:g}; it must be above 0")
        wrong = {
            "warm-up steps": (self.warmup_steps, self.warmup_steps >= 0, "0 or more"),
            "schedule steps": (self.num_steps, self.num_steps >= 1, "1 or more"),
            "final learning rate": (self.final, 0 <= self.final <= self.peak, "from 0 to the learning rate"),
            "steps of a decay": (self.decay_every, self.decay_every >= 1, "1 or more"),
            "decay factor": (self.decay_factor, 0 < self.decay_factor <= 1, "above 0 and at most 1"),
        }
        for name, (value, is_right, expected) in wrong.items():
            if not is_right:
                raise RuntimeFailure(f"{name} is {value:g}; expected {expected}")
        if self.kind == "cosine" and self.warmup_steps >= self.num_steps:
            raise RuntimeFailure(
                f"a warm-up of {self.warmup_steps} steps leaves none of {self.num_steps} for the cosine; shorten it"
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return SCHEDULES[self.kind](self, step)


def _constant(schedule: Schedule, step: int) -> float:
    return schedule.peak


def _cosine(schedule: Schedule, step: int) -> float:
    """Half a cosine from the peak to the final rate (Loshchilov and Hutter 2017, Eq. 5, without restarts)."""
    done = min(1.0, (step - schedule.warmup_steps) / (schedule.num_steps - schedule.warmup_steps))
    return schedule.final + (schedule.peak - schedule.final) * (1 + cos(pi * done)) / 2


def _step(schedule: Schedule, step: int) -> float:
    """The factor once more every so many steps after the warm-up."""
    return schedule.peak * float(schedule.decay_factor ** ((step - schedule.warmup_steps) // schedule.decay_every))


def _inverse_sqrt(schedule: Schedule, step: int) -> float:
    """The peak at the end of the warm-up, then as 1/√step (Vaswani et al. 2017, Eq. 3)."""
    return schedule.peak * sqrt(max(1, schedule.warmup_steps) / (step + 1))


SCHEDULES: Mapping[str, Callable[[Schedule, int], float]] = MappingProxyType(
    {"constant": _constant, "cosine": _cosine, "step": _step, "inverse_sqrt": _inverse_sqrt}
)
