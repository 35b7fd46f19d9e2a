"""`DeviceChoice`: the kind of devices that a command line asks for."""

from dataclasses import dataclass

from pase.errors import RuntimeFailure

CPU, GPU = "CPU", "GPU"

KINDS = {CPU: "virtual CPU devices", GPU: "GPUs"}
"""The kinds of devices, and what they are called."""

DEFAULT_GPU_MEMORY_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Virtual CPUs or GPUs.

    virtual: put several devices on a GPU where there are too few, memory_mib MiB for each. Raises RuntimeFailure where
    that does not fit together.
    """

    kind: str = CPU
    virtual: bool = False
    memory_mib: int = DEFAULT_GPU_MEMORY_MIB

    def __post_init__(self) -> None:
        if self.virtual and self.kind == CPU:
            raise RuntimeFailure(
                "--virtual is of GPUs, and CPU devices are virtual as they are; leave it out, or add --device GPU"
            )
        if self.memory_mib < 1:
            raise RuntimeFailure(f"a virtual GPU is to have {self.memory_mib} MiB of memory; give 1 or more")

    @property
    def text(self) -> str:
        """What the devices are called."""
        return KINDS[self.kind]

    def command_line(self) -> list[str]:
        """Return the arguments of a program that choose the same."""
        chosen = [f"--device={self.kind}", f"--gpu-memory={self.memory_mib}"]
        return [*chosen, "--virtual"] if self.virtual else chosen
