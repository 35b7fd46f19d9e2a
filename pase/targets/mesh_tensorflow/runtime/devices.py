"""`Devices`: which of TensorFlow's devices the numbered devices of a program are, and the session that they need.

Two kinds, both of this process: virtual CPUs, the first one being the host, and GPUs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pase.errors import ProgramError
from pase.sharding.layouts import HOST
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.training.options import CPU, DEFAULT_GPU_MEMORY_MIB, GPU, DeviceChoice

HOST_PLACE = (CPU, 0)
"""Where the host always is: kind and number."""

_NAME = re.compile(r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/device:(CPU|GPU):(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Where a program runs.

    names: [devices] TensorFlow's. host: the device that feeds data and keeps the masters. num_cpus: CPU devices of the
    process. visible_gpus: numbers of the physical GPUs that it uses. virtual_mib: [visible GPUs][virtual GPUs on it]
    memory, empty where a GPU is a device.
    """

    names: tuple[str, ...]
    host: str = "/device:CPU:0"
    num_cpus: int = 1
    visible_gpus: tuple[int, ...] = ()
    virtual_mib: tuple[tuple[int, ...], ...] = ()

    def name(self, device: int) -> str:
        """Return TensorFlow's name of a device, or of the host."""
        return self.host if device == HOST else self.names[device]

    @property
    def numbers(self) -> Mapping[tuple[str, int], int]:
        """The number of the device at each place; the host's too."""
        places = {place(name): number for number, name in enumerate(self.names)}
        return {found: number for found, number in places.items() if found} | {HOST_PLACE: HOST}

    def config(self) -> Any:
        """Return the configuration of a session with these devices."""
        config = tf.ConfigProto(
            device_count={CPU: self.num_cpus, GPU: len(self.visible_gpus)},
            # Some operations exist for the CPU alone; TensorFlow then chooses the host. On CPUs none is to be moved.
            allow_soft_placement=bool(self.visible_gpus),
        )
        if self.visible_gpus:
            config.gpu_options.visible_device_list = ",".join(map(str, self.visible_gpus))
            config.gpu_options.allow_growth = not self.virtual_mib
            for limits in self.virtual_mib:
                config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=limits)
        # The graph optimiser takes longer than it saves, and would rename what the measurement counts.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        return config


def virtual_cpu(device: int) -> str:
    """Return TensorFlow's name of a virtual CPU of this process; the first one is the host."""
    return "/device:CPU:0" if device == HOST else f"/device:CPU:{device + 1}"


def virtual_cpus(num_devices: int) -> Devices:
    """Return virtual CPUs of this process, one more than devices: traffic with the host is none between devices."""
    return Devices(names=tuple(map(virtual_cpu, range(num_devices))), num_cpus=num_devices + 1)


def gpus(
    num_devices: int,
    physical: Sequence[int],
    *,
    virtual: bool = False,
    memory_mib: int = DEFAULT_GPU_MEMORY_MIB,
    first: int = 0,
) -> Devices:
    """Return GPUs of this process; the host is its CPU.

    physical: numbers of those that there are. first: of those to use. virtual: several devices on each GPU where there
    are fewer than devices, memory_mib MiB for each. Raises ProgramError where there are too few, or none at all.
    """
    if not physical:
        raise ProgramError(
            f"{num_devices} GPUs are needed and TensorFlow found none; leave out --device to use virtual CPUs, or "
            "install a TensorFlow and a driver with which tf.config.list_physical_devices('GPU') shows them"
        )
    names = tuple(f"/device:GPU:{number}" for number in range(num_devices))
    chosen = tuple(physical[first : first + num_devices])
    if len(chosen) == num_devices:
        return Devices(names=names, visible_gpus=chosen)
    if not virtual:
        raise ProgramError(
            f"{first + num_devices} GPUs are needed and TensorFlow found {len(physical)}; search a plan for "
            f"{len(physical)} devices, or put several devices on a GPU with --virtual"
        )
    # Consecutive devices share a GPU, as they would share a node.
    # Of several processes that train replicas, those before may have used the GPUs up.
    chosen = chosen or (physical[first % len(physical)],)
    on_each = [num_devices // len(chosen) + (number < num_devices % len(chosen)) for number in range(len(chosen))]
    return Devices(names=names, visible_gpus=chosen, virtual_mib=tuple((memory_mib,) * count for count in on_each))


def place(name: str) -> tuple[str, int] | None:
    """Return the kind and the number in TensorFlow's name of a device, None where it has none."""
    found = _NAME.fullmatch(name)
    return (found[1].upper(), int(found[2])) if found else None


def local_devices(choice: DeviceChoice, num_devices: int, process: int = 0) -> Devices:
    """Return the devices of this process; process: its number among those that share this machine's GPUs."""
    if choice.kind == CPU:
        return virtual_cpus(num_devices)
    first = process * num_devices
    return gpus(num_devices, physical_gpus(), virtual=choice.virtual, memory_mib=choice.memory_mib, first=first)


def physical_gpus() -> tuple[int, ...]:
    """Return the numbers of the GPUs that TensorFlow finds, without starting them."""
    return tuple(range(len(tf.config.experimental.list_physical_devices(GPU))))
