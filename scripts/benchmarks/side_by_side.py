"""Programs of two checkouts side by side: how long they take to build, and how long their steps take.

Each checkout searches, writes and runs its own programs in processes of its own, through its command line, so that
either may be of any version. Runs of the two take turns, and CPU seconds count beside those that pass: what else the
machine does then falls on both alike.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pase.graph import Scalar
from scripts.benchmarks.tables import ROOT, markdown

RUNS = 2
"""Of the program of each checkout."""

STEPS = 100
"""After one that is not counted."""

_COMMAND = "from pase.cli import main; main()"

_TIMED = """\
import os, runpy, sys, time

# TensorFlow's own import is none of the program's; without Keras, as programs import it.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1"}
import tensorflow

begin = time.process_time()


class Timed:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write(text.replace("\\n", f"\\t{time.process_time() - begin}\\n"))

    def __getattr__(self, name):
        return getattr(self.stream, name)


sys.stdout, sys.argv = Timed(sys.stdout), sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program and puts behind each of its lines the CPU seconds since its first one, those of all threads."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network on a number of devices. arguments: of its builder. flop_per_s: of a device, if not the machine's."""

    network: str
    devices: int
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    flop_per_s: float | None = None

    @property
    def options(self) -> list[str]:
        """What `pase search` is called with."""
        given = [f"--arg={name}={value}" for name, value in self.arguments.items()]
        return [self.network, "--devices", str(self.devices), *given] + (
            ["--flops", f"{self.flop_per_s}"] if self.flop_per_s else []
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """CPU seconds, and those that passed, of one run."""

    cpu_s: float
    elapsed_s: float


def table(builds: Sequence[Case], steps: Sequence[Case], against: Path) -> str:
    """Return a table of what programs of another checkout take, and of this one."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="pase-bench-") as name:
        for what, cases, timed in (("build", builds, built), ("step", steps, stepped)):
            for case in cases:
                found = _both(case, (against, ROOT), Path(name), timed)
                rows.append([case.network, str(case.devices), what, *row(*found)])
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return markdown(
        [
            *("network", "p", "time of", "before, CPU s: least", "median", "now: least", "median"),
            *("now ÷ before: least", "median", "seconds passed: least", "median"),
        ],
        rows,
    )


def row(before: Sequence[Timing], now: Sequence[Timing]) -> list[str]:
    """Return the cells of the runs of two programs: CPU seconds of each, then the ratios of both kinds of seconds."""
    cells, ratios = [], []
    for runs in (before, now):
        cells += [f"{of(run.cpu_s for run in runs):.3g}" for of in (min, median)]
    for values in (lambda run: run.cpu_s, lambda run: run.elapsed_s):
        ratios += [f"{of(map(values, now)) / of(map(values, before)):.2f}" for of in (min, median)]
    return [*cells, *ratios]


def _both(case: Case, checkouts: Sequence[Path], folder: Path, timed: Any) -> tuple[list[Timing], list[Timing]]:
    """Return the runs of the programs of two checkouts, in turns."""
    scripts = [_written(case, checkout, folder / f"{i}.py") for i, checkout in enumerate(checkouts)]
    found: tuple[list[Timing], list[Timing]] = ([], [])
    for _ in range(RUNS):
        for runs, checkout, script in zip(found, checkouts, scripts, strict=True):
            runs.append(timed(checkout, script))
    return found


def _written(case: Case, checkout: Path, script: Path) -> Path:
    """Write a checkout's program of the strategy that it finds."""
    plan = script.with_suffix(".json")
    for words in (["search", *case.options, "-o", str(plan)], ["emit", str(plan), "-o", str(script)]):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _COMMAND, *words], env=_environment(checkout), capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"pase {' '.join(words)} of {checkout} failed:\n{done.stderr}")
    return script


def built(checkout: Path, script: Path) -> Timing:
    """Return what a program takes from its first line to its first step."""
    with closing(_events(checkout, script, steps=1)) as events:
        cpu_s, event = next(found for found in events if found[1]["event"] == "built")
    return Timing(cpu_s=cpu_s, elapsed_s=event["build_time_s"])


def stepped(checkout: Path, script: Path) -> Timing:
    """Return the medians of a program's steps."""
    found = list(_events(checkout, script, steps=STEPS + 1))
    at = [cpu_s for cpu_s, event in found if event["event"] == "step"]
    each = [after - before for before, after in pairwise(at)]
    return Timing(cpu_s=median(each), elapsed_s=found[-1][1]["step_time_s"])


def _events(checkout: Path, script: Path, *, steps: int) -> Generator[tuple[float, dict[str, Any]], None, None]:
    """Yield the events of a program, each with the CPU seconds until then; its process ends with the generator."""
    command = [sys.executable, "-P", "-c", _TIMED, str(script), "--steps", str(steps), "--json"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment(checkout)
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event, _, cpu_s = line.rpartition("\t")
                yield float(cpu_s), json.loads(event)
            if process.wait():
                errors.seek(0)
                raise SystemExit(f"a program of {checkout} failed:\n{errors.read().decode()}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _environment(checkout: Path) -> dict[str, str]:
    # The folder that the benchmark is called from, which has a PaSE of its own, is kept out by -P.
    return {**os.environ, "PYTHONPATH": str(checkout.resolve())}
