"""Checkpoints: damaged, of others, cut off by a kill; and trainings that go on from them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import save_file

from pase.errors import ProgramError
from pase.graph import Graph
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.runtime.checkpoint import (
    NEWEST,
    Checkpoint,
    Checkpointing,
    checkpoint_path,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from pase.targets.mesh_tensorflow.runtime.script import main, train
from pase.targets.programs import emit
from pase.targets.training.checkpointing import prune
from pase.targets.training.optimisers import make_rule
from pase.targets.training.options import Schedule, TrainingOptions
from tests.runtime.networks import small
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import builder_of

ROOT = Path(__file__).resolve().parents[2]


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

    monkeypatch.setattr("pase.targets.mesh_tensorflow.runtime.checkpoint.os.fsync", full)
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


# -- trainings that go on

SCHEDULE = Schedule(peak=0.05, kind="cosine", warmup_steps=2, num_steps=9)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three batches and a bit, so that a position in them matters."""
    numbers = np.random.default_rng(0)
    path = tmp_path / "data.npz"
    np.savez(path, inputs=numbers.standard_normal((80, 12)), labels=numbers.integers(12, size=80))
    return path


def run(plan: Plan, steps: int, data: Path | None, **options: Any) -> list[float]:
    rule = make_rule(options.pop("optimiser", "adam"), {})
    names = {field.name for field in fields(TrainingOptions)}
    given = {"dtype": "float64", "schedule": SCHEDULE} | {key: options[key] for key in options if key in names}
    others = {key: value for key, value in options.items() if key not in names}
    training = TrainingOptions(steps=steps, data_path=data, rule=rule, **given)
    return train(builder_of(emit(plan)), training, num_devices=plan.num_devices, **others)


@pytest.mark.parametrize("optimiser", [pytest.param("adam", marks=pytest.mark.full), "adafactor"])
def test_going_on_is_as_if_nothing_had_happened(optimiser: str, tmp_path: Path, data: Path) -> None:
    plan, folder = random_plan(small("mlp", layers=1), 4, 3), tmp_path / "kept"
    whole = run(plan, 9, data, optimiser=optimiser, seed=3)
    first = run(plan, 5, data, optimiser=optimiser, seed=3, checkpointing=Checkpointing(folder=folder, save_every=2))
    assert first == whole[:5]
    assert [step for step, _ in list_checkpoints(folder)] == [5, 4, 2]
    file = str(checkpoint_path(folder, 5))
    again = Checkpointing(folder=tmp_path / "b", resume=file)
    # Bit for bit; the seed is the checkpoint's.
    assert run(plan, 9, data, optimiser=optimiser, checkpointing=again) == whole[5:]
    again = Checkpointing(folder=tmp_path / "c", resume=file)
    losses = run(random_plan(small("mlp", layers=1), 6, 2), 9, data, optimiser=optimiser, checkpointing=again)
    assert losses == pytest.approx(whole[5:], rel=1e-12)


def test_float32_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plan, folder = one_device(), tmp_path / "kept"
    whole = run(plan, 6, None, dtype="float32")
    run(plan, 3, None, dtype="float32", checkpointing=Checkpointing(folder=folder))
    going_on = Checkpointing(folder=folder, resume=NEWEST)
    assert run(plan, 6, None, dtype="float32", checkpointing=going_on) == whole[3:]


def one_device(name: str = "mlp") -> Plan:
    return make_plan(small(name), 1, {})


