"""`pase search`: find the best strategy for a model on a number of devices, and print its costs."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from pase.analysis.advice import Held, held_by_opaque_layers, worthwhile_padding
from pase.analysis.figures import cost_figures
from pase.cli.options import (
    ModelArguments,
    all_layers_option,
    byte_size,
    choice_option,
    constraint_options,
    cost_model_option,
    costs_note,
    device_memory_bytes,
    flag,
    headline,
    json_option,
    keep_batch_option,
    memory_per_device_option,
    model_argument,
    model_options,
    optimiser_option,
    ordering_option,
    output_option,
    overlapped_text,
    print_layers,
    step_options,
    strict_option,
    time_limit_option,
    total_cost_text,
)
from pase.cli.output import print_facts, print_json, print_table, say, warn
from pase.cli.progress import READING, progress
from pase.common.documents import attributes
from pase.common.options import POSITIVE, option
from pase.common.words import duration, large, listed, percentage, quantity, short
from pase.costs import DEFAULT_OPTIMISER
from pase.graph import Graph
from pase.planning.constraints import constraint_texts
from pase.planning.plan import CHEAPEST, NOT_SEARCHED, Plan
from pase.planning.planner import ATTENTION, GATHER, WITHOUT_LIMIT, SearchOptions, search
from pase.planning.steps import TrainingStep
from pase.sharding.shards import enumerate_configurations
from pase.solver.ordering import ORDERINGS, OrderingReport, report_ordering
from pase.views.drawing.plans import extents_text, split_text

_PADDING_TIME_S = 2.0
"""Hints search again only if the first search took less than this; the hints together take no longer, either."""

_HELD_TIME_S = 60.0
"""The same for the hint on unknown operators."""

_SAME = 5e-5
"""Costs whose relative difference is smaller are printed as equal."""


def _share(text: str) -> float:
    """Return a share, which may be given in per cent."""
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(%?)", text, re.ASCII)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a share; expected a number such as 0.005, or 0.5%")
    return float(found[1]) / (100 if found[2] else 1)


@click.command("search", epilog="Example: pase search alexnet --devices 32 --machine 1080ti -o plan.json")
@model_argument
@model_options(devices_required=True)
@cost_model_option
@ordering_option
@flag("--explain-ordering", help="Say what each ordering would take.")
@time_limit_option("Seconds to search in.")
@option("--memory-limit", "solver_memory_bytes", type=byte_size, metavar="SIZE", help="For all cost tables: 2GiB.")
@memory_per_device_option
@optimiser_option(default=DEFAULT_OPTIMISER)
@step_options
@option(
    "--imbalance",
    type=click.FloatRange(min=1),
    metavar="FACTOR",
    help="Of a mixture: how many times an equal share of rows the busiest experts get.",
)
@choice_option(
    "--attention",
    ATTENTION,
    default=GATHER,
    help="How devices with parts of a sequence come by all keys and values; auto: in each layer what costs less.",
)
@option("--jobs", type=POSITIVE, default=1, help="Processes to search in.")
@option(
    "--gap",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="For steps with stages, micro-batches or modes: stop within this gap; 0, or 0.01 if choices are many.",
)
@option(
    "--simplify",
    type=_share,
    metavar="SHARE",
    help="For such steps: accept this much more cost, such as 0.5%, for a more regular plan; 0: the cheapest.",
)
@constraint_options
@keep_batch_option
@strict_option
@all_layers_option
@output_option("Write the plan to this file.")
@json_option
def search_command(
    model: ModelArguments,
    explain_ordering: bool,
    strict: bool,
    shows_all: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the best strategy for MODEL on a number of devices.

    MODEL: a built-in network ('pase models'), a file (.onnx, .keras), or
    package.module:function, which returns a model.
    """
    machine = model.loaded_machine()
    options["device_memory_bytes"] = device_memory_bytes(options["device_memory_bytes"], machine)
    with progress(READING) as on_progress:
        graph = model.graph(is_strict=strict)
        plan = search(
            graph,
            model.devices,
            machine=machine,
            options=SearchOptions(**options),
            on_progress=on_progress,
            reload=lambda batch: replace(model, batch=batch).graph(is_strict=strict),
        )
    if output:
        plan.save(output)
    orderings = _orderings(plan.graph, model.devices) if explain_ordering else []
    held = None if plan.has_parts else _held(plan, options["time_limit_s"])
    if as_json:
        # Imported here because few searches print a document.
        from pase.planning.plan_file import plan_document

        document = plan_document(plan)
        if held is not None:
            layers = [{"name": name, "operator": function} for name, function in held.layers]
            document |= {"opaque": {"layers": layers, "lower_bound_if_free": held.lower_bound}}
        if orderings:
            names = "name largest_dependent_set predicted_operations=operations predicted_bytes=table_bytes"
            document |= {"orderings": [attributes(report, names) for report in orderings]}
        print_json(document)
        return
    print_plan(plan, shows_all=shows_all)
    if orderings:
        say()
        say("orderings, on the whole graph before any reduction:")
        print_table(
            ["<ordering", "largest dependent set", "predicted operations", "predicted memory"],
            [
                [report.name, report.largest_dependent_set, large(report.operations), large(report.table_bytes, "B")]
                for report in orderings
            ],
        )
    _say_what_padding_saves(plan, graph)
    total, own = plan.peak.bytes, plan.machine.device.memory_bytes
    if total > own:
        hint = "" if plan.device_memory_bytes else "; --memory-per-device machine looks for what fits"
        device = plan.machine.device.name
        warn(f"a device needs {quantity(total, 'B')}; {device} has {quantity(own, 'B')}{hint}")
    if output:
        warn(f"plan written to {output}")


