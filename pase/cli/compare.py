"""`pase compare`: our strategy for a model beside those of experts and of a random search."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pase.analysis.baselines.compare import OURS, Comparison, compare
from pase.analysis.baselines.mcmc import COLDNESS, MAX_STEPS, STARTS, Sampling
from pase.analysis.baselines.registry import BASELINES, chosen
from pase.analysis.baselines.steps import compare_steps
from pase.cli.options import (
    ModelArguments,
    WholeNumber,
    json_option,
    model_argument,
    model_options,
    output_option,
    step_options,
)
from pase.cli.output import duration, print_json, print_table, quantity, say, step_text, warn
from pase.cli.progress import READING, progress
from pase.costs import COST_MODELS
from pase.errors import PlanError
from pase.graph import Graph
from pase.planning.plan import Plan
from pase.planning.plan_file import write_plan
from pase.planning.planner import SearchOptions

_SEVERAL = {"both": ("alpha_beta", "paper"), "all": tuple(sorted(COST_MODELS))}
"""Words for several cost models."""


@click.command("compare", epilog="Example: pase compare alexnet --devices 32 --cost-model both")
@model_argument
@model_options(devices_required=True)
@click.option("--cost-model", type=click.Choice([*sorted(COST_MODELS), *_SEVERAL]), default="paper", show_default=True)
@click.option("--only", multiple=True, metavar="NAME", help=f"Of the others: {', '.join(BASELINES)}; may be repeated.")
@click.option("--seed", type=WholeNumber(min=0), default=0, show_default=True, help="Of the random search.")
@click.option(
    "--steps", type=WholeNumber(min=0), default=MAX_STEPS, show_default=True, help="Of the random search, at most."
)
@click.option(
    "--start", type=click.Choice(list(STARTS)), default="experts", show_default=True, help="Of the random search."
)
@click.option(
    "--coldness", type=float, default=COLDNESS, show_default=True, help="Its β, in units of a layer's mean cost."
)
@step_options
@click.option("--keep-batch", is_flag=True, help="Compare although the batch cannot be split.")
@output_option("Write every strategy's plan into this folder.")
@json_option
def compare_command(
    cost_model: str,
    only: tuple[str, ...],
    seed: int,
    steps: int,
    start: str,
    coldness: float,
    micro_batches: int | str,
    stages: int | str,
    schedule: str,
    modes: tuple[str, ...],
    keep_batch: bool,
    output: Path | None,
    as_json: bool,
    **model: object,
) -> None:
    """Compare the best strategy for MODEL with those of others.

    The others are strategies of experts, for the networks that they are meant for, and what a random search finds.
    All are costed alike. With -o each can be emitted, run and explained as a plan.

    With micro-batches, stages or modes the others are data parallelism, ZeRO's states and even stages, of as many
    micro-batches.
    """
    options = SearchOptions(
        micro_batches=micro_batches, stages=stages, schedule=schedule, modes=modes, keep_batch=keep_batch
    )
    if options.has_parts and only:
        raise click.UsageError("--only names strategies of plans without micro-batches, stages and modes")
    baselines = chosen(only, Sampling(seed=seed, steps=steps, start=start, coldness=coldness))
    if output:
        _make_folder(output)
    arguments = ModelArguments(**model)  # type: ignore[arg-type]
    machine = arguments.loaded_machine()
    with progress() as on_progress:
        on_progress(READING, 0.0)
        graph = arguments.graph()
    comparisons = []
    for name in _SEVERAL.get(cost_model, (cost_model,)):
        with progress() as on_progress:
            if options.has_parts:
                chosen_options = replace(options, cost_model=name)

                def reload(batch: int) -> Graph:
                    return replace(arguments, batch=batch).graph()

                comparisons.append(
                    compare_steps(
                        graph,
                        arguments.devices,
                        machine=machine,
                        options=chosen_options,
                        on_progress=on_progress,
                        reload=reload,
                    )
                )
                continue
            comparisons.append(
                compare(
                    graph,
                    arguments.devices,
                    machine=machine,
                    cost_model=name,
                    baselines=baselines,
                    keep_batch=keep_batch,
                    on_progress=on_progress,
                )
            )
    written = [path for comparison in comparisons for path in _written(comparison, output, cost_model in _SEVERAL)]
    if as_json:
        print_json(comparisons_document(comparisons))
        return
    for number, comparison in enumerate(comparisons):
        if number:
            say()
        _print(comparison)
    if written:
        warn(f"{len(written)} plans written to {output}: {', '.join(path.name for path in written)}")


def _make_folder(folder: Path) -> None:
    """Make the folder for the plans; found out before a long search, not after it."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise PlanError(f"folder {folder} cannot be made: {error.strerror}; name one that can") from None


