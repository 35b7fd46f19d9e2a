"""Checkpoints of parallel models: across plans and numbers of ranks, with the optimizer, whole or not at all."""

import copy
import itertools
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import pase
from pase.errors import ProgramError
from pase.targets.torch import shard_files
from pase.targets.torch.checkpoints import checkpointable, checkpoints, load_checkpoint, save_checkpoint
from pase.targets.torch.parameters import full_state_dict, held_by
from pase.targets.torch.states import local_of
from pase.targets.torch.values import cut
from tests.runtime.plans import random_plan
from tests.targets.torch.ranks import Pool, RanksFailedError
from tests.targets.torch.test_parameters import model_of, on_rank

Whole = dict[str, torch.Tensor]


def trained(rank: int, world: int, plan: str, steps: int, seed: int = 0) -> tuple[nn.Module, Any]:
    """A parallel model and its optimizer after some steps, which depend on the plan as little as their gradients do."""
    own = on_rank(rank, world, plan, model_of(seed))
    decayed, others = ([p for p in own.root.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.1)
    for step in range(steps):
        own.loss(own.scales(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return own.root, optimizer


def whole_state(root: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Whole, Whole]:
    """All of a model's state, and of its optimizer's, by name."""
    slots = {}
    for name, parameter in root.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            slots[f"{name} {slot}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return full_state_dict(root, on_all=True), slots


def assert_same(found: tuple[Whole, Whole], wanted: tuple[Whole, Whole]) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name


def saving(rank: int, world: int, plan: str, folder: Path) -> None:
    root, optimizer = trained(rank, world, plan, steps=3)
    optimizer.param_groups[1]["lr"] = 0.003
    path = save_checkpoint(folder, root, optimizer, step=3, extra={"epoch": 2})
    assert path.name == "step-0000000003"
    state = whole_state(root, optimizer)
    if rank == 0:
        torch.save(state, folder / "whole.pt")


def loading(rank: int, world: int, plan: str, folder: Path) -> None:
    root, optimizer = trained(rank, world, plan, steps=int(plan == "mixed"), seed=5)
    pointers = [local_of(parameter).data_ptr() for parameter in root.parameters()]
    found = load_checkpoint(folder, root, optimizer)
    assert found is not None
    assert (found.step, found.extra) == (3, {"epoch": 2})
    assert_same(whole_state(root, optimizer), torch.load(folder / "whole.pt"))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.003]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999)] * 2
    # Values came into the tensors that were there: leaves and averages go on with them.
    assert [local_of(parameter).data_ptr() for parameter in root.parameters()] == pointers
    alone = trained(rank, world, plan, steps=0, seed=6)[0]
    load_checkpoint(found.path, alone)
    assert_same((full_state_dict(alone, on_all=True), {}), (torch.load(folder / "whole.pt")[0], {}))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("rows", {2: "mixed", 1: "data"}),
        ("unlike", {4: "mixed"}),
        ("mixed", {2: "unlike"}),
        pytest.param("rows", {6: "sixths"}, marks=pytest.mark.full),
    ],
)
def test_any_plan_and_number_of_ranks_loads(ranks: Pool, tmp_path: Path, saved: str, loaded: dict[int, str]) -> None:
    ranks.run(saving, saved, tmp_path)
    for world, plan in loaded.items():
        ranks.run(loading, plan, tmp_path, world=world)


def by_the_library(rank: int, world: int, folder: Path) -> None:
    root, optimizer = trained(rank, world, "mixed", steps=2)
    wanted = whole_state(root, optimizer)
    # The product of three pieces lies apart on the ranks; as it is, it is refused, and nothing is written wrong.
    model, slots = get_state_dict(root, optimizer)
    with pytest.raises(dcp.CheckpointException, match="overlapping chunks"):
        dcp.save({"model": model, "optimizer": slots}, checkpoint_id=folder / "refused")
    dcp.save(checkpointable({"model": model, "optimizer": slots}), checkpoint_id=folder / "saved")
    root, optimizer = trained(rank, world, "rows", steps=1, seed=4)
    model, slots = get_state_dict(root, optimizer)
    dcp.load(checkpointable({"model": model, "optimizer": slots}), checkpoint_id=folder / "saved")
    # Parameters that no layer reads have no slots.
    options = StateDictOptions(strict=False)
    set_state_dict(root, optimizer, model_state_dict=model, optim_state_dict=slots, options=options)
    assert_same(whole_state(root, optimizer), wanted)


