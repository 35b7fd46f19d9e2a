from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import RuntimeFailure
from pase.runtime.compat import mtf, tf
from pase.runtime.layers import concat, dims, reshard
from pase.runtime.layouts import DeviceMesh, Layout, TensorDim, layout_of
from pase.runtime.mesh import LayerMesh
from pase.runtime.moves import moved_points
from pase.runtime.program import Program, virtual_cpu
from pase.runtime.refine import hops
from pase.runtime.traffic import Traffic
from tests.runtime.geometry import Array, distinct_dot, held, meshes, numbered, transfers

Transfer = tuple[list[TensorDim], DeviceMesh, list[TensorDim], DeviceMesh]


class Lab:
    """Two or more meshes in one graph; tensors go in as slices and come out as slices."""

    def __init__(self) -> None:
        self.graph = mtf.Graph()
        self.meshes: list[LayerMesh] = []
        self.traffic = Traffic()

    def mesh(self, devices: DeviceMesh) -> LayerMesh:
        name = f"mesh{len(self.meshes)}"
        mesh = LayerMesh(self.graph, name=name, layer=name, devices=devices, device_name=virtual_cpu)
        self.meshes.append(mesh)
        return mesh

    def tensor(self, mesh: LayerMesh, named: list[tuple[str, int]], value: Array) -> Any:
        return mtf.import_tf_tensor(mesh, tf.constant(value), mtf.Shape([mtf.Dimension(*pair) for pair in named]))

    def slices(self, *tensors: Any) -> list[list[Array]]:
        implementations = {mesh: mesh.implementation(self.traffic) for mesh in self.meshes}
        lowering = mtf.Lowering(self.graph, implementations, autostack=False)
        most = max(len(mesh.device_names) for mesh in self.meshes)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": most + 1})) as session:
            lowered = [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in tensors]
            results: list[list[Array]] = session.run(lowered)
            return results


def wanted(mesh: LayerMesh, target: list[TensorDim]) -> Layout:
    return layout_of(mesh.devices, target)


@settings(max_examples=60, deadline=None)
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
    steps = hops(source, target)
    moved = sum(moved_points(hop) + moved_points(hop.adjoint) for hop in steps)
    assert lab.traffic.total_bytes == moved * np.dtype(dtype).itemsize


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
        moved = [op.type for op in tf.get_default_graph().get_operations()[before:] if "reshard" in op.name]
    assert moved == []
    assert lab.traffic.total_bytes == 0


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_concat_and_its_gradient(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    total = sum(lengths)
    num_devices = data.draw(st.sampled_from((1, 2, 4, 6)))
    numbers = np.random.default_rng(1)
    values = [numbers.standard_normal((4, n, 6)) for n in lengths]
    with tf.Graph().as_default():
        lab = Lab()
        xs = []
        for i, (n, value) in enumerate(zip(lengths, values, strict=True)):
            b, c, h = dims((f"b{i}", 4), (f"c{i}", n), (f"h{i}", 6))
            named = [(dim.name, dim.size) for dim in (b, c, h)]
            mesh = lab.mesh(data.draw(meshes([_plain(*pair) for pair in named], num_devices)))
            xs.append(lab.tensor(mesh, named, value))
        b, c, h = dims(b=4, c=total, h=6)
        target = lab.mesh(data.draw(meshes([_plain("b", 4), _plain("c", total), _plain("h", 6)], num_devices)))
        y = concat(xs, target, [b, c, h], along=c)
        cotangent = numbers.standard_normal((4, total, 6))
        dy = lab.tensor(target, [("b", 4), ("c", total), ("h", 6)], cotangent)
        gradients = mtf.gradients([y], xs, grad_ys=[dy])
        ys, *dxs = lab.slices(y, *gradients)
    whole = np.concatenate(values, axis=1)
    layout = layout_of(target.devices, [_plain("b", 4), _plain("c", total), _plain("h", 6)])
    for result, expected in zip(ys, held(whole, layout), strict=True):
        np.testing.assert_array_equal(result, expected)
    first = 0
    for x, dx, n in zip(xs, dxs, lengths, strict=True):
        own = layout_of(x.mesh.devices, [_plain(dim.name, dim.size) for dim in x.shape.dims])
        for result, expected in zip(dx, held(cotangent[:, first : first + n], own), strict=True):
            np.testing.assert_array_equal(result, expected)
        first += n


def _plain(name: str, extent: int) -> Any:
    from pase.runtime.layouts import PlainDim

    return PlainDim(name, extent)


def test_what_does_not_fit_is_refused() -> None:
    with tf.Graph().as_default():
        program = Program(num_devices=4)
        x = program.floats("inputs", [6, 4])
        mesh = program.mesh("fc1", [("b", 4)])
        b, c, d = dims(b=6, c=4, d=5)
        with pytest.raises(RuntimeFailure, match=r"layer 'fc1' splits b = 6 in 4 parts"):
            reshard(x, mesh, [b, c])
        with pytest.raises(RuntimeFailure, match=r"shape \[6, 4\] cannot be read as \[6, 5\]"):
            reshard(x, program.mesh("fc2", []), [b, d])
        with pytest.raises(RuntimeFailure, match=r"joins 4 \+ 4 points along d = 5"):
            concat([x, x], program.mesh("join", []), [b, d], along=d)
