"""One named mesh for a plan: what it says each device holds is what the plan gives it, or it says that it does not."""

import ast
from dataclasses import replace
from itertools import permutations
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import search
from pase.graph import Access, Builder, Dim, Graph, Operator
from pase.graph.operators import concat, conv2d, dense, elementwise
from pase.planning.plan import Plan
from pase.sharding import mesh_axes as module
from pase.sharding.shards import prime_factors
from pase.targets.named_mesh import NamedMesh, named_mesh, notes
from pase.views.exports import export
from tests.exports.boxes import assert_held, named_boxes, pairs, plan_boxes
from tests.exports.placements import mesh_devices, mesh_plan
from tests.networks import slow_machine, small_graph, small_plan
from tests.runtime.networks import EXCHANGING, mixed, tied
from tests.runtime.plans import make_plan, random_plan


def check(plan: Plan) -> NamedMesh:
    """Every device holds the plan's box, dim for dim; where layers are elsewhere, the same boxes on other devices."""
    mesh = named_mesh(plan)
    assert sorted(mesh.devices) == list(range(plan.num_devices))
    assert prod(mesh.sizes) == plan.num_devices
    of_mesh = pairs(plan, mesh)
    for operator, access, tensor in of_mesh:
        planned = plan_boxes(plan, operator, access)
        for number, dim in enumerate(tensor.dims):
            assert any(planned[device][number] is None for device in planned) == bool(dim.reason)
    assert_held(plan, mesh, [named_boxes(mesh, tensor) for _, _, tensor in of_mesh])
    return mesh


GRAPHS = {"mixed": mixed, "tied": tied, **EXCHANGING}


@pytest.mark.parametrize("num_devices", [1, 4, 6, 12])
@pytest.mark.parametrize("network", sorted(GRAPHS))
def test_splits_on_axes_of_any_mesh_are_found_again(network: str, num_devices: int) -> None:
    for seed in range(3):
        mesh = check(mesh_plan(GRAPHS[network](), num_devices, seed))
        assert all(layer.keeps_devices for layer in mesh.layers)


@pytest.mark.parametrize("num_devices", [4, 6, 12])
@pytest.mark.parametrize("network", ["mixed", "attention"])
def test_any_devices_at_all_keep_their_splits(network: str, num_devices: int) -> None:
    plan = random_plan(GRAPHS[network](), num_devices, seed=num_devices)
    mesh = check(plan)
    elsewhere = [layer.name for layer in mesh.layers if not layer.keeps_devices]
    assert elsewhere, "random devices fit one mesh: take another seed"
    assert any(elsewhere[0] in note and "other devices than the plan's" in note for note in notes(mesh))


@pytest.mark.parametrize(("network", "num_devices"), [("alexnet", 12), ("transformer", 32), ("rnnlm", 12)])
def test_plans_of_a_search_keep_all_their_devices(network: str, num_devices: int) -> None:
    assert all(layer.keeps_devices for layer in check(small_plan(network, num_devices)).layers)


# -- the search for axes, against trying every mesh


