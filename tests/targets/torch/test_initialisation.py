"""First values of modules on the device 'meta', against those that PyTorch gives the same modules with values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pase
from pase.errors import ProgramError
from pase.targets.torch.initialisation import own_values
from pase.targets.torch.placements import Held
from pase.targets.torch.values import Source, random_values
from tests.runtime.plans import random_plan
from tests.targets.torch.ranks import Pool


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
