"""`pase search`, the best strategy for a model on devices; `pase tables`, `pase solve`: its tables alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pase.analysis.explanation.sensitivity import Held, held_by_opaque_layers, worthwhile_padding
from pase.analysis.explanation.why_not import configuration_text
from pase.cli.layer_table import all_layers_option, print_layers
from pase.cli.options import (
    ByteSize,
    ModelArguments,
    WholeNumber,
    check_writable,
    constraint_options,
    cost_model_option,
    json_option,
    model_argument,
    model_options,
    ordering_option,
    output_option,
    step_options,
    time_limit_option,
)
from pase.cli.output import (
    duration,
    hidden_text,
    print_json,
    print_table,
    quantity,
    say,
    step_text,
    total_cost_text,
    warn,
)
from pase.cli.progress import READING, progress
from pase.common.names import listed, short
from pase.common.quantities import size_text
from pase.costs import DEFAULT_OPTIMISER, OPTIMISER_STATE, strategy_memory
from pase.graph import Graph
from pase.planning.constraints import Constraints, constraint_texts
from pase.planning.plan import NOT_SEARCHED, LayerPlan, Plan
from pase.planning.plan_file import plan_document, write_plan
from pase.planning.planner import (
    ATTENTION,
    GATHER,
    WITHOUT_LIMIT,
    SearchOptions,
    check_search,
    problem_of,
    search,
)
from pase.sharding.configurations import data_parallel_splits, enumerate_configurations
from pase.solver import solve
from pase.solver.ordering import ORDERINGS, OrderingReport, report_ordering
from pase.tables.files import export_cfn, read_problem, write_problem

OF_MACHINE = "machine"
"""Instead of a size: what the machine's devices have."""

_PADDING_TIME_S = 2.0
"""What a search took in more than this is not searched again for a hint; the hints take no longer."""

_HELD_TIME_S = 60.0
"""The same, for what layers cost of which nothing is known."""


class DeviceMemorySize(ByteSize):
    """A number of bytes, or "machine"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number of bytes, or the word."""
        return value if value == OF_MACHINE else super().convert(value, param, ctx)


@click.command("search", epilog="Example: pase search alexnet --devices 32 --machine 1080ti -o plan.json")
@model_argument
@model_options(devices_required=True)
@cost_model_option
@ordering_option
@click.option("--explain-ordering", is_flag=True, help="Say what each ordering would take.")
@time_limit_option("Seconds to search in.")
@click.option("--memory-limit", "solver_memory_bytes", type=ByteSize(), help="For all cost tables, such as 2GiB.")
@click.option(
    "--memory-per-device",
    type=DeviceMemorySize(),
    metavar="SIZE|machine",
    help="Most that a device may need, such as 8GB, or what the machine's have.",
)
@click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMISER_STATE)),
    default=DEFAULT_OPTIMISER,
    show_default=True,
    help="Its state counts as memory.",
)
@step_options
@click.option(
    "--imbalance",
    type=click.FloatRange(min=1),
    metavar="FACTOR",
    help="Of a mixture: how many times an equal share of rows the busiest experts get.",
)
@click.option(
    "--attention",
    type=click.Choice(list(ATTENTION)),
    default=GATHER,
    show_default=True,
    help="How devices with parts of a sequence come by all keys and values; auto: what costs less.",
)
@click.option("--jobs", type=WholeNumber(min=1), default=1, show_default=True, help="Processes to search in.")
@click.option(
    "--gap",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Of steps in parts: end once nothing is cheaper by more; 0, or 0.01 where choices are many.",
)
@constraint_options
@click.option("--keep-batch", is_flag=True, help="Search although the batch cannot be split.")
@click.option("--strict", is_flag=True, help="Refuse a model with an operator that nothing is known of.")
@all_layers_option
@output_option("Write the plan to this file.")
@json_option
def search_command(
    cost_model: str,
    ordering: str,
    explain_ordering: bool,
    time_limit_s: float | None,
    solver_memory_bytes: int | None,
    memory_per_device: int | str | None,
    optimizer: str,
    micro_batches: int | str,
    stages: int | str,
    schedule: str,
    modes: tuple[str, ...],
    imbalance: float | None,
    attention: str,
    jobs: int,
    gap: float | None,
    constraints: Constraints,
    keep_batch: bool,
    strict: bool,
    shows_all: bool,
    output: Path | None,
    as_json: bool,
    **model: object,
) -> None:
    """Find the best strategy for MODEL on a number of devices.

    MODEL: a built-in network ('pase models'), a file (.onnx, .keras), or
    package.module:function, which returns a model.
    """
    if output:
        check_writable(output)
    chosen = ModelArguments(**model)  # type: ignore[arg-type]
    machine = chosen.loaded_machine()
    limit = machine.device.memory_bytes if memory_per_device == OF_MACHINE else memory_per_device
    assert not isinstance(limit, str)
    options = SearchOptions(
        cost_model=cost_model,
        ordering=ordering,
        time_limit_s=time_limit_s,
        solver_memory_bytes=solver_memory_bytes,
        keep_batch=keep_batch,
        device_memory_bytes=limit,
        optimiser=optimizer,
        constraints=constraints,
        micro_batches=micro_batches,
        stages=stages,
        schedule=schedule,
        modes=modes,
        imbalance=imbalance,
        attention=attention,
        jobs=jobs,
        gap=gap,
    )
    with progress() as on_progress:
        on_progress(READING, 0.0)
        graph = chosen.graph(is_strict=strict)

        def reload(batch: int) -> Graph:
            return replace(chosen, batch=batch).graph(is_strict=strict)

        plan = search(graph, chosen.devices, machine=machine, options=options, on_progress=on_progress, reload=reload)
    if output:
        write_plan(plan, output)
    reports = _ordering_reports(plan.graph, chosen.devices) if explain_ordering else []
    held = None if plan.has_parts else _held(plan, time_limit_s)
    if held is not None:
        warn(_dearer(plan, held))
    if as_json:
        document = plan_document(plan)
        if held is not None:
            layers = [{"name": name, "operator": function} for name, function in held.layers]
            document |= {"opaque": {"layers": layers, "lower_bound_if_free": held.lower_bound}}
        print_json(document | ({"orderings": orderings_document(reports)} if reports else {}))
    else:
        print_plan(plan, shows_all=shows_all)
        if reports:
            say()
            print_orderings(reports)
        _say_what_padding_saves(plan, graph)
        _warn_of_memory(plan)
        if output:
            warn(f"plan written to {output}")