def _can_be_said(splits: dict[str, int], placed: tuple[int, ...], sizes: list[int], devices: tuple[int, ...]) -> bool:
    """Whether some choice of axes of this very mesh gives each device the part that it is to hold."""
    names = [dim for dim, split in splits.items() if split > 1]
    replicas = len(placed) // prod(splits.values())
    wanted = {device: position // replicas for position, device in enumerate(placed)}
    for order in permutations(range(len(sizes))):
        left = list(order)
        slots: dict[str, list[int]] = {}
        for dim in names:
            slots[dim] = []
            while left and prod(sizes[axis] for axis in slots[dim]) < splits[dim]:
                slots[dim].append(left.pop(0))
        if all(prod(sizes[axis] for axis in slots[dim]) == splits[dim] for dim in names):
            found = mesh_devices(splits, slots, sizes, devices)
            if {device: position // replicas for position, device in enumerate(found)} == wanted:
                return True
    return False


def _some_mesh_says(plan: Plan) -> bool:
    for sizes in set(permutations(prime_factors(plan.num_devices))):
        for devices in permutations(range(plan.num_devices)):
            if all(_can_be_said(layer.splits, layer.devices, list(sizes), devices) for layer in plan.layers):
                return True
    return False


def _chain(num_layers: int) -> Graph:
    net = Builder("chain")
    x = net.input((12, 12))
    for number in range(num_layers):
        x = net.add(dense, f"fc{number}", x, out=(("n", 12),))
    return net.build()


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_all_layers_keep_their_devices_exactly_where_some_mesh_says_them(data: st.DataObject) -> None:
    num_devices = data.draw(st.sampled_from([4, 6]))
    configurations = {
        4: [{"b": 4}, {"n": 4}, {"b": 2, "n": 2}, {"n": 2, "c": 2}, {"b": 2}],
        6: [{"b": 6}, {"b": 3, "n": 2}, {"n": 6}, {"b": 2, "c": 3}, {"n": 3}, {"c": 2}],
    }[num_devices]
    graph = _chain(data.draw(st.integers(2, 3)))
    base = tuple(range(num_devices))
    orders = [base, data.draw(st.permutations(base)), data.draw(st.permutations(base))]
    splits, devices = {}, {}
    for operator in graph.operators:
        splits[operator.name] = data.draw(st.sampled_from(configurations))
        devices[operator.name] = tuple(data.draw(st.sampled_from(orders)))
    plan = make_plan(graph, num_devices, splits, devices)
    mesh = check(plan)
    assert all(layer.keeps_devices for layer in mesh.layers) == _some_mesh_says(plan)


# -- what cannot be said


def test_axes_that_are_always_used_together_are_one() -> None:
    plan = make_plan(_chain(3), 8, {f"fc{i}": {"b": 8} for i in range(3)})
    mesh = named_mesh(plan)
    assert (mesh.sizes, mesh.names, mesh.devices) == ((8,), ("m0",), tuple(range(8)))
    plan = make_plan(_chain(2), 8, {"fc0": {"b": 8}, "fc1": {"b": 4, "n": 2}})
    mesh = named_mesh(plan)
    assert (mesh.sizes, mesh.devices) == ((4, 2), tuple(range(8)))
    assert [dict(layer.axes) for layer in mesh.layers] == [{"b": ("m0", "m1")}, {"b": ("m0",), "n": ("m1",)}]


def test_the_layers_that_most_others_agree_with_keep_their_devices() -> None:
    odd = (0, 3, 1, 2)
    plan = make_plan(_chain(3), 4, {f"fc{i}": {"b": 2, "n": 2} for i in range(3)}, {"fc0": odd})
    mesh = named_mesh(plan)
    assert [layer.keeps_devices for layer in mesh.layers] == [False, True, True]
    assert [note.split(";")[0] for note in notes(mesh)] == ["on other devices than the plan's: fc0"]


def test_digits_that_do_not_number_the_devices_are_no_axes() -> None:
    # Parts the other way round: 0 and 1 on the devices that have 1 and 0 in the other layers.
    plan = make_plan(_chain(3), 4, {f"fc{i}": {"b": 2} for i in range(3)}, {"fc2": (2, 3, 0, 1)})
    assert [layer.keeps_devices for layer in check(plan).layers] == [True, True, False]


def test_a_split_is_written_in_the_order_of_its_factors_that_others_can_share() -> None:
    # Parts 3 · (d mod 2) + d div 2 of one layer, part d of the other: mixed digits of a mesh of 3 × 2.
    plan = make_plan(_chain(2), 6, {f"fc{i}": {"b": 6} for i in range(2)}, {"fc1": (0, 2, 4, 1, 3, 5)})
    mesh = check(plan)
    assert mesh.sizes == (3, 2)
    assert [layer.axes for layer in mesh.layers] == [{"b": ("m0", "m1")}, {"b": ("m1", "m0")}]
    assert all(layer.keeps_devices for layer in mesh.layers)


def test_a_search_that_takes_too_long_keeps_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TRIES", 0)
    plan = make_plan(_chain(2), 4, {"fc0": {"b": 2}, "fc1": {"b": 4}})
    assert all(layer.keeps_devices for layer in check(plan).layers)


def test_axes_are_in_the_order_in_which_layers_use_them() -> None:
    odd = (0, 2, 1, 3)
    splits = {"fc0": {"b": 4}, "fc1": {"b": 4}, "fc2": {"b": 2, "n": 2}}
    mesh = check(make_plan(_chain(3), 4, splits, dict.fromkeys(splits, odd)))
    assert mesh.devices == odd
    assert [layer.axes["b"] for layer in mesh.layers] == [("m0", "m1"), ("m0", "m1"), ("m0",)]


def test_partial_sums_lie_over_the_axes_of_what_is_summed() -> None:
    mesh = named_mesh(make_plan(_chain(1), 8, {"fc0": {"b": 2, "c": 4}}))
    (layer,) = mesh.layers
    assert layer.outputs[0].sums == layer.axes["c"] != ()
    assert [dim.axes for dim in layer.outputs[0].dims] == [layer.axes["b"], ()]
    assert [tensor.sums for tensor in (*layer.inputs, *layer.parameters)] == [(), (), ()]


def test_what_axes_cannot_say_has_its_reason() -> None:
    net = Builder("odd")
    x = net.add(conv2d, "grouped", net.input((4, 8, 9, 8)), out=8, kernel=2, padding=((0, 0), (1, 0)), groups=2)
    y = net.add(elementwise, "copy", x, dims=("b", "c", "h", "w"), function="relu")
    net.add(concat, "joined", x, y)
    plan = make_plan(net.build(), 4, {"grouped": {"n": 2, "h": 2}, "joined": {"c": 4}, "copy": {"c": 4}})
    mesh = check(plan)
    by_name = {layer.name: layer for layer in mesh.layers}
    assert by_name["copy"].reasons == ()
    assert by_name["joined"].reasons == tuple(
        f"x{i}, dim 1: the piece {8 * i} to {8 * i + 8} of c, the whole of which is split" for i in range(2)
    )
    product = "the product g·n is split by n: its parts are not contiguous"
    assert by_name["grouped"].reasons == (
        "x, dim 2: 2 parts of h read windows of 9 points, which 2 does not divide",
        f"w, dim 0: {product}",
        f"bias, dim 0: {product}",
        f"y, dim 1: {product}",
    )
    assert [note.split(":")[0] for note in notes(mesh)] == ["grouped", "joined"]


def test_a_product_is_split_by_what_comes_after_a_dim_that_is_split_to_points() -> None:
    net = Builder("grouped")
    net.add(conv2d, "conv", net.input((4, 8, 8, 8)), out=8, kernel=1, groups=2)
    mesh = check(make_plan(net.build(), 8, {"conv": {"g": 2, "n": 4}}))
    (layer,) = mesh.layers
    assert layer.reasons == ()
    assert layer.outputs[0].dims[1].axes == (*layer.axes["g"], *layer.axes["n"])
    assert layer.inputs[0].dims[1].axes == layer.axes["g"]


@pytest.mark.parametrize(
    ("splits", "parts", "is_said"),
    [
        ({"i": 2, "j": 3}, 6, True),
        ({"i": 2, "j": 3, "k": 2}, 12, True),
        ({"j": 3}, 1, False),
        ({"j": 3, "k": 2}, 1, False),
        ({"i": 2, "k": 2}, 2, False),
    ],
)
def test_products_of_several_dims(splits: dict[str, int], parts: int, is_said: bool) -> None:
    def seen_flat(name: str, x: tuple[int, ...]) -> Operator:
        dims = (Dim("i", 2), Dim("u", 1), Dim("j", 3), Dim("k", 4))
        read = Access(tensor="x", shape=x, index_map=(("i", "u", "j", "k"),))
        write = Access(tensor="y", shape=(2, 1, 3, 4), index_map=("i", "u", "j", "k"))
        return Operator(name=name, kind="seen_flat", dims=dims, reads=(read,), writes=(write,))

    net = Builder("flat")
    net.add(seen_flat, "flat", net.input((24,)))
    mesh = check(make_plan(net.build(), 12, {"flat": splits}))
    (layer,) = mesh.layers
    (dim,) = layer.inputs[0].dims
    assert prod(mesh.sizes[mesh.names.index(axis)] for axis in dim.axes) == parts
    assert (dim.reason == "") is is_said


def test_layers_that_share_a_reason_share_a_note() -> None:
    net = Builder("uneven")
    x = net.add(elementwise, "stem", net.input((4, 4, 9, 9)), dims=("b", "c", "h", "w"), function="relu")
    for number in range(15):
        net.add(conv2d, f"conv{number}", x, out=4, kernel=2)
    shown = ", ".join(f"conv{number}" for number in range(8))
    (note,) = notes(named_mesh(make_plan(net.build(), 4, {f"conv{number}": {"h": 4} for number in range(15)})))
    assert note == f"{shown} and 7 more: x, dim 2: 4 parts of h read windows of 9 points, which 4 does not divide"


@pytest.mark.parametrize(("name", "table"), [("jax", "SPECS"), ("torch", "PLACEMENTS")])
def test_micro_batches_and_modes_stand_beside_the_same_table(name: str, table: str) -> None:
    """Tables are those of the same splits without modes; what they do not say is said by name."""
    modes = {"pin": {"*": "zero2 *"}}
    options: dict[str, Any] = {"machine": slow_machine(), "cost_model": "step", "micro_batches": 2, "modes": ["zero2"]}
    plan = search(small_graph("gpt"), 4, constraints=modes, **options)
    plan = replace(plan, layers=(*plan.layers[:5], replace(plan.layers[5], is_recomputed=True), *plan.layers[6:]))
    layers = tuple(replace(layer, state="replicated", is_recomputed=False) for layer in plan)
    plain = replace(plan, micro_batches=1, layers=layers)
    exported, expected = export(plan, name), export(plain, name)

    def assigned(text: str) -> str:
        nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        (found,) = (node for node in nodes if table in map(ast.unparse, node.targets))
        return ast.dump(found)

    assert assigned(exported.text) == assigned(expected.text)
    assert len(exported.notes) == len(expected.notes) + 3
    assert "2 micro-batches" in exported.notes[0]
    assert "zero2: " in exported.notes[1]
    assert plan.layers[5].name in exported.notes[2]
    comments = [line for line in exported.text.splitlines() if line.startswith(f"    # {plan.layers[5].name} (")]
    assert len(comments) == 1
    assert comments[0].endswith("recomputed")
