"""Plain tensors, even and with replicas, to partitions and back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PrimitiveError, ProgramError
from pase.sharding.boxes import blocks, copies
from pase.sharding.layouts import PlainDim, TensorDim, layout_of
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.data_movement import to_parts, to_tensor
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, part_tensors
from tests.primitives.lab import NUM_DEVICES, Lab, covers, cut, randoms, worker_sets
from tests.runtime.geometry import held, meshes


@settings(max_examples=10)
@given(st.data(), st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
def test_there_and_back(data: st.DataObject, shape: list[int]) -> None:
    dims: list[TensorDim] = [PlainDim(f"d{i}", n) for i, n in enumerate(shape)]
    named = [mtf.Dimension(f"d{i}", n) for i, n in enumerate(shape)]
    first, last = (data.draw(meshes(dims, data.draw(st.sampled_from([1, 2, 4, 6, 8])))) for _ in range(2))
    parts = data.draw(covers(shape))
    numbers = np.random.default_rng(0)
    value, cotangent = numbers.standard_normal(shape), numbers.standard_normal(shape)
    with tf.Graph().as_default():
        lab = Lab()
        source, target = (lab.workers(mesh.devices, mesh.axes) for mesh in (first, last))
        workers = lab.workers(data.draw(worker_sets(len(parts.boxes))))
        x = mtf.import_tf_tensor(source, tf.constant(value), mtf.Shape(named))
        between = to_parts(x, workers, parts)
        y = to_tensor(between, target, named)
        dy = mtf.import_tf_tensor(target, tf.constant(cotangent), mtf.Shape(named))
        through, dx = mtf.gradients([y], [between.tensor, x], grad_ys=[dy])
        implementations = {mesh: mesh.implementation(lab.traffic) for mesh in lab.meshes}
        lowering = mtf.Lowering(lab.graph, implementations, autostack=False)
        fetched = [part_tensors(lowering, between), part_tensors(lowering, Distributed(through, parts))]
        fetched += [lowering.tensors[z].to_laid_out_tensor().tensor_list for z in (y, dx)]
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": NUM_DEVICES + 1})) as session:
            held_between, gradient_between, held_after, gradient = session.run(fetched)
    for found, whole in ((held_between, value), (gradient_between, cotangent)):
        for part, box in zip(found, parts.boxes, strict=True):
            np.testing.assert_array_equal(part, cut(whole, box))
    for found, whole, mesh in ((held_after, value, last), (gradient, cotangent, first)):
        for part, expected in zip(found, held(whole, layout_of(mesh, dims)), strict=True):
            np.testing.assert_array_equal(part, expected, strict=True)


def test_what_does_not_fit_is_refused() -> None:
    with tf.Graph().as_default():
        lab = Lab()
        mesh = lab.workers([0, 1])
        (dim,) = (mtf.Dimension("b", 5),)
        x: Any = mtf.import_tf_tensor(lab.workers([0], [("worker", 1)]), tf.zeros([5]), mtf.Shape([dim]))
        with pytest.raises(PrimitiveError, match=r"to_parts: the boxes .* every element of \[5\] once"):
            to_parts(x, mesh, copies([5], 2))
        with pytest.raises(PrimitiveError, match=r"to_parts: 3 parts for the 2 workers of 'workers0'"):
            to_parts(x, mesh, blocks([5], [3]))
        y = lab.put(mesh, blocks([5], [2]), randoms(blocks([5], [2]), np.float64, 0))
        with pytest.raises(PrimitiveError, match=r"to_tensor: the partition is of a tensor of shape \[5\], not \[6\]"):
            to_tensor(y, mesh, [mtf.Dimension("b", 6)])
        with pytest.raises(ProgramError, match=r"layer 'workers2' splits b = 5 in 2 parts, which do not divide it"):
            to_tensor(y, lab.workers([0, 1], [("b", 2)]), [dim])
