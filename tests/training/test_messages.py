"""Endpoints: pieces, their order, and what is counted."""

from queue import Empty

import numpy as np
import pytest

from pase.easgd.messages import Endpoint, Inbox, Kind, Message
from pase.easgd.ranks import LocalTransport

LAYOUT = ((0, 3), (3, 4), (4, 10))


def pair(layout: tuple[tuple[int, int], ...]) -> tuple[Endpoint, Endpoint]:
    inboxes = {rank: Inbox() for rank in range(2)}
    transport = LocalTransport(inboxes)
    return Endpoint(0, inboxes[0], transport, layout), Endpoint(1, inboxes[1], transport, layout)


@pytest.mark.parametrize("layout", [((0, 10),), LAYOUT])
def test_a_vector_arrives_whole_and_is_counted(layout: tuple[tuple[int, int], ...]) -> None:
    sender, receiver = pair(layout)
    sender.send(1, Kind.SENT, np.arange(10.0), number=7, text="words")
    found = receiver.receive()
    assert found.vector is not None
    np.testing.assert_array_equal(found.vector, np.arange(10.0))
    assert (found.sender, found.kind, found.number, found.text) == (0, Kind.SENT, 7, "words")
    assert (sender.tally.exchanged_messages, sender.tally.exchanged_bytes) == (len(layout), 80)


def test_control_goes_in_one_piece_and_counts_as_no_exchange() -> None:
    sender, receiver = pair(LAYOUT)
    sender.send(1, Kind.STATE, np.arange(20.0))
    sender.send(1, Kind.STOP)
    assert [receiver.receive().kind for _ in range(2)] == [Kind.STATE, Kind.STOP]
    assert sender.tally.num_messages == {Kind.STATE: 1, Kind.STOP: 1}
    assert (sender.tally.exchanged_messages, sender.tally.exchanged_bytes) == (0, 0)


def test_what_is_not_wanted_stays_in_its_order() -> None:
    sender, receiver = pair(((0, 1),))
    for number in range(4):
        sender.send(1, Kind.SENT if number % 2 else Kind.CENTRE, np.zeros(1), number=number)
    assert receiver.receive(lambda message: message.kind is Kind.SENT).number == 1
    assert [receiver.receive().number for _ in range(3)] == [0, 2, 3]
    assert receiver.poll() is None
    with pytest.raises(Empty, match=r"^$"):
        receiver.receive(timeout_s=0.01)


def test_parts_that_a_sender_left_unfinished_are_dropped() -> None:
    """A process was killed between two parts; its successor begins anew."""
    _, receiver = pair(LAYOUT)
    inbox = Inbox()
    receiver = Endpoint(1, inbox, LocalTransport({}), LAYOUT)

    def part(i: int, value: float) -> Message:
        vector = np.full(LAYOUT[i][1] - LAYOUT[i][0], value)
        return Message(sender=0, kind=Kind.SENT, vector=vector, part=i, num_parts=3)

    inbox.put(part(0, 1.0))
    inbox.put(part(1, 1.0))
    for i in range(3):
        inbox.put(part(i, 2.0))
    found = receiver.receive().vector
    assert found is not None
    np.testing.assert_array_equal(found, np.full(10, 2.0))
    assert receiver.poll() is None
