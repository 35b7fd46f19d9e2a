"""`pase tables`: the cost tables of a model, as a file for this solver and others."""

from pathlib import Path

import click

from pase.cli.options import (
    ByteSize,
    ModelArguments,
    check_writable,
    cost_model_option,
    json_option,
    model_argument,
    model_options,
    ordering_option,
    output_option,
    time_limit_option,
)
from pase.cli.output import duration, print_json, quantity, say, warn
from pase.cli.progress import READING, progress
from pase.planning.planner import check_search, problem_of
from pase.solver import solve
from pase.tables.files import export_cfn, read_problem, write_problem


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
