"""What whoever has the centre tells the coordinator of it, and what anybody's state is as one vector."""

import json
from collections.abc import Collection

import numpy as np

from pase.easgd.clock import Clock
from pase.easgd.equations import Array
from pase.easgd.job import Job
from pase.easgd.messages import Endpoint, Kind, Message
from pase.easgd.states import MasterState


def joined(weights: Array, velocity: Array | None) -> Array:
    """Return weights and, where there is one, the velocity behind them, as one vector."""
    return weights if velocity is None else np.concatenate([weights, velocity])


def parted(vector: Array, *, has_velocity: bool) -> tuple[Array, Array | None]:
    """Return the weights and the velocity of a vector that `joined` made."""
    half = len(vector) // 2
    return (vector[:half], vector[half:]) if has_velocity else (vector, None)


def tell_state(
    job: Job,
    endpoint: Endpoint,
    kind: Kind,
    state: MasterState,
    *,
    num_events: int,
    workers: Collection[int],
    clock: Clock,
) -> None:
    """Tell the master's state, for a checkpoint or in the end. workers: those that take part."""
    text = json.dumps(
        {
            "role": "master",
            "workers": sorted(workers),
            "time_s": clock.time_s,
            "num_messages": endpoint.tally.exchanged_messages,
            "num_bytes": endpoint.tally.exchanged_bytes,
        }
    )
    endpoint.send(job.coordinator, kind, joined(state.centre, state.velocity), number=num_events, text=text)


def have_tested(job: Job, endpoint: Endpoint, centre: Array, *, num_events: int, clock: Clock) -> Message | None:
    """Have the centre tested; where it depends on that how to go on, wait and return the answer: TESTED, or STOP."""
    text = json.dumps({"time_s": clock.time_s})
    endpoint.send(job.coordinator, Kind.TEST, centre, number=num_events, text=text)
    if job.until_accuracy is None:
        return None
    return endpoint.receive(lambda message: message.kind in (Kind.TESTED, Kind.STOP))
