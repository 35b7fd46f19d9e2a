"""Several processes: the losses and bytes of one, and an end for all of them when one is gone.

How processes are watched is tested with programs that load no framework, and so end at any time that a test likes.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.runtime.checkpoint import Checkpointing
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK, Cluster, cluster_of, split_address
from pase.targets.mesh_tensorflow.runtime.cluster_server import Watch, serve
from pase.targets.mesh_tensorflow.runtime.launch import launch_tasks, local_clusters
from pase.targets.mesh_tensorflow.runtime.script import train
from pase.targets.programs import emit
from pase.targets.training.options import TrainingOptions
from tests.emitter import golden_mlp
from tests.runtime.addresses import connects, own_address
from tests.runtime.networks import small
from tests.runtime.plans import random_plan
from tests.runtime.training import builder_of

ROOT = Path(__file__).resolve().parents[2]
MLP = Path(golden_mlp.__file__)
LIMIT_S = 120.0
"""A job ends within this time when a process dies."""


@contextmanager
def launched(*arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """The command, running; what it started ends with it."""
    command = [sys.executable, "-c", "from pase.cli import main; main()", "launch", *map(str, arguments)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def losses(told: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in told if event["event"] == "step"]


# -- training


@pytest.mark.slow
def test_two_processes_train_like_one_and_move_what_was_predicted(tmp_path: Path) -> None:
    source = emit(random_plan(small("mlp"), 4, 1))
    program = tmp_path / "train.py"
    program.write_text(source, encoding="utf-8")
    arguments = ["--steps", 3, "--dtype", "float64", "--measure", "--keep-alive", "--json"]
    with launched("--processes", 2, "--", program, *arguments) as process:
        status, out, errors = finished(process)
    assert (status, errors) == (0, "")
    ours: list[dict[str, Any]] = []
    options = TrainingOptions(steps=3, dtype="float64")
    train(builder_of(source), options, num_devices=4, measure=True, keep_alive=True, report=ours.append)
    theirs = events(out)
    assert losses(theirs) == pytest.approx(losses(ours), rel=1e-12)
    there, here = theirs[-1], ours[-1]
    assert there["measured_bytes"] == here["measured_bytes"] == theirs[0]["predicted_bytes"]
    assert there["edges"] == here["edges"]
    assert there["layers"] == here["layers"]
    assert 0 < there["between_processes_bytes"] < there["measured_bytes"]
    assert here["between_processes_bytes"] == 0
    assert len(there["peak_memory_bytes"]) == 4
    assert min(there["peak_memory_bytes"]) > 0


@pytest.mark.slow
def test_servers_keep_to_this_machine_and_where_one_is_killed_the_training_goes_on_in_one_process(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kept"
    # Far more steps than it will live to take.
    arguments = ["--dtype", "float64", "--checkpoint", folder, "--save-every", 3, "--keep", 1000, "--json"]
    with launched("--processes", 2, "--", MLP, "--steps", 10**6, *arguments) as process:
        assert process.stdout is not None
        read = [json.loads(next(process.stdout)) for _ in range(10)]
        server = task_of(process.pid, 1)
        for address in cluster_of_process(server).addresses:
            port, own = split_address(address)[1], own_address()
            assert connects("127.0.0.1", port)
            assert own is None or not connects(own, port)
        begin = time.monotonic()
        os.kill(server, signal.SIGKILL)
        status, _, errors = finished(process)
    assert time.monotonic() - begin < LIMIT_S
    assert status == 1
    assert f"pase: task 1 (pid {server}) was ended by signal 9 (SIGKILL); the other processes were ended; " in errors
    newest = max(folder.glob("step-*.safetensors"))
    assert f"the last checkpoint is {newest}: go on from it with --resume" in errors.splitlines()[-1]
    first = folder / "step-0000000003.safetensors"
    rest = train(
        golden_mlp.build,
        TrainingOptions(steps=6, dtype="float64"),
        num_devices=4,
        checkpointing=Checkpointing(folder=folder, resume=str(first)),
    )
    whole = train(golden_mlp.build, TrainingOptions(steps=6, dtype="float64"), num_devices=4)
    assert losses(read)[:6] == pytest.approx(whole, rel=1e-12)
    assert rest == pytest.approx(whole[3:], rel=1e-12)


@pytest.mark.full
def test_a_server_that_is_stopped_ends_the_job() -> None:
    with launched("--processes", 2, "--timeout", 3, "--", MLP, "--steps", 10**6, "--json") as process:
        assert process.stdout is not None
        json.loads(next(process.stdout))
        os.kill(task_of(process.pid, 1), signal.SIGSTOP)
        status, _, errors = finished(process)
    assert status == 1
    assert "stopped" in errors


@pytest.mark.full
def test_hosts_each_start_their_own_task_and_the_chief_sees_one_go(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    chief, server = free_port(), free_port()
    hosts.write_text(f"127.0.0.1:{chief}  # trains\n127.0.0.1:{server}\n", encoding="utf-8")
    program = ["--", MLP, "--steps", 10**6, "--dtype", "float64", "--json"]
    with (
        launched("--hosts", hosts, "--task", 1, *program) as second,
        launched("--hosts", hosts, "--task", 0, *program) as first,
    ):
        assert first.stdout is not None
        read = [json.loads(next(first.stdout)) for _ in range(4)]
        begin = time.monotonic()
        # With its launcher, as if the host had gone.
        second.kill()
        status, _, errors = finished(first)
    assert time.monotonic() - begin < LIMIT_S
    assert status == 1
    assert re.fullmatch(r"error: .*task:1.*; no checkpoint was kept: --checkpoint DIR keeps them\n", errors)
    whole = train(golden_mlp.build, TrainingOptions(steps=3, dtype="float64"), num_devices=4)
    assert losses(read) == pytest.approx(whole, rel=1e-12)


def test_a_server_ends_when_the_chief_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chief:
        address = f"127.0.0.1:{chief.getsockname()[1]}"
        server = threading.Thread(target=serve, args=(Cluster(addresses=(address, "127.0.0.1:1"), task=1),))
        server.start()
        server.join(2.5)
        assert server.is_alive()
    server.join(LIMIT_S)
    assert not server.is_alive()


def test_task_0_ends_where_another_is_gone_and_where_a_step_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = threading.Event()
    monkeypatch.setattr("pase.targets.mesh_tensorflow.runtime.cluster_server.leave", lambda _: left.set())
    monkeypatch.setattr("pase.targets.mesh_tensorflow.runtime.cluster_server.PROBE_EVERY_S", 0.05)
    monkeypatch.setattr("pase.targets.mesh_tensorflow.runtime.cluster.PROBE_EVERY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        cluster = Cluster(addresses=("127.0.0.1:1", address), task=0, step_timeout_s=0.2)
        watch, told = Watch(cluster, lambda: "; no checkpoint"), list[dict[str, Any]]()
        watch.start()
        assert not left.wait(0.5)
        watch.reporting(told.append)({"event": "step"})
        assert left.wait(LIMIT_S)
        watch.stop()
    assert told == [{"event": "step"}]
    left.clear()
    watch = Watch(replace(cluster, step_timeout_s=None), lambda: "; no checkpoint")
    watch.start()
    assert left.wait(LIMIT_S)
    watch.stop()
    late, gone = dict.fromkeys(capsys.readouterr().err.splitlines())
    assert late.startswith("error: no step ended within 0.2 s; ")
    assert gone == f"error: task 1, {address}, ended or cannot be reached; no checkpoint"


# -- watching


WAITS = """\
import json, os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))
task = json.loads(os.environ["PASE_CLUSTER"])["task"]
print("task", task, os.getpid(), flush=True)
"""


def waiting(folder: Path, more: str = "") -> Path:
    """A program that says who it is, does what is given and waits; interrupted, it says so and ends."""
    path = folder / "program.py"
    path.write_text(f"{WAITS}{more}\ntime.sleep(60)\n", encoding="utf-8")
    return path


def task_of(launcher: int, task: int) -> int:
    """The process of a task; as soon as it is there."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii").split():
            # Before it has become the program, a child still has our environment.
            if f'"task": {task},' in Path(f"/proc/{child}/environ").read_text(encoding="utf-8"):
                return int(child)
        time.sleep(0.02)
    raise AssertionError(f"there is no task {task}")


