"""Layouts of Mesh-TensorFlow: each says the splits of its layers, by Mesh-TensorFlow's own reading of it."""

import tomllib
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import Builder, Plan
from pase.common.words import visible
from pase.graph.operators import dense
from pase.targets.mesh_tensorflow.primitives.compat import mtf
from pase.views.exports import export
from pase.views.exports.mesh_tensorflow_layout import different_splits, shared_meshes
from tests.hostile import hostile_plan
from tests.networks import small_plan
from tests.runtime.plans import make_plan


def layouts(plan: Plan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(export(plan, "mesh-tensorflow-layout").text)["layouts"]
    return found


def check(plan: Plan) -> None:
    """Compare what Mesh-TensorFlow makes of each layout with the splits of the plan."""
    by_name = {visible(layer.name): layer for layer in plan.layers}
    said = []
    for table in layouts(plan):
        mesh = mtf.convert_to_shape(table["mesh_shape"])
        rules = mtf.convert_to_layout_rules(table["layout"])
        assert mesh.size == plan.num_devices
        written = {dim: name for name, dim in table.get("dims", {}).items()}
        for name in table["layers"]:
            layer = by_name[name]
            # The whole iteration space as one tensor: no two of its dims may share an axis.
            shape = mtf.Shape([mtf.Dimension(written.get(visible(dim), dim), n) for dim, n in layer.dims.items()])
            axes = rules.tensor_layout(shape, mesh).tensor_axis_to_mesh_axis
            assert [1 if i is None else mesh[i].size for i in axes] == list(layer.splits.values()), name
            said.append(name)
    assert sorted(said) == sorted(by_name)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [("alexnet", 6), ("alexnet", 16), ("rnnlm", 8), ("transformer", 8)],
)
def test_every_layer_is_said_as_mesh_tensorflow_reads_it(name: str, num_devices: int) -> None:
    check(small_plan(name, num_devices))


def test_names_that_cannot_stand_in_a_layout_have_others() -> None:
    plan = hostile_plan(everywhere=True)
    check(plan)
    assert any("names cannot stand in a layout" in note for note in export(plan, "mesh-tensorflow-layout").notes)


def two_layers(first: dict[str, int], second: dict[str, int]) -> Plan:
    net = Builder("two")
    x = net.add(dense, "first", net.input((16, 16)), out=(("n", 16),))
    net.add(dense, "second", x, out=(("v", 16),), reduce=("n",))
    return make_plan(net.build(), 8, {"first": first, "second": second})


def test_one_layout_where_one_can_say_it() -> None:
    plan = two_layers({"b": 4, "n": 2}, {"b": 4, "n": 2})
    check(plan)
    (table,) = layouts(plan)
    assert (table["mesh_shape"], table["layout"]) == ("b0:4;n0:2", "b:b0;n:n0")
    assert table["layers"] == ["first", "second"]
    assert not [note for note in export(plan, "mesh-tensorflow-layout").notes if "cannot say" in note]


def test_dims_of_different_layers_share_an_axis() -> None:
    plan = two_layers({"b": 4, "c": 2}, {"b": 4, "v": 2})
    check(plan)
    (table,) = layouts(plan)
    assert (table["mesh_shape"], table["layout"]) == ("b0:4;c0:2", "b:b0;c:c0;v:c0")


def test_layers_that_split_a_dim_differently_are_named() -> None:
    plan = two_layers({"b": 4, "n": 2}, {"b": 2, "n": 4})
    check(plan)
    assert len(layouts(plan)) == 2
    notes = export(plan, "mesh-tensorflow-layout").notes
    assert notes[0].endswith("The first one is for 1 of 2 layers, not for second")
    assert "dim b is split 4 ways in first; 2 ways in second" in notes
    assert "dim n is split 4 ways in second; 2 ways in first" in notes


def test_meshes_that_do_not_fit_one_another_are_told() -> None:
    plan = two_layers({"c": 8}, {"v": 4})
    check(plan)
    assert len(layouts(plan)) == 2
    assert "no dim is split in two ways, but no one mesh has axes for all of them" in (
        export(plan, "mesh-tensorflow-layout").notes
    )


LAYERS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1, 1, 2, 4]), min_size=1).filter(
        lambda splits: prod(splits.values()) <= 8
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(layers=LAYERS)
def test_one_mesh_is_found_exactly_where_there_is_one(layers: list[dict[str, int]]) -> None:
    meshes = shared_meshes(layers, 8)
    assert sorted(i for mesh in meshes for i in mesh.layers) == list(range(len(layers)))
    assert (len(meshes) == 1) == any(_says_all(layers, sizes, axis_of) for sizes, axis_of in _all_layouts())
    for mesh in meshes:
        assert prod(mesh.sizes) == 8
        assert _says_all([layers[i] for i in mesh.layers], mesh.sizes, dict(mesh.axis_of))
    if different_splits(layers):
        assert len(meshes) > 1


def _all_layouts() -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Yield every mesh of 8 devices with every layout of four dims."""
    for sizes in ((8,), (4, 2), (2, 2, 2)):
        for axes in product((None, *range(len(sizes))), repeat=4):
            yield sizes, {dim: i for dim, i in zip("abcd", axes, strict=True) if i is not None}


def _says_all(layers: list[dict[str, int]], sizes: tuple[int, ...], axis_of: dict[str, int]) -> bool:
    for splits in layers:
        used = [axis_of[dim] for dim in splits if dim in axis_of]
        if len(set(used)) < len(used):
            return False
        if any(parts != (sizes[axis_of[dim]] if dim in axis_of else 1) for dim, parts in splits.items()):
            return False
    return True
