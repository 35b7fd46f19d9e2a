"""The peak of a training step as predicted, beside what PyTorch's allocator hands out and takes back."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pase
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.states import local_of
from scripts.benchmarks.modes import MODES, RANKS, plan_in
from scripts.benchmarks.peak import Training
from tests.runtime.plans import data_parallel_plan
from tests.targets.torch.allocated import least_allocated
from tests.targets.torch.plans import with_states
from tests.targets.torch.ranks import Pool
from tests.targets.torch.test_memory import memory_changes
from tests.test_device_memory import device_memory


class Encoder(nn.Module):
    """Two of PyTorch's encoder layers, and a class for each text."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.words, self.layers = nn.Embedding(50, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, words: Any, labels: Any) -> Any:
        return functional.cross_entropy(self.head(self.layers(self.words(words)).mean(1)), labels)


class Funnel(nn.Module):
    """Products with functions behind them, narrower and narrower: gradients of the last weights are the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(96, 128), nn.Linear(128, 384), nn.Linear(384, 10)
        self.norm = nn.LayerNorm(384)

    def forward(self, x: Any, labels: Any) -> Any:
        y = functional.gelu(self.first(x)).tanh()
        return functional.cross_entropy(self.third(self.norm(functional.silu(self.second(y)))), labels)


def _batch(name: str) -> dict[str, Any]:
    labels = torch.zeros(32, dtype=torch.long)
    return {"words": torch.ones(32, 24, dtype=torch.long)} | {"labels": labels} if name == "encoder" else {
        "x": torch.randn(32, 96), "labels": labels
    }  # fmt: skip


MODULES = {"encoder": Encoder, "funnel": Funnel}


def _allocated(_rank: int, _world: int, name: str, plan: pase.Plan, optimizer: str) -> int:
    """Return what lies in memory before a second step, and the most that is allocated in it."""
    torch.manual_seed(0)
    batch = _batch(name)
    module = parallelize((MODULES[name](), batch), plan, check=False)
    made: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    stepper = made[optimizer](module.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        module(**batch).backward()
        stepper.step()
        stepper.zero_grad()

    step()
    state = [value for of in stepper.state.values() for value in of.values()]
    before = sum(tensor.nbytes for tensor in (*module.parameters(), *batch.values(), *state))
    return before + max(accumulate(memory_changes(step)))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", MODULES)
def test_the_peak_is_what_the_allocator_reaches(ranks: Pool, name: str, optimizer: str) -> None:
    plan = pase.evaluate(pase.load((MODULES[name](), _batch(name))), "data_parallel", 1, optimiser=optimizer)
    (found,) = ranks.run(_allocated, name, plan, optimizer, world=1)
    assert plan.peak.bytes == pytest.approx(found, rel=0.03)


def _in_modes(_rank: int, _world: int, plan: pase.Plan) -> int:
    """Return the peak of a rank's step as it is allocated."""
    module, batch = _made()
    step = {key: torch.cat([x] * plan.micro_batches) for key, x in batch.items()}
    training = Training(module, batch, plan, step)
    training.step()
    return training.resident_bytes() + least_allocated(training.step)


def _made() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    batch = {"words": torch.ones(32, 32, dtype=torch.long), "labels": torch.zeros(32, dtype=torch.long)}
    return Encoder(), batch


def _plan_in(modes: str) -> pase.Plan:
    return plan_in(pase.load(_made()), MODES[modes], RANKS, machine="h100", optimiser="adamw")


QUICK = ("2 stages, 4 micro-batches, recomputed, zero3",)


@pytest.mark.parametrize(
    "modes", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in MODES]
)
def test_the_peak_in_every_mode_is_what_the_allocator_reaches(ranks: Pool, modes: str) -> None:
    """Of the rank that has most."""
    plan = _plan_in(modes)
    found = max(ranks.run(_in_modes, plan, world=4))
    assert plan.peak.bytes == pytest.approx(found, rel=0.1)


class Wide(nn.Module):
    """A product whose gradient is most of all memory, and the last one that is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 16)

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x))).square().mean()


def _wide() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Wide(), {"x": torch.randn(8, 512)}


def _sharded(_rank: int, _world: int, state: str) -> int:
    """Return the most that is allocated in a step under SGD, with what is allocated before it."""
    module, batch = _wide()
    plan = _sharded_plan(state)
    parallel = parallelize((module, batch), plan, check=False)
    stepper = torch.optim.SGD(parallel.parameters(), lr=0.1, foreach=False)
    low, high = parallel.inputs()["x"][0]

    def step() -> None:
        parallel(**batch).backward()
        stepper.step()
        stepper.zero_grad()

    step()
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(_storage_of, parallel.parameters())}
    return sum(storages.values()) + 4 * 512 * (high - low) + least_allocated(step)


def _storage_of(parameter: torch.Tensor) -> Any:
    return local_of(parameter).untyped_storage()


def _sharded_plan(state: str) -> pase.Plan:
    return with_states(data_parallel_plan(pase.load(_wide()), 2), state)


@pytest.mark.parametrize("state", ["zero1", "zero2", "zero3"])
def test_the_peak_of_sharded_weights_is_what_the_allocator_reaches(ranks: Pool, state: str) -> None:
    """The last gradient that is reduced is freed before the sum of its shard is made."""
    found = min(ranks.run(_sharded, state, world=2))
    assert _sharded_plan(state).peak.bytes == pytest.approx(found, rel=0.02)


class _Live(TorchDispatchMode):
    """Notes the most bytes of tensors that are alive at once, whichever thread frees them."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: own for key, own in self.storages.items() if not own[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return found


def _rows() -> tuple[nn.Module, dict[str, Any]]:
    """What flows between layers is far larger than the weights."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU())]
    return Squares(nn.Sequential(*layers)), {"x": torch.randn(1024, 64)}


class Squares(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        return self.layers(x).square().mean()


def _rows_plan() -> pase.Plan:
    modes = replace(MODES["2 stages, 4 micro-batches"], micro_batches=6)
    return plan_in(pase.load(_rows()), modes, 2, machine="h100", optimiser="sgd")


def _first_stage(_rank: int, _world: int) -> int:
    module, batch = _rows()
    step = {"x": torch.cat([batch["x"]] * 6)}
    training = Training(module, batch, _rows_plan(), step)
    training.step()
    most = []
    for _ in range(3):
        with _Live() as live:
            # What is there before the step.
            for tensor in (*training.module.parameters(), *training.batch.values()):
                local_of(tensor).view(-1)
            training.step()
        most.append(live.most)
    return min(most)


def test_the_peak_of_a_first_stage_is_what_is_alive(ranks: Pool) -> None:
    """Copies of the inputs are there of the micro-batches in flight alone."""
    first, _ = ranks.run(_first_stage, world=2)
    assert _rows_plan().peak.bytes == pytest.approx(first, rel=0.03)


def test_what_layers_keep_and_weights_gradients_do_not_all_lie_there_at_once() -> None:
    """AlexNet's early layers keep much and have few weights, its late ones the reverse."""
    plan = pase.search("alexnet", devices=1)
    memory, peak = plan.memory, plan.peak
    assert memory.weights_bytes == 4 * plan.graph.num_parameters > memory.gradients_bytes
    assert peak.memory.kept_bytes < device_memory(plan).total + memory.weights_bytes
    assert peak.phase == "backward"
    assert peak.layer in plan.graph.index