def other_mlp() -> Plan:
    from pase.models import build

    graph: Graph = build("mlp", batch=24, arguments={"inputs": 12, "hidden": 12, "layers": 3, "classes": 12})
    return make_plan(graph, 1, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": lambda: one_device("lenet5")}, r"is of another model: it has no weight 'conv1/bias'"),
        ({"plan": other_mlp}, r"another model: its weight 'fc1/bias' has shape \[24\], not \[12\]"),
        ({"optimiser": "sgd"}, r"is of another optimiser: adam, not sgd; give --optimizer adam"),
        ({"dtype": "float32"}, r"is of another type: float64, not float32; give --dtype float64"),
        ({"seed": 4}, r"is of another seed: 0, not 4; leave --seed out"),
        ({"data": True}, r"another training's data: their rows is None, not {'inputs': 80, 'labels': 80}"),
        ({"steps": 2}, r"step-0000000002.safetensors is of step 2; nothing is left of 2 steps, ask for more"),
        ({"checkpointing": None}, r"holds checkpoints up to step 2; go on with --resume or name another one"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, data: Path
) -> None:
    folder = tmp_path / "kept"
    run(one_device(), 2, None, checkpointing=Checkpointing(folder=folder))
    before = contents(folder)
    resume = NEWEST if "checkpointing" not in change else None
    options: dict[str, Any] = {"checkpointing": Checkpointing(folder=folder, resume=resume)}
    options |= {key: change[key] for key in ("optimiser", "dtype", "seed") if key in change}
    plan: Callable[[], Plan] = change.get("plan", one_device)
    with pytest.raises(ProgramError, match=message):
        run(plan(), change.get("steps", 4), data if "data" in change else None, **options)
    assert contents(folder) == before


def test_a_loss_that_is_not_finite_leaves_the_checkpoint(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "kept"
    steep = Schedule(peak=1e200)
    with pytest.raises(ProgramError) as caught:
        run(
            one_device(),
            9,
            data,
            optimiser="sgd",
            schedule=steep,
            checkpointing=Checkpointing(folder=folder, save_every=1),
        )
    assert "the last checkpoint, " in str(caught.value)
    for _, path in list_checkpoints(folder):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], r"--resume and --save-every need --checkpoint DIR"),
        (["--checkpoint", "x", "--save-every", "0"], r"save-every is 0; expected 1 or more"),
        (["--checkpoint", "x", "--keep", "0"], r"keep is 0; expected 1 or more"),
        (["--optimizer", "adam", "--momentum", "0.5"], r"optimiser adam has no momentum"),
        (["--data", "x.npz", "--data-generator", "a:b"], r"both --data and --data-generator are given"),
        (["--data-generator", "a.b"], r"'a.b' names no function; expected package.module:function"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main(builder_of(emit(one_device())), num_devices=1, arguments=arguments)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message.replace("\\", "") in line


# -- killed

KILLERS = {
    # Half of the file is written.
    "in the midst of a save": """
        import pase.targets.mesh_tensorflow.runtime.checkpoint as checkpoint
        write = checkpoint._write
        def killing(path, arrays, text):
            write(path, arrays, text)
            if '"step": 6,' in text:
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        checkpoint._write = killing
    """,
    # All of it is, under its temporary name.
    "before it has its name": """
        import pase.targets.mesh_tensorflow.runtime.checkpoint as checkpoint
        write = checkpoint.os.fsync
        calls = []
        def killing(handle):
            write(handle)
            calls.append(handle)
            if len(calls) == 5:  # a file and its folder for each of two
                os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.os.fsync = killing
    """,
}


def start(folder: Path, plan: Plan, *arguments: str, before: str = "") -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(emit(plan), encoding="utf-8")
    code = (
        f"import os, runpy, signal, sys\n{textwrap.dedent(before)}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    starter = folder / "starter.py"
    starter.write_text(f"import sys\nsys.argv.pop(0)\n{code}", encoding="utf-8")
    command = [sys.executable, str(starter), str(script), "--dtype", "float64", "--json", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    "moment", ["in the midst of a save", pytest.param("before it has its name", marks=pytest.mark.full)]
)
def test_a_kill_during_a_save_loses_no_more_than_that_save(moment: str, tmp_path: Path, data: Path) -> None:
    folder, metrics = tmp_path / "kept", tmp_path / "metrics.jsonl"
    options = ["--optimizer", "momentum", "--data", str(data), "--learning-rate", "0.1", "--steps", "9"]
    options += ["--checkpoint", str(folder), "--save-every", "2", "--metrics", str(metrics)]
    plan = random_plan(small("mlp", layers=1), 4, 3)
    child = start(tmp_path, plan, *options, before=KILLERS[moment])
    _, errors = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, errors
    assert [step for step, _ in list_checkpoints(folder)] == [4, 2]
    assert any(path.name.endswith(".part") for path in folder.iterdir())
    constant = Schedule(peak=0.1)
    whole = run(plan, 9, data, optimiser="momentum", schedule=constant)
    going_on = Checkpointing(folder=folder, save_every=2, resume=NEWEST)
    again = run(plan, 9, data, optimiser="momentum", schedule=constant, checkpointing=going_on, metrics_path=metrics)
    assert again == whole[4:]
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(whole, start=1))
    assert {"learning_rate", "examples_per_s", "time_s", "unix_time_s"} < set(lines[0])


@pytest.mark.full
def test_a_kill_in_the_midst_of_a_step_loses_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    plan = random_plan(small("mlp"), 4, 3)
    arguments = ["--checkpoint", str(folder), "--save-every", "5", "--steps", "1000000", "--optimizer", "adam"]
    child = start(tmp_path, plan, *arguments)
    assert child.stdout is not None
    seen = 0
    for line in child.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] >= 12:
            seen = event["step"]
            child.kill()
            break
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    found = newest_checkpoint(folder)
    assert found is not None
    assert seen - 5 <= found.step
    constant = Schedule(peak=0.01)
    whole = run(plan, found.step + 4, None, schedule=constant)
    other = random_plan(small("mlp"), 2, 5)
    going_on = Checkpointing(folder=folder, resume=NEWEST)
    losses = run(other, found.step + 4, None, schedule=constant, checkpointing=going_on)
    assert losses == pytest.approx(whole[found.step :], rel=1e-12)
