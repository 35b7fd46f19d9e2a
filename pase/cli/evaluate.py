"""`pase evaluate`, what a strategy of somebody's own costs; `pase diff`, what two strategies have different."""

from pathlib import Path
from typing import Any

import click

from pase.analysis.differences import Difference, LayerDifference, difference
from pase.analysis.evaluation import BOUND_TIME_S, Evaluation, Strategy, evaluate, evaluation, strategy_of
from pase.analysis.explanation import configuration_text
from pase.cli.explain import improvement_document, improvement_texts
from pase.cli.options import (
    ModelArguments,
    check_writable,
    json_option,
    model_argument,
    model_options,
    output_option,
    time_limit_option,
)
from pase.cli.output import print_json, print_table, quantity, say, warn
from pase.cli.progress import READING, progress
from pase.cli.search import print_plan
from pase.common.names import listed
from pase.common.quantities import percent
from pase.costs import COST_MODELS, OPTIMISER_STATE
from pase.machine import DEFAULT_MACHINE, Machine, load_machine, override_machine
from pase.planning.plan import Plan
from pase.planning.plan_file import plan_document, write_plan
from pase.planning.planner import Progress

_cost_model_option = click.option(
    "--cost-model", type=click.Choice(sorted(COST_MODELS)), show_default="a plan's own, or paper"
)


@click.command("evaluate", epilog="Example: pase evaluate alexnet owt --devices 32")
@model_argument
@click.argument("strategy", metavar="STRATEGY")
@model_options(devices_required=False, machine=None)
@_cost_model_option
@click.option("--optimizer", type=click.Choice(list(OPTIMISER_STATE)), help="Its state counts as memory.")
@time_limit_option("Seconds to look for the cheapest strategy.", default=BOUND_TIME_S, show_default=True)
@output_option("Write the plan to this file.")
@json_option
def evaluate_command(
    strategy: str,
    cost_model: str | None,
    optimizer: str | None,
    time_limit_s: float,
    output: Path | None,
    as_json: bool,
    **model: Any,
) -> None:
    """Say what a STRATEGY for MODEL costs, how far that is from the cheapest, and what to change first.

    STRATEGY is a name (optimal, data_parallel, owt, rnn, mesh_tensorflow, megatron, integrated_grid, mcmc, or such
    as 'grid 8x4'), a .toml or .json file that pins layers to configurations, or a plan.
    """
    if output:
        check_writable(output)
    chosen = strategy_of(strategy)
    arguments = _arguments(model, chosen)
    with progress() as on_progress:
        on_progress(READING, 0.0)
        found = evaluation(
            arguments.graph(),
            chosen,
            arguments.devices,
            machine=_machine(arguments, chosen.plan),
            cost_model=cost_model,
            optimiser=optimizer,
            precision=arguments.precision,
            time_limit_s=time_limit_s,
            on_progress=on_progress,
        )
    if output:
        write_plan(found.plan, output)
    if as_json:
        print_json(_document(found))
        return
    print_plan(found.plan)
    _print_against_optimum(found)
    if output:
        warn(f"plan written to {output}")


def _arguments(model: dict[str, Any], strategy: Strategy) -> ModelArguments:
    """Return what is asked for; without a number of devices that of the strategy's plan, if it has one."""
    if model["devices"] is None:
        if strategy.plan is None:
            raise click.UsageError(f"--devices is needed: {strategy.where} does not say how many there are")
        model = {**model, "devices": strategy.plan.num_devices}
    return ModelArguments(**model)


def _machine(arguments: ModelArguments, plan: Plan | None) -> Machine:
    """Return the machine that is asked for; where none is, that of a plan, or the default one."""
    machine = load_machine(arguments.machine or DEFAULT_MACHINE) if arguments.machine or not plan else plan.machine
    return override_machine(
        machine, flop_per_s=arguments.flop_per_s, bandwidth_bytes_per_s=arguments.bandwidth_bytes_per_s
    )


def _document(found: Evaluation) -> dict[str, Any]:
    return {
        **plan_document(found.plan),
        "optimum": None if found.optimum_cost is None else {"total_cost": found.optimum_cost},
        "improvement": improvement_document(found.improvement, found.plan),
    }


def _print_against_optimum(found: Evaluation) -> None:
    plan = found.plan
    if found.optimum_cost is None:
        say("  cheapest strategy       not known: there was no time to look for it (--time-limit)")
    elif not plan.exact:
        ratio = plan.total_cost / found.optimum_cost if found.optimum_cost else 1.0
        known = quantity(found.optimum_cost, plan.cost_unit)
        say(f"  cheapest strategy       {known}   (this one costs {ratio:.2f} × that)")
    for title, text in improvement_texts(found.improvement, plan):
        say(f"  {title:<23} {text}")


