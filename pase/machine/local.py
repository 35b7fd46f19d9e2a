"""The machine at hand: its GPUs as the driver lists them, matched to a preset."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pase.errors import MachineError
from pase.machine.machine import Device, Machine

AUTO = "auto"
"""The name of the machine at hand."""

_LISTING = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_LONGEST_S = 30
_NEAR = 0.1
"""Memory of a GPU and of a preset's device may differ by so much: drivers keep some, and count it otherwise."""

_MEASURE = "measure it: pase calibrate --device GPU -o here.toml, and --kernels for what kernels reach"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver tells it."""

    name: str
    memory_bytes: int


def local_machine(presets: Sequence[Machine]) -> Machine:
    """Return the machine of this host: the preset of its GPUs, with as many in a node as there are.

    Raises MachineError where there is no GPU, where they differ, and where no preset is of them.
    """
    gpus = listed_gpus()
    first, count = gpus[0], len(gpus)
    if any(gpu != first for gpu in gpus):
        names = ", ".join(dict.fromkeys(_told(gpu) for gpu in gpus))
        raise MachineError(f"machine 'auto': this machine's {count} GPUs differ ({names}); expected equal ones")
    fitting = [machine for machine in presets if _is_of(machine.device, first)]
    if not fitting:
        raise MachineError(
            f"machine 'auto': no preset is of {_told(first)}, of which there are {count} here; {_MEASURE}"
        )
    machine, (node, *others) = fitting[0], fitting[0].levels
    found = f"{count} × {first.name}" if count > 1 else first.name
    # A group of one has no links within: those of the next level then join the devices themselves.
    levels = (replace(node, num_devices=count), *others) if count > 1 else tuple(others) or (node,)
    return replace(
        machine,
        name=f"{machine.name} (found)",
        description=f"{found} of this machine; all else as preset {machine.name!r}: {machine.description}",
        levels=levels,
        origin=None,
    )


def listed_gpus() -> tuple[Gpu, ...]:
    """Return this machine's GPUs; MachineError where there is none, or none that is told of."""
    if shutil.which(_LISTING[0]) is None:
        raise MachineError(
            "machine 'auto': no GPU was found (there is no nvidia-smi); name a preset (pase machines), or measure this "
            "machine: pase calibrate -o here.toml"
        )
    try:
        done = subprocess.run(_LISTING, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"machine 'auto': nvidia-smi did not answer: {error}") from None
    rows = [re.fullmatch(r"\s*(\S.*?)\s*,\s*(\d+)\s*", line) for line in done.stdout.splitlines() if line.strip()]
    gpus = tuple(Gpu(row[1], int(row[2]) * 2**20) for row in rows if row)
    if done.returncode or not gpus or len(gpus) < len(rows):
        said = (done.stderr or done.stdout).strip().splitlines()[:1] or ["nothing"]
        raise MachineError(f"machine 'auto': nvidia-smi lists no GPUs; it said: {said[0][:200]}")
    return gpus


def _told(gpu: Gpu) -> str:
    return f"{gpu.name} with {gpu.memory_bytes / 2**30:.0f} GiB"


def _is_of(device: Device, gpu: Gpu) -> bool:
    """Return whether a preset's device is a GPU: the same model, as much memory, and no other form of it."""
    here, words = _words(gpu.name), _words(device.name)
    model = {word for word in words if _MODEL.fullmatch(word)}
    return (
        bool(model)
        and model <= here
        and not here & _FORMS - words
        and abs(gpu.memory_bytes / device.memory_bytes - 1) <= _NEAR
    )


_FORMS = frozenset({"pcie", "nvl", "ti", "super", "max"})
"""Words that tell other GPUs than those of the same name without them."""

_MODEL = re.compile(r"[a-z]?\d{3,4}")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s-]+", name.lower()))
