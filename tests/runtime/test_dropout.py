"""Dropout: masks that depend on seed, layer, step and point alone, whatever the strategy; the same in the gradient."""

from dataclasses import replace
from functools import cache
from itertools import product
from math import comb, prod

import numpy as np
import pytest

from pase.costs import ReadTraits, layer_traffic
from pase.errors import EmitError, GraphError, ProgramError
from pase.graph import Builder
from pase.graph.operators import dense, dropout, softmax_loss
from pase.graph.precision import FLOAT32, uniform_types
from pase.sharding.traffic import flows
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers import dropout as dropout_layer
from pase.targets.mesh_tensorflow.runtime.layers.points import _drawn
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult, reference_training
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from pase.targets.training.counted import NOTHING_DROPPED, kept, layer_key, step_key, threshold
from pase.targets.training.data import Batches
from tests.runtime.networks import dropping
from tests.runtime.options import options
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import builder_of, started, trained

BIG = 2**40


@cache
def reference(rate: float = 0.4, steps: int = 4) -> ReferenceResult:
    return reference_training(dropping(rate), options(steps, rate=0.2, seed=3))


def losses(training: Training, batches: Batches, num_steps: int) -> list[float]:
    first = training.num_steps
    return [training.step(batches.batch(first + step)).loss for step in range(num_steps)]


def drawn_by_hand(name: str, rate: float, seed: int, step: int, number: int) -> bool:
    """Whether a point is kept, in Python's own whole numbers."""

    def mixed(word: int) -> int:
        word = (word ^ (word >> 16)) * 0x21F0AAAD % 2**32
        word = (word ^ (word >> 15)) * 0x735A2D97 % 2**32
        return word ^ (word >> 15)

    first, second = (int(a) ^ int(b) for a, b in zip(step_key(seed, step), layer_key(name), strict=True))
    word = mixed(mixed(number % 2**32 ^ first) ^ second ^ mixed(number >> 32))
    return word >= rate * 2**32


# -- which points


@pytest.mark.parametrize(("name", "seed", "step"), [("drop", 0, 0), ("drop", 7, 123_456), ("näme\ud800", 2**70, 1)])
def test_masks_are_those_of_whole_numbers(name: str, seed: int, step: int) -> None:
    shape, rate = (3, 5, 7), 0.375
    mask = kept(name, shape, rate, step_key(seed, step))
    for number, point in enumerate(np.ndindex(*shape)):
        assert mask[point] == drawn_by_hand(name, rate, seed, step, number)


