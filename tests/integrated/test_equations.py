"""Eqs. 3 to 9 beside hand-worked numbers, their limits, and what the papers say of them."""

from dataclasses import replace
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase import Builder
from pase.graph.operators import conv2d, dense
from pase.studies.integrated.chain import Chain, Options, chain_of
from pase.studies.integrated.equations import (
    Grid,
    Network,
    Role,
    crossover_batch,
    dense_only,
    integrated,
    integrated_1,
    largest_model_batch,
    model_and_batch,
    pure_batch,
    pure_domain,
    pure_model,
    pure_model_1,
    redistribution,
)
from pase.studies.integrated.study import num_iterations, step_time
from tests.integrated.networks import CORI, alexnet

UNIT = Network(latency_s=1000.0, s_per_byte=0.25)
"""A word takes one second, a message a thousand."""
DEFAULT = Options()


def two_layers() -> Chain:
    """A convolution of 2 channels of 4 x 6 to 3 (54 weights, d 48 to 72), and a dense layer of 72 to 5 (360)."""
    net = Builder("two")
    x = net.add(conv2d, "conv", net.input((8, 2, 4, 6)), out=3, kernel=3, padding=1)
    net.add(dense, "fc", net.reshape(x, (8, 72)), out=(("n", 5),))
    return chain_of(net.build())


def test_two_layers_by_hand() -> None:
    chain = two_layers()
    # Eq. 3 on 4: gathers of 8·(72 + 5)·3/4 in 2 messages each; ΔX of the dense layer alone, twice 8·72·3/4.
    model = pure_model(chain, 8, 4, UNIT, DEFAULT)
    assert model.activation_all_gather == 2 * 2000 + 462
    assert model.input_gradient_all_reduce == 2 * (2000 + 432)
    assert model.weight_gradient_all_reduce == 0
    # Eq. 4 on 4: twice (54 + 360)·3/4.
    assert pure_batch(chain, 4, UNIT, DEFAULT).time_s == 2 * (2 * 2000 + 310.5)
    # Eq. 6: 8·72·3/4.
    assert redistribution(72, 8, 4, UNIT, DEFAULT) == 2000 + 432
    # Eq. 7 on 2, of the convolution: 8·6·2 and 8·6·3 words, and its weights.
    domain = pure_domain(chain, 8, 2, UNIT, DEFAULT)
    assert (domain.halo_forward, domain.halo_backward) == (1000 + 96, 1000 + 144)
    assert domain.weight_gradient_all_reduce == 2 * (1000 + 27)
    # Eq. 8 on 2x4: 8/4 samples; halves of the weights over 4.
    both = model_and_batch(chain, 8, Grid(2, 4), UNIT, DEFAULT)
    assert both.activation_all_gather == 2 * 1000 + 2 * 77 / 2
    assert both.input_gradient_all_reduce == 2 * (1000 + 2 * 72 / 2)
    assert both.weight_gradient_all_reduce == 2 * (2 * 2000 + 0.75 * 414 / 2)
    # Eq. 4 of the convolution over all 8, Eq. 8 of the dense layer, its ΔX too.
    late = dense_only(chain, 8, Grid(2, 4), UNIT, DEFAULT)
    assert late.activation_all_gather == 1000 + 2 * 5 / 2
    assert late.input_gradient_all_reduce == 2 * (1000 + 2 * 72 / 2)
    assert late.weight_gradient_all_reduce == 2 * (3000 + 54 * 7 / 8) + 2 * (2000 + 0.75 * 360 / 2)
    assert late.redistribution == 0
    # Eq. 9: halos of 2 samples, the convolution's weights over all 8.
    roles = {"conv": Role.DOMAIN, "fc": Role.MODEL}
    all_three = integrated(chain, roles, 8, Grid(2, 4), UNIT, DEFAULT)
    assert (all_three.halo_forward, all_three.halo_backward) == (1000 + 2 * 12, 1000 + 2 * 18)
    assert replace(all_three, halo_forward=0.0, halo_backward=0.0) == late
    # Version 1: three times the gathers.
    assert pure_model_1(chain, 8, 4, UNIT, DEFAULT).time_s == 3 * (2 * 2000 + 462)
    first = integrated_1(chain, 8, Grid(2, 4), UNIT, DEFAULT)
    assert first.time_s == pytest.approx(3 * both.activation_all_gather + both.weight_gradient_all_reduce)


@pytest.mark.parametrize(
    ("convention", "difference"),
    [
        ("first_dense_gradient", -2 * (1000 + 2 * 72 / 2)),
        ("redistribution", 1000 + 2 * 72 / 2),
        ("terms_from_zero", 2 * 3000),
        ("rounded_log", 0),
    ],
)
def test_conventions_of_the_dense_variant(convention: str, difference: float) -> None:
    chain, grid = two_layers(), Grid(2, 4)
    changed = replace(DEFAULT, **{convention: not getattr(DEFAULT, convention)})
    times = [dense_only(chain, 8, grid, UNIT, options).time_s for options in (DEFAULT, changed)]
    assert times[1] - times[0] == pytest.approx(difference)


