"""Several processes: the results of threads, messages counted in their queues, and what is left when a process dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.easgd.algorithms import Array
from pase.easgd.checkpoint import list_checkpoints, newest_checkpoint
from pase.easgd.cluster import Cluster
from pase.easgd.job import begun, count_tasks, task_ranks
from pase.easgd.messages import Endpoint, Inbox, Kind
from pase.easgd.processes import ServerTransport, Wiring, run_task
from pase.easgd.ranks import Outcome, train_in_threads
from pase.easgd.session import to_snapshot
from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.primitives.compat import tf
from tests.training import process_driver
from tests.training.process_driver import LAYERS, PACKING, START, Request

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
"""A synchronous training ends within this time when a process dies."""
WAIT_S = 300.0
"""For what is sure to come, however busy the machine is: processes import TensorFlow first."""


@contextmanager
def training(request: Request) -> Iterator["subprocess.Popen[str]"]:
    """The training in processes, running; what it started ends with it."""
    command = [sys.executable, process_driver.__file__, json.dumps(asdict(request))]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: "subprocess.Popen[str]") -> tuple[int, list[dict[str, Any]], str]:
    out, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, [json.loads(line) for line in out.splitlines()], errors


def trained(request: Request) -> tuple[list[dict[str, Any]], Array]:
    """The events of a training that ends well, and its centre."""
    with training(request) as process:
        status, events, errors = ended(process)
    assert (status, errors) == (0, "")
    return events, centre_of(events)


def centre_of(events: list[dict[str, Any]]) -> Array:
    assert events[-1]["event"] == "outcome"
    return np.array([float.fromhex(value) for value in events[-1]["centre"]])


def in_threads(request: Request, folder: Path | None = None) -> Outcome:
    """The same in threads of this process; folder: of checkpoints, to go on from the newest of them."""
    job = request.job
    start = begun(job, START)
    if folder:
        found = newest_checkpoint(folder)
        assert found
        start = to_snapshot(found, job.algorithm, PACKING)
    return train_in_threads(job, start, objectives=[request.objective(worker) for worker in range(job.num_workers)])


def process_in(path: Path, training: "subprocess.Popen[str]") -> int:
    """The process that has written its number, as soon as it has; AssertionError where the training ends before."""
    end = time.monotonic() + WAIT_S
    while not path.exists():
        if training.poll() is not None:
            raise AssertionError(f"the training ended without {path}: {ended(training)}")
        assert time.monotonic() < end, f"there is no {path}"
        time.sleep(0.02)
    return int(path.read_text(encoding="ascii"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


def kept(folder: Path) -> list[int]:
    return sorted(event for event, _ in list_checkpoints(folder))


# -- who does what


def test_workers_are_dealt_out_in_blocks() -> None:
    together, apart = Request(algorithm="sync-easgd3").job, Request(algorithm="async-easgd").job
    assert task_ranks(together, 1) == ((0, 1, 2, 3, 4, 5),)
    assert task_ranks(together, 2) == ((0, 1, 4, 5), (2, 3))
    assert task_ranks(together, 3) == ((0, 1, 4, 5), (2,), (3,))
    assert task_ranks(apart, 2) == ((4, 5), (0, 1, 2, 3))
    assert task_ranks(apart, 4) == ((4, 5), (0, 1), (2,), (3,))
    assert [count_tasks(together, 4), count_tasks(apart, 4)] == [4, 5]


@pytest.mark.parametrize("num_processes", [0, 5])
def test_more_processes_than_workers_are_refused(num_processes: int) -> None:
    job = Request(algorithm="async-sgd").job
    with pytest.raises(TrainingError, match=f"{num_processes} processes were asked for, for 4 workers; expected 1 to"):
        count_tasks(job, num_processes)
    with pytest.raises(TrainingError, match=r"async-sgd with 4 workers runs in 2 to 5 tasks, the first of them the"):
        task_ranks(job, num_processes + 1)


# -- messages


def test_packed_is_one_element_of_the_queue_where_layers_are_one_each() -> None:
    cluster = {"worker": ["127.0.0.1:0"]}
    server = tf.distribute.Server(cluster, job_name="worker", task_index=0)
    # Both tasks' queues with one server: so what lies in the second one can be looked at, for nobody empties it.
    wiring = Wiring(ranks=((0,), (1,)), task=0, central=True)
    transport = ServerTransport(wiring, {0: Inbox()}, target=server.target, dtype=np.float64)
    receiver = ServerTransport(
        Wiring(ranks=((0,), (1,)), task=1, central=True),
        inboxes := {1: Inbox()},
        target=server.target,
        dtype=np.float64,
    )
    packed = Endpoint(0, Inbox(), transport, ((0, len(START)),))
    by_layer = Endpoint(0, Inbox(), transport, LAYERS)
    packed.send(1, Kind.SENT, START, number=7)
    by_layer.send(1, Kind.CENTRE, START, text="of the layers")
    assert (packed.tally.exchanged_messages, by_layer.tally.exchanged_messages) == (1, len(LAYERS))
    receiver.start()
    there = Endpoint(1, inboxes[1], receiver, LAYERS)
    first, second = there.receive(timeout_s=10), there.receive(timeout_s=10)
    assert [(each.sender, each.kind, each.number, each.text) for each in (first, second)] == [
        (0, Kind.SENT, 7, ""),
        (0, Kind.CENTRE, 0, "of the layers"),
    ]
    for message in (first, second):
        assert message.vector is not None
        assert message.vector.dtype == np.float64
        assert message.vector.tobytes() == START.tobytes()
    for endpoint in (packed, by_layer):
        assert endpoint.tally.exchanged_bytes == START.nbytes
    # Who is given up is told so, and what is for it afterwards is dropped.
    transport.give_up(1)
    packed.send(1, Kind.SENT, START)
    assert there.receive(timeout_s=10).kind is Kind.STOP
    assert there.poll() is None
    receiver.close()
    transport.close()


# -- results


def test_one_process_gives_the_bits_of_threads() -> None:
    request = Request(algorithm="sync-easgd3")
    job = request.job
    cluster = Cluster(addresses=(f"127.0.0.1:{free_port()}",), task=0)
    outcome = run_task(
        job,
        begun(job, START),
        cluster,
        lambda workers: {worker: request.objective(worker) for worker in workers},
        batch_size=8,
        layout=LAYERS,
    )
    assert outcome
    assert outcome.centre.tobytes() == in_threads(request).centre.tobytes()


@pytest.mark.full
def test_two_processes_and_a_master_give_the_bits_of_threads() -> None:
    events, centre = trained(Request(algorithm="sync-easgd1", packed=False))
    # Whose centre it is makes no difference, either.
    assert centre.tobytes() == in_threads(Request(algorithm="sync-easgd3")).centre.tobytes()
    for here, there in zip(in_threads(Request(algorithm="sync-easgd1")).workers, events[-1]["workers"], strict=True):
        assert here
        assert there == {"num_messages": here.num_messages * len(LAYERS), "num_bytes": here.num_bytes}


@pytest.mark.slow
def test_a_synchronous_training_ends_with_a_process_and_goes_on_exactly(tmp_path: Path) -> None:
    halt, folder = tmp_path / "halted", tmp_path / "kept"
    request = Request(algorithm="sync-easgd3", num_steps=6, save_every=2, folder=str(folder))
    with training(Request(**asdict(request) | {"halt": (3, 5, str(halt))})) as process:
        victim = process_in(halt, process)
        assert [json.loads(next(process.stdout or iter(())))["after"] for _ in range(2)] == [2, 4]
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        status, _, errors = ended(process)
    assert time.monotonic() - begin < LIMIT_S
    assert status == 1
    assert errors == (
        f"pase: task 1 (pid {victim}) was ended by signal 9 (SIGKILL); the other processes were ended; the last "
        f"checkpoint is {folder}/step-0000000004.safetensors: go on from it with --resume\n"
    )
    # In one process, where it was two.
    centre = in_threads(request, folder).centre
    assert centre.tobytes() == in_threads(request).centre.tobytes()


@pytest.mark.slow
def test_an_asynchronous_training_goes_on_without_a_process(tmp_path: Path) -> None:
    halt = tmp_path / "halted"
    # The others wait for the end of that process: workers 0 and 1 would otherwise be done before it, and worker 2,
    # which ends with it, as well.
    request = Request(algorithm="async-easgd", num_steps=40, halt=(3, 5, str(halt)), waiting=(0, 1, 2))
    with training(request) as process:
        victim = process_in(halt, process)
        os.kill(victim, signal.SIGKILL)
        status, events, errors = ended(process)
    assert status == 0
    assert errors == (
        f"note: task 2 (pid {victim}) was ended by signal 9 (SIGKILL); the others go on without its workers\n"
    )
    lost = {event["worker"]: event["what"] for event in events if event["event"] == "lost"}
    assert set(lost) == {2, 3}
    assert re.fullmatch(r"task 2, 127\.0\.0\.1:\d+, with workers 2, 3, ended or cannot be reached", lost[2])
    assert events[-1]["num_events"] == 160
    assert sorted(events[-1]["lost"]) == [2, 3]


@pytest.mark.full
def test_the_master_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    # In an order of its own, so that there is something to compare with.
    halt, folder = tmp_path / "halted", tmp_path / "kept"
    request = Request(
        algorithm="async-measgd",
        num_workers=2,
        num_steps=6,
        arrivals=(0, 1, 1, 0),
        save_every=1,
        folder=str(folder),
    )
    with training(Request(**asdict(request) | {"halt": (1, 4, str(halt))})) as process:
        process_in(halt, process)
        assert json.loads(next(process.stdout or iter(())))["after"] == 2
        master = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()[-1])
        os.kill(master, signal.SIGKILL)
        status, _, errors = ended(process)
    assert status == 1
    last = kept(folder)[-1]
    assert 2 <= last <= 10
    assert errors == (
        f"pase: task 0 (pid {master}) was ended by signal 9 (SIGKILL); the other processes were ended; the last "
        f"checkpoint is {folder}/step-{last:010}.safetensors: go on from it with --resume\n"
    )
    # In one process, where it was three.
    outcome = in_threads(request, folder)
    assert outcome.num_events == 12
    assert np.abs(outcome.centre - in_order(request)).max() <= 1e-12


def in_order(request: Request) -> Array:
    """The centre of Async MEASGD, one arrival after another, from the paper's Eq. 2, 5 and 6."""
    rate, elastic, momentum = 0.1, 0.1 * 0.5, 0.5
    centre = START.copy()
    weights = [START.copy() for _ in range(request.num_workers)]
    velocity = [np.zeros_like(START) for _ in range(request.num_workers)]
    num_steps = [0] * request.num_workers
    for event in range(request.job.num_events):
        worker = request.arrivals[event % len(request.arrivals)]
        gradient = request.objective(worker).gradient(weights[worker], num_steps[worker]).vector
        apart = weights[worker] - centre
        velocity[worker] = momentum * velocity[worker] - rate * gradient
        weights[worker] = weights[worker] + velocity[worker] - elastic * apart
        centre = centre + elastic * apart
        num_steps[worker] += 1
    return centre