def _held(plan: Plan, time_limit_s: float | None) -> Held | None:
    """Return what is known of too little, where it makes the plan dearer and there is time to tell."""
    left_s = min(_HELD_TIME_S, time_limit_s or _HELD_TIME_S) - plan.search.time_s
    return held_by_opaque_layers(plan, time_limit_s=left_s) if left_s > plan.search.time_s else None


def _dearer(plan: Plan, held: Held) -> str:
    """Say what layers cost of which nothing is known."""
    (name, function), *others = held.layers
    more = f" and {len(others)} more" if others else ""
    return (
        f"nothing is known of {function or 'the operator'} (layer {short(name)}{more}) but what passes through it, so "
        f"that it is split no other way: this costs up to {1 - held.lower_bound / plan.total_cost:.1%} of the plan; "
        f"split freely, the optimum would be {quantity(held.lower_bound, plan.cost_unit)} or more"
    )


def _ordering_reports(graph: Graph, num_devices: int) -> list[OrderingReport]:
    """Return a report for every ordering, for the problem as it is before any reduction."""
    sizes = [len(enumerate_configurations(operator, num_devices)) for operator in graph.operators]
    return [report_ordering(name, graph.neighbours, sizes) for name in ORDERINGS]


def print_plan(plan: Plan, *, shows_all: bool = False) -> None:
    """Print the strategy layer by layer, blocks that repeat once unless it shows all, then what is known of it."""
    print_layers(
        plan.graph,
        ["<layer", "<iteration space", "<configuration", "layer cost", "transfer cost", "share"],
        [_layer_row(layer, plan) for layer in plan.layers],
        [layer.kind for layer in plan.layers],
        shows_all=shows_all,
    )
    unit = plan.cost_unit
    say()
    say(
        f"{plan.graph.name} on {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name}), "
        f"cost model {plan.cost_model}"
    )
    if plan.precision.text:
        say(f"  precision               {plan.precision.text}")
    say(f"  total cost              {total_cost_text(plan)}   ({_certificate(plan)})")
    if plan.has_parts:
        say(f"  step                    {step_text(plan)}")
    if plan.hidden_cost:
        say(f"  hidden                  {hidden_text(plan)}")
    rings = [op.name for op in plan.graph.operators if op.ring is not None and plan[op.name].splits["s"] > 1]
    if rings:
        say(f"  attention               keys and values go round in {listed(rings, most=1)}")
    say(f"  data parallelism        {quantity(plan.baselines['data_parallel'], unit)}   ({_beside_ours(plan)})")
    for position, text in enumerate(constraint_texts(plan.constraints)):
        say(f"  {'' if position else 'constraints':<23} {text}")
    say(f"  memory of a device      {_memory(plan)}")
    say(f"  at its peak             {_peak(plan)}")
    if WITHOUT_LIMIT in plan.baselines:
        free = plan.baselines[WITHOUT_LIMIT]
        dearer = plan.total_cost / free - 1 if free else 0.0
        say(f"  without the limit       {quantity(free, unit)}   (the limit costs {dearer:.2%} more)")
    if plan.search.ordering == NOT_SEARCHED:
        return
    if not plan.has_parts:
        say(f"  largest dependent set   {plan.search.largest_dependent_set}   (ordering {plan.search.ordering})")
    say(f"  search time             {duration(plan.search.time_s)}")


