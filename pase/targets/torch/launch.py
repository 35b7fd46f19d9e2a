"""The ranks of a PyTorch program: started on this machine, joined into one process group, ended together.

Local ranks have the environment that torchrun gives, so that a program cannot tell who started it: this process keeps
the store that they meet at, on loopback and at a port that the system chose. A rank that fails or is killed ends all
others at once, and the error names it. Under torchrun a rank learns from the store who failed first, when a message to
another breaks.
"""

import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from pase.common.processes import dying_with_us, end_all, ending_text, package_environment
from pase.errors import PaseError, ProgramError

LOOPBACK = "127.0.0.1"
_RUN = "pase"
"""What the environment of ranks calls the run of a program that we started."""

T = TypeVar("T")

_POLL_S = 0.02
_GRACE_S = 0.5
"""How long others have to end, too, before it is judged which rank failed first."""
_SHOWN_LINES = 40
_TOLD_GRACE_S = 2.0
"""How long a rank that has failed, and said so, has to end."""
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|peer|timed? ?out|remote process exited|gloo|nccl",
    re.IGNORECASE,
)
"""What the error of a collective says when another rank is gone."""


class RankError(ProgramError):
    """A rank of a parallel program failed, was ended, or is not heard of; rank: its number, None where nobody knows."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type["RankError"], tuple[str, int | None]]:
        return RankError, (str(self), self.rank)


# -- starting ranks on this machine


def run_program(
    arguments: Sequence[str],
    *,
    ranks: int,
    threads: int | None = None,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a Python program on local ranks until all have ended, as torchrun would.

    Rank 0 has our output and errors. Nothing is left running, whatever happens; a keyboard interrupt ends all ranks.

    Args:
        arguments: of Python: a script and its own arguments.
        ranks: how many processes.
        threads: of each; None to divide this machine's cores among them.
        timeout_s: after how many seconds those that still run are ended, None for never.
        environment: of all ranks, beside ours and torchrun's.

    Raises:
        RankError: a rank failed, was killed or did not end in time; the message names it, with its last line of error.
    """
    if ranks < 1:
        raise ProgramError(f"{ranks} ranks were asked for; expected 1 or more")
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    threads = threads or max(1, _cores() // ranks)
    started: list[_Rank] = []
    try:
        for rank in range(ranks):
            given = {**rank_environment(rank, ranks, store.port, threads), **(environment or {})}
            started.append(_start(arguments, rank, given))
        _watch(started, store, timeout_s)
    finally:
        end_all(each.process for each in started)
        for each in started:
            each.finish()


def call(
    function: Callable[..., T],
    *arguments: object,
    ranks: int,
    threads: int | None = None,
    timeout_s: float | None = None,
) -> list[T]:
    """Return what a function gives on each of several local ranks, which have joined one process group.

    Args:
        function: of a module, so that other processes find it by its name.
        arguments: what it is given on every rank, able to be pickled.
        ranks: how many processes.
        threads: of each; None to divide this machine's cores among them.
        timeout_s: after how many seconds those that still run are ended, None for never.

    Raises:
        RankError: as for `run_program`.
    """
    if function.__module__ == "__main__":
        raise ProgramError(
            f"{function.__qualname__} is of the program itself, which {ranks} ranks cannot import; put it into a module"
        )
    with tempfile.TemporaryDirectory(prefix="pase-ranks-") as folder:
        try:
            (Path(folder) / "call").write_bytes(pickle.dumps((sys.path, pickle.dumps((function, arguments)))))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ProgramError(
                f"what is to run on {ranks} ranks cannot be sent to them ({error}); give a function of a module and "
                "arguments that can be pickled"
            ) from error
        code = "import sys; from pase.targets.torch.launch import answer_call; answer_call(sys.argv[1])"
        run_program(["-c", code, folder], ranks=ranks, threads=threads, timeout_s=timeout_s)
        # What our own processes wrote.
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def answer_call(folder: str) -> None:
    """Run what `call` has put into a folder, as one of its ranks, and write the result there."""
    sys.path[:], inner = pickle.loads((Path(folder) / "call").read_bytes())
    # At once, so that what fails from here on is told to the others.
    ranks = join()
    function, arguments = pickle.loads(inner)
    result = function(*arguments)
    (Path(folder) / f"result-{ranks.rank}").write_bytes(pickle.dumps(result))
    leave()


def rank_environment(rank: int, ranks: int, port: int, threads: int) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank on one machine; port: of the store on loopback."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": str(threads),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # All ranks are clients of the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": _RUN,
        "ROLE_NAME": "default",
        **_loopback_of_gloo(),
    }


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A rank that was started here; lines: the last ones of its standard error, which a thread of ours reads."""

    rank: int
    process: "subprocess.Popen[bytes]"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_SHOWN_LINES))
    reader: threading.Thread | None = None

    @property
    def status(self) -> int | None:
        return self.process.poll()

    @property
    def last_line(self) -> str:
        lines = (line.removeprefix(f"[rank{self.rank}]: ") for line in reversed(self.lines))
        return next(filter(str.strip, lines), "").removeprefix("error: ")

    def read(self, errors: IO[bytes]) -> None:
        with errors:
            for raw in errors:
                line = raw.decode(errors="replace").rstrip("\n")
                self.lines.append(line)
                if self.rank == 0:
                    sys.stderr.write(f"{line}\n")
                    sys.stderr.flush()

    def finish(self) -> None:
        if self.reader is not None:
            # Somebody whom the rank started in a session of its own may hold the pipe.
            self.reader.join(1.0)


def _start(arguments: Sequence[str], rank: int, environment: Mapping[str, str]) -> _Rank:
    process = subprocess.Popen(
        dying_with_us([sys.executable, *arguments]),
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=package_environment(environment),
        # An interrupt is for us to act on; what a rank starts ends with it.
        start_new_session=True,
    )
    assert process.stderr is not None
    started = _Rank(rank=rank, process=process)
    started.reader = threading.Thread(target=started.read, args=(process.stderr,), daemon=True)
    started.reader.start()
    return started


def _watch(started: Sequence[_Rank], store: Any, timeout_s: float | None) -> None:
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    fallen: list[_Rank] = []
    asked_s = time.monotonic()
    told_s: float | None = None
    while running := [each for each in started if each.status is None]:
        fallen += [each for each in started if each.status and each not in fallen]
        now_s = time.monotonic()
        if told_s is None and now_s > asked_s + _TOLD_GRACE_S / 4:
            # A rank whose other threads go on does not end for an error, and the others wait for it.
            asked_s, told_s = now_s, now_s if _told_failure(store) else None
        if fallen or (told_s is not None and now_s > told_s + _TOLD_GRACE_S):
            break
        if end_s is not None and time.monotonic() > end_s:
            names = ", ".join(str(each.rank) for each in running)
            raise RankError(
                f"after {timeout_s:g} s, {len(running)} of {len(started)} ranks still ran ({names}); all were ended",
                running[0].rank,
            )
        time.sleep(_POLL_S)
    fallen += [each for each in started if each.status and each not in fallen]
    if not running and not fallen:
        return
    grace_s = time.monotonic() + _GRACE_S
    while any(each.status is None for each in started) and time.monotonic() < grace_s:
        time.sleep(_POLL_S)
        fallen += [each for each in started if each.status and each not in fallen]
    end_all(each.process for each in started)
    for each in started:
        each.finish()
    first, why = _first_failure(started, fallen, store)
    if first.rank and first.lines:
        prefix = f"[rank{first.rank}]: "
        sys.stderr.write("".join(f"{prefix}{line.removeprefix(prefix)}\n" for line in first.lines))
        sys.stderr.flush()
    others = "; the others were ended" if len(started) > 1 else ""
    raise RankError(f"rank {first.rank} of {len(started)} {why}{others}", first.rank)


def _first_failure(started: Sequence[_Rank], fallen: Sequence[_Rank], store: Any) -> tuple[_Rank, str]:
    """Return the rank that did not fail for want of another, and what happened to it."""
    killed = next((each for each in fallen if (each.status or 0) < 0), None)
    if killed is not None:
        return killed, ending_text(killed.status or 0)
    told = _told_failure(store)
    if told is not None:
        return started[told[0]], f"failed: {told[1]}"
    first = next((each for each in fallen if not _LOST_PEER.search(each.last_line)), fallen[0])
    return first, ending_text(first.status or 0) + (f": {first.last_line}" if first.last_line else "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loopback_of_gloo() -> dict[str, str]:
    """Return what makes gloo listen on loopback, where it would ask the name service for this machine's address."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {} if "GLOO_SOCKET_IFNAME" in os.environ or not names else {"GLOO_SOCKET_IFNAME": names[0]}


