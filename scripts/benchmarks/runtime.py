"""How long programs take to build, with our all-reduce and with the stock one; what they move beside the prediction."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pase import Plan, emit, load, load_machine, search
from pase.errors import EmitError
from pase.graph import Scalar
from pase.machine import override_machine
from scripts.benchmarks import side_by_side
from scripts.benchmarks.tables import ROOT, markdown, publish

BUILDS = (("alexnet", 32), ("inception_v3", 8), ("transformer", 8))
"""At full size; they are built and no step is run."""

COMPARED_BUILDS = (
    *(("lenet5", 4), ("alexnet", 8), ("alexnet", 32), ("inception_v3", 8), ("transformer", 8)),
    *(("gpt", 4), ("gpt", 8), ("rnnlm", 8)),
)
"""At full size, beside those of another checkout."""

DEVICES = (4, 8)

SMALL: dict[str, dict[str, Scalar]] = {
    "alexnet": {"batch": 16, "image": 64, "width": 8, "classes": 16},
    "vgg16": {"batch": 16, "image": 32, "width": 8, "classes": 16},
    "inception_v3": {"batch": 16, "image": 75, "width": 8, "classes": 16},
    "resnet101": {"batch": 16, "image": 32, "width": 8, "classes": 16, "blocks": "1,2,1,1"},
    "rnnlm": {"batch": 16, "vocabulary": 64, "units": 16, "steps": 8},
    "transformer": {
        "batch": 8, "vocabulary": 512, "steps": 8, "model_width": 32, "heads": 4, "hidden": 128, "layers": 1
    },
}  # fmt: skip
"""Arguments of the networks that are measured: whole, with small extents."""

_SLOW_FLOP_PER_S = 1e9
"""Devices this slow are worth using even for layers this small."""

COMPARED_STEPS = (
    side_by_side.Case("lenet5", 4),
    *(side_by_side.Case(n, 8, SMALL[n], _SLOW_FLOP_PER_S) for n in ("alexnet", "inception_v3", "transformer", "rnnlm")),
    side_by_side.Case("gpt", 8, {n: v for n, v in SMALL["transformer"].items() if n != "hidden"}, _SLOW_FLOP_PER_S),
)
"""Programs whose steps are timed beside those of another checkout."""

STOCK = """\
import runpy, sys
from pase.targets.mesh_tensorflow.primitives.compat import placement
from pase.targets.mesh_tensorflow.primitives.mesh import MeshImplementation
MeshImplementation.allreduce = placement.PlacementMeshImpl.allreduce
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program with the all-reduce that Mesh-TensorFlow comes with."""


RATIO_TOLERANCE = 0.02
"""By how much the measured ratio of two plans' bytes may differ from the predicted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that a plan's program moves between devices in a step, and of memory; error: why it was not written."""

    strategy: str
    predicted_bytes: int = 0
    measured_bytes: int = 0
    kept_alive_bytes: int = 0
    memory_bytes: int = 0
    allocated_bytes: int = 0
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="time programs of another checkout, of an older version, and of this one in turns; nothing else",
    )


def main(*, write: bool, against: Path | None = None) -> None:
    """Print the tables, or put them into docs/benchmarks.md."""
    if against:
        builds_and_steps = [side_by_side.Case(name, devices) for name, devices in COMPARED_BUILDS], COMPARED_STEPS
        publish("benchmarks.md", {"side by side": side_by_side.table(*builds_and_steps, against)}, write=write)
        return
    builds = markdown(
        ["network", "p", "strategy", "layers", "build, s", "with the stock all-reduce, s"],
        [row for name, devices in BUILDS for row in _build_rows(name, devices)],
    )
    moved, ratios = moved_tables([(name, devices) for name in SMALL for devices in DEVICES])
    publish("benchmarks.md", {"runtime": f"{builds}\n\n{moved}\n\n{ratios}"}, write=write)


def moved_tables(cases: Sequence[tuple[str, int]]) -> tuple[str, str]:
    """Run the plans of networks in `SMALL` on numbers of devices; return what they move, and in what ratio."""
    found = {case: _moved(*case) for case in cases}
    moved = markdown(
        [
            *("network", "p", "strategy", "predicted, B", "measured, B", "measured ÷ predicted", "all kept alive, B"),
            *("memory of a device, predicted, B", "allocated, B"),
        ],
        [[name, str(devices), *_moved_row(row)] for (name, devices), rows in found.items() for row in rows],
    )
    ratios = markdown(
        [
            *("network", "p", "searched ÷ data parallelism: predicted", "measured", "difference"),
            *("all kept alive", "difference", "the searched plan moves"),
        ],
        [[name, str(devices), *ratio_row(*rows)] for (name, devices), rows in found.items()],
    )
    return moved, ratios


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


def _moved(name: str, devices: int) -> tuple[Moved, Moved]:
    graph = load(name, arguments=SMALL[name])
    machine = override_machine(load_machine("1080ti"), flop_per_s=_SLOW_FLOP_PER_S, bandwidth_bytes_per_s=None)
    searched, data_parallel = _strategies(search(graph, devices, machine=machine))
    return _moved_by(*searched), _moved_by(*data_parallel)


def _moved_by(label: str, plan: Plan) -> Moved:
    try:
        source = emit(plan)
    except EmitError as error:
        return Moved(strategy=label, error=str(error))
    predicted_bytes, done = _step(source, [])
    return Moved(
        strategy=label,
        predicted_bytes=predicted_bytes,
        measured_bytes=done["measured_bytes"],
        kept_alive_bytes=_step(source, ["--keep-alive"])[1]["measured_bytes"],
        memory_bytes=plan.peak.bytes,
        allocated_bytes=max(done["peak_memory_bytes"]),
    )


def _moved_row(moved: Moved) -> list[str]:
    if moved.error:
        return [moved.strategy, f"not written: {moved.error}", *[""] * 5]
    ratio = f"{moved.measured_bytes / moved.predicted_bytes:.4f}" if moved.predicted_bytes else "1"
    counted = [f"{moved.predicted_bytes:,}", f"{moved.measured_bytes:,}", ratio, f"{moved.kept_alive_bytes:,}"]
    return [moved.strategy, *counted, f"{moved.memory_bytes:,}", f"{moved.allocated_bytes:,}"]


def ratio_row(searched: Moved, data_parallel: Moved) -> list[str]:
    """Return what one plan moves ÷ what the other does: predicted, counted in both kinds of step, and by how much off.

    A difference beyond `RATIO_TOLERANCE` is marked.
    """
    pairs = [
        (searched.predicted_bytes, data_parallel.predicted_bytes),
        (searched.measured_bytes, data_parallel.measured_bytes),
        (searched.kept_alive_bytes, data_parallel.kept_alive_bytes),
    ]
    if searched.error or data_parallel.error or not all(both for pair in pairs for both in pair):
        return ["no ratio", *[""] * 5]
    predicted, *counted = (ours / theirs for ours, theirs in pairs)
    cells = [f"{predicted:.4f}"]
    for ratio in counted:
        difference = ratio / predicted - 1
        mark = "" if abs(difference) <= RATIO_TOLERANCE else f" **beyond {RATIO_TOLERANCE:.0%}**"
        cells += [f"{ratio:.4f}", f"{difference:+.2%}{mark}"]
    measured = counted[0]
    return [*cells, "fewer bytes" if measured < 1 else "as many bytes" if measured == 1 else "**more bytes**"]


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
