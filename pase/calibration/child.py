"""The process that measures: it loads TensorFlow, reports progress and at last the samples as lines of JSON."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from pase.calibration.samples import EFFORTS, Effort, Rate, Samples, TransferSample
from pase.errors import PaseError
from pase.targets.mesh_tensorflow.runtime.options import (
    CPU,
    GPU,
    DeviceChoice,
    ProgramCommand,
    device_choice,
    device_options,
    option,
)

MOST_CPU_DEVICES = 8
"""So many virtual devices are measured at most, unless more are asked for."""

_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


@click.command(cls=ProgramCommand)
@option("--devices", type=int)
@device_options
@option("--effort", type=click.Choice(tuple(EFFORTS)), required=True)
@option("--json", is_flag=True)
def _command(**values: Any) -> None:
    """Declare the arguments of the process that measures."""


def main() -> None:
    """Measure as the arguments say; end with status 1 and one line on standard error where that is not possible."""
    values = _command.read()
    try:
        samples = _measured(device_choice(values), values["devices"], EFFORTS[values["effort"]])
    except PaseError as error:
        sys.exit(f"error: {error}")
    _report({"event": "measured", "samples": samples.document()})


def _measured(choice: DeviceChoice, num_devices: int | None, effort: Effort) -> Samples:
    from pase.calibration import kernels
    from pase.targets.mesh_tensorflow.primitives.compat import tf
    from pase.targets.mesh_tensorflow.runtime.devices import local_devices

    count = num_devices or max(2, _DEFAULT_COUNT[choice.kind]())
    devices = local_devices(choice, count)
    fractions = _fractions(effort)

    def told(what: str) -> None:
        _report({"event": "progress", "what": what, "fraction": next(fractions)})

    matmul: dict[str, tuple[Rate, ...]] = {}
    convolution: dict[str, tuple[Rate, ...]] = {}
    for dtype in kernels.DTYPES:
        told(f"multiplying matrices of {dtype}")
        matmul[dtype] = tuple(kernels.matmul_rate(devices, n, dtype, effort) for n in effort.matmul_extents)
        told(f"convolving images of {dtype}")
        convolution[dtype] = tuple(kernels.convolution_rate(devices, c, dtype, effort) for c in effort.convolutions)
    told("reading and writing memory")
    stream = tuple(kernels.stream_rate(devices, size, effort) for size in effort.stream_bytes)
    copies: list[TransferSample] = []
    for size in effort.copy_bytes:
        told("copying between devices")
        copies.append(kernels.copy_time(devices, choice.kind, size, effort))
    all_reduces: list[TransferSample] = []
    for size in effort.all_reduce_bytes:
        told("adding up over devices")
        all_reduces.append(kernels.all_reduce_time(devices, size, effort))
    name, memory_bytes = _DESCRIBED[choice.kind](devices, count)
    return Samples(
        kind=choice.kind,
        device_name=name,
        num_devices=count,
        memory_bytes=memory_bytes,
        tensorflow_version=tf.__version__,
        matmul=matmul,
        convolution=convolution,
        stream=stream,
        copies=tuple(copies),
        all_reduces=tuple(all_reduces),
    )


def _fractions(effort: Effort) -> Iterator[float]:
    """Yield how much is done before each thing that is told of."""
    count = 5 + len(effort.copy_bytes) + len(effort.all_reduce_bytes)
    return (i / count for i in range(count))


def _report(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _num_cores() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_CPU_DEVICES)


def _num_gpus() -> int:
    from pase.targets.mesh_tensorflow.runtime.devices import physical_gpus

    return len(physical_gpus())


_DEFAULT_COUNT: Mapping[str, Callable[[], int]] = MappingProxyType({CPU: _num_cores, GPU: _num_gpus})


def _described_cpu(_devices: Any, count: int) -> tuple[str, int]:
    """Return what a virtual device is called and its share of the memory that this process may use."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # there is no limit
        memory_bytes = min(memory_bytes, int(_MEMORY_LIMIT.read_text(encoding="ascii")))
    return f"{_processor()} (one of {count} virtual devices)", max(memory_bytes // count, 1)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "CPU")


def _described_gpu(devices: Any, _count: int) -> tuple[str, int]:
    from pase.targets.mesh_tensorflow.primitives.compat import tf

    found = tf.config.experimental.list_physical_devices(GPU)
    details = tf.config.experimental.get_device_details(found[devices.visible_gpus[0]])
    with tf.Graph().as_default(), tf.Session(config=devices.config()) as session:
        limits = [device.memory_limit_bytes for device in session.list_devices() if device.device_type == GPU]
    return details.get("device_name", "GPU"), int(min(limits))


_DESCRIBED: Mapping[str, Callable[[Any, int], tuple[str, int]]] = MappingProxyType(
    {CPU: _described_cpu, GPU: _described_gpu}
)
