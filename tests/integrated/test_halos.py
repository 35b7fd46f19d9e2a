"""Eq. 7's halos beside rows that are really fetched, found by marking what every output row reads."""

import numpy as np
import pytest

from pase import Builder
from pase.graph.operators import conv1d, conv2d, conv3d
from pase.studies.integrated.chain import Options, chain_of
from pase.studies.integrated.equations import Grid, Network, Role, integrated, pure_domain

WORDS = Network(latency_s=0.0, s_per_byte=1.0)
COUNTED = Options(itemsize=1)


def _fetched(extent: int, kernel: int, workers: int) -> set[int]:
    """Rows that workers with a neighbour on both sides need from one of them; stride 1, "same" padding."""
    owner = np.arange(extent) // (extent // workers)
    counts = set()
    for worker in range(1, workers - 1):
        rows = {o + k - kernel // 2 for o in np.flatnonzero(owner == worker) for k in range(kernel)}
        inside = [int(owner[r]) for r in rows if 0 <= r < extent]
        counts |= {inside.count(side) for side in (worker - 1, worker + 1)}
    return counts


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("workers", [3, 4])
def test_a_halo_is_what_a_process_fetches_of_a_neighbour(kernel: int, workers: int) -> None:
    net = Builder("convolution")
    net.add(conv2d, "conv", net.input((6, 5, 24, 10)), out=7, kernel=kernel, padding="same")
    chain = chain_of(net.build())
    (rows,) = _fetched(24, kernel, workers)
    grid = Grid(workers, 2)
    terms = integrated(chain, {"conv": Role.DOMAIN}, 6, grid, WORDS, COUNTED)
    assert terms.halo_forward == rows * 10 * 5 * (6 / 2)
    assert terms.halo_backward == rows * 10 * 7 * (6 / 2)
    whole = pure_domain(chain, 6, workers, WORDS, COUNTED)
    assert (whole.halo_forward, whole.halo_backward) == (rows * 10 * 5 * 6, rows * 10 * 7 * 6)


def test_a_pointwise_convolution_sends_no_message() -> None:
    net = Builder("pointwise")
    net.add(conv2d, "conv", net.input((4, 8, 8, 8)), out=8, kernel=1)
    chain = chain_of(net.build())
    slow = Network(latency_s=1.0, s_per_byte=1.0)
    roles = {"conv": Role.DOMAIN}
    none = integrated(chain, roles, 4, Grid(2, 2), slow, Options())
    assert (none.halo_forward, none.halo_backward) == (0, 0)
    printed = integrated(chain, roles, 4, Grid(2, 2), slow, Options(pointwise_halo=True))
    assert (printed.halo_forward, printed.halo_backward) == (1, 1)


def test_lines_and_volumes_are_split_along_their_first_dim() -> None:
    net = Builder("line")
    net.add(conv1d, "conv", net.input((2, 3, 16)), out=5, kernel=5, padding="same")
    (line,) = chain_of(net.build()).layers
    assert (line.input_row_words, line.output_row_words, line.num_rows, line.kernel) == (3, 5, 16, (5,))
    net = Builder("volume")
    net.add(conv3d, "conv", net.input((2, 3, 8, 6, 4)), out=5, kernel=(3, 1, 1), padding=(1, 0, 0))
    (volume,) = chain_of(net.build()).layers
    assert (volume.input_row_words, volume.output_row_words, volume.num_rows) == (3 * 6 * 4, 5 * 6 * 4, 8)


def test_halos_stay_on_one_row_unless_told_otherwise() -> None:
    net = Builder("convolution")
    net.add(conv2d, "conv", net.input((4, 2, 8, 8)), out=2, kernel=3, padding=1)
    chain = chain_of(net.build())
    terms = integrated(chain, {"conv": Role.DOMAIN}, 4, Grid(1, 4), WORDS, COUNTED)
    assert terms.halo_forward == 1 * 8 * 2
    without = integrated(chain, {"conv": Role.DOMAIN}, 4, Grid(1, 4), WORDS, Options(itemsize=1, halo_at_one=False))
    assert (without.halo_forward, without.halo_backward) == (0, 0)
    assert without.weight_gradient_all_reduce == terms.weight_gradient_all_reduce
