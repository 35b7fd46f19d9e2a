"""`pase tables`: write the cost tables of a model; `pase solve`: find the best strategy for a file of them."""

from pathlib import Path
from typing import Any

import click

from pase.cli.options import (
    ModelArguments,
    byte_size,
    cost_model_option,
    json_option,
    keep_batch_option,
    model_argument,
    model_options,
    ordering_option,
    output_option,
    time_limit_option,
    writable,
)
from pase.cli.output import print_facts, print_json, say, warn
from pase.cli.progress import READING, progress
from pase.common.documents import attributes
from pase.common.options import PATH, option
from pase.common.words import duration, quantity
from pase.planning.planner import check_search
from pase.planning.problems import problem_of
from pase.solver import solve
from pase.tables.files import export_cfn, read_problem, write_problem


@click.command("tables", epilog="Example: pase tables transformer --devices 16 -o transformer_p16.npz")
@model_argument
@model_options(devices_required=True)
@cost_model_option
@keep_batch_option
@output_option("An .npz file, or a .cfn file.", required=True)
@json_option
def tables_command(model: ModelArguments, cost_model: str, keep_batch: bool, output: Path, as_json: bool) -> None:
    """Write the cost tables of MODEL to a file: .npz for 'pase solve', .cfn for solvers such as toulbar2."""
    if output.suffix not in {".npz", ".cfn"}:
        raise click.UsageError(f"-o {output}: the file's ending must be .npz or .cfn")
    with progress(READING) as on_progress:
        graph = model.graph()
        check_search(graph, model.devices, keep_batch=keep_batch)
        problem = problem_of(graph, model.devices, model.loaded_machine(), cost_model, on_progress)
        if output.suffix == ".npz":
            write_problem(problem.tables, output, configurations=problem.configurations)
        else:
            export_cfn(problem.tables, output)
    tables = problem.tables
    vertices, edges, largest = tables.num_vertices, len(tables.edges), max(tables.domain_sizes)
    if not as_json:
        warn(f"{vertices} vertices, {edges} edges, up to {largest} configurations a vertex: written to {output}")
        return
    print_json(
        {
            "output": str(output),
            "vertices": vertices,
            "edges": edges,
            "distinct_edge_tables": len(tables.edge_tables),
            "largest_domain": largest,
        }
    )


@click.command("solve", epilog="Example: pase solve transformer_p64.npz --json")
@click.argument("tables", type=PATH)
@ordering_option
@time_limit_option("Seconds to solve in.")
@option("--memory-limit", "solver_memory_bytes", type=byte_size, metavar="SIZE", help="For the solver's tables: 2GiB.")
@option("--export", type=PATH, callback=writable, help="Write the problem as a .cfn file for other solvers.")
@json_option
def solve_command(tables: Path, export: Path | None, as_json: bool, **options: Any) -> None:
    """Choose a configuration for every vertex of TABLES, an .npz file, so that the total cost is smallest."""
    problem = read_problem(tables)
    if export:
        export_cfn(problem, export)
    with progress() as on_progress:
        solution = solve(problem, on_progress=on_progress, **options)
    if as_json:
        shown = "cost lower_bound gap exact configurations=choice ordering largest_dependent_set"
        print_json(attributes(solution, f"{shown} time_s peak_memory_bytes"))
        return
    found = "proven optimal" if solution.exact else f"gap {solution.gap:.3%}, lower bound {solution.lower_bound!r}"
    say(f"{tables.name}: {problem.num_vertices} vertices, {len(problem.edges)} edges")
    print_facts(
        {
            "cost": f"{solution.cost!r}   ({found})",
            "largest dependent set": f"{solution.largest_dependent_set}   (ordering {solution.ordering})",
            "time": duration(solution.time_s),
            "solver's memory": quantity(solution.peak_memory_bytes, "B"),
            "configurations": " ".join(map(str, solution.choice)),
        }
    )
