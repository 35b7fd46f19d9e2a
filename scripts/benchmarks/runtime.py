"""How long programs take to build, with our all-reduce and with the stock one; what they move beside the prediction."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pase import Plan, emit, load, load_machine, search
from pase.device_memory import device_memory
from pase.errors import EmitError
from pase.graph import Scalar
from pase.machine import override_machine
from scripts.benchmarks.tables import ROOT, markdown, publish

BUILDS = (("alexnet", 32), ("inception_v3", 8), ("transformer", 8))
"""At full size; they are built and no step is run."""

DEVICES = (4, 8)

SMALL: dict[str, dict[str, Scalar]] = {
    "alexnet": {"batch": 16, "image": 64, "width": 8, "classes": 16},
    "vgg16": {"batch": 16, "image": 32, "width": 8, "classes": 16},
    "inception_v3": {"batch": 16, "image": 75, "width": 8, "classes": 16},
    "resnet101": {"batch": 16, "image": 32, "width": 8, "classes": 16, "blocks": "1,2,1,1"},
    "rnnlm": {"batch": 16, "vocabulary": 64, "units": 16, "steps": 8},
    "transformer": {
        "batch": 16, "vocabulary": 64, "steps": 8, "model_width": 16, "heads": 4, "hidden": 32, "layers": 1
    },
}  # fmt: skip
"""Arguments of the networks that are measured: whole, with small extents."""

STOCK = """\
import runpy, sys
from pase.runtime.compat import placement
from pase.runtime.mesh import MeshImplementation
MeshImplementation.allreduce = placement.PlacementMeshImpl.allreduce
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program with the all-reduce that Mesh-TensorFlow comes with."""


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/benchmarks.md."""
    builds = markdown(
        ["network", "p", "strategy", "layers", "build, s", "with the stock all-reduce, s"],
        [row for name, devices in BUILDS for row in _build_rows(name, devices)],
    )
    moved = markdown(
        [
            *("network", "p", "strategy", "predicted, B", "measured, B", "measured ÷ predicted", "all kept alive, B"),
            *("memory of a device, predicted, B", "allocated, B"),
        ],
        [row for name in SMALL for devices in DEVICES for row in _moved_rows(name, devices)],
    )
    publish("benchmarks.md", {"runtime": f"{builds}\n\n{moved}"}, write=write)


def _build_rows(name: str, devices: int) -> Iterator[list[str]]:
    graph = load(name)
    for label, plan in _strategies(search(graph, devices)):
        row = [name, str(devices), label, str(len(graph.operators))]
        try:
            source = emit(plan)
        except EmitError as error:
            yield [*row, f"not written: {error}", ""]
            continue
        yield [*row, *(f"{_built_s(source, prelude):.1f}" for prelude in ("", STOCK))]


def _built_s(source: str, prelude: str) -> float:
    """Return how long a program says that it took until its first step could begin."""
    with _events(source, ["--steps", "1"], prelude) as events:
        return float(next(event["build_time_s"] for event in events if event["event"] == "built"))


def _moved_rows(name: str, devices: int) -> Iterator[list[str]]:
    graph = load(name, arguments=SMALL[name])
    # Devices this slow are worth using even for layers this small.
    machine = override_machine(load_machine("1080ti"), flop_per_s=1e9, bandwidth_bytes_per_s=None)
    for label, plan in _strategies(search(graph, devices, machine=machine)):
        try:
            source = emit(plan)
        except EmitError as error:
            yield [name, str(devices), label, f"not written: {error}", *[""] * 5]
            continue
        predicted, done = _step(source, [])
        measured, allocated = done["measured_bytes"], max(done["peak_memory_bytes"])
        kept_alive = _step(source, ["--keep-alive"])[1]["measured_bytes"]
        ratio = f"{measured / predicted:.4f}" if predicted else "1"
        moved = [f"{predicted:,}", f"{measured:,}", ratio, f"{kept_alive:,}"]
        yield [name, str(devices), label, *moved, f"{device_memory(plan).total_bytes:,}", f"{allocated:,}"]


def _step(source: str, arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """Return the bytes that a step was to move between devices, and what the program says at its end."""
    with _events(source, ["--steps", "1", "--measure", *arguments], "") as events:
        found = {event["event"]: event for event in events}
    return int(found["built"]["predicted_bytes"]), found["done"]


def _strategies(searched: Plan) -> tuple[tuple[str, Plan], ...]:
    return (("searched", searched), ("data parallelism", _data_parallel(searched)))


def _data_parallel(plan: Plan) -> Plan:
    """Return the plan with every layer split along the batch alone, on the devices in order."""
    count = plan.num_devices
    layers = []
    for layer in plan.layers:
        splits = dict.fromkeys(layer.dims, 1)
        if layer.dims.get("b", 1) % count == 0:
            splits["b"] = count
        layers.append(replace(layer, splits=splits, devices=tuple(range(count))))
    return replace(plan, layers=tuple(layers))


@contextmanager
def _events(source: str, arguments: list[str], prelude: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Run a program in a process of its own and give its lines of JSON; what is left of it ends with the context."""
    with tempfile.TemporaryDirectory(prefix="pase-bench-") as folder, tempfile.TemporaryFile() as errors:
        script = Path(folder) / "train.py"
        script.write_text(source, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, *(["-c", prelude] if prelude else []), str(script), *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        try:
            yield (json.loads(line) for line in process.stdout)
        except (StopIteration, KeyError) as error:
            process.wait()
            errors.seek(0)
            raise SystemExit(f"the program failed:\n{errors.read().decode()}") from error
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
