"""`pase solve`: the optimum of a file of cost tables."""

from pathlib import Path

import click

from pase.cli.options import ByteSize, check_writable, json_option
from pase.cli.output import duration, print_json, quantity, say
from pase.cli.progress import progress
from pase.solver import solve
from pase.solver.ordering import ORDERINGS
from pase.tables.files import export_cfn, read_problem


@click.command("solve", epilog="Example: pase solve transformer_p64.npz --json")
@click.argument("tables", type=click.Path(path_type=Path))
@click.option("--ordering", type=click.Choice(["auto", *ORDERINGS]), default="auto", show_default=True)
@click.option("--time-limit", "time_limit_s", type=click.FloatRange(min=0, min_open=True), help="Seconds to solve in.")
@click.option("--memory-limit", "memory_limit_bytes", type=ByteSize(), help="For the solver's tables, such as 2GiB.")
@click.option("--export", type=click.Path(path_type=Path), help="Write the problem as a .cfn file for other solvers.")
@json_option
def command(
    tables: Path,
    ordering: str,
    time_limit_s: float | None,
    memory_limit_bytes: int | None,
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
            memory_limit_bytes=memory_limit_bytes,
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
