"""The benchmark of programs: ratios of the bytes that two plans move, and of what two checkouts' programs take."""

from pathlib import Path

import pytest

from scripts.benchmarks.runtime import Moved, ratio_row
from scripts.benchmarks.side_by_side import STEPS, Case, Timing, built, row, stepped


def moved(predicted: int, measured: int, kept_alive: int) -> Moved:
    return Moved(strategy="any", predicted_bytes=predicted, measured_bytes=measured, kept_alive_bytes=kept_alive)


def test_ratios_are_set_beside_the_prediction() -> None:
    row = ratio_row(moved(500, 495, 500), moved(1000, 1000, 1000))
    assert row == ["0.5000", "0.4950", "-1.00%", "0.5000", "+0.00%", "fewer bytes"]


def test_what_is_beyond_the_tolerance_or_moves_more_is_marked() -> None:
    row = ratio_row(moved(1100, 1200, 1100), moved(1000, 1000, 1000))
    assert row == ["1.1000", "1.2000", "+9.09% **beyond 2%**", "1.1000", "+0.00%", "**more bytes**"]


@pytest.mark.parametrize("other", [Moved(strategy="any", error="no"), moved(0, 0, 0)])
def test_without_two_numbers_there_is_no_ratio(other: Moved) -> None:
    assert ratio_row(moved(5, 5, 5), other) == ["no ratio", "", "", "", "", ""]


def timings(*seconds: float) -> list[Timing]:
    return [Timing(cpu_s=each, elapsed_s=10 * each) for each in seconds]


def test_runs_of_two_checkouts_are_set_beside_each_other() -> None:
    found = row(timings(2, 4, 3), [Timing(cpu_s=3, elapsed_s=10), Timing(cpu_s=1, elapsed_s=60), *timings(6)])
    assert found == ["2", "3", "1", "3", "0.50", "1.00", "0.50", "2.00"]


def test_what_a_case_is_searched_with() -> None:
    assert Case("gpt", 8).options == ["gpt", "--devices", "8"]
    arguments = ["--arg=layers=1", "--flops", "1000000000.0"]
    assert Case("gpt", 8, {"layers": 1}, 1e9).options == ["gpt", "--devices", "8", *arguments]


PROGRAM = """
import json, sys, time
from told import SPENT

def said(event, **others):
    until = time.process_time() + SPENT[event]
    while time.process_time() < until:
        pass
    sys.stdout.write(json.dumps({"event": event, **others}) + "\\n")
    sys.stdout.flush()

assert sys.argv[1] == "--steps" and sys.argv[3:] == ["--json"]
said("built", build_time_s=7.5)
for _ in range(int(sys.argv[2])):
    said("step")
said("done", step_time_s=0.25)
"""


def test_programs_of_a_checkout_are_timed(tmp_path: Path) -> None:
    """They import what the checkout has, TensorFlow before the clock runs."""
    (tmp_path / "tensorflow.py").write_text(
        "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    )
    (tmp_path / "told.py").write_text('SPENT = {"built": 0.2, "step": 0.002, "done": 0}')
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    build, step = built(tmp_path, script), stepped(tmp_path, script)
    assert (build.elapsed_s, step.elapsed_s) == (7.5, 0.25)
    assert 0.2 <= build.cpu_s < 0.5
    assert 0.002 <= step.cpu_s < 0.2 / STEPS + 0.002
