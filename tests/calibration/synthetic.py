"""Samples as a machine with known figures would give them."""

from collections.abc import Iterator

from pase.calibration.measured import Rate, Samples, TransferSample
from pase.machine import Kernels, KernelSample
from pase.targets.training.options import CPU

LATENCY_S, BANDWIDTH_BYTES_PER_S = 5e-6, 4e9


def synthetic(*, num_devices: int = 2, kind: str = CPU) -> Samples:
    """α = 5 µs, 1/β = 4 GB/s; all-reduces take twice the ring's time."""
    sizes = [2**i for i in range(10, 25, 2)]
    beta = 1 / BANDWIDTH_BYTES_PER_S
    steps = 2 * (num_devices - 1)
    return Samples(
        kind=kind,
        device_name="made up",
        num_devices=num_devices,
        memory_bytes=2**33,
        tensorflow_version="2.21.0",
        matmul={
            "float32": (Rate(shape="64 × 64", amount=1e6, time_s=1e-4), Rate(shape="9 × 9", amount=3e6, time_s=1e-4)),
            "float64": (Rate(shape="64 × 64", amount=1e6, time_s=2e-4),),
        },
        convolution={
            "float32": (Rate(shape="3 × 3", amount=1e6, time_s=2e-4),),
            "float64": (Rate(shape="3 × 3", amount=1e6, time_s=1e-4),),
        },
        stream=(Rate(shape="1 MiB", amount=3e6, time_s=1e-4), Rate(shape="2 MiB", amount=3e6, time_s=2e-4)),
        copies=tuple(TransferSample(size_bytes=size, time_s=LATENCY_S + size * beta) for size in sizes),
        all_reduces=tuple(
            TransferSample(size_bytes=size, time_s=2 * steps * (LATENCY_S + size / num_devices * beta))
            for size in (2**22, 2**24)
        ),
    )


TRUE = Kernels(
    dtype="float32", launch_s=3e-6, products=0.9, convolutions=0.7, attention=0.5, half_extent=20.0, half_depth=40.0,
    least=0.02, memory=0.8, norms=0.5, functions=0.2, source="a test",
)  # fmt: skip


def made() -> Iterator[KernelSample]:
    """Times as docs/kernels.md has them, of products that take longer to compute than to touch."""

    def seconds(m: float, n: float, k: float, share: float) -> float:
        filled = m / (m + 20) * n / (n + 20) * (k / (k + 40) if share != TRUE.attention else 1.0)
        return 2 * m * n * k / (1e11 * max(share * filled, 0.02)) + 3e-6

    def sample(what: str, extents: tuple[int, ...], flop: float, touched: float, time_s: float) -> KernelSample:
        return KernelSample(
            what=what,
            dtype="float32",
            extents=extents,
            flop=flop,
            touched_bytes=touched,
            time_s=time_s,
            predicted_s=1.0,
        )

    for m in (16, 64, 512):
        for n in (32, 256):
            for k in (16, 128, 1024):
                yield sample("products", (m, n, k, 1), 2.0 * m * n * k, 0.0, seconds(m, n, k, 0.9))
    for m, n, k in ((400, 64, 288), (3000, 16, 27), (100, 256, 512)):
        turns = ((m, n, k), (m, k, n), (k, n, m))
        yield sample("convolutions", (m, n, k, 1), 6.0 * m * n * k, 0.0, sum(seconds(*turn, 0.7) for turn in turns))
    for s, d in ((64, 32), (512, 64)):
        yield sample("attention", (s, s, d, 1), 14.0 * s * s * d, 0.0, 7 * seconds(s, s, d, 0.5))
    for what, share in (("memory", 0.8), ("norms", 0.5), ("functions", 0.2)):
        for size in (1e4, 1e6, 1e8):
            yield sample(what, (), 0.0, size, size / (share * 1e10) + 3e-6)
