"""What workers and the master keep between steps."""

from dataclasses import dataclass

from pase.easgd.equations import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker keeps. weights: [n] its own, or its copy of the master's. velocity: [n], None without momentum."""

    weights: Array
    velocity: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterState:
    """What the master keeps. centre: [n] W̄, or the weights of SGD. velocity: [n], None without momentum."""

    centre: Array
    velocity: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What the master does with something that it received. centre: [n] to be added. velocity: [n] the new one."""

    centre: Array
    velocity: Array | None = None


def changed(state: MasterState, change: Change) -> MasterState:
    """Return the master's state after a change."""
    return MasterState(centre=state.centre + change.centre, velocity=change.velocity)
