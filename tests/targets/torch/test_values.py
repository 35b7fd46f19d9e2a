"""First values of parameters: cut from tensors and files, and random ones, against the whole of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pase
from pase.errors import ProgramError
from pase.targets.torch.placements import Held
from pase.targets.torch.values import Source, from_file, from_tensors, own_values, random_values
from tests.runtime.plans import random_plan
from tests.targets.torch.ranks import Pool

SHAPE = (6, 8)
HELD: Held = (((0, 2), (3, 5)), ((4, 8),))
INDEX = torch.tensor([0, 1, 3, 4])


def part(whole: torch.Tensor) -> torch.Tensor:
    return whole[INDEX][:, 4:8]


def test_parts_of_files(tmp_path: Path) -> None:
    tensors = {"a.w": torch.randn(SHAPE), "b": torch.randn(8).bfloat16(), "s": torch.tensor(3.0)}
    torch.save({"state_dict": tensors}, tmp_path / "model.pt")
    save_file(tensors, tmp_path / "one.safetensors")
    (tmp_path / "sharded").mkdir()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, tmp_path / "sharded" / f"{number}.safetensors")
    where = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for source in (
        from_tensors(tensors),
        from_file(tmp_path / "model.pt"),
        from_file(str(tmp_path / "one.safetensors")),
        from_file(tmp_path / "sharded"),
    ):
        assert torch.equal(source(["tied", "a.w"], SHAPE, HELD), part(tensors["a.w"]))
        assert torch.equal(source(["b"], (8,), (((2, 4),),)), tensors["b"][2:4])
        assert torch.equal(source(["s"], (), ()), tensors["s"])
        with pytest.raises(ProgramError, match="has no tensor 'c' of the model; it has 3"):
            source(["c"], (1,), (((0, 1),),))
        with pytest.raises(ProgramError, match=r"'a.w' has shape \[6, 8\] where the values are from, \[6, 9\] here"):
            source(["a.w"], (6, 9), HELD)
    with pytest.raises(ProgramError, match=r"the file of weights .* does not exist"):
        from_file(tmp_path / "nothing.pt")
    with pytest.raises(ProgramError, match=r"holds no model\.safetensors"):
        from_file(tmp_path)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ProgramError, match="holds a list; expected the tensors of a state_dict"):
        from_file(tmp_path / "list.pt")
    with pytest.raises(ProgramError, match=r"'w' .*on the device 'meta' and has no values; give parallelize weights=…"):
        from_tensors({"w": torch.empty(2, device="meta")})(["w"], (2,), (((0, 2),),))


def test_random_numbers_are_those_of_their_elements() -> None:
    shape = (700, 400)
    source = random_values({"w": (0.5, 2.0), "v": (0.0, 1.0)}, seed=3)
    everything: Held = (((0, 700),), ((0, 400),))
    whole = source(["w", "tied"], shape, everything)
    held: Held = (((0, 2), (300, 302)), ((4, 8), (399, 400)))
    rows, columns = torch.tensor([0, 1, 300, 301]), torch.tensor([4, 5, 6, 7, 399])
    assert torch.equal(source(["w"], shape, held), whole[rows][:, columns])
    # 280 000 numbers: the mean is within 5 standard errors, and the distribution is the normal one's.
    assert abs(whole.mean().item() - 0.5) < 5 * 2.0 / 280_000**0.5
    assert abs(whole.std().item() - 2.0) < 0.02
    for deviations, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs(((whole - 0.5).abs() < 2.0 * deviations).float().mean().item() - share) < 0.005
    pairs = torch.corrcoef(torch.stack([whole.flatten()[:-1], whole.flatten()[1:]]))
    assert abs(pairs[0, 1].item()) < 0.01
    # Other names and seeds give others; what has no moments is zeros.
    assert not torch.equal(source(["v"], shape, everything), (whole - 0.5) / 2)
    assert not torch.equal(random_values({"w": (0.5, 2.0)}, seed=4)(["w"], shape, everything), whole)
    assert torch.equal(source(["u"], (3,), (((0, 2),),)), torch.zeros(2))


# -- of modules on the device 'meta', against those that PyTorch gives the same modules with values


class Own(nn.Module):
    """Layers of PyTorch, parameters and a buffer of its own, and one that cannot be made part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 40, padding_idx=2)
        self.convolution = nn.Conv2d(16, 40, 3)
        self.norm = nn.BatchNorm2d(40)
        self.lstm = nn.LSTM(40, 32)
        self.attention = nn.MultiheadAttention(48, 4)
        self.cut, self.whole = nn.Parameter(torch.empty(60, 50)), nn.Parameter(torch.empty(8, 8))
        self.low = nn.Parameter(torch.empty(60, 50, dtype=torch.float16))
        self.register_buffer("frequencies", torch.empty(6), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.cut, std=0.5, a=-1, b=1)
        nn.init.orthogonal_(self.whole)
        nn.init.uniform_(self.low)
        with torch.no_grad():
            self.attention.in_proj_weight.normal_(std=0.02).mul_(3).add_(torch.tensor(0.5))
            self.frequencies.copy_(10.0 ** -torch.arange(6.0))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def source_of(module: nn.Module, seed: int = 0) -> tuple[Source, list[str]]:
    return own_values(module, list(tensors(module)), seed, random_values({"whole": (0.0, 0.25)}, seed))


