"""Halo geometry: the paper's worked examples, and every position of small tensors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PrimitiveError
from pase.graph import Access, Dim, Operator, Window
from pase.sharding.boxes import Range
from pase.sharding.halos import Kernel, Region, halo_fetch, regions
from pase.sharding.shards import splits_of

# ------------------------------------------------------------------------------------------- the paper's appendix B.1


def ranges(found: tuple[Region, ...]) -> list[tuple[Range, Range, Range]]:
    """What each worker computes, owns and needs."""
    return [(r.output, r.owned, r.needed) for r in found]


def halos(found: tuple[Region, ...]) -> list[tuple[int, int]]:
    return [(r.halo_left, r.halo_right) for r in found]


def unused(found: tuple[Region, ...]) -> list[tuple[int, int]]:
    return [(r.unused_left, r.unused_right) for r in found]


FIGURES = {
    "B2": (
        (11, Kernel(extent=5, padding=(2, 2)), 3),
        [((0, 4), (0, 4), (0, 6)), ((4, 8), (4, 8), (2, 10)), ((8, 11), (8, 11), (6, 11))],
        [(0, 2), (2, 2), (2, 0)],
        [(0, 0)] * 3,
    ),
    # The figure numbers outputs by the middle of their window: 2 3 4, 5 6, 7 8. "the first and last workers have large,
    # one-sided halos and the middle worker has small, balanced halos"
    "B3": (
        (11, Kernel(extent=5), 3),
        [((0, 3), (0, 4), (0, 7)), ((3, 5), (4, 8), (3, 9)), ((5, 7), (8, 11), (5, 11))],
        [(0, 3), (1, 1), (3, 0)],
        [(0, 0)] * 3,
    ),
    # The text says n = 11, but what the figure shows and the text describes is n = 10. "For the first worker, there is
    # no halo. For the second worker, only the right-side has a halo, with size 1. The last worker does not have any
    # halo, but … the first entry of the input tensor actually has to be removed".
    "B4": (
        (10, Kernel(extent=2, stride=2), 3),
        [((0, 2), (0, 4), (0, 4)), ((2, 4), (4, 7), (4, 8)), ((4, 5), (7, 10), (8, 10))],
        [(0, 0), (0, 1), (0, 0)],
        [(0, 0), (0, 0), (1, 0)],
    ),
    "B5": (
        (20, Kernel(extent=2, stride=2), 6),
        [
            *(((0, 2), (0, 4), (0, 4)), ((2, 4), (4, 8), (4, 8)), ((4, 6), (8, 11), (8, 12))),
            *(((6, 8), (11, 14), (12, 16)), ((8, 9), (14, 17), (16, 18)), ((9, 10), (17, 20), (18, 20))),
        ],
        [(0, 0), (0, 0), (0, 1), (0, 2), (0, 1), (0, 0)],
        [(0, 0), (0, 0), (0, 0), (1, 0), (2, 0), (1, 0)],
    ),
}
"""What slides over what on how many workers: what each computes, owns and needs, its halos, what it does not use."""


@pytest.mark.parametrize("figure", FIGURES)
def test_figures(figure: str) -> None:
    given_, expected, expected_halos, expected_unused = FIGURES[figure]
    found = regions(*given_)
    assert ranges(found) == expected
    assert halos(found) == expected_halos
    assert unused(found) == expected_unused


# ----------------------------------------------------------------------------------------------------- every position


def dealt(extent: int, num_workers: int) -> list[list[int]]:
    """The positions of each worker, one after the other: as many rounds as each has."""
    counts = [0] * num_workers
    for position in range(extent):
        counts[position % num_workers] += 1
    positions = iter(range(extent))
    return [[next(positions) for _ in range(count)] for count in counts]


kernels = st.builds(
    Kernel,
    extent=st.integers(1, 6),
    stride=st.integers(1, 7),
    dilation=st.integers(1, 3),
    padding=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)


@settings(max_examples=250)
@given(st.integers(1, 40), kernels, st.integers(1, 12))
def test_every_position(extent: int, kernel: Kernel, num_workers: int) -> None:
    before, after = kernel.padding
    outputs = []
    first = -before
    while first + (kernel.extent - 1) * kernel.dilation < extent + after:
        outputs.append(range(first, first + (kernel.extent - 1) * kernel.dilation + 1, kernel.dilation))
        first += kernel.stride
    if not outputs:
        with pytest.raises(PrimitiveError, match="does not fit an extent of"):
            regions(extent, kernel, num_workers)
        return
    assert kernel.num_outputs(extent) == len(outputs)
    found = regions(extent, kernel, num_workers)
    assert len(found) == num_workers
    for region, own_outputs, owned in zip(
        found, dealt(len(outputs), num_workers), dealt(extent, num_workers), strict=True
    ):
        assert list(range(*region.output)) == own_outputs
        assert list(range(*region.owned)) == owned
        read = [position for o in own_outputs for position in outputs[o]]
        under = set(range(min(read), max(read) + 1)) if read else set()
        needed = {position for position in under if 0 <= position < extent}
        assert set(range(*region.needed)) == needed
        assert (region.padding_left, region.padding_right) == (
            sum(position < 0 for position in under),
            sum(position >= extent for position in under),
        )
        assert len(range(*region.window)) == len(under)
        if needed:
            assert set(range(*region.window)) == under
        # Halo and unused: each position once, on the side where it lies.
        assert region.halo_left + region.halo_right == len(needed - set(owned))
        assert region.unused_left + region.unused_right == len(set(owned) - needed)
        if owned:
            assert region.halo_left == sum(position < owned[0] for position in needed)
        if needed:
            assert region.unused_left == sum(position < min(needed) for position in owned)
        held = [position for segment in region.segments for position in range(*segment)]
        assert held == sorted(set(owned) | needed)
        assert len(held) == region.buffer_extent
        kept = held[region.unused_left : len(held) - region.unused_right]
        assert set(kept) == needed


@settings(max_examples=100)
@given(st.integers(1, 40), kernels, st.integers(1, 8))
def test_the_cost_model_fetches_what_the_worst_placed_worker_reads(
    extent: int, kernel: Kernel, num_workers: int
) -> None:
    """What the search predicts is counted point by point: of a halo, what a dilation or a stride skips is not read."""
    num_outputs = kernel.num_outputs(extent)
    if kernel.reach > extent + sum(kernel.padding) or num_workers > num_outputs:
        return
    window = Window(out="h", kernel="r", stride=kernel.stride, dilation=kernel.dilation, pad=kernel.padding[0])
    access = Access(tensor="x", shape=(extent,), index_map=(window,))
    operator = Operator(
        name="pool",
        kind="pool",
        dims=(Dim("h", num_outputs), Dim("r", kernel.extent)),
        reads=(access,),
        writes=(Access(tensor="y", shape=(num_outputs,), index_map=("h",)),),
    )
    splits = splits_of(operator, np.array([[num_workers, 1]], dtype=np.int32))
    parts = zip(
        np.array_split(range(num_outputs), num_workers), np.array_split(range(extent), num_workers), strict=True
    )
    lacking = [
        {
            point
            for output in outputs.tolist()
            for step in range(kernel.extent)
            if 0 <= (point := output * kernel.stride + step * kernel.dilation - kernel.padding[0]) < extent
        }
        - set(owned.tolist())
        for outputs, owned in parts
    ]
    assert halo_fetch(access, splits)[0].tolist() == [max(map(len, lacking))]
    # Programs get the whole stretch from the first such point to the last.
    assert max(map(len, lacking)) <= max(sum(halo) for halo in halos(regions(extent, kernel, num_workers)))


@pytest.mark.parametrize(
    ("extent", "kernel", "num_workers", "message"),
    [
        (0, Kernel(extent=1), 1, "an extent of 0 is not possible; expected 1 or more"),
        (5, Kernel(extent=0), 1, "a kernel of 0 is not possible"),
        (5, Kernel(extent=1, stride=0), 1, "a stride of 0 is not possible"),
        (5, Kernel(extent=1, dilation=0), 1, "a dilation of 0 is not possible"),
        (5, Kernel(extent=1, padding=(0, -1)), 1, "a padding of -1 is not possible; expected 0 or more"),
        (5, Kernel(extent=1), 0, "0 workers were asked for; expected 1 to"),
        (5, Kernel(extent=1), 10**7, "10000000 workers were asked for; expected 1 to 1048576"),
        (10**13, Kernel(extent=1), 2, "10000000000000 points are too many; expected at most"),
        (4, Kernel(extent=3, dilation=3, padding=(1, 1)), 2, r"over 7 points .* extent of 4 with padding, 6 points"),
    ],
)
def test_what_is_impossible_is_refused(extent: int, kernel: Kernel, num_workers: int, message: str) -> None:
    with pytest.raises(PrimitiveError, match=message):
        regions(extent, kernel, num_workers)
