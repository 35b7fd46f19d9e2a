"""`main`: the command line of an emitted program of a forward pass."""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pase.common.documents import write_atomically
from pase.errors import PaseError, RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.data import read_arrays
from pase.targets.mesh_tensorflow.runtime.device_choice import CPU, DEFAULT_GPU_MEMORY_MIB, KINDS, DeviceChoice
from pase.targets.mesh_tensorflow.runtime.devices import local_devices
from pase.targets.mesh_tensorflow.runtime.forward_pass import Build, Computed, compute
from pase.targets.mesh_tensorflow.runtime.options import WORD_BYTES

__all__ = ["main"]


def main(build: Build, *, num_devices: int, arguments: Sequence[str] | None = None) -> None:
    """Compute as the command line says; exit with status 1 and one line where that cannot be done.

    build: declares the layers on a program and returns what the network computes.
    """
    options = _parser().parse_args(arguments)
    try:
        found = compute(
            build,
            read_arrays(options.weights),
            read_arrays(options.data),
            num_devices=num_devices,
            dtype=options.dtype,
            devices=local_devices(
                DeviceChoice(kind=options.device, virtual=options.virtual, memory_mib=options.gpu_memory), num_devices
            ),
            measure=options.measure,
        )
        if options.output:
            _write(options.output, found)
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    _show(found, options)


def _write(path: Path, found: Computed) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **dict(found.outputs))  # type: ignore[arg-type]
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise RuntimeFailure(f"{path} cannot be written: {error.strerror or error}") from None


def _show(found: Computed, options: argparse.Namespace) -> None:
    if options.json:
        document = {
            "outputs": {name: list(array.shape) for name, array in found.outputs.items()},
            "output": str(options.output) if options.output else None,
            "predicted_bytes": found.predicted_bytes,
            "build_time_s": found.build_time_s,
            "batch_time_s": found.batch_time_s,
            **found.measured,
        }
        sys.stdout.write(json.dumps(document) + "\n")
        return
    for name, array in found.outputs.items():
        sys.stdout.write(f"{name}: shape {list(array.shape)}, mean {array.mean():.6g}, largest {array.max():.6g}\n")
    if found.measured["measured_bytes"] is not None:
        moved = f"{found.predicted_bytes:,} B a batch predicted, {found.measured['measured_bytes']:,} B measured"
        sys.stdout.write(f"between devices: {moved}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compute this network's outputs on virtual CPU devices, or on GPUs.")
    parser.add_argument(
        "--weights", type=Path, required=True, metavar="FILE", help="what 'pase weights' wrote, an .npz file"
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="PATH", help="an .npz file with an array [N, ...] for each input"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outputs to this .npz file")
    parser.add_argument("--dtype", choices=tuple(WORD_BYTES), default="float32", help="(default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="count the bytes that cross devices in a batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", choices=list(KINDS), default=CPU, help="(default: %(default)s, virtual ones)")
    parser.add_argument("--virtual", action="store_true", help="put several devices on a GPU where there are too few")
    parser.add_argument(
        "--gpu-memory", type=int, default=DEFAULT_GPU_MEMORY_MIB, metavar="MIB", help="of each device of --virtual"
    )
    return parser
