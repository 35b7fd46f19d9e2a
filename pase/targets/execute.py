"""`run_plan`: emit a plan, execute it in a separate process, and compare it with the program of a single device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pase.costs import DEFAULT_OPTIMISER, DeviceMemory
from pase.errors import ProgramError
from pase.graph import ITEMSIZES, rounding, uniform
from pase.planning.plan import Plan, on_one_device
from pase.planning.stages import most_held, step_bytes
from pase.sharding.traffic import Movement, Phase, optimiser_numbers
from pase.targets.emitter.target import Target
from pase.targets.factories import Factory, Progress
from pase.targets.programs import check_trained, emit, target_of
from pase.targets.torch import TORCH
from pase.targets.training.data import StepEvaluation
from pase.targets.training.options import CPU, GPU, DeviceChoice, TrainingOptions, command_line
from pase.targets.training.script import NOTHING_MOVED, program_events, tabulated

Row = Mapping[str, Any]
"""Bytes of an edge or a layer, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run.

    Attributes:
        losses, reference_losses: Loss of each step, before its update.
        max_relative_difference: Largest relative difference between them.
        disagreement: Description of the first step whose difference rounding does not explain, "" if there is none.
        accuracies, reference_accuracies: Accuracy of each step, None where the loss has none.
        tests, reference_tests: Evaluations on the test data, if any.
        predicted_bytes: Predicted bytes that cross devices in a step.
        measured_bytes: Bytes counted in one step; None if not requested.
        host_bytes: Bytes sent from the host and fetched by it, counted separately.
        edges, layers: The bytes by owner: rows with predicted_bytes and measured_bytes, each by phase (forward,
            backward, update), for each producer and consumer, or layer.
        predicted_memory: Memory of each device.
        optimiser_bytes: Additional optimiser state on each device.
        peak_memory_bytes: [devices] peak that the allocators recorded, if requested.
        step_time_s: Median without the first step.
        build_time_s: Time until the first step could start.
    """

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    max_relative_difference: float
    disagreement: str
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


@dataclass(slots=True)
class _Run:
    """Output of a program; `built` and `done` are its events of these names."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float | None] = field(default_factory=list)
    tests: list[StepEvaluation] = field(default_factory=list)
    built: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)


def run_plan(
    plan: Plan,
    options: TrainingOptions,
    *,
    target: str | Target | None = None,
    choice: DeviceChoice | None = None,
    measure: bool = False,
    on_progress: Progress | None = None,
) -> RunResult:
    """Train a plan's program and the same model on one device; return the losses of both.

    Args:
        plan: The plan.
        options: Training options.
        target: Target of the program, or its name; default: that of the framework that the model came from. The
            reference of a Mesh-TensorFlow program is an implementation of PaSE's own on one device; that of a PyTorch
            program is the same program with nothing split.
        choice: Devices; default: CPUs.
        measure: Whether to count transferred bytes.
        on_progress: Called with the current activity, the number of completed steps, and their total.

    Raises:
        EmitError: The plan cannot be written as a program.
        ProgramError: The program fails.
    """
    chosen = target_of(plan, target)
    source = emit(plan, target=chosen)
    report = on_progress or _silent
    run = _in_types_of(plan, options, chosen)
    arguments = [*command_line(options), *(choice or DeviceChoice()).command_line()]
    chosen.check()
    what, alone = f"training on {chosen.runs_on}", "training on one device"
    report("building the program", 0, options.steps)
    ours = _run(source, [*arguments, "--measure"] if measure else arguments, what, options.steps, report)
    report(alone, 0, options.steps)
    reference: Any
    if chosen.reference is None:
        reference = _run(emit(on_one_device(plan), target=chosen), arguments, alone, options.steps, report)
    else:
        reference = chosen.reference(plan.graph, options, on_step=lambda step, _: report(alone, step, options.steps))
    return _result(plan, run, options, ours, reference, measure=measure)


def run_factory(
    plan: Plan,
    factory: Factory,
    options: TrainingOptions,
    *,
    device: str = CPU,
    measure: bool = False,
    on_progress: Progress | None = None,
) -> RunResult:
    """Train a factory's PyTorch module under a plan and unmodified; return the losses of both.

    Each runs in separate processes, from the weights that the seed gives.

    Raises:
        ProgramError: A process fails, or options give test data or weights, which a module has itself.
        EmitError: The module would not be trained as it trains itself.
    """
    for flag, path in (("--test-data", options.test_data_path), ("--weights", options.weights_path)):
        if path is not None:
            raise ProgramError(f"{flag} is of programs that are emitted; a factory makes a model with its own weights")
    check_trained(plan.graph)
    TORCH.check()
    from pase.targets.torch.launch import call
    from pase.targets.torch.parallel import train_factory

    report = on_progress or _silent
    given = (factory.name, factory.batch, dict(factory.arguments), plan, options)
    kind = "cuda" if device == GPU else "cpu"
    report("training on local processes", 0, options.steps)
    events, *_ = call(train_factory, *given, True, measure, kind, ranks=plan.num_devices, device=kind)
    report("training the unmodified module", 0, options.steps)
    (alone,) = call(train_factory, *given, False, False, kind, ranks=1, device=kind)
    ours, reference = _reported(events), _reported(alone)
    result = _result(plan, _in_types_of(plan, options, TORCH), options, ours, reference, measure=measure)
    # The module drops other points, so losses differ; the first step was compared without dropout.
    return replace(result, disagreement="") if _drops(plan) else result


def _drops(plan: Plan) -> bool:
    bodies = (operator.body for operator in plan.graph.operators)
    return any(step.function == "dropout" for body in bodies if body for step in body.steps)


