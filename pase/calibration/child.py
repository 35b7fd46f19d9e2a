"""The measuring process: loads TensorFlow, and reports progress and finally the samples as JSON lines.

It runs chains of one operation on all devices at the same time. Because the overhead of a session is longer than a
small message, every chain is run in two lengths, and the difference counts. The fastest of several runs counts, as
other load on the machine only makes runs slower.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import click

from pase.calibration.measured import (
    EFFORTS,
    Convolution,
    Effort,
    Rate,
    Samples,
    TransferSample,
    memory_share_bytes,
    processor_name,
)
from pase.common.options import ProgramCommand, option
from pase.common.words import binary
from pase.errors import PaseError
from pase.sharding.layouts import DeviceMesh
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh, Traffic
from pase.targets.mesh_tensorflow.runtime.devices import Devices, local_devices, physical_gpus
from pase.targets.training.options import CPU, GPU, DeviceChoice, device_choice, device_options

MOST_CPU_DEVICES = 8
"""Maximum number of virtual devices, unless more are requested."""


@click.command(cls=ProgramCommand)
@option("--devices", type=int)
@device_options
@option("--effort", type=click.Choice(tuple(EFFORTS)), required=True)
@option("--json", is_flag=True)
def _command(**values: Any) -> None:
    """Declare the arguments of the process that measures."""


def main() -> None:
    """Measure as the arguments specify; exit with status 1 and one line on standard error if it fails."""
    values = _command.read()
    try:
        samples = _measured(device_choice(values), values["devices"], EFFORTS[values["effort"]])
    except PaseError as error:
        sys.exit(f"error: {error}")
    _report({"event": "measured", "samples": asdict(samples)})


def _measured(choice: DeviceChoice, num_devices: int | None, effort: Effort) -> Samples:
    found = len(physical_gpus()) if choice.kind == GPU else min(len(os.sched_getaffinity(0)), MOST_CPU_DEVICES)
    count = num_devices or max(2, found)
    devices = local_devices(choice, count)
    count_of_steps = 5 + len(effort.copy_bytes) + len(effort.all_reduce_bytes)
    fractions = (i / count_of_steps for i in range(count_of_steps))

    def report_start(what: str) -> None:
        _report({"event": "progress", "what": what, "fraction": next(fractions)})

    matmul: dict[str, tuple[Rate, ...]] = {}
    convolution: dict[str, tuple[Rate, ...]] = {}
    for dtype in DTYPES:
        report_start(f"multiplying matrices of {dtype}")
        matmul[dtype] = tuple(matmul_rate(devices, n, dtype, effort) for n in effort.matmul_extents)
        report_start(f"convolving images of {dtype}")
        convolution[dtype] = tuple(convolution_rate(devices, c, dtype, effort) for c in effort.convolutions)
    report_start("reading and writing memory")
    stream = tuple(stream_rate(devices, size, effort) for size in effort.stream_bytes)
    copies: list[TransferSample] = []
    for size in effort.copy_bytes:
        report_start("copying between devices")
        copies.append(copy_time(devices, choice.kind, size, effort))
    all_reduces: list[TransferSample] = []
    for size in effort.all_reduce_bytes:
        report_start("adding up over devices")
        all_reduces.append(all_reduce_time(devices, size, effort))
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


def _report(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _described_cpu(_devices: Any, count: int) -> tuple[str, int]:
    """Return the name of a virtual device and its share of the memory that this process may use."""
    return f"{processor_name()} (one of {count} virtual devices)", memory_share_bytes(count)


def _described_gpu(devices: Any, _count: int) -> tuple[str, int]:
    found = tf.config.experimental.list_physical_devices(GPU)
    details = tf.config.experimental.get_device_details(found[devices.visible_gpus[0]])
    with tf.Graph().as_default(), tf.Session(config=devices.config()) as session:
        limits = [device.memory_limit_bytes for device in session.list_devices() if device.device_type == GPU]
    return details.get("device_name", "GPU"), int(min(limits))


_DESCRIBED: Mapping[str, Callable[[Any, int], tuple[str, int]]] = MappingProxyType(
    {CPU: _described_cpu, GPU: _described_gpu}
)


DTYPES = ("float32", "float64")

_CHAIN_FLOP, _CHAIN_BYTES = 4e8, 64 * 2**20
"""Approximate size of a chain of operations, in FLOP and in bytes."""
_SHORTEST, _LONGEST = 1, 40

Step = Callable[[list[Any]], list[Any]]
"""Maps the tensors of all devices to the next ones."""


def matmul_rate(devices: Devices, extent: int, dtype: str, effort: Effort) -> Rate:
    """Return the FLOP/s of a device for products of square matrices."""
    shape, told = [extent, extent], f"{extent} × {extent}"
    # Scaled by the root of the extent, the product has the magnitude of the factors.
    return _product_rate(devices, (shape, shape), tf.matmul, extent**-0.5, 2.0 * extent**3, told, dtype, effort)


def convolution_rate(devices: Devices, shape: Convolution, dtype: str, effort: Effort) -> Rate:
    """Return the FLOP/s of a device for image convolutions."""
    images, filters = [shape.batch, *[shape.extent] * 2, shape.channels], [3, 3, *[shape.channels] * 2]

    def convolved(x: Any, w: Any) -> Any:
        return tf.nn.conv2d(x, w, 1, "SAME")

    scale = (9 * shape.channels) ** -0.5
    return _product_rate(devices, (images, filters), convolved, scale, shape.flop, shape.shape, dtype, effort)


def _product_rate(
    devices: Devices,
    shapes: tuple[Sequence[int], Sequence[int]],
    product: Callable[[Any, Any], Any],
    scale: float,
    flop: float,
    shape_text: str,
    dtype: str,
    effort: Effort,
) -> Rate:
    """Return the rate of products of a tensor with random weights times `scale`; `told` describes the shape."""

    def start(device: int) -> Any:
        return _random(shapes[0], dtype, seed=device)

    def step(tensors: list[Any]) -> list[Any]:
        return _on_each(devices, product, tensors, weights)

    with tf.Graph().as_default():
        weights = _made(devices, lambda device: _random(shapes[1], dtype, seed=device) * scale)
        seconds = _chain_s(devices, start, step, _length(_CHAIN_FLOP / flop), effort, weights)
    return Rate(shape=shape_text, amount=flop, time_s=seconds)


def stream_rate(devices: Devices, size_bytes: int, effort: Effort) -> Rate:
    """Return the bytes/s at which a device adds one array to another: two are read and one is written."""

    def start(device: int) -> Any:
        return _random([size_bytes // 4], "float32", seed=device)

    def step(tensors: list[Any]) -> list[Any]:
        return _on_each(devices, lambda x, y: x + y, tensors, others)

    with tf.Graph().as_default():
        others = _made(devices, start)
        seconds = _chain_s(devices, start, step, _length(4 * _CHAIN_BYTES / size_bytes), effort, others)
    return Rate(shape=binary(size_bytes), amount=3.0 * size_bytes, time_s=seconds)


def copy_time(devices: Devices, kind: str, size_bytes: int, effort: Effort) -> TransferSample:
    """Return how long each device takes to send a message to the next one, all at the same time."""
    receive = RECEIVE[kind]

    def start(device: int) -> Any:
        return _random([size_bytes // 4], "float32", seed=device)

    def step(tensors: list[Any]) -> list[Any]:
        return _on_each(devices, receive, [tensors[-1], *tensors[:-1]])

    with tf.Graph().as_default():
        seconds = _chain_s(devices, start, step, _length(_CHAIN_BYTES / size_bytes), effort)
    return TransferSample(size_bytes=size_bytes, time_s=seconds)


def all_reduce_time(devices: Devices, size_bytes: int, effort: Effort) -> TransferSample:
    """Return how long the all-reduce of emitted programs takes, for vectors of this size."""
    count = len(devices.names)

    def start(device: int) -> Any:
        return _random([size_bytes // 4], "float32", seed=device) * 1e-6

    def step(tensors: list[Any]) -> list[Any]:
        reduced = implementation.allreduce(implementation.LaidOutTensor(tensors), [0], "SUM")
        return list(reduced.tensor_list)

    with tf.Graph().as_default():
        grid = DeviceMesh((("devices", count),), tuple(range(count)))
        mesh = LayerMesh(mtf.Graph(), name="all", layer="all", devices=grid, device_name=devices.name)
        implementation = mesh.implementation(Traffic())
        # Shorter than other chains, as each all-reduce multiplies the numbers by the number of devices.
        length = min(_length(_CHAIN_BYTES / size_bytes), 8)
        seconds = _chain_s(devices, start, step, length, effort)
    return TransferSample(size_bytes=size_bytes, time_s=seconds)


RECEIVE: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {CPU: lambda tensor: tf.raw_ops.DeepCopy(x=tensor), GPU: tf.identity}
)
"""Additional writes on the receiving side. Virtual CPUs pass a tensor without copying it; the receiver then writes it
once, as when it assembles parts. Between GPUs the message itself is the copy."""


def _chain_s(
    devices: Devices, start: Callable[[int], Any], step: Step, length: int, effort: Effort, weights: Sequence[Any] = ()
) -> float:
    """Return the seconds of one step, from chains of one and of several steps; builds in the default graph."""
    # Variables, so that the initial values exist before a run and are not generated in it.
    first = _made(devices, start)
    tensors, ends = [variable.read_value() for variable in first], []
    for _ in range(length + 1):
        tensors = step(tensors)
        ends.append(tf.group(*[tensor.op for tensor in tensors]))
    short, long = ends[0], ends[-1]
    with tf.Session(config=devices.config()) as session:
        session.run([variable.initializer for variable in (*first, *weights)])
        # The first runs allocate memory and select algorithms.
        session.run(short)
        session.run(long)
        short_s: list[float] = []
        long_s: list[float] = []
        begin = time.perf_counter()
        while len(long_s) < effort.num_runs or time.perf_counter() - begin < effort.time_s:
            short_s.append(_run_s(session, short))
            long_s.append(_run_s(session, long))
    difference_s = min(long_s) - min(short_s)
    # If noise made the longer chain faster, its time, including the overhead, is an upper bound for its steps.
    return difference_s / length if difference_s > 0 else min(long_s) / (length + 1)


def _run_s(session: Any, operation: Any) -> float:
    begin = time.perf_counter()
    session.run(operation)
    return time.perf_counter() - begin


def _length(wanted: float) -> int:
    return int(min(max(wanted, _SHORTEST), _LONGEST))


def _made(devices: Devices, make: Callable[[int], Any]) -> list[Any]:
    """Return a variable on each device, initialised by a function of the device's number."""
    variables = []
    for device, name in enumerate(devices.names):
        with tf.device(name):
            variables.append(tf.Variable(make(device), use_resource=True, trainable=False))
    return variables


def _on_each(devices: Devices, operation: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    results = []
    for name, *inputs in zip(devices.names, *columns, strict=True):
        with tf.device(name):
            results.append(operation(*inputs))
    return results


def _random(shape: Sequence[int], dtype: str, *, seed: int) -> Any:
    return tf.random.stateless_normal(list(shape), seed=[seed, 1], dtype=tf.as_dtype(dtype))
