"""`MeasuredMachine`: the machine that samples make, how well it fits them, and what each figure's source says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType

from pase.calibration.effort import binary
from pase.calibration.fit import LinkFit, fit_link
from pase.calibration.samples import Message, Rate, Samples
from pase.costs.collectives import Link, all_reduce
from pase.errors import CalibrationError
from pase.machine import Device, Level, Machine
from pase.targets.mesh_tensorflow.runtime.device_choice import CPU, GPU, KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An all-reduce as it was measured and as its closed form predicts it from the link's α and β."""

    size_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def relative_error(self) -> float:
        """Of the prediction: above 0 where it is too slow."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """A machine from measurements. fit: of copies. all_reduces: from small to large."""

    machine: Machine
    fit: LinkFit
    all_reduces: tuple[Prediction, ...]

    @property
    def all_reduce_error(self) -> float:
        """Root of the mean square of the predictions' relative errors."""
        return root_mean_square(self.all_reduces)


def measured_machine(samples: Samples, *, date: str, name: str = "measured") -> MeasuredMachine:
    """Return the machine that samples make; CalibrationError where they do not suffice.

    The peak of an element type is the best rate of all shapes of both kernels: costs count FLOP at this rate, whatever
    the layer. Figures have four digits. date: of the measurement, for the sources.
    """
    if not samples.all_reduces or not samples.stream or "float32" not in samples.matmul:
        raise CalibrationError("no matrix product, memory or all-reduce was measured; measure again")
    fit = fit_link([copy.size_bytes for copy in samples.copies], [copy.time_s for copy in samples.copies])
    predictions = _predictions(samples, fit)
    how = (
        f"measured on {date} with TensorFlow {samples.tensorflow_version}, "
        f"with all {samples.num_devices} devices at work at once"
    )
    level = Level(
        name="machine",
        num_devices=samples.num_devices,
        latency_s=_rounded(fit.latency_s),
        bandwidth_bytes_per_s=_rounded(fit.bandwidth_bytes_per_s),
        source=_link_source(samples, fit, predictions, how),
    )
    machine = Machine(
        name=name,
        description=f"{samples.num_devices} {KINDS[samples.kind]}, {how}",
        device=_device(samples, how),
        levels=(level,),
    )
    return MeasuredMachine(machine=machine, fit=fit, all_reduces=predictions)


def _predictions(samples: Samples, fit: LinkFit) -> tuple[Prediction, ...]:
    link = Link(latency_s=fit.latency_s, s_per_byte=1 / fit.bandwidth_bytes_per_s)
    return tuple(
        Prediction(
            size_bytes=message.size_bytes,
            measured_s=message.time_s,
            predicted_s=float(all_reduce(message.size_bytes, samples.num_devices, link)),
        )
        for message in samples.all_reduces
    )


def _device(samples: Samples, how: str) -> Device:
    peaks = {
        dtype: _rounded(max(rate.per_s for rate in (*rates, *samples.convolution.get(dtype, ()))))
        for dtype, rates in samples.matmul.items()
    }
    kernels = [
        f"{dtype} {what}, {_rates(rates, 'GFLOP/s')}"
        for what, by_dtype in (("matrix products", samples.matmul), ("convolutions", samples.convolution))
        for dtype, rates in by_dtype.items()
    ]
    return Device(
        name=samples.device_name,
        peak_flop_per_s=peaks,
        memory_bytes=samples.memory_bytes,
        memory_bandwidth_bytes_per_s=_rounded(max(rate.per_s for rate in samples.stream)),
        source=f"{how}{_SHARED[samples.kind]}. Each peak is the best of its type: {'; '.join(kernels)}. "
        f"Memory: one array added to another, {_rates(samples.stream, 'GB/s')}",
    )


def _link_source(samples: Samples, fit: LinkFit, predictions: Sequence[Prediction], how: str) -> str:
    return (
        f"{how}: messages of {_span(samples.copies)} from each device to the next{_RECEIVED[samples.kind]}; least "
        f"squares of the relative errors, whose root mean square is {fit.relative_error:.0%}. All-reduces of "
        f"{_span(samples.all_reduces)} differ from what these figures predict by {root_mean_square(predictions):.0%} "
        "(root mean square)"
    )


_SHARED: Mapping[str, str] = MappingProxyType(
    {
        CPU: "; virtual devices share the cores, and a device's rates are its share of them",
        GPU: "; float32 is what TensorFlow makes of it by default, TF32 on the GPUs that have it",
    }
)
_RECEIVED: Mapping[str, str] = MappingProxyType(
    {CPU: ", written anew by the receiver because virtual devices hand tensors over without a copy", GPU: ""}
)


def root_mean_square(predictions: Sequence[Prediction]) -> float:
    """Return the root of the mean square of the predictions' relative errors."""
    return sqrt(sum(prediction.relative_error**2 for prediction in predictions) / len(predictions))


def _rounded(figure: float) -> float:
    return float(f"{figure:.4g}")


def _rates(rates: Sequence[Rate], unit: str) -> str:
    return ", ".join(f"{rate.per_s / 1e9:.3g} {unit} at {rate.shape}" for rate in rates)


def _span(messages: Sequence[Message]) -> str:
    sizes = [message.size_bytes for message in messages]
    return f"{binary(min(sizes))} to {binary(max(sizes))}"
