"""Training across workers in one process: a thread for each."""

from collections.abc import Mapping, Sequence

from pase.easgd.coordinator import Outcome, Report, Save
from pase.easgd.job import Job, Snapshot
from pase.easgd.messages import Inbox, Piece
from pase.easgd.objective import Evaluator, Objective
from pase.easgd.ranks import run_ranks
from pase.easgd.worker import Trace
from pase.errors import TrainingError


class LocalTransport:
    """Brings pieces to inboxes of this process."""

    def __init__(self, inboxes: Mapping[int, Inbox]) -> None:
        self._inboxes = inboxes

    def deliver(self, to: int, piece: Piece) -> None:
        """Put a piece in an inbox."""
        self._inboxes[to].put(piece)


def train_in_threads(
    job: Job,
    start: Snapshot,
    *,
    objectives: Sequence[Objective],
    layout: Sequence[tuple[int, int]] | None = None,
    evaluator: Evaluator | None = None,
    report: Report | None = None,
    save: Save | None = None,
    trace: Trace | None = None,
) -> Outcome:
    """Train with every worker in a thread of this process.

    objectives: [workers]. layout: how exchanged vectors are cut into messages, by default not at all. The others:
    see `run_ranks`.
    """
    if len(objectives) != job.num_workers:
        raise TrainingError(f"{len(objectives)} objectives were given; expected {job.num_workers}, one for each worker")
    ranks = range(job.coordinator + 1)
    inboxes = {rank: Inbox() for rank in ranks}
    outcome = run_ranks(
        job,
        start,
        ranks=ranks,
        inboxes=inboxes,
        transport=LocalTransport(inboxes),
        layout=layout or ((0, len(start.master.centre)),),
        objectives=dict(enumerate(objectives)),
        batch_size=objectives[0].batch_size,
        evaluator=evaluator,
        report=report,
        save=save,
        trace=trace,
    )
    assert outcome is not None
    return outcome
