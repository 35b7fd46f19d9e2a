"""`pase train`: what it prints, how it ends; and its page says what the command does."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from pase.cli.main import cli
from pase.easgd.algorithms import ALGORITHMS
from pase.easgd.checkpoint import list_checkpoints, read_checkpoint
from tests.cli.conftest import Command
from tests.cli.processes import in_pipe, in_terminal

SMALL = ["mlp", "--batch", "4", *("--arg", "inputs=6"), *("--arg", "hidden=8"), *("--arg", "classes=3")]
TINY = [*SMALL, *("--arg", "layers=2"), *("--workers", "2"), *("--steps", "4"), *("--learning-rate", "0.1")]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Return the options for examples to train on and to test on, whose class is the largest of three numbers."""
    options = []
    for flag, name, num_rows in (("--data", "train", 30), ("--test-data", "test", 9)):
        inputs = np.random.default_rng(num_rows).normal(size=(num_rows, 6)).astype(np.float32)
        labels = np.argmax(inputs[:, :3], axis=1).astype(np.int32)
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, labels=labels)
        options += [flag, str(tmp_path / f"{name}.npz")]
    return options


def kept_bytes(folder: Path) -> list[bytes]:
    """Return the bytes of everything that the newest checkpoint holds."""
    checkpoint = read_checkpoint(list_checkpoints(folder)[0][1])
    slots = [array for own in checkpoint.slots.values() for array in own.values()]
    return [array.tobytes() for array in (*checkpoint.weights.values(), *slots)]


def test_progress_goes_to_standard_error_and_what_came_of_it_to_standard_output(
    pase: Command, data: list[str], tmp_path: Path
) -> None:
    finished = pase("train", *TINY, *data, "--checkpoint", tmp_path / "kept")
    assert finished.status == 0
    err = finished.err.splitlines()
    assert err[0] == ("pase: sync-easgd3, 2 workers, η 0.1, ρ 4.5; 83 weights in 1 message, 4 examples a step of each")
    assert sorted(line.split("  loss")[0] for line in err if "step 4" in line) == [
        "pase: worker 0  step 4",
        "pase: worker 1  step 4",
    ]
    assert any(line.startswith("pase: centre after 4 events, 32 samples: loss ") for line in err)
    assert f"pase: saved {tmp_path}/kept/step-0000000004.safetensors" in err
    out = finished.out.splitlines()
    assert out[0].split() == ["worker", "steps", "time", "communication", "messages", "sent", "bytes", "sent"]
    # Worker 0 broadcasts the centre, 83 weights of 4 bytes, and worker 1 answers with its own, in each of 4 rounds.
    assert [line.split()[:2] + line.split()[-3:] for line in out[1:3]] == [
        ["0", "4", "4", "1.33", "kB"],
        ["1", "4", "4", "1.33", "kB"],
    ]
    assert "(8 test examples)" in next(line for line in out if line.startswith("centre "))
    assert "32 examples in all" in next(line for line in out if line.startswith("throughput "))
    assert next(line for line in out if line.startswith("exchanged ")).split()[1:5] == ["8", "messages,", "2.66", "kB,"]
    assert out[-1] == f"checkpoint   {tmp_path}/kept/step-0000000004.safetensors"
    assert max(map(len, out[:4])) <= 80


