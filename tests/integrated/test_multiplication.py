"""Eqs. 3, 4 and 8 beside the 1.5D algorithm itself, carried out on small matrices: every word is counted."""

from itertools import pairwise

import numpy as np
import pytest

from pase import Builder
from pase.graph.operators import dense
from pase.studies.integrated.chain import Chain, Options, chain_of
from pase.studies.integrated.equations import Grid, Network, model_and_batch, pure_batch, pure_model
from tests.integrated.processes import Counter, bruck_all_gather, train_step

WIDTHS = (24, 48, 24, 72)  # each a multiple of every number of rows, of columns and of chunks
BATCH = 24
WORDS = Network(latency_s=0.0, s_per_byte=1.0)
"""A network on which a byte takes a second and a message nothing."""
COUNTED = Options(itemsize=1)


def _weights() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(-3, 4, (after, before)).astype(float) for before, after in pairwise(WIDTHS)]


@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (6, 1), (2, 3), (3, 2), (4, 2), (2, 4), (3, 4)])
def test_equation_8_is_what_each_process_receives(grid: tuple[int, int]) -> None:
    weights = _weights()
    rng = np.random.default_rng(8)
    data, last = (rng.integers(-3, 4, (width, BATCH)).astype(float) for width in (WIDTHS[0], WIDTHS[-1]))
    step = train_step(weights, data, last, *grid)

    # The algorithm does what one process would.
    inputs = [data]
    for w, y in zip(weights, step.outputs, strict=True):
        inputs.append(w @ inputs[-1])
        np.testing.assert_array_equal(y, inputs[-1])
    gradient = last
    for number in reversed(range(len(weights))):
        np.testing.assert_array_equal(step.weight_gradients[number], gradient @ inputs[number].T)
        gradient = weights[number].T @ gradient
        found = step.input_gradients[number]
        assert (found is None) == (number == 0)
        if found is not None:
            np.testing.assert_array_equal(found, gradient)

    chain = _chain()
    terms = model_and_batch(chain, BATCH, Grid(*grid), WORDS, COUNTED)
    for term, counter in (
        (terms.activation_all_gather, step.gathered),
        (terms.input_gradient_all_reduce, step.reduced_inputs),
        (terms.weight_gradient_all_reduce, step.reduced_weights),
    ):
        received = [counter.words.get((i, j), 0) for i in range(grid[0]) for j in range(grid[1])]
        assert received == pytest.approx([term] * len(received))
    if grid[0] == 1:
        assert pure_batch(chain, grid[1], WORDS, COUNTED) == terms
    if grid[1] == 1:
        assert pure_model(chain, BATCH, grid[0], WORDS, COUNTED) == terms


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12, 16])
def test_a_gather_takes_as_many_rounds_as_the_latency_term_says(count: int) -> None:
    group = [(i, 0) for i in range(count)]
    counter = Counter()
    held = {process: np.array([[i]]) for i, process in enumerate(group)}
    whole = bruck_all_gather(group, held, counter)
    assert all([block[0, 0] for block in blocks] == list(range(count)) for blocks in whole.values())
    latency = Network(latency_s=1.0, s_per_byte=0.0)
    chain = _chain()
    terms = pure_model(chain, BATCH, count, latency, Options())
    assert terms.activation_all_gather == counter.rounds * len(chain.layers)
    # As printed, twice as many for each all-reduce, of every layer but the first.
    assert terms.input_gradient_all_reduce == 2 * counter.rounds * (len(chain.layers) - 1)


def _chain() -> Chain:
    net = Builder("products")
    x = net.input((BATCH, WIDTHS[0]))
    for number, width in enumerate(WIDTHS[1:], 1):
        x = net.add(dense, f"fc{number}", x, out=(("n", width),))
    return chain_of(net.build())
