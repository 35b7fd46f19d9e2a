"""Who owes an answer, and since when."""

import time

from pase.easgd.messages import Kind, Message
from pase.easgd.processes import Progress
from tests.training.process_driver import Request

ASYNCHRONOUS, SYNCHRONOUS = Request(algorithm="async-easgd").job, Request(algorithm="sync-easgd1").job


def piece(sender: int, kind: Kind) -> Message:
    return Message(sender=sender, kind=kind)


def test_a_worker_owes_an_answer_to_the_centre() -> None:
    job = ASYNCHRONOUS
    progress = Progress(job)
    assert progress.overdue(0) == ()
    progress.note(job.master, piece(1, Kind.SENT))
    progress.note(1, piece(job.master, Kind.CENTRE))
    progress.note(2, piece(job.master, Kind.CENTRE))
    # Who has not got the centre, because another one is waited for, owes nothing.
    progress.note(job.master, piece(3, Kind.SENT))
    time.sleep(0.01)
    assert progress.overdue(0.005) == (1, 2)
    assert progress.overdue(60) == ()
    progress.note(job.master, piece(2, Kind.SENT))
    assert progress.overdue(0.005) == (1,)
    progress.note(3, piece(job.master, Kind.STOP))
    time.sleep(0.01)
    assert progress.overdue(0.005) == (1, 3)
    progress.note(job.coordinator, piece(3, Kind.ENDED))
    assert progress.overdue(0.005) == (1,)


def test_a_round_is_held_up_by_all_that_are_in_it() -> None:
    job = SYNCHRONOUS
    progress = Progress(job)
    # Before the first exchange a network may take as long as it likes to build.
    progress.note(0, piece(job.master, Kind.STATE_WANTED))
    time.sleep(0.01)
    assert progress.overdue(0.005) == ()
    progress.note(0, piece(job.master, Kind.CENTRE))
    assert progress.overdue(0.005) == ()
    time.sleep(0.01)
    assert progress.overdue(0.005) == (0, 1, 2, 3)
    for worker in range(4):
        progress.note(job.coordinator, piece(worker, Kind.ENDED))
    time.sleep(0.01)
    assert progress.overdue(0.005) == ()
