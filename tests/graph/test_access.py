from pase.graph import Access, Role, SliceOf, Window
from pase.graph.operator import access_dims, axis_dims, named_dims


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
