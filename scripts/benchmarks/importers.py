"""Models of other frameworks: time, memory, vertices, and what their frameworks count; each in its own process."""

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

from pase.importers.frameworks import import_model
from scripts.benchmarks.models import MODELS
from scripts.benchmarks.tables import markdown, publish

LIMIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of: {', '.join(MODELS)} [all]")


def main(*, write: bool, models: list[str]) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise SystemExit(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    rows = []
    for name in models or MODELS:
        rows.append(_row(name))
        print(" | ".join(rows[-1]), flush=True)
    headers = [
        *("model", "operators", "vertices", "vertices, about", "parameters", "FLOP of products"),
        *("generic", "made, s", "imported, s", "peak memory, MB"),
    ]
    publish("benchmarks.md", {"importers": markdown(headers, rows)}, write=write and not models)


def _row(name: str) -> list[str]:
    found = _run(name)
    if "failed" in found:
        return [name, str(found["failed"]), *[""] * 8]
    return [
        name,
        f"{found['operators']:,}",
        f"{found['vertices']:,}",
        f"{found['expected']:,}",
        _beside(found["parameters"], found["counted_parameters"]),
        _beside(found["flop"], found["counted_flop"]),
        f"{found['generic']:,}",
        f"{found['made_s']:.1f}",
        f"{found['time_s']:.1f}",
        f"{found['peak_bytes'] / 1e6:.0f}",
    ]


def _beside(ours: float, theirs: float | None) -> str:
    """Return a number with what the framework says of it: the same, another, or nothing."""
    if theirs is None:
        return f"{ours:,.0f}"
    return f"{ours:,.0f} =" if ours == theirs else f"{ours:,.0f} ≠ {theirs:,.0f}"


def _run(name: str) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "scripts.benchmarks.importers", name]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {LIMIT_S:.0f} s"}
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"failed": f"failed: {reason[0][:80]}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _child(name: str) -> None:
    """Import one model; print what is found as one line of JSON."""
    warnings.simplefilter("ignore")
    make, _, expected = MODELS[name]
    start_s = perf_counter()
    made = make()
    made_s = perf_counter()
    model = import_model(made.source)
    graph = model.lowered.graph
    end_s = perf_counter()
    peak_bytes = _own_peak_bytes()
    counts = model.num_operators
    print(
        json.dumps(
            {
                "operators": counts["source"],
                "vertices": len(graph.operators),
                "expected": expected,
                "parameters": graph.num_parameters,
                "counted_parameters": made.num_parameters,
                "flop": graph.forward_flop(contractions_only=True),
                "counted_flop": made.product_flop() if made.product_flop else None,
                "generic": len(list(model.generic)),
                "differences": list(model.differences),
                "made_s": made_s - start_s,
                "time_s": end_s - made_s,
                "peak_bytes": peak_bytes,
            }
        )
    )


def _own_peak_bytes() -> int:
    """Return the most memory that this process held; what its parent held when it was made does not count."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024


if __name__ == "__main__":
    _child(sys.argv[1])
