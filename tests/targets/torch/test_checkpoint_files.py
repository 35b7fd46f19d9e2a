"""Files of checkpoints as a stranger, a bad disk or an older version leaves them: the same weights, or one line."""

import hashlib
import json
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from pase.errors import PaseError, ProgramError
from pase.targets.torch.checkpoints import (
    Opened,
    Part,
    _record_text,
    export_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

OLD = Path(__file__).with_name("checkpoint_0_10")
"""What PaSE 0.10.0 wrote on two ranks after two steps of AdamW, and, in whole.npz, what it held by `full_tensor`."""
STEP = "step-0000000002"


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def content(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a checkpoint is of, by the names that 0.10.0 gave it."""
    found = {f"model.{name}": value for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        found |= {f"optimizer.{name}.{slot}": value for slot, value in optimizer.state[parameter].items()}
    return {name: value.detach().numpy() for name, value in found.items()}


def holding(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with tensors as its buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def loaded(folder: Path) -> dict[str, Any]:
    module, optimizer = trained(9)
    assert load_checkpoint(folder, module, optimizer) is not None
    return content(module, optimizer)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.dtype == found[name].dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of two checkpoints with files of one size each, the newest of step 2."""
    for step in (1, 2):
        save_checkpoint(tmp_path, *trained(step), step=step)
    return tmp_path


# -- formats


def test_a_checkpoint_of_0_10_loads() -> None:
    with np.load(OLD / "whole.npz") as file:
        wanted = dict(file)
    module, optimizer = trained(9)
    found = load_checkpoint(OLD, module, optimizer)
    assert found is not None
    assert (found.step, found.extra) == (2, {"epoch": 1})
    assert_equal(content(module, optimizer), wanted)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_files_of_shards_are_those_of_safetensors(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    state = {
        "low": torch.randn(3, 5, generator=draw).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(7),
        "none": torch.empty(0, 3),
        "turned": torch.randn(4, 2, generator=draw).t(),
    }
    path = save_checkpoint(tmp_path, holding(state), step=1)
    found = load_file(path / "rank-00000.safetensors")
    boxes = {"low": "[0:3, 0:5]", "flags": "[0:2]", "number": "[]", "none": "[0:0, 0:3]", "turned": "[0:2, 0:4]"}
    for name, value in state.items():
        assert torch.equal(found[f"model.{name}{boxes[name]}"], value)
    # Each shard's checksum is that of its bytes, at its place in the file.
    record = json.loads((path / "training.json").read_text())
    raw = (path / "rank-00000.safetensors").read_bytes()
    (low,) = record["tensors"]["model.low"]["shards"]
    piece = raw[low["offset"] : low["offset"] + 30]
    assert piece == state["low"].view(torch.int16).numpy().tobytes()
    assert low["sha256"] == hashlib.sha256(piece).hexdigest()


def test_a_type_that_files_do_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ProgramError, match=r"cannot write checkpoint .*: 'model.x' is of torch.complex128, which checkpoints do"
    ):
        save_checkpoint(tmp_path, holding({"x": torch.zeros(2, dtype=torch.complex128)}), step=1)
    assert not list(tmp_path.iterdir())


def test_parts_that_lie_apart_are_put_together(tmp_path: Path) -> None:
    """Rows 0, 1 and 4 of six, then the others: another order of the same tensor's boxes."""
    whole = torch.arange(12.0).reshape(6, 2)
    save_checkpoint(tmp_path, holding({"x": whole}), step=1)
    held = (((0, 2), (4, 5)), ((0, 2),))
    part = torch.zeros(3, 2)
    Opened.found(tmp_path / "step-0000000001").load({"model.x": Part.of(part, held, whole.shape)})
    assert torch.equal(part, whole[[0, 1, 4]])


def test_torch_distributed_checkpoint_reads_an_export(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for path in (saved / STEP, OLD / STEP):
        folder = tmp_path_factory.mktemp("exported")
        wanted = loaded(path)
        export_checkpoint(path, folder)
        found = {name: torch.zeros(value.shape, dtype=torch.float32) for name, value in wanted.items()}
        with pytest.warns(UserWarning, match="intent is to load in a single process"):
            dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        assert_equal({name: value.numpy() for name, value in found.items()}, wanted)


# -- nothing is executed


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_is_executed(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    witness = tmp_path / "executed"
    raw = pickle.dumps(Malicious(witness))
    # The file does what it is made for.
    pickle.loads(raw)
    witness.rmdir()
    (tmp_path / "old" / STEP / ".metadata").write_bytes(raw)
    with pytest.raises(ProgramError, match=r"is damaged: \.metadata: it describes no tensors"):
        load_checkpoint(tmp_path / "old", model())
    # In the archive of a tensor, with checksums that are right.
    shutil.copytree(OLD, tmp_path / "other")
    path = tmp_path / "other" / STEP / "__0_0.distcp"
    torch.save(Malicious(witness), tmp_path / "tensor.pt")
    archive = (tmp_path / "tensor.pt").read_bytes()
    path.write_bytes(archive + path.read_bytes()[len(archive) :])
    with pytest.raises(ProgramError, match=r"its archive in __0_0\.distcp is damaged: "):
        load_checkpoint(tmp_path / "other", model())
    assert not witness.exists()
    # One beside a checkpoint of ours is nobody's.
    save_checkpoint(tmp_path / "new", model(), step=1)
    (tmp_path / "new" / "step-0000000001" / ".metadata").write_bytes(raw)
    load_checkpoint(tmp_path / "new", model())
    assert not witness.exists()


# -- damage


def bit_flipped(draw: random.Random, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    place = draw.randrange(8 * len(raw))
    raw[place // 8] ^= 1 << place % 8
    path.write_bytes(raw)


def truncated(draw: random.Random, path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: draw.randrange(len(raw))])


def overwritten(draw: random.Random, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    low = draw.randrange(len(raw))
    count = min(draw.choice([1, 4, 32, 1000]), len(raw) - low)
    raw[low : low + count] = draw.randbytes(count) if draw.random() < 0.5 else bytes(count)
    path.write_bytes(raw)


def gone(draw: random.Random, path: Path) -> None:
    path.unlink()
    if draw.random() < 0.5:
        path.mkdir()


def swapped(draw: random.Random, path: Path) -> None:
    """Take the file of the same name of another checkpoint, or another file of this one."""
    others = [other for other in path.parent.parent.glob("*/*") if other != path and other.is_file()]
    shutil.copy(draw.choice(others), path)


def edited(draw: random.Random, path: Path) -> None:
    """Change something in the record: a value, a key, or an element."""
    path = path.with_name("training.json")
    document = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, member in items:
            places.append((value, key))
            walk(member)

    walk(document)
    holder, key = draw.choice(places)
    others = [None, True, -1, 0, 10**30, 1.5, "", "x", "../x", [], {}, [[0, 1]], {"x": 1}]
    value = holder[key]
    if isinstance(value, int) and not isinstance(value, bool):
        others += [value + 1, -value, value * 2]
    match draw.choice(["remove", "replace", "replace", "copy"]):
        case "remove":
            del holder[key]
        case "replace":
            holder[key] = draw.choice(others)
        case "copy":
            # A value of another place: the file of another shard, another tensor's shards.
            other, name = draw.choice([(other, name) for other, name in places if type(other[name]) is type(value)])
            holder[key] = deepcopy(other[name])
    path.write_text(json.dumps(document))


MUTATIONS: list[Callable[[random.Random, Path], None]] = [
    bit_flipped,
    bit_flipped,
    truncated,
    overwritten,
    gone,
    edited,
    edited,
]


@pytest.mark.parametrize("number", [60, pytest.param(1200, marks=pytest.mark.full)])
@pytest.mark.parametrize("format_version", [1, 2])
def test_what_is_damaged_is_one_line_or_loads_the_same(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, format_version: int, number: int
) -> None:
    origin = OLD if format_version == 1 else saved
    wanted, outcomes = loaded(origin), {"same": 0, "refused": 0}
    # A file of an older version says nowhere which checkpoint it is of.
    mutations = [*MUTATIONS, swapped] if format_version == 2 else MUTATIONS
    for seed in range(number):
        draw = random.Random(seed)
        folder = tmp_path_factory.mktemp("mutant") / "kept"
        shutil.copytree(origin, folder)
        path = draw.choice(sorted((folder / STEP).iterdir()))
        mutation = draw.choice(mutations)
        mutation(draw, path)
        begin_s, line = time.monotonic(), ""
        what = f"seed {seed}: {mutation.__name__} of {path.name}"
        try:
            found = loaded(folder / STEP)
        except PaseError as error:
            line = str(error)
            outcomes["refused"] += 1
        except BaseException as error:
            raise AssertionError(what) from error
        else:
            for name, value in wanted.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{what}: {name}")
            outcomes["same"] += 1
        assert "\n" not in line, what
        assert time.monotonic() - begin_s < 20, what
        shutil.rmtree(folder)
    assert outcomes["refused"] > number / 3, outcomes
    assert outcomes["same"] > 0, outcomes


def test_a_state_that_is_not_that_of_the_optimizer_is_one_line(saved: Path) -> None:
    path = saved / STEP
    record = json.loads((path / "training.json").read_text())
    del record["tensors"]["optimizer.0.weight.step"], record["sha256"]
    (path / "training.json").write_text(_record_text(record))
    module, optimizer = trained(9)
    with pytest.raises(ProgramError, match=r"does not hold the state of a AdamW: KeyError: 'step'; load it with the"):
        load_checkpoint(path, module, optimizer)