def _certificate(plan: Plan) -> str:
    return f"{_proof(plan)}{plan.among}"


def _proof(plan: Plan) -> str:
    if not plan.exact:
        return f"gap {plan.gap:.2%}, lower bound {quantity(plan.lower_bound, plan.cost_unit)}"
    kept = ["the constraints"] * bool(plan.constraints) + ["the limit"] * (plan.device_memory_bytes is not None)
    return f"proven optimal within {' and '.join(kept)}" if kept else "proven optimal"


def _beside_ours(plan: Plan) -> str:
    """Return what data parallelism costs beside the plan, and what it needs where there is a limit."""
    ratio = plan.baselines["data_parallel"] / plan.total_cost if plan.total_cost else 1.0
    limit = plan.device_memory_bytes
    if limit is None:
        return f"{ratio:.2f} × ours"
    needed = _data_parallel_bytes(plan)
    return f"{ratio:.2f} × ours; needs {size_text(needed)}{', too much' if needed > limit else ''}"


def _memory(plan: Plan) -> str:
    """Return what a device needs beside what it may and can have."""
    total, limit, own = plan.memory.total_bytes, plan.device_memory_bytes, plan.machine.device.memory_bytes
    shares = [f"{total / own:.0%} of its {size_text(own)}"]
    if limit is not None:
        shares.insert(0, f"{total / limit:.1%} of the limit, {size_text(limit)}")
    state = f", with {plan.optimiser}" if plan.memory.optimiser_bytes else ""
    return f"{size_text(total)}{state}   ({'; '.join(shares)})"


def _peak(plan: Plan) -> str:
    """Return the most that lies in a device's memory at once, and when that is."""
    peak = plan.peak
    when = f"{peak.phase} pass" if peak.layer else f"{peak.phase}"
    where = f" of {short(peak.layer)}" if peak.layer else ""
    return f"{size_text(peak.bytes)}   (PyTorch; {when}{where})"


def _data_parallel_bytes(plan: Plan) -> int:
    splits = data_parallel_splits(plan.graph, plan.num_devices)
    return strategy_memory(plan.graph, splits, optimiser=plan.optimiser).total_bytes


def _warn_of_memory(plan: Plan) -> None:
    """Say where devices have less memory than the strategy needs."""
    total, own = plan.peak.bytes, plan.machine.device.memory_bytes
    if total > own:
        hint = "" if plan.device_memory_bytes else "; --memory-per-device machine looks for what fits"
        warn(f"a device needs {size_text(total)}; {plan.machine.device.name} has {size_text(own)}{hint}")


def _layer_row(layer: LayerPlan, plan: Plan) -> list[str]:
    transfer = layer.transfer_cost
    paid = layer.layer_cost + transfer - plan.hidden_of(layer)
    share = paid / plan.total_cost if plan.total_cost else 0.0
    return [
        layer.name,
        " ".join(f"{dim}={extent}" for dim, extent in layer.dims.items()),
        "  ".join([configuration_text(layer.splits, len(layer.devices)), *plan.modes_of(layer)]),
        quantity(layer.layer_cost, plan.cost_unit),
        quantity(transfer, plan.cost_unit),
        f"{share:.1%}",
    ]


def _say_what_padding_saves(plan: Plan, graph: Graph) -> None:
    """Name the extents that cannot be cut as they would better be, where rounding them up pays."""
    if (
        plan.constraints
        or plan.has_parts
        or not plan.exact
        or plan.search.time_s > _PADDING_TIME_S
        or plan.device_memory_bytes is not None
    ):
        return
    for padding in worthwhile_padding(plan, graph, time_limit_s=_PADDING_TIME_S):
        dims = [f"{name}: {dim}" for name, dim in padding.dims]
        more = f", … {len(dims) - 3} more" if len(dims) > 3 else ""
        cost = quantity(padding.total_cost, plan.cost_unit)
        warn(
            f"{padding.extent:,} ({', '.join(dims[:3])}{more}) cannot be cut {padding.ways} ways; "
            f"with {padding.padded:,} in its place the cheapest strategy costs {cost}, "
            f"{1 - padding.total_cost / plan.total_cost:.1%} less"
        )


def orderings_document(reports: Sequence[OrderingReport]) -> list[dict[str, Any]]:
    """Return the JSON form of the reports."""
    return [
        {
            "name": report.name,
            "largest_dependent_set": report.largest_dependent_set,
            "predicted_operations": report.operations,
            "predicted_bytes": report.table_bytes,
        }
        for report in reports
    ]