@pytest.mark.parametrize("shape", [(12,), (4, 6), (6, 2, 4), (BIG // 512, 4, 2**13)])
def test_parts_are_pieces_of_the_whole_mask(shape: tuple[int, ...]) -> None:
    """Wherever a tensor is cut, and beyond 32 bits."""
    key = step_key(1, 2)
    key_of_layer = key ^ layer_key("drop")
    begin = [max(0, extent - 4) for extent in shape]
    part = tuple((low, min(low + 3, extent)) for low, extent in zip(begin, shape, strict=True))
    with tf.Graph().as_default(), tf.Session() as session:
        words = session.run(_drawn(part, shape, tf.constant(key_of_layer)))
    assert words.min() >= 0
    assert words.max() < 2**32
    for point in product(*(range(high - low) for low, high in part)):
        number = 0
        for (low, _), at, extent in zip(part, point, shape, strict=True):
            number = number * extent + low + at
        assert (words[point] >= threshold(0.5)) == drawn_by_hand("drop", 0.5, 1, 2, number)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_the_rate_says(rate: float) -> None:
    count = 40_000
    for seed, step in product(range(3), range(3)):
        dropped = count - int(kept("drop", (count,), rate, step_key(seed, step)).sum())
        # Five standard deviations: one in a million.
        assert abs(dropped - rate * count) < 5 * (count * rate * (1 - rate)) ** 0.5


def test_masks_of_other_steps_layers_and_seeds_have_nothing_in_common() -> None:
    count = 40_000
    masks = [
        kept(name, (count,), 0.5, step_key(seed, step)).astype(float)
        for name, seed, step in product(("drop", "drop2"), range(2), range(3))
    ]
    correlations = np.corrcoef(masks)[np.triu_indices(len(masks), 1)]
    assert np.abs(correlations).max() < 5 / count**0.5
    # Neither have neighbours, at any distance, nor rows and columns of a tensor.
    mask = masks[0] - masks[0].mean()
    for distance in (1, 2, 3, 64, 1000, 1024, 4096):
        assert abs(np.mean(mask[distance:] * mask[:-distance])) < 0.25 * 5 / (count - distance) ** 0.5


def test_runs_of_points_are_as_frequent_as_chance_has_them() -> None:
    """Of 10,000 groups of eight, as many have k kept points as the binomial distribution says (chi square)."""
    groups = kept("drop", (10_000, 8), 0.3, step_key(0, 0)).sum(axis=1)
    expected = np.array([10_000 * comb(8, k) * 0.7**k * 0.3 ** (8 - k) for k in range(9)])
    found = np.bincount(groups, minlength=9)
    statistic = float(((found[2:] - expected[2:]) ** 2 / expected[2:]).sum())
    # 7 degrees of freedom: beyond 35 once in 100,000.
    assert statistic < 35


# -- the layer


def test_masks_do_not_depend_on_the_type_of_numbers() -> None:
    found = trained(random_plan(dropping(), 4, 1), steps=4, rate=0.2, seed=3, dtype="float32")
    assert max_relative_difference(found.losses, reference().losses) < 1e-5


def test_it_drops() -> None:
    """A layer that did nothing would pass whatever else is tested here."""
    assert max_relative_difference(reference().losses, reference(0.0).losses) > 1e-3


def test_a_rate_of_zero_changes_nothing() -> None:
    net = Builder("dropping")
    x = net.add(dense, "first", net.input((8, 4, 6)), lead=("b", "s"), reduce=("c",), out=(("d", 12),))
    x = net.add(dense, "second", net.reshape(x, (8, 48)), out=(("n", 24),), activation="tanh")
    net.add(softmax_loss, "loss", net.add(dense, "fc", x, out=(("n", 6),)))
    without = reference_training(net.build(), options(4, rate=0.2, seed=3)).losses
    assert reference(0.0).losses == without
    found = trained(random_plan(dropping(0.0), 4, 2), steps=4, rate=0.2, seed=3)
    assert max_relative_difference(found.losses, without) < 1e-12


def test_nothing_moves_in_the_layer() -> None:
    graph = dropping()
    for seed in range(4):
        plan = random_plan(graph, 4, seed)
        own = [flow for flow in flows(plan) if not flow.is_of_edge and flow.movement.consumer.startswith("drop")]
        assert not own
    moved = trained(plan, steps=1, keep_alive=True).measured
    assert moved.elsewhere_bytes == 0
    assert not [m for m, n in moved.by_movement.items() if n and m.producer == m.consumer and "drop" in m.producer]


def test_its_costs_are_its_points() -> None:
    operator = dropout("drop", (8, 6), dims=("b", "n"), rate=0.5)
    rows = np.array([[1, 1], [4, 1], [2, 3]], dtype=np.int32)
    traffic = layer_traffic(
        operator,
        rows,
        (ReadTraits(has_gradient=True, is_fed=True, is_owned=True),),
        types=uniform_types(operator, FLOAT32),
    )
    assert not traffic.messages
    np.testing.assert_array_equal(traffic.flop, 2 * prod((8, 6)) / np.array([1, 4, 6]))


# -- steps


def test_evaluation_keeps_every_point() -> None:
    with started(random_plan(dropping(), 4, 0), seed=3, rate=0.2) as (training, batches):
        loss = training.evaluate(batches.batch(0)).loss
        # It is no step: the masks that follow are those of the first one.
        assert losses(training, batches, 1) == pytest.approx(reference().losses[:1], rel=1e-12)
    assert loss == pytest.approx(reference(0.0).losses[0], rel=1e-12)
    assert kept("drop", (5,), 0.5, NOTHING_DROPPED).all()


def test_a_program_without_dropout_is_fed_nothing() -> None:
    with tf.Graph().as_default():
        assert Program(num_devices=2).mask_feeds(NOTHING_DROPPED) == {}


# -- what is refused


@pytest.mark.parametrize("rate", [1, 1.0, -0.1, float("nan"), True, "0.5"])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(GraphError, match=r"layer 'drop' drops a fraction of .*; expected a rate from 0 to below 1"):
        dropout("drop", (4, 6), dims=("b", "n"), rate=rate)


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(GraphError, match=r"layer 'drop' reads shape \(4, 6\); expected dims b, s, d"):
        dropout("drop", (4, 6), dims=("b", "s", "d"), rate=0.5)


def test_an_edited_rate_is_refused() -> None:
    graph = dropping()
    object.__setattr__(graph["drop1"], "attributes", (("rate", 1.5),))
    with pytest.raises(EmitError, match=r"'drop1' \(dropout\): attribute 'rate' is 1\.5; expected a number from 0"):
        emit(make_plan(graph, 2, {}))
    graph = dropping()
    body = graph["drop1"].body
    assert body is not None
    steps = tuple(replace(step, options=(("rate", 1.5),)) for step in body.steps)
    object.__setattr__(graph["drop1"], "body", replace(body, steps=steps))
    with pytest.raises(EmitError, match=r"'drop1': a step of its body, 'dropout', has option rate = 1\.5; it has rate"):
        emit(make_plan(graph, 2, {}))
    with tf.Graph().as_default():
        program = Program(num_devices=1)
        x = builder_of(emit(make_plan(dropping(), 1, {})).replace("rate=0.4", "rate=2"))
        with pytest.raises(ProgramError, match=r"layer 'drop1' drops a fraction of 2; give a rate from 0 to below 1"):
            x(program)
    assert callable(dropout_layer)
