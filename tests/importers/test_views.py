"""The algebra of views beside NumPy: chains of reshapes, transposes, broadcasts and slices, drawn at random."""

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.importers.ir.trace import Piece, Use
from pase.importers.ir.views import View
from pase.importers.passes.views import composed
from tests.importers.traces import Array, read, seen

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4).map(tuple)


def _factorised(draw: st.DrawFn, size: int) -> list[int]:
    """A shape of so many elements."""
    shape: list[int] = []
    while size > 1:
        divisor = draw(st.sampled_from([*[d for d in range(2, size + 1) if size % d == 0][:6], size]))
        shape.append(divisor)
        size //= divisor
    for _ in range(draw(st.integers(0, 1))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape


def _step(draw: st.DrawFn, view: View, array: Array, *, broadcasts: bool = True) -> tuple[View, Array]:
    """One more step of a chain, as a view and by NumPy; none where the view says that it cannot tell."""
    match draw(st.integers(0, 2 if broadcasts else 1)):
        case 0:
            order = draw(st.permutations(range(array.ndim)))
            return view.transposed(order), array.transpose(order)
        case 1:
            shape = _factorised(draw, array.size)
            found = view.reshaped(shape)
            return (view, array) if found is None else (found, array.reshape(shape))
        case _:
            if array.size > 200:
                return view, array
            lead = draw(st.sampled_from([[], [2], [3, 1]]))
            shape = [*lead, *(extent if extent > 1 else draw(st.sampled_from([1, 2, 3])) for extent in array.shape)]
            return view.broadcast(shape), np.broadcast_to(array, shape)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Array, View, Array]:
    shape = draw(SHAPES)
    base = np.arange(prod(shape)).reshape(shape)
    view, array = View.plain(shape), base
    for _ in range(draw(st.integers(1, 4))):
        view, array = _step(draw, view, array)
    return base, view, array


@given(chains())
@settings(max_examples=120)
def test_a_chain_is_what_numpy_makes_of_it(chain: tuple[Array, View, Array]) -> None:
    base, view, array = chain
    assert view.shape == array.shape
    assert np.array_equal(seen(view, base), array)
    if view.is_reshape:
        assert np.array_equal(array.ravel(), base.ravel())
    assert view.is_plain == (array.shape == base.shape and np.array_equal(array, base))


@given(st.data())
@settings(max_examples=120)
def test_a_view_of_a_view_is_both_one_after_the_other(data: st.DataObject) -> None:
    base, inner, array = data.draw(chains())
    outer, after = data.draw(st.composite(lambda draw: _step(draw, View.plain(array.shape), array))())
    found = outer.of(inner)
    if found is not None:
        assert np.array_equal(seen(found, base), after)


def test_most_views_of_views_can_be_told() -> None:
    """A view that cannot be told is an operator: where all could be, that would be work for nothing."""
    heads = View.plain((2, 6, 12)).reshaped((2, 6, 3, 4))
    assert heads is not None
    merged = heads.transposed((0, 2, 1, 3)).reshaped((6, 6, 4))
    assert merged is not None
    back = View.plain((6, 6, 4)).reshaped((2, 3, 6, 4))
    assert back is not None
    assert back.of(merged) == heads.transposed((0, 2, 1, 3))
    assert View.plain((6,)).reshaped((2, 3)) is not None
    assert View.plain((4, 3)).reshaped((6, 2)) is None


@given(st.data())
@settings(max_examples=120)
def test_a_slice_of_a_view_is_that_piece_of_its_base(data: st.DataObject) -> None:
    base, view, array = data.draw(chains().filter(lambda chain: chain[2].ndim > 0))
    dim = data.draw(st.integers(0, array.ndim - 1))
    start = data.draw(st.integers(0, array.shape[dim] - 1))
    size = data.draw(st.integers(1, array.shape[dim] - start))
    found = view.sliced(dim, start, size)
    if found is None:
        return
    (at, first, count), rest = found
    piece = base[(slice(None),) * at + (slice(first, first + count),)]
    expected = array[(slice(None),) * dim + (slice(start, start + size),)]
    assert np.array_equal(seen(rest, piece), expected)


def test_a_head_is_a_piece_of_the_projection() -> None:
    heads = View.plain((2, 5, 12)).reshaped((2, 5, 3, 4))
    assert heads is not None
    found = heads.sliced(2, 1, 1)
    assert found is not None
    assert found[0] == (2, 4, 4)
    assert found[1].shape == (2, 5, 1, 4)
    # Half of each head is scattered over the projection.
    assert heads.sliced(3, 0, 2) is None


@given(st.data())
@settings(max_examples=120)
def test_uses_put_together_read_what_both_read(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    base = np.arange(prod(shape)).reshape(shape)
    uses: list[Use] = []
    array = base
    for _ in range(2):
        piece = None
        if array.ndim and data.draw(st.booleans()):
            dim = data.draw(st.integers(0, array.ndim - 1))
            start = data.draw(st.integers(0, array.shape[dim] - 1))
            piece = Piece(dim=dim, start=start, size=data.draw(st.integers(1, array.shape[dim] - start)))
            array = array[(slice(None),) * dim + (slice(start, start + piece.size),)]
        view = View.plain(array.shape)
        for _ in range(data.draw(st.integers(0, 2))):
            view, array = data.draw(st.composite(lambda draw, v=view, a=array: _step(draw, v, a))())
        uses.append(Use(value="x", piece=piece, view=None if view.is_plain else view))
    inner, outer = uses
    found = composed(outer, inner, shape)
    if found is not None:
        assert np.array_equal(read(found, {"x": base}), array)
