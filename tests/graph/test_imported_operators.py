"""Operators that imported models are made of: what they refuse, and accesses that verify."""

from collections.abc import Callable

import pytest

from pase.errors import GraphError
from pase.graph import Operator, verify_operator
from pase.graph.operators import (
    contract,
    opaque,
    padded,
    pointwise,
    recurrent,
    reduction,
    reorder,
    softmax,
    transposed_convolution,
)

MAKES: list[Callable[[], Operator]] = [
    lambda: contract("v", (2, 3), (3, 4), axes=(("b", "c"), ("c", "n")), out=("b", "n"), share=0.25),
    lambda: opaque("v", [(4, 3), (4,), (7,)], [(4, 5), (4,)], passes=((0, 0),), flop=8, product_flop=9, num_weights=1),
    lambda: opaque("v", [], [()]),
    lambda: reorder("v", (2, 3, 4), read=(2, 0), written=((0, 1), (2,), ())),
    lambda: padded("v", (2, 3), dims=("b", "c"), before=(0, 1), out=(2, 5)),
    lambda: pointwise("v", (2, 3), (3,), (), dims=("b", "c"), out=(2, 3), function="add", mixes=("c",)),
    lambda: reduction("v", (2, 3), dims=("b", "c"), over=("b",), function="sum"),
    lambda: softmax("v", (2, 3), dims=("b", "c"), over="c"),
    lambda: recurrent(
        "v",
        (7, 2, 3),
        weights=[(20, 3), (20, 5), (20,)],
        states=[(1, 2, 5)],
        outputs=[(7, 2, 5), (1, 2, 5), (2, 5)],
        units=5,
        gates=4,
        product_flop=1.0,
        is_batch_first=False,
    ),
    lambda: transposed_convolution("v", (2, 4, 5), out=6, kernel=3, stride=2, padding=1, groups=2),
]


@pytest.mark.parametrize("make", MAKES)
def test_their_accesses_fit_their_iteration_spaces(make: Callable[[], Operator]) -> None:
    verify_operator(make())


REFUSED: list[tuple[Callable[[], Operator], str]] = [
    (lambda: contract("v", (2, 3), (3,), axes=(("b",), ("c",)), out=("b",)), r"reads shape \(2, 3\) with dims b"),
    (
        lambda: contract("v", (2, 3), (4, 5), axes=(("b", "c"), ("c", "n")), out=("b",)),
        "dim c has extent 3 in one tensor, 4 in another",
    ),
    (lambda: contract("v", (2,), (3,), axes=(("b",), ("c",)), out=("n",)), "writes dims n; it reads b, c"),
    (lambda: opaque("v", [(2,)], []), "layer 'v' writes nothing"),
    (lambda: padded("v", (4,), dims=("b",), before=(1,), out=(4,)), "pads b = 4 with 1 before it to 4"),
    (lambda: pointwise("v", (4,), dims=("b",), out=(3,), function="add"), r"which cannot be broadcast to \(3,\)"),
    (lambda: reduction("v", (4,), dims=("b",), over=("c",), function="sum"), "reads shape .* of which c go"),
    (lambda: softmax("v", (4, 2), dims=("b",), over="b"), "reads shape .* with dims b"),
    (
        lambda: recurrent("v", (4, 2), weights=[], outputs=[(4, 2)], units=2, gates=1, product_flop=0),
        r"expected a sequence: \[batch, steps, width\]",
    ),
    (lambda: transposed_convolution("v", (2, 4, 5), out=3, kernel=3, groups=2), "divides 4 in- and 3 out"),
    (lambda: transposed_convolution("v", (2, 4), out=3, kernel=3), r"reads shape \(2, 4\); expected \[batch"),
    (lambda: transposed_convolution("v", (2, 4, 5), out=3, kernel=1, padding=3), r"of \(5,\) points give \(-1,\)"),
    (lambda: transposed_convolution("v", (2, 4, 5), out=3, kernel=3, positions=(7, 7)), r"give \(7, 7\)"),
    (lambda: transposed_convolution("v", (2, 4, 5), out=3, kernel=3, padding="same"), "'same' of a transposed"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_does_not_fit_is_refused(make: Callable[[], Operator], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()
