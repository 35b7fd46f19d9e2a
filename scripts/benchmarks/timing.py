"""Whole-process timing: what a user waits for, the interpreter's start and every import included."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

from scripts.benchmarks.tables import ROOT

RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """median_s, min_s, max_s: wall-clock seconds of a process over several runs after one that is not counted.

    peak_bytes: the most memory that it held in any of them.
    """

    median_s: float
    min_s: float
    max_s: float
    peak_bytes: int


def time_process(arguments: list[str], runs: int = RUNS) -> Timing:
    """Return how long a command takes as a whole process; SystemExit if it fails."""
    times, peak_bytes = [], 0
    for run in range(runs + 1):
        with TemporaryFile() as errors:
            start_s = perf_counter()
            process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
            elapsed_s = perf_counter() - start_s
            # The process is already waited for; without this, Popen would try again.
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                errors.seek(0)
                raise SystemExit(f"{' '.join(arguments)} failed:\n{errors.read().decode()}")
        peak_bytes = max(peak_bytes, usage.ru_maxrss * 1024)
        if run:
            times.append(elapsed_s)
    return Timing(median_s=median(times), min_s=min(times), max_s=max(times), peak_bytes=peak_bytes)


def time_pase(arguments: str, runs: int = RUNS) -> Timing:
    """Return how long `pase ARGUMENTS` takes as a whole process."""
    return time_process([sys.executable, "-c", "from pase.cli import main; main()", *arguments.split()], runs)


def in_own_process(module: str, function: str, *arguments: str) -> dict[str, Any]:
    """Return what a function of a benchmark prints last, an object in JSON, in a process of its own.

    With what it finds goes time_s, of the whole process; an empty object stays empty.
    """
    code = f"from scripts.benchmarks import {module}; {module}.{function}(*{arguments!r})"
    start_s = perf_counter()
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return {**found, "time_s": perf_counter() - start_s} if found else found


def time_bare_numpy() -> Timing:
    """Return how long an interpreter takes that imports NumPy and ends: the unit that ratios are given in."""
    return time_process([sys.executable, "-c", "import numpy"])
