"""Programs that go on from their checkpoints: bit for bit in the same plan, and under other plans and numbers of ranks.

What they are held against are trainings of the same program that nothing interrupted.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.targets.programs import emit
from pase.targets.torch.checkpoints import checkpoints, save_checkpoint
from pase.targets.torch.script import train
from pase.targets.training.checkpointing import NEWEST, CheckpointFolder
from pase.targets.training.optimisers import make_rule
from pase.targets.training.options import TrainingOptions
from tests.runtime.networks import dropping, small
from tests.runtime.options import options
from tests.runtime.plans import make_plan, random_plan
from tests.targets.torch.ranks import Pool
from tests.targets.torch.trained import builder_of

DROPPING = emit(random_plan(dropping(), 4, 3), target="torch")


def run(
    source: str, given: TrainingOptions, world: int, folder: Path | None = None, **others: Any
) -> tuple[list[float], list[dict[str, Any]]]:
    """The losses of a program, and what it reports on rank 0."""
    found: list[dict[str, Any]] = []
    checkpointing = None
    if folder is not None:
        checkpointing = CheckpointFolder(
            folder=folder, save_every=others.pop("every", 100), resume=others.pop("resume", None)
        )
    losses = train(
        builder_of(source), given, num_devices=world, checkpointing=checkpointing, report=found.append, **others
    )
    return losses, found


def goes_on(rank: int, world: int, given: TrainingOptions, folder: Path) -> list[float]:
    whole, _ = run(DROPPING, given, world)
    metrics = folder / "metrics"
    first, told = run(DROPPING, replace(given, steps=4), world, folder / "kept", every=3, metrics_path=metrics)
    assert first == whole[:4]
    if rank == 0:
        assert [event["step"] for event in told if event["event"] == "saved"] == [3, 4]
    assert [path.name for path in checkpoints(folder / "kept")] == ["step-0000000003", "step-0000000004"]
    # The seed is the checkpoint's.
    going_on = replace(given, seed=None)
    again, told = run(DROPPING, going_on, world, folder / "kept", resume=NEWEST, metrics_path=metrics)
    assert again == whole[4:]
    if rank == 0:
        assert told[0] == {"event": "resumed", "step": 4}
        assert len(metrics.read_text(encoding="utf-8").splitlines()) == 7
    branch = str(folder / "kept" / "step-0000000003")
    again, _ = run(DROPPING, replace(going_on, steps=5), world, folder / "kept", resume=branch)
    assert again == whole[3:5]
    # Later ones are those of another branch.
    names = [path.name for path in checkpoints(folder / "kept")]
    assert names == ["step-0000000003", "step-0000000004", "step-0000000005"]
    assert (folder / "kept" / "step-0000000007.superseded").is_dir()
    return whole


def goes_on_elsewhere(rank: int, world: int, given: TrainingOptions, folder: Path, source: str) -> list[float]:
    return run(source, given, world, folder / "elsewhere", resume=str(folder / "kept" / "step-0000000004"))[0]


@pytest.mark.parametrize("rule", ["adam", "adafactor"])
def test_going_on_is_as_if_nothing_had_happened(ranks: Pool, tmp_path: Path, rule: str) -> None:
    numbers = np.random.default_rng(0)
    arrays = {"inputs": numbers.standard_normal((20, 4, 6)), "labels": numbers.integers(6, size=20)}
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    given = options(7, rate=0.01, rule=make_rule(rule, {}), seed=3, data_path=tmp_path / "data.npz")
    whole = ranks.run(goes_on, given, tmp_path)[0]
    other = emit(random_plan(dropping(), 2, 5), target="torch")
    losses = ranks.run(goes_on_elsewhere, given, tmp_path, other, world=2)[0]
    assert losses == pytest.approx(whole[4:], rel=1e-12)


OLD = Path(__file__).with_name("program_0_10")
OLD_LOSSES = (2.238640151940978, 2.108702869076358)
"""Of steps 3 and 4 of the training by PaSE 0.10, of which `OLD` has the checkpoint after step 2."""


def goes_on_from_old(_rank: int, world: int, folder: Path) -> list[float]:
    source = emit(random_plan(small("mlp"), world, 4), target="torch")
    given = options(4, rate=0.01, rule=make_rule("adam", {}), seed=3)
    return run(source, given, world, folder, resume=NEWEST)[0]


def test_a_program_goes_on_from_a_checkpoint_of_0_10(ranks: Pool, tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "kept")
    for found in ranks.run(goes_on_from_old, tmp_path / "kept", world=2):
        assert found == pytest.approx(OLD_LOSSES, rel=1e-12)


def refuses(rank: int, world: int, folder: Path, others: dict[str, str]) -> None:
    given = options(2, rule=make_rule("adam", {}))
    source = emit(make_plan(small("mlp"), world, {"fc1": {"b": 2}}), target="torch")
    kept = folder / "kept"
    run(source, given, world, kept)
    more = replace(given, steps=4)
    last = kept / "step-0000000002"
    for text, changed, program, resume in (
        ("is of another model: it has no weight 'conv1/bias'", more, others["lenet5"], NEWEST),
        (
            "is of another optimiser: adam, not sgd; give --opt",
            replace(more, rule=make_rule("sgd", {})),
            source,
            NEWEST,
        ),
        ("is of another type: float64, not float32; give", replace(more, dtype="float32"), source, NEWEST),
        ("is of another seed: 0, not 4; leave --seed out", replace(more, seed=4), source, str(last)),
        ("is of step 2; nothing is left of 2 steps, ask for more", given, source, NEWEST),
        ("holds checkpoints up to step 2; go on with --resume or name another one", more, source, None),
    ):
        with pytest.raises(ProgramError, match=text):
            run(program, changed, world, kept, resume=resume)
    assert [path.name for path in kept.iterdir()] == [last.name]
    # One that is no program's, and one that is cut off.
    import torch

    path = save_checkpoint(folder / "module", torch.nn.Linear(2, 2), step=1)
    with pytest.raises(ProgramError, match=r"step-0000000001: dtype is missing"):
        run(source, more, world, folder / "other", resume=str(path))
    if rank == 0:
        for file in last.glob("rank-*.safetensors"):
            file.write_bytes(file.read_bytes()[:40])
    torch.distributed.barrier()
    with pytest.raises(ProgramError, match=r"checkpoint .*step-0000000002 is damaged: "):
        run(source, more, world, kept, resume=NEWEST)
    if rank == 0:
        (last / "training.json").write_bytes(b"")
    torch.distributed.barrier()
    with pytest.raises(ProgramError, match=r"checkpoint .*step-0000000002 is damaged: "):
        run(source, more, world, kept, resume=NEWEST)


def test_a_checkpoint_that_does_not_fit_is_refused(ranks: Pool, tmp_path: Path) -> None:
    others = {name: emit(random_plan(small(name), 2, 1), target="torch") for name in ("lenet5",)}
    ranks.run(refuses, tmp_path, others, world=2)


def diverges(rank: int, world: int, folder: Path) -> None:
    source = emit(random_plan(small("mlp"), world, 1), target="torch")
    # The last step's update is beyond what numbers hold; no step finds out.
    given = options(1, rate=1e45, dtype="float32", rule=make_rule("momentum", {}))
    with pytest.raises(ProgramError, match=r"step 1: weight '.*' is not finite; no checkpoint was written"):
        run(source, given, world, folder)
    assert checkpoints(folder) == []
    text = r"step 2: .*; the step was not taken; the last checkpoint, .*step-0000000001, is as it was"
    with pytest.raises(ProgramError, match=text):
        run(source, options(9, rate=1e150), world, folder / "steep", every=1)


def test_what_is_not_finite_is_not_kept(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(diverges, tmp_path, world=2)
