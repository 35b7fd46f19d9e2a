"""Whole-process timing: what a user waits for, the interpreter's start and every import included."""

import resource
import subprocess
import sys
from dataclasses import dataclass
from statistics import median
from time import perf_counter

RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """median_s, min_s, max_s: wall-clock seconds of a process over several runs after one that is not counted."""

    median_s: float
    min_s: float
    max_s: float


def time_process(arguments: list[str], runs: int = RUNS) -> Timing:
    """Return how long a command takes as a whole process; SystemExit if it fails."""
    times = []
    for run in range(runs + 1):
        start_s = perf_counter()
        finished = subprocess.run(arguments, capture_output=True, text=True, check=False)
        elapsed_s = perf_counter() - start_s
        if finished.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed:\n{finished.stderr}")
        if run:
            times.append(elapsed_s)
    return Timing(median_s=median(times), min_s=min(times), max_s=max(times))


def time_pase(arguments: str, runs: int = RUNS) -> Timing:
    """Return how long `pase ARGUMENTS` takes as a whole process."""
    return time_process([sys.executable, "-c", "from pase.cli import main; main()", *arguments.split()], runs)


def time_bare_numpy() -> Timing:
    """Return how long an interpreter takes that imports NumPy and ends: the unit that ratios are given in."""
    return time_process([sys.executable, "-c", "import numpy"])


def children_peak_bytes() -> int:
    """Return the most memory that any finished child process held."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
