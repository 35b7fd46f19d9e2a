"""Limits of documents from outside, and files that are replaced whole or not at all."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pase.common.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_TOML_BYTES,
    DocumentSource,
    read_text,
    toml_document,
    write_atomically,
)
from pase.errors import PlanError

ROOT = Path(__file__).resolve().parents[1]


# -- writing


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "one é")
    assert path.read_text(encoding="utf-8") == "one é"
    write_atomically(path, b"\x00two")
    assert path.read_bytes() == b"\x00two"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
def test_what_fails_leaves_the_old_contents_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, step)), fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, json.dumps({"new": 1}))
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("stop")

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        write_atomically(tmp_path / "plan.json", "new")
    assert list(tmp_path.iterdir()) == []


def test_the_new_contents_appear_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # When the name changes hands, the new file is complete.
    path = tmp_path / "plan.json"
    path.write_text("old")
    seen = []
    replace = Path.replace

    def observed(self: Path, target: Path) -> Path:
        seen.append((self.read_text(), Path(target).read_text(), self.parent == path.parent))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", observed)
    write_atomically(path, "new")
    assert seen == [("new", "old", True)]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_any_new_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "ours", "x")
        (tmp_path / "plain").write_text("x")
        assert os.umask(umask) == umask  # and the mask is as it was
    finally:
        os.umask(before)
    ours, plain = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain"))
    assert ours == plain


def test_no_folder_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        write_atomically(tmp_path / "absent" / "plan.json", "x")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "plan.json"
    target.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


# -- limits, and what processes that were killed have left


def test_what_has_no_end_is_no_document(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as stream:
        stream.truncate(MAX_DOCUMENT_BYTES + 1)
    for path, reason in {
        "/dev/zero": "it is not a regular file",
        pipe: "it is not a regular file",
        tmp_path: "Is a directory",
        large: "it has 67,108,865 bytes; at most 67,108,864 are read",
        tmp_path / "none": "No such file or directory",
        "nu\0ll": "embedded null byte",
    }.items():
        with pytest.raises(PlanError, match=f"^the file cannot be read: {reason}$"):
            read_text(path, PlanError, "the file")
    with pytest.raises(PlanError, match=r"^the file has 2,097,153 characters of TOML; at most 2,097,152 are read$"):
        toml_document("#" * (MAX_TOML_BYTES + 1), DocumentSource(PlanError, "the file"))


def test_permissions_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for mode in (0o600, 0o640, 0o444):
        write_atomically(path, "one")
        path.chmod(mode)
        write_atomically(path, "two")
        assert path.read_text() == "two"
        assert stat.S_IMODE(path.stat().st_mode) == mode


KILLED = """
import os, signal, sys
from pathlib import Path
from pase.common.documents import write_atomically
os.fsync = lambda _handle: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), "three")
"""
"""A program that is killed while it writes a file."""


def _killed_while_writing(path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(path)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=120).returncode == -signal.SIGKILL


def test_what_a_process_that_was_killed_has_left_is_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "plan.json", tmp_path / ".plan.json.of-another"
    other.touch()
    _killed_while_writing(path)
    (left,) = tmp_path.glob(".plan.json.*.part")
    # It may be that of a process which is about to lock it.
    write_atomically(path, "one")
    assert left.exists()
    os.utime(left, (1, 1))
    with left.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        write_atomically(path, "two")
        assert left.exists(), "a process that is alive is writing it"
    write_atomically(path, "three")
    assert {item.name for item in tmp_path.iterdir()} == {"plan.json", other.name}