def whole(shape: torch.Size) -> Held:
    return tuple(((0, extent),) for extent in shape)


def test_they_are_of_the_same_distribution() -> None:
    module, real = on_meta(Own), Own()
    source, notes = source_of(module)
    (note,) = notes
    assert note.startswith("the own initialisation of 1 parameters is not known part by part (whole): they are normal")
    for name, tensor in tensors(real).items():
        found = source([name], tuple(tensor.shape), whole(tensor.shape)).double()
        expected = tensor.detach().double()
        assert tensors(module)[name].is_meta
        if name == "whole":
            assert 0.15 < found.std() < 0.35
        elif expected.unique().numel() < 7:
            assert torch.equal(found, expected), name
        else:
            spread = expected.std()
            error = spread * (2 / expected.numel()) ** 0.5
            assert abs(found.mean() - expected.mean()) < 5 * error, name
            assert abs(found.std() - spread) < 5 * error, name
            assert name != "embedding.weight" or torch.equal(found == 0, expected == 0)
            if "weight" not in name or "lstm" in name or "convolution" in name:
                # Bounds are those of the distribution; most samples come near.
                assert found.abs().max() <= expected.abs().max() * 1.1, name
    assert torch.equal(source(["frequencies"], (6,), (((2, 5),),)), real.get_buffer("frequencies")[2:5])


def test_parts_are_those_of_the_whole() -> None:
    module = on_meta(Own)
    source, again = source_of(module)[0], source_of(module, seed=1)[0]
    held: Held = (((1, 4), (30, 50)), ((3, 17),))
    rows = torch.cat([torch.arange(1, 4), torch.arange(30, 50)])
    for name in ("embedding.weight", "cut", "low", "attention.in_proj_weight"):
        shape = tensors(module)[name].shape
        found = source([name], tuple(shape), whole(shape))
        own = tuple(tuple((low, min(high, shape[0])) for low, high in runs) for runs in held[:1])
        index = rows[rows < shape[0]]
        assert torch.equal(source([name], tuple(shape), (*own, held[1])), found[index][:, 3:17]), name
        assert not torch.equal(again([name], tuple(shape), whole(shape)), found), name


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("places", torch.arange(4))


class Failing(Filled):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            raise ValueError("no values: " + str(module.weight.shape))


@pytest.mark.parametrize("make", [Filled, Failing])
def test_what_is_not_known_is_said(make: Any) -> None:
    module = on_meta(make)
    source, notes = source_of(module)
    with pytest.raises(ProgramError, match="buffer 'places' is on the device 'meta', and no initialisation of the"):
        source(["places"], (4,), (((0, 4),),))
    found = source(["layer.weight"], (4, 4), whole(torch.Size((4, 4))))
    if make is Failing:
        assert notes == [
            "Failing._init_weights failed on the device 'meta' (ValueError: no values: torch.Size([4, 4]))"
        ]
        assert torch.equal(found, torch.ones(4, 4))
    else:
        assert notes == []
        assert found.abs().max() <= 0.5


class Waves(nn.Module):
    """What it computes depends on a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.register_buffer("frequencies", torch.empty(8), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        self.frequencies.copy_(2.0 ** -torch.arange(8.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.last(torch.sin(self.table(x) / self.frequencies)), y)


def without_values(rank: int, world: int) -> None:
    x, y = torch.arange(8) % 5, torch.arange(8)
    graph, states = pase.load((Waves(), (x, y))), []
    for seed in (3, 4):
        parallel = pase.parallelize((on_meta(Waves), (x, y)), random_plan(graph, world, seed))
        states.append(parallel.full_state_dict(on_all=True))
        alone = Waves()
        alone.load_state_dict(states[-1])
        torch.testing.assert_close(parallel(x, y), alone(x, y))
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    given = {name: value + 1 for name, value in states[0].items()}
    alone.load_state_dict(given)
    parallel = pase.parallelize((on_meta(Waves), (x, y)), random_plan(graph, world, 3), weights=given)
    torch.testing.assert_close(parallel(x, y), alone(x, y))


def test_a_module_without_values_has_the_same_under_every_plan(ranks: Pool) -> None:
    ranks.run(without_values, world=2)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("model.pt", b"PK\x03\x04 no archive", "cannot read weights from .*; expected safetensors, or what torch.save"),
        ("model.safetensors", bytes(20), "cannot read weights from .*; expected safetensors, or what torch.save"),
        ("model.safetensors.index.json", b"{", r"is not complete JSON \(.*\); it may be truncated"),
        ("model.safetensors.index.json", b"[]", "the document is an array; expected an object"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"w": "../other.safetensors"}}',
            r"weight_map.w is '../other.safetensors'; expected a file name in the index's folder",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "none.safetensors"}}', "cannot read weights from .*"),
    ],
)
def test_damaged_files_of_weights_are_one_line(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ProgramError, match=message):
        from_file(tmp_path / name)


def test_what_is_no_tensor_is_no_weight(tmp_path: Path) -> None:
    torch.save({"w": 3}, tmp_path / "model.pt")
    with pytest.raises(ProgramError, match="'w' of the given state is a int; expected a tensor"):
        from_file(tmp_path / "model.pt")(["w"], (), ())