@click.command("diff", epilog="Example: pase diff owt optimal --model alexnet --devices 32")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--model", help="Of strategies that are no plans.")
@model_options(devices_required=False, machine=None)
@_cost_model_option
@json_option
def diff_command(first: str, second: str, cost_model: str | None, as_json: bool, **model: Any) -> None:
    """Say which layers two plans of one model split differently, and what each of these differences costs.

    A and B are plans, or strategies as 'pase evaluate' takes them: for the model, devices and machine of the other
    one, or for --model and --devices.
    """
    strategies = strategy_of(first), strategy_of(second)
    with progress() as on_progress:
        on_progress(READING, 0.0)
        plans = _plans(strategies, model, cost_model, on_progress)
    found = difference(*plans)
    if as_json:
        print_json(_difference_document(found))
    else:
        _print_difference(found)


def _plans(
    strategies: tuple[Strategy, Strategy], model: dict[str, Any], cost_model: str | None, on_progress: Progress
) -> tuple[Plan, Plan]:
    """Return the plans of two strategies: those of a plan's file as they are, others for the same as these."""
    known = next((strategy.plan for strategy in strategies if strategy.plan), None)
    if known is None and model["model"] is None:
        raise click.UsageError("--model is needed: neither of the two is a plan")
    name, where = model["model"], [strategy.where for strategy in strategies]
    own = ModelArguments(**{**model, "model": name or "", "devices": model["devices"] or (known and known.num_devices)})
    if own.devices is None:
        raise click.UsageError(f"--devices is needed: {' and '.join(where)} do not say how many there are")
    machine, graph = _machine(own, known), own.graph() if name else known and known.graph
    is_asked = any(value for value in (*model.values(), cost_model))

    def plan_of(strategy: Strategy) -> Plan:
        if strategy.plan and not strategy.constraints and not is_asked:
            return strategy.plan
        return evaluate(
            graph,
            strategy,
            own.devices,
            machine=machine,
            cost_model=cost_model or (known.cost_model if known else None),
            precision=own.precision or (known.precision if known else None),
            on_progress=on_progress,
        )

    first, second = strategies
    return plan_of(first), plan_of(second)


def _difference_document(found: Difference) -> dict[str, Any]:
    first = found.plans[0]
    return {
        "model": first.graph.name,
        "cost_model": first.cost_model,
        "cost_unit": first.cost_unit,
        "plans": [
            {"num_devices": plan.num_devices, "machine": plan.machine.name, "total_cost": plan.total_cost}
            for plan in found.plans
        ],
        "difference": found.cost,
        "layers": [
            {
                "name": layer.name,
                "splits": [dict(side.splits) for side in layer.layers],
                "costs": list(layer.costs),
                "difference": layer.cost,
            }
            for layer in found.layers
        ],
        "placed_differently": list(found.placed),
    }


def _print_difference(found: Difference) -> None:
    first, second = found.plans
    unit = first.cost_unit
    say(f"{first.graph.name}, cost model {first.cost_model}")
    for side, plan in zip("AB", found.plans, strict=True):
        say(f"  {side}  {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name})")
    say()
    total = second.total_cost - first.total_cost
    share = f" ({percent(total / first.total_cost)})" if first.total_cost and total else ""
    print_table(
        ["<layer", "<A", "<B", "costs A", "costs B", "B costs more"],
        [
            *(_difference_row(layer, found) for layer in found.layers),
            [
                "the step" if first.has_parts or second.has_parts else f"all {len(first.layers)} layers",
                "",
                "",
                *(quantity(plan.total_cost, unit) for plan in found.plans),
                f"{_signed(total, unit)}{share}",
            ],
        ],
    )
    say()
    unlike = sum(not layer.is_split_alike for layer in found.layers)
    say(f"  {unlike} of {len(first.layers)} layers {'has' if unlike == 1 else 'have'} another configuration.")
    if any(layer.is_split_alike for layer in found.layers):
        say("  =: the same configuration, which costs more or less beside other neighbours.")
    if found.placed:
        say(f"  On other devices, under the same configuration: {listed(found.placed)}.")


def _difference_row(layer: LayerDifference, found: Difference) -> list[str]:
    texts = [
        "  ".join([configuration_text(side.splits, len(side.devices)), *plan.modes_of(side)])
        for side, plan in zip(layer.layers, found.plans, strict=True)
    ]
    unit = found.plans[0].cost_unit
    costs = [quantity(cost, unit) for cost in layer.costs]
    return [layer.name, texts[0], "=" if layer.is_split_alike else texts[1], *costs, _signed(layer.cost, unit)]


def _signed(cost: float, unit: str) -> str:
    return f"{'-' if cost < 0 else '+' if cost else ''}{quantity(abs(cost), unit)}"