def _held(plan: Plan, time_limit_s: float | None) -> Held | None:
    """Return the cost of treating unknown operators generically, if it is above 0 and time permits; warn of it."""
    left_s = min(_HELD_TIME_S, time_limit_s or _HELD_TIME_S) - plan.search.time_s
    held = held_by_opaque_layers(plan, time_limit_s=left_s) if left_s > plan.search.time_s else None
    if held is not None:
        (name, function), *others = held.layers
        more = f" and {len(others)} more" if others else ""
        warn(
            f"nothing is known of {function or 'the operator'} (layer {short(name)}{more}) but what passes through it, "
            f"so that it is split no other way: this costs up to {1 - held.lower_bound / plan.total_cost:.1%} of the "
            f"plan; split freely, the optimum would be {quantity(held.lower_bound, plan.cost_unit)} or more"
        )
    return held


def _orderings(graph: Graph, num_devices: int) -> list[OrderingReport]:
    """Return a report for every ordering, for the problem before any reduction."""
    sizes = [len(enumerate_configurations(operator, num_devices)) for operator in graph.operators]
    return [report_ordering(name, graph.neighbours, sizes) for name in ORDERINGS]


def print_plan(plan: Plan, *, shows_all: bool = False) -> None:
    """Print the strategy layer by layer, repeated blocks once unless `shows_all`, then its properties."""
    cost, total = partial(quantity, unit=plan.cost_unit), plan.total_cost
    figures = cost_figures(plan)
    print_layers(
        plan.graph,
        ["<layer", "<iteration space", "<configuration", "layer cost", "transfer cost", "share"],
        [
            [
                layer.name,
                extents_text(layer.dims),
                split_text(plan, layer),
                cost(layer.layer_cost),
                cost(layer.transfer_cost),
                percentage(own.share),
            ]
            for layer, own in zip(plan.layers, figures.layers, strict=True)
        ],
        [layer.kind for layer in plan.layers],
        shows_all=shows_all,
    )
    if note := costs_note(plan, figures):
        say()
        say(note)
    say()
    say(f"{headline(plan)}, cost model {plan.cost_model}")
    rings = [op.name for op in plan.graph.operators if op.ring is not None and plan[op.name].splits["s"] > 1]
    free = plan.baselines.get(WITHOUT_LIMIT)
    dearer = f"the limit costs {total / free - 1 if free else 0.0:.2%} more"
    is_searched = plan.search.ordering != NOT_SEARCHED
    has_sets = is_searched and not plan.has_parts
    print_facts(
        {
            "precision": plan.precision.text,
            "total cost": f"{total_cost_text(plan)}   ({plan.certificate})",
            "simplest": _simplest(plan),
            "as placed": _as_placed(plan),
            "step": plan.step_text if plan.has_parts else None,
            "overlapped": overlapped_text(plan, figures),
            "attention": f"keys and values circulate in {listed(rings, most=1)}" if rings else None,
            "data parallelism": f"{cost(plan.baselines['data_parallel'])}   ({_relative_to_ours(plan)})",
            "constraints": constraint_texts(plan.constraints),
            "parts of other sizes": _uneven_parts(plan),
            "memory of a device": _memory(plan),
            "at its peak": _peak(plan),
            "without the limit": None if free is None else f"{cost(free)}   ({dearer})",
            "largest dependent set": (
                f"{plan.search.largest_dependent_set}   (ordering {plan.search.ordering})" if has_sets else None
            ),
            "search time": duration(plan.search.time_s) if is_searched else None,
        }
    )


