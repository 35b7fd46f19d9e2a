"""Samples as a machine with known figures would give them."""

from pase.calibration.measured import Rate, Samples, TransferSample
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
