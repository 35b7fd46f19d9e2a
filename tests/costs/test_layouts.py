"""Shards and halos against index sets that are written out element by element."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.graph import Access, Dim, Operator, SliceOf, Window
from pase.sharding.boxes import even_bounds
from pase.sharding.halos import halo_fetch
from pase.sharding.shards import components, distinct_rows, part_labels, shard_size, split_columns, splits_of


def _operator(dims: dict[str, int], access: Access) -> Operator:
    return Operator(
        name="o", kind="test", dims=tuple(Dim(n, e) for n, e in dims.items()), reads=(access,), writes=(access,)
    )


def _parts(extent: int, ways: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(extent), ways)]


# -- balanced partitions


@given(st.integers(1, 60), st.integers(1, 12))
def test_even_bounds_are_those_of_array_split(extent: int, ways: int) -> None:
    bounds = even_bounds(extent, ways)
    assert [list(range(a, b)) for a, b in pairwise(bounds)] == _parts(extent, ways)


@given(st.data())
def test_part_labels_are_those_of_the_whole_dim(data: st.DataObject) -> None:
    whole = data.draw(st.integers(1, 24))
    offset = data.draw(st.integers(0, whole - 1))
    extent = data.draw(st.integers(1, whole - offset))
    ways = data.draw(st.integers(1, whole))
    axis = SliceOf(dim="c", offset=offset, extent=extent)
    (component,) = components(Access(tensor="x", shape=(extent,), index_map=(axis,)), {"c": whole})
    of = {position: number for number, part in enumerate(_parts(whole, ways)) for position in part}
    assert part_labels(component, ways).tolist() == [of[offset + i] for i in range(extent)]


# -- shards


@given(st.data())
def test_a_shard_is_the_largest_set_of_elements_that_any_part_indexes(data: st.DataObject) -> None:
    b, c, g = (data.draw(st.integers(1, 6)) for _ in range(3))
    offset = data.draw(st.integers(0, c - 1))
    piece = data.draw(st.integers(1, c - offset))
    dims = {"b": b, "c": c, "g": g, "n": 4}
    access = Access(
        tensor="x", shape=(2, b * g, piece), index_map=(None, ("b", "g"), SliceOf(dim="c", offset=offset, extent=piece))
    )
    split = {name: data.draw(st.integers(1, extent)) for name, extent in dims.items()}
    largest = 0
    for at in product(*(range(k) for k in split.values())):
        mine = {name: set(_parts(dims[name], split[name])[i]) for name, i in zip(dims, at, strict=True)}
        held = [
            (z, row, i)
            for z, row, i in product(range(2), range(b * g), range(piece))
            if row // g in mine["b"] and row % g in mine["g"] and offset + i in mine["c"]
        ]
        largest = max(largest, len(held))
    row = np.array([list(split.values())], dtype=np.int32)
    assert shard_size(access, splits_of(_operator(dims, access), row)).tolist() == [largest]


def test_a_scalar_is_whole_everywhere() -> None:
    operator = _operator({"b": 4}, Access(tensor="x", shape=(4,), index_map=("b",)))
    splits = splits_of(operator, np.array([[1], [4]], dtype=np.int32))
    assert shard_size(Access(tensor="x", shape=(), index_map=()), splits).tolist() == [1, 1]
    assert split_columns((), splits).shape == (2, 0)


@given(st.lists(st.lists(st.sampled_from((0, 1, 2, 3, 64, 2**31 - 1)), min_size=3, max_size=3), min_size=1))
def test_distinct_rows_are_those_of_unique(rows: list[list[int]]) -> None:
    array = np.array(rows, dtype=np.int32)  # the largest three together need more than 62 bits
    values, inverse = np.unique(array, axis=0, return_inverse=True)
    found, of = distinct_rows(array)
    assert np.array_equal(found, values)
    assert np.array_equal(of, inverse.reshape(-1))
    nothing, of_nothing = distinct_rows(array[:, :0])
    assert nothing.shape == (1, 0)
    assert of_nothing.tolist() == [0] * len(rows)


# -- halos


def _read(outputs: list[int], window: Window, kernel: list[int], extent: int) -> set[int]:
    """Positions that some outputs read through some points of the kernel, within the tensor."""
    touched = {o * window.stride + k * window.dilation - window.pad for o in outputs for k in kernel}
    return {position for position in touched if 0 <= position < extent}


@given(st.data())
def test_a_halo_is_what_the_worst_placed_device_needs_of_others(data: st.DataObject) -> None:
    kernels, windows, outputs, inputs, ways, kernel_ways = [], [], [], [], [], []
    for out, kernel in (("h", "r"), ("w", "s")):
        k, stride, dilation = (data.draw(st.integers(1, 4)) for _ in range(3))
        pad = data.draw(st.integers(0, 3))
        o = data.draw(st.integers(1, 9))
        last = (o - 1) * stride - pad + dilation * (k - 1)
        extent = data.draw(st.integers(max(1, (o - 1) * stride - pad + 1, last - 3), max(1, last) + 4))
        kernels.append(k)
        outputs.append(o)
        inputs.append(extent)
        windows.append(Window(out=out, kernel=kernel, stride=stride, dilation=dilation, pad=pad))
        ways.append(data.draw(st.integers(1, o)))
        kernel_ways.append(data.draw(st.integers(1, k)))
    channels, channel_ways = 6, data.draw(st.sampled_from((1, 2, 3)))
    access = Access(tensor="x", shape=(channels, *inputs), index_map=("c", *windows))
    dims = {"c": channels, "h": outputs[0], "w": outputs[1], "r": kernels[0], "s": kernels[1]}
    worst = 0, 0
    owners = {
        point: part
        for part in product(range(ways[0]), range(ways[1]))
        for point in product(*(_parts(n, k)[i] for n, k, i in zip(inputs, ways, part, strict=True)))
    }
    for i, j, r, s in product(*(range(k) for k in (*ways, *kernel_ways))):
        needed, owned = [], []
        for axis, part, piece in ((0, i, r), (1, j, s)):
            mine = _parts(outputs[axis], ways[axis])[part]
            points = _parts(kernels[axis], kernel_ways[axis])[piece]
            needed.append(_read(mine, windows[axis], points, inputs[axis]))
            owned.append(set(_parts(inputs[axis], ways[axis])[part]))
        fetched = set(product(*needed)) - set(product(*owned))
        worst = max(worst, (len(fetched), len({owners[point] for point in fetched})))
    row = np.array([[channel_ways, *ways, *kernel_ways]], dtype=np.int32)
    elements, others = halo_fetch(access, splits_of(_operator(dims, access), row))
    assert elements.tolist() == [worst[0] * channels // channel_ways]
    assert others.tolist() == [worst[1]]


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "extent", "out", "ways", "halo", "messages"),
    [
        (3, 1, 1, 8, 8, 2, 1, 1),  # one row of the neighbour
        (3, 1, 1, 8, 8, 4, 2, 2),  # one on either side
        (5, 1, 2, 8, 8, 4, 4, 2),  # the whole neighbour on either side
        (2, 2, 0, 8, 4, 4, 0, 0),  # windows that do not overlap
        (3, 2, 1, 8, 4, 2, 1, 1),
        (3, 1, 0, 8, 6, 4, 2, 1),  # without padding: two rows of one neighbour, for outputs 0, 1
        (5, 1, 2, 4, 4, 4, 3, 3),  # beyond the neighbour
    ],
)
def test_halos_by_hand(
    kernel: int, stride: int, pad: int, extent: int, out: int, ways: int, halo: int, messages: int
) -> None:
    access = Access(tensor="x", shape=(extent,), index_map=(Window(out="h", kernel="r", stride=stride, pad=pad),))
    operator = _operator({"h": out, "r": kernel}, access)
    found = halo_fetch(access, splits_of(operator, np.array([[ways, 1]], dtype=np.int32)))
    assert [figure.tolist() for figure in found] == [[halo], [messages]]
