"""The ranks of a PyTorch program: started on this machine, joined into one process group, ended together.

Local ranks have the environment of torchrun, so that a program cannot distinguish the two: this process hosts their
rendezvous store, which listens on loopback only, at a port that the system chooses. If a rank fails or is killed, all
others are ended at once, and the error names it.
"""

import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from pase.common.processes import dying_with_us, end_all, ending_text, package_environment
from pase.errors import ProgramError
from pase.targets.torch.collectives import connect, made_once
from pase.targets.torch.devices import accelerator, carriers
from pase.targets.torch.failures import (
    LOST_PEER,
    RUN_PREFIX,
    TOLD_GRACE_S,
    RankError,
    key,
    read_failure,
    tell_of_failures,
)
from pase.targets.torch.watch import missing_after_s, watch

LOOPBACK = "127.0.0.1"

T = TypeVar("T")

_POLL_S = 0.02
_GRACE_S = 0.5
"""How long others have to end, too, before it is judged which rank failed first."""
_SHOWN_LINES = 40


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

    Rank 0 inherits our output and errors. No process is left running; a keyboard interrupt ends all ranks.

    Args:
        arguments: Arguments of Python: a script and its own arguments.
        ranks: Number of processes.
        threads: Threads of each; None to divide this machine's cores among them.
        timeout_s: Seconds after which running ranks are ended, None for never.
        environment: Additional variables for all ranks.

    Raises:
        RankError: A rank failed, was killed or timed out; the message names it, with its last line of error.
    """
    if ranks < 1:
        raise ProgramError(f"{ranks} ranks were asked for; expected 1 or more")
    # Ranks trust entries under this name in the store, which other users of this machine do not know.
    run = f"{RUN_PREFIX}{secrets.token_hex(16)}"
    store = _loopback_store(0, timedelta(seconds=60), wait_for_workers=False)
    threads = threads or max(1, _cores() // ranks)
    started: list[_Rank] = []
    try:
        for rank in range(ranks):
            given = {**rank_environment(rank, ranks, store.port, threads, run), **(environment or {})}
            started.append(_start(arguments, rank, given))
        _watch(started, store, run, timeout_s)
    finally:
        end_all(each.process for each in started)
        for each in started:
            each.finish()


def call(
    function: Callable[..., T],
    *arguments: object,
    ranks: int,
    device: str | None = None,
    threads: int | None = None,
    timeout_s: float | None = None,
) -> list[T]:
    """Return the results of a function on each of several local ranks, joined into one process group.

    Args:
        function: Function of an importable module.
        arguments: Its arguments on every rank; picklable.
        ranks: Number of processes.
        device: "cpu" or "cuda", see `join`.
        threads: Threads of each; None to divide this machine's cores among them.
        timeout_s: Seconds after which running ranks are ended, None for never.

    Raises:
        RankError: As for `run_program`.
    """
    if function.__module__ == "__main__":
        raise ProgramError(
            f"{function.__qualname__} is in the main program, which {ranks} ranks cannot import; put it into a module"
        )
    with tempfile.TemporaryDirectory(prefix="pase-ranks-") as folder:
        try:
            (Path(folder) / "call").write_bytes(pickle.dumps((sys.path, device, pickle.dumps((function, arguments)))))
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
    """Run, as one of its ranks, the call that `call` has written to a folder, and write the result there."""
    sys.path[:], device, inner = pickle.loads((Path(folder) / "call").read_bytes())
    # Immediately, so that later failures are reported to the others.
    ranks = join(device=device)
    function, arguments = pickle.loads(inner)
    result = function(*arguments)
    (Path(folder) / f"result-{ranks.rank}").write_bytes(pickle.dumps(result))
    leave()


def rank_environment(rank: int, ranks: int, port: int, threads: int, run: str = "none") -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank on one machine.

    Args:
        rank: Number of the rank.
        ranks: How many there are.
        port: Of the store on loopback.
        threads: Of each rank.
        run: Name of the run, under which ranks find each other's messages in the store.
    """
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
        "TORCHELASTIC_RUN_ID": run,
        "ROLE_NAME": "default",
        **_loopback_of_gloo(),
    }


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A rank that was started here; lines: the last ones of its standard error, which a thread reads."""

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
            # A process that the rank started in a session of its own may hold the pipe open.
            self.reader.join(1.0)


def _start(arguments: Sequence[str], rank: int, environment: Mapping[str, str]) -> _Rank:
    process = subprocess.Popen(
        dying_with_us([sys.executable, *arguments]),
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=package_environment(environment),
        # This process handles interrupts; processes of a rank end with it.
        start_new_session=True,
    )
    assert process.stderr is not None
    started = _Rank(rank=rank, process=process)
    started.reader = threading.Thread(target=started.read, args=(process.stderr,), daemon=True)
    started.reader.start()
    return started


def _watch(started: Sequence[_Rank], store: Any, run: str, timeout_s: float | None) -> None:
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    fallen: list[_Rank] = []
    asked_s = time.monotonic()
    told_s: float | None = None
    while running := [each for each in started if each.status is None]:
        fallen += [each for each in started if each.status and each not in fallen]
        now_s = time.monotonic()
        if told_s is None and now_s > asked_s + TOLD_GRACE_S / 4:
            # A rank with other running threads does not end on an error, and the others would wait for it.
            asked_s, told_s = now_s, now_s if read_failure(store, run) else None
        if fallen or (told_s is not None and now_s > told_s + TOLD_GRACE_S):
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
    first, why = _first_failure(started, fallen, store, run)
    if first.rank and first.lines:
        prefix = f"[rank{first.rank}]: "
        sys.stderr.write("".join(f"{prefix}{line.removeprefix(prefix)}\n" for line in first.lines))
        sys.stderr.flush()
    others = "; the others were ended" if len(started) > 1 else ""
    raise RankError(f"rank {first.rank} of {len(started)} {why}{others}", first.rank)


def _first_failure(started: Sequence[_Rank], fallen: Sequence[_Rank], store: Any, run: str) -> tuple[_Rank, str]:
    """Return the rank that did not fail for want of another, and what happened to it."""
    killed = next((each for each in fallen if (each.status or 0) < 0), None)
    if killed is not None:
        return killed, ending_text(killed.status or 0)
    told = read_failure(store, run)
    if told is not None and told[0] < len(started):
        return started[told[0]], f"failed: {told[1]}"
    first = next((each for each in fallen if not LOST_PEER.search(each.last_line)), fallen[0])
    return first, ending_text(first.status or 0) + (f": {first.last_line}" if first.last_line else "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loopback_of_gloo() -> dict[str, str]:
    """Return variables that make gloo listen on loopback, instead of resolving this machine's name."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {} if "GLOO_SOCKET_IFNAME" in os.environ or not names else {"GLOO_SOCKET_IFNAME": names[0]}


