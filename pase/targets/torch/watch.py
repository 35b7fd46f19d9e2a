"""Monitor ranks: verify at start that they agree, and detect later which one is missing or diverges.

Each rank has a thread that writes heartbeats into the rendezvous store: that it is alive, and which passes it has
started. Rank 0 compares those of all ranks. A rank whose heartbeats stop, that starts another pass than the others, or
that makes no progress while they wait within one, is recorded in the store as failed. On every rank the thread reads
that, waits briefly for an error of the main thread, and ends the process with one line. The overhead of a step is one
letter in a buffer for each pass.
"""

import atexit
import hashlib
import json
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pase._version import __version__
from pase.errors import PaseError, ProgramError
from pase.targets.torch.failures import (
    TOLD_GRACE_S,
    RankError,
    default_store,
    is_started_here,
    key,
    known_failure,
    read_failure,
)
from pase.targets.torch.messages import told_by_all

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
"""Default time that ranks wait for a missing one, unless a caller or `PASE_TIMEOUT_S` sets it; as in PyTorch."""
_TIMEOUT = "PASE_TIMEOUT_S"
_LONGEST_BEAT_S = 1.0
_SHORTEST_BEAT_S = 0.1
_LONGEST_WINDOW = 2048
_WAITED_BEATS = 4
_SHARE = 0.75
"""Of the time-out, after which a rank is missing: before collectives fail, which know less."""
FORWARD, BACKWARD, HELD_BACKWARD, PIPELINE, HELD_PIPELINE = "F", "B", "H", "P", "Q"
_NOT_BEGUN, _ENDED = [-1], [-2]
"""Beats of ranks that have not begun, or have ended."""
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        FORWARD: "a forward pass",
        BACKWARD: "a backward pass",
        HELD_BACKWARD: "a backward pass under no_sync()",
        PIPELINE: "a step of a pipeline",
        HELD_PIPELINE: "a step of a pipeline under no_sync()",
    }
)


def missing_after_s(given: float | None = None) -> float:
    """Return how long ranks wait for each other: the given time, else that of the environment.

    Raises:
        ProgramError: The environment's value is not a number of seconds.
    """
    if given is not None:
        return given
    text = os.environ.get(_TIMEOUT, "")
    try:
        found = float(text) if text else DEFAULT_TIMEOUT_S
    except ValueError:
        found = 0.0
    if not 0 < found < 1e7:
        raise ProgramError(f"{_TIMEOUT} is {text!r}; expected a number of seconds above 0")
    return found


# -- what all have to agree on


def agree(make: Callable[[], tuple[T, Mapping[str, object]]]) -> T:
    """Return the result of a function, once all ranks have called it and agree; all ranks call it.

    Args:
        make: Returns its result, and values that must be equal on all ranks, by their names in messages.

    Raises:
        RankError: On all ranks: another one failed in `make`, or ranks differ. It names the rank and the difference.
        Exception: Any error of `make` on this rank.
    """
    if dist.get_world_size() == 1:
        return make()[0]
    failure: Exception | None = None
    result: Any = None
    own: dict[str, str] = {}
    try:
        result, values = make()
        own = {name: str(value) for name, value in values.items()}
    # The others are informed of any error; here it is raised unchanged.
    except Exception as error:  # noqa: BLE001
        failure = error
    text = None if failure is None else str(failure) if isinstance(failure, PaseError) else repr(failure)
    answers = told_by_all((text, own))
    if failure is not None:
        raise failure
    for rank, (problem, _) in enumerate(answers):
        if problem is not None:
            raise RankError(f"rank {rank} of {len(answers)} failed: {problem}", rank)
    differing = _differing([values for _, values in answers])
    if differing is not None:
        raise differing
    made: T = result
    return made


