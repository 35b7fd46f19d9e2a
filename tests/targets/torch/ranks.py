"""Processes that stay for the whole session of tests and run functions together, as the ranks of a process group.

A test takes the fixture `ranks` and calls `ranks.run(function, *arguments, world=2)`: `function(rank, world,
*arguments)` runs on every rank, with gloo as the default process group, and what each returns comes back, in the order
of ranks. The function is one of a module (not a lambda, nothing within another function), so that it can be pickled.
Every rank loads that module: one that imports TensorFlow costs each of them some three seconds.

Each run has a process group of its own. Where a rank fails, the others are given a moment to fail or end, too; those
that hang, waiting for it, are replaced. So are those that could not make their group or have left it for another one:
PyTorch counts groups, and ranks that have counted differently do not find each other.

PyTorch, and what is tested, are imported by two nurseries, which workers are forked from in turn: so a worker takes
milliseconds to start, and ranks that are neighbours still differ in how Python hashes text, as those of a user do.
"""

import ctypes
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from pase.common.processes import dying_with_us, end_all, ending_text, package_environment

T = TypeVar("T")

GRACE_S = 1.0
"""How long others have to end once a rank has failed, where it is not said."""
ROOT = str(Path(__file__).resolve().parents[3])


class RanksFailedError(AssertionError):
    """Ranks failed; the text holds the traceback of each. kinds: the classes of their errors, by rank."""

    def __init__(self, text: str, kinds: dict[int, str]) -> None:
        super().__init__(text)
        self.kinds = kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """What a rank sends back instead of a result."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank sends back. stays: whether it is in the process group that it was given, and can be in another."""

    result: Any
    stays: bool


class Nursery:
    """A process that has imported PyTorch and forks workers."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path.insert(0, {ROOT!r}); from tests.targets.torch.ranks import nurse; nurse()"
        with theirs:
            self.process = subprocess.Popen(
                dying_with_us([sys.executable, "-c", code, str(theirs.fileno())]),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=package_environment({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}),
            )

    def asked(self, request: bytes, *files: int) -> int | None:
        """Return the number that is the answer, None where there is none yet."""
        socket.send_fds(self.control, [request], files)
        answer = self.control.recv(64)
        assert answer, "the process that forks ranks has ended"
        return None if answer == b"-" else int(answer)

    def end(self) -> None:
        end_all([self.process])
        self.control.close()


@dataclass(slots=True, kw_only=True)
class Process:
    """A process that a nursery forked, as `subprocess` would show it."""

    pid: int
    nursery: Nursery
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            self.status = self.nursery.asked(str(self.pid).encode())
        return self.status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that waits for functions. output: the file that all it prints goes to."""

    process: Process
    connection: "Connection[Any, Any]"
    output: IO[bytes]

    @classmethod
    def start(cls, nursery: Nursery) -> "Worker":
        ours, theirs = Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            pid = nursery.asked(b"fork", theirs.fileno(), output.fileno())
        assert pid is not None
        return cls(process=Process(pid=pid, nursery=nursery), connection=ours, output=output)

    def end(self) -> None:
        end_all([self.process])  # type: ignore[list-item]
        self.connection.close()
        self.output.close()

    def last_output(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-4000:]


