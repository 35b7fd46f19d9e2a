"""Report failures: ranks record in the rendezvous store why they end, and name the rank that broke a collective."""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist

from pase.errors import PaseError, ProgramError

RUN_PREFIX = "pase-"
"""Prefix of the run names of `run_program`; the rest is secret."""
TOLD_GRACE_S = 2.0
"""Seconds that a failed rank has to end after it has reported the failure."""
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|peer|timed? ?out|remote process exited|gloo|nccl",
    re.IGNORECASE,
)
"""Messages of collectives' errors when another rank is gone."""
_LONGEST_TOLD = 2000
_READ: dict[tuple[str, int], tuple[int, str]] = {}
"""Cache of entries read from stores, by their address: the rank that failed, and why."""


class RankError(ProgramError):
    """A rank of a parallel program failed, was killed, or does not respond; rank: its number, None if unknown."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type["RankError"], tuple[str, int | None]]:
        return RankError, (str(self), self.rank)


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Convert the error of a broken collective to a RankError that names the rank that failed, if known.

    Raises:
        RankError: Communication with another rank broke.
    """
    try:
        yield
    except PaseError:
        raise
    except RuntimeError as error:
        if not _is_of_lost_peer(error) or not dist.is_initialized():
            raise
        raise _lost_rank(error) from error


def tell_failure(error: BaseException) -> bool:
    """Record in the store why this rank ends; return whether `run_program` started it, which reports errors itself."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if not _is_of_lost_peer(error):
        # The rank that hosts the store may be gone, and with it the others to inform.
        with suppress(RuntimeError):
            write_failure(default_store(), dist.get_rank(), type(error), error)
    return is_started_here()


def is_started_here() -> bool:
    """Return whether `run_program` started this rank."""
    return run_name().startswith(RUN_PREFIX)


def tell_of_failures() -> None:
    """Make an error that ends this rank be recorded in the store, with the lost rank if there is one."""
    before = sys.excepthook
    if getattr(before, "tells_of_failures", False):
        return

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if _is_of_lost_peer(error) and not isinstance(error, RankError):
            sys.stderr.write(f"error: {_lost_rank(error)}\n")
        tell_failure(error)
        sys.stderr.flush()

    told.tells_of_failures = True  # type: ignore[attr-defined]
    sys.excepthook = told


# -- the store


def run_name() -> str:
    """Return the name of the run to which this process's rank belongs, "" where there is none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def key(name: str, run: str | None = None) -> str:
    """Return the name of an entry in the store for this run, and for this attempt where torchrun restarts.

    run: name of a run of `run_program`, which never restarts; default: the run of this rank.
    """
    attempt = "0" if run else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"pase/{run or run_name()}/{attempt}/{name}"


def default_store() -> Any:
    """Return the store of the process group, without the prefixes of its names."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def write_failure(store: Any, rank: int, kind: type[BaseException], error: BaseException) -> None:
    """Record that a rank failed, unless a failure is recorded already."""
    text = str(error) if isinstance(error, PaseError) else f"{kind.__name__}: {error}"
    store.compare_set(key("failure"), "", f"{rank} {text}")


def read_failure(store: Any, run: str | None = None) -> tuple[int, str] | None:
    """Return the rank that failed first and why, if one is recorded."""
    name = key("failure", run)
    known = known_failure(store)
    if known is not None or not store.check([name]):
        return known
    rank, _, why = store.get(name).decode(errors="replace").partition(" ")
    # It is written to a terminal: control characters are removed.
    shown = "".join(x for x in why[:_LONGEST_TOLD] if x.isprintable() or x == "\n")
    if not rank.isdecimal():
        return None
    if isinstance(store, dist.TCPStore):
        _READ[store.host, store.port] = int(rank), shown
    return int(rank), shown


def known_failure(store: Any) -> tuple[int, str] | None:
    """Return what `read_failure` has read from a store, which may be gone since then."""
    return _READ.get((store.host, store.port)) if isinstance(store, dist.TCPStore) else None


def _is_of_lost_peer(error: BaseException) -> bool:
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, (RankError, *kinds)) or (
        isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None
    )


def _lost_rank(error: BaseException) -> RankError:
    """Return the error that names the rank that failed, or those that do not respond."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = f"rank {rank} of {world_size}"
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    store = default_store()
    told = known_failure(store)
    try:
        store.set(key(f"lost/{rank}"), "")
        end_s = time.monotonic() + TOLD_GRACE_S
        while told is None and time.monotonic() < end_s:
            time.sleep(0.05)
            told = read_failure(store)
        silent = [other for other in range(world_size) if not store.check([key(f"lost/{other}")])]
    except RuntimeError:
        told = known_failure(store)
        if told is None:
            return RankError(f"{here} lost the store that all ranks meet at: its host has ended ({said})")
    if told is not None:
        return RankError(f"{here} ended because rank {told[0]} failed: {told[1]}", told[0])
    names = ", ".join(map(str, silent)) or "none"
    return RankError(
        f"{here} lost a connection; ranks that do not answer and may have ended: {names} ({said})",
        silent[0] if len(silent) == 1 else None,
    )