def test_json_is_a_line_an_event(pase: Command, data: list[str]) -> None:
    finished = pase("train", *TINY, *data, "--algorithm", "async-msgd", "--arrivals", "0,1,1", "--json")
    assert (finished.status, finished.err) == (0, "")
    events = [json.loads(line) for line in finished.out.splitlines()]
    assert [event["event"] for event in events if event["event"] != "step"] == ["started", "tested", "done"]
    assert (events[0]["algorithm"], events[0]["momentum"], events[0]["rho"]) == ("async-msgd", 0.9, None)
    assert [worker["num_steps"] for worker in events[-1]["workers"]] == [3, 5]
    assert events[-1]["num_events"] == 8
    assert events[-1]["accuracy"] == next(event["accuracy"] for event in events if event["event"] == "tested")


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(
    pase: Command, data: list[str], tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    common = [*TINY, *data, "--report-every", "1"]
    assert pase("train", *common, "--checkpoint", tmp_path / "whole").status == 0
    half = [*common, "--checkpoint", tmp_path / "half", "--metrics", metrics]
    assert pase("train", *half, "--steps", "2").status == 0
    refused = pase("train", *half)
    assert (refused.status, refused.out) == (1, "")
    assert "half holds checkpoints up to step 2; go on with --resume or name another one" in refused.err
    resumed = pase("train", *half, "--learning-rate", "0.1", "--resume")
    assert resumed.status == 0
    assert resumed.err.startswith(f"pase: going on after 2 events from {tmp_path}/half/step-0000000002.safetensors\n")
    assert kept_bytes(tmp_path / "half") == kept_bytes(tmp_path / "whole")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert sorted((line["worker"], line["step"]) for line in lines if line["event"] == "step") == [
        (worker, step) for worker in (0, 1) for step in (1, 2, 3, 4)
    ]
    other = pase("train", *half, "--learning-rate", "0.05", "--steps", "5", "--resume")
    assert "; other than there: learning rate 0.05, not 0.1, rho 9, not 4.5\n" in other.err
    done = pase("train", *half, "--resume")
    assert (done.status, done.out) == (1, "")
    assert "is after 5 events, 5 steps of each worker; nothing is left of 4, give more --steps" in done.err


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, as in a process that a shell started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_says_how_to_go_on(pase: Command, tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def interrupt() -> None:
        end_s = time.monotonic() + 300
        while not list_checkpoints(kept) and time.monotonic() < end_s:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    finished = pase("train", *TINY, "--steps", "1000000", "--checkpoint", kept, "--save-every", "300")
    thread.join()
    assert (finished.status, finished.out) == (130, "")
    newest = list_checkpoints(kept)[0][1]
    assert (
        finished.err.splitlines()[-1] == f"pase: stopped; the last checkpoint is {newest}: go on from it with --resume"
    )


def test_a_program_is_executed_and_that_is_said(pase: Command, tmp_path: Path) -> None:
    plan, program = tmp_path / "plan.json", tmp_path / "train.py"
    assert pase("search", *SMALL, "--devices", "2", "-o", plan).status == 0
    assert pase("emit", plan, "-o", program).status == 0
    common = ["--workers", "2", "--steps", "2", "--devices", "4"]
    of_plan = pase("train", plan, *common, "--checkpoint", tmp_path / "one")
    of_program = pase("train", program, *common, "--checkpoint", tmp_path / "other")
    assert of_plan.err.startswith("pase: a plan names its own model and devices: --devices, --batch and --arg are not")
    assert of_program.err.splitlines()[1] == f"pase: note: the code of {program} is executed"
    assert kept_bytes(tmp_path / "one") == kept_bytes(tmp_path / "other")


def test_the_help_names_every_algorithm(pase: Command) -> None:
    words = pase("train", "--help").out.split()
    assert [name for name in ALGORITHMS if name not in words] == []


@pytest.mark.slow
def test_a_terminal_shows_the_workers_in_a_table() -> None:
    written = in_terminal("train", *TINY, "--steps", "200", columns=80)
    assert "pase: sync-easgd3, 2 workers, η 0.1, ρ 4.5; 83 weights in 1 message" in written
    assert "/200" in written
    # The table is gone in the end, what came of it stands there.
    assert written.rindex("\x1b[2K") < written.rindex("throughput")


@pytest.mark.slow
def test_processes_train_as_threads_do(pase: Command, data: list[str], tmp_path: Path) -> None:
    common = [*TINY, *data, *("--workers", "3"), *("--steps", "3")]
    assert pase("train", *common, "--checkpoint", tmp_path / "threads").status == 0
    finished = in_pipe("train", *common, "--checkpoint", str(tmp_path / "tasks"), "--processes", "2", "--json")
    assert finished.returncode == 0, finished.stderr
    events: list[dict[str, Any]] = [json.loads(line) for line in finished.stdout.splitlines()]
    assert events[-1]["event"] == "done"
    assert kept_bytes(tmp_path / "tasks") == kept_bytes(tmp_path / "threads")


@pytest.mark.parametrize("split", ["partition", "replicate"])
def test_a_step_can_be_checked_by_hand(split: str, pase: Command, data: list[str], tmp_path: Path) -> None:
    """Eqs. 1 and 2 on the arrays of the trace: workers by their own gradient, the centre by all of them."""
    path = tmp_path / "trace.npz"
    options = ("--rho", "0.5", "--dtype", "float64", "--data-split", split)
    finished = pase("train", *TINY, *data, *options, "--trace", path)
    assert finished.status == 0, finished.err
    with np.load(path) as trace:
        arrays = dict(trace)
    places = [name for name in arrays if name.startswith("weight ")]
    assert [place for name in places for place in arrays[name].tolist()][-1] == 83
    eta, rho = 0.1, 0.5
    for step in range(1, 5):
        own = [{n: arrays[f"worker {w}, step {step}: {n}"] for n in TRACED} for w in range(2)]
        for each in own:
            elastic = each["gradient"] + rho * (each["weights"] - each["centre"])
            np.testing.assert_allclose(each["weights after"], each["weights"] - eta * elastic, rtol=1e-14)
        if step < 4:
            later = arrays[f"worker 0, step {step + 1}: centre"]
            pulled = sum(rho * (each["weights"] - each["centre"]) for each in own)
            np.testing.assert_allclose(later, own[0]["centre"] + eta * pulled, rtol=1e-13, atol=1e-16)
            assert np.array_equal(arrays[f"worker 1, step {step + 1}: weights"], own[1]["weights after"])
    assert not list(tmp_path.glob(".trace*"))


TRACED = ("weights", "gradient", "centre", "weights after")


PAGE = (Path(__file__).parents[2] / "docs" / "training-across-workers.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    lines = PAGE.split(f"## {heading}\n", 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = lines[first:]
    table = table[: next(i for i, line in enumerate(table) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[2:]]


def test_every_algorithm_is_described() -> None:
    described = {row[0].strip("` "): row[4].strip("` ") for row in rows("The algorithms")}
    assert described == {name: algorithm.counterpart for name, algorithm in ALGORITHMS.items()}


def test_every_option_is_described() -> None:
    command = cli.get_command(click.Context(cli), "train")
    assert command is not None
    opts = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    assert set(re.findall(r"--[a-z][a-z-]*", PAGE)) == {flag for flag in opts if flag.startswith("--")}


def test_every_field_of_an_event_is_described(pase: Command, tmp_path: Path) -> None:
    small = ["mlp", "--batch", "4", "--arg", "inputs=6", "--arg", "hidden=8", "--arg", "classes=3", "--arg", "layers=2"]
    common = [*small, "--workers", "2", "--checkpoint", tmp_path, "--report-every", "1", "--json"]
    described = {row[0].strip("` "): set(re.findall(r"`(\w+)`", row[1])) for row in rows("Events")}
    lines = [pase("train", *common, "--steps", steps, "--resume").out.splitlines() for steps in (2, 3)]
    events = [json.loads(line) for part in lines for line in part]
    assert {event["event"] for event in events} == {"resumed", "started", "step", "saved", "done"}
    for event in events:
        inner = set(event["workers"][0]) if event["event"] == "done" else set()
        assert described[event["event"]] == (set(event) - {"event"}) | inner
