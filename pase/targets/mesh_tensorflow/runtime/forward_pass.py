"""A program of a forward pass: lowered, with its weights, run in a session; and its command line."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from pase.common.options import PATH, ProgramCommand, option
from pase.errors import PaseError
from pase.sharding.traffic import Phase
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.runtime.devices import Devices, local_devices, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.measure import crossed
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import assign, check_operations
from pase.targets.training.counted import given_value
from pase.targets.training.data import Array, filled_batches, joined_rows, read_arrays, write_arrays
from pase.targets.training.options import device_choice, device_options, dtype_option
from pase.targets.training.script import tabulated

Outputs = Mapping[str, tuple[Any, tuple[int, ...]]]
"""Tensors by the names of the model's outputs, and the shapes that these have."""

Build = Callable[[Program], Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """outputs: by name, of all examples. measured: bytes that crossed devices in the last batch, where asked for."""

    outputs: Mapping[str, Array]
    predicted_bytes: int
    measured: Mapping[str, Any]
    build_time_s: float
    batch_time_s: float


def compute(
    build: Build,
    weights: Mapping[str, Array],
    data: Mapping[str, Array],
    *,
    num_devices: int,
    dtype: str = "float32",
    devices: Devices | None = None,
    measure: bool = False,
) -> Computed:
    """Run a program's forward pass on all examples of some data, a batch at a time; the last one is filled up.

    Raises ProgramError where weights or inputs are missing, or are of another shape.
    """
    devices = devices or virtual_cpus(num_devices)
    begin = time.perf_counter()
    with ProgramGraph().as_default(), tf.device(devices.scope):
        program = Program(num_devices=num_devices, dtype=dtype, devices=devices)
        outputs = build(program)
        check_operations(program.graph, program.meshes)
        values = {name: given_value(name, weight.shape, weights) for name, weight in program.weights.items()}
        batch = max((item.shape[0] for item in program.inputs if item.shape), default=1)
        num_examples, batches = filled_batches(program.inputs, data, batch)
        traffic = Traffic()
        lowering = program.lowered(traffic)
        # Put together on the host: what goes there does not count as moved between devices.
        with traffic.within(Phase.FORWARD), tf.device(devices.host):
            fetched = {name: lowering.export_to_tf_tensor(tensor) for name, (tensor, _) in outputs.items()}
        session = tf.Session(devices.target, config=devices.config())
        try:
            if values:
                weights_of = program.weights
                assign(session, ((weights_of[n].tensor.operation.get_master(), array) for n, array in values.items()))
                session.run(lowering.copy_masters_to_slices())
            built_s = time.perf_counter() - begin
            found: list[Mapping[str, Array]] = []
            measured: dict[str, Any] = {"measured_bytes": None}
            for i, arrays in enumerate(batches):
                feeds = {program.placeholders[name]: array for name, array in arrays.items()}
                last = measure and i == len(batches) - 1
                options = tf.RunOptions(output_partition_graphs=True) if last else None
                metadata = tf.RunMetadata() if last else None
                begin = time.perf_counter()
                found.append(session.run(fetched, feeds, options=options, run_metadata=metadata))
                batch_time_s = time.perf_counter() - begin
                if last:
                    moved = crossed(metadata, tf.get_default_graph(), traffic)
                    measured = {"measured_bytes": moved.total_bytes, "host_bytes": moved.host_bytes}
                    measured |= tabulated(traffic.bytes_by_movement, moved.by_movement)
        finally:
            session.close()
    return Computed(
        outputs={
            name: joined_rows(name, [results[name].reshape(shape) for results in found], num_examples, batch)
            for name, (_, shape) in outputs.items()
        },
        predicted_bytes=traffic.total_bytes,
        measured=measured,
        build_time_s=built_s,
        batch_time_s=batch_time_s,
    )


@click.command(cls=ProgramCommand, help="Compute this network's outputs on virtual CPU devices, or on GPUs.")
@option("--weights", type=PATH, required=True, metavar="FILE", help="What 'pase weights' wrote, an .npz file.")
@option("--data", type=PATH, required=True, metavar="PATH", help="An .npz file with an array [N, ...] for each input.")
@option("--output", type=PATH, metavar="FILE", help="Write the outputs to this .npz file.")
@dtype_option
@option("--measure", is_flag=True, help="Count the bytes that cross devices in a batch.")
@option("--json", is_flag=True, help="Print one JSON object.")
@device_options
def command_of_program(**values: Any) -> None:
    """Declare the command line of a program that computes outputs, which `main` reads."""


def main(build: Build, *, num_devices: int, arguments: Sequence[str] | None = None) -> None:
    """Compute as the command line says; exit with status 1 and one line where that cannot be done.

    build: declares the layers on a program and returns what the network computes.
    """
    options = command_of_program.read(arguments)
    try:
        found = compute(
            build,
            read_arrays(options["weights"]),
            read_arrays(options["data"]),
            num_devices=num_devices,
            dtype=options["dtype"],
            devices=local_devices(device_choice(options), num_devices),
            measure=options["measure"],
        )
        if options["output"]:
            write_arrays(options["output"], found.outputs)
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    _show(found, options)


def _show(found: Computed, options: Mapping[str, Any]) -> None:
    if options["json"]:
        document = {
            "outputs": {name: list(array.shape) for name, array in found.outputs.items()},
            "output": str(options["output"]) if options["output"] else None,
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
