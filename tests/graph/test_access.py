from hypothesis import given
from hypothesis import strategies as st

from pase.graph import Access, Role, SliceOf, Window
from pase.graph.operator import access_dims, axis_dims, named_dims

NAMES = st.sampled_from(["b", "c", "h", "w", "n", "r", "s"])


def test_size_is_the_product_of_the_shape() -> None:
    assert Access(tensor="x", shape=(2, 3, 5), index_map=("b", "c", "h")).size == 30
    assert Access(tensor="x", shape=(), index_map=()).size == 1


def test_only_an_index_has_no_gradient() -> None:
    roles = {role: Access(tensor="x", shape=(2,), index_map=("b",), role=role).is_differentiable for role in Role}
    assert roles == {Role.ACTIVATION: True, Role.PARAMETER: True, Role.INDEX: False}


def test_each_kind_of_axis_is_split_by_its_own_dims() -> None:
    assert axis_dims(None) == ()
    assert axis_dims("b") == ("b",)
    assert axis_dims(("g", "n")) == ("g", "n")
    assert axis_dims(Window(out="h", kernel="r", stride=2)) == ("h",)
    assert axis_dims(SliceOf(dim="c", offset=3, extent=2)) == ("c",)


def test_a_window_names_its_kernel_but_is_not_split_by_it() -> None:
    access = Access(tensor="x", shape=(8, 3, 9), index_map=("b", "c", Window(out="h", kernel="r")))
    assert access_dims(access) == {"b", "c", "h"}
    assert named_dims(access) == {"b", "c", "h", "r"}


@given(axes=st.lists(st.one_of(st.none(), NAMES, st.tuples(NAMES, NAMES)), max_size=5))
def test_named_dims_are_what_the_axes_mention(axes: list[str | tuple[str, str] | None]) -> None:
    access = Access(tensor="x", shape=(1,) * len(axes), index_map=tuple(axes))
    # Names are single letters here, so the text of the axes holds each one that occurs.
    mentioned = set("".join("" if axis is None else "".join(axis) for axis in axes))
    assert access_dims(access) == named_dims(access) == mentioned
