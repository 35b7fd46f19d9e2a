"""The closed form of shards, arrays over configurations, against the exact one, boxes on devices."""

import numpy as np
import pytest

from pase.graph import Access, SliceOf, Window
from pase.sharding.boxes import extents, num_points
from pase.sharding.edges import edge_sides, edge_steps, layer_mesh
from pase.sharding.layouts import Layout, layout_of, shard_points, tensor_dims
from pase.sharding.overlap import layout_overlap
from pase.sharding.reshard import point_to_point
from pase.sharding.shards import components, held_extents, shard_size, split_columns, splits_of
from tests.networks import SMALL, row_of, small_graph
from tests.runtime.plans import random_plan

NETWORKS = [
    pytest.param(name, marks=[] if name in ("alexnet", "densenet121", "gpt", "rnnlm") else [pytest.mark.full])
    for name in SMALL
]


def _is_whole(access: Access) -> bool:
    """Whether programs lay the tensor out on its own: no piece of a dim but single points."""
    return not any(isinstance(axis, SliceOf) and axis.extent > 1 for axis in access.index_map)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("num_devices", "seed"), [(6, 1), (8, 2)])
def test_shards_are_as_large_as_the_largest_box(name: str, num_devices: int, seed: int) -> None:
    plan = random_plan(small_graph(name), num_devices, seed)
    checked = 0
    for operator in plan.graph.operators:
        mesh = layer_mesh(plan, operator.name)
        splits = splits_of(operator, row_of(operator, plan[operator.name].splits))
        for access in (*operator.reads, *operator.writes):
            if not _is_whole(access):
                continue
            boxes = layout_of(mesh, tensor_dims(operator, access)).boxes
            held = held_extents(operator, access, lambda dim, n: -(-n // splits.of(dim)))  # noqa: B023
            assert {extents(box) for box in boxes} == {tuple(int(np.max(part)) for _, part in held)}
            assert shard_points(operator, access, mesh) == num_points(boxes[0])
            if not any(isinstance(axis, Window | SliceOf) for axis in access.index_map):
                assert shard_size(access, splits).tolist() == [num_points(boxes[0])]
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("num_devices", "seed"), [(8, 4)])
def test_no_placement_fetches_less_than_the_overlap_says(name: str, num_devices: int, seed: int) -> None:
    plan = random_plan(small_graph(name), num_devices, seed)
    checked = 0
    for edge in plan.graph.edges:
        (producer, held), (consumer, wanted) = edge_sides(plan.graph, edge)
        plain = all(isinstance(axis, str | tuple | None) for access in (held, wanted) for axis in access.index_map)
        steps = edge_steps(plan, edge)
        if not plain or len(steps) > 1:
            continue
        sides = []
        for operator, access in ((producer, held), (consumer, wanted)):
            parts = components(access, operator.extents)
            row = row_of(operator, plan[operator.name].splits)
            sides += [parts, split_columns(parts, splits_of(operator, row))]
        overlap = layout_overlap(*sides, has_gradient=False)  # type: ignore[arg-type]
        received = dict.fromkeys(range(num_devices), 0)
        for (_, receiver), points in point_to_point(steps[0]).items():
            received[receiver] += points
        least = overlap.needed_forward.item() - overlap.kept_forward.item()
        assert max(received.values()) >= least
        # What arrives is what is needed and not there.
        target, source = steps[0].target, steps[0].source.by_device
        for device, box in target.by_device.items():
            assert received[device] == num_points(box) - _shared_points(source[device], box)
        checked += 1
    assert checked > 0


def _shared_points(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> int:
    return int(np.prod([max(0, min(h, k) - max(lo, m)) for (lo, h), (m, k) in zip(a, b, strict=True)], dtype=np.int64))


def test_a_layout_on_some_positions_is_that_of_their_devices() -> None:
    layout = Layout(shape=(4,), devices=(2, 0, 1), parts=(0, 1, 0), boxes=(((0, 2),), ((2, 4),), ((0, 2),)))
    assert layout.at([2, 0]).by_device == {1: ((0, 2),), 2: ((0, 2),)}