def test_torch_distributed_checkpoint_saves_and_loads(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(by_the_library, tmp_path)


def several(rank: int, world: int, folder: Path) -> None:
    root, optimizer = trained(rank, world, "rows", steps=1)
    assert load_checkpoint(folder, root) is None
    for step in (1, 2, 10, 10):
        save_checkpoint(folder, root, step=step)
    if rank == 0:
        (folder / ".step-0000000011.part").mkdir()
        (folder / "step-0000000012").mkdir()
    torch.distributed.barrier()
    assert [path.name for path in checkpoints(folder)] == ["step-0000000002", "step-0000000010"]
    found = load_checkpoint(folder, root)
    assert found is not None
    assert found.step == 10
    save_checkpoint(folder, root, step=11, keep=1)
    assert [path.name for path in checkpoints(folder)] == ["step-0000000011"]
    with pytest.raises(ProgramError, match=r"step-0000000011 holds no optimizer's state; load the model alone"):
        load_checkpoint(folder, root, optimizer)
    with pytest.raises(ProgramError, match=r"another model: 'weight' has shape \[3\] here, and there is none"):
        load_checkpoint(folder, nn.PReLU(3))
    save_checkpoint(folder, root, optimizer, step=12)
    fewer = torch.optim.AdamW(list(root.parameters())[:2])
    with pytest.raises(ProgramError, match="groups hold other parameters"):
        load_checkpoint(folder, root, fewer)
    strange = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ProgramError, match="a parameter that the module does not have"):
        save_checkpoint(folder, root, strange, step=13)
    # Where it cannot be written, all ranks say so.
    (folder / "file").touch() if rank == 0 else None
    torch.distributed.barrier()
    with pytest.raises(ProgramError, match=r"cannot write checkpoint .*older ones are as they were"):
        save_checkpoint(folder / "file", root, step=1)


