"""Work and messages of single layers against closed forms worked out by hand, one split at a time."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from pase.costs import Pattern, ReadTraits, layer_traffic
from pase.graph import PRECISIONS, Operator, Precision, SliceOf
from pase.graph.operators import (
    attention,
    batch_norm,
    concat,
    conv2d,
    dense,
    embedding,
    gather,
    global_pool,
    layer_norm,
    pool2d,
    softmax_loss,
)
from pase.graph.precision import FLOAT32, uniform_types

Found = dict[str, tuple[float, int, int]]


def _traffic(
    operator: Operator, *, fed: bool = True, precision: Precision = FLOAT32, **split: int
) -> tuple[float, Found]:
    """Return (FLOP, {tensor: (bytes, group, times)}) under one configuration; dims that are not named are whole."""
    row = np.array([[split.get(dim, 1) for dim in operator.extents]], dtype=np.int32)
    reads = tuple(
        ReadTraits(
            has_gradient=access.is_differentiable and (fed or access in operator.parameters),
            is_fed=fed and access not in operator.parameters,
            is_owned=True,
        )
        for access in operator.reads
    )
    traffic = layer_traffic(operator, row, reads, types=uniform_types(operator, precision))
    names = [m.tensor for m in traffic.messages]
    assert len(set(names)) == len(names)
    return traffic.flop.item(), {
        m.tensor: (m.size_bytes.item(), m.group.item(), m.times) for m in traffic.messages if m.size_bytes.item()
    }


# -- fully connected: y[b, n] = x[b, c] w[c, n]

B, N, C = 8, 16, 32
FC = dense("fc", (B, C), out=(("n", N),), bias=False)


def test_a_whole_layer_communicates_nothing() -> None:
    assert _traffic(FC) == (3 * 2 * B * N * C, {})


def test_a_result_that_is_read_in_pieces_too_is_summed_and_written_once() -> None:
    (whole,) = FC.writes
    halves = [
        replace(whole, tensor=f"y[{i}]", shape=(B, 8), index_map=("b", SliceOf(dim="n", offset=i, extent=8)))
        for i in (0, 8)
    ]
    cut = replace(FC, writes=(whole, *halves))
    for split in ({"c": 4}, {"b": 2, "c": 2}, {"n": 2, "c": 2}):
        assert _traffic(cut, **split) == _traffic(FC, **split)
    flop, found = _traffic(cut, c=4)
    assert (flop, found[whole.tensor]) == (3 * 2 * B * N * C / 4, (B * N * 4, 4, 1))
    row = np.ones((1, 3), dtype=np.int32)
    traits = (ReadTraits(has_gradient=True, is_fed=True, is_owned=True),) * 2
    passes = [
        layer_traffic(operator, row, traits, types=uniform_types(operator, FLOAT32)).forward for operator in (FC, cut)
    ]
    assert passes[0].touched_bytes == passes[1].touched_bytes == 4 * (B * C + N * C + B * N)


def test_the_first_layer_needs_no_gradient_of_the_data() -> None:
    assert _traffic(FC, fed=False) == (2 * 2 * B * N * C, {})
    assert _traffic(FC, fed=False, n=4) == (2 * 2 * B * N * C / 4, {})


@pytest.mark.parametrize(
    ("split", "messages"),
    [
        ({"b": 4}, {"gradient of w": (4 * C * N, 4, 1)}),
        ({"n": 4}, {"gradient of x": (4 * B * C, 4, 1)}),
        ({"c": 4}, {"y": (4 * B * N, 4, 1)}),
        (
            {"b": 2, "n": 4, "c": 8},
            {
                "gradient of w": (4 * C // 8 * N // 4, 2, 1),
                "gradient of x": (4 * B // 2 * C // 8, 4, 1),
                "y": (4 * B // 2 * N // 4, 8, 1),
            },
        ),
    ],
)
def test_fully_connected(split: dict[str, int], messages: Found) -> None:
    assert _traffic(FC, **split) == (3 * 2 * B * N * C / prod(split.values()), messages)


def test_words_of_another_size() -> None:
    assert _traffic(FC, precision=PRECISIONS["bf16"], b=4)[1] == {"gradient of w": (2 * C * N, 4, 1)}


# -- convolution: y[b, n, h, w] = x[b, c, h + r, w + s] k[n, c, r, s]


def test_convolution() -> None:
    conv = conv2d("conv", (8, 4, 16, 16), out=6, kernel=3, padding=1, bias=False)
    flop = 3 * 2 * 8 * 6 * 16 * 16 * 4 * 9
    weight, x, y = 4 * 6 * 4 * 9, 4 * 8 * 4 * 16 * 16, 4 * 8 * 6 * 16 * 16
    assert _traffic(conv, b=8) == (flop / 8, {"gradient of w": (weight, 8, 1)})
    assert _traffic(conv, n=2) == (flop / 2, {"gradient of x": (x, 2, 1)})
    assert _traffic(conv, c=2) == (flop / 2, {"y": (y, 2, 1)})
    # Four bands of four rows: the inner ones lack a row above and one below, of 16 columns, 4 channels, 8 images.
    _, rows = _traffic(conv, h=4)
    assert rows == {"gradient of w": (weight, 4, 1), "x": (4 * 8 * 4 * 2 * 16, 2, 2)}
    # Quadrants of 8 x 8: a row, a column and the corner.
    _, quadrants = _traffic(conv, h=2, w=2)
    assert quadrants == {"gradient of w": (weight, 4, 1), "x": (4 * 8 * 4 * (9 * 9 - 8 * 8), 2, 2)}
    # Each row of the filter needs nearly all of x: x counts as replicated, y as summed.
    assert _traffic(conv, r=3) == (flop / 3, {"gradient of x": (x, 3, 1), "y": (y, 3, 1)})


def test_the_first_convolution_gets_its_halo_with_the_data() -> None:
    conv = conv2d("conv", (8, 4, 16, 16), out=6, kernel=3, padding=1, bias=False)
    assert _traffic(conv, fed=False, h=4)[1] == {"gradient of w": (4 * 6 * 4 * 9, 4, 1)}


def test_grouped_convolution_has_no_sums_over_groups() -> None:
    conv = conv2d("conv", (8, 8, 4, 4), out=16, kernel=1, groups=4, bias=False)
    flop = 3 * 2 * 8 * 16 * 16 * 2
    assert _traffic(conv, g=4) == (flop / 4, {})
    assert _traffic(conv, n=2) == (flop / 2, {"gradient of x": (4 * 8 * 8 * 16, 2, 1)})


def test_pooling() -> None:
    pool = pool2d("pool", (8, 4, 16, 16), kernel=2, stride=2)
    flop = 2 * 8 * 4 * 8 * 8 * 4
    assert _traffic(pool, b=2, c=2, h=2) == (flop / 8, {})
    overlapping = pool2d("pool", (8, 4, 17, 17), kernel=3, stride=2)
    # Outputs 0-3 need rows 0-8 and own 0-8; outputs 4-7 need rows 8-16 and own 9-16: one row of 17.
    assert _traffic(overlapping, h=2)[1] == {"x": (4 * 8 * 4 * 17, 2, 2)}
    assert _traffic(global_pool("pool", (8, 4, 16, 16)), h=4) == (2 * 8 * 4 * 256 / 4, {"y": (4 * 8 * 4, 4, 1)})


def test_a_concatenation_is_free() -> None:
    joined = concat("join", (8, 4, 2, 2), (8, 12, 2, 2))
    for split in ({"b": 4}, {"c": 4}, {"b": 2, "c": 2, "h": 2}):
        assert _traffic(joined, **split) == (0, {})


# -- language models


def test_embedding() -> None:
    table = embedding("embedding", (8, 4), vocabulary=64, size=16)
    # Look-ups forward, their adjoint backward; those of the vocabulary's parts are masked, not fewer.
    flop = 2 * 8 * 4 * 16
    assert _traffic(table, v=4) == (flop, {"y": (4 * 8 * 4 * 16, 4, 1)})
    assert _traffic(table, b=4) == (flop / 4, {"gradient of table": (4 * 64 * 16, 4, 1)})
    assert _traffic(table, d=4) == (flop / 4, {})
    assert _traffic(table, b=2, d=2, v=4)[1] == {
        "gradient of table": (4 * 16 * 8, 2, 1),
        "y": (4 * 4 * 4 * 8, 4, 1),
    }


def test_gather() -> None:
    """A target's column of each row: of a part of the classes, a device has it or adds nothing."""
    column = gather("column", (8, 4, 64), dims=("b", "s", "v"), along="v")
    flop = 2 * 8 * 4
    assert _traffic(column, b=4, s=2) == (flop / 8, {})
    assert _traffic(column, v=8) == (flop, {"y": (4 * 8 * 4, 8, 1)})
    assert _traffic(column, b=2, v=8) == (flop / 2, {"y": (4 * 4 * 4, 8, 1)})
    # Of several elements of each row, the tensor's gradient is summed where they are split.
    several = gather("several", (8, 64), dims=("b", "v"), along="v", count=6)
    assert _traffic(several, b=2) == (8 * 6, {})
    assert _traffic(several, k=2, b=2) == (8 * 6 / 2, {"gradient of x": (4 * 4 * 64, 2, 1)})


