"""A training across processes: a process's part in it, the messages between processes, and those that are gone.

Task 0 has the coordinator, and the master where there is one; a master leaves the workers to the other tasks. Several
workers of a task are threads of its process, as they are where there is but one: the same loops, the same results.

Messages go through queues of TensorFlow on the servers of a cluster. Every task has one queue, and one thread that
empties it into the inboxes of its ranks. An element of a queue is a message, or a part of one:

    header     int64 [6]: to, sender, kind, number, part, num_parts
    vector     [n] in the type of the weights; empty where there is none
    text       bytes

Where the queues are hosted decides who can hold up whom. For asynchronous methods all of them are with task 0: its
session touches no other task, so that a worker's process that is gone or stopped holds up nobody, and the sessions of
workers know task 0 and themselves alone. For synchronous methods, where all wait for all anyway, a queue is with the
task that it is for, so that sums go straight from worker to worker.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pase.easgd.actors import Evaluator, Objective
from pase.easgd.cluster import PROBE_EVERY_S, Cluster, is_lost
from pase.easgd.cluster_server import JOB, leave, open_server, too_late, wait_for_others
from pase.easgd.job import Job, Snapshot, task_ranks
from pase.easgd.messages import EXCHANGED, Inbox, Kind, Message
from pase.easgd.ranks import Outcome, run_ranks
from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.primitives.compat import tf

_HEADER_LENGTH = 6
_DISMISSED = -1
"""In place of a kind: all is over. Text: what went wrong, empty for nothing."""
_READY = -2
"""In place of a kind: a task, in place of the sender, is ready to begin."""
_BEGIN = -3
"""In place of a kind: all tasks are ready."""
_END_TIMEOUT_S = 2.0
"""How long to try to tell a task of the end: it may be stopped by a signal."""
_GRACE_S = 10.0
"""How long task 0 has to end a training that cannot go on; a thread of it may wait for a process that is stopped."""


# -- a process's part


def run_task(
    job: Job,
    start: Snapshot,
    cluster: Cluster,
    objectives: Callable[[Collection[int]], Mapping[int, Objective]],
    *,
    batch_size: int,
    layout: Sequence[tuple[int, int]] | None = None,
    evaluator: Evaluator | None = None,
    last_checkpoint: Callable[[], str] = lambda: "",
    **told: Any,
) -> Outcome | None:
    """Do this process's part; return the outcome where it is task 0, None elsewhere.

    objectives: returns those of some workers. evaluator: of task 0. batch_size, layout, and told, which is report and
    save: as for `run_ranks`. last_checkpoint: what to add to the message of an end before its time.

    To be called within `cluster_server.run_in_cluster`: threads are left behind that wait for TensorFlow, and a process
    whose task 0 is gone is ended where it stands.

    Raises ProgramError where the tasks do not come together, TrainingError where a synchronous method cannot go on,
    or nobody is left of an asynchronous one.
    """
    wiring = Wiring(
        ranks=task_ranks(job, len(cluster.addresses)), task=cluster.task, central=not job.algorithm.is_synchronous
    )
    workers = [rank for rank in wiring.own if rank < job.num_workers]
    with _in_touch(job, cluster, wiring, start.master.centre.dtype, last_checkpoint) as (inboxes, transport):
        own = objectives(workers) if workers else {}
        transport.meet()
        return run_ranks(
            job,
            start,
            ranks=wiring.own,
            inboxes=inboxes,
            transport=transport,
            layout=layout or ((0, len(start.master.centre)),),
            objectives=own,
            batch_size=batch_size,
            evaluator=evaluator,
            **told,
        )


@contextmanager
def _in_touch(
    job: Job, cluster: Cluster, wiring: "Wiring", dtype: Any, last_checkpoint: Callable[[], str]
) -> "Iterator[tuple[Mapping[int, Inbox], ServerTransport]]":
    """Give inboxes and what brings messages to them, once all tasks are up; at the end, have all end together."""
    server = open_server(cluster, wiring.config())
    wait_for_others(cluster)
    inboxes = {rank: Inbox() for rank in wiring.own}
    progress = Progress(job)
    transport = ServerTransport(wiring, inboxes, target=server.target, dtype=dtype, observe=progress.note)
    watch = Watch(
        job=job,
        cluster=cluster,
        wiring=wiring,
        inboxes=inboxes,
        transport=transport,
        progress=progress,
        last_checkpoint=last_checkpoint,
    )
    transport.start()
    watch.start()
    problem = "the training ended on task 0 before it was done"
    try:
        yield inboxes, transport
        problem = ""
    except TrainingError as error:
        problem = str(error)
        raise
    finally:
        if cluster.task == 0:
            watch.stop()
            transport.end(problem)
    if cluster.task != 0:
        problem = transport.wait_for_the_end()
        watch.stop()
        if problem:
            raise TrainingError(problem)


# -- who is gone, and who takes too long: what TensorFlow itself would wait for without end


@dataclass(slots=True)
class Progress:
    """What the messages that pass through task 0 say of who is at work.

    Asynchronous methods: a worker owes an answer from when the centre goes to it until its next message comes. In
    synchronous ones nobody goes on without the others, so that who holds up a round cannot be told: all that have not
    ended owe one since the last message, from the first exchange on.
    """

    job: Job
    _owed_since_s: dict[int, float] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, to: int, message: Message) -> None:
        """Note a message that passed."""
        kind, sender, workers = message.kind, message.sender, range(self.job.num_workers)
        with self._lock:
            if self.job.algorithm.is_synchronous:
                if kind is Kind.ENDED:
                    self._ended.add(sender)
                if self._owed_since_s or kind in EXCHANGED:
                    self._owed_since_s = dict.fromkeys((w for w in workers if w not in self._ended), time.monotonic())
            elif sender in workers:
                self._owed_since_s.pop(sender, None)
            elif to in workers and kind in (Kind.CENTRE, Kind.STOP):
                self._owed_since_s[to] = time.monotonic()

    def overdue(self, limit_s: float) -> tuple[int, ...]:
        """Return the workers that have not answered for longer than a limit."""
        now_s = time.monotonic()
        with self._lock:
            return tuple(worker for worker, since_s in self._owed_since_s.items() if now_s - since_s > limit_s)


@dataclass(slots=True, kw_only=True)
class Watch:
    """Task 0 watches over all others, these over task 0: TensorFlow itself would wait for ever.

    It goes on without a task where the method does not need it; task 0 is needed always. Where it cannot go on, the
    process ends. inboxes: of this task's ranks. progress: told of what passes through the transport. last_checkpoint:
    what to say of the checkpoint that is left, "" for nothing.
    """

    job: Job
    cluster: Cluster
    wiring: "Wiring"
    inboxes: Mapping[int, Inbox]
    transport: "ServerTransport"
    progress: Progress
    last_checkpoint: Callable[[], str]
    _given_up: set[int] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Watch from now on, in a thread."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: the training is over, well or not, and the others may go."""
        self._over.set()

    def _run(self) -> None:
        left = {0} if self.cluster.task != 0 else set(range(1, len(self.cluster.addresses)))
        while not self._over.wait(PROBE_EVERY_S):
            for task in sorted(left):
                if is_lost(self.cluster.addresses[task]) and not self._over.is_set():
                    left.discard(task)
                    self.lose(task, f"{self.called(task)} ended or cannot be reached")
            if self.cluster.task == 0 and self.cluster.step_timeout_s is not None:
                self.look_for_late(self.cluster.step_timeout_s)

    def fail(self, problem: str) -> None:
        """End the process, unless all is over."""
        if not self._over.is_set():
            sys.stderr.write(f"error: {problem}{self.last_checkpoint()}\n")
            leave(1)

    def lose(self, task: int, what: str) -> None:
        """Go on without a task, or end where the method needs it."""
        if task == 0:
            self.fail(what)
        if task in self._given_up or self._over.is_set():
            return
        self._given_up.add(task)
        self.transport.give_up(task)
        if self.job.algorithm.is_synchronous:
            self._end(what)
            return
        for rank in self.wiring.ranks[task]:
            for to in (self.job.master, self.job.coordinator):
                self._tell(to, Message(sender=rank, kind=Kind.LOST, text=what))

    def look_for_late(self, limit_s: float) -> None:
        """Go on without the tasks whose workers have not answered for longer than a limit, or end."""
        late = self.progress.overdue(limit_s)
        if late and self.job.algorithm.is_synchronous:
            self._end(too_late(limit_s))
        for task, ranks in enumerate(self.wiring.ranks):
            if task != 0 and not self.job.algorithm.is_synchronous and set(ranks) & set(late):
                self.lose(task, f"{self.called(task)} did not answer within {limit_s:g} s")

    def _end(self, what: str) -> None:
        """Have the coordinator end the training; this process where it cannot."""
        text = f"{what}{self.last_checkpoint()}"
        self._tell(self.job.coordinator, Message(sender=self.job.master, kind=Kind.LOST, text=text))
        if not self._over.wait(_GRACE_S):
            self.fail(what)

    def _tell(self, to: int, message: Message) -> None:
        if to in self.inboxes:
            self.inboxes[to].put(message)

    def called(self, task: int) -> str:
        """Return what messages call a task, with its workers."""
        workers = [str(rank) for rank in self.wiring.ranks[task] if rank < self.job.num_workers]
        those = f" with worker{'s' if len(workers) > 1 else ''} {', '.join(workers)}," if workers else ""
        return f"task {task}, {self.cluster.addresses[task]},{those}"


