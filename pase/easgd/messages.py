"""What workers, master and coordinator tell one another, and the endpoint that each does it with.

Ranks: workers count from 0 to P − 1, then the master, P, and the coordinator, P + 1. An endpoint has one inbox; between
two ranks messages keep their order. A transport delivers; it knows nothing of algorithms.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import accumulate, pairwise
from math import prod
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from pase.easgd.algorithms import Array
from pase.errors import TrainingError

_BIAS = "bias"
"""The last part of the name of an array that travels with the one before it, of its layer."""


class Kind(IntEnum):
    """What a message is. Of the first group the vectors are what an algorithm exchanges; the others are control."""

    SENT = 0
    """A worker's weights or gradient, to the master, or a partial sum of them up the tree. Vector."""
    CENTRE = 1
    """The centre, to a worker, from the master or down the tree. Vector."""

    STATE_WANTED = 10
    """To a worker: tell the coordinator the state after the last exchange. Number: of the checkpoint."""
    STATE = 11
    """To the coordinator: weights or centre, then the velocity where there is one. Vector; number: of the checkpoint;
    text: JSON with counts."""
    TEST = 12
    """To the coordinator: the centre after so many events. Vector; number: events."""
    REPORT = 13
    """To the coordinator: an event to be shown. Text: JSON."""
    REFUSED = 14
    """A vector that is not finite was not used; to the master and the coordinator. Text: JSON."""
    STOP = 15
    """To a worker, or to the master: end after what is under way."""
    ENDED = 16
    """To the coordinator and the master: this rank has ended well."""
    FAILED = 17
    """This rank cannot go on. Text: why."""
    LOST = 18
    """A rank's process is gone; said by whoever watches over it. Sender: the rank that is gone."""
    TESTED = 19
    """To who sent TEST, where it depends on it how to go on. Number: 1 where the centre is as good as was asked for."""