def _uneven_parts(plan: Plan) -> str:
    """Return the layers that a pin splits into unequal parts, and the targets that support it; "" for none."""
    uneven = [
        f"{short(layer.name)}: {dim}={layer.dims[dim]} in {layer.splits[dim]}"
        for layer in plan.layers
        for dim in layer.uneven_dims
    ]
    return f"{listed(uneven, most=3)}; programs for PyTorch alone take them" if uneven else ""


def _simplest(plan: Plan) -> str | None:
    """Return the additional cost of a more regular plan than the cheapest known; None if it is the cheapest."""
    cheapest, record = plan.baselines.get(CHEAPEST), plan.search
    if not cheapest:
        return None
    return (
        f"within {100 * record.simplify:.3g}% of the cheapest known: {plan.total_cost / cheapest - 1:+.2%}, "
        f"{record.configurations} configurations of repeated layers instead of {record.cheapest_configurations}"
    )


def _as_placed(plan: Plan) -> str | None:
    """Return the time of a step with the plan's placement; None where that is its total cost."""
    if plan.cost_unit == "FLOP" or not plan.total_cost:
        return None
    more = plan.placed_cost / plan.total_cost - 1
    comparison = f"{abs(more):.2%} {'more' if more > 0 else 'less'}, with one placement for all layers"
    return None if abs(more) < _SAME else f"{quantity(plan.placed_cost, plan.cost_unit)}   ({comparison})"


def _relative_to_ours(plan: Plan) -> str:
    """Return the cost of data parallelism relative to the plan, and the memory that it needs if there is a limit."""
    ratio = plan.baselines["data_parallel"] / plan.total_cost if plan.total_cost else 1.0
    limit = plan.device_memory_bytes
    if limit is None:
        return f"{ratio:.2f} × ours"
    from pase.planning.pipelines import data_parallel_step

    needed = data_parallel_step(TrainingStep.of(plan)).peak.bytes
    return f"{ratio:.2f} × ours; needs {quantity(needed, 'B')}{', too much' if needed > limit else ''}"


def _memory(plan: Plan) -> str:
    """Return the memory that a device needs, relative to its limit and its size, and when it peaks."""
    peak, limit, own = plan.peak, plan.device_memory_bytes, plan.machine.device.memory_bytes
    total = peak.bytes
    shares = [f"{total / own:.0%} of its {quantity(own, 'B')}"]
    if limit is not None:
        shares.insert(0, f"{total / limit:.1%} of the limit, {quantity(limit, 'B')}")
    state = f", with {plan.optimiser}" if plan.memory.optimiser_bytes else ""
    return f"{quantity(total, 'B')}{state}   ({'; '.join(shares)})"


def _peak(plan: Plan) -> str:
    """Return the contents of a device's memory at its peak, and when that is."""
    peak = plan.peak
    when = f"{peak.phase} pass of {short(peak.layer)}" if peak.layer else peak.phase
    parts = {
        "weights": peak.memory.weights_bytes,
        "gradients": peak.memory.gradients_bytes,
        "optimizer": peak.memory.optimiser_bytes,
        "activations": peak.memory.activations_bytes,
        "buffers": peak.memory.buffers_bytes,
    }
    told = " · ".join(f"{what} {quantity(size, 'B')}" for what, size in parts.items() if size)
    return f"{told}   ({when})"


def _say_what_padding_saves(plan: Plan, graph: Graph) -> None:
    """Print the extents that divide badly, where padding them reduces the cost."""
    is_plain = plan.exact and not plan.constraints and not plan.has_parts and plan.device_memory_bytes is None
    if not is_plain or plan.search.time_s > _PADDING_TIME_S:
        return
    for padding in worthwhile_padding(plan, graph, time_limit_s=_PADDING_TIME_S):
        dims = [f"{name}: {dim}" for name, dim in padding.dims]
        more = f", … {len(dims) - 3} more" if len(dims) > 3 else ""
        warn(
            f"{padding.extent:,} ({', '.join(dims[:3])}{more}) cannot be cut {padding.ways} ways; with "
            f"{padding.padded:,} in its place the cheapest strategy costs "
            f"{quantity(padding.total_cost, plan.cost_unit)}, {1 - padding.total_cost / plan.total_cost:.1%} less"
        )
