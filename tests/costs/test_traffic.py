"""Work and messages of layers that test_by_element.py has not, against closed forms worked out by hand."""

from dataclasses import replace

import numpy as np

from pase.costs import Pattern, ReadTraits, layer_traffic
from pase.graph import PRECISIONS, Operator, Precision, SliceOf
from pase.graph.operators import attention, batch_norm, concat, conv2d, dense, gather, global_pool
from pase.graph.precision import FLOAT32, uniform_types
from tests.networks import row_of

Found = dict[str, tuple[float, int, int]]


def _traffic(
    operator: Operator, *, fed: bool = True, precision: Precision = FLOAT32, **split: int
) -> tuple[float, Found]:
    """Return (FLOP, {tensor: (bytes, group, times)}) under one configuration; dims that are not named are whole."""
    row = row_of(operator, split)
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


def test_words_of_another_size() -> None:
    assert _traffic(FC, precision=PRECISIONS["bf16"], b=4)[1] == {"gradient of w": (2 * C * N, 4, 1)}


def test_a_mean_over_positions_is_summed_where_these_are_split() -> None:
    assert _traffic(global_pool("pool", (8, 4, 16, 16)), h=4) == (2 * 8 * 4 * 256 / 4, {"y": (4 * 8 * 4, 4, 1)})


def test_a_concatenation_is_free() -> None:
    joined = concat("join", (8, 4, 2, 2), (8, 12, 2, 2))
    for split in ({"b": 4}, {"c": 4}, {"b": 2, "c": 2, "h": 2}):
        assert _traffic(joined, **split) == (0, {})


# -- language models


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


def test_batch_normalisation() -> None:
    norm = batch_norm("norm", (8, 4, 2, 2))
    sums = {"gradient of scale": (4 * 4, 8, 1), "gradient of shift": (4 * 4, 8, 1)}
    assert _traffic(norm, c=4)[1] == {}
    # The backward pass's two sums are the gradients of shift and scale: they are summed once.
    assert _traffic(norm, b=4, h=2)[1] == {"moments": (2 * 4 * 4, 8, 1), **sums}
    assert _traffic(norm, b=4, h=2)[0] == _traffic(norm)[0] / 8


def test_attention() -> None:
    b, s, t, h, k = 8, 16, 32, 4, 2
    heads = attention("attention", (b, s, h, k), (b, t, h, k), (b, t, h, k))
    products, exponentials = 3 * 2 * 2 * b * h * s * t * k, 2 * 5 * b * h * s * t
    assert _traffic(heads, b=2, h=2) == ((products + exponentials) / 4, {})
    # Parts of the keys: partial outputs, maximum, sum and, backward, one sum of each query; its gradient too.
    assert _traffic(heads, t=4) == (
        (products + exponentials) / 4,
        {"y": (4 * b * s * h * k, 4, 1), "gradient of q": (4 * b * s * h * k, 4, 1), "softmax": (4 * b * h * s, 4, 3)},
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
