"""Ranks on this machine: started as torchrun starts them, and ended together."""

import ast
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pase.errors import ProgramError
from pase.targets.torch.failures import RankError
from pase.targets.torch.launch import call, rank_environment, run_program
from tests.targets.torch import launched
from tests.targets.torch.ranks import Pool, RanksFailedError

LIMIT_S = 120.0
"""All have ended within this time, where a collective would wait for ten minutes."""

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(Path(launched.__file__))

# What needs no process group needs no PyTorch, whose import is most of what ranks take to start.
BY_THEMSELVES = "import os, time\nif os.environ['RANK'] == '1': {act}\ntime.sleep(600)"
"""A program of which rank 1 does something and the others wait."""
WAITING = (
    "import os, pathlib, time; (pathlib.Path({folder!r}) / os.environ['RANK']).write_text(str(os.getpid())); "
    "time.sleep(600)"
)
"""A program whose ranks write their process ids, and wait."""
SHOWING = (
    f"import os, sys; sys.stdout.write(str({{name: os.environ[name] for name in {launched.NAMES}}}) + '\\n'); "
    "sys.stderr.write('to errors ' + os.environ['RANK'] + '\\n')"
)
"""A program that says what its environment is."""


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def process_ids(folder: Path, count: int) -> list[int]:
    """The ranks' own ids, once all have written them."""
    end_s = time.monotonic() + 300
    while time.monotonic() < end_s:
        texts = [path.read_text() for path in folder.iterdir()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError(f"only {len(list(folder.iterdir()))} of {count} ranks came up")


def torchrun(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def environments(shown: str) -> list[dict[str, str]]:
    """What ranks said of their environments, in the order of ranks."""
    found = [ast.literal_eval(line) for line in shown.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda each: each["RANK"])


def test_a_function_runs_on_all_ranks_beside_another_job(capfd: pytest.CaptureFixture[str]) -> None:
    """Each job has a store of its own; without a number of threads, ranks have their shares of the cores."""
    answers: list[object] = []
    job = threading.Thread(
        target=lambda: answers.extend(call(launched.sum_of_ranks, 0.5, ranks=2, timeout_s=300)),
    )
    job.start()
    run_program(["-c", SHOWING], ranks=2, threads=3, timeout_s=300)
    job.join()
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert answers == [(rank, 2, 0.5, "gloo", share) for rank in range(2)]
    (shown,) = environments(capfd.readouterr().out)
    assert (shown["RANK"], shown["OMP_NUM_THREADS"]) == ("0", "3")


def test_a_program_has_the_environment_that_torchrun_gives(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "showing.py").write_text(SHOWING)
    run_program([str(tmp_path / "showing.py")], ranks=2, threads=1, timeout_s=300)
    out, errors = capfd.readouterr()
    # Of ours the first alone is heard.
    (own,) = environments(out)
    assert errors == "to errors 0\n"
    theirs, _ = environments(torchrun(str(tmp_path / "showing.py")).stdout)
    assert {**theirs, "MASTER_ADDR": "127.0.0.1"} == own


@pytest.mark.full
def test_ranks_of_torchrun_name_the_one_that_failed() -> None:
    done = torchrun(SCRIPT, "1")
    assert done.returncode != 0
    named = [line for line in done.stderr.splitlines() if "RankError: rank" in line]
    assert named, done.stderr
    assert all("ended because rank 1 failed: ValueError: the third batch is empty" in line for line in named)


def test_a_rank_that_fails_ends_all_and_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process with other threads does not end for an error; the rank has told the others."""
    begin_s = time.monotonic()
    with pytest.raises(
        RankError,
        match=r"^rank 1 of 2 failed: ValueError: the third batch is empty; the others were ended$",
    ) as caught:
        call(launched.fail, 1, str(tmp_path), ranks=2)
    assert time.monotonic() - begin_s < LIMIT_S
    assert caught.value.rank == 1
    assert not any(map(is_running, process_ids(tmp_path, 2)))
    # The whole traceback of the rank is shown.
    errors = capfd.readouterr().err
    assert "ValueError: the third batch" in errors
    assert "in fail\n" in errors


def test_a_rank_that_ends_without_a_word_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2 was ended by signal 9 \(SIGKILL\); the others were ended$"):
        run_program(["-c", BY_THEMSELVES.format(act="os.kill(os.getpid(), 9)")], ranks=2)
    with pytest.raises(RankError, match=r"^rank 1 of 2 ended with status 3; the others were ended$"):
        run_program(["-c", BY_THEMSELVES.format(act="os._exit(3)")], ranks=2)
    with pytest.raises(RankError, match=r"^rank 1 of 2 ended with status 1: no file data\.txt; the others were ended$"):
        run_program(["-c", BY_THEMSELVES.format(act="raise SystemExit('error: no file data.txt')")], ranks=2)


def test_ranks_that_do_not_end_in_time_are_ended(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^after 3 s, 2 of 2 ranks still ran \(0, 1\); all were ended$"):
        run_program(["-c", WAITING.format(folder=str(tmp_path))], ranks=2, timeout_s=3)
    assert not any(map(is_running, process_ids(tmp_path, 2)))


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    def interrupt() -> None:
        process_ids(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_program(["-c", WAITING.format(folder=str(tmp_path))], ranks=2)
    assert not any(map(is_running, process_ids(tmp_path, 2)))


def test_all_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    waiting = ["-c", WAITING.format(folder=str(tmp_path))]
    code = f"from pase.targets.torch.launch import run_program; run_program({waiting!r}, ranks=2)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        ranks = process_ids(tmp_path, 2)
        parent.kill()
    end_s = time.monotonic() + 60
    while any(map(is_running, ranks)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(map(is_running, ranks))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "lost a connection; ranks that do not answer and may have ended: 2 ("),
        ("failed", "ended because rank 2 failed: ValueError: the third batch is empty"),
    ],
)
def test_ranks_that_nobody_watches_name_the_one_that_is_gone(ranks: Pool, how: str, said: str) -> None:
    """As on several hosts, where what watches one host's ranks is not heard on another."""
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(launched.lost, 2, how, world=3, grace_s=60.0)
    for rank in (0, 1):
        assert f"RankError: rank {rank} of 3 {said}" in str(caught.value)


def test_ranks_that_do_not_come_are_named(ranks: Pool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, given = store.port, rank_environment(1, 3, store.port, 1)
    with pytest.raises(RanksFailedError, match=r"rank 1 waited 1 s for the other ranks of 3; missing: 0, 2 \("):
        ranks.run(launched.joining, given, 1.0, world=1)
    del store
    with pytest.raises(RanksFailedError, match=rf"rank 1 cannot reach the store at 127.0.0.1:{port}, where all ranks"):
        ranks.run(launched.joining, given, 1.0, world=1)


def test_a_program_that_was_started_alone_is_a_group_of_one(ranks: Pool) -> None:
    assert ranks.run(launched.joining, {}, 60.0, world=1) == [(0, 1, "cpu", "gloo")]


def test_gloo_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert rank_environment(3, 8, 1234, 5)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(3, 8, 1234, 5)


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """The addresses, as the kernel writes them, and the ports at which processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and fields[9] in inodes:
                found.append((address, int(port, 16)))
    return found


def test_a_job_listens_on_loopback_alone_and_survives_strangers(tmp_path: Path) -> None:
    answers: list[object] = []
    # Of tests before it in this process, whose stores Python has not collected.
    others = set(listening([os.getpid()]))
    job = threading.Thread(target=lambda: answers.extend(call(launched.wait_for, str(tmp_path), ranks=2)))
    job.start()
    sockets = set(listening([os.getpid(), *process_ids(tmp_path, 2)])) - others
    assert len(sockets) >= 3
    assert {address for address, _ in sockets} == {"0100007F"}
    for _, port in sockets:
        for sent in (b"", bytes(64), b"\xff" * 5000, b"GET / HTTP/1.0\r\n\r\n", b"\x3c\x85\xf7\xce" + bytes(4000)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(sent)
    ((_, port),) = set(listening([os.getpid()])) - others
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=30))
    for name in ("pase/0/failure", "pase/pase/0/failure", "pase/none/0/failure"):
        store.set(name, "1 \x1b[31mowned")
    (tmp_path / "go").touch()
    job.join()
    assert answers == [2.0, 2.0]


@pytest.mark.full
def test_no_name_service_is_needed() -> None:
    """In a network of its own that has loopback alone, under a name that nothing resolves."""
    code = "from tests.targets.torch.launched import *; from pase.targets.torch.launch import call; "
    shown = "print([answer[2] for answer in call(sum_of_ranks, 1.0, ranks=2, timeout_s=60)])"
    inside = f"ip link set lo up; hostname nowhere; exec {sys.executable} -c '{code}{shown}'"
    command = ["unshare", "--net", "--uts", "--user", "--map-root-user", "sh", "-c", inside]
    try:
        possible = subprocess.run([*command[:-3], "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("this machine gives no network namespaces")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0]\n")
    # PyTorch's store remarks that an address has no name.
    assert all("hostname of the client socket cannot be retrieved" in line for line in done.stderr.splitlines())


# -- what cannot be


def test_a_function_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(ProgramError, match=r"cannot be sent to them .*; give a function of a module"):
        call(lambda: 1, ranks=2)

    def own() -> None: ...

    own.__module__ = "__main__"
    with pytest.raises(ProgramError, match=r"own is in the main program, which 2 ranks cannot import; put it into"):
        call(own, ranks=2)
    with pytest.raises(ProgramError, match="0 ranks were asked for; expected 1 or more"):
        run_program([SCRIPT], ranks=0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not; start the program with torchrun"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; expected a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 of WORLD_SIZE 2; expected 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set and MASTER_ADDR is not"),
    ],
)
def test_an_environment_of_another_kind_is_an_error(ranks: Pool, environment: dict[str, str], message: str) -> None:
    """On a rank, as this process may be in a group of one, which a module that is made parallel leaves."""
    with pytest.raises(RanksFailedError, match=message) as caught:
        ranks.run(launched.joining, environment, 60.0, world=1)
    assert caught.value.kinds == {0: "ProgramError"}


def test_the_error_can_be_sent() -> None:
    error = RankError("rank 1 of 2 failed", 1)
    sent: Callable[[bytes], RankError] = pickle.loads
    assert (str(sent(pickle.dumps(error))), sent(pickle.dumps(error)).rank) == ("rank 1 of 2 failed", 1)