# -- joining the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The process group of this process: its rank, the number of ranks, and the device of its tensors."""

    rank: int
    world_size: int
    device: Any


def join(*, device: str | None = None, timeout_s: float | None = None) -> Ranks:
    """Join the process group of this program, which is created from torchrun's environment if it does not exist yet.

    A program started directly is a group of one. The backend is NCCL if each local rank has a GPU of its own, else
    gloo. From then on an error that ends this rank is recorded in the store for the others, and a missing rank ends all
    (`watch.py`).

    Args:
        device: "cpu" or "cuda"; None for GPUs where each local rank has one.
        timeout_s: How long a rank waits for the others, and for each collective; default: the environment variable
            PASE_TIMEOUT_S, or 600.

    Raises:
        RankError: Other ranks did not join in time.
        ProgramError: The environment is not that of torchrun.
    """
    limit_s = missing_after_s(timeout_s)
    if not dist.is_initialized():
        _make_group(device, timedelta(seconds=limit_s))
    tell_of_failures()
    watch(limit_s)
    rank: int = dist.get_rank()
    world_size: int = dist.get_world_size()
    ranks = Ranks(rank=rank, world_size=world_size, device=_device(device))
    if world_size > 1:
        made_once("all ranks", connect)
    return ranks


def leave() -> NoReturn:
    """End this process, well, once all ranks are done with the process group."""
    # A rank that goes before the others are ready breaks their connections.
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo that lets go of a tensor while Python is taken down would abort the process.
    os._exit(0)


