"""What the papers say beside their equations: crossovers, other grids, recurrent layers, computation, memory, SUMMA."""

from dataclasses import replace
from math import exp, log

import pytest

from pase import load
from pase.studies.integrated.chain import Chain, Options, chain_of, with_conventions
from pase.studies.integrated.equations import (
    Grid,
    Network,
    Role,
    equal_volume_batch,
    integrated,
    model_and_batch,
    own_grids,
    pure_batch,
    pure_model,
)
from pase.studies.integrated.study import OWN_GRIDS, ComputeTimes, held, held_2d, moved, moved_stationary_a, study
from tests.integrated.networks import CORI, alexnet, alexnet_graph

UNIT = Network(latency_s=1000.0, s_per_byte=0.25)
"""A word takes one second, a message a thousand."""
DEFAULT = Options()


def test_the_layer_after_a_convolution_may_be_dense() -> None:
    """One sample: 5, 2, 1, 1, 1 rows of what the next layer reads, after pooling; the last image is 6 x 6 x 256."""
    options = with_conventions({"next_input_is_output": False})
    chain = chain_of(alexnet_graph(), options)
    roles = {x.name: Role.DOMAIN for x in chain.layers}
    convolutions = replace(chain, layers=chain.layers[:5])
    found = integrated(convolutions, roles, 32, Grid(8, 32), CORI, options)
    words = 5 * 27 * 96 + 2 * 13 * 256 + 13 * 384 + 13 * 384 + 6 * 256
    assert found.halo_backward == pytest.approx(5 * 2e-6 + words * 4 / 6e9)
    assert found.halo_backward == pytest.approx(30.757e-6, abs=5e-10)


def test_volumes_are_equal_at_another_batch_than_equation_5_has() -> None:
    """fc3, 4096 to 1000: 2 · 4,096,000 = B (1000 + 2 · 4096)."""
    by_name = {x.name: x for x in alexnet().layers}
    assert equal_volume_batch(by_name["fc3"], DEFAULT) == pytest.approx(8_192_000 / 9192)
    free = Network(latency_s=0.0, s_per_byte=1 / 6e9)
    for name in ("fc3", "fc1", "conv5"):
        alone = Chain(model=name, batch=1, layers=(by_name[name],))
        at = equal_volume_batch(by_name[name], DEFAULT)
        batch_s = pure_batch(alone, 8, free, DEFAULT).time_s
        below, above = (pure_model(alone, b, 8, free, DEFAULT).time_s for b in (int(at), int(at) + 1))
        assert below <= batch_s < above
    third = Chain(model="fc3", batch=1, layers=(by_name["fc3"],))
    times = pure_model(third, 1000, 8, CORI, DEFAULT).time_s, pure_batch(third, 8, CORI, DEFAULT).time_s
    assert times == pytest.approx((5.380e-3, 4.791e-3), abs=1e-6)
    # What reads the data has no input gradient.
    assert equal_volume_batch(by_name["conv1"], DEFAULT) == pytest.approx(2 * 34_848 / 290_400)


def test_the_reading_nearest_to_the_headlines() -> None:
    options = with_conventions({"output_before_pooling": False, "input_gradient": False})
    found = study(chain_of(alexnet_graph(), options), 512, 2048, CORI, options=options)
    on = {
        variant: next(c for c in found.candidates[variant] if c.grid == Grid(16, 32))
        for variant in ("same_grid", "dense_only")
    }
    assert all(c.terms.input_gradient_all_reduce == 0 for c in on.values())
    assert [f"{found.speedup(c.time_s):.2f}" for c in on.values()] == ["5.22", "9.61"]


def test_a_recurrent_layer_sends_at_every_step() -> None:
    """Batch 8 on 2 x 2: half of 4 samples' words; 4 steps of 12 units; gradients of the input and of the state."""
    graph = load("rnnlm", batch=8, arguments={"vocabulary": 24, "units": 12, "steps": 4, "layers": 1})
    terms = model_and_batch(chain_of(graph), 8, Grid(2, 2), UNIT, DEFAULT)
    # Embedding 48, state 48 in four messages, logits 96.
    assert terms.activation_all_gather == 6 * 1000 + 4 / 2 * (48 + 48 + 96)
    # Nothing of the indices; input and state, 96, in four; what fc reads, 48.
    assert terms.input_gradient_all_reduce == 2 * (5 * 1000 + 4 / 2 * (96 + 48))
    # Half of each layer's weights, half of that.
    assert terms.weight_gradient_all_reduce == 2 * (3 * 1000 + (288 + 1152 + 288) / 2 / 2)


