"""Workers in one graph: parts go in as arrays, come out as arrays, and so do their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pase.sharding.boxes import Box, Partition, blocks, partition
from pase.sharding.halos import Buffers
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.data_movement import Workspace, adjoint_defect
from pase.targets.mesh_tensorflow.primitives.parts import Distributed, Reshard
from pase.targets.mesh_tensorflow.runtime.measure import crossed

Array = np.ndarray[Any, Any]

NUM_DEVICES = 9


class Lab(Workspace):
    """A workspace in the TensorFlow graph of a test; crossed_bytes: sent in the graphs that TensorFlow ran."""

    crossed_bytes = 0

    def get(self, *tensors: Distributed) -> list[list[Array]]:
        metadata = tf.RunMetadata()
        results = self.run(*tensors, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        self.crossed_bytes = crossed(metadata, tf.get_default_graph(), self.traffic).total_bytes
        return results


def crossed_pairs(metadata: Any, graph: Any) -> dict[tuple[int, int], int]:
    """The bytes that TensorFlow sent between workers: (sender, receiver) → bytes. Worker i is CPU i + 1."""
    found: dict[tuple[int, int], int] = {}
    for part in metadata.partition_graphs:
        constants = {node.name: node.attr["value"].tensor for node in part.node if node.op == "Const"}
        for node in part.node:
            if node.op != "_Send":
                continue
            places = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
            sender, receiver = (int(place.rpartition(":")[2]) - 1 for place in places)
            name = node.input[0]
            if name in constants:
                # An empty one stands for what only waits.
                shape, kind = constants[name].tensor_shape, constants[name].dtype
                size = prod(dim.size for dim in shape.dim) * tf.as_dtype(kind).size
            else:
                tensor = graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
                size = tensor.shape.num_elements() * tensor.dtype.size
            if sender != receiver and -1 not in (sender, receiver) and size:
                found[sender, receiver] = found.get((sender, receiver), 0) + size
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """F x, and F* y for a random y; operations: the names of the primitives, forward and of the gradient.

    moved_bytes: planned, there and back; crossed_bytes: sent in the graphs that TensorFlow ran.
    """

    x: list[Array]
    forward: list[Array]
    y: list[Array]
    adjoint: list[Array]
    operations: list[str]
    moved_bytes: int
    crossed_bytes: int

    def relative_defect(self) -> float:
        """The left side of Eq. 13."""
        return adjoint_defect(self.x, self.forward, self.y, self.adjoint)


def randoms(held: Partition | Buffers, dtype: Any, seed: int) -> list[Array]:
    numbers = np.random.default_rng(seed)
    return [numbers.standard_normal(shape).astype(dtype) for shape in held.extents]


def outcome(
    held: Partition | Buffers,
    devices: Sequence[int],
    apply: Callable[[Lab, Distributed], Distributed],
    *,
    dtype: Any = np.float64,
    axes: Sequence[tuple[str, int]] | None = None,
    x: Sequence[Array] | None = None,
) -> Outcome:
    """Run a primitive on random parts, and its gradient on a random cotangent."""
    values = list(x) if x is not None else randoms(held, dtype, 1)
    with tf.Graph().as_default():
        lab = Lab()
        first = lab.put(lab.workers(devices, axes), held, values)
        before = len(lab.graph.operations)
        result = apply(lab, first)
        cotangent = randoms(result.held, dtype, 2)
        dy = lab.put(result.mesh, result.held, cotangent)
        (gradient,) = mtf.gradients([result.tensor], [first.tensor], grad_ys=[dy.tensor])
        forward, adjoint = lab.get(result, Distributed(gradient, held))
        added = lab.graph.operations[before:]
    return Outcome(
        x=values,
        forward=forward,
        y=cotangent,
        adjoint=adjoint,
        operations=[operation.primitive for operation in added if isinstance(operation, Reshard)],
        moved_bytes=lab.traffic.total_bytes,
        crossed_bytes=lab.crossed_bytes,
    )


def cut(tensor: Array, box: Box) -> Array:
    return tensor[tuple(slice(*limits) for limits in box)]


def together(parts: Sequence[Array], held: Partition) -> Array:
    """The whole tensor: the sum of all parts in their places."""
    tensor = np.zeros(held.shape, parts[0].dtype)
    for part, box in zip(parts, held.boxes, strict=True):
        tensor[tuple(slice(*limits) for limits in box)] += part
    return tensor


TOLERANCE = {np.float32: 2e-6, np.float64: 5e-15}


def assert_coherent(result: Outcome, dtype: Any, *, all_used: bool = True) -> None:
    """Eq. 13, and as many bytes sent as planned; less only where TensorFlow leaves out what nobody uses."""
    assert result.relative_defect() < TOLERANCE[dtype]
    assert result.crossed_bytes <= result.moved_bytes
    assert result.crossed_bytes == result.moved_bytes or not all_used
    assert {part.dtype for part in (*result.forward, *result.adjoint)} == {np.dtype(dtype)}


def assert_is_matrix(result: Outcome, matrix: Array, *, atol: float, defect: float) -> None:
    """The matrix times what went in, and its transpose times what came back; what moved is what was planned."""

    def flat(parts: Sequence[Array]) -> Array:
        return np.concatenate([part.reshape(-1) for part in parts])

    np.testing.assert_allclose(flat(result.forward), matrix @ flat(result.x), rtol=0, atol=atol)
    np.testing.assert_allclose(flat(result.adjoint), matrix.T @ flat(result.y), rtol=0, atol=atol)
    assert result.relative_defect() < defect
    assert result.moved_bytes == result.crossed_bytes


def assert_parts(found: list[Array], expected: list[Array]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


# ------------------------------------------------------------------------------------------------- what to draw from

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)
dtypes = st.sampled_from([np.float32, np.float64])


def worker_sets(size: int) -> st.SearchStrategy[list[int]]:
    """Any different devices, in any order."""
    return st.permutations(range(NUM_DEVICES)).map(lambda order: order[:size])


@st.composite
def covers(draw: st.DrawFn, shape: list[int]) -> Partition:
    """A partition in boxes: balanced blocks, or boxes cut in two again and again; some may be empty."""
    if draw(st.booleans()):
        counts: list[int] = []
        for _ in shape:
            counts.append(draw(st.integers(1, min(4, NUM_DEVICES // prod(counts)))))
        return blocks(shape, counts)
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, NUM_DEVICES - 1))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        low, high = box[dim]
        middle = draw(st.integers(low, high))
        boxes += [(*box[:dim], (low, middle), *box[dim + 1 :]), (*box[:dim], (middle, high), *box[dim + 1 :])]
    return partition(shape, draw(st.permutations(boxes)))
