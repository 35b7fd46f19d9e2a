"""`pase evaluate`: the cost of a given strategy; `pase diff`: the differences between two strategies."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from pase.analysis.differences import Difference, difference
from pase.analysis.evaluation import BOUND_TIME_S, Strategy, evaluate, evaluation, strategy_of
from pase.cli.explain import improvement_document, improvement_texts
from pase.cli.options import (
    ModelArguments,
    json_option,
    model_argument,
    model_options,
    optimiser_option,
    output_option,
    own_cost_model_option,
    time_limit_option,
)
from pase.cli.output import print_facts, print_json, print_table, say, warn
from pase.cli.progress import READING, progress
from pase.cli.search import print_plan
from pase.common.documents import attributes
from pase.common.options import option
from pase.common.words import listed, percent, quantity, signed
from pase.planning.plan import Plan
from pase.planning.plan_file import plan_document, write_plan
from pase.planning.planner import Progress
from pase.views.drawing.plans import split_text


@click.command("evaluate", epilog="Example: pase evaluate alexnet owt --devices 32")
@model_argument
@click.argument("strategy", metavar="STRATEGY")
@model_options()
@own_cost_model_option
@optimiser_option()
@time_limit_option("Seconds to look for the cheapest strategy.", default=BOUND_TIME_S)
@output_option("Write the plan to this file.")
@json_option
def evaluate_command(model: ModelArguments, strategy: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Say what a STRATEGY for MODEL costs, how far that is from the cheapest, and what to change first.

    STRATEGY is a name (optimal, data_parallel, owt, rnn, mesh_tensorflow, megatron, integrated_grid, mcmc, or such
    as 'grid 8x4'), a .toml or .json file that pins layers to configurations, or a plan.
    """
    chosen = strategy_of(strategy)
    known = chosen.plan
    if model.num_devices is None:
        if known is None:
            raise click.UsageError(f"--devices is needed: {chosen.where} does not say how many there are")
        model = replace(model, num_devices=known.num_devices)
    with progress(READING) as on_progress:
        found = evaluation(
            model.graph(),
            chosen,
            model.devices,
            machine=model.loaded_machine(known.machine if known else None),
            precision=model.precision,
            on_progress=on_progress,
            **options,
        )
    plan = found.plan
    if output:
        write_plan(plan, output)
    if as_json:
        optimum = None if found.optimum_cost is None else {"total_cost": found.optimum_cost}
        improvement = improvement_document(found.improvement, plan)
        print_json({**plan_document(plan), "optimum": optimum, "improvement": improvement})
        return
    print_plan(plan)
    cheapest = None
    if found.optimum_cost is None:
        cheapest = "not known: there was no time to look for it (--time-limit)"
    elif not plan.exact:
        ratio = plan.total_cost / found.optimum_cost if found.optimum_cost else 1.0
        cheapest = f"{quantity(found.optimum_cost, plan.cost_unit)}   (this one costs {ratio:.2f} × that)"
    print_facts({"cheapest strategy": cheapest, **improvement_texts(found.improvement, plan)})
    if output:
        warn(f"plan written to {output}")


@click.command("diff", epilog="Example: pase diff owt optimal --model alexnet --devices 32")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@option("--model", help="Model of strategies that are not plans.")
@model_options()
@own_cost_model_option
@json_option
def diff_command(first: str, second: str, model: ModelArguments, cost_model: str | None, as_json: bool) -> None:
    """Say which layers two plans of one model split differently, and what each of these differences costs.

    A and B are plans, or strategies as 'pase evaluate' takes them: for the model, devices and machine of the other
    one, or for --model and --devices.
    """
    strategies = strategy_of(first), strategy_of(second)
    with progress(READING) as on_progress:
        plans = _plans(strategies, model, cost_model, on_progress)
    found = difference(*plans)
    if as_json:
        print_json(_difference_document(found))
    else:
        _print_difference(found)


def _plans(
    strategies: tuple[Strategy, Strategy], model: ModelArguments, cost_model: str | None, on_progress: Progress
) -> tuple[Plan, Plan]:
    """Return the plans of two strategies: plan files as they are, others for the same model and devices."""
    known = next((strategy.plan for strategy in strategies if strategy.plan), None)
    if known is None and not model.model:
        raise click.UsageError("--model is needed: neither of the two is a plan")
    if known is None and model.num_devices is None:
        where = " and ".join(strategy.where for strategy in strategies)
        raise click.UsageError(f"--devices is needed: {where} do not say how many there are")
    is_asked = cost_model or not model.is_empty
    if known is None:
        graph, devices, machine = model.graph(), model.devices, model.loaded_machine()
    else:
        graph = model.graph() if model.model else known.graph
        devices, machine = model.num_devices or known.num_devices, model.loaded_machine(known.machine)
        cost_model = cost_model or known.cost_model
    precision = model.precision or (known.precision if known else None)

    def plan_of(strategy: Strategy) -> Plan:
        if strategy.plan and not strategy.constraints and not is_asked:
            return strategy.plan
        return evaluate(
            graph,
            strategy,
            devices,
            machine=machine,
            cost_model=cost_model,
            precision=precision,
            on_progress=on_progress,
        )

    first, second = strategies
    return plan_of(first), plan_of(second)


def _difference_document(found: Difference) -> dict[str, Any]:
    return {
        **attributes(found.plans[0], "model=graph.name cost_model cost_unit"),
        "plans": [attributes(plan, "num_devices machine=machine.name total_cost hidden_cost") for plan in found.plans],
        "difference": found.cost,
        "layers": [
            attributes(layer, "name costs difference=cost") | {"splits": [side.splits for side in layer.layers]}
            for layer in found.layers
        ],
        "placed_differently": found.placed,
    }


def _print_difference(found: Difference) -> None:
    first, second = found.plans
    cost, more = partial(quantity, unit=first.cost_unit), partial(signed, unit=first.cost_unit)
    say(f"{first.graph.name}, cost model {first.cost_model}")
    for side, plan in zip("AB", found.plans, strict=True):
        say(f"  {side}  {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name})")
    say()
    rows = []
    for layer in found.layers:
        texts = [split_text(plan, side) for side, plan in zip(layer.layers, found.plans, strict=True)]
        texts[1] = "=" if layer.is_split_alike else texts[1]
        rows.append([layer.name, *texts, *map(cost, layer.costs), more(layer.cost)])
    has_parts = first.has_parts or second.has_parts
    overlapped = [-plan.hidden_cost for plan in found.plans]
    if any(overlapped) and not has_parts:
        rows.append(["overlapped", "", "", *map(cost, overlapped), more(overlapped[1] - overlapped[0])])
    total = found.cost
    share = f" ({percent(total / first.total_cost)})" if first.total_cost and total else ""
    whole = "the step" if has_parts else f"all {len(first.layers)} layers"
    rows.append([whole, "", "", *(cost(plan.total_cost) for plan in found.plans), f"{more(total)}{share}"])
    print_table(["<layer", "<A", "<B", "costs A", "costs B", "B costs more"], rows)
    say()
    unlike = sum(not layer.is_split_alike for layer in found.layers)
    say(f"  {unlike} of {len(first.layers)} layers {'has' if unlike == 1 else 'have'} another configuration.")
    if any(layer.is_split_alike for layer in found.layers):
        say("  =: the same configuration, which costs more or less next to other neighbours.")
    if found.placed:
        say(f"  On other devices, under the same configuration: {listed(found.placed)}.")
