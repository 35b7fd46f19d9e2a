"""Random numbers of a module's own graph: by the key of a step and the operator's number alone."""

import torch

from pase.targets.torch.draws import seeded
from pase.targets.training.counted import step_key


def test_numbers_depend_on_the_key_and_the_number_alone_and_leave_the_generator_as_it_was() -> None:
    draw = torch.ops.aten.rand.default
    key, later = (torch.from_numpy(step_key(3, step)) for step in (0, 1))
    first = seeded(draw, 5)(key, [64])
    before = torch.get_rng_state()
    torch.rand(7)
    torch.set_rng_state(before)
    assert torch.equal(first, seeded(draw, 5)(key, [64]))
    assert torch.equal(before, torch.get_rng_state())
    others = [seeded(draw, 6)(key, [64]), seeded(draw, 5)(later, [64])]
    assert not any(torch.equal(first, other) for other in others)
    assert 0.3 < first.mean() < 0.7
    # On shards of another size they are others: ranks draw the whole tensor.
    mask = seeded(torch.ops.aten.bernoulli.p, 5)(key, torch.zeros(1000), 0.25)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert 0.2 < mask.mean() < 0.3
