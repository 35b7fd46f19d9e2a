"""What `pase train` shows of events: as lines, above a table on a terminal, and in the summary."""

from typing import Any

import pytest

from pase.cli.train import live_table, plain_lines, print_summary

STEP = {
    "event": "step",
    "worker": 1,
    "step": 20,
    "loss": 0.123456,
    "accuracy": 0.5,
    "communication_share": 0.25,
    "examples_per_s": 1234.5,
    "time_s": 3.0,
}
TESTED = {
    "event": "tested",
    "after": 40,
    "num_samples": 12800,
    "loss": 0.5,
    "accuracy": None,
    "num_examples": 352,
    "time_s": 2.0,
}
EVENTS: list[dict[str, Any]] = [
    {"event": "resumed", "after": 8, "path": "kept/step.safetensors", "changed": ["rho 9, not 4.5"]},
    {"event": "refused", "worker": 0, "step": 3, "what": "the gradient is not finite"},
    {"event": "refused", "worker": 2, "step": None, "what": "it sent values that are not finite"},
    {"event": "lost", "worker": 1, "rank": 1, "what": "task 2,\x1b[2J ended"},
    {"event": "saved", "after": 8, "path": "kept/step.safetensors"},
]
LINES = [
    "pase: going on after 8 events from kept/step.safetensors; other than there: rho 9, not 4.5",
    "pase: worker 0, step 3: the gradient is not finite; not used, the centre is as it was",
    "pase: worker 2: it sent values that are not finite; not used, the centre is as it was",
    "pase: worker 1 is lost (task 2,\\x1b[2J ended); the others go on",
    "pase: saved kept/step.safetensors",
]

WORK = {
    "num_steps": 40,
    "time_s": 2.0,
    "communication_s": 0.5,
    "communication_share": 0.25,
    "num_messages": 41,
    "num_bytes": 10**7,
    "parts": {
        "worker_exchange_s": 0.0,
        "data_s": 0.1,
        "host_exchange_s": 0.5,
        "compute_s": 1.2,
        "worker_update_s": 0.05,
        "host_update_s": 0.0,
        "other_s": 0.15,
        "time_s": 2.0,
        "hidden_s": 0.25,
    },
}
MASTER = {**WORK["parts"], "data_s": 0.0, "compute_s": 0.0, "host_update_s": 1.3, "hidden_s": 0.0}  # type: ignore[dict-item]


def done(**others: Any) -> dict[str, Any]:
    """Return an event of the end."""
    return {
        "event": "done",
        "num_events": 80,
        "num_samples": 1280,
        "time_s": 2.0,
        "examples_per_s": 640.0,
        "loss": 0.25,
        "accuracy": 0.975,
        "num_examples": 352,
        "workers": [WORK, WORK],
        "master_parts": None,
        "num_messages": 123,
        "num_bytes": 3 * 10**7,
        "lost": [],
        "num_refused": 0,
        "checkpoint": None,
    } | others


def test_events_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_lines(as_json=False) as report:
        for event in (*EVENTS, STEP, TESTED, done()):
            report(event)
    assert capsys.readouterr().err.splitlines() == [
        *LINES,
        "pase: worker 1  step 20  loss 0.1235  accuracy 50.0%  communication 25%  1,234 examples/s",
        "pase: centre after 40 events, 12,800 samples: loss 0.5  (352 test examples)",
    ]


def test_lines_of_json_need_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_lines(as_json=True) as report:
        for event in (*EVENTS, STEP, TESTED, done()):
            report(event)
    assert capsys.readouterr() == ("", "")


def test_what_happens_stands_above_the_table_of_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with live_table() as report:
        report({"event": "started", "num_steps": 40} | {"algorithm": "a", "num_workers": 2} | _RATES)
        for event in (STEP, TESTED, *EVENTS, done()):
            report(event)
    lines = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if line.startswith("pase: ")][1:] == LINES


_RATES = {
    "learning_rate": 0.1,
    "rho": None,
    "momentum": 0.9,
    "num_weights": 1000,
    "num_messages_per_exchange": 3,
    "batch_size": 4,
}


def test_the_summary_of_a_training_that_went_well(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(done(checkpoint="kept/step.safetensors", master_parts=MASTER))
    assert capsys.readouterr().out.splitlines() == [
        "worker  steps   time  communication  messages sent  bytes sent",
        "     0     40  2.0 s          25.0%             41     10.0 MB",
        "     1     40  2.0 s          25.0%             41     10.0 MB",
        "",
        "worker  gpu-gpu para  cpu-gpu data  cpu-gpu para  for/backward  gpu update  cpu update  other",
        "     0          0.0%          5.0%         25.0%         60.0%        2.5%        0.0%   7.5%",
        "     1          0.0%          5.0%         25.0%         60.0%        2.5%        0.0%   7.5%",
        "master          0.0%          0.0%         25.0%          0.0%        2.5%       65.0%   7.5%",
        "hidden       500 ms in all, in addition to these",
        "",
        "centre       loss 0.25  accuracy 97.50% (352 test examples)",
        "throughput   640 examples/s for 2.0 s; 1,280 examples in all",
        "exchanged    123 messages, 30.0 MB, with those of the master",
        "checkpoint   kept/step.safetensors",
    ]


def test_the_summary_names_who_was_lost_and_what_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(done(workers=[None, WORK], lost=[0], num_refused=2, loss=None, accuracy=None, num_examples=None))
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["0", "lost"]
    assert "centre       not tested: name data with --test-data" in out
    assert "lost         worker 0" in out
    assert "refused      2 steps, whose values were not finite" in out