class Pool:
    """Workers that are started when they are first needed, and stay."""

    def __init__(self) -> None:
        self.nurseries: list[Nursery] = []
        self.workers: list[Worker] = []
        self.folder = tempfile.TemporaryDirectory(prefix="pase-ranks-")
        self.numbers = count()

    def run(
        self,
        function: Callable[..., T],
        *arguments: object,
        world: int = 4,
        timeout_s: float = 300.0,
        grace_s: float = GRACE_S,
    ) -> list[T]:
        """Return what `function(rank, world, *arguments)` gives on each rank of a new process group.

        Raises:
            RanksFailedError: a rank raised an error, died or did not end in time.
        """
        store = str(Path(self.folder.name) / f"store-{next(self.numbers)}")
        given = pickle.dumps((function, arguments))
        self.nurseries = self.nurseries or [Nursery() for _ in range(2)]
        while len(self.workers) < world:
            self.workers.append(Worker.start(self.nurseries[len(self.workers) % 2]))
        self._replace([worker for worker in self.workers if worker.process.poll() is not None])
        workers = self.workers[:world]
        for rank, worker in enumerate(workers):
            worker.connection.send((rank, world, store, timeout_s, given))
        answers = self._answers(workers, timeout_s, grace_s)
        lost = [rank for rank in range(world) if rank not in answers]
        for rank in lost:
            status = workers[rank].process.poll()
            how = f"hung, in this run of {timeout_s:g} s at most" if status is None else ending_text(status)
            text = f"{how}; its last output:\n{workers[rank].last_output()}\n"
            answers[rank] = Answer(result=Failed(kind="Lost", text=text), stays=False)
        self._replace([worker for rank, worker in enumerate(workers) if not answers[rank].stays])
        results = {rank: answers[rank].result for rank in range(world)}
        failed = {rank: each for rank, each in results.items() if isinstance(each, Failed)}
        if failed:
            texts = (f"-- rank {rank} of {world}: {each.text}" for rank, each in failed.items())
            raise RanksFailedError("\n".join(texts), {rank: each.kind for rank, each in failed.items()})
        return list(results.values())

    def end(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.end()
        for nursery in self.nurseries:
            nursery.end()
        self.workers.clear()
        self.nurseries.clear()
        self.folder.cleanup()

    def _answers(self, workers: Sequence[Worker], timeout_s: float, grace_s: float) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        left = {worker.connection: rank for rank, worker in enumerate(workers)}
        end_s = time.monotonic() + timeout_s
        while left and (remaining_s := end_s - time.monotonic()) > 0:
            for connection in wait(list(left), remaining_s):
                rank = left.pop(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = pickle.loads(connection.recv())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    workers[rank].process.wait()
                if rank not in answers or isinstance(answers[rank].result, Failed):
                    end_s = min(end_s, time.monotonic() + grace_s)
        return answers

    def _replace(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self.workers[self.workers.index(worker)] = Worker.start(worker.process.nursery)
            worker.end()


def nurse() -> None:
    """Fork workers, and say how they ended, until the pool is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    _load()
    while True:
        request, files, _, _ = socket.recv_fds(control, 64, 2)
        if not request:
            # Frameworks have threads that do not end by themselves.
            os._exit(0)
        answer = b"-"
        if files:
            child = os.fork()
            if not child:
                control.close()
                serve(*files)
            for file in files:
                os.close(file)
            answer = str(child).encode()
        else:
            pid, status = os.waitpid(int(request), os.WNOHANG)
            if pid:
                answer = str(os.waitstatus_to_exitcode(status)).encode()
        control.send(answer)


def _load() -> None:
    """Load what most functions need, so that a worker has it when it starts, and never looks for cycles in it.

    A module that is traced and searched loads what PyTorch and PaSE load late: more than a second of each worker.
    """
    import torch

    import pase
    from pase.importers.torch.live import trace_live

    import_module("tests.targets.torch.equality")
    model = torch.nn.Linear(2, 2), torch.ones(2, 2)
    trace_live(model)
    pase.evaluate(pase.search(model, devices=1).graph, "data_parallel", 1)
    gc.collect()
    gc.freeze()


def serve(file: int, output: int) -> NoReturn:
    """Run what the pool sends, one function after the other, until it is gone; output: the file for all it prints."""
    os.setsid()
    # It ends with the nursery, as that ends with the pool.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for stream in (1, 2):
        os.dup2(output, stream)
    connection: Connection[Any, Any] = Connection(file)
    while True:
        try:
            rank, world, store, timeout_s, given = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(pickle.dumps(_answer(rank, world, store, timeout_s, given)))


def _answer(rank: int, world: int, store: str, timeout_s: float, given: bytes) -> Answer:
    import warnings

    import torch
    import torch.distributed as dist

    group: Any = None
    result: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function, arguments = pickle.loads(given)
            # Random numbers are those of a fresh process, whatever ran here before.
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
            group = dist.group.WORLD
            # One that fails at once does not break the connections that others still make.
            dist.barrier()
            result = function(rank, world, *arguments)
            # Pickled here, so that what cannot be is an error of this rank.
            pickle.dumps(result)
            dist.barrier()
    # Whatever it is, the test is to see it.
    except BaseException as error:  # noqa: BLE001
        result = Failed(kind=type(error).__name__, text=traceback.format_exc())
    finally:
        stays = group is not None and dist.group.WORLD is group
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            # It remembers meshes, whose groups are gone.
            _clear_sharding_prop_cache()
        if "pase.targets.torch.collectives" in sys.modules:
            # So do those that modules share.
            sys.modules["pase.targets.torch.collectives"]._MADE.clear()
    return Answer(result=result, stays=stays)
