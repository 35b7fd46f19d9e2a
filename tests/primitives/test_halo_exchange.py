"""The halo exchange on tensors of any rank: buffers by position, its adjoint, and convolutions built on it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pase.errors import PrimitiveError
from pase.sharding.boxes import blocks
from pase.sharding.halos import Buffers, Kernel, halo_buffers
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.data_movement import all_to_all, allocate, halo_exchange, windows
from tests.primitives.lab import (
    NUM_DEVICES,
    TOLERANCE,
    Array,
    Lab,
    assert_coherent,
    dtypes,
    outcome,
    worker_sets,
)


@st.composite
def exchanges(draw: st.DrawFn) -> Buffers:
    """Kernels of any kind over 1 to 3 dims, on any grid of workers; also more workers than points."""
    shape, kernels, counts = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        extent = draw(st.integers(1, 9))
        kernel = draw(
            st.builds(
                Kernel,
                extent=st.integers(1, 5),
                stride=st.integers(1, 4),
                dilation=st.integers(1, 2),
                padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
            )
        )
        assume(kernel.reach <= extent + sum(kernel.padding))
        shape.append(extent)
        kernels.append(kernel)
        counts.append(draw(st.integers(1, min(5, NUM_DEVICES // int(np.prod(counts, initial=1))))))
    return halo_buffers(shape, kernels, counts)


def positions(buffers: Buffers) -> list[list[list[int]]]:
    """[workers][rank] the positions that a buffer holds, in order: those owned or needed."""
    return [
        [sorted({*range(*region.owned), *range(*region.needed)}) for region in worker] for worker in buffers.workers
    ]


def owned(buffers: Buffers) -> list[Array]:
    """[workers] which entries of a buffer are its bulk."""
    result = []
    for worker, held in zip(buffers.workers, positions(buffers), strict=True):
        is_own = np.ones((), bool)
        for region, each in zip(worker, held, strict=True):
            is_own = np.logical_and.outer(is_own, [i in range(*region.owned) for i in each])
        result.append(is_own.astype(bool))
    return result


@settings(max_examples=15)
@given(st.data(), exchanges(), dtypes)
def test_halo_exchange_in_place(data: st.DataObject, buffers: Buffers, dtype: Any) -> None:
    devices = data.draw(worker_sets(len(buffers.workers)))
    result = outcome(buffers, devices, lambda _, x: halo_exchange(x), dtype=dtype)
    held, is_own = positions(buffers), owned(buffers)
    tensor = np.zeros(buffers.shape, dtype)
    gradient = np.zeros(buffers.shape, dtype)
    for at, own, x, y in zip(held, is_own, result.x, result.y, strict=True):
        # The bulks make up the tensor; what stood in the halos does not matter.
        np.add.at(tensor, np.ix_(*at), np.where(own, x, 0))
        np.add.at(gradient, np.ix_(*at), y)
    for at, own, found, back in zip(held, is_own, result.forward, result.adjoint, strict=True):
        np.testing.assert_array_equal(found, tensor[np.ix_(*at)], strict=True)
        # The sum of everything that is a copy of it; nothing is left in the halos.
        expected = np.where(own, gradient[np.ix_(*at)], 0)
        np.testing.assert_allclose(back, expected, rtol=0, atol=30 * TOLERANCE[dtype], strict=True)
    assert_coherent(result, dtype)
    assert result.operations == ["halo_exchange", "halo_adjoint"]
    assert result.moved_bytes == 2 * sum(int((~own).sum()) for own in is_own) * np.dtype(dtype).itemsize


def test_a_maximum_over_padding() -> None:
    """Padding of another value than zero, for max-pooling; it has no gradient."""
    kernel = Kernel(extent=3, stride=2, padding=(1, 1))
    buffers = halo_buffers([11], [kernel], [4])
    result = outcome(
        buffers.bulk,
        range(4),
        lambda _, x: windows(halo_exchange(allocate(x, buffers)), fill=-np.inf),
        x=[-np.ones(shape) for shape in buffers.bulk.extents],
    )
    assert result.forward[0].tolist() == [-np.inf, -1, -1, -1, -1]
    assert result.forward[3].tolist() == [-1, -1, -np.inf]
    sums = np.zeros(13)
    for (box,), y in zip(buffers.windows.boxes, result.y, strict=True):
        sums[box[0] + 1 : box[1] + 1] += y
    np.testing.assert_allclose(np.concatenate(result.adjoint), sums[1:-1], rtol=1e-14)


def test_what_does_not_fit_is_refused() -> None:
    buffers = halo_buffers([11], [Kernel(extent=5)], [3])
    with tf.Graph().as_default():
        lab = Lab()
        mesh = lab.workers([0, 1, 2])
        other = blocks([12], [3])
        x = lab.put(mesh, other, [np.zeros(4)] * 3)
        with pytest.raises(PrimitiveError, match=r"allocate: workers hold .* the bulks of the buffers are"):
            allocate(x, buffers)
        with pytest.raises(PrimitiveError, match=r"halo_exchange: the workers hold no buffers with halos"):
            halo_exchange(x)
        held = allocate(lab.put(mesh, buffers.bulk, [np.zeros(shape) for shape in buffers.bulk.extents]), buffers)
        with pytest.raises(PrimitiveError, match=r"all_to_all: the workers hold buffers with halos"):
            all_to_all(held, mesh, other)
    with pytest.raises(PrimitiveError, match=r"1 kernels for a tensor of shape \[4, 4\]; give one for each dim"):
        halo_buffers([4, 4], [Kernel(extent=1)], [1, 2])
