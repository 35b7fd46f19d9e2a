"""Time PyTorch kernels on the local device, and fit the kernel figures of a machine to the times."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from pase.calibration.measured import memory_share_bytes, processor_name, rounded
from pase.costs.kernels import (
    ATTENTION,
    CONVOLUTIONS,
    FUNCTIONS,
    MEMORY,
    NORMS,
    PRODUCTS,
    PassKernels,
    Product,
    pass_seconds,
)
from pase.errors import CalibrationError
from pase.machine import Device, Kernels, KernelSample, Level, Machine
from pase.machine.machine import KERNELS
from pase.planning.planner import Progress

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_TIMED_S, _FEWEST_RUNS = 0.08, 3
"""How long a kernel is repeated, and the minimum number of repetitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """Sizes of the kernels to time; `most_flop` limits the FLOP of a product."""

    extents: tuple[int, ...]
    depths: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]
    convolutions: tuple[tuple[int, int, int, int, int], ...]
    attentions: tuple[tuple[int, int, int], ...]
    arrays: tuple[int, ...]
    most_flop: float


_ON_CPU = _Effort(
    extents=(64, 256, 1024),
    depths=(64, 256, 1024),
    copies=((16, 64), (64, 64), (16, 128)),
    convolutions=(
        *((8, 3, 32, 96, 7), (4, 16, 32, 56, 3), (4, 64, 64, 28, 3), (8, 64, 64, 24, 3), (8, 128, 128, 12, 3)),
        *((4, 128, 128, 14, 3), (8, 256, 256, 6, 3), (8, 48, 48, 24, 7), (4, 64, 256, 28, 1), (8, 256, 64, 14, 1)),
    ),
    attentions=((4, 128, 64), (8, 256, 64), (8, 512, 32)),
    arrays=tuple(2**i for i in range(16, 26, 2)),
    most_flop=3e9,
)
_ON_GPU = _Effort(
    extents=(512, 2048, 8192),
    depths=(256, 1024, 4096, 8192),
    copies=((64, 128), (64, 512), (256, 256)),
    convolutions=((64, 64, 64, 56, 3), (64, 128, 128, 28, 3), (64, 256, 1024, 14, 1), (64, 512, 512, 7, 3)),
    attentions=((64, 1024, 64), (64, 2048, 128), (32, 4096, 128)),
    arrays=tuple(2**i for i in range(20, 32, 2)),
    most_flop=2e12,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """A kernel to time.

    Attributes:
        passes: Number of products that it performs; the extents are those of one.
        touched: Numbers that it reads and writes.
    """

    what: str
    dtype: str
    extents: tuple[int, ...]
    passes: int
    touched: float
    make: Callable[[torch.device, torch.dtype], Callable[[], object]]


def measure_kernels(
    device: str = "cpu",
    on_progress: Progress | None = None,
    *,
    seconds: Callable[[Callable[[], object]], float] | None = None,
) -> tuple[KernelSample, ...]:
    """Return the times of about a hundred PyTorch kernels; CalibrationError where the device does not exist.

    Args:
        device: "cpu" or "cuda".
        on_progress: Called with the current activity and the fraction that is complete.
        seconds: Measures the time of a kernel; default: alone on the device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise CalibrationError("PyTorch finds no GPU on this machine; measure the CPU (--device CPU)")
    place, found = torch.device(device), []
    kernels = [*_kernels(_ON_GPU if device == "cuda" else _ON_CPU, tuple(_TYPES) if device == "cuda" else ("float32",))]
    for number, kernel in enumerate(kernels):
        if on_progress:
            on_progress(f"timing {kernel.what}", number / len(kernels))
        dtype = _TYPES[kernel.dtype]
        run = kernel.make(place, dtype)
        time_s = seconds(run) if seconds else _seconds(run, place)
        found.append(
            KernelSample(
                what=kernel.what,
                dtype=kernel.dtype,
                extents=kernel.extents,
                flop=2.0 * prod(kernel.extents) * kernel.passes,
                touched_bytes=kernel.touched * dtype.itemsize,
                time_s=time_s,
                predicted_s=time_s,
            )
        )
    return tuple(found)


def _kernels(effort: _Effort, dtypes: Sequence[str]) -> Iterator[_Timed]:
    for dtype in dtypes:
        shapes = [(m, n, k) for m in effort.extents for n in effort.extents for k in effort.depths]
        for m, n, k in shapes:
            if 2.0 * m * n * k <= effort.most_flop:
                yield _product(dtype, 1, m, n, k)
        for copies, extent in effort.copies:
            yield _product(dtype, copies, extent, extent, extent)
        yield from (_convolution(dtype, *shape) for shape in effort.convolutions)
        yield from (
            _convolution(dtype, *shape, groups=shape[1]) for shape in effort.convolutions if shape[1] == shape[2]
        )
        yield from (_attention(dtype, *shape) for shape in effort.attentions)
        for size in effort.arrays:
            yield from _by_bytes(dtype, size)


def _product(dtype: str, copies: int, m: int, n: int, k: int) -> _Timed:
    def make(place: torch.device, kind: torch.dtype) -> Callable[[], object]:
        left, right = _filled((copies, m, k), place, kind), _filled((copies, k, n), place, kind)
        if copies == 1:
            one, other = left[0], right[0]
            return lambda: torch.mm(one, other)
        return lambda: torch.bmm(left, right)

    touched = copies * (m * k + k * n + m * n)
    return _Timed(what=PRODUCTS, dtype=dtype, extents=(m, n, k, copies), passes=1, touched=touched, make=make)


def _convolution(dtype: str, batch: int, read: int, written: int, extent: int, window: int, groups: int = 1) -> _Timed:
    """Forward and backward: a convolution's gradients are kernels of their own."""

    def make(place: torch.device, kind: torch.dtype) -> Callable[[], object]:
        images = _filled((batch, read, extent, extent), place, kind).requires_grad_()
        filters = _filled((written, read // groups, window, window), place, kind).requires_grad_()
        return _there_and_back(
            lambda: functional.conv2d(images, filters, padding=window // 2, groups=groups), images, filters
        )

    points = batch * extent * extent
    touched = 3.0 * (points * (read + written) + read // groups * written * window**2)
    extents = (points, written // groups, read // groups * window**2, groups)
    return _Timed(what=CONVOLUTIONS, dtype=dtype, extents=extents, passes=3, touched=touched, make=make)


def _attention(dtype: str, heads: int, steps: int, size: int) -> _Timed:
    """Forward and backward with recomputed scores: two products, and five."""

    def make(place: torch.device, kind: torch.dtype) -> Callable[[], object]:
        q, k, v = (_filled((1, heads, steps, size), place, kind).requires_grad_() for _ in range(3))
        return _there_and_back(lambda: functional.scaled_dot_product_attention(q, k, v), q, k, v)

    touched = 12.0 * heads * steps * size
    return _Timed(
        what=ATTENTION, dtype=dtype, extents=(steps, steps, size, heads), passes=7, touched=touched, make=make
    )


def _by_bytes(dtype: str, size: int) -> Iterator[_Timed]:
    rows = max(size // 1024, 1)

    def added(place: torch.device, kind: torch.dtype) -> Callable[[], object]:
        left, right = (_filled((rows, 1024), place, kind) for _ in range(2))
        return lambda: left + right

    def normalised(place: torch.device, kind: torch.dtype) -> Callable[[], object]:
        x = _filled((rows, 1024), place, kind)
        return lambda: functional.layer_norm(x, (1024,))

    def shaped(place: torch.device, kind: torch.dtype) -> Callable[[], object]:
        x = _filled((rows, 1024), place, kind)
        return lambda: functional.gelu(x, approximate="tanh")

    for what, number, make in ((MEMORY, 3, added), (NORMS, 2, normalised), (FUNCTIONS, 2, shaped)):
        yield _Timed(what=what, dtype=dtype, extents=(), passes=0, touched=number * rows * 1024.0, make=make)


def _filled(shape: tuple[int, ...], place: torch.device, kind: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=place, generator=torch.Generator(place).manual_seed(0)).to(kind)


def _there_and_back(forward: Callable[[], torch.Tensor], *operands: torch.Tensor) -> Callable[[], object]:
    gradient = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), operands, gradient)


def _seconds(kernel: Callable[[], object], place: torch.device) -> float:
    """Return the median of several times; on a GPU, times between two events of consecutive runs."""
    kernel()
    if place.type == "cuda":
        return _event_seconds(kernel)
    found: list[float] = []
    while len(found) < _FEWEST_RUNS or sum(found) < _TIMED_S:
        begin = time.perf_counter()
        kernel()
        found.append(time.perf_counter() - begin)
    return float(np.median(found))


def _event_seconds(kernel: Callable[[], object]) -> float:
    found: list[float] = []
    for runs in (3, 10, 10, 10):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(runs):
            kernel()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / runs)
    return float(np.median(found[1:]))


# -- fitting

_FIGURES = (
    *("launch_s", PRODUCTS, CONVOLUTIONS, ATTENTION, MEMORY, NORMS, FUNCTIONS),
    *("half_extent", "half_depth", "least", "beyond", "cache_bytes"),
)  # fmt: skip
_START = (5e-6, 0.8, 0.6, 0.5, 0.8, 0.5, 0.3, 16.0, 16.0, 0.05, 1.0, 3e7)
_SMALLEST_ERROR = 0.05
"""Errors below this count squared, larger ones linearly, so that no outlier dominates the fit."""


_LEAST_DAMPING = 1e-6
"""Damping: without it, figures that no sample depends on would make the equations singular."""


def fit_kernels(samples: Sequence[KernelSample], device: Device, source: str) -> Kernels:
    """Return the kernel figures that fit the times of samples best, in the mean of their ratios.

    Args:
        samples: The timed kernels.
        device: Device whose peaks the shares refer to.
        source: Source text for the machine file.

    Raises:
        CalibrationError: A kind of kernel was not timed.
    """
    missing = {*KERNELS} - {sample.what for sample in samples}
    if missing:
        raise CalibrationError(f"no {min(missing)} were timed; expected kernels of every kind")
    dtype = max((sample.dtype for sample in samples), key=lambda own: device.peak_flop_per_s[own])
    measured = np.log([sample.time_s for sample in samples])

    def errors(point: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.log(predicted_seconds(samples, _figures(point, dtype, source), device)) - measured
        return found

    # Damped Gauss-Newton in the logarithms; a step that does not improve the fit is repeated with more damping.
    point, damping = np.log(_START), 1.0
    best = errors(point)
    for _ in range(200):
        weights = 1 / np.maximum(np.abs(best), _SMALLEST_ERROR)
        slopes = np.stack([errors(point + step) - best for step in 1e-4 * np.eye(len(point))], axis=1) / 1e-4
        normal = slopes.T @ (weights[:, None] * slopes)
        step = np.linalg.solve(normal + damping * np.eye(len(point)), -slopes.T @ (weights * best))
        tried = errors(point + np.clip(step, -1, 1))
        if _loss(tried) < _loss(best):
            point, best, damping = point + np.clip(step, -1, 1), tried, max(damping / 3, _LEAST_DAMPING)
        else:
            damping *= 4
        if damping > 1e9:
            break
    found = _figures(point, dtype, source)
    figures: dict[str, Any] = {name: rounded(getattr(found, name)) for name in _FIGURES}
    found = replace(found, **figures)
    times = predicted_seconds(samples, found, device)
    told = tuple(
        replace(sample, time_s=rounded(sample.time_s), predicted_s=rounded(time_s))
        for sample, time_s in zip(samples, times, strict=True)
    )
    return replace(found, error=rounded(float(np.median(np.abs(np.expm1(best))))), samples=told)


def _loss(errors: np.ndarray) -> float:
    size = np.abs(errors)
    return float(np.sum(np.where(size < _SMALLEST_ERROR, size**2 / _SMALLEST_ERROR, 2 * size - _SMALLEST_ERROR)))


def _figures(point: np.ndarray, dtype: str, source: str) -> Kernels:
    figures: dict[str, Any] = {name: float(np.exp(value)) for name, value in zip(_FIGURES, point, strict=True)}
    return Kernels(**figures, dtype=dtype, source=source)


def predicted_seconds(samples: Sequence[KernelSample], figures: Kernels, device: Device) -> np.ndarray:
    """Return the predicted time of each sample, as in the cost model."""
    bytes_per_s = device.memory_bandwidth_bytes_per_s or float("inf")
    found = []
    for sample in samples:
        nothing = np.zeros(1)
        products: tuple[Product, ...] = ()
        if sample.flop:
            rows, columns, depth, copies = (np.array([float(extent)]) for extent in sample.extents)
            count = round(sample.flop / 2 / prod(sample.extents))
            # Passes run one after the other, like a layer's forward and backward pass.
            turns = ((rows, columns, depth), (rows, depth, columns), (depth, columns, rows))
            products = tuple(
                Product(
                    what=sample.what,
                    flop=2 * rows * columns * depth * copies,
                    rows=turn[0],
                    columns=turn[1],
                    depth=turn[2],
                    launches=np.ones(1),
                )
                for turn in (turns[i % 3] if sample.what == CONVOLUTIONS else turns[0] for i in range(count))
            )
        kernels = PassKernels(products=products, other_flop=nothing, what=MEMORY if products else sample.what)
        seconds = pass_seconds(
            kernels,
            figures,
            touched_bytes=np.array([sample.touched_bytes]),
            product_flop_per_s=device.peak_flop_per_s[sample.dtype],
            figures_flop_per_s=device.peak_flop_per_s[figures.dtype],
            flop_per_s=device.peak_flop_per_s["float32"],
            bytes_per_s=bytes_per_s,
        )
        found.append(float(seconds[0]))
    return np.array(found)


def calibrated(
    base: Machine | None, device: str, on_progress: Progress | None = None, name: str = "measured"
) -> Machine:
    """Return a machine with the kernel figures of the local device.

    Args:
        base: Machine whose peaks, memory and links are kept; None: a machine of this device only, whose peaks are the
            best measured rates.
        device: "cpu" or "cuda".
        on_progress: Called for each kernel.
        name: Name of the machine.

    Raises:
        CalibrationError: The device does not exist, or the base has no peak for a measured type.
    """
    samples = measure_kernels(device, on_progress)
    own = _device(samples, device)
    how = f"{len(samples)} kernels of PyTorch {torch.__version__} on {own.name}, {datetime.now(UTC).date().isoformat()}"
    if base is None:
        level = Level(
            name="device",
            num_devices=1,
            latency_s=0.0,
            bandwidth_bytes_per_s=own.memory_bandwidth_bytes_per_s or 1e9,
            source="no links: one device",
        )
        base = Machine(name=name, description=f"one device: {own.name}", device=own, levels=(level,))
    lacking = {sample.dtype for sample in samples} - base.device.peak_flop_per_s.keys()
    if lacking:
        raise CalibrationError(
            f"machine {base.name!r} gives no peak for {min(lacking)}, which was timed; add it to its file"
        )
    source = f"least deviations of {how}; shares are of the peaks in this file"
    return replace(base, name=name, kernels=fit_kernels(samples, base.device, source))


def _device(samples: Sequence[KernelSample], device: str) -> Device:
    rates = {
        dtype: max(s.flop / s.time_s for s in samples if s.dtype == dtype and s.what == PRODUCTS)
        for dtype in dict.fromkeys(sample.dtype for sample in samples)
    }
    largest = max(sample.touched_bytes for sample in samples if sample.what == MEMORY)
    streams = [s for s in samples if s.what == MEMORY and s.touched_bytes >= largest / 4]
    is_gpu = device == "cuda"
    return Device(
        name=torch.cuda.get_device_name() if is_gpu else processor_name(),
        peak_flop_per_s={dtype: rounded(rate) for dtype, rate in rates.items()},
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if is_gpu else memory_share_bytes(1),
        memory_bandwidth_bytes_per_s=rounded(max(s.touched_bytes / s.time_s for s in streams)),
        source="the best rates of the products and of the largest arrays that were timed",
    )
