"""Modules that people train, on ranks under random plans of every kind, against the unmodified ones; what they send."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pase.planning.plan import SCHEDULES
from pase.targets.torch.checkpoints import load_checkpoint, save_checkpoint
from tests.targets.torch.equality import (
    RELATIVE,
    check,
    compared,
    micro_batches_of,
    parallel_module,
    stepped,
    traced,
)
from tests.targets.torch.modules import MODULES, in_float64, made
from tests.targets.torch.plans import KINDS, plan_of
from tests.targets.torch.ranks import Pool

QUICK = [
    ("random", "dlrm", 2, (1,)),
    ("random", "pieces", 4, (None, 5)),
    ("recomputation", "lstm", 2, (20,)),
    ("micro-batches", "fine-tuned", 2, (20,)),
    ("states", "picture", 4, (4,)),
    ("rings", "nanogpt", 2, (0,)),
    # The schedules, each with all states and layers that are computed again.
    ("all", "mlp", 4, (0, 2, 3, 4)),
    ("all", "gpt", 4, (1,)),
]

# A table that two layers share; experts; batch normalisation, layers that are frozen; attention of grouped heads.
_STAGED = ("mlp", "gpt", "cnn", "nanogpt", "mixtral")
_EXPERTS = ("mixtral", "qwen2_moe")
NAMES = dict.fromkeys(KINDS, ("nanogpt", "mixtral", "fine-tuned", "gpt", "cnn", "bert")) | {
    **dict.fromkeys((*SCHEDULES, "all"), _STAGED),
    "recomputation": tuple(MODULES),
    "states": ("nanogpt", "mixtral", "fine-tuned", "picture", "pieces"),
    "experts": _EXPERTS,
    "rings": ("nanogpt", "mixtral", "llama", "bert", "whisper"),
}
"""What plans of a kind are of, in the full suite."""

FULL = [
    *(("random", name, world, (None, *range(20))) for name, own in MODULES.items() for world in own.devices),
    *(
        (kind, name, world, tuple(range(10 * world, 10 * world + (2 if kind == "recomputation" else 4))))
        for kind, names in NAMES.items()
        if kind != "random"
        for name in names
        for world in (2, 4, 8)
    ),
    *(("states", "gpt", 2, (0,)), ("all", "cnn", 4, (2, 5))),
]


@pytest.mark.parametrize(
    ("kind", "name", "world", "seeds"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)]
)
def test_a_module_trains_as_by_itself(
    ranks: Pool, kind: str, name: str, world: int, seeds: tuple[int | None, ...]
) -> None:
    """Losses, norms of gradients and gradients, the state after three steps of AdamW; bytes."""
    pytest.importorskip(MODULES[name].package)
    # A few at a time: each plan has process groups of its own, which stay until a run is over.
    for at in range(0, len(seeds), 4):
        check(ranks.run(compared, kind, name, seeds[at : at + 4], world=world, timeout_s=180.0 + 60.0 * world))


# -- checkpoints


MICRO_BATCHES = 2
"""Of every plan, so that their steps are of the same examples."""


def _leg(rank: int, world: int, kind: str, name: str, step: int, folder: str) -> float:
    """Take a step under a plan of a kind from the last checkpoint on, keep another one, and return the loss."""
    plan = replace(plan_of(traced(name)[1].model.graph, kind, world, step), micro_batches=MICRO_BATCHES)
    module = parallel_module(plan, name, rank)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)
    found = load_checkpoint(folder, module, optimizer)
    assert (found is None) == (step == 0)
    loss = stepped(module, name, micro_batches_of(name, step, MICRO_BATCHES))
    optimizer.step()
    save_checkpoint(folder, module, optimizer, step=step + 1, keep=1)
    return loss.item()


def _by_itself(name: str, steps: int) -> list[float]:
    module = made(name)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6), []
    for step in range(steps):
        with in_float64():
            losses.append(stepped(module, name, micro_batches_of(name, step, MICRO_BATCHES)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _round_trip(kinds: Sequence[str]) -> list[tuple[str, int]]:
    """Return a closed walk that goes from every kind to every kind, itself included, once; each on 2, 4 or 8 ranks."""
    left, walk, path = {kind: list(kinds) for kind in kinds}, list[str](), [kinds[0]]
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            walk.append(path.pop())
    return [(kind, (2, 4, 8)[step % 3]) for step, kind in enumerate(walk)]


@pytest.mark.parametrize(
    ("name", "legs"),
    [
        ("gpt", [("1f1b", 2), ("states", 4), ("random", 1)]),
        pytest.param("mixtral", _round_trip(KINDS), marks=pytest.mark.full),
    ],
)
def test_checkpoints_go_from_any_kind_to_any(
    ranks: Pool, tmp_path: Path, name: str, legs: list[tuple[str, int]]
) -> None:
    """And to any number of ranks: each step beside that of the module by itself."""
    pytest.importorskip(MODULES[name].package)
    losses = _by_itself(name, len(legs))
    for step, (kind, world) in enumerate(legs):
        found = ranks.run(_leg, kind, name, step, str(tmp_path), world=world, timeout_s=300.0)
        assert found == pytest.approx([losses[step]] * world, rel=RELATIVE), (step, kind, world)