def digest(value: object) -> str:
    """Return a checksum of a value's text, for `agree`."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def versions() -> dict[str, object]:
    """Return the versions that ranks have to agree on."""
    return {"the version of PaSE": __version__, "the version of PyTorch": torch.__version__}


def _differing(of_ranks: Sequence[Mapping[str, str]]) -> RankError | None:
    """Return the error that names the ranks that differ from the majority, and the difference; None for none."""
    names = dict.fromkeys(name for own in of_ranks for name in own)
    usual = {name: Counter(own.get(name) for own in of_ranks).most_common(1)[0][0] for name in names}
    said: dict[str, list[int]] = {}
    first = len(of_ranks)
    for name in names:
        by_value: dict[str | None, list[int]] = {}
        for rank, own in enumerate(of_ranks):
            if own.get(name) != usual[name]:
                by_value.setdefault(own.get(name), []).append(rank)
        for value, ranks in by_value.items():
            first = min(first, *ranks)
            what = name if value is None or len(value) > 40 else f"{name} ({value}, not {usual[name]})"
            said.setdefault(what, []).extend(ranks)
    if not said:
        return None
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for what, ranks in said.items():
        by_ranks.setdefault(tuple(ranks), []).append(what)
    texts = [
        f"{_ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'} in {', '.join(whats)}"
        for ranks, whats in by_ranks.items()
    ]
    return RankError(f"{'; '.join(texts)}; start all {len(of_ranks)} ranks with the same", first)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


# -- passes


class Passes:
    """The passes that this process began, in order: a letter for each.

    Attributes:
        is_inside: Whether it is within one.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.is_inside = False
        self._first, self._checksum, self._letters = 0, 0, bytearray()

    def begin(self, letter: str) -> None:
        """Note that a pass begins."""
        self.is_inside = True
        self._letters += letter.encode()
        if len(self._letters) >= 2 * _LONGEST_WINDOW:
            old = bytes(self._letters[:_LONGEST_WINDOW])
            self._checksum = zlib.crc32(old, self._checksum)
            self._first += _LONGEST_WINDOW
            self._letters = self._letters[_LONGEST_WINDOW:]

    def end(self) -> None:
        self.is_inside = False

    def window(self) -> tuple[int, int, str]:
        """Return how many passes came before the last ones, their checksum, and the letters of the last ones."""
        while True:
            first, checksum, letters = self._first, self._checksum, self._letters
            text = letters.decode()
            # The other thread may have moved on in between.
            if first == self._first:
                return first, checksum, text


PASSES = Passes()
"""Those of this process."""


def first_difference(windows: Sequence[tuple[int, int, str]]) -> tuple[int, list[str]] | None:
    """Return the number of the first pass that differs, and what each rank started; None where none differs so far.

    A rank that has not started that pass has "". Passes older than the windows are "?".
    """
    start = max(first for first, _, _ in windows)
    if any(first + len(letters) < start for first, _, letters in windows):
        # Ranks are too far apart to be compared now.
        return None
    checksums = [zlib.crc32(letters[: start - first].encode(), checksum) for first, checksum, letters in windows]
    if len(set(checksums)) > 1:
        usual = Counter(checksums).most_common(1)[0][0]
        return start, ["?" if checksum == usual else "!" for checksum in checksums]
    tails = [letters[start - first :] for first, _, letters in windows]
    for number in range(max(map(len, tails))):
        begun = [tail[number : number + 1] for tail in tails]
        if len(set(filter(None, begun))) > 1:
            return start + number, begun
    return None


# -- the thread