def _result(plan: Plan, run: Plan, options: TrainingOptions, ours: _Run, reference: Any, *, measure: bool) -> RunResult:
    """Return the result of a run.

    Args:
        plan: The plan.
        run: The plan with the number types of the program.
        options: Training options.
        ours: Output of the program.
        reference: Result of the reference.
        measure: Whether bytes were counted.
    """
    if ours.built["predicted_bytes"] is None:
        predicted = step_bytes(run)
        ours.built["predicted_bytes"] = sum(predicted.values())
        if measure:
            ours.done |= tabulated(predicted, _measured(ours.done))
    rows = ours.done if measure else {}
    slots = partial(optimiser_numbers, slots=options.rule.slots)
    return RunResult(
        losses=tuple(ours.losses),
        reference_losses=tuple(reference.losses),
        max_relative_difference=max_relative_difference(ours.losses, reference.losses),
        disagreement=disagreement(ours.losses, reference.losses, run),
        accuracies=tuple(ours.accuracies),
        reference_accuracies=tuple(reference.accuracies),
        tests=tuple(ours.tests),
        reference_tests=tuple(reference.tests),
        predicted_bytes=ours.built["predicted_bytes"],
        measured_bytes=ours.done["measured_bytes"],
        host_bytes=ours.done.get("host_bytes"),
        edges=_edge_rows(plan, rows["edges"]) if rows else (),
        layers=_layer_rows(plan, rows["layers"]) if rows else (),
        predicted_memory=_memory(plan, run),
        optimiser_bytes=most_held(plan, slots) * ITEMSIZES[run.precision.moments],
        peak_memory_bytes=tuple(ours.done.get("peak_memory_bytes") or ()) or None,
        step_time_s=ours.done["step_time_s"],
        build_time_s=ours.built["build_time_s"],
    )


def _in_types_of(plan: Plan, options: TrainingOptions, target: Target) -> Plan:
    """Return a plan with the number types that a program runs it in: its own, unless --dtype or the target differ."""
    is_own = target.takes_types and options.dtype == "float32"
    return plan if is_own else replace(plan, graph=plan.graph.in_precision(uniform(options.dtype)))


def _run(source: str, arguments: list[str], what: str, steps: int, report: Progress) -> _Run:
    """Run a program to its end; ProgramError where it ends early."""
    found = _reported(program_events(source, arguments), lambda step: report(what, step, steps))
    if not found.built or not found.done or len(found.losses) != steps:
        raise ProgramError(
            f"the program ended after {len(found.losses)} of {steps} steps; run it on its own to see why"
        )
    return found


def _reported(events: Iterable[dict[str, Any]], on_step: Callable[[int], None] = lambda _: None) -> _Run:
    """Collect the output of a training; `on_step` is called with the number of completed steps."""
    found = _Run()
    for event in events:
        match event:
            case {"event": "built"}:
                found.built = event
                on_step(0)
            case {"event": "step", "loss": loss, "accuracy": accuracy}:
                found.losses.append(loss)
                found.accuracies.append(accuracy)
                on_step(len(found.losses))
            case {"event": "tested"}:
                found.tests.append(StepEvaluation(**{key: value for key, value in event.items() if key != "event"}))
            case {"event": "done"}:
                found.done = event
    return found


def _memory(plan: Plan, run: Plan) -> DeviceMemory:
    """Return a device's memory without the optimiser; for plans with layer modes in the plan's own types."""
    return replace(plan if plan.has_parts else run, optimiser=DEFAULT_OPTIMISER).memory


def _measured(done: Mapping[str, Any]) -> dict[Movement, int]:
    """Return the bytes of the rows that a program reported, by owner."""
    ends = [(row["producer"], row["consumer"], row) for row in done["edges"]]
    ends += [(row["name"], row["name"], row) for row in done["layers"]]
    return {
        Movement(producer=producer, consumer=consumer, phase=phase): row[phase.value]["measured_bytes"]
        for producer, consumer, row in ends
        for phase in Phase
        if row[phase.value]["measured_bytes"]
    }


def _edge_rows(plan: Plan, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return a row for every edge of the plan's graph, followed by edges of shared weights."""
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


def max_relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest difference of two lists of losses, relative to the second's."""
    return max(
        (abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(losses, reference, strict=True)),
        default=0.0,
    )


_GROWTH = 2.0
"""Largest factor by which one update may amplify the rounding difference of two trainings."""

_MOST_EXPLAINED = 0.1
"""Larger differences of losses are never attributed to rounding; steps that would allow more are not judged."""


def disagreement(losses: Sequence[float], reference: Sequence[float], run: Plan) -> str:
    """Return a description of the first step whose difference rounding does not explain; "" if there is none.

    The first step may differ by the rounding error of one forward pass. Each update amplifies a difference, until the
    trainings are unrelated: a wrong gradient shows in the steps before that.

    Args:
        losses: Loss of each step.
        reference: Loss of the same steps on one device.
        run: The plan, with the number types that its program computed in.
    """
    types = run.precision
    explained = rounding(types.results, types.parameters, len(run.graph.operators))
    for number, (ours, expected) in enumerate(zip(losses, reference, strict=True), start=1):
        if explained > _MOST_EXPLAINED and number > 1:
            break
        found = max_relative_difference([ours], [expected])
        # A NaN loss differs from any other.
        if not found <= min(explained, _MOST_EXPLAINED):
            return (
                f"the loss of step {number} is {ours:.9g}, {expected:.9g} on one device: a relative difference of "
                f"{found:.1e}, of which rounding explains {explained:.1e}"
            )
        explained *= _GROWTH
    return ""