def test_two_grids_are_equation_9_on_either() -> None:
    chain = alexnet()
    convolutions, dense = replace(chain, layers=chain.layers[:5]), replace(chain, layers=chain.layers[5:])
    found = own_grids(chain, 512, Grid(8, 512), Grid(128, 32), CORI, DEFAULT)
    rows = integrated(convolutions, {x.name: Role.DOMAIN for x in chain.layers}, 512, Grid(8, 512), CORI, DEFAULT)
    weights = integrated(dense, {x.name: Role.MODEL for x in chain.layers}, 512, Grid(128, 32), CORI, DEFAULT)
    assert found.time_s == pytest.approx(rows.time_s + weights.time_s)
    moving = own_grids(chain, 512, Grid(8, 512), Grid(128, 32), CORI, Options(redistribution=True))
    # Eq. 6: 16 samples of what fc1 reads, to 128 processes.
    assert moving.redistribution == pytest.approx(7 * 2e-6 + 127 / 128 * 16 * 9216 * 4 / 6e9)
    # Without rows that share an image there is no halo.
    assert own_grids(chain, 512, Grid(1, 512), Grid(1, 512), CORI, DEFAULT).time_s == pytest.approx(
        pure_batch(chain, 512, CORI, DEFAULT).time_s
    )


def test_beyond_the_batch_convolutions_have_their_own_grid() -> None:
    found = study(alexnet(), 4096, 512, CORI)
    assert {c.convolutions for c in found.candidates[OWN_GRIDS]} == {Grid(8, 512)}
    best = found.best(OWN_GRIDS)
    assert best is not None
    assert (best.grid, f"{best.time_s * 1e3:.2f}") == (Grid(128, 32), "4.66")
    assert OWN_GRIDS not in study(alexnet(), 512, 512, CORI).candidates
    # 13 rows are fewer than 16 processes; a grid of one's own is taken as it is.
    assert OWN_GRIDS not in study(alexnet(), 8192, 512, CORI).candidates
    chosen = study(alexnet(), 512, 512, CORI, convolutions=Grid(2, 256))
    assert {c.convolutions for c in chosen.candidates[OWN_GRIDS]} == {Grid(2, 256)}


def test_computation_by_the_batch_of_a_process() -> None:
    times = ComputeTimes(points=((2.0, 0.5), (8.0, 1.0), (32.0, 4.0)))
    assert [times.of_batch(b) for b in (2, 8, 32, 64)] == [0.5, 1.0, 4.0, 8.0]
    assert times.of_batch(4) == pytest.approx(exp((log(0.5) + log(1.0)) / 2))
    assert (times.of_batch(1), times.of_batch(0.25)) == (0.5, 0.125)
    chain = alexnet()
    weights = {x.name: Role.MODEL for x in chain.layers}
    # 128 samples on 16 processes: 8 for each, or 32 samples and a quarter of the weights.
    assert times.on_grid(chain, 128, Grid(1, 16), {}) == pytest.approx(1.0)
    assert times.on_grid(chain, 128, Grid(4, 4), weights) == pytest.approx(4.0 / 4)
    # Small batches leave a process idle: a column's are larger.
    assert times.on_grid(chain, 32, Grid(1, 16), {}) == pytest.approx(0.5)
    assert times.on_grid(chain, 32, Grid(4, 4), weights) == pytest.approx(1.0 / 4)
    # Of the FLOP of one sample, these are the dense layers'; convolutions are in batch parallelism.
    flop = {
        x.name: x.num_weights * (x.output_words // x.output_shape[0] if x.is_convolution else 1) for x in chain.layers
    }
    share = sum(flop[name] for name in ("fc1", "fc2", "fc3")) / sum(flop.values())
    dense = dict.fromkeys(("fc1", "fc2", "fc3"), Role.MODEL)
    assert times.on_grid(chain, 32, Grid(4, 4), dense) == pytest.approx(share * 0.25 + (1 - share) * 0.5)


def test_memory_is_between_the_extremes() -> None:
    """Section 4: a linear combination of those of pure batch and pure model parallelism."""
    chain = alexnet()
    roles = {x.name: Role.MODEL for x in chain.layers}
    data = sum(x.input_words + x.output_words for x in chain.layers)
    for grid in (Grid(1, 32), Grid(4, 8), Grid(32, 1)):
        found = held(chain, 64, grid, roles)
        assert found.weights == pytest.approx(60_954_656 / grid.num_rows)
        assert found.data == pytest.approx(data * 64 / grid.num_columns)
    assert held_2d(chain, 64, 32).total == pytest.approx((60_954_656 + 64 * data) / 32)
    domain = held(chain, 64, Grid(4, 8), {x.name: Role.DOMAIN for x in chain.layers})
    assert (domain.weights, domain.data) == (60_954_656, pytest.approx(data * 64 / 32))


def test_no_2d_algorithm_moves_less_forward() -> None:
    (second,) = (x for x in alexnet().layers if x.name == "fc2")
    # 4096² weights are more than 512 · 4096 outputs.
    for grid in (Grid(64, 8), Grid(8, 64)):
        words = moved_stationary_a(second, 512, grid)
        assert words == 2 * 512 * 4096 / grid.num_rows + 512 * 4096 / grid.num_columns
        assert words > moved(second, 512, grid) == 512 * 4096 / grid.num_columns
    assert moved_stationary_a(second, 4096, Grid(8, 64)) is None