# -- messages between processes

Observer = Callable[[int, Message], None]
"""(to, message) of everything that passes through a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Which task has which ranks, and where the queues are.

    ranks: [tasks] the ranks of each. task: this one. central: whether task 0 hosts all queues.
    """

    ranks: tuple[tuple[int, ...], ...]
    task: int
    central: bool

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of this task."""
        return self.ranks[self.task]

    def host(self, task: int) -> int:
        """Return the task that hosts the queue of a task."""
        return 0 if self.central else task

    def config(self) -> Any:
        """Return the configuration of the server and the session of this task: they do no more than carry."""
        known = sorted({0, self.task}) if self.central else range(len(self.ranks))
        config = tf.ConfigProto(
            device_count={"CPU": 1, "GPU": 0}, device_filters=[f"/job:{JOB}/task:{task}" for task in known]
        )
        # The first session or server of a process decides for all: as replicas have it, or their bits would differ.
        config.intra_op_parallelism_threads = 1
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class _Channel:
    """How a task's queue is filled: placeholders, and the operation that makes an element of them."""

    header: Any
    vector: Any
    text: Any
    enqueue: Any

    @property
    def feeds(self) -> list[Any]:
        """The placeholders, in the order of an element."""
        return [self.header, self.vector, self.text]


class ServerTransport:
    """Brings messages to the inboxes of all tasks; to those of this one directly.

    inboxes: of this task's ranks. target: of its server. dtype: of vectors. observe: told of every message that it
    sends or receives.
    """

    def __init__(
        self,
        wiring: Wiring,
        inboxes: Mapping[int, Inbox],
        *,
        target: str,
        dtype: Any,
        observe: Observer | None = None,
    ) -> None:
        self._wiring = wiring
        self._inboxes = inboxes
        self._observe = observe
        self._task_of = {rank: task for task, ranks in enumerate(wiring.ranks) for rank in ranks}
        self._nothing = np.zeros(0, dtype)
        self._lost: frozenset[int] = frozenset()
        self._ready: set[int] = {wiring.task}
        self._has_changed = threading.Condition()
        self._has_begun = False
        self._dismissed = threading.Event()
        self._last_words = ""
        with tf.Graph().as_default() as graph:
            queues = [_queue(wiring.host(task), task, tf.as_dtype(dtype)) for task in range(len(wiring.ranks))]
            self._channels = [_channel(wiring.host(task), queue, dtype) for task, queue in enumerate(queues)]
            element = queues[wiring.task].dequeue()
        self._session = tf.Session(target, graph=graph, config=wiring.config())
        # Made once: it saves a third of the time of a small message.
        self._take = self._session.make_callable(list(element))
        self._put = [self._session.make_callable(each.enqueue, each.feeds) for each in self._channels]
        self._pump: threading.Thread | None = None

    # -- sending

    def deliver(self, to: int, message: Message) -> None:
        """Bring a message to the inbox of a rank; what is for a task that is gone is dropped.

        One run of the session is one message. Waits as long as the receiver's process is stopped, where that hosts its
        own queue; STOP waits no more than two seconds.
        """
        task = self._task_of[to]
        if task in self._lost:
            return
        if self._observe:
            self._observe(to, message)
        if task == self._wiring.task:
            self._inboxes[to].put(message)
            return
        header = (to, message.sender, message.kind, message.number, message.part, message.num_parts)
        timeout_s = _END_TIMEOUT_S if message.kind is Kind.STOP else None
        self._enqueue(task, header, message.vector, message.text, timeout_s)

    def _enqueue(self, task: int, header: Sequence[int], vector: Any, text: str, timeout_s: float | None) -> None:
        values = (np.array(header, np.int64), self._nothing if vector is None else vector, text.encode())
        try:
            if timeout_s is None:
                self._put[task](*values)
            else:
                channel, options = self._channels[task], tf.RunOptions(timeout_in_ms=int(timeout_s * 1000))
                self._session.run(channel.enqueue, dict(zip(channel.feeds, values, strict=True)), options=options)
        except (tf.errors.OpError, RuntimeError):
            # The task is gone, which whoever watches over it will say; or this transport was closed.
            return

    # -- receiving

    def start(self) -> None:
        """Empty the queue of this task from now on, in a thread."""
        self._pump = threading.Thread(target=self._run, name="transport", daemon=True)
        self._pump.start()

    def _run(self) -> None:
        while True:
            try:
                header, vector, text = self._take()
            except (tf.errors.OpError, RuntimeError):
                # Its host is gone, or this transport was closed.
                return
            to, sender, kind, number, part, num_parts = header.tolist()
            if kind < 0:
                self._control(kind, sender, text.decode())
                if kind == _DISMISSED:
                    return
                continue
            if self._task_of[sender] in self._lost:
                continue
            message = Message(
                sender=sender,
                kind=Kind(kind),
                vector=vector if len(vector) else None,
                number=number,
                text=text.decode(),
                part=part,
                num_parts=num_parts,
            )
            if self._observe:
                self._observe(to, message)
            self._inboxes[to].put(message)

    def _control(self, kind: int, task: int, text: str) -> None:
        with self._has_changed:
            if kind == _READY:
                self._ready.add(task)
            elif kind == _BEGIN:
                self._has_begun = True
            else:
                self._last_words = text
                self._dismissed.set()
            self._has_changed.notify_all()

    # -- beginning and end

    def meet(self) -> None:
        """Wait until every task has come here, or was given up: nobody is ahead because its process came up first."""
        if self._wiring.task != 0:
            self._enqueue(0, (0, self._wiring.task, _READY, 0, 0, 1), None, "", None)
            with self._has_changed:
                self._has_changed.wait_for(lambda: self._has_begun or self._dismissed.is_set())
            return
        tasks = set(range(len(self._wiring.ranks)))
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._ready | self._lost >= tasks)
        for task in sorted(tasks - {0} - self._lost):
            self._enqueue(task, (0, 0, _BEGIN, 0, 0, 1), None, "", None)

    def give_up(self, task: int) -> None:
        """Exchange no more with a task: it counts as gone from now on, even if it should come back."""
        ranks = self._wiring.ranks[task]
        with self._has_changed:
            self._lost |= {task}
            self._has_changed.notify_all()
        if self._wiring.central:
            # If it was only stopped: its workers end when it goes on. It is with this task that its queue is.
            for rank in ranks:
                self._enqueue(task, (rank, rank, Kind.STOP, 0, 0, 1), None, "", _END_TIMEOUT_S)

    def end(self, problem: str = "") -> None:
        """Tell all other tasks that all is over. For task 0. problem: why, where it is not over well."""
        if not self._wiring.central:
            for task in sorted(set(range(1, len(self._wiring.ranks))) - self._lost):
                self._enqueue(task, (0, 0, _DISMISSED, 0, 0, 1), None, problem, _END_TIMEOUT_S)
        if self._wiring.central or len(self._wiring.ranks) == 1:
            # The session has touched no other task, so there is nobody that closing it would wait for.
            self.close()

    def wait_for_the_end(self) -> str:
        """Wait until this task may go, and return what went wrong, empty for nothing. For all but task 0.

        Others may still exchange with one another through a queue that is with this task.
        """
        if not self._wiring.central:
            self._dismissed.wait()
        return self._last_words

    def close(self) -> None:
        """End the thread and the session; not where a task is gone, for which TensorFlow would wait."""
        if self._pump:
            self._enqueue(self._wiring.task, (0, 0, _DISMISSED, 0, 0, 1), None, "", None)
            self._pump.join()
        self._session.close()


def _place(task: int) -> str:
    return f"/job:{JOB}/task:{task}/device:CPU:0"


def _queue(host: int, task: int, dtype: Any) -> Any:
    """Return a task's queue: its name is what the sessions of all tasks share it by."""
    with tf.device(_place(host)):
        # Without a limit: a sender never waits for room. Every rank has but few messages on their way.
        return tf.queue.FIFOQueue(-1, [tf.int64, dtype, tf.string], shared_name=f"pase_inbox_{task}")


def _channel(host: int, queue: Any, dtype: Any) -> _Channel:
    # Beside the queue: so they are sent with the request, not asked back for by it.
    with tf.device(_place(host)):
        header = tf.placeholder(tf.int64, [_HEADER_LENGTH])
        vector = tf.placeholder(dtype, [None])
        text = tf.placeholder(tf.string, [])
        return _Channel(header=header, vector=vector, text=text, enqueue=queue.enqueue((header, vector, text)))
