"""Meshes, and tensors taken from one to another: values, adjoints, and what is sent for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import ProgramError
from pase.sharding.layouts import DeviceMesh, Layout, PlainDim, TensorDim, device_mesh, layout_of
from pase.sharding.reshard import point_to_point, reshard_steps
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh, MeshImplementation, ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.runtime.devices import virtual_cpu
from pase.targets.mesh_tensorflow.runtime.layers import concat, dims, reshard
from pase.targets.mesh_tensorflow.runtime.measure import crossed
from pase.targets.mesh_tensorflow.runtime.program import Program
from tests.runtime.geometry import Array, distinct_dot, held, numbered, transfers


def implementation(axes: tuple[tuple[str, int], ...], traffic: Traffic) -> MeshImplementation:
    size = int(np.prod([n for _, n in axes]))
    mesh = LayerMesh(
        mtf.Graph(), name="m", layer="m", devices=DeviceMesh(axes, tuple(range(size))), device_name=virtual_cpu
    )
    return mesh.implementation(traffic)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.data(),
    st.sampled_from([(3,), (), (2, 700), (1025,)]),
    st.sampled_from(["SUM", "MAX"]),
)
def test_all_reduce(sizes: list[int], data: st.DataObject, shape: tuple[int, ...], how: str) -> None:
    axes = tuple((f"a{i}", n) for i, n in enumerate(sizes))
    over = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True).map(sorted))
    values = np.random.default_rng(0).standard_normal((*sizes, *shape))
    flat = values.reshape(-1, *shape)
    traffic = Traffic()
    with tf.Graph().as_default():
        mesh = implementation(axes, traffic)
        slices = []
        for value, device in zip(flat, mesh.devices, strict=True):
            with tf.device(device):
                slices.append(tf.constant(value))
        reduced: Any = mesh.allreduce(mesh.LaidOutTensor(slices), over, how)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": len(flat) + 1})) as session:
            results = np.array(session.run(reduced.tensor_list)).reshape(values.shape)
    reduce = np.sum if how == "SUM" else np.max
    expected = np.broadcast_to(reduce(values, axis=tuple(over), keepdims=True) if over else values, values.shape)
    np.testing.assert_allclose(results, expected, rtol=1e-13, atol=1e-15)
    group = int(np.prod([sizes[i] for i in over]))
    per_group = 2 * (group - 1) * int(np.prod(shape)) * 8
    assert traffic.total_bytes == per_group * (len(flat) // group)


def test_devices_must_differ() -> None:
    shape = mtf.Shape([mtf.Dimension("b", 2)])
    layout = mtf.LayoutRules([("b", "b")])
    with pytest.raises(ProgramError, match=r"layer 'fc': a mesh of 2 positions needs as many different devices"):
        MeshImplementation(shape, layout, ["/device:CPU:1", "/device:CPU:1"], "fc", Traffic())


def test_a_constant_is_there_once_on_each_device() -> None:
    with ProgramGraph().as_default() as graph, tf.device("/job:worker/task:0"):
        found = []
        for device in (virtual_cpu(0), virtual_cpu(1)):
            with tf.device(device):
                x = tf.placeholder(tf.float32, [2, 3])
                with tf.control_dependencies([x]):
                    found.append(tf.constant(2.0))
                    found += [tf.constant(2.0), tf.constant(2), tf.constant([2.0])]
        first, again, whole, line, other, *_ = (tensor.op for tensor in found)
    assert first is again
    assert len({first, whole, line, other}) == 4
    assert first.control_inputs == []
    assert first.device.endswith("CPU:1")
    assert other.device.endswith("CPU:2")
    assert sum(operation.type == "Const" for operation in graph.get_operations()) == 2 * 3


def test_constants_of_the_host_are_not_shared() -> None:
    """Each may be fed for another variable."""
    with ProgramGraph().as_default(), tf.device("cpu:0"):
        first, second = (
            tf.get_variable(name, [3], initializer=tf.zeros_initializer(), use_resource=True) for name in "ab"
        )
        assert first.initializer.inputs[1] is not second.initializer.inputs[1]
        with tf.Session() as session:
            feeds = {first.initializer.inputs[1]: [1, 2, 3], second.initializer.inputs[1]: [4, 5, 6]}
            session.run([first.initializer, second.initializer], feeds)
            assert [list(array) for array in session.run([first, second])] == [[1, 2, 3], [4, 5, 6]]


Transfer = tuple[list[TensorDim], DeviceMesh, list[TensorDim], DeviceMesh]


class Lab:
    """Two or more meshes in one graph; tensors go in as slices and come out as slices."""

    def __init__(self, *, keeps_alive: bool = False) -> None:
        self.graph = mtf.Graph()
        self.meshes: list[LayerMesh] = []
        self.traffic = Traffic(keeps_alive=keeps_alive)

    def mesh(self, devices: DeviceMesh) -> LayerMesh:
        name = f"mesh{len(self.meshes)}"
        mesh = LayerMesh(self.graph, name=name, layer=name, devices=devices, device_name=virtual_cpu)
        self.meshes.append(mesh)
        return mesh

    def tensor(self, mesh: LayerMesh, named: list[tuple[str, int]], value: Array) -> Any:
        return mtf.import_tf_tensor(mesh, tf.constant(value), mtf.Shape([mtf.Dimension(*pair) for pair in named]))

    def slices(self, *tensors: Any) -> list[list[Array]]:
        return self.run(*tensors)[0]

    def run(self, *tensors: Any) -> tuple[list[list[Array]], dict[tuple[str, str], int]]:
        """The slices, and the bytes that TensorFlow sent from mesh to mesh."""
        implementations = {mesh: mesh.implementation(self.traffic) for mesh in self.meshes}
        lowering = mtf.Lowering(self.graph, implementations, autostack=False)
        most = max(len(mesh.device_names) for mesh in self.meshes)
        config = tf.ConfigProto(device_count={"CPU": most + 1})
        # What is sent must not be folded into constants.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        metadata, options = tf.RunMetadata(), tf.RunOptions(output_partition_graphs=True)
        with tf.Session(config=config) as session:
            lowered = [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in tensors]
            results: list[list[Array]] = session.run(lowered, options=options, run_metadata=metadata)
            sent = crossed(metadata, session.graph, self.traffic)
        assert sent.elsewhere_bytes == 0
        return results, {(m.producer, m.consumer): size for m, size in sent.by_movement.items() if size}

    def planned(self) -> dict[tuple[str, str], int]:
        """The bytes that were planned from mesh to mesh."""
        return {(m.producer, m.consumer): size for m, size in self.traffic.bytes_by_movement.items() if size}


def wanted(mesh: LayerMesh, target: list[TensorDim]) -> Layout:
    return layout_of(mesh.devices, target)


@settings(max_examples=40)
@given(transfers(), st.sampled_from([np.float32, np.float64]))
def test_values_and_adjoint(transfer: Transfer, dtype: type) -> None:
    source_dims, source_mesh, target_dims, target_mesh = transfer
    source, target = layout_of(source_mesh, source_dims), layout_of(target_mesh, target_dims)
    value = numbered(source.shape).astype(dtype)
    numbers = np.random.default_rng(0)
    with tf.Graph().as_default():
        lab = Lab()
        first, second = lab.mesh(source_mesh), lab.mesh(target_mesh)
        x = lab.tensor(first, [(dim.name, dim.extent) for dim in source_dims], value)  # type: ignore[union-attr]
        y = reshard(x, second, target_dims, fill=-1.0)
        cotangent = numbers.standard_normal(y.shape.to_integer_list).astype(dtype)
        dy = lab.tensor(second, [(dim.name, dim.size) for dim in y.shape.dims], cotangent)
        # import has no inputs: ask for the gradient with the same rule that training uses.
        (dx,) = mtf.gradients([y], [x], grad_ys=[dy])
        xs, ys, dys, dxs = lab.slices(x, y, dy, dx)
    expected = held(value, target, fill=-1.0)
    for result, part in zip(ys, expected, strict=True):
        np.testing.assert_array_equal(result.reshape(part.shape), part)
    without_fill = [
        np.where(part == -1.0, 0, result.reshape(part.shape)) for part, result in zip(expected, ys, strict=True)
    ]
    left = distinct_dot(without_fill, [d.reshape(p.shape) for d, p in zip(dys, expected, strict=True)], target)
    right = distinct_dot(xs, dxs, source)
    assert left == pytest.approx(
        right, rel=1e-5 if dtype is np.float32 else 1e-12, abs=1e-3 if dtype is np.float32 else 1e-9
    )
    steps = reshard_steps(source, target)
    points = sum(sum(point_to_point(hop).values()) + sum(point_to_point(hop.adjoint).values()) for hop in steps)
    assert lab.traffic.total_bytes == points * np.dtype(dtype).itemsize


def test_nothing_moves_between_equal_layouts() -> None:
    with tf.Graph().as_default():
        lab = Lab()
        devices = DeviceMesh((("b", 2), ("c", 2)), (3, 1, 0, 2))
        first, second = lab.mesh(devices), lab.mesh(DeviceMesh((("k", 2), ("l", 2)), (3, 1, 0, 2)))
        x = lab.tensor(first, [("b", 4), ("c", 6)], numbered((4, 6)))
        before = len(tf.get_default_graph().get_operations())
        k, l_ = dims(k=4, l=6)
        y = reshard(x, second, [k, l_])
        lab.slices(x, y)
        made = [op.type for op in tf.get_default_graph().get_operations()[before:] if "reshard" in op.name]
    assert made == []
    assert lab.traffic.total_bytes == 0


@dataclass(frozen=True)
class Side:
    """A tensor split over devices. splits: [rank]; axes: the dims' numbers in the order of the mesh's axes."""

    splits: tuple[int, ...]
    axes: tuple[int, ...]
    devices: tuple[int, ...]

    def mesh(self, letter: str) -> DeviceMesh:
        splits = [(f"{letter}{dim}", self.splits[dim]) for dim in self.axes]
        return device_mesh(letter, splits, len(self.devices), self.devices)

    def owners(self, shape: Sequence[int]) -> Array:
        """[devices, shape] which device holds which element: of each dim every part has as many in a row."""
        counts = [self.splits[dim] for dim in self.axes]
        labels = [at * split // n for at, split, n in zip(np.indices(shape), self.splits, shape, strict=True)]
        result = np.ones((len(self.devices), *shape), bool)
        for position, device in enumerate(self.devices):
            # Row-major over the axes; what is left over is a replica.
            part = np.unravel_index(position // (len(self.devices) // prod(counts)), counts)
            for dim, place in zip(self.axes, part, strict=True):
                result[device] &= labels[dim] == place
        return result


@dataclass(frozen=True)
class Partitions:
    """A tensor, as it is split on one side and on the other."""

    shape: tuple[int, ...]
    source: Side
    target: Side

    @classmethod
    def draw(cls, numbers: random.Random) -> "Partitions":
        num_devices = numbers.choice((2, 3, 4, 6, 8, 12))
        shape: tuple[int, ...] = ()
        while not 1 < prod(shape) <= 600:
            shape = tuple(numbers.randint(1, 12) for _ in range(numbers.randint(1, 4)))

        def side() -> Side:
            splits, left = [1] * len(shape), num_devices
            for dim in numbers.sample(range(len(shape)), len(shape)):
                splits[dim] = numbers.choice([k for k in range(1, left + 1) if left % k == 0 and shape[dim] % k == 0])
                left //= splits[dim]
            axes = numbers.sample(range(len(shape)), len(shape))
            return Side(tuple(splits), tuple(axes), tuple(numbers.sample(range(num_devices), num_devices)))

        return cls(shape, side(), side())

    def dims(self, letter: str) -> list[PlainDim]:
        return [PlainDim(f"{letter}{dim}", extent) for dim, extent in enumerate(self.shape)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_partitions_at_random(seed: int) -> None:
    """Fifty at a time: what every device gets there and back, element by element, and what crosses for it."""
    cases = [Partitions.draw(random.Random(1000 * seed + i)) for i in range(50)]
    numbers = np.random.default_rng(seed)
    values = [(numbers.standard_normal(case.shape), numbers.standard_normal(case.shape)) for case in cases]
    with tf.Graph().as_default():
        # Kept alive: otherwise what the host brings to a device is passed on from the host.
        lab = Lab(keeps_alive=True)
        xs, ys, dys = [], [], []
        for case, (value, cotangent) in zip(cases, values, strict=True):
            source, target = lab.mesh(case.source.mesh("a")), lab.mesh(case.target.mesh("b"))
            xs.append(lab.tensor(source, [(dim.name, dim.extent) for dim in case.dims("a")], value))
            ys.append(reshard(xs[-1], target, case.dims("b")))
            dys.append(lab.tensor(target, [(dim.name, dim.extent) for dim in case.dims("b")], cotangent))
        dxs = mtf.gradients(ys, xs, grad_ys=dys)
        results, sent = lab.run(*xs, *ys, *dys, *dxs)
    expected_bytes = {}
    columns = [results[i : i + len(cases)] for i in range(0, len(results), len(cases))]
    for i, (case, (value, cotangent), x, y, dy, dx) in enumerate(zip(cases, values, *columns, strict=True)):
        has, needs = case.source.owners(case.shape), case.target.owners(case.shape)
        for slices, whole, side, owned in ((y, value, case.target, needs), (dx, cotangent, case.source, has)):
            for device, part in zip(side.devices, slices, strict=True):
                # A box of a tensor, flat, is what a mask picks.
                np.testing.assert_array_equal(part.ravel(), whole[owned[device]], err_msg=f"seed {seed}, {case}")
        there = distinct_dot(y, dy, layout_of(case.target.mesh("b"), case.dims("b")))
        back = distinct_dot(x, dx, layout_of(case.source.mesh("a"), case.dims("a")))
        assert there == pytest.approx(back, rel=1e-12, abs=1e-12)
        expected_bytes[f"mesh{2 * i}", f"mesh{2 * i + 1}"] = int((needs & ~has).sum()) * 8
        expected_bytes[f"mesh{2 * i + 1}", f"mesh{2 * i}"] = int((has & ~needs).sum()) * 8
    expected_bytes = {ends: size for ends, size in expected_bytes.items() if size}
    assert lab.planned() == expected_bytes
    assert sent == expected_bytes


def test_what_does_not_fit_is_refused() -> None:
    with tf.Graph().as_default():
        program = Program(num_devices=4)
        x = program.floats("inputs", [6, 4])
        mesh = program.mesh("fc1", [("b", 4)])
        b, c, d = dims(b=6, c=4, d=5)
        with pytest.raises(ProgramError, match=r"layer 'fc1' splits b = 6 in 4 parts"):
            reshard(x, mesh, [b, c])
        with pytest.raises(ProgramError, match=r"shape \[6, 4\] cannot be read as \[6, 5\]"):
            reshard(x, program.mesh("fc2", []), [b, d])
        with pytest.raises(ProgramError, match=r"joins 4 \+ 4 points along d = 5"):
            concat([x, x], program.mesh("join", []), [b, d], along=d)
