from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import ProgramError
from pase.sharding.layouts import DeviceMesh
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh, MeshImplementation, ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.runtime.devices import virtual_cpu


def implementation(axes: tuple[tuple[str, int], ...], traffic: Traffic) -> MeshImplementation:
    size = int(np.prod([n for _, n in axes]))
    mesh = LayerMesh(
        mtf.Graph(), name="m", layer="m", devices=DeviceMesh(axes, tuple(range(size))), device_name=virtual_cpu
    )
    return mesh.implementation(traffic)


@settings(max_examples=30, deadline=None)
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
