"""Random plans of every kind, and of all kinds at once, on 2, 4 and 8 ranks, against the unmodified modules."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from random import Random

import pytest
import torch

from pase.costs import STATES
from pase.graph import AllToAll
from pase.graph.operators.ring import with_rings
from pase.graph.stages import with_cuts
from pase.planning.plan import SCHEDULES, Plan
from pase.targets.torch.checkpoints import load_checkpoint, save_checkpoint
from tests.runtime.plans import placed, random_plan, rings_of, split_along
from tests.targets.torch.equality import (
    RELATIVE,
    Compared,
    check,
    compared_under,
    parallel_module,
    stepped,
    traced,
)
from tests.targets.torch.modules import MODULES, Batch, in_float64, made
from tests.targets.torch.ranks import Pool
from tests.targets.torch.test_mixed import in_modes
from tests.targets.torch.test_pipeline import in_stages

# A table that two layers share; experts; batch normalisation, and layers that are frozen.
_MODULES = ("nanogpt", "mixtral", "fine-tuned")
_EXPERTS = ("mixtral", "qwen2_moe")
KINDS = {
    "states": _MODULES,
    "recomputation": _MODULES,
    "micro-batches": _MODULES,
    "2 stages": _MODULES[:2],
    "4 stages": _MODULES[:2],
    "experts": _EXPERTS,
    "rings": _MODULES[:2],
    "all": _EXPERTS,
}
"""What plans of a kind are of."""


def plan_of(kind: str, name: str, world: int, seed: int) -> Plan:
    """Return a random plan of a kind.

    Where there are several stages, in one of the schedules. Half of them have devices in any order.
    """
    numbers, is_all = Random(f"{kind} {name} {world} {seed}"), kind == "all"
    graph = with_cuts(traced(name)[1].model.graph)
    if is_all or kind == "rings":
        graph = with_rings(graph)
    num_stages = numbers.choice((2, 4)) if is_all else int(kind[0]) if kind.endswith("stages") else 1
    count = numbers.choice((2, 3, 4)) if is_all or num_stages > 1 or kind == "micro-batches" else 1
    # What goes back twice, for inputs and for weights, keeps what it needs, and weights whole.
    schedule = numbers.choice([each for each in SCHEDULES if not is_all or each != "zero_bubble"])
    if num_stages > 1:
        groups = numbers.choice([k for k in (2, 4) if gcd(num_stages, world) % k == 0])
        plan = in_stages(graph, world, groups, count, schedule, seed, num_stages // groups)
    else:
        plan = replace(random_plan(graph, world, seed), micro_batches=count)
    dims = {}
    if kind in ("states", "all") and numbers.random() < 0.5:
        dims |= {op.name: "b" for op in graph.operators if "b" in op.extents and "b" not in op.unsplittable}
    for op in graph.operators if kind in ("experts", "all") else ():
        for exchange in op.exchanges:
            if isinstance(exchange, AllToAll) and numbers.random() < 0.7:
                dims[op.name] = exchange.over[0]
    plan = split_along(plan, dims | dict.fromkeys(rings_of(graph), "s"))
    if kind in ("states", "recomputation", "all"):
        states = STATES[:1] if kind == "recomputation" else STATES
        plan = in_modes(plan, seed, states=states, again=0.0 if kind == "states" else numbers.choice((0.3, 0.6, 1.0)))
    return placed(plan) if numbers.random() < 0.5 else plan


def _compared(rank: int, world: int, kind: str, seeds: Sequence[int]) -> list[Compared]:
    # Modules of plans before have process groups, with threads of their own, until nothing refers to them.
    gc.collect()
    names, found = KINDS[kind], []
    for seed in seeds:
        name = names[seed % len(names)]
        found.append(compared_under(plan_of(kind, name, world, seed), name, rank, seed))
    return found


@pytest.mark.parametrize(
    ("kind", "world", "seeds"),
    [
        *(pytest.param(kind, world, (1,), marks=pytest.mark.slow) for kind, world in (("all", 4), ("4 stages", 8))),
        *(
            pytest.param(kind, world, tuple(range(10 * world, 10 * world + 10)), marks=pytest.mark.full)
            for kind in KINDS
            for world in (2, 4, 8)
        ),
    ],
)
def test_a_module_trains_as_by_itself(ranks: Pool, kind: str, world: int, seeds: tuple[int, ...]) -> None:
    """Losses, gradients and, after three steps of AdamW, the state."""
    if set(KINDS[kind]) & set(_EXPERTS):
        pytest.importorskip("transformers")
    # A few at a time: each plan has process groups of its own, which stay until a run is over.
    for at in range(0, len(seeds), 2):
        check(ranks.run(_compared, kind, seeds[at : at + 2], world=world, timeout_s=120.0 + 60.0 * world))


# -- checkpoints


MICRO_BATCHES = 2
"""Of every plan, so that their steps are of the same examples."""


def _leg(rank: int, world: int, kind: str, name: str, step: int, folder: str) -> float:
    """Take a step under a plan of a kind from the last checkpoint on, keep another one, and return the loss."""
    plan = replace(plan_of(kind, name, world, step), micro_batches=MICRO_BATCHES)
    module = parallel_module(plan, name, rank)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)
    found = load_checkpoint(folder, module, optimizer)
    assert (found is None) == (step == 0)
    loss = stepped(module, name, _batches(name, step))
    optimizer.step()
    save_checkpoint(folder, module, optimizer, step=step + 1, keep=1)
    return loss.item()


def _batches(name: str, step: int) -> list[Batch]:
    return [MODULES[name].batch(number) for number in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)]


def _by_itself(name: str, steps: int) -> list[float]:
    module = made(name)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6), []
    for step in range(steps):
        with in_float64():
            losses.append(stepped(module, name, _batches(name, step)).item())
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
    "legs",
    [
        pytest.param([("rings", 4), ("all", 2), ("experts", 4)], marks=pytest.mark.slow),
        pytest.param(_round_trip([*KINDS]), marks=pytest.mark.full),
    ],
    ids=["three", "every"],
)
def test_checkpoints_go_from_any_kind_to_any(ranks: Pool, tmp_path: Path, legs: list[tuple[str, int]]) -> None:
    """And to any number of ranks: each step beside that of the module by itself."""
    pytest.importorskip("transformers")
    __import__("transformers.integrations.moe")
    losses = _by_itself("mixtral", len(legs))
    for step, (kind, world) in enumerate(legs):
        found = ranks.run(_leg, kind, "mixtral", step, str(tmp_path), world=world, timeout_s=300.0)
        assert found == pytest.approx([losses[step]] * world, rel=RELATIVE), (step, kind, world)
