"""`run_plan`: a plan emitted, executed in a process of its own, and compared with the single-device program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pase.costs.memory import DeviceMemory, device_memory
from pase.errors import ProgramError
from pase.planning.plan import Plan
from pase.sharding.traffic import held_weights, optimiser_numbers
from pase.targets.mesh_tensorflow.primitives.traffic import NOTHING_MOVED
from pase.targets.mesh_tensorflow.runtime.launch import program_events
from pase.targets.training.data import StepEvaluation
from pase.targets.training.options import ITEMSIZES, DeviceChoice, TrainingOptions, command_line

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how many steps are done and how many there are."""


Row = Mapping[str, Any]
"""Bytes of an edge or a layer, as JSON has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run showed.

    losses, reference_losses: of each step, before its update. max_relative_difference: between them. accuracies,
    reference_accuracies: of each step, None where the loss has none. tests, reference_tests: on the test data, where
    there are any.
    predicted_bytes: planned to cross devices in a step; measured_bytes: counted in one, None where not asked for;
    host_bytes: fed from the host and fetched by it, apart. edges, layers: whose they are, in rows of predicted_bytes
    and measured_bytes, each with its phases forward, backward and update; by producer and consumer or by name.
    predicted_memory: of each device, optimiser_bytes: of what the optimiser keeps on it, beside that;
    peak_memory_bytes: [devices] what the allocators recorded, where asked for.
    step_time_s: median without the first step. build_time_s: until the first step could begin.
    """

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    max_relative_difference: float
    accuracies: tuple[float | None, ...]
    reference_accuracies: tuple[float | None, ...]
    tests: tuple[StepEvaluation, ...]
    reference_tests: tuple[StepEvaluation, ...]
    predicted_bytes: int
    measured_bytes: int | None
    host_bytes: int | None
    edges: tuple[Row, ...]
    layers: tuple[Row, ...]
    predicted_memory: DeviceMemory
    optimiser_bytes: int
    peak_memory_bytes: tuple[int, ...] | None
    step_time_s: float
    build_time_s: float


def run_plan(
    plan: Plan,
    options: TrainingOptions,
    *,
    choice: DeviceChoice | None = None,
    measure: bool = False,
    on_progress: Progress | None = None,
) -> RunResult:
    """Return the losses of a plan's program beside those of one device.

    choice: of the devices, by default virtual CPUs.
    Raises EmitError where the plan cannot be written as a program and ProgramError where the program fails.
    """
    from pase.targets.emitter import emit

    source = emit(plan)
    report = on_progress or _silent
    steps, itemsize = options.steps, ITEMSIZES[options.dtype]
    arguments = [*command_line(options), *(choice or DeviceChoice()).command_line()]
    if measure:
        arguments.append("--measure")
    report("building the program", 0, steps)
    built: dict[str, Any] = {}
    done: dict[str, Any] = {}
    losses: list[float] = []
    accuracies: list[float | None] = []
    tests: list[StepEvaluation] = []
    for event in program_events(source, arguments):
        match event:
            case {"event": "built"}:
                built = event
                report("training on virtual devices", 0, steps)
            case {"event": "step", "loss": loss, "accuracy": accuracy}:
                losses.append(loss)
                accuracies.append(accuracy)
                report("training on virtual devices", len(losses), steps)
            case {"event": "tested"}:
                tests.append(StepEvaluation(**{key: value for key, value in event.items() if key != "event"}))
            case {"event": "done"}:
                done = event
    if not built or not done or len(losses) != steps:
        raise ProgramError(f"the program ended after {len(losses)} of {steps} steps; run it on its own to see why")
    # Only now: the import of TensorFlow takes seconds, and the child would have failed by then.
    from pase.targets.mesh_tensorflow.runtime.reference import reference_training

    report("training on one device", 0, steps)
    reference = reference_training(
        plan.graph, options, on_step=lambda step, _: report("training on one device", step, steps)
    )
    return RunResult(
        losses=tuple(losses),
        reference_losses=tuple(reference.losses),
        max_relative_difference=max_relative_difference(losses, reference.losses),
        accuracies=tuple(accuracies),
        reference_accuracies=tuple(reference.accuracies),
        tests=tuple(tests),
        reference_tests=tuple(reference.tests),
        predicted_bytes=built["predicted_bytes"],
        measured_bytes=done["measured_bytes"],
        host_bytes=done.get("host_bytes"),
        edges=_edge_rows(plan, done["edges"]) if measure else (),
        layers=_layer_rows(plan, done["layers"]) if measure else (),
        predicted_memory=device_memory(plan, itemsize=itemsize),
        optimiser_bytes=optimiser_numbers(held_weights(plan), options.rule.slots) * itemsize,
        peak_memory_bytes=tuple(done["peak_memory_bytes"]) if measure else None,
        step_time_s=done["step_time_s"],
        build_time_s=built["build_time_s"],
    )


def _edge_rows(plan: Plan, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return a row for every edge of the plan's graph, those that share a weight after them."""
    pairs = dict.fromkeys((edge.producer, edge.consumer) for edge in plan.graph.edges)
    found = {(row["producer"], row["consumer"]): row for row in rows}
    return tuple(
        found.get(ends, {"producer": ends[0], "consumer": ends[1], **NOTHING_MOVED}) for ends in {**pairs, **found}
    )


def _layer_rows(plan: Plan, rows: Sequence[Row]) -> tuple[Row, ...]:
    found = {row["name"]: row for row in rows}
    return tuple(found.get(layer.name, {"name": layer.name, **NOTHING_MOVED}) for layer in plan.layers)


def _silent(_what: str, _done: int, _total: int) -> None:
    """Report nothing."""


def max_relative_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest difference of two lists of losses, relative to the second's."""
    return max(
        (abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(losses, reference, strict=True)),
        default=0.0,
    )
