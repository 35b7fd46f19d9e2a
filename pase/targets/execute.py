"""`run_plan`: a plan emitted, executed in a process of its own, and compared with the program of a single device."""

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
"""Bytes of an edge or a layer, as JSON has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run showed.

    losses, reference_losses: of each step, before its update. max_relative_difference: between them. disagreement: the
    first step whose difference rounding does not explain, in words, "" where it explains all. accuracies,
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
    """What a program reported. built, done: its events of these names."""

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
    """Return the losses of a plan's program beside those of one device.

    target: whose program it is, or its name; by default that of the framework that the model came from. Beside a
    program for Mesh-TensorFlow, a reference of our own computes on one device; beside one for PyTorch, the same program
    with nothing split. choice: of the devices, by default CPUs.
    Raises EmitError where the plan cannot be written as a program and ProgramError where the program fails.
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
    """Return the losses of a factory's PyTorch module under a plan beside those of the unmodified module.

    Each runs in processes of its own, from the weights that the seed draws.
    Raises ProgramError where a process fails, and for data to test on or weights, which a module has itself; EmitError
    for a module that would not be trained as it trains itself.
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
    # The module drops other points, so that losses differ; the first step was compared without dropping any.
    return replace(result, disagreement="") if _drops(plan) else result


def _drops(plan: Plan) -> bool:
    bodies = (operator.body for operator in plan.graph.operators)
    return any(step.function == "dropout" for body in bodies if body for step in body.steps)


def _result(plan: Plan, run: Plan, options: TrainingOptions, ours: _Run, reference: Any, *, measure: bool) -> RunResult:
    """Return what a run showed. run: the plan in the types of the program. measure: whether bytes were counted."""
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
    """Return a plan in the types that a program runs it in: its own, but for another --dtype or target."""
    is_own = target.takes_types and options.dtype == "float32"
    return plan if is_own else replace(plan, graph=plan.graph.in_precision(uniform(options.dtype)))


def _run(source: str, arguments: list[str], what: str, steps: int, report: Progress) -> _Run:
    """Run a program to its end; ProgramError where it ends before."""
    found = _reported(program_events(source, arguments), lambda step: report(what, step, steps))
    if not found.built or not found.done or len(found.losses) != steps:
        raise ProgramError(
            f"the program ended after {len(found.losses)} of {steps} steps; run it on its own to see why"
        )
    return found


def _reported(events: Iterable[dict[str, Any]], on_step: Callable[[int], None] = lambda _: None) -> _Run:
    """Return what a training reported. on_step: is told how many steps are done."""
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
    """Return what a device needs but for the optimizer; of a plan with parts in its own types, not those it runs in."""
    return replace(plan if plan.has_parts else run, optimiser=DEFAULT_OPTIMISER).memory


def _measured(done: Mapping[str, Any]) -> dict[Movement, int]:
    """Return the bytes of the rows that a program reported, by whose they are."""
    ends = [(row["producer"], row["consumer"], row) for row in done["edges"]]
    ends += [(row["name"], row["name"], row) for row in done["layers"]]
    return {
        Movement(producer=producer, consumer=consumer, phase=phase): row[phase.value]["measured_bytes"]
        for producer, consumer, row in ends
        for phase in Phase
        if row[phase.value]["measured_bytes"]
    }


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


def max_relative_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest difference of two lists of losses, relative to the second's."""
    return max(
        (abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(losses, reference, strict=True)),
        default=0.0,
    )


_GROWTH = 2.0
"""By how much one update may enlarge the difference that rounding made of two trainings."""

_MOST_EXPLAINED = 0.1
"""No difference of losses beyond this is taken for rounding; steps for which more would be allowed are not judged."""


def disagreement(losses: Sequence[float], reference: Sequence[float], run: Plan) -> str:
    """Return the first step whose difference rounding does not explain, in words; "" where it explains all.

    The first step may differ by what rounding makes of one forward pass. Each update enlarges a difference, until
    neither training says anything of the other: a wrong gradient shows in the steps before.

    Args:
        losses: Of each step.
        reference: Of the same steps on one device.
        run: The plan, in the types that its program computed in.
    """
    types = run.precision
    explained = rounding(types.results, types.parameters, len(run.graph.operators))
    for number, (ours, expected) in enumerate(zip(losses, reference, strict=True), start=1):
        if explained > _MOST_EXPLAINED and number > 1:
            break
        found = max_relative_difference([ours], [expected])
        # A loss that is no number differs from any.
        if not found <= min(explained, _MOST_EXPLAINED):
            return (
                f"the loss of step {number} is {ours:.9g}, {expected:.9g} on one device: a relative difference of "
                f"{found:.1e}, of which rounding explains {explained:.1e}"
            )
        explained *= _GROWTH
    return ""
