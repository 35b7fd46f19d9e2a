"""Operators: shapes, parameters, FLOP and partial sums against NumPy, and every message for options that do not fit."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pase.errors import GraphError
from pase.graph import Access, Operator, Role, SliceOf, Window, verify_operator
from pase.graph.operator import access_dims, axis_dims, named_dims
from pase.graph.operators import (
    add_parameter,
    attention,
    batch_norm,
    concat,
    conv2d,
    dense,
    elementwise,
    embedding,
    global_pool,
    layer_norm,
    lstm,
    pool2d,
    softmax_loss,
)

IMAGE = (2, 4, 9, 7)


def _forward_flop(operator: Operator) -> float:
    return sum(work.flop_per_point * operator.work_points(work) for work in operator.work)


def _contraction_flop(operator: Operator) -> float:
    return sum(work.flop_per_point * operator.work_points(work) for work in operator.work if work.contraction)


def _num_parameters(operator: Operator) -> int:
    return sum(access.size for access in operator.parameters)


# -- accesses


def test_each_kind_of_axis_is_split_by_its_own_dims() -> None:
    axes = [None, "b", ("g", "n"), Window(out="h", kernel="r", stride=2), SliceOf(dim="c", offset=3, extent=2)]
    assert list(map(axis_dims, axes)) == [(), ("b",), ("g", "n"), ("h",), ("c",)]
    access = Access(tensor="x", shape=(8, 3, 9), index_map=("b", "c", Window(out="h", kernel="r")))
    assert access_dims(access) == {"b", "c", "h"}
    assert named_dims(access) == {"b", "c", "h", "r"}
    roles = {role: replace(access, role=role).is_differentiable for role in Role}
    assert roles == {Role.ACTIVATION: True, Role.PARAMETER: True, Role.INDEX: False}


# -- contractions: every dim that an access lacks leaves partial sums, shown by computing the parts


def _letters(access: Access) -> str:
    return "".join(axis for axis in access.index_map if isinstance(axis, str))


def _check_partial_sums(operator: Operator, tensors: tuple[Access, Access, Access]) -> None:
    """Split each dim of result = Σ left · right in two and put the halves together as partial_dims says."""
    generator = np.random.default_rng(0)
    left, right, result = tensors
    arrays = [generator.normal(size=access.shape) for access in (left, right)]
    formula = f"{_letters(left)},{_letters(right)}->{_letters(result)}"
    whole = np.einsum(formula, *arrays)
    for dim, extent in operator.extents.items():
        cut = extent // 2
        parts = [
            np.einsum(
                formula, *(_slice(array, access, dim, piece) for array, access in zip(arrays, tensors, strict=False))
            )
            for piece in (slice(0, cut), slice(cut, None))
        ]
        if dim in operator.partial_dims(result):
            joined = parts[0] + parts[1]
        else:
            joined = np.concatenate(parts, axis=_letters(result).index(dim))
        np.testing.assert_allclose(joined, whole)


def _slice(array: NDArray[np.float64], access: Access, dim: str, piece: slice) -> NDArray[np.float64]:
    return array[tuple(piece if axis == dim else slice(None) for axis in access.index_map)]


@given(
    lead=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    reduce=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    out=st.lists(st.integers(2, 4), min_size=1, max_size=2),
)
def test_dense_is_the_product_that_numpy_computes(lead: list[int], reduce: list[int], out: list[int]) -> None:
    operator = dense(
        "fc",
        (*lead, *reduce),
        lead=tuple("bs"[: len(lead)]),
        reduce=tuple("cd"[: len(reduce)]),
        out=tuple(zip("nm", out, strict=False)),
    )
    verify_operator(operator)
    x, w, bias = operator.reads
    (y,) = operator.writes
    assert y.shape == np.tensordot(np.ones(x.shape), np.ones(w.shape), axes=len(reduce)).shape
    assert _contraction_flop(operator) == 2 * prod(lead) * prod(reduce) * prod(out)
    assert bias.size == prod(out)
    assert _forward_flop(operator) == _contraction_flop(operator) + y.size
    # y = x w, its two gradients dx = dy wᵀ and dw = xᵀ dy: the same iteration space each time.
    _check_partial_sums(operator, (x, w, y))
    _check_partial_sums(operator, (y, w, x))
    _check_partial_sums(operator, (x, y, w))


def test_dense_options() -> None:
    plain = dense("fc", (4, 6), out=(("n", 8),), bias=False)
    assert [access.tensor for access in plain.reads] == ["x", "w"]
    assert len(plain.work) == 1
    shared = dense("fc", (4, 6), out=(("n", 8),), bias=False, activation="relu", shared="table")
    assert shared.reads[1].shared == "table"
    assert shared.attribute("activation", "") == "relu"
    assert _forward_flop(shared) == 2 * 4 * 6 * 8 + 4 * 8


def test_attention_is_two_products_and_a_softmax() -> None:
    b, s, t, h, k = 2, 3, 5, 4, 6
    operator = attention("a", (b, s, h, k), (b, t, h, k), (b, t, h, k), causal=True)
    verify_operator(operator)
    assert operator.extents == {"b": b, "h": h, "s": s, "t": t, "k": k}
    scores = np.einsum("bshk,bthk->bhst", np.ones((b, s, h, k)), np.ones((b, t, h, k)))
    assert _contraction_flop(operator) == 2 * (2 * scores.size * k)
    assert _forward_flop(operator) == _contraction_flop(operator) + 5 * scores.size
    assert operator.attribute("causal", False) is True
    query, key, value = operator.reads
    assert operator.partial_dims(query) == ("t",)
    assert operator.partial_dims(key) == operator.partial_dims(value) == ("s",)
    assert operator.partial_dims(operator.writes[0]) == ("t",)


def test_lstm_is_one_iteration_space() -> None:
    layers, b, s, units = 2, 4, 5, 8
    operator = lstm("lstm", (b, s, units), layers=layers, units=units)
    verify_operator(operator)
    assert operator.extents == {"l": layers, "b": b, "s": s, "d": units, "e": units}
    # Hochreiter and Schmidhuber's cell with a forget gate: four gates, each with an input and a recurrent matrix.
    assert _num_parameters(operator) == layers * 4 * (units * units + units * units + units)
    # Every gate of every unit, layer, step and sample is an inner product with the input and with the state.
    assert _contraction_flop(operator) == layers * b * s * 4 * units * (2 * units + 2 * units)
    assert operator.writes[0].size == b * s * units
    assert operator.partial_dims(operator.writes[0]) == ()
    assert operator.pipeline is not None


# -- windows


@given(
    extent=st.integers(1, 12),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
)
def test_as_many_windows_as_numpy_slides(
    extent: int, kernel: int, stride: int, dilation: int, before: int, after: int
) -> None:
    def convolution() -> Operator:
        return conv2d(
            "conv",
            (2, 3, extent, 5),
            out=4,
            kernel=(kernel, 1),
            stride=(stride, 1),
            dilation=(dilation, 1),
            padding=((before, after), (0, 0)),
        )

    reach = dilation * (kernel - 1) + 1
    padded = np.pad(np.arange(extent), (before, after))
    if len(padded) < reach:
        with pytest.raises(GraphError, match=f"a window of {reach} does not fit {extent} points with padding"):
            convolution()
        return
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach)[::stride]
    operator = convolution()
    assert operator.writes[0].shape == (2, 4, len(windows), 5)
    assert operator.extents["r"] == kernel


@given(extent=st.integers(1, 20), kernel=st.integers(1, 5), stride=st.integers(1, 4), dilation=st.integers(1, 3))
def test_same_padding_gives_one_output_for_each_stride(extent: int, kernel: int, stride: int, dilation: int) -> None:
    operator = conv2d(
        "conv", (1, 1, extent, extent), out=1, kernel=kernel, stride=stride, dilation=dilation, padding="same"
    )
    verify_operator(operator)
    assert operator.writes[0].shape == (1, 1, *(len(range(0, extent, stride)),) * 2)


def test_conv2d_dims_are_those_of_a_group() -> None:
    assert conv2d("conv", IMAGE, out=6, kernel=3).extents == {"b": 2, "n": 6, "h": 7, "w": 5, "c": 4, "r": 3, "s": 3}
    grouped = conv2d("conv", IMAGE, out=6, kernel=3, groups=2)
    assert grouped.extents == {"b": 2, "g": 2, "n": 3, "h": 7, "w": 5, "c": 2, "r": 3, "s": 3}
    x, w, bias = grouped.reads
    assert grouped.partial_dims(x) == ("n", "r", "s")
    assert grouped.partial_dims(w) == grouped.partial_dims(bias)[:3] == ("b", "h", "w")
    assert grouped.partial_dims(grouped.writes[0]) == ("c", "r", "s")
    assert _num_parameters(grouped) == 6 * 2 * 9 + 6


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_pool2d_keeps_the_channels(reduction: str) -> None:
    operator = pool2d("pool", IMAGE, kernel=3, stride=2, reduction=reduction, count_padding=True)
    verify_operator(operator)
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(IMAGE), (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    assert operator.writes[0].shape == windows.shape[:4]
    assert _forward_flop(operator) == windows.size
    assert operator.unsplittable == ("r", "s")
    assert operator.attribute("reduction", "") == reduction
    assert operator.attribute("count_padding", False) is True


def test_global_pool_is_a_mean_over_positions() -> None:
    operator = global_pool("pool", IMAGE)
    verify_operator(operator)
    assert operator.writes[0].shape == np.zeros(IMAGE).mean(axis=(2, 3)).shape
    assert operator.partial_dims(operator.writes[0]) == ("h", "w")


# -- point by point


@given(extents=st.lists(st.integers(1, 5), min_size=1, max_size=5), position=st.integers(0, 3))
def test_concat_lays_its_inputs_end_to_end(extents: list[int], position: int) -> None:
    shapes = [(*IMAGE[:position], extent, *IMAGE[position + 1 :]) for extent in extents]
    operator = concat("join", *shapes, along="bchw"[position])
    verify_operator(operator)
    assert operator.writes[0].shape == np.concatenate([np.zeros(shape) for shape in shapes], axis=position).shape
    covered: list[int] = []
    for access in operator.reads:
        part = access.index_map[position]
        assert isinstance(part, SliceOf)
        covered += range(part.offset, part.offset + part.extent)
    assert covered == list(range(sum(extents)))
    assert _forward_flop(operator) == 0


def test_add_parameter_holds_what_it_adds() -> None:
    operator = add_parameter("positions", (2, 3, 8), dims=("b", "s", "d"), over=("s", "d"))
    verify_operator(operator)
    assert operator.writes[0].shape == (np.zeros((2, 3, 8)) + np.zeros(operator.reads[1].shape)).shape
    assert operator.partial_dims(operator.reads[1]) == ("b",)
    assert _num_parameters(operator) == 3 * 8


@pytest.mark.parametrize(
    ("operator", "over", "statistics"),
    [
        (batch_norm("norm", IMAGE, activation="relu"), ("b", "h", "w"), (2, 4)),
        (layer_norm("norm", (2, 3, 8)), ("d",), (2, 2, 3)),
    ],
)
def test_normalisations_reduce_their_moments(
    operator: Operator, over: tuple[str, ...], statistics: tuple[int, ...]
) -> None:
    verify_operator(operator)
    (exchange,) = operator.exchanges
    assert getattr(exchange, "over", None) == over
    assert exchange.shape == statistics
    x, scale, shift = operator.reads
    assert operator.writes[0].shape == x.shape
    assert scale.shape == shift.shape == (x.shape[1] if len(x.shape) == 4 else x.shape[2],)
    assert _forward_flop(operator) == x.size * (6 if operator.attribute("activation", "") else 5)


# -- options that do not fit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: conv2d("l", (2, 4, 9), out=4, kernel=3),
            r"layer 'l' reads shape \(2, 4, 9\); expected \[batch, channels",
        ),
        (
            lambda: conv2d("l", IMAGE, out=6, kernel=3, groups=4),
            "has 4 groups; expected a number that divides 4 in- and 6",
        ),
        (
            lambda: conv2d("l", IMAGE, out=6, kernel=3, groups=3),
            "has 3 groups; expected a number that divides 4 in- and 6",
        ),
        (lambda: conv2d("l", IMAGE, out=6, kernel=3, groups=0), "has 0 groups; expected a number that divides"),
        (lambda: conv2d("l", IMAGE, out=6, kernel=0), r"kernel 0, stride 1, .* padding \(0, 0\) is not possible"),
        (lambda: conv2d("l", IMAGE, out=6, kernel=3, stride=0), "kernel 3, stride 0, dilation 1, .* is not possible"),
        (lambda: conv2d("l", IMAGE, out=6, kernel=3, dilation=0), "dilation 0, .* is not possible"),
        (lambda: conv2d("l", IMAGE, out=6, kernel=3, padding=-1), r"padding \(-1, -1\) is not possible"),
        (
            lambda: conv2d("l", IMAGE, out=6, kernel=8),
            r"a window of 8 does not fit 7 points with padding \(0, 0\); use a",
        ),
        (
            lambda: pool2d("l", IMAGE[1:], kernel=2, stride=2),
            r"layer 'l' reads shape \(4, 9, 7\); expected \[batch, channels",
        ),
        (
            lambda: pool2d("l", IMAGE, kernel=2, stride=2, reduction="min"),
            "unknown reduction 'min'; expected 'max' or 'mean'",
        ),
        (lambda: pool2d("l", IMAGE, kernel=10, stride=2), "a window of 10 does not fit 9 points"),
        (
            lambda: global_pool("l", (2, 4)),
            r"shape \(2, 4\); expected \[batch, channels\] and 1 to 3 of depth, height, width",
        ),
        (lambda: dense("l", (2, 3, 4), out=(("n", 5),)), r"layer 'l' reads shape \(2, 3, 4\); expected dims b, c"),
        (lambda: embedding("l", (2,), vocabulary=9, size=4), r"layer 'l' reads shape \(2,\); expected dims b, s"),
        (lambda: lstm("l", (2, 3), layers=1, units=3), r"layer 'l' reads shape \(2, 3\); expected \[batch, steps, 3\]"),
        (
            lambda: lstm("l", (2, 3, 4), layers=1, units=5),
            r"expected \[batch, steps, 5\]: inputs as wide as the layers",
        ),
        (
            lambda: batch_norm("l", (2, 4)),
            r"shape \(2, 4\); expected \[batch, channels\] and 1 to 3 of depth, height, width",
        ),
        (lambda: layer_norm("l", (2, 4)), r"layer 'l' reads shape \(2, 4\); expected dims b, s, d"),
        (lambda: softmax_loss("l", (2, 3, 4)), r"layer 'l' reads shape \(2, 3, 4\); expected dims b, n"),
        (
            lambda: elementwise("l", (2,), dims=("b",), function="sqrt"),
            "unknown function 'sqrt'; expected one of add, mul",
        ),
        (lambda: elementwise("l", (2, 3), (2, 4), dims=("b", "n")), "expected one or more of one shape, dims b, n"),
        (lambda: elementwise("l", dims=("b", "n")), r"reads shapes \(\); expected one or more of one shape"),
        (lambda: elementwise("l", (2, 3), dims=("b",)), "expected one or more of one shape, dims b"),
        (
            lambda: add_parameter("l", (2, 3), dims=("b",), over=("b",)),
            r"reads shape \(2, 3\); expected dims b, of which b",
        ),
        (lambda: add_parameter("l", (2,), dims=("b",), over=("s",)), "expected dims b, of which s have a parameter"),
        (lambda: concat("l", IMAGE, along="z"), "layer 'l' joins shapes .* along 'z'; expected dims b, c, h, w"),
        (lambda: concat("l", IMAGE, (2, 4)), "layer 'l' joins shapes .* along 'c'; expected dims b, c, h, w"),
        (lambda: concat("l"), r"layer 'l' joins shapes \(\) along 'c'"),
        (lambda: concat("l", IMAGE, (2, 4, 9, 8)), "they may differ in 'c' alone"),
        (lambda: attention("l", (2, 3, 4), (2, 3, 4), (2, 3, 4)), r"expected \[b, s, h, k\] and twice \[b, t, h, k\]"),
        (lambda: attention("l", (2, 3, 4, 5), (2, 3, 4, 6), (2, 3, 4, 6)), r"expected \[b, s, h, k\] and twice"),
        (lambda: attention("l", (2, 3, 4, 5), (2, 3, 4, 5), (2, 9, 4, 5)), r"expected \[b, s, h, k\] and twice"),
    ],
)
def test_options_that_do_not_fit_are_refused(make: Callable[[], Operator], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


def test_padding_may_be_given_for_each_side() -> None:
    operator = conv2d("conv", IMAGE, out=6, kernel=3, padding=((1, 0), (2, 1)))
    assert operator.writes[0].shape == (2, 6, 8, 8)
    assert access_dims(operator.reads[0]) == {"b", "c", "h", "w"}
    row, col = operator.reads[0].index_map[2:]
    assert isinstance(row, Window)
    assert isinstance(col, Window)
    assert (row.pad, col.pad) == (1, 2)


@pytest.mark.parametrize("factory", [dense, conv2d])
def test_an_unknown_activation_is_refused_with_the_known_ones(factory: Callable[..., Operator]) -> None:
    shape = (2, 8) if factory is dense else (2, 3, 8, 8)
    options: dict[str, Any] = {"out": (("n", 4),)} if factory is dense else {"out": 4, "kernel": 3}
    with pytest.raises(GraphError, match="unknown activation 'rellu': did you mean 'relu'"):
        factory("layer", shape, **options, activation="rellu")


def test_padding_that_holds_a_whole_window_is_refused() -> None:
    with pytest.raises(GraphError, match="padding \\(3, 3\\) holds a whole window of 3; use less"):
        pool2d("pool", (2, 3, 8, 8), kernel=3, stride=1, padding=3)