def print_orderings(reports: Sequence[OrderingReport]) -> None:
    """Print a table of the reports."""
    say("orderings, on the whole graph before any reduction:")
    print_table(
        ["<ordering", "largest dependent set", "predicted operations", "predicted memory"],
        [
            [
                report.name,
                str(report.largest_dependent_set),
                _large(report.operations),
                quantity(report.table_bytes, "B") if report.table_bytes < 1e21 else f"{_large(report.table_bytes)} B",
            ]
            for report in reports
        ],
    )


def _large(number: int) -> str:
    """Return a whole number of any size: 1,234 or 1.2e+34."""
    if number < 1_000_000:
        return f"{number:,}"
    digits = str(number)
    return f"{digits[0]}.{digits[1]}e+{len(digits) - 1}"


@click.command("tables", epilog="Example: pase tables transformer --devices 16 -o transformer_p16.npz")
@model_argument
@model_options(devices_required=True)
@cost_model_option
@click.option("--keep-batch", is_flag=True, help="Although the batch cannot be split.")
@output_option("An .npz file, or a .cfn file.", required=True)
@json_option
def tables_command(cost_model: str, keep_batch: bool, output: Path, as_json: bool, **model: object) -> None:
    """Write the cost tables of MODEL to a file: .npz for 'pase solve', .cfn for solvers such as toulbar2."""
    if output.suffix not in {".npz", ".cfn"}:
        raise click.UsageError(f"-o {output}: the file's ending must be .npz or .cfn")
    check_writable(output)
    chosen = ModelArguments(**model)  # type: ignore[arg-type]
    with progress() as on_progress:
        on_progress(READING, 0.0)
        graph = chosen.graph()
        check_search(graph, chosen.devices, keep_batch=keep_batch)
        problem = problem_of(graph, chosen.devices, chosen.loaded_machine(), cost_model, on_progress)
        if output.suffix == ".npz":
            write_problem(problem.tables, output, configurations=problem.configurations)
        else:
            export_cfn(problem.tables, output)
    tables = problem.tables
    if as_json:
        print_json(
            {
                "output": str(output),
                "vertices": tables.num_vertices,
                "edges": len(tables.edges),
                "distinct_edge_tables": len(tables.edge_tables),
                "largest_domain": max(tables.domain_sizes),
            }
        )
    else:
        warn(
            f"{tables.num_vertices} vertices, {len(tables.edges)} edges, up to {max(tables.domain_sizes)} "
            f"configurations a vertex: written to {output}"
        )


@click.command("solve", epilog="Example: pase solve transformer_p64.npz --json")
@click.argument("tables", type=click.Path(path_type=Path))
@ordering_option
@time_limit_option("Seconds to solve in.")
@click.option("--memory-limit", "solver_memory_bytes", type=ByteSize(), help="For the solver's tables, such as 2GiB.")
@click.option("--export", type=click.Path(path_type=Path), help="Write the problem as a .cfn file for other solvers.")
@json_option
def solve_command(
    tables: Path,
    ordering: str,
    time_limit_s: float | None,
    solver_memory_bytes: int | None,
    export: Path | None,
    as_json: bool,
) -> None:
    """Choose a configuration for every vertex of TABLES, an .npz file, so that the total cost is smallest."""
    if export:
        check_writable(export)
    problem = read_problem(tables)
    if export:
        export_cfn(problem, export)
    with progress() as on_progress:
        solution = solve(
            problem,
            ordering=ordering,
            time_limit_s=time_limit_s,
            solver_memory_bytes=solver_memory_bytes,
            on_progress=on_progress,
        )
    if as_json:
        print_json(
            {
                "cost": solution.cost,
                "lower_bound": solution.lower_bound,
                "gap": solution.gap,
                "exact": solution.exact,
                "configurations": list(solution.choice),
                "ordering": solution.ordering,
                "largest_dependent_set": solution.largest_dependent_set,
                "time_s": solution.time_s,
                "peak_memory_bytes": solution.peak_memory_bytes,
            }
        )
        return
    found = "proven optimal" if solution.exact else f"gap {solution.gap:.3%}, lower bound {solution.lower_bound!r}"
    say(f"{tables.name}: {problem.num_vertices} vertices, {len(problem.edges)} edges")
    say(f"  cost                    {solution.cost!r}   ({found})")
    say(f"  largest dependent set   {solution.largest_dependent_set}   (ordering {solution.ordering})")
    say(f"  time                    {duration(solution.time_s)}")
    say(f"  solver's memory         {quantity(solution.peak_memory_bytes, 'B')}")
    say("  configurations          " + " ".join(map(str, solution.choice)))
