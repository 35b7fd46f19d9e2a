"""What is measured: chains that compute what they say, and times that grow with the work."""

import itertools
from typing import Any

import pytest

from pase.calibration import child as kernels
from pase.calibration.measured import EFFORTS, Convolution
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.devices import virtual_cpus
from pase.targets.training.options import CPU, GPU

EFFORT = EFFORTS["glance"]
DEVICES = virtual_cpus(2)


def _counted_flop(build: Any) -> float:
    """FLOP of a graph as TensorFlow's own profiler counts them."""
    with tf.Graph().as_default() as graph:
        build()
        options = tf.profiler.ProfileOptionBuilder.float_operation()
        options["output"] = "none"
        return float(tf.profiler.profile(graph, options=options).total_float_ops)


def test_flop_are_those_that_tensorflow_counts() -> None:
    shape = Convolution(batch=2, extent=8, channels=4)
    x, w = (2, 8, 8, 4), (3, 3, 4, 4)
    assert shape.flop == _counted_flop(lambda: tf.nn.conv2d(tf.zeros(x), tf.zeros(w), 1, "SAME"))
    rate = kernels.matmul_rate(DEVICES, 32, "float32", EFFORT)
    assert rate.amount == _counted_flop(lambda: tf.matmul(tf.zeros((32, 32)), tf.zeros((32, 32))))


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_rates_are_those_of_a_processor(dtype: str) -> None:
    shape = Convolution(batch=2, extent=16, channels=16)
    for rate in (
        kernels.matmul_rate(DEVICES, 128, dtype, EFFORT),
        kernels.convolution_rate(DEVICES, shape, dtype, EFFORT),
    ):
        assert 1e7 < rate.per_s < 1e14
    stream = kernels.stream_rate(DEVICES, 2**22, EFFORT)
    assert stream.amount == 3 * 2**22
    assert 1e7 < stream.per_s < 1e13


def test_larger_messages_take_longer() -> None:
    """Also between virtual devices, which hand tensors over without a copy: the receiver writes them."""
    for measure in (
        lambda size: kernels.copy_time(DEVICES, CPU, size, EFFORT),
        lambda size: kernels.all_reduce_time(DEVICES, size, EFFORT),
    ):
        small, large = measure(2**12), measure(2**24)
        assert (small.size_bytes, large.size_bytes) == (2**12, 2**24)
        assert 0 < small.time_s < large.time_s
        # No memory of a CPU takes a terabyte a second.
        assert large.time_s > 2**24 / 1e12


def test_between_gpus_the_message_itself_is_the_copy() -> None:
    """Between virtual devices, such a message is handed over: its time is that of no bytes at all."""
    handed = kernels.copy_time(DEVICES, GPU, 2**24, EFFORT)
    written = kernels.copy_time(DEVICES, CPU, 2**24, EFFORT)
    assert 0 < handed.time_s < written.time_s


def test_all_devices_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of each chain has an operation on every device, and a copy comes from another one."""
    seen: list[list[Any]] = []
    chain = kernels._chain_s

    def watched(devices: Any, start: Any, step: Any, *rest: Any) -> float:
        def noted(tensors: list[Any]) -> list[Any]:
            results = step(tensors)
            seen.append([tensor.device for tensor in results])
            return results  # type: ignore[no-any-return]

        return chain(devices, start, noted, *rest)

    monkeypatch.setattr(kernels, "_chain_s", watched)
    devices = virtual_cpus(3)
    kernels.matmul_rate(devices, 8, "float32", EFFORT)
    kernels.stream_rate(devices, 2**12, EFFORT)
    kernels.copy_time(devices, CPU, 2**12, EFFORT)
    kernels.all_reduce_time(devices, 2**14, EFFORT)
    assert len(seen) >= 8
    assert all(step == list(devices.names) for step in seen)


def test_noise_gives_no_time_below_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the long chain of five seems to take 4 s, and the short one of one 5 s."""
    clock = itertools.cycle([5.0, 4.0])
    monkeypatch.setattr(kernels, "_run_s", lambda _session, _operation: next(clock))
    monkeypatch.setattr(kernels, "_length", lambda _wanted: 4)
    assert kernels.copy_time(DEVICES, CPU, 2**10, EFFORT).time_s == 4 / 5
    clock = itertools.cycle([1.0, 4.0])
    assert kernels.copy_time(DEVICES, CPU, 2**10, EFFORT).time_s == 3 / 4