class Watch:
    """Writes this rank's heartbeats, and ends the process where a rank failed; on rank 0 it also detects failures.

    Args:
        store: A separate connection to the store.
        limit_s: How long a rank may be missing.
        is_over: Returns whether the process group is gone.
        end: Ends the process with a line.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        limit_s: float,
        is_over: Callable[[], bool],
        end: Callable[[str], None],
    ) -> None:
        self._store, self._rank, self._world_size, self._limit_s = store, rank, world_size, limit_s
        self._is_over, self._end = is_over, end
        many_s = world_size / 1000
        self._beat_s = max(many_s, min(_LONGEST_BEAT_S, max(_SHORTEST_BEAT_S, limit_s / 20)))
        self._number = 0
        self._differences = 0
        # By rank: its last entry, and for how long it has written the same one without starting a pass.
        self._beats: dict[int, Any] = {}
        self._silent_s: dict[int, float] = {}
        self._still_s: dict[int, float] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin; the end of the program is the end of the watch."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._watch, self._guard)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the threads."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_LONGEST_BEAT_S)

    def _watch(self) -> None:
        failed_s: float | None = None
        before_s = time.monotonic()
        try:
            while not self._stopped.wait(self._beat_s):
                if self._is_over():
                    break
                # A process that was stopped itself has not heard of others for that time, which is not their fault.
                now_s = time.monotonic()
                passed_s, before_s = min(now_s - before_s, 2 * self._beat_s), now_s
                self._write()
                self._compare(passed_s)
                if read_failure(self._store) is not None:
                    failed_s = failed_s or now_s
                    # Rank 0 may host the store, where the others read the record.
                    if now_s > failed_s + TOLD_GRACE_S + (0.0 if self._rank else 2 * self._beat_s):
                        self._end(self._line("it holds no failure"))
            self._stopped.set()
            self._store.set(key(f"beat/{self._rank}"), json.dumps(_ENDED))
        except RuntimeError as error:
            if not self._stopped.wait(TOLD_GRACE_S) and not self._is_over():
                self._end(self._line(str(error).strip().splitlines()[0]))

    def _guard(self) -> None:
        """End the process where the store does not respond for too long: its host may be stopped."""
        before, silent_s = -1, 0.0
        while not self._stopped.wait(self._beat_s):
            silent_s = 0.0 if self._number != before else silent_s + self._beat_s
            before = self._number
            if silent_s > self._limit_s and not self._is_over():
                self._end(self._line(f"no answer for {self._limit_s:g} s"))

    def _line(self, why: str) -> str:
        """Return why this process ends; why: what happened to the store, where no rank is known to have failed."""
        here, told = f"rank {self._rank} of {self._world_size}", known_failure(self._store)
        if told is None:
            return (
                f"{here} lost the store that all ranks meet at: rank 0 or torchrun's agent, which keeps it, is stopped "
                f"or has ended ({why})"
            )
        rank, failure = told
        return (
            f"{here} failed: {failure}" if rank == self._rank else f"{here} ended because rank {rank} failed: {failure}"
        )

    def _write(self) -> None:
        first, checksum, letters = PASSES.window()
        self._number += 1
        beat = [self._number, PASSES.is_inside, first, checksum, letters]
        self._store.set(key(f"beat/{self._rank}"), json.dumps(beat))

    def _compare(self, passed_s: float) -> None:
        """Detect missing ranks: rank 0 checks all, the others check rank 0."""
        ranks = list(range(self._world_size)) if self._rank == 0 else [0]
        names = [key(f"beat/{rank}") for rank in ranks]
        if self._store.check(names):
            beats = [json.loads(raw) for raw in self._store.multi_get(names)]
        else:
            beats = [_NOT_BEGUN] * len(ranks)
        for rank, beat in zip(ranks, beats, strict=True):
            before = self._beats.get(rank)
            self._silent_s[rank] = self._silent_s.get(rank, 0.0) + passed_s if beat == before else 0.0
            has_moved = before is None or beat[1:] != before[1:]
            self._still_s[rank] = 0.0 if has_moved else self._still_s[rank] + passed_s
            self._beats[rank] = beat
            if self._silent_s[rank] > self._limit_s and beat != _ENDED and not self._is_late(rank, beat):
                why = f"it has not been heard of for {self._limit_s:g} s: it is stopped, or its host is gone"
                self._fail(rank, why)
        if self._rank == 0:
            self._compare_passes()

    def _is_late(self, rank: int, beat: Any) -> bool:
        """Return whether it is another rank that was not heard of from the beginning."""
        return beat == _NOT_BEGUN and bool(self._store.check([key(f"beat/{rank}")]))

    def _compare_passes(self) -> None:
        windows = {rank: (beat[2], beat[3], beat[4]) for rank, beat in self._beats.items() if len(beat) > 1}
        found = first_difference(list(windows.values())) if windows else None
        self._differences = 0 if found is None else self._differences + 1
        # Ranks that reach that pass later show which one diverges from the majority.
        if found is not None and (all(found[1]) or self._differences > _WAITED_BEATS):
            number, begun = found
            letters = dict(zip(windows, begun, strict=True))
            (usual, _), *_ = Counter(filter(None, begun)).most_common(1)
            rank = next(rank for rank, letter in letters.items() if letter not in ("", usual))
            others = [other for other, letter in letters.items() if letter == usual]
            own, theirs = (_WORDS.get(letter, "another one") for letter in (letters[rank], usual))
            self._fail(
                rank,
                f"pass {number + 1} of its training is {own}, and that of {_ranks(others)} {theirs}; all ranks have to "
                "call forward, backward and no_sync in the same order",
            )
            return
        inside = [rank for rank, beat in self._beats.items() if len(beat) > 1 and beat[1]]
        outside = [rank for rank in self._beats if rank not in inside]
        if inside and outside and min(self._still_s.values()) > self._limit_s:
            self._fail(
                outside[0],
                f"it began no pass for {self._limit_s:g} s, while {_ranks(inside)} waited within one",
            )

    def _fail(self, rank: int, why: str) -> None:
        self._store.compare_set(key("failure"), "", f"{rank} {why}")


_WATCHED: list[Any] = []
"""The process group that has a watch, if any."""


def watch(limit_s: float) -> None:
    """Monitor the ranks of the default process group from now on; all ranks call it.

    Nothing is done for a group of one, or one without a TCP store.
    """
    group, store = dist.group.WORLD, default_store()
    if [group] == _WATCHED or dist.get_world_size() == 1 or not isinstance(store, dist.TCPStore):
        return
    _WATCHED[:] = [group]
    PASSES.clear()
    own = dist.TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(limit_s, 10.0))
    )

    def is_over() -> bool:
        return not dist.is_initialized() or dist.group.WORLD is not group

    Watch(
        own, dist.get_rank(), dist.get_world_size(), limit_s=_SHARE * limit_s, is_over=is_over, end=_end_process
    ).start()


def _end_process(line: str) -> None:
    if not is_started_here():
        sys.stderr.write(f"error: {line}\n")
        sys.stderr.flush()
    # The main thread may wait in a collective, where no exception reaches it.
    os._exit(1)
