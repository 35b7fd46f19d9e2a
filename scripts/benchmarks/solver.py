"""Our solver, the paper's recurrences and other exact solvers on the same tables, each in a process of its own."""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pase import load, load_machine
from pase.planning.problems import problem_of
from pase.tables.files import read_problem, write_problem
from scripts.benchmarks.peers import PEERS
from scripts.benchmarks.tables import markdown, publish

LIMIT_S = 60.0
GRACE_S = 120.0
"""For handing a problem over, on top of the time limit."""
NETWORKS = (
    ("alexnet", 64),
    ("inception_v3", 64),
    ("rnnlm", 64),
    ("resnet101", 64),
    ("transformer", 16),
    ("transformer", 64),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument(
        "files", nargs="*", type=Path, help=".npz problem files, or folders of them [tables of built-in networks]"
    )
    parser.add_argument("--table", help="of docs/benchmarks.md that is written [solver, or solver on files]")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each solver [%(default)s]")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS], default=[*PEERS], help="which solvers [all]")


def main(*, write: bool, files: list[Path], table: str | None, limit: float, peers: list[str]) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    with TemporaryDirectory() as folder:
        given = [path for file in files for path in (sorted(file.glob("*.npz")) if file.is_dir() else [file])]
        problems = given or [_exported(name, devices, Path(folder)) for name, devices in NETWORKS]
        rows = [row for path in problems for row in _rows(path, limit, peers)]
    headers = ["problem", "solver", "time, s", "÷ ours", "peak memory of the process, MB", "cost", "proven"]
    name = table or ("solver on files" if files else "solver")
    publish("benchmarks.md", {name: markdown(headers, rows)}, write=write)


def _exported(name: str, devices: int, folder: Path) -> Path:
    path = folder / f"{name}_p{devices}.npz"
    problem = problem_of(load(name), devices, load_machine("1080ti"), "paper")
    write_problem(problem.tables, path, configurations=problem.configurations)
    return path


def _rows(path: Path, limit_s: float, peers: list[str]) -> list[list[str]]:
    found = {peer: _run(peer, path, limit_s) for peer in peers}
    own = found.get("ours", {}).get("time_s")
    rows = []
    for peer, answer in found.items():
        time_s, cost = answer.get("time_s"), answer.get("cost")
        rows.append(
            [
                path.stem,
                peer,
                answer["note"] or f"{time_s:.4f}",
                "" if answer["note"] or not own else f"{time_s / own:.1f}",
                f"{answer['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in answer else "",
                "" if cost is None else f"{cost:.10g}",
                "yes" if answer["exact"] else "no",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


def _run(peer: str, path: Path, limit_s: float) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "scripts.benchmarks.solver", peer, str(path), str(limit_s)]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=limit_s + GRACE_S)
    except subprocess.TimeoutExpired:
        return {"note": f"stopped after {limit_s + GRACE_S:.0f} s", "exact": False}
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"note": f"failed: {reason[0][:80]}", "exact": False}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _child(peer: str, path: str, limit_s: str) -> None:
    answer = asdict(PEERS[peer](read_problem(path), float(limit_s)))
    print(json.dumps(answer | {"peak_bytes": _own_peak_bytes()}))


def _own_peak_bytes() -> int:
    """Return the most memory that this process held; what its parent held when it was made does not count."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024


if __name__ == "__main__":
    _child(*sys.argv[1:])
