"""Endpoints: pieces, their order, and what is counted; one vector for all weights, and which messages it goes in."""

from queue import Empty

import numpy as np
import pytest

from pase.easgd.messages import Endpoint, Inbox, Kind, Message, Packing
from pase.easgd.ranks import LocalTransport
from pase.errors import TrainingError

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


PACKING = Packing(
    names=("conv/w", "conv/bias", "norm/scale", "norm/shift", "table", "fc/w", "fc/bias"),
    shapes=((2, 3, 1), (2,), (4,), (4,), (5, 2), (3, 3), (3,)),
    dtype="float64",
)


def arrays() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    return {name: numbers.standard_normal(shape) for name, shape in zip(PACKING.names, PACKING.shapes, strict=True)}


def test_unpacking_undoes_packing() -> None:
    given = arrays()
    found = PACKING.unpack(PACKING.pack(dict(reversed(given.items()))))
    assert list(found) == list(PACKING.names)
    for name, array in given.items():
        assert np.array_equal(found[name], array)


def test_a_vector_holds_the_arrays_one_after_another_in_row_major_order() -> None:
    given = arrays()
    vector = PACKING.pack(given)
    assert vector.dtype == np.float64
    assert vector.flags["C_CONTIGUOUS"]
    assert vector.tolist() == [number for name in PACKING.names for number in given[name].flatten().tolist()]
    assert PACKING.num_weights == vector.size == 6 + 2 + 4 + 4 + 10 + 9 + 3
    assert PACKING.num_bytes == vector.nbytes


def test_unpacking_copies_nothing() -> None:
    vector = np.zeros(PACKING.num_weights)
    PACKING.unpack(vector)["fc/w"][1, 2] = 7
    assert vector[26 + 5] == 7


def test_a_message_for_all_or_one_for_each_weight_array_with_its_bias() -> None:
    assert PACKING.layout(packed=True) == ((0, 38),)
    assert PACKING.layout(packed=False) == ((0, 8), (8, 12), (12, 16), (16, 26), (26, 38))


def test_a_bias_of_another_layer_travels_alone() -> None:
    packing = Packing(names=("bias", "a/w", "b/bias"), shapes=((1,), (2,), (3,)))
    assert packing.layout(packed=False) == ((0, 1), (1, 3), (3, 6))


def test_what_does_not_fit_is_named() -> None:
    given = arrays()
    with pytest.raises(TrainingError, match="there is no weight 'norm/scale'; the network has conv/w"):
        PACKING.pack({name: array for name, array in given.items() if name != "norm/scale"})
    with pytest.raises(TrainingError, match="there is no use for weight 'more'"):
        PACKING.pack(given | {"more": np.zeros(1)})
    with pytest.raises(TrainingError, match=r"'fc/w' has shape \[9\]; the network has \[3, 3\]"):
        PACKING.pack(given | {"fc/w": np.zeros(9)})
    with pytest.raises(TrainingError, match=r"shape \[37\] is not that of the network, which has 38"):
        PACKING.unpack(np.zeros(37))