def _make_group(device: str | None, timeout: timedelta) -> None:
    if "RANK" not in os.environ:
        dist.init_process_group(**_backend(device, 1), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, world_size = _number("RANK", None), _number("WORLD_SIZE", None)
    local = _number("LOCAL_WORLD_SIZE", world_size)
    if not 0 <= rank < world_size:
        raise ProgramError(f"RANK is {rank} of WORLD_SIZE {world_size}; expected 0 to {world_size - 1}")
    if local == world_size:
        os.environ.update(_loopback_of_gloo())
    where = f"{_text('MASTER_ADDR')}:{_number('MASTER_PORT', None)}"
    try:
        store = _store_of_all(rank, world_size, timeout)
        store.set(key(f"joined/{rank}"), "")
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} cannot reach the store at {where}, where all ranks meet: {error}", 0) from error
    try:
        group_store = dist.PrefixStore(key("group"), store)
        backend = _backend(device, local)
        dist.init_process_group(**backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        missing = [other for other in range(world_size) if not store.check([key(f"joined/{other}")])]
        names = ", ".join(map(str, missing)) or "none is missing"
        raise RankError(
            f"rank {rank} waited {timeout.total_seconds():g} s for the other ranks of {world_size}; missing: {names} "
            f"({error})",
            missing[0] if missing else None,
        ) from error


def _store_of_all(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return the store of torchrun's environment, which rank 0 hosts where no agent does."""
    address, port = _text("MASTER_ADDR"), _number("MASTER_PORT", None)
    is_kept_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host = LOOPBACK if address == "localhost" else address
    if is_kept_here and _is_loopback(host):
        # A port at which a store of this process listens already is one that PyTorch shares.
        with suppress(OSError):
            return _loopback_store(port, timeout, host=host, world_size=world_size)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


def _loopback_store(port: int, timeout: timedelta, *, host: str = LOOPBACK, **options: Any) -> Any:
    """Return a store that listens on loopback only; PyTorch's own listens on all interfaces.

    Raises:
        OSError: The port is in use.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(socket.SOMAXCONN)
        number = listening.getsockname()[1]
        # From here on it is the store's.
        file = listening.detach()
    return dist.TCPStore(host, number, is_master=True, timeout=timeout, master_listen_fd=file, **options)


def _is_loopback(address: str) -> bool:
    try:
        return IPv4Address(address).is_loopback
    except ValueError:
        return False


def _backend(device: str | None, local_ranks: int) -> dict[str, Any]:
    """Return by what backends, and on which device, a process group is made."""
    kind = accelerator()
    if device == "cpu" or kind is None or torch.accelerator.device_count() < local_ranks:
        return {"backend": "gloo"}
    backend = dist.get_default_backend_for_device(kind)
    if backend == "gloo" or not dist.is_backend_available(backend):
        return {"backend": "gloo"}
    own = torch.device(kind, _number("LOCAL_RANK", 0))
    torch.accelerator.set_device_index(own.index)
    # With a given device, a group creates its communicator immediately.
    return {"backend": f"cpu:gloo,{kind}:{backend}", "device_id": own}


def _device(asked: str | None) -> torch.device:
    """Set the current device of this rank, and return it.

    Args:
        asked: Its type; default: accelerators, if the process group has a backend for them.
    """
    kind = accelerator()
    if asked not in (None, "cpu", kind):
        raise ProgramError("a GPU was asked for, and PyTorch finds none; leave the device out")
    is_carried = carriers().get(str(kind), "gloo") != "gloo"
    if kind is None or asked == "cpu" or (asked is None and not is_carried):
        return torch.device("cpu")
    torch.accelerator.set_device_index(_device_index())
    return torch.device(kind, _device_index())


def _device_index() -> int:
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return int(bound.index)
    count = int(torch.accelerator.device_count())
    if "LOCAL_RANK" in os.environ:
        return _number("LOCAL_RANK", 0) % count
    # Not started by torchrun: the program has set a device, or ranks take the devices round-robin.
    return int(torch.accelerator.current_device_index() or dist.get_rank() % count)


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