def test_softmax() -> None:
    softmax = softmax_loss("softmax", (8, 4, 64), dims=("b", "s", "v"))
    flop = 2 * 4 * 8 * 4 * 64
    assert _traffic(softmax, b=4, s=2) == (flop / 8, {})
    # Maximum, sum of exponentials and the label's logit of each of the 8 · 4 / 2 points.
    assert _traffic(softmax, b=2, v=8) == (flop / 16, {"extremes": (4 * 4 * 4, 8, 3)})


def test_batch_normalisation() -> None:
    norm = batch_norm("norm", (8, 4, 2, 2))
    sums = {"gradient of scale": (4 * 4, 8, 1), "gradient of shift": (4 * 4, 8, 1)}
    assert _traffic(norm, c=4)[1] == {}
    # The backward pass's two sums are the gradients of shift and scale: they are summed once.
    assert _traffic(norm, b=4, h=2)[1] == {"moments": (2 * 4 * 4, 8, 1), **sums}
    assert _traffic(norm, b=4, h=2)[0] == _traffic(norm)[0] / 8


def test_layer_normalisation() -> None:
    norm = layer_norm("norm", (8, 4, 16))
    assert _traffic(norm, d=4)[1] == {"moments": (2 * 4 * 8 * 4, 4, 2)}
    assert _traffic(norm, b=2, s=2)[1] == {"gradient of scale": (4 * 16, 4, 1), "gradient of shift": (4 * 16, 4, 1)}


