"""Workers of asynchronous methods: each exchanges with the master alone, and waits for nobody else."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pase.easgd.algorithms import Exchange, Sends
from pase.easgd.equations import Array
from pase.easgd.messages import Kind, Message
from pase.easgd.worker import Worker

_HEARD = frozenset({Kind.CENTRE, Kind.STATE_WANTED, Kind.STOP})


def run_worker(worker: Worker) -> None:
    """Take steps until the master says that it is enough."""
    algorithm = worker.job.algorithm
    _LOOPS[algorithm.exchange, algorithm.sends](worker)
    worker.tell_end()


def _send_weights(worker: Worker) -> None:
    """Async EASGD (Section 5.1): the weights go to the master, the gradient is computed while its answer comes."""
    while True:
        with worker.clock.waiting():
            worker.endpoint.send(worker.job.master, Kind.SENT, worker.weights)
        found = worker.gradient_or_refusal()
        centre = _centre(worker)
        if centre is None:
            return
        worker.step(found, centre)


def _send_gradients(worker: Worker) -> None:
    """Async SGD (Section 3.1): the gradient at the copy goes to the master, the new weights come back."""
    while True:
        found = worker.gradient_or_refusal()
        if found is None:
            # A copy of the master's weights cannot be wrong for every batch: go on with the next one.
            worker.step(None, worker.weights)
            continue
        with worker.clock.waiting():
            worker.endpoint.send(worker.job.master, Kind.SENT, found.vector)
        centre = _centre(worker)
        if centre is None:
            return
        worker.step(found, centre)


def _in_turn(worker: Worker) -> None:
    """Original EASGD (Algorithm 1, lines 11 to 14): nothing happens until the centre comes."""
    while True:
        centre = _centre(worker)
        if centre is None:
            return
        found = worker.gradient_or_refusal()
        with worker.clock.waiting():
            if found is None:
                worker.endpoint.send(worker.job.master, Kind.REFUSED)
            else:
                worker.endpoint.send(worker.job.master, Kind.SENT, worker.weights)
        worker.step(found, centre)


_LOOPS: Mapping[tuple[Exchange, Sends], Callable[[Worker], None]] = MappingProxyType(
    {
        (Exchange.ROUND_ROBIN, Sends.WEIGHTS): _in_turn,
        (Exchange.FIRST_COME, Sends.WEIGHTS): _send_weights,
        (Exchange.LOCK_FREE, Sends.WEIGHTS): _send_weights,
        (Exchange.FIRST_COME, Sends.GRADIENTS): _send_gradients,
        (Exchange.LOCK_FREE, Sends.GRADIENTS): _send_gradients,
    }
)


def _centre(worker: Worker) -> Array | None:
    """Wait for the centre and return it; None where the training is over.

    What the coordinator wants to know of the state comes in order with the centres: so it is the state after the last
    exchange that the master counted before.
    """
    while True:
        with worker.clock.waiting():
            message = worker.endpoint.receive(_is_heard)
        if message.kind is Kind.STATE_WANTED:
            worker.tell_state(message.number)
            continue
        return message.vector if message.kind is Kind.CENTRE else None


def _is_heard(message: Message) -> bool:
    return message.kind in _HEARD
