"""Machines with round figures."""

from pase.machine import Device, Level, Machine


def machine(
    *levels: tuple[int, float, float], flop_per_s: float = 1e9, memory_bandwidth_bytes_per_s: float | None = None
) -> Machine:
    """levels: (devices of a group, α, bytes/s), the innermost first."""
    return Machine(
        name="round",
        description="made up",
        device=Device(
            name="gpu",
            peak_flop_per_s={"float32": flop_per_s},
            memory_bytes=2**30,
            memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
            source="made up",
        ),
        levels=tuple(
            Level(
                name=f"level{number}",
                num_devices=devices,
                latency_s=latency_s,
                bandwidth_bytes_per_s=bandwidth,
                source="made up",
            )
            for number, (devices, latency_s, bandwidth) in enumerate(levels)
        ),
    )