EXCHANGED = frozenset({Kind.SENT, Kind.CENTRE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, or a part of one as it travels.

    vector: [n], None for none. number: see `Kind`. text: JSON or words. part, num_parts: which of how many; the parts
    of a vector are in order.
    """

    sender: int
    kind: Kind
    vector: Array | None = None
    number: int = 0
    text: str = ""
    part: int = 0
    num_parts: int = 1


@dataclass(slots=True)
class Tally:
    """What a rank sent: messages, parts counted each, and bytes of vectors by kind."""

    num_messages: Counter[Kind] = field(default_factory=Counter)
    num_bytes: Counter[Kind] = field(default_factory=Counter)

    def count(self, kind: Kind, vector: Array | None) -> None:
        """Count a message, or a part of one, that is being sent."""
        self.num_messages[kind] += 1
        self.num_bytes[kind] += 0 if vector is None else vector.nbytes

    @property
    def exchanged_messages(self) -> int:
        """Messages of the algorithm itself."""
        return sum(self.num_messages[kind] for kind in EXCHANGED)

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of the algorithm itself."""
        return sum(self.num_bytes[kind] for kind in EXCHANGED)


Inbox = SimpleQueue[Message]
"""What arrived at a rank and was not taken yet, put there by any thread."""


class Transport(Protocol):
    """Carries messages to ranks, in this process or in others; between two ranks they keep their order.

    The vector of a message is the receiver's own: neither side changes it afterwards.
    """

    def deliver(self, to: int, message: Message) -> None:
        """Bring a message to the inbox of a rank; raises nothing where that rank is gone."""


class LocalTransport:
    """Brings messages to inboxes of this process."""

    def __init__(self, inboxes: Mapping[int, Inbox]) -> None:
        self._inboxes = inboxes

    def deliver(self, to: int, message: Message) -> None:
        """Put a message in an inbox."""
        self._inboxes[to].put(message)


class Endpoint:
    """A rank's way to send and to receive. layout: how a vector is cut into parts, [(begin, end)]; one for packed."""

    def __init__(self, rank: int, inbox: Inbox, transport: Transport, layout: Sequence[tuple[int, int]]) -> None:
        self.rank = rank
        self.tally = Tally()
        self._inbox = inbox
        self._transport = transport
        self._layout = tuple(layout)
        self._arrived: deque[Message] = deque()
        self._parts: dict[int, list[Message]] = {}
        self._lock = threading.Lock()

    def send(self, to: int, kind: Kind, vector: Array | None = None, *, number: int = 0, text: str = "") -> None:
        """Send a message; a vector that an algorithm exchanges goes in as many parts as the layout has.

        The vector must not be changed afterwards. Several threads may send.
        """
        message = Message(sender=self.rank, kind=kind, vector=vector, number=number, text=text)
        parts = [message]
        if kind in EXCHANGED and vector is not None and len(self._layout) > 1:
            parts = [
                replace(message, vector=vector[begin:end], part=part, num_parts=len(self._layout))
                for part, (begin, end) in enumerate(self._layout)
            ]
        for part in parts:
            with self._lock:
                self.tally.count(kind, part.vector)
            self._transport.deliver(to, part)

    def receive(self, wanted: Callable[[Message], bool] | None = None, *, timeout_s: float | None = None) -> Message:
        """Return the first message that is wanted, waiting for it; others stay, in their order.

        One thread receives. Raises queue.Empty where none came in time; the time is that between two arrivals.
        """
        for i, message in enumerate(self._arrived):
            if wanted is None or wanted(message):
                del self._arrived[i]
                return message
        while True:
            whole = self._joined(self._inbox.get(timeout=timeout_s))
            if whole is None:
                continue
            if wanted is None or wanted(whole):
                return whole
            self._arrived.append(whole)

    def poll(self, wanted: Callable[[Message], bool] | None = None) -> Message | None:
        """Return the first message that is wanted, None where none has arrived."""
        try:
            return self.receive(wanted, timeout_s=0)
        except Empty:
            return None

    def _joined(self, message: Message) -> Message | None:
        """Return the message that a part completes; None while parts are missing."""
        if message.num_parts == 1:
            return message
        parts = self._parts.setdefault(message.sender, [])
        if message.part == 0:
            # What a sender that is gone left unfinished.
            parts.clear()
        parts.append(message)
        if len(parts) < message.num_parts:
            return None
        del self._parts[message.sender]
        vector = np.concatenate([part.vector for part in parts if part.vector is not None])
        return replace(parts[0], vector=vector, part=0, num_parts=1)


# -- all weights in one contiguous vector (Section 5.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The arrays of a vector, in their order. names, shapes: one for each. dtype: of all of them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each array."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def num_weights(self) -> int:
        """Numbers in the vector, n."""
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the vector."""
        return self.num_weights * np.dtype(self.dtype).itemsize

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each array begins and ends."""
        return tuple(pairwise(accumulate(self.sizes, initial=0)))

    def pack(self, arrays: Mapping[str, Array]) -> Array:
        """Return a vector [n] of arrays by name; TrainingError where one is missing, unknown or of another shape."""
        if set(arrays) != set(self.names):
            name = min(set(arrays) ^ set(self.names))
            how = "there is no" if name in self.names else "there is no use for"
            raise TrainingError(f"{how} weight {name!r}; the network has {', '.join(self.names)}")
        vector = np.empty(self.num_weights, self.dtype)
        for name, shape, (begin, end) in zip(self.names, self.shapes, self.bounds, strict=True):
            if np.shape(arrays[name]) != shape:
                raise TrainingError(
                    f"weight {name!r} has shape {list(np.shape(arrays[name]))}; the network has {list(shape)}"
                )
            vector[begin:end] = np.ravel(arrays[name])
        return vector

    def unpack(self, vector: Array) -> dict[str, Array]:
        """Return the arrays of a vector [n] by name: views, nothing is copied. TrainingError for another length."""
        if vector.shape != (self.num_weights,):
            raise TrainingError(
                f"a vector of shape {list(vector.shape)} is not that of the network, which has {self.num_weights} "
                "weights"
            )
        return {
            name: vector[begin:end].reshape(shape)
            for name, shape, (begin, end) in zip(self.names, self.shapes, self.bounds, strict=True)
        }

    def layout(self, *, packed: bool) -> tuple[tuple[int, int], ...]:
        """Return the (begin, end) of each message: one for all, or one for each weight array, its bias inside."""
        if packed:
            return ((0, self.num_weights),)
        pieces: list[tuple[int, int]] = []
        before = ""
        for name, (begin, end) in zip(self.names, self.bounds, strict=True):
            layer, _, own = name.rpartition("/")
            if pieces and own == _BIAS and layer == before:
                pieces[-1] = (pieces[-1][0], end)
            else:
                pieces.append((begin, end))
            before = layer
        return tuple(pieces)