# -- joining the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The process group that this process is in: its rank in it, how many there are, and the device of its tensors."""

    rank: int
    world_size: int
    device: Any


def join(*, device: str | None = None, timeout_s: float = 600.0) -> Ranks:
    """Join the process group of this program, which is made from torchrun's environment where there is none yet.

    A program that was started alone is a group of one. NCCL serves where each local rank has a GPU of its own, gloo
    elsewhere. From here on an error that ends this rank is written to the store, where the others read it.

    Args:
        device: "cpu" or "cuda"; None for GPUs where each local rank has one.
        timeout_s: how long a rank waits for the others, and for each collective.

    Raises:
        RankError: others did not come in time.
        ProgramError: the environment is not one that torchrun gives.
    """
    if not dist.is_initialized():
        _make_group(device, timedelta(seconds=timeout_s))
    if not getattr(sys.excepthook, "tells_of_failures", False):
        _tell_of_failures()
    rank: int = dist.get_rank()
    world_size: int = dist.get_world_size()
    return Ranks(rank=rank, world_size=world_size, device=_device(device, _number("LOCAL_RANK", 0)))


def leave() -> NoReturn:
    """End this process, well, once all ranks are done with the process group."""
    # A rank that goes before the others are ready breaks their connections.
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo that lets go of a tensor while Python is taken down would abort the process.
    os._exit(0)


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn the error of a collective that broke into a RankError that names the rank that failed, where that is known.

    Raises:
        RankError: a message to or from another rank broke.
    """
    try:
        yield
    except PaseError:
        raise
    except RuntimeError as error:
        if not _is_of_lost_peer(error) or not dist.is_initialized():
            raise
        raise _lost_rank(error) from error


def told_by_all(own: Any) -> list[Any]:
    """Return what every rank tells, in the order of ranks; all ranks call it."""
    told: list[Any] = [None] * dist.get_world_size()
    with naming_lost_ranks():
        dist.all_gather_object(told, own)
    return told


def _make_group(device: str | None, timeout: timedelta) -> None:
    if "RANK" not in os.environ:
        dist.init_process_group(_backend(device, 1), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, world_size = _number("RANK", None), _number("WORLD_SIZE", None)
    local = _number("LOCAL_WORLD_SIZE", world_size)
    if not 0 <= rank < world_size:
        raise ProgramError(f"RANK is {rank} of WORLD_SIZE {world_size}; expected 0 to {world_size - 1}")
    if local == world_size:
        os.environ.update(_loopback_of_gloo())
    where = f"{_text('MASTER_ADDR')}:{_number('MASTER_PORT', None)}"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        store.set(_key(f"joined/{rank}"), "")
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} cannot reach the store at {where}, where all ranks meet: {error}", 0) from error
    backend = _backend(device, local)
    if backend == "nccl":
        torch.cuda.set_device(_number("LOCAL_RANK", 0))
    try:
        group_store = dist.PrefixStore(_key("group"), store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        missing = [other for other in range(world_size) if not store.check([_key(f"joined/{other}")])]
        names = ", ".join(map(str, missing)) or "none is missing"
        raise RankError(
            f"rank {rank} waited {timeout.total_seconds():g} s for the other ranks of {world_size}; missing: {names} "
            f"({error})",
            missing[0] if missing else None,
        ) from error


def _backend(device: str | None, local_ranks: int) -> str:
    return "nccl" if device != "cpu" and dist.is_nccl_available() and _gpus() >= local_ranks else "gloo"


def _device(device: str | None, local_rank: int) -> Any:
    on_gpu = device == "cuda" or (device is None and dist.get_backend() == "nccl")
    if on_gpu and not _gpus():
        raise ProgramError("a GPU was asked for, and PyTorch finds none; leave the device out")
    return torch.device("cuda", local_rank % _gpus()) if on_gpu else torch.device("cpu")


def _gpus() -> int:
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ProgramError(f"RANK is set and {name} is not; start the program with torchrun --nproc-per-node N")
    return value


def _number(name: str, otherwise: int | None) -> int:
    if otherwise is not None and name not in os.environ:
        return otherwise
    try:
        return int(_text(name))
    except ValueError:
        raise ProgramError(
            f"{name} is {os.environ[name]!r}; expected a number: start the program with torchrun --nproc-per-node N"
        ) from None


# -- who failed


def tell_failure(error: BaseException) -> bool:
    """Say in the store why this rank ends; return whether `run_program` started it, which says so itself."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if not _is_of_lost_peer(error):
        _tell_failure(type(error), error)
    return os.environ.get("TORCHELASTIC_RUN_ID") == _RUN


