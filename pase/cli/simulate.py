"""`pase simulate`: simulate one training step on a machine, message by message; steps with stages, pass by pass."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pase.analysis.simulation import pipeline
from pase.analysis.simulation.pipeline import StagedSimulation, simulate_stages
from pase.analysis.simulation.simulation import Simulation, chrome_trace, simulate
from pase.analysis.simulation.step import COLLECTIVES
from pase.cli.options import (
    ModelArguments,
    choice_option,
    chosen_plan,
    flag,
    headline,
    json_option,
    model_options,
    plan_argument,
    writable,
)
from pase.cli.output import print_facts, print_json, print_table, say
from pase.cli.progress import progress
from pase.common.documents import attributes, write_atomically
from pase.common.options import PATH, option
from pase.common.words import percentage, quantity, short
from pase.errors import SimulationError
from pase.planning.passes import Work

_SHOWN_PARTS = 10
"""Maximum number of parts of the critical path in the table; --json has all of them."""


@click.command("simulate", epilog="Example: pase simulate plan.json --trace step.json")
@plan_argument
@model_options()
@choice_option(
    "--collectives",
    COLLECTIVES,
    help="How sums travel: by the best algorithm, node by node, in one ring, or directly between all pairs, as an "
    "emitted Mesh-TensorFlow program [the machine's own].",
)
@flag("--no-overlap", help="Sum gradients of weights after the backward pass, not during it.")
@option("--trace", type=PATH, callback=writable, metavar="FILE", help="Write a Chrome trace of the step.")
@json_option
def simulate_command(
    plan: str, model: ModelArguments, collectives: str | None, no_overlap: bool, trace: Path | None, as_json: bool
) -> None:
    """Simulate one training step of PLAN on its machine, with messages that share the links.

    --machine is where a plan is simulated instead. Of a MODEL, the best strategy on --devices of it is searched first.

    Prints how long the step takes, what devices and links do in it, and what the critical path consists of. A trace is
    shown by chrome://tracing or ui.perfetto.dev: a process for each device.

    A plan with micro-batches, stages or modes of layers is simulated pass by pass: what each stage does, and when it
    waits; a process of the trace is a stage.
    """
    found: Simulation | StagedSimulation
    with progress() as on_progress:
        chosen = chosen_plan(plan, model, on_progress, keeps_machine=False)
        on_progress("simulating a step", 0.0)
        if not chosen.has_parts:
            found = simulate(chosen, machine=model.machine, collectives=collectives, overlaps=not no_overlap)
        elif collectives:
            raise SimulationError(
                "sums of a plan with micro-batches, stages or modes take what its cost model says, "
                f"{chosen.cost_model}: leave out --collectives, or search under another --cost-model"
            )
        else:
            found = simulate_stages(chosen, machine=model.machine, overlaps=not no_overlap)
    views: tuple[Callable[[Any], str], Callable[[Any], dict[str, Any]], Callable[[Any], None]]
    views = chrome_trace, _document, _print
    if isinstance(found, StagedSimulation):
        views = pipeline.chrome_trace, _staged_document, _print_staged
    traced, document, show = views
    if trace is not None:
        write_atomically(trace, traced(found))
    if as_json:
        named = "model=plan.graph.name num_devices=plan.num_devices machine=machine.name step_time_s"
        print_json(attributes(found, named) | document(found))
        return
    show(found)
    if trace is not None:
        say()
        say(f"trace written to {trace}")


def _document(found: Simulation) -> dict[str, Any]:
    levels = found.fabric.levels
    return {
        **attributes(found, "collectives overlap=overlaps"),
        "num_tasks": len(found.tasks.tasks),
        "phases": [_but(asdict(phase), "phase") | {"name": phase.phase} for phase in found.phases],
        "devices": [asdict(device) for device in found.devices],
        "levels": [asdict(level) for level in found.levels],
        "critical_path": {
            "activities_s": {activity.value: time_s for activity, time_s in found.activities.items()},
            "parts": [
                {
                    **attributes(part, "activity device begin_s end_s"),
                    **_but(asdict(part.label), "label"),
                    "level": None if part.level is None else levels[part.level].name,
                }
                for part in found.critical_path
            ],
        },
    }


def _but(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != name}


def _seconds(*times_s: float) -> list[str]:
    return [quantity(time_s, "s") for time_s in times_s]


def _print(found: Simulation) -> None:
    step_s = found.step_time_s
    overlap = "during the backward pass" if found.overlaps else "after the backward pass"
    say(headline(found.plan, found.machine))
    print_facts(
        {
            "one step": quantity(step_s, "s"),
            "collectives": f"{found.collectives}; gradients of weights are summed {overlap}",
        }
    )
    say()
    rows = [
        [phase.phase, *_seconds(phase.begin_s, phase.end_s, phase.computing_s), quantity(phase.moved_bytes, "B")]
        for phase in found.phases
    ]
    print_table(["<phase", "begins", "ends", "computing", "bytes between all devices"], rows)
    say()
    of_devices = {
        "computing": [device.computing_s for device in found.devices],
        "communicating, not computing": [device.communicating_s for device in found.devices],
        "waiting": [device.waiting_s for device in found.devices],
        "its link sends": [device.sending_s for device in found.devices],
        "its link receives": [device.receiving_s for device in found.devices],
    }
    print_table(
        ["<a device's time", "least", "mean", "most"],
        [[name, *_seconds(min(times), sum(times) / len(times), max(times))] for name, times in of_devices.items()],
    )
    say()
    print_table(
        ["<links of a", "number", "bytes out", "busiest", "mean use"],
        [
            [
                level.name,
                level.num_links,
                quantity(level.moved_bytes, "B"),
                *_seconds(level.busiest_s),
                percentage(level.utilisation),
            ]
            for level in found.levels
        ],
    )
    say()
    _print_shares(
        ["<critical path"], {(activity.value,): time_s for activity, time_s in found.activities.items()}, step_s
    )
    say()
    total: dict[tuple[str, ...], float] = {}
    for part in found.critical_path:
        key = part.label.text, part.activity.value
        total[key] = total.get(key, 0.0) + part.duration_s
    longest = sorted(total.items(), key=lambda item: -item[1])[:_SHOWN_PARTS]
    _print_shares(["<longest parts of it", "<spent on"], dict(longest), step_s)


def _print_shares(headers: list[str], times_s: Mapping[tuple[str, ...], float], step_s: float) -> None:
    """Print the share of a step that each activity takes."""
    rows = [[*names, *_time_and_share(time_s, step_s)] for names, time_s in times_s.items()]
    print_table([*headers, "time", "share"], rows)


def _time_and_share(time_s: float, step_s: float) -> tuple[str, str]:
    return quantity(time_s, "s"), percentage(time_s / step_s if step_s else None)


# -- steps of stages


def _staged_document(found: StagedSimulation) -> dict[str, Any]:
    return {
        **attributes(found, "overlap=hides closed_form_s waiting_share=bubble"),
        **attributes(found.plan, "micro_batches schedule num_groups"),
        "stages": [{**asdict(use), "micro_batch_s": use.micro_batch_s} for use in found.stages],
        "passes": [_but(asdict(each), "awaited") for each in found.passes],
        "critical_path": [_but(asdict(each), "awaited") for each in found.critical_path],
    }


def _print_staged(found: StagedSimulation) -> None:
    step_s = found.step_time_s
    over = step_s / found.closed_form_s - 1 if found.closed_form_s else 0.0
    comparison = "" if abs(over) < 5e-5 else f", which is {abs(over):.2%} {'less' if over > 0 else 'more'}"
    say(headline(found.plan, found.machine))
    print_facts(
        {
            "step": found.plan.step_text,
            "one step": quantity(step_s, "s"),
            "closed form": f"{quantity(found.closed_form_s, 's')}{comparison}",
            "devices wait": f"{found.bubble:.1%} of the time, mean over all devices",
        }
    )
    say()
    works = [work for work in Work if any(times[work] for times in found.times_s)]
    rows = []
    for use in found.stages:
        first, beyond = use.devices
        devices = str(first) if beyond - first == 1 else f"{first} – {beyond - 1}"
        rows.append([f"{use.stage}", f"{use.num_layers}", devices, *_seconds(*(use.times_s[work] for work in works))])
    say("What each stage takes for one micro-batch, and once a step:")
    say()
    print_table(["<stage", "<layers", "devices", *map(str, works)], rows)
    say()
    say("What its devices do in the step, micro-batches in flight at most, and the memory of each device:")
    say()
    print_table(
        ["<stage", "<first layer", "<last layer", "busy", "waits", "share", "in flight", "memory"],
        [
            [
                use.stage,
                *map(short, use.layers),
                quantity(use.busy_s, "s"),
                *_time_and_share(use.waiting_s, step_s),
                use.in_flight,
                quantity(use.memory_bytes, "B"),
            ]
            for use in found.stages
        ],
    )
    say()
    total: dict[tuple[str, ...], float] = {}
    for each in found.critical_path:
        key = f"stage {each.stage}", str(each.work)
        total[key] = total.get(key, 0.0) + each.duration_s
    _print_shares(["<the step waits for", "<spent on"], dict(sorted(total.items(), key=lambda item: -item[1])), step_s)
