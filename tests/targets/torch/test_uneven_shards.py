"""ZeRO over any number of ranks: weights of which no dim divides by the replicas, beside one device and by counting."""

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import pase
from pase.planning.plan import Plan
from pase.targets.torch.checkpoints import load_checkpoint, save_checkpoint
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.states import local_of
from tests.runtime.plans import make_plan
from tests.targets.torch.allocated import least_allocated
from tests.targets.torch.equality import assert_close, full
from tests.targets.torch.plans import with_states
from tests.targets.torch.ranks import Pool

BATCH = 12


class Odd(nn.Module):
    """Extents of 5, 7, 11, 13 and 14: 3, 4 and 6 divide none of them, 2 only the last."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 7)
        self.up, self.norm = nn.Linear(7, 14), nn.LayerNorm(14)
        self.middle, self.down = nn.Linear(14, 13), nn.Linear(13, 5)

    def forward(self, words: Any, labels: Any) -> Any:
        x = torch.tanh(self.middle(self.norm(torch.tanh(self.up(self.words(words))))))
        return nn.functional.cross_entropy(self.down(x), labels)


def module() -> nn.Module:
    torch.manual_seed(0)
    return Odd().double()


def batch_of(step: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(step)
    return {
        "words": torch.randint(0, 11, (BATCH,), generator=drawn),
        "labels": torch.randint(0, 5, (BATCH,), generator=drawn),
    }


MIXED = ("zero3", "zero1", "replicated", "zero2")


def plan_of(world: int, splits: dict[str, dict[str, int]], *states: str) -> Plan:
    """Split by the batch, but for some layers that are split as given, with a state for each layer in turn."""
    graph = pase.load((module(), batch_of(0)))
    names = [operator.name for operator in graph.operators]
    batches = {operator.name: {"b": world} for operator in graph.operators if "b" in operator.extents}
    plan = make_plan(graph, world, batches | splits)
    return with_states(plan, *(states[i % len(states)] for i in range(len(names))))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.3, momentum=0.9, weight_decay=0.01, foreach=False),
    "foreach": lambda own: torch.optim.AdamW(own, lr=0.03, foreach=True),
    "fused": lambda own: torch.optim.AdamW(own, lr=0.03, fused=True),
}


def steps_of(own: nn.Module, optimizer: Any, steps: Sequence[int]) -> list[float]:
    found = []
    for step in steps:
        loss = own(**batch_of(step))
        loss.backward()
        found.append(nn.utils.clip_grad_norm_(own.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [float(full(x)) for x in found]


def _trained(_rank: int, _world: int, plan: Plan, optimizer: str) -> Any:
    parallel = parallelize((module(), batch_of(0)), plan, check=False)
    made = OPTIMIZERS[optimizer](parallel.parameters())
    found = steps_of(parallel, made, range(5))
    shapes = {name: tuple(p.shape) for name, p in parallel.named_parameters()}
    return {
        "found": found,
        "shapes": shapes,
        "whole": parallel.full_state_dict(on_all=True),
        "full": {name: full(p.detach()) for name, p in parallel.named_parameters()},
        "own": {name: full(x) for name, x in get_model_state_dict(parallel).items()},
        "notes": [note for note in parallel.notes if "zero" in note],
    }


def alone(optimizer: str) -> tuple[nn.Module, list[float]]:
    own = module()
    return own, steps_of(own, OPTIMIZERS[optimizer](own.parameters()), range(5))


CASES: dict[str, tuple[int, dict[str, dict[str, int]]]] = {
    "2": (2, {}),
    "3": (3, {}),
    "4": (4, {}),
    # A layer split in its outputs, too: over all four or six ranks the others' shards are split along both axes.
    "2 x 2": (4, {"up": {"b": 2, "n": 2}}),
    "3 x 2": (6, {"up": {"b": 3, "n": 2}}),
}


def check(found: Any, expected: nn.Module, losses: list[float]) -> None:
    assert found["found"] == pytest.approx(losses, rel=1e-12)
    assert found["shapes"] == {name: tuple(p.shape) for name, p in expected.named_parameters()}
    for kind in ("whole", "full", "own"):
        for name, x in expected.state_dict().items():
            assert_close(found[kind][name], x, (kind, name))


@pytest.mark.parametrize(
    ("case", "states", "optimizer"),
    [
        pytest.param("2", ("zero1",), "foreach", marks=pytest.mark.full),
        pytest.param("3", ("zero2",), "fused", marks=pytest.mark.full),
        pytest.param("3", ("zero3",), "sgd", marks=pytest.mark.full),
        ("3", MIXED, "foreach"),
        pytest.param("4", ("zero3", "zero1", "zero2"), "foreach", marks=pytest.mark.full),
        ("2 x 2", ("zero2", "zero3"), "foreach"),
        ("3 x 2", ("zero1", "zero3", "zero2"), "fused"),
    ],
)
def test_training_is_the_modules(ranks: Pool, case: str, states: tuple[str, ...], optimizer: str) -> None:
    world, splits = CASES[case]
    plan = plan_of(world, splits, *states)
    expected, losses = alone(optimizer)
    for found in ranks.run(_trained, plan, optimizer, world=world):
        check(found, expected, losses)
        assert not found["notes"]


# -- checkpoints


def _saved(_rank: int, _world: int, plan: Plan, folder: Path) -> list[float]:
    parallel = parallelize((module(), batch_of(0)), plan)
    optimizer = OPTIMIZERS["foreach"](parallel.parameters())
    found = steps_of(parallel, optimizer, range(3))
    save_checkpoint(folder, parallel, optimizer, step=3)
    return found


def _resumed(_rank: int, _world: int, plan: Plan, folder: Path) -> list[float]:
    parallel = parallelize((module(), batch_of(9)), plan, check=False)
    optimizer = OPTIMIZERS["foreach"](parallel.parameters())
    checkpoint = load_checkpoint(folder, parallel, optimizer)
    assert checkpoint is not None
    return steps_of(parallel, optimizer, range(checkpoint.step, 5))


def test_checkpoints_are_of_any_number_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    """From three ranks with uneven shards to four with others, and to two that hold all of the weights."""
    _, losses = alone("foreach")
    first = plan_of(3, {}, *MIXED)
    for found in ranks.run(_saved, first, tmp_path, world=3):
        assert found == pytest.approx(losses[:6], rel=1e-12)
    for case, states in (("2 x 2", ("zero3", "zero2")), ("2", ("replicated",))):
        world, splits = CASES[case]
        for found in ranks.run(_resumed, plan_of(world, splits, *states), tmp_path, world=world):
            assert found == pytest.approx(losses[6:], rel=1e-12)


# -- memory


class Wide(nn.Module):
    """Products with weights far larger than what flows between them; 251 and 509 are prime."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (251, 509, 251, 509, 251, 509, 251)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


STEPPERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
MEMORY_STATES = {"zero1": ("zero1",), "zero2": ("zero2",), "zero3": ("zero3",), "mixed": ("zero3", "zero1", "zero2")}


def wide_batch() -> dict[str, Any]:
    return {"x": torch.ones(6, 251)}


def wide_plan(world: int, states: tuple[str, ...], optimizer: str) -> Plan:
    plan = pase.evaluate(pase.load((Wide(), wide_batch())), "data_parallel", world, optimiser=optimizer)
    return with_states(plan, *(states[i % len(states)] for i in range(len(plan.layers))))


def _measured(_rank: int, _world: int, plan: Plan, optimizer: str) -> tuple[int, int]:
    """Return the bytes of weights and state between steps, and the most in a step."""
    batch = wide_batch()
    parallel = parallelize((Wide(), batch), plan, check=False)
    stepper = STEPPERS[optimizer](parallel.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        parallel(**batch).backward()
        stepper.step()
        stepper.zero_grad()

    step()
    wholes = [whole for _, whole, _ in parallel._leaves.kept()]
    slots = [local_of(x) for own in stepper.state.values() for x in own.values() if x.ndim]
    kept = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in (*wholes, *slots, *map(local_of, parallel.parameters()))
    }
    static = sum(kept.values())
    inputs = sum(x.nbytes for x in batch.values())
    return static, static + inputs + least_allocated(step)


QUICK = (("zero3", "adamw", 2), ("mixed", "sgd", 3))


@pytest.mark.parametrize(
    ("states", "optimizer", "world"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full)
        for case in product(MEMORY_STATES, STEPPERS, (2, 3))
    ],
)
def test_memory_is_as_predicted(ranks: Pool, states: str, optimizer: str, world: int) -> None:
    plan = wide_plan(world, MEMORY_STATES[states], optimizer)
    found = ranks.run(_measured, plan, optimizer, world=world)
    static, peak = max(own for own, _ in found), min(own for _, own in found)
    assert plan.memory.weights_bytes + plan.memory.optimiser_bytes == static
    assert plan.peak.bytes == pytest.approx(peak, rel=0.02)
