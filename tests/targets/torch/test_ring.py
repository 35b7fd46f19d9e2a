"""Modules whose attention passes keys and values round in a ring, beside the unmodified ones; and what ranks send."""

from collections.abc import Sequence

import pytest

from pase.graph.operators.ring import with_rings
from pase.importers.difference import difference
from tests.runtime.plans import make_plan, placed, random_plan, recomputing, rings_of, split_along
from tests.targets.torch.equality import Compared, check, compared_under, traced
from tests.targets.torch.modules import MODULES
from tests.targets.torch.ranks import Pool


def _in_rings(rank: int, world: int, name: str, seeds: Sequence[int | None]) -> list[Compared]:
    """Under strategies that split every attention's sequence, and where there is a seed all else at random."""
    graph = with_rings(traced(name)[1].model.graph)
    assert not difference(graph, traced(name)[1].model.graph)
    found = []
    for seed in seeds:
        if seed is None:
            sequences = [op.name for op in graph.operators if op.extents.get("s", 1) % world == 0]
            plan = make_plan(graph, world, {name: {"s": world} for name in sequences})
        else:
            # Every other one has devices in any order.
            plan = split_along(random_plan(graph, world, seed), dict.fromkeys(rings_of(graph), "s"))
            plan = plan if seed % 2 else placed(plan)
            plan = recomputing(plan, seed) if seed % 3 == 0 else plan
        found.append(compared_under(plan, name, rank, seed))
    return found


@pytest.mark.parametrize(
    ("name", "world", "seeds"),
    [
        ("nanogpt", 2, (None, 0, 1)),
        ("llama", 4, (None, 0, 1)),
        *(
            pytest.param(name, world, (None, *range(8)), marks=pytest.mark.full)
            for name in ("nanogpt", "llama", "bert", "whisper")
            for world in (2, 4)
        ),
    ],
)
def test_a_module_trains_as_by_itself(ranks: Pool, name: str, world: int, seeds: tuple[int | None, ...]) -> None:
    """Causal masks, heads that share keys and values; losses, gradients, three steps; bytes are those predicted."""
    pytest.importorskip(MODULES[name].package)
    by_rank = ranks.run(_in_rings, name, seeds, world=world, timeout_s=120.0 + 20.0 * len(seeds))
    check(by_rank)