def _tell_of_failures() -> None:
    """Have an error that ends this rank say so in the store, or say whom it lost."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if not _is_of_lost_peer(error):
            _tell_failure(kind, error)
        elif not isinstance(error, RankError):
            sys.stderr.write(f"error: {_lost_rank(error)}\n")
        sys.stderr.flush()

    told.tells_of_failures = True  # type: ignore[attr-defined]
    sys.excepthook = told


def _is_of_lost_peer(error: BaseException) -> bool:
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, (RankError, *kinds)) or (
        isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
    )


def _key(name: str) -> str:
    """Return under which name something stands in the store: of this attempt, where torchrun starts ranks again."""
    return f"pase/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def _store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _tell_failure(kind: type[BaseException], error: BaseException) -> None:
    text = str(error) if isinstance(error, PaseError) else f"{kind.__name__}: {error}"
    # The rank that keeps the store may be gone, and whom this one would tell with it.
    with suppress(RuntimeError):
        _store().compare_set(_key("failure"), "", f"{dist.get_rank()} {text}")


def _told_failure(store: Any) -> tuple[int, str] | None:
    """Return the rank that failed first and why, where one has said so."""
    if not store.check([_key("failure")]):
        return None
    rank, _, why = store.get(_key("failure")).decode(errors="replace").partition(" ")
    return int(rank), why


def _lost_rank(error: BaseException) -> RankError:
    """Return the error that names the rank that failed, or those of which nothing is heard."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = f"rank {rank} of {world_size}"
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    try:
        store = _store()
        store.set(_key(f"lost/{rank}"), "")
        end_s = time.monotonic() + _TOLD_GRACE_S
        while (told := _told_failure(store)) is None and time.monotonic() < end_s:
            time.sleep(0.05)
        silent = [other for other in range(world_size) if not store.check([_key(f"lost/{other}")])]
    except RuntimeError:
        return RankError(f"{here} lost the store that all ranks meet at: whoever keeps it has ended ({said})")
    if told is not None:
        return RankError(f"{here} ended because rank {told[0]} failed: {told[1]}", told[0])
    names = ", ".join(map(str, silent)) or "none"
    return RankError(
        f"{here} lost a connection; ranks that do not answer and may have ended: {names} ({said})",
        silent[0] if len(silent) == 1 else None,
    )
