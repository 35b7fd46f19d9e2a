"""Random layouts, and movements carried out on numpy arrays: what every device must end up with."""

from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pase.sharding.boxes import Box, extents, offsets
from pase.sharding.layouts import DeviceMesh, Layout, PlainDim, TensorDim, WindowDim, device_mesh
from pase.sharding.reshard import ReshardStep, pieces

Array = np.ndarray[Any, Any]

NUM_DEVICES = (1, 2, 3, 4, 6, 8)


@st.composite
def meshes(draw: st.DrawFn, dims: list[TensorDim], num_devices: int) -> DeviceMesh:
    """A mesh that splits some of the dims by divisors of their extents, on devices in any order."""
    axes = []
    left = num_devices
    for name, extent in splittable(dims):
        factors = [k for k in range(1, left + 1) if left % k == 0 and extent % k == 0]
        size = draw(st.sampled_from(factors))
        axes.append((name, size))
        left //= size
    devices = draw(st.permutations(range(num_devices)))
    return device_mesh("layer", draw(st.permutations(axes)), num_devices, devices)


def splittable(dims: list[TensorDim]) -> list[tuple[str, int]]:
    pairs = []
    for dim in dims:
        if isinstance(dim, WindowDim):
            pairs += [(dim.out, dim.out_extent), (dim.kernel, dim.kernel_extent)]
        else:
            pairs.append((dim.name, dim.extent))
    return pairs


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of one tensor: the same factors, grouped in two ways, at times in another order too."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=4))
    others = draw(st.permutations(factors)) if draw(st.integers(0, 3)) == 0 else factors
    return draw(groupings(factors)), draw(groupings(others))


@st.composite
def groupings(draw: st.DrawFn, factors: list[int]) -> list[int]:
    shape = [factors[0]]
    for factor in factors[1:]:
        if draw(st.booleans()):
            shape.append(factor)
        else:
            shape[-1] *= factor
    return shape


@st.composite
def windows(draw: st.DrawFn, name: str, extent: int) -> WindowDim:
    """A window over a dim of that extent; it may leave points at the end unread."""
    kernel = draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 2))
    pad = draw(st.integers(0, kernel - 1))
    after = draw(st.integers(0, kernel - 1))
    stride = draw(st.integers(1, 4))
    reach = (kernel - 1) * dilation + 1
    room = extent + pad + after - reach
    if room < 0:
        return WindowDim(out=name, out_extent=extent, kernel=f"{name}_kernel", kernel_extent=1, extent=extent)
    outs = room // stride + 1
    return WindowDim(
        out=name,
        out_extent=outs,
        kernel=f"{name}_kernel",
        kernel_extent=kernel,
        extent=extent,
        stride=stride,
        dilation=dilation,
        pad=pad,
    )


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[TensorDim], DeviceMesh, list[TensorDim], DeviceMesh]:
    """A tensor on one mesh and what another wants of it: any dims, any windows, any devices."""
    shape, seen = draw(reshapes())
    source: list[TensorDim] = [PlainDim(f"s{i}", extent) for i, extent in enumerate(shape)]
    target: list[TensorDim] = []
    for i, extent in enumerate(seen):
        target.append(draw(windows(f"t{i}", extent)) if draw(st.booleans()) else PlainDim(f"t{i}", extent))
    num_devices = draw(st.sampled_from(NUM_DEVICES))
    return source, draw(meshes(source, num_devices)), target, draw(meshes(target, num_devices))


def cut(tensor: Array, box: Box, fill: float = 0.0) -> Array:
    """What a box holds of a tensor; `fill` where it sticks out."""
    result = np.full(extents(box), fill, tensor.dtype)
    inside = tuple((max(low, 0), min(high, n)) for (low, high), n in zip(box, tensor.shape, strict=True))
    if all(low < high for low, high in inside):
        at = offsets(inside, box)
        size = extents(inside)
        result[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] = tensor[tuple(slice(*r) for r in inside)]
    return result


def held(tensor: Array, layout: Layout, fill: float = 0.0) -> list[Array]:
    """[positions] what each device holds of a whole tensor."""
    return [cut(tensor.reshape(layout.shape), box, fill) for box in layout.boxes]


def moved(slices: list[Array], steps: tuple[ReshardStep, ...], fill: float = 0.0) -> list[Array]:
    """Carry out movements piece by piece; overlapping pieces are added."""
    for hop in steps:
        local = [x.reshape(extents(box)) for x, box in zip(slices, hop.source.boxes, strict=True)]
        slices = []
        for box, taken in zip(hop.target.boxes, pieces(hop), strict=True):
            result = np.zeros(extents(box), local[0].dtype)
            is_covered = np.zeros(extents(box), bool)
            for piece in taken:
                at = tuple(slice(a, a + n) for a, n in zip(offsets(piece.box, box), extents(piece.box), strict=True))
                origin = hop.source.boxes[piece.source]
                result[at] += cut(local[piece.source], relative(piece.box, origin))
                is_covered[at] = True
            result[~is_covered] = fill
            slices.append(result)
    return slices


def relative(box: Box, origin: Box) -> Box:
    return tuple((low - first, high - first) for (low, high), (first, _) in zip(box, origin, strict=True))


def distinct_dot(a: list[Array], b: list[Array], layout: Layout) -> float:
    """The inner product of two tensors on a layout, each part once."""
    first = {part: position for position, part in reversed(list(enumerate(layout.parts)))}
    return float(sum(np.vdot(a[i], b[i]) for i in first.values()))


def numbered(shape: tuple[int, ...]) -> Array:
    return 1.0 + np.arange(prod(shape), dtype=float).reshape(shape)
