"""What is done about processes that end or are stopped, with programs that load no framework."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pase.cli.train import pase_command
from pase.easgd.cluster import Cluster
from pase.easgd.launch import local_clusters, supervise
from pase.errors import TrainingError

LISTENS = """\
import json, os, signal, socket, sys, time
cluster = json.loads(os.environ["PASE_CLUSTER"])
task = cluster["task"]
gone = __file__ + ".gone"
def after(time_s):
    while not os.path.exists(gone):  # until another task is about to end, or to stop
        time.sleep(0.02)
    time.sleep(time_s)
def listen():
    return socket.create_server(("127.0.0.1", int(cluster["tasks"][task].partition(":")[2])))
def myself(number):
    if "listener" in globals():
        listener.accept()  # when it was seen that this process is up, however busy the machine is
    open(gone, "w").close()
    os.kill(os.getpid(), number)
"""


def program(folder: Path, *lines: str) -> list[str]:
    """A program whose lines know `task`, can `listen()` and send `myself(signal)`; at the end it waits."""
    path = folder / "program.py"
    path.write_text("\n".join([LISTENS, *lines, "time.sleep(60)"]), encoding="utf-8")
    return [sys.executable, str(path)]


LISTEN = "listener = listen()"
WORKER_DIES = "if task == 1: myself(signal.SIGKILL)"


def train_here(
    command: list[str],
    *,
    num_tasks: int,
    is_synchronous: bool,
    step_timeout_s: float | None = None,
    checkpoints: Path | None = None,
) -> int:
    """Run every task of a job on this machine."""
    clusters = local_clusters(num_tasks, step_timeout_s=step_timeout_s)
    return supervise(command, clusters, goes_on=not is_synchronous, checkpoints=checkpoints)


def test_a_worker_that_dies_ends_a_synchronous_job(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError,
        match=r"^task 1 \(pid \d+\) was ended by signal 9 \(SIGKILL\); the other processes were ended; there is no "
        rf"checkpoint in {tmp_path} yet$",
    ):
        train_here(program(tmp_path, LISTEN, WORKER_DIES), num_tasks=3, is_synchronous=True, checkpoints=tmp_path)


def test_an_asynchronous_job_goes_on_without_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["if task == 0: after(1); print('the end'); sys.exit(3)"]
    command = program(tmp_path, LISTEN, WORKER_DIES, *lines)
    assert train_here(command, num_tasks=3, is_synchronous=False) == 3
    out, errors = capfd.readouterr()
    assert out == "the end\n"
    assert re.fullmatch(
        r"note: task 1 \(pid \d+\) was ended by signal 9 \(SIGKILL\); the others go on without its workers\n", errors
    )


def test_it_cannot_begin_without_it(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"task 1 .* was ended by signal 9 .*; the other processes were ended; no"):
        train_here(program(tmp_path, WORKER_DIES), num_tasks=2, is_synchronous=False)


def test_a_worker_that_is_stopped_for_too_long_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["if task == 1: myself(signal.SIGSTOP)", "if task == 0: after(1.5); sys.exit(0)"]
    command = program(tmp_path, LISTEN, *lines)
    assert train_here(command, num_tasks=2, is_synchronous=False, step_timeout_s=0.5) == 0
    assert re.match(
        r"note: task 1 \(pid \d+\) was stopped by a signal, for longer than --timeout; the others go on",
        capfd.readouterr().err,
    )
    with pytest.raises(TrainingError, match=r"task 1 .* was stopped by a signal, for longer than --timeout; the other"):
        train_here(command, num_tasks=2, is_synchronous=True, step_timeout_s=0.5)


@pytest.mark.parametrize("is_synchronous", [False, True])
@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "ended by signal 9"), (signal.SIGSTOP, "stopped by a")])
def test_nothing_goes_on_without_the_master(
    number: signal.Signals, how: str, is_synchronous: bool, tmp_path: Path
) -> None:
    (tmp_path / "step-0000000012.safetensors").touch()
    command = program(tmp_path, LISTEN, f"if task == 0: myself({int(number)})")
    with pytest.raises(
        TrainingError, match=rf"task 0 .* was {how}.*step-0000000012.safetensors: go on from it with --resume$"
    ):
        train_here(command, num_tasks=2, is_synchronous=is_synchronous, step_timeout_s=0.5, checkpoints=tmp_path)


def test_what_a_worker_said_at_its_end_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pase.easgd.launch._GRACE_S", 0.3)
    fails = "if task == 1: time.sleep(0.5); open(gone, 'w').close(); sys.exit('error: there is no such file')"
    command = program(tmp_path, LISTEN, fails, "if task == 0: after(1.3); sys.exit(0)")
    assert train_here(command, num_tasks=2, is_synchronous=False) == 0
    assert re.match(r"note: task 1 .* ended with status 1: there is no such file; the others", capfd.readouterr().err)


def test_what_the_master_says_is_all_that_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = program(tmp_path, "if task == 0: time.sleep(0.3)", "sys.exit('error: it cannot be done')")
    assert train_here(command, num_tasks=3, is_synchronous=False) == 1
    assert capfd.readouterr().err == "error: it cannot be done\n"


def test_workers_that_have_ended_well_are_done(tmp_path: Path) -> None:
    command = program(tmp_path, LISTEN, "if task: sys.exit(0)", "time.sleep(0.5)", "sys.exit(0)")
    assert train_here(command, num_tasks=2, is_synchronous=True) == 0


def test_processes_run_what_this_one_does(capfd: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(addresses=("127.0.0.1:1",), task=0)
    assert supervise(pase_command(["--version"]), [cluster], goes_on=False) == 0
    assert "pase" in capfd.readouterr().out


@pytest.mark.parametrize("status", [2, 77])
def test_any_failure_of_the_chief_is_a_failure(status: int, tmp_path: Path) -> None:
    assert train_here(program(tmp_path, f"sys.exit({status})"), num_tasks=1, is_synchronous=True) == status


# -- the launcher itself is ended

LAUNCHER = """\
import sys
from pase.easgd.launch import local_clusters, supervise
sys.exit(supervise(sys.argv[1:], local_clusters(2, step_timeout_s=None), goes_on=False))
"""

SAYS_WHO = (
    "signal.signal(signal.SIGINT, lambda *_: sys.exit('stopped'))",
    "open(f'{__file__}.{task}.part', 'w').write(str(os.getpid()))",
    "os.rename(f'{__file__}.{task}.part', f'{__file__}.{task}')",
)


@contextmanager
def launched(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that has started two tasks, and these."""
    command = [sys.executable, "-c", LAUNCHER, *program(folder, *SAYS_WHO)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process, [_written(folder / f"program.py.{task}") for task in range(2)]
        finally:
            process.kill()


def _written(path: Path) -> int:
    end_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} is not there"
        time.sleep(0.02)
    return int(path.read_text(encoding="ascii"))


def _is_gone(pid: int) -> bool:
    """Whether a process ends in time; one that nobody has asked about yet counts as ended."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_when_the_launcher_is_killed_nobody_is_left(tmp_path: Path) -> None:
    with launched(tmp_path) as (process, tasks):
        process.kill()
        assert all(map(_is_gone, tasks))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_asks_for_the_end_ends_all(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with launched(tmp_path) as (process, tasks):
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status
        assert all(map(_is_gone, tasks))
    kept = "no checkpoint was kept: --checkpoint DIR keeps them"
    assert errors == ("stopped\n" if number == signal.SIGINT else f"ended by SIGTERM; {kept}\n")
