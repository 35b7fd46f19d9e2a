"""`pase compare`: compare the best strategy for a model with expert strategies and a random search."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from pase.analysis.baselines.compare import OURS, Comparison, compare
from pase.analysis.baselines.mcmc import COLDNESS, MAX_STEPS, STARTS, Sampling
from pase.analysis.baselines.registry import BASELINES, chosen
from pase.cli.options import (
    ModelArguments,
    choice_option,
    device_memory_bytes,
    headline,
    json_option,
    keep_batch_option,
    memory_per_device_option,
    model_argument,
    model_options,
    optimiser_option,
    output_option,
    step_options,
)
from pase.cli.output import print_json, print_table, say, warn
from pase.cli.progress import READING, progress
from pase.common.documents import attributes
from pase.common.options import WholeNumber, option
from pase.common.words import duration, quantity
from pase.costs import COST_MODELS, DEFAULT_OPTIMISER
from pase.errors import PlanError
from pase.planning.plan import Plan
from pase.planning.plan_file import write_plan
from pase.planning.planner import SearchOptions

_SEVERAL = {"both": ("alpha_beta", "paper"), "all": tuple(sorted(COST_MODELS))}
"""Names for several cost models."""

_COUNT = WholeNumber(min=0)


@click.command("compare", epilog="Example: pase compare alexnet --devices 32 --cost-model both")
@model_argument
@model_options(devices_required=True)
@choice_option("--cost-model", [*sorted(COST_MODELS), *_SEVERAL], default="paper")
@option("--only", multiple=True, metavar="NAME", help=f"Of the others: {', '.join(BASELINES)}; may be repeated.")
@option("--seed", type=_COUNT, default=0, help="Seed of the random search.")
@option("--steps", type=_COUNT, default=MAX_STEPS, help="Maximum steps of the random search.")
@choice_option("--start", STARTS, default="experts", help="Starting point of the random search.")
@option("--coldness", type=float, default=COLDNESS, help="Its β, in units of a layer's mean cost.")
@memory_per_device_option
@optimiser_option(default=DEFAULT_OPTIMISER)
@step_options
@keep_batch_option
@output_option("Write every strategy's plan into this folder.", callback=None)
@json_option
def compare_command(
    model: ModelArguments,
    cost_model: str,
    only: tuple[str, ...],
    seed: int,
    steps: int,
    start: str,
    coldness: float,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare the best strategy for MODEL with those of others.

    The others are expert strategies, for the networks that they apply to, and the result of a random search. The same
    cost model applies to all. With -o each can be emitted, run and explained as a plan.

    With micro-batches, stages or modes, the others have the same number of micro-batches, and include ZeRO's states and
    even stages.
    """
    machine = model.loaded_machine()
    options["device_memory_bytes"] = device_memory_bytes(options["device_memory_bytes"], machine)
    asked = SearchOptions(**options)
    baselines = chosen(only, Sampling(seed=seed, steps=steps, start=start, coldness=coldness))
    if output:
        try:
            output.mkdir(exist_ok=True)
        except OSError as error:
            raise PlanError(f"folder {output} cannot be made: {error.strerror}; name one that can") from None
    names = _SEVERAL.get(cost_model, (cost_model,))
    with progress(READING):
        graph = model.graph()
    comparisons = []
    for name in names:
        with progress() as on_progress:
            comparison = compare(
                graph,
                model.devices,
                machine=machine,
                baselines=baselines,
                options=replace(asked, cost_model=name),
                on_progress=on_progress,
                reload=model.reload,
            )
            comparisons.append(comparison)
    written = []
    for contender in (each for comparison in comparisons for each in comparison.contenders) if output else ():
        assert output is not None
        suffix = f".{contender.plan.cost_model}" if cost_model in _SEVERAL else ""
        written.append(output / f"{contender.name}{suffix}.json")
        write_plan(contender.plan, written[-1])
    if as_json:
        print_json(comparisons_document(comparisons))
        return
    for number, comparison in enumerate(comparisons):
        if number:
            say()
        _print(comparison)
    if written:
        warn(f"{len(written)} plans written to {output}: {', '.join(path.name for path in written)}")


def comparisons_document(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the output of --json: the strategies of all cost models in one list."""
    of_strategy = "name compute communication memory_bytes_per_device=memory_bytes fits_device ratio_to_data_parallel"
    of_plan = "cost_model cost_unit total_cost exact lower_bound gap"
    return {
        **attributes(_ours(comparisons[0]), "model=graph.name num_devices machine=machine.name"),
        "strategies": [
            attributes(contender, f"{of_strategy} search_time_s") | attributes(contender.plan, of_plan)
            for comparison in comparisons
            for contender in comparison.contenders
        ],
        "not_applicable": [attributes(entry, "name needs") for entry in comparisons[0].absent],
        "tables_time_s": {_ours(comparison).cost_model: comparison.tables_time_s for comparison in comparisons},
    }


def _print(comparison: Comparison) -> None:
    ours = _ours(comparison)
    cost, best = partial(quantity, unit=ours.cost_unit), ours.total_cost
    say(f"{headline(ours)}, cost model {ours.cost_model}")
    say()
    columns = ("total cost", "compute", "communication", "memory", "÷ data parallel", "÷ ours", "search")
    print_table(
        ["<strategy", *columns],
        [
            [
                contender.name,
                *map(cost, (contender.plan.total_cost, contender.compute, contender.communication)),
                f"{'' if contender.fits_device else '* '}{quantity(contender.memory_bytes, 'B')}",
                f"{contender.ratio_to_data_parallel:.3f}",
                f"{contender.plan.total_cost / best if best else 1.0:.3f}",
                duration(contender.search_time_s),
            ]
            for contender in comparison.contenders
        ],
    )
    say()
    if ours.has_parts:
        say(f"  {OURS}: {ours.certificate}; {ours.step_text}; all have as many micro-batches")
    else:
        tables_time = duration(comparison.tables_time_s)
        say(f"  {OURS}: {ours.certificate}; costs worked out in {tables_time}, which no search time holds")
    if not all(contender.fits_device for contender in comparison.contenders):
        say(f"  *: more memory than the {quantity(ours.machine.device.memory_bytes, 'B')} of a device")
    for entry in comparison.absent:
        say(f"  {entry.name} does not apply: it needs {entry.needs}")


def _ours(comparison: Comparison) -> Plan:
    return comparison.contenders[0].plan