def cluster_of_process(pid: int) -> Cluster:
    """What a process was told of its cluster."""
    variables = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
    found = cluster_of(dict(variable.split("=", 1) for variable in variables if variable))
    assert found is not None
    return found


def is_gone(pid: int) -> bool:
    """Whether a process ends in time; one that nobody has asked about yet counts as ended."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


@pytest.mark.parametrize("task", [0, 2])
def test_any_process_that_is_killed_ends_the_others(task: int, tmp_path: Path) -> None:
    with launched("--processes", 3, waiting(tmp_path)) as process:
        assert process.stdout is not None
        next(process.stdout)
        tasks = [task_of(process.pid, number) for number in range(3)]
        os.kill(tasks[task], signal.SIGKILL)
        status, _, errors = finished(process)
    assert status == 1
    assert errors == (
        f"pase: task {task} (pid {tasks[task]}) was ended by signal 9 (SIGKILL); the other processes were ended; "
        "no checkpoint was kept: --checkpoint DIR keeps them\n"
    )
    assert all(map(is_gone, tasks))


def test_when_the_launcher_is_killed_nobody_is_left(tmp_path: Path) -> None:
    with launched("--processes", 2, waiting(tmp_path)) as process:
        assert process.stdout is not None
        next(process.stdout)
        tasks = [task_of(process.pid, number) for number in range(2)]
        process.kill()
        assert all(map(is_gone, tasks))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_asks_for_the_end_ends_all(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with launched("--processes", 2, waiting(tmp_path)) as process:
        assert process.stdout is not None
        next(process.stdout)
        tasks = [task_of(process.pid, task) for task in range(2)]
        process.send_signal(number)
        found, _, errors = finished(process)
    assert found == status
    assert errors == (
        "stopped\n"
        if number == signal.SIGINT
        else "ended by SIGTERM; no checkpoint was kept: --checkpoint DIR keeps them\n"
    )
    assert all(map(is_gone, tasks))


def test_a_process_that_is_stopped_for_too_long_is_named(tmp_path: Path) -> None:
    with launched("--processes", 2, "--timeout", 0.5, waiting(tmp_path)) as process:
        assert process.stdout is not None
        next(process.stdout)
        chief = task_of(process.pid, 0)
        os.kill(chief, signal.SIGSTOP)
        status, _, errors = finished(process)
    assert status == 1
    assert errors.startswith(f"pase: task 0 (pid {chief}) was stopped by a signal, for longer than --timeout; ")


def test_the_chiefs_output_and_arguments_pass_through(tmp_path: Path) -> None:
    more = "if task == 0:\n    print(*sys.argv[1:])\n    sys.exit()"
    with launched("--processes", 2, "--", waiting(tmp_path, more), "--steps", 3, "--", "x y") as process:
        status, out, errors = finished(process)
    assert (status, errors) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("task 0 ")
    assert lines[1:] == ["--steps 3 -- x y"]


def _here(num_tasks: int) -> list[Cluster]:
    return local_clusters(num_tasks, bind=LOOPBACK, step_timeout_s=None)


def test_what_the_chief_says_is_all_that_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Whoever makes the mistake first.
    more = "if task == 0: time.sleep(0.3)\nsys.exit('error: it cannot be done')"
    assert launch_tasks([str(waiting(tmp_path, more))], _here(2)) == 1
    assert capfd.readouterr().err == "error: it cannot be done\n"


def test_what_a_server_said_at_its_end_is_told(tmp_path: Path) -> None:
    more = "if task == 1: sys.exit('error: the port is taken')"
    message = r"\) ended with status 1: the port is taken; the other processes were ended; no checkpoint"
    with pytest.raises(ProgramError, match=message):
        launch_tasks([str(waiting(tmp_path, more))], _here(2))


def test_a_task_that_is_alone_on_its_host_speaks_for_itself(tmp_path: Path) -> None:
    program = waiting(tmp_path, "sys.exit('error: the port is taken')")
    with launched("--hosts", "127.0.0.1:1,127.0.0.1:2", "--task", 1, program) as process:
        status, out, errors = finished(process)
    assert (status, errors) == (1, "error: the port is taken\n")
    assert out.startswith("task 1 ")


@pytest.mark.parametrize("status", [2, 77])
def test_any_failure_of_the_chief_is_a_failure(status: int, tmp_path: Path) -> None:
    assert launch_tasks([str(waiting(tmp_path, f"sys.exit({status})"))], _here(1)) == status


def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ProgramError, match=r"there is no program nothing.py; give the file that pase emit wrote"):
        launch_tasks(["nothing.py"], _here(2))
    with pytest.raises(ProgramError, match="0 processes were asked for; expected 1 or more"):
        launch_tasks(["nothing.py"], _here(0))