def test_the_newest_whole_checkpoint_is_loaded(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(several, tmp_path, world=2)


def damaging(_rank: int, _world: int, folder: Path) -> None:
    module = nn.Linear(64, 64)
    paths = [save_checkpoint(folder, module, step=step, keep=9) for step in (2, 4, 6, 8)]
    (file,) = paths[3].glob("*.safetensors")
    content = file.read_bytes()
    # Of the same length, which is found out when it is read.
    file.write_bytes(content[:9000] + bytes(len(content) - 9000))
    with pytest.raises(
        ProgramError,
        match=r"0008 is damaged: 'model.weight': its bytes in .* are not those that were written \(SHA-256\); that of "
        r"step 6 is complete: go on from .*-0000000006",
    ):
        load_checkpoint(folder, module)
    file.write_bytes(content[:-1])
    (paths[2] / "rank-00000.safetensors").unlink()
    (paths[1] / "training.json").write_text("{")
    with pytest.raises(
        ProgramError, match=r"0008 is damaged: .*safetensors, which has .* bytes; expected .*; that of step 2 is com"
    ):
        load_checkpoint(folder, module)
    (paths[0] / "rank-00000.safetensors").unlink()
    with pytest.raises(ProgramError, match=r"0006 is damaged: .*; there is no complete one in "):
        load_checkpoint(paths[2], module)


def test_where_one_is_damaged_another_is_offered(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(damaging, tmp_path, world=1)


# -- ranks that are killed while they write, and at a random time


def expected(name: str, shape: torch.Size, step: int, dtype: torch.dtype) -> torch.Tensor:
    """What there is to be at a step, of everything."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=draw, dtype=torch.float32).to(dtype)


def of_step(root: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the tensors of a model and its optimizer, and what they are to be at a step."""
    for name, parameter in root.named_parameters():
        kept = optimizer.state[parameter]
        kept.setdefault("step", torch.tensor(float(step)))
        for slot in ("", "exp_avg", "exp_avg_sq"):
            tensor: Any = kept.setdefault(slot, torch.zeros_like(parameter)) if slot else parameter
            yield tensor, expected(name + slot, parameter.shape, step, parameter.dtype)


def saves(rank: int, world: int, folder: Path, victim: int, share: float | None) -> None:
    """Write one checkpoint after the other, until a rank is killed.

    share: how many it has taken by then, after two; None for one that is killed between two shards of its file.
    """
    root = on_rank(rank, world, "mixed").root
    optimizer = torch.optim.AdamW(root.parameters())
    found = load_checkpoint(folder, root, optimizer)
    first = 1 if found is None else found.step + 1
    for step in itertools.count(first):
        begin_s = time.monotonic()
        with torch.no_grad():
            for tensor, value in of_step(root, optimizer, step):
                tensor.to_local().copy_(cut(value, held_by(tensor)))
        save_checkpoint(folder, root, optimizer, step=step)
        if rank == 0:
            # It may be killed here, too.
            (folder / "told").write_text(str(step))
            (folder / "told").replace(folder / "saved")
        if rank == victim and step == first + 1 and share is None:
            pytest.MonkeyPatch().setattr(shard_files, "_raw", _killed_at_second(shard_files._raw))
        elif rank == victim and step == first + 1:
            seconds = share * (time.monotonic() - begin_s)
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _killed_at_second(raw: Callable[[torch.Tensor], memoryview]) -> Callable[[torch.Tensor], memoryview]:
    seen = itertools.count()

    def killed(x: torch.Tensor) -> memoryview:
        if next(seen) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return raw(x)

    return killed


def loads(rank: int, world: int, folder: Path) -> int:
    """Load the newest checkpoint, which is to be that of its step, bit for bit; return that."""
    root = on_rank(rank, world, "mixed").root
    optimizer = torch.optim.AdamW(root.parameters())
    found = load_checkpoint(folder, root, optimizer)
    assert found is not None
    assert all(torch.equal(tensor.full_tensor(), value) for tensor, value in of_step(root, optimizer, found.step))
    return found.step


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_a_rank_that_is_killed_leaves_the_last_whole_checkpoint(ranks: Pool, tmp_path: Path, kills: int) -> None:
    numbers = random.Random(1)
    for kill in range(kills):
        victim = numbers.randrange(2)
        share = numbers.uniform(0, 3) if kill else None
        with pytest.raises(RanksFailedError, match=rf"rank {victim} of 2: was ended by signal 9"):
            ranks.run(saves, tmp_path, victim, share, world=2)
        if share is None:
            (cut_off,) = tmp_path.glob(f".*.part/rank-{victim:05d}.safetensors")
            with pytest.raises(SafetensorError, match=r"(?i)header|incomplete"):
                load_file(cut_off)
        # That is the last one that all ranks had finished, or one that was finished since.
        first, second = ranks.run(loads, tmp_path, world=2)
        assert first == second >= int((tmp_path / "saved").read_text())


# -- of parallel modules


class Gated(nn.Module):
    """Statistics, a product that is read in pieces, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(self.norm(x)).chunk(3, -1)
        dropped = nn.functional.dropout(torch.tanh(q) * k + v, 0.4, self.training)
        return nn.functional.cross_entropy(self.last(dropped), y)


def parallel_model(rank: int, world: int, folder: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=draw), torch.randint(0, 4, (8,), generator=draw)
    graph = pase.load((Gated(), (x, y)))
    first = pase.parallelize((Gated(), (x, y)), random_plan(graph, world, 3), seed=5)
    optimizer = torch.optim.AdamW(first.parameters())
    for _ in range(2):
        first(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, first, optimizer, step=2)
    wanted = whole_state(first, optimizer)
    # A copy has parameters and gradients of its own, and computes the same.
    twin = copy.deepcopy(first)
    loss = twin(x, y)
    loss.backward()
    assert twin.get_parameter("last.weight").grad is not None
    assert first.get_parameter("last.weight").grad is None
    assert torch.equal(first(x, y), loss)
    second = pase.parallelize((Gated(), (x, y)), random_plan(graph, world, 4))
    other = torch.optim.AdamW(second.parameters())
    load_checkpoint(folder, second, other)
    assert_same(whole_state(second, other), wanted)
    # The same elements are dropped: those of the third step, by the first one's seed.
    assert second.mask_state == {"seed": 5, "step": 2}
    torch.testing.assert_close(second(x, y), loss, rtol=1e-5, atol=0)
    assert second.mask_state == {"seed": 5, "step": 3}
    assert not torch.allclose(second(x, y), loss, rtol=1e-2)


def test_a_parallel_model_goes_on_under_another_plan(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(parallel_model, tmp_path, world=2)
