import io
import json
from pathlib import Path

import pytest

from pase.errors import ProgramError
from pase.targets.training.script import MetricsFile, ProgressLine


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_for_each_step_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m.jsonl", num_steps=0, resume=False) as metrics:
        metrics.write({"step": 1, "loss": 0.5})
        assert lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": 0.5}]
        metrics.write({"step": 2, "loss": 0.25})
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2]


def test_going_on_writes_no_step_twice_and_drops_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n{"st', encoding="utf-8")
    with MetricsFile(path, num_steps=2, resume=True) as metrics:
        metrics.write({"step": 3, "again": True})
    assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_going_on_keeps_of_each_worker_what_it_had_done(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    done = [{"step": 1, "worker": 0}, {"step": 2, "worker": 0}, {"step": 1, "worker": 1}, {"step": 1}]
    again = [{"step": 3, "worker": 0}, {"step": 2, "worker": 1}, {"step": 2}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (*again, *done)), encoding="utf-8")
    with MetricsFile(path, num_steps={0: 2, 1: 1, None: 1}, resume=True):
        assert lines(path) == done
    for content in ('{"step": 1, "worker": 2}\n', '{"step": 1, "worker": []}\n'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ProgramError, match=r"m.jsonl, line 1, is not a line of this training's metrics"):
            MetricsFile(path, num_steps={0: 2, 1: 1, None: 1}, resume=True)
        assert path.read_text(encoding="utf-8") == content


def test_another_trainings_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for content, resume, message in (
        ('{"step": 1}\n', False, r"m.jsonl holds the metrics of another training; name another file"),
        ('{"step": 1}\nhello\n', True, r"m.jsonl, line 2, is not a line of this training's metrics; name another file"),
        ("[1]\n", True, r"m.jsonl, line 1, is not a line of this training's metrics"),
        ('{"step": "1"}\n', True, r"m.jsonl, line 1, is not a line of this training's metrics"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ProgramError, match=message):
            MetricsFile(path, num_steps=5, resume=resume)
        assert path.read_text(encoding="utf-8") == content


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"cannot write metrics to .*no/m.jsonl: "):
        MetricsFile(tmp_path / "no" / "m.jsonl", num_steps=0, resume=False)
    (tmp_path / "m.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ProgramError, match=r"cannot write metrics to .*m.jsonl: "):
        MetricsFile(tmp_path / "m.jsonl", num_steps=0, resume=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_of_progress_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = Terminal(), [100.0]
    monkeypatch.setattr("pase.targets.training.script.time.monotonic", lambda: now[0])
    line = ProgressLine(12, stream)
    line.show(9, 1.23456789, 1234.5)
    line.show(10, 1.0, 1.0)  # too soon
    now[0] += 0.2
    line.show(11, 1.0, 9.0)
    line.show(12, 0.5, 9.0)  # the last one
    line.end()
    line.end()
    first = "step 9/12  loss 1.23457  1,234 examples/s"
    second = "step 11/12  loss 1  9 examples/s"
    assert stream.getvalue() == f"\r{first}\r{second:<{len(first)}}\rstep 12/12  loss 0.5  9 examples/s\n"


def test_nothing_is_written_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    line = ProgressLine(1, stream)
    line.show(1, 0.5, 3.0)
    line.end()
    assert stream.getvalue() == ""
