"""`calibrate`: starts the measuring process and reads what it measured."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pase.calibration.samples import Samples, samples_from_document
from pase.common.documents import Field
from pase.errors import CalibrationError, RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.device_choice import DeviceChoice
from pase.targets.mesh_tensorflow.runtime.launch import program_events

Progress = Callable[[str, float], None]
"""Takes what is being measured and how much is done."""

# TensorFlow takes memory and threads for good, and reads some options once: it gets a process of its own.
_PROGRAM = "from pase.calibration.child import main\n\nmain()\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationChoice:
    """What to measure. num_devices: None for as many as there are. effort: quick or full."""

    num_devices: int | None = None
    device: DeviceChoice = field(default_factory=DeviceChoice)
    effort: str = "full"


def calibrate(choice: CalibrationChoice, *, on_progress: Progress | None = None) -> Samples:
    """Return what was measured on the devices of this machine; CalibrationError where that is not possible."""
    arguments = [*choice.device.command_line(), f"--effort={choice.effort}"]
    if choice.num_devices is not None:
        arguments.append(f"--devices={choice.num_devices}")
    samples = None
    try:
        for event in program_events(_PROGRAM, arguments):
            match event:
                case {"event": "progress", "what": str(what), "fraction": float() | int() as fraction}:
                    if on_progress:
                        on_progress(what, float(fraction))
                case {"event": "measured", "samples": found}:
                    samples = samples_from_document(Field(found, "", CalibrationError, "what was measured"))
    except RuntimeFailure as error:
        raise CalibrationError(f"the machine was not measured: {error}") from None
    if samples is None:
        raise CalibrationError("the measuring process ended without a result; run the command again")
    return samples
