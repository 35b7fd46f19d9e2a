"""What a start takes, as a whole process, beside Python's own and NumPy's: `import pase`, `pase --help`, completion."""

import sys
from collections.abc import Mapping

from scripts.benchmarks.tables import markdown, publish
from scripts.benchmarks.timing import Timing, time_process

RUNS = 11

BARS_S: Mapping[str, float] = {"import pase": 0.25, "pase --help": 0.4}
"""What these are to take at most."""

_RUN = "from pase.cli import main; main()"
_COMPLETE = (
    "import os; os.environ.update(_PASE_COMPLETE='bash_complete', COMP_WORDS='{words}', COMP_CWORD='{position}'); "
)

STARTS: Mapping[str, tuple[str, ...]] = {
    "python": ("pass",),
    "import numpy": ("import numpy",),
    "import pase": ("import pase",),
    "from pase import *": ("from pase import *",),
    "pase --version": (_RUN, "--version"),
    "pase --help": (_RUN, "--help"),
    "pase search --help": (_RUN, "search", "--help"),
    "pase s⇥": (_COMPLETE.format(words="pase s", position=1) + _RUN.replace("main()", "main([])"),),
    "pase search res⇥": (_COMPLETE.format(words="pase search res", position=2) + _RUN.replace("main()", "main([])"),),
}
"""Programs with their arguments, by what they are called here; ⇥: completion."""


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    publish("benchmarks.md", {"startup": table(measure())}, write=write)


def measure(runs: int = RUNS) -> dict[str, Timing]:
    """Return how long each start takes."""
    return {name: time_process([sys.executable, "-c", *program], runs) for name, program in STARTS.items()}


def table(timings: Mapping[str, Timing]) -> str:
    """Return the times, also as multiples of an interpreter's and of one that imports NumPy."""
    python, numpy = timings["python"], timings["import numpy"]
    rows = [
        [
            f"`{name}`",
            f"{timing.min_s:.3f}",
            f"{timing.median_s:.3f}",
            f"{timing.median_s / python.median_s:.1f}",
            f"{timing.median_s / numpy.median_s:.2f}",
            f"{BARS_S[name]:.2f}" if name in BARS_S else "",
        ]
        for name, timing in timings.items()
    ]
    return markdown(["start", "least, s", "median, s", "÷ `python`", "÷ `import numpy`", "at most, s"], rows)
