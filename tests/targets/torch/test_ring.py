"""Modules whose attention passes keys and values round in a ring, beside the unmodified ones; and what ranks send."""

from collections.abc import Sequence

import pytest

from pase.graph.operators.ring import with_rings
from pase.importers.difference import difference
from pase.sharding.placement import place
from tests.runtime.plans import make_plan, random_plan, recomputing
from tests.targets.torch.equality import Compared, compared_under, traced
from tests.targets.torch.lockstep import added
from tests.targets.torch.modules import MODULES
from tests.targets.torch.ranks import Pool

RELATIVE = 1e-12


def _in_rings(rank: int, world: int, name: str, seeds: Sequence[int | None]) -> list[Compared]:
    """Under strategies that split every attention's sequence, and where there is a seed all else at random."""
    graph = with_rings(traced(name)[1].model.graph)
    rings = [op.name for op in graph.operators if op.ring is not None]
    assert rings
    names = [op.name for op in graph.operators]
    found = []
    for seed in seeds:
        if seed is None:
            sequences = [op.name for op in graph.operators if op.extents.get("s", 1) % world == 0]
            plan = make_plan(graph, world, {name: {"s": world} for name in sequences})
        else:
            every = random_plan(graph, world, seed)
            ring = {"s": world}
            splits = [
                {dim: ring.get(dim, 1) for dim in layer.splits} if layer.name in rings else layer.splits
                for layer in every.layers
            ]
            # Every other one has devices in any order.
            devices = [layer.devices for layer in every.layers] if seed % 2 else place(graph, world, splits)
            own, where = (dict(zip(names, each, strict=True)) for each in (splits, devices))
            plan = make_plan(graph, world, own, where)
            plan = recomputing(plan, seed) if seed % 3 == 0 else plan
        assert not difference(plan.graph, traced(name)[1].model.graph)
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
    for found in zip(*by_rank, strict=True):
        for own in found:
            wrong = {k: x for k, x in {**own.gradients, **own.state, "": own.losses}.items() if not x <= RELATIVE}
            assert not wrong, (own.seed, wrong)
        sent, predicted = added([own.sent for own in found]), found[0].predicted
        both = {key: (sent.get(key, 0), predicted.get(key, 0)) for key in {*sent, *predicted}}
        wrong_bytes = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
        assert not wrong_bytes, (found[0].seed, wrong_bytes)
