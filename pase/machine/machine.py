"""`Machine`: devices and the levels that join them, each figure with its source."""

from dataclasses import dataclass

from pase.errors import MachineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    peak_flop_per_s: by element type. memory_bytes: its own memory. source: where the figures are from.
    """

    name: str
    peak_flop_per_s: dict[str, float]
    memory_bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A group of devices that one kind of link joins, counted from the inside out.

    num_devices: devices in one group; 0 for a level without bound. latency_s: α, seconds for a message.
    bandwidth_bytes_per_s: 1/β, bytes a second for each link.
    """

    name: str
    num_devices: int
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster: identical devices, levels from the inside out."""

    name: str
    description: str
    device: Device
    levels: tuple[Level, ...]

    def peak_flop_per_s(self, dtype: str = "float32") -> float:
        """Return the peak FLOP/s of one device for an element type; MachineError where it is not given."""
        if dtype not in self.device.peak_flop_per_s:
            known = ", ".join(sorted(self.device.peak_flop_per_s))
            raise MachineError(f"machine {self.name!r} has no peak FLOP/s for {dtype}; it is given for {known}")
        return self.device.peak_flop_per_s[dtype]

    def levels_spanned(self, num_devices: int) -> tuple[Level, ...]:
        """Return the levels that a group of the first `num_devices` devices uses, the innermost first."""
        for i, level in enumerate(self.levels):
            if level.num_devices == 0 or num_devices <= level.num_devices:
                return self.levels[: i + 1]
        outermost = self.levels[-1]
        raise MachineError(
            f"machine {self.name!r} has {outermost.num_devices} devices at its outermost level {outermost.name!r}; "
            f"{num_devices} were asked for"
        )

    def flop_per_byte(self, num_devices: int, dtype: str = "float32") -> float:
        """Return r of Eq. 1: peak FLOP/s of a device ÷ bytes/s of the slowest link that the devices use."""
        slowest = min(level.bandwidth_bytes_per_s for level in self.levels_spanned(num_devices))
        return self.peak_flop_per_s(dtype) / slowest
