"""Checkpoints of trainings across workers: damaged, of others, cut off by a kill."""

import os
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import save_file

from pase.easgd.checkpoint import (
    NEWEST,
    Checkpoint,
    Checkpointing,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from pase.errors import ProgramError
from pase.targets.training.checkpointing import prune


def made_up(step: int = 7) -> Checkpoint:
    numbers = np.random.default_rng(step)
    weights = {"fc/w": numbers.standard_normal((3, 2)), "é": numbers.standard_normal(()), "b": np.zeros(2)}
    return Checkpoint(
        step=step,
        dtype="float64",
        seed=5,
        optimiser="momentum",
        options={"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
        data={"source": "arrays", "rows": {"x": 12}},
        weights=weights,
        slots={"fc/w": {"velocity": numbers.standard_normal((3, 2))}},
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- the file


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, made_up())
    assert path.name == "step-0000000007.safetensors"
    assert list(contents(tmp_path)) == [path.name]
    found, expected = read_checkpoint(path), made_up()
    for name in ("step", "dtype", "seed", "optimiser", "options", "data"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.weights.keys() == expected.weights.keys()
    for name, array in expected.weights.items():
        np.testing.assert_array_equal(found.weights[name], array)
        assert found.weights[name].shape == array.shape
    np.testing.assert_array_equal(found.slots["fc/w"]["velocity"], expected.slots["fc/w"]["velocity"])


def test_every_flipped_byte_and_every_cut_is_found_out(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, made_up())
    good = path.read_bytes()
    for position in (*range(80), *range(80, len(good), 7)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        with pytest.raises(ProgramError, match=r"checkpoint .*step-0000000007.safetensors is damaged: "):
            read_checkpoint(path)
        path.write_bytes(good[:position])
        with pytest.raises(ProgramError, match=r"checkpoint .*step-0000000007.safetensors is damaged: "):
            read_checkpoint(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(ProgramError, match=r"is damaged: it is cut off, or no checkpoint at all .*not fully covered"):
        read_checkpoint(path)


def test_the_array_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, made_up())
    good = path.read_bytes()
    # From the end: é 1 number, fc/w 6, b 2, velocity 6.
    for end, name in (
        (1, r"weight 'é'"),
        (9, r"weight 'fc/w'"),
        (57, r"weight 'b'"),
        (73, r"velocity of weight 'fc/w'"),
    ):
        flipped = bytearray(good)
        flipped[-end] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ProgramError, match=rf"damaged: {name} does not have the checksum"):
            read_checkpoint(path)


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "step-0000000001.safetensors"
    with pytest.raises(ProgramError, match=r"cannot read checkpoint .*No such file"):
        read_checkpoint(path)
    for content in (b"", b"\x80\x04K\x01.", b"PK\x03\x04" + b"\0" * 99):
        path.write_bytes(content)
        with pytest.raises(ProgramError, match=r"is damaged: it is cut off, or no checkpoint at all \(.*header"):
            read_checkpoint(path)
    save_file({"weight/fc/w": np.ones(3)}, path, {"format": "np"})
    with pytest.raises(ProgramError, match="its metadata are format; expected those of a checkpoint"):
        read_checkpoint(path)


def test_files_of_older_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-0000000002.ckpt"
    path.write_bytes(b"PASE-CHECKPOINT-1\n")
    match = r"step-0000000002.ckpt is of PaSE 0.8 or older.*expected a .safetensors file; go on with that version"
    with pytest.raises(ProgramError, match=match):
        read_checkpoint(path)
    with pytest.raises(ProgramError, match=match):
        Checkpointing(folder=tmp_path, resume=NEWEST).found()


def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    checkpoint = made_up()
    checkpoint.slots["fc/w"]["velocity"][1, 1] = np.inf
    with pytest.raises(ProgramError, match=r"step 7: velocity of weight 'fc/w' is not finite; no checkpoint was"):
        write_checkpoint(tmp_path, checkpoint)
    assert contents(tmp_path) == {}


def test_a_save_that_fails_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, made_up(2))
    before = contents(tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pase.easgd.checkpoint.os.fsync", full)
    with pytest.raises(ProgramError, match=r"cannot write checkpoint .*step-0000000004.safetensors: .*No space left"):
        write_checkpoint(tmp_path, made_up(4))
    assert contents(tmp_path) == before


def killed(_arrays: object, path: Path, _metadata: object) -> None:
    """Write as safetensors does, to a file of another name beside the one that it is given, and be killed."""
    (path.parent / ".tmpA1b2C3").write_bytes(bytes(100))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_safetensors_writes_leaves_nothing_after_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which frameworks have
        patch.setattr(safetensors.numpy, "save_file", killed)
        child = os.fork()
        if not child:
            try:
                write_checkpoint(tmp_path, made_up(3))
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path.name for path in tmp_path.rglob(".tmp*")] == [".tmpA1b2C3"]
    write_checkpoint(tmp_path, made_up(4))
    prune(tmp_path, step=4, keep=3, suffix=".safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000004.safetensors"]


def test_where_the_newest_is_damaged_an_older_one_is_offered(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    paths = [write_checkpoint(tmp_path, made_up(step)) for step in (2, 4, 6)]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 6
    for path in paths[1:]:
        path.write_bytes(path.read_bytes()[:-3])
    before = contents(tmp_path)
    with pytest.raises(ProgramError, match=r"6.safetensors is damaged: .*that of step 2 .*--resume .*0002"):
        newest_checkpoint(tmp_path)
    assert contents(tmp_path) == before
    paths[0].write_bytes(b"")
    with pytest.raises(ProgramError, match=r"0006.safetensors is damaged: .*; there is no complete one in "):
        newest_checkpoint(tmp_path)


def test_the_last_ones_are_kept_and_later_ones_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 99):
        write_checkpoint(tmp_path, made_up(step))
    (tmp_path / ".step-0000000009.safetensors.part").write_bytes(b"cut off")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    prune(tmp_path, step=8, keep=2, suffix=".safetensors")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [8, 6]
    names = {
        "step-0000000006.safetensors",
        "step-0000000008.safetensors",
        "step-0000000099.safetensors.superseded",
        "notes.txt",
    }
    assert set(contents(tmp_path)) == names
