"""What is run to measure a machine: chains of one operation on every device, all devices at once.

A session's own overhead is longer than a small message. So every chain is run in two lengths, and the difference
counts. The fastest of several runs counts: whatever else the machine does makes runs slower, never faster.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pase.calibration.samples import Convolution, Effort, Rate, TransferSample, binary
from pase.sharding.layouts import DeviceMesh
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.traffic import Traffic
from pase.targets.mesh_tensorflow.runtime.devices import Devices
from pase.targets.mesh_tensorflow.runtime.options import CPU, GPU

DTYPES = ("float32", "float64")

_CHAIN_FLOP, _CHAIN_BYTES = 4e8, 64 * 2**20
"""A chain is about as long as this takes, within these bounds."""
_SHORTEST, _LONGEST = 1, 40

Step = Callable[[list[Any]], list[Any]]
"""Takes a tensor of each device and returns the next one of each."""


def matmul_rate(devices: Devices, extent: int, dtype: str, effort: Effort) -> Rate:
    """Return the FLOP/s of a device that multiplies square matrices."""

    def start(device: int) -> Any:
        return _random([extent, extent], dtype, seed=device)

    def step(tensors: list[Any]) -> list[Any]:
        # Divided by the root of the extent the product is as large as the factors.
        return _on_each(devices, lambda x, w: tf.matmul(x, w), tensors, weights)

    with tf.Graph().as_default():
        weights = _made(devices, lambda device: _random([extent, extent], dtype, seed=device) * extent**-0.5)
        flop = 2.0 * extent**3
        seconds = _chain_s(devices, start, step, _length(_CHAIN_FLOP / flop), effort, weights)
    return Rate(shape=f"{extent} × {extent}", amount=flop, time_s=seconds)


def convolution_rate(devices: Devices, shape: Convolution, dtype: str, effort: Effort) -> Rate:
    """Return the FLOP/s of a device that convolves images."""

    def start(device: int) -> Any:
        return _random([shape.batch, shape.extent, shape.extent, shape.channels], dtype, seed=device)

    def step(tensors: list[Any]) -> list[Any]:
        return _on_each(devices, lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), tensors, weights)

    with tf.Graph().as_default():
        scale = (9 * shape.channels) ** -0.5
        weights = _made(devices, lambda device: _random([3, 3, *[shape.channels] * 2], dtype, seed=device) * scale)
        seconds = _chain_s(devices, start, step, _length(_CHAIN_FLOP / shape.flop), effort, weights)
    return Rate(shape=shape.shape, amount=shape.flop, time_s=seconds)


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
    """Return how long each device takes to send a message to the next one, all at once."""
    receive = RECEIVE[kind]

    def start(device: int) -> Any:
        return _random([size_bytes // 4], "float32", seed=device)

    def step(tensors: list[Any]) -> list[Any]:
        return _on_each(devices, receive, [tensors[-1], *tensors[:-1]])

    with tf.Graph().as_default():
        seconds = _chain_s(devices, start, step, _length(_CHAIN_BYTES / size_bytes), effort)
    return TransferSample(size_bytes=size_bytes, time_s=seconds)


def all_reduce_time(devices: Devices, size_bytes: int, effort: Effort) -> TransferSample:
    """Return how long the all-reduce of emitted programs takes, for vectors of so many bytes."""
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
        # Shorter than other chains: the numbers grow by the number of devices with each sum.
        length = min(_length(_CHAIN_BYTES / size_bytes), 8)
        seconds = _chain_s(devices, start, step, length, effort)
    return TransferSample(size_bytes=size_bytes, time_s=seconds)


def _written_anew(tensor: Any) -> Any:
    return tf.raw_ops.DeepCopy(x=tensor)


RECEIVE: Mapping[str, Callable[[Any], Any]] = MappingProxyType({CPU: _written_anew, GPU: tf.identity})
"""Virtual CPUs hand a tensor over without copying it: the receiver then writes it once, as it does when it puts parts
together. Between GPUs the message itself is the copy."""


def _chain_s(
    devices: Devices,
    start: Callable[[int], Any],
    step: Step,
    length: int,
    effort: Effort,
    weights: Sequence[Any] = (),
) -> float:
    """Return the seconds of one step, from chains of one and of several of them; builds in the default graph."""
    # Variables: what a run begins with is there, and not made anew.
    first = _made(devices, start)
    tensors, ends = [variable.read_value() for variable in first], []
    for _ in range(length + 1):
        tensors = step(tensors)
        ends.append(tf.group(*[tensor.op for tensor in tensors]))
    short, long = ends[0], ends[-1]
    with tf.Session(target=devices.target, config=devices.config()) as session:
        session.run([variable.initializer for variable in (*first, *weights)])
        # The first runs allocate, and choose among algorithms.
        session.run(short)
        session.run(long)
        short_s: list[float] = []
        long_s: list[float] = []
        begin = time.perf_counter()
        while len(long_s) < effort.num_runs or time.perf_counter() - begin < effort.time_s:
            short_s.append(_run_s(session, short))
            long_s.append(_run_s(session, long))
    difference_s = min(long_s) - min(short_s)
    # Where noise made the longer chain the faster one, its own time bounds that of a step, the overhead included.
    return difference_s / length if difference_s > 0 else min(long_s) / (length + 1)


def _run_s(session: Any, operation: Any) -> float:
    begin = time.perf_counter()
    session.run(operation)
    return time.perf_counter() - begin


def _length(wanted: float) -> int:
    return int(min(max(wanted, _SHORTEST), _LONGEST))


def _made(devices: Devices, make: Callable[[int], Any]) -> list[Any]:
    """Return a variable on each device with the value that a function of the device's number makes."""
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
