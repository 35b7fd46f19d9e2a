"""The worked example of docs/explain.md: what `pase explain` prints for AlexNet on 32 devices."""

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from pase.cli.main import run
from scripts.benchmarks.tables import publish

SEARCH = ("search", "alexnet", "--devices", "32", "-o", "plan.json")
AFTER_WHY = "Costs of each layer"
AFTER_PARTS = "part     devices"
BEFORE_SENSITIVITY = "figure"


def main(*, write: bool) -> None:
    """Print the examples, or put them into docs/explain.md."""
    publish("explain.md", examples(), write=write)


def examples() -> dict[str, str]:
    """Return the examples by name, each as a block of the command and what it prints."""
    with TemporaryDirectory() as folder:
        paper, seconds = Path(folder, "paper.json"), Path(folder, "alpha_beta.json")
        _printed([*SEARCH[:-1], str(paper)])
        _printed([*SEARCH[:-1], str(seconds), "--cost-model", "alpha_beta"])
        whole, by_seconds = _printed(["explain", str(paper)]), _printed(["explain", str(seconds)])
        layer = _printed(["explain", str(paper), "fc1"])
        other = _printed(["explain", str(seconds), "--sensitivity"])
    return {
        "plan": _block([_shown(SEARCH), _shown(["explain", "plan.json"])], [*_until(whole, AFTER_WHY), "…"]),
        "layer": _block([_shown(["explain", "plan.json", "fc1"])], [*_until(layer, AFTER_PARTS), "…"]),
        "alpha_beta": _block(
            [_shown([*SEARCH, "--cost-model", "alpha_beta"]), _shown(["explain", "plan.json", "--sensitivity"])],
            [*_until(by_seconds, "Why:"), "…", "", *_since(other, BEFORE_SENSITIVITY)],
        ),
    }


def _printed(arguments: Sequence[str]) -> list[str]:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(StringIO()):
        status = run(list(arguments))
    assert status == 0, arguments
    return out.getvalue().splitlines()


def _until(lines: Sequence[str], start: str) -> list[str]:
    """Return the lines before the first that starts so, blank ones at the end left out."""
    found = list(lines[: next(i for i, line in enumerate(lines) if line.startswith(start))])
    while not found[-1]:
        found.pop()
    return found


def _since(lines: Sequence[str], start: str) -> list[str]:
    return list(lines[next(i for i, line in enumerate(lines) if line.startswith(start)) :])


def _shown(arguments: Sequence[str]) -> str:
    return f"$ pase {' '.join(arguments)}"


def _block(commands: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join(["```text", *commands, *lines, "```"])