def test_conventions_of_the_sums() -> None:
    chain = two_layers()
    from_zero = Options(terms_from_zero=True)
    assert pure_batch(chain, 4, UNIT, from_zero).time_s == pure_batch(chain, 4, UNIT, DEFAULT).time_s + 4000
    extra = pure_domain(chain, 8, 2, UNIT, from_zero).time_s - pure_domain(chain, 8, 2, UNIT, DEFAULT).time_s
    assert extra == 1000 + 1000 + 2 * 1000
    # Version 1's sum from i = 0 has d_0 = 48.
    grown = pure_model_1(chain, 8, 4, UNIT, from_zero).time_s - pure_model_1(chain, 8, 4, UNIT, DEFAULT).time_s
    assert grown == 3 * (2000 + 8 * 48 * 3 / 4)
    roles = dict.fromkeys(("conv", "fc"), Role.MODEL)
    printed = integrated(chain, roles, 8, Grid(2, 4), UNIT, Options(first_gradient=True))
    usual = integrated(chain, roles, 8, Grid(2, 4), UNIT, DEFAULT)
    assert printed.time_s - usual.time_s == 2 * (1000 + 2 * 48 / 2)
    smooth = pure_batch(chain, 3, UNIT, Options(rounded_log=False)).time_s
    assert smooth == pytest.approx(2 * (2 * 1000 * log2(3) + 414 * 2 / 3))


def test_crossovers() -> None:
    by_name = {layer.name: layer for layer in alexnet().layers}
    # 2 k_h k_w X_C / (3 Y_H Y_W), and 2 d_(i-1) / 3 of dense layers.
    assert crossover_batch(by_name["conv3"], DEFAULT) == pytest.approx(2 * 9 * 256 / (3 * 169))
    assert crossover_batch(by_name["conv4"], DEFAULT) == pytest.approx(2 * 9 * 192 / (3 * 169))
    assert crossover_batch(by_name["fc1"], DEFAULT) == pytest.approx(2 * 9216 / 3)
    whole = Options(crossover_per_group=False)
    assert crossover_batch(by_name["conv4"], whole) == pytest.approx(2 * 9 * 384 / (3 * 169))
    assert crossover_batch(by_name["conv3"], whole) == crossover_batch(by_name["conv3"], DEFAULT)
    # "3x3 filters on 13x13x384": lower volume for B of 12 or less, indeed to 13.
    assert largest_model_batch(by_name["conv4"], whole) == 13
    # At the crossover itself neither wins.
    assert crossover_batch(by_name["fc1"], DEFAULT) == 6144
    assert largest_model_batch(by_name["fc1"], DEFAULT) == 6143
    assert largest_model_batch(by_name["fc1"], Options(strict_crossover=False)) == 6144
    assert largest_model_batch(by_name["conv1"], DEFAULT) == 0


@given(batch=st.integers(1, 300))
def test_the_crossover_is_where_the_volumes_meet(batch: int) -> None:
    volume = Network(latency_s=0.0, s_per_byte=1.0)
    net = Builder("square")
    x = net.add(dense, "fc1", net.input((4, 120)), out=(("n", 120),))
    net.add(dense, "fc2", x, out=(("n", 120),))
    layer = chain_of(net.build()).layers[1]
    alone = Chain(model="one", batch=4, layers=(layer,))
    model, data = pure_model(alone, batch, 6, volume, DEFAULT).time_s, pure_batch(alone, 6, volume, DEFAULT).time_s
    assert (model < data) == (batch <= largest_model_batch(layer, DEFAULT))
    assert (model > data) == (batch > crossover_batch(layer, DEFAULT))


@given(batch=st.integers(1, 4096), exponent=st.integers(0, 10), version=st.booleans())
def test_the_ends_of_the_grid_are_the_pure_approaches(batch: int, exponent: int, version: bool) -> None:
    p = 1 << exponent
    chain = alexnet()
    whole, model = (integrated_1, pure_model_1) if version else (model_and_batch, pure_model)
    rows, columns = whole(chain, batch, Grid(p, 1), CORI, DEFAULT), whole(chain, batch, Grid(1, p), CORI, DEFAULT)
    assert rows == model(chain, batch, p, CORI, DEFAULT)
    assert columns == pure_batch(chain, p, CORI, DEFAULT)
    late = dense_only(chain, batch, Grid(1, p), CORI, DEFAULT)
    assert late.time_s == pytest.approx(columns.time_s)


@given(batch=st.integers(1, 4096), rows=st.integers(1, 64), columns=st.integers(1, 64))
def test_equation_9_with_all_layers_in_l_m_is_equation_8(batch: int, rows: int, columns: int) -> None:
    chain, grid = alexnet(), Grid(rows, columns)
    roles = {layer.name: Role.MODEL for layer in chain.layers}
    nine, eight = (
        integrated(chain, roles, batch, grid, CORI, DEFAULT),
        model_and_batch(chain, batch, grid, CORI, DEFAULT),
    )
    assert nine.as_dict() == pytest.approx(eight.as_dict())


def test_steps_and_epochs() -> None:
    assert step_time(3.0, 6.0) == 9.0
    assert step_time(3.0, 6.0, overlap=True) == 7.0  # two of the three are hidden behind four of the six
    assert step_time(6.0, 3.0, overlap=True) == 7.0  # only two of the four fit behind two of the three
    assert num_iterations(1000, 300, DEFAULT) == pytest.approx(10 / 3)
    assert num_iterations(1000, 300, Options(whole_iterations=True)) == 4
