"""`pase simulate`: one training step of a plan on a machine, message by message; of one with parts, pass by pass."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from pase.analysis.simulation import pipeline
from pase.analysis.simulation.pipeline import StagedSimulation, StageUse, Work, simulate_stages
from pase.analysis.simulation.simulation import Simulation, chrome_trace, simulate
from pase.analysis.simulation.step import COLLECTIVES
from pase.cli.options import check_writable, chosen_plan, json_option, plan_argument, plan_options
from pase.cli.output import print_json, print_table, quantity, say, step_text
from pase.cli.progress import progress
from pase.common.documents import write_atomically
from pase.common.names import short
from pase.common.quantities import size_text
from pase.errors import SimulationError

_SHOWN_PARTS = 10
"""Of the critical path, how many a table names; --json has them all."""


@click.command("simulate", epilog="Example: pase simulate plan.json --trace step.json")
@plan_argument
@plan_options
@click.option(
    "--collectives",
    type=click.Choice(list(COLLECTIVES)),
    help="How sums travel: by the best algorithm, node by node, in one ring, or in pieces between all pairs, as an "
    "emitted Mesh-TensorFlow program [the machine's own].",
)
@click.option("--no-overlap", is_flag=True, help="Sum gradients of weights after the backward pass, not beside it.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write a Chrome trace of the step.")
@json_option
def simulate_command(
    plan: str, collectives: str | None, no_overlap: bool, trace: Path | None, as_json: bool, **model: Any
) -> None:
    """Simulate one training step of PLAN on its machine, with messages that share the links.

    --machine is where a plan is simulated instead. Of a MODEL, the best strategy on --devices of it is searched first.

    Prints how long the step takes, what devices and links do in it, and what the critical path consists of. A trace is
    shown by chrome://tracing or ui.perfetto.dev: a process for each device.

    A plan with micro-batches, stages or modes of layers is simulated pass by pass: what each stage does, and when it
    waits; a process of the trace is a stage.
    """
    if trace is not None:
        check_writable(trace)
    with progress() as on_progress:
        chosen = chosen_plan(plan, model, on_progress, keeps_machine=False)
        on_progress("simulating a step", 0.0)
        if chosen.has_parts:
            if collectives:
                raise SimulationError(
                    "sums of a plan with micro-batches, stages or modes take what its cost model says, "
                    f"{chosen.cost_model}: leave out --collectives, or search under another --cost-model"
                )
            staged = simulate_stages(chosen, machine=model["machine"], overlaps=not no_overlap)
            views = (
                partial(pipeline.chrome_trace, staged),
                partial(_staged_document, staged),
                partial(_print_staged, staged),
            )
        else:
            found = simulate(chosen, machine=model["machine"], collectives=collectives, overlaps=not no_overlap)
            views = partial(chrome_trace, found), partial(_document, found), partial(_print, found)
    traced, document, show = views
    if trace is not None:
        write_atomically(trace, traced())
    if as_json:
        print_json(document())
    else:
        show()
        if trace is not None:
            say()
            say(f"trace written to {trace}")


def _document(found: Simulation) -> dict[str, Any]:
    return {
        "model": found.plan.graph.name,
        "num_devices": found.plan.num_devices,
        "machine": found.machine.name,
        "collectives": found.collectives,
        "overlap": found.overlaps,
        "step_time_s": found.step_time_s,
        "num_tasks": len(found.tasks.tasks),
        "phases": [{"name": phase.phase, **_but(asdict(phase), "phase")} for phase in found.phases],
        "devices": [asdict(device) for device in found.devices],
        "levels": [asdict(level) for level in found.levels],
        "critical_path": {
            "activities_s": {activity.value: time_s for activity, time_s in found.activities.items()},
            "parts": [
                {
                    "activity": part.activity,
                    **_but(asdict(part.label), "label"),
                    "device": part.device,
                    "level": None if part.level is None else found.fabric.levels[part.level].name,
                    "begin_s": part.begin_s,
                    "end_s": part.end_s,
                }
                for part in found.critical_path
            ],
        },
    }


def _but(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != name}


def _print(found: Simulation) -> None:
    step_s = found.step_time_s
    overlap = "beside the backward pass" if found.overlaps else "after the backward pass"
    say(f"{found.plan.graph.name} on {found.plan.num_devices} × {found.machine.device.name} ({found.machine.name})")
    say(f"  one step                {quantity(step_s, 's')}")
    say(f"  collectives             {found.collectives}; gradients of weights are summed {overlap}")
    say()
    print_table(
        ["<phase", "begins", "ends", "computing", "bytes moved"],
        [
            [
                str(phase.phase),
                *(quantity(time_s, "s") for time_s in (phase.begin_s, phase.end_s, phase.computing_s)),
                quantity(phase.moved_bytes, "B"),
            ]
            for phase in found.phases
        ],
    )
    say()
    _print_devices(found)
    say()
    print_table(
        ["<links of a", "number", "bytes out", "busiest", "mean use"],
        [
            [
                level.name,
                str(level.num_links),
                quantity(level.moved_bytes, "B"),
                quantity(level.busiest_s, "s"),
                f"{level.utilisation:.1%}",
            ]
            for level in found.levels
        ],
    )
    say()
    print_table(
        ["<critical path", "time", "share"],
        [[activity.value, *_time_and_share(time_s, step_s)] for activity, time_s in found.activities.items()],
    )
    say()
    total: dict[tuple[str, str], float] = {}
    for part in found.critical_path:
        key = part.label.text, part.activity.value
        total[key] = total.get(key, 0.0) + part.duration_s
    parts = sorted(total.items(), key=lambda item: -item[1])
    print_table(
        ["<longest parts of it", "<spent on", "time", "share"],
        [[name, activity, *_time_and_share(time_s, step_s)] for (name, activity), time_s in parts[:_SHOWN_PARTS]],
    )


def _print_devices(found: Simulation) -> None:
    rows = {
        "computing": [device.computing_s for device in found.devices],
        "communicating, not computing": [device.communicating_s for device in found.devices],
        "waiting": [device.waiting_s for device in found.devices],
        "its link sends": [device.sending_s for device in found.devices],
        "its link receives": [device.receiving_s for device in found.devices],
    }
    print_table(
        ["<a device's time", "least", "mean", "most"],
        [
            [name, *(quantity(time_s, "s") for time_s in (min(times), sum(times) / len(times), max(times)))]
            for name, times in rows.items()
        ],
    )


def _time_and_share(time_s: float, step_s: float) -> tuple[str, str]:
    return quantity(time_s, "s"), f"{time_s / step_s:.1%}" if step_s else ""


# -- steps of stages


def _staged_document(found: StagedSimulation) -> dict[str, Any]:
    plan = found.plan
    return {
        "model": plan.graph.name,
        "num_devices": plan.num_devices,
        "machine": found.machine.name,
        "overlap": found.hides,
        "step_time_s": found.step_time_s,
        "closed_form_s": found.closed_form_s,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "num_groups": plan.num_groups,
        "waiting_share": found.bubble,
        "stages": [{**asdict(use), "micro_batch_s": use.micro_batch_s} for use in found.stages],
        "passes": [_but(asdict(each), "awaited") for each in found.passes],
        "critical_path": [_but(asdict(each), "awaited") for each in found.critical_path],
    }


def _print_staged(found: StagedSimulation) -> None:
    plan, step_s = found.plan, found.step_time_s
    over = step_s / found.closed_form_s - 1 if found.closed_form_s else 0.0
    beside = "" if abs(over) < 5e-5 else f", which is {abs(over):.2%} {'less' if over > 0 else 'more'}"
    say(f"{plan.graph.name} on {plan.num_devices} × {found.machine.device.name} ({found.machine.name})")
    say(f"  step                    {step_text(plan)}")
    say(f"  one step                {quantity(step_s, 's')}")
    say(f"  closed form             {quantity(found.closed_form_s, 's')}{beside}")
    say(f"  devices wait            {found.bubble:.1%} of the time")
    say()
    works = [work for work in Work if any(times[work] for times in found.times_s)]
    print_table(
        ["<stage", "<layers", "devices", *(str(work) for work in works)],
        [
            [str(use.stage), str(use.num_layers), _range(use), *(quantity(use.times_s[work], "s") for work in works)]
            for use in found.stages
        ],
    )
    say()
    print_table(
        ["<stage", "<first layer", "<last layer", "busy", "waits", "share", "under way", "memory"],
        [
            [
                str(use.stage),
                *map(short, use.layers),
                quantity(use.busy_s, "s"),
                *_time_and_share(use.waiting_s, step_s),
                str(use.in_flight),
                size_text(use.memory_bytes),
            ]
            for use in found.stages
        ],
    )
    say()
    total: dict[tuple[int, Work], float] = {}
    for each in found.critical_path:
        total[each.stage, each.work] = total.get((each.stage, each.work), 0.0) + each.duration_s
    longest = sorted(total.items(), key=lambda item: -item[1])
    print_table(
        ["<the step waits for", "<spent on", "time", "share"],
        [[f"stage {stage}", str(work), *_time_and_share(time_s, step_s)] for (stage, work), time_s in longest],
    )


def _range(use: StageUse) -> str:
    first, beyond = use.devices
    return str(first) if beyond - first == 1 else f"{first} – {beyond - 1}"