def test_attention() -> None:
    b, s, t, h, k = 8, 16, 32, 4, 2
    heads = attention("attention", (b, s, h, k), (b, t, h, k), (b, t, h, k))
    products, exponentials = 3 * 2 * 2 * b * h * s * t * k, 2 * 5 * b * h * s * t
    assert _traffic(heads, b=2, h=2) == ((products + exponentials) / 4, {})
    # Parts of the keys: partial outputs, maximum, sum and, backward, one sum of each query; its gradient too.
    assert _traffic(heads, t=4) == (
        (products + exponentials) / 4,
        {
            "y": (4 * b * s * h * k, 4, 1),
            "gradient of q": (4 * b * s * h * k, 4, 1),
            "softmax": (4 * b * h * s, 4, 3),
        },
    )
    # Parts of the queries: each holds all keys and values, whose gradients are summed.
    keys = 4 * b * t * h * k
    assert _traffic(heads, s=4) == (
        (products + exponentials) / 4,
        {"gradient of k": (keys, 4, 1), "gradient of v": (keys, 4, 1)},
    )
    # Parts of a head: the scores are summed, forward and backward; every device has all exponentials.
    assert _traffic(heads, k=2) == (products / 2 + exponentials, {"scores": (4 * b * h * s * t, 2, 2)})


def test_messages_say_how_they_travel() -> None:
    conv = conv2d("conv", (8, 4, 16, 16), out=6, kernel=3, padding=1)
    row = np.array([[2, 1, 2, 1, 2, 1, 1]], dtype=np.int32)
    reads = tuple(ReadTraits(has_gradient=True, is_fed=i == 0, is_owned=True) for i in range(3))
    traffic = layer_traffic(conv, row, reads, types=uniform_types(conv, FLOAT32))
    patterns = {message.tensor: message.pattern for message in traffic.messages}
    assert patterns["x"] is Pattern.HALO
    assert {p for name, p in patterns.items() if name != "x"} == {Pattern.ALL_REDUCE}


@pytest.mark.parametrize("split", ["c", "r"])
def test_a_split_reduction_leaves_the_gradient_of_the_bias_alone(split: str) -> None:
    conv = conv2d("conv", (8, 4, 16, 16), out=6, kernel=2)
    assert "gradient of bias" not in _traffic(conv, **{split: 2})[1]
    assert _traffic(conv, b=2, **{split: 2})[1]["gradient of bias"] == (4 * 6, 2, 1)
    affine = dense("fc", (8, 4), out=(("n", 6),))
    assert "gradient of bias" not in _traffic(affine, c=2)[1]
    assert _traffic(affine, b=2, c=2)[1]["gradient of bias"] == (4 * 6, 2, 1)
