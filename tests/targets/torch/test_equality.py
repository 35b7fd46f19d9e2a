"""Modules that people train, on ranks under any strategy, against the unmodified ones; and what they send."""

import pytest

from tests.targets.torch.equality import compared
from tests.targets.torch.lockstep import added
from tests.targets.torch.modules import MODULES
from tests.targets.torch.ranks import Pool

RELATIVE = 1e-12

QUICK = (("unet", 4, (0,)), ("dlrm", 4, (1,)))

EVERY = (None, *range(20))


@pytest.mark.parametrize(
    ("name", "world", "seeds"),
    [
        *QUICK,
        *(
            pytest.param(name, world, EVERY, marks=pytest.mark.full)
            for name, module in MODULES.items()
            for world in module.devices
        ),
    ],
)
def test_a_module_trains_as_by_itself(ranks: Pool, name: str, world: int, seeds: tuple[int | None, ...]) -> None:
    """Under random strategies and, without a seed, the searched one; ranks trace the module once."""
    pytest.importorskip(MODULES[name].package)
    by_rank = ranks.run(compared, name, seeds, world=world, timeout_s=120.0 + 20.0 * len(seeds))
    for found in zip(*by_rank, strict=True):
        for own in found:
            where = (name, world, own.seed)
            assert own.losses <= RELATIVE, where
            wrong = {k: x for k, x in {**own.gradients, **own.state}.items() if not x <= RELATIVE}
            assert not wrong, (*where, wrong)
        sent, predicted = added([own.sent for own in found]), found[0].predicted
        both = {key: (sent.get(key, 0), predicted.get(key, 0)) for key in {*sent, *predicted}}
        wrong_bytes = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
        assert not wrong_bytes, (name, world, found[0].seed, wrong_bytes)
