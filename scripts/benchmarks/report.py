"""What a report takes: to make, as a whole process beside the search that its plan is from, on disk, and to open."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.benchmarks.tables import markdown, publish
from scripts.benchmarks.timing import time_process

RUNS = 5

PLANS: Mapping[str, tuple[str, ...]] = {
    "AlexNet, 32 devices": ("alexnet", "--devices", "32"),
    "InceptionV3, 32 devices": ("inception_v3", "--devices", "32"),
    "Transformer, 32 devices": ("transformer", "--devices", "32"),
    "GPT of 96 layers, 64 devices": ("gpt", "--arg", "layers=96", "--devices", "64"),
    "GPT of 96 layers, 1024 devices": ("gpt", "--arg", "layers=96", "--batch", "1024", "--devices", "1024"),
    "GPT of 454 layers, 64 devices": ("gpt", "--arg", "layers=454", "--devices", "64"),
}
"""What is searched, by what it is called here."""

PASE = (sys.executable, "-c", "from pase.cli import main; main()")
READY_S = "performance.getEntriesByName('pase-ready').map(mark => mark.startTime / 1000)[0] ?? null"
"""When the page can be used, counted from when it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """num_layers: of the plan. search_s, report_s: whole processes. size_bytes: of the page. ready_s: to open it."""

    num_layers: int
    search_s: float
    report_s: float
    size_bytes: int
    ready_s: float


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    publish("benchmarks.md", {"report": table(measure())}, write=write)


def measure(runs: int = RUNS) -> dict[str, Row]:
    """Return what each report takes, the least of some runs."""
    found = {}
    with TemporaryDirectory() as folder, _browser() as browser:
        plan, page = Path(folder, "plan.json"), Path(folder, "report.html")
        for name, model in PLANS.items():
            search = time_process([*PASE, "search", *model, "-o", str(plan), "--json"], 1)
            report = time_process([*PASE, "report", str(plan), "-o", str(page)], runs)
            found[name] = Row(
                num_layers=plan.read_text(encoding="utf-8").count('"layer_cost"'),
                search_s=search.min_s,
                report_s=report.min_s,
                size_bytes=page.stat().st_size,
                ready_s=min(_ready_s(browser, page) for _ in range(runs)),
            )
    return found


def table(rows: Mapping[str, Row]) -> str:
    """Return the figures, times also as parts of the search's."""
    return markdown(
        ["plan", "layers", "search, s", "report, s", "report ÷ search", "page, MB", "usable after, s"],
        [
            [
                name,
                str(row.num_layers),
                f"{row.search_s:.2f}",
                f"{row.report_s:.2f}",
                f"{row.report_s / row.search_s:.2f}",
                f"{row.size_bytes / 1e6:.2f}",
                f"{row.ready_s:.2f}",
            ]
            for name, row in rows.items()
        ],
    )


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise SystemExit("no browser to open reports with: install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def _ready_s(browser: Any, page: Path) -> float:
    with browser.new_context() as context:
        tab = context.new_page()
        tab.goto(page.resolve().as_uri())
        # Asked again and again from outside: the page's own policy lets nothing be evaluated in it.
        while (ready_s := tab.evaluate(READY_S)) is None:
            tab.wait_for_timeout(10)
        return float(ready_s)