def _written(comparison: Comparison, folder: Path | None, is_one_of_many: bool) -> list[Path]:
    """Write the plans of a comparison and return their paths."""
    paths = []
    for contender in comparison.contenders if folder else ():
        assert folder is not None
        stem = f"{contender.name}.{contender.plan.cost_model}" if is_one_of_many else contender.name
        path = folder / f"{stem}.json"
        write_plan(contender.plan, path)
        paths.append(path)
    return paths


# -- for programs


def comparisons_document(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return what --json prints: the strategies of all cost models in one list."""
    first = _ours(comparisons[0])
    return {
        "model": first.graph.name,
        "num_devices": first.num_devices,
        "machine": first.machine.name,
        "strategies": [
            {
                "name": contender.name,
                "cost_model": contender.plan.cost_model,
                "cost_unit": contender.plan.cost_unit,
                "total_cost": contender.plan.total_cost,
                "compute": contender.compute,
                "communication": contender.communication,
                "memory_bytes_per_device": contender.memory_bytes,
                "fits_device": contender.fits_device,
                "ratio_to_data_parallel": contender.ratio_to_data_parallel,
                "search_time_s": contender.search_time_s,
                "exact": contender.plan.exact,
                "lower_bound": contender.plan.lower_bound,
                "gap": contender.plan.gap,
            }
            for comparison in comparisons
            for contender in comparison.contenders
        ],
        "not_applicable": [{"name": entry.name, "needs": entry.needs} for entry in comparisons[0].absent],
        "tables_time_s": {_ours(comparison).cost_model: comparison.tables_time_s for comparison in comparisons},
    }


# -- for people


def _print(comparison: Comparison) -> None:
    ours = _ours(comparison)
    say(
        f"{ours.graph.name} on {ours.num_devices} × {ours.machine.device.name} ({ours.machine.name}), "
        f"cost model {ours.cost_model}"
    )
    say()
    columns = ("total cost", "compute", "communication", "memory", "÷ data parallel", "÷ ours", "search")
    print_table(["<strategy", *columns], _rows(comparison))
    say()
    proof = "proven optimal" if ours.exact else f"not proven optimal: gap {ours.gap:.2%}"
    if ours.has_parts:
        say(f"  {OURS}: {proof}{ours.among}; {step_text(ours)}; all have as many micro-batches")
    else:
        say(f"  {OURS}: {proof}; costs worked out in {duration(comparison.tables_time_s)}, which no search time holds")
    if not all(contender.fits_device for contender in comparison.contenders):
        say(f"  *: more memory than the {quantity(ours.machine.device.memory_bytes, 'B')} of a device")
    for entry in comparison.absent:
        say(f"  {entry.name} does not apply: it needs {entry.needs}")


def _rows(comparison: Comparison) -> list[list[str]]:
    unit, best = _ours(comparison).cost_unit, _ours(comparison).total_cost
    return [
        [
            contender.name,
            quantity(contender.plan.total_cost, unit),
            quantity(contender.compute, unit),
            quantity(contender.communication, unit),
            f"{'' if contender.fits_device else '* '}{quantity(contender.memory_bytes, 'B')}",
            f"{contender.ratio_to_data_parallel:.3f}",
            f"{contender.plan.total_cost / best if best else 1.0:.3f}",
            duration(contender.search_time_s),
        ]
        for contender in comparison.contenders
    ]


def _ours(comparison: Comparison) -> Plan:
    return comparison.contenders[0].plan
