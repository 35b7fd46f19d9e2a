"""Modules that people train, on ranks under any strategy, against the unmodified ones; and what they send."""

import pytest

from tests.targets.torch.equality import check, compared
from tests.targets.torch.modules import MODULES
from tests.targets.torch.ranks import Pool

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
    check(by_rank)
