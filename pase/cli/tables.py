"""`pase tables`: the cost tables of a model, as a file for this solver and others."""

from pathlib import Path

import click

from pase.cli.names import complete_models
from pase.cli.options import ModelArguments, check_writable, json_option, model_options
from pase.cli.output import print_json, warn
from pase.cli.progress import READING, progress
from pase.costs import COST_MODELS
from pase.planning.planner import check_search, problem_of
from pase.tables.files import export_cfn, write_problem


@click.command("tables", epilog="Example: pase tables transformer --devices 16 -o transformer_p16.npz")
@click.argument("model", shell_complete=complete_models)
@model_options(devices_required=True)
@click.option("--cost-model", type=click.Choice(sorted(COST_MODELS)), default="paper", show_default=True)
@click.option("--keep-batch", is_flag=True, help="Although the batch cannot be split.")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="An .npz file, or a .cfn file.")
@json_option
def command(cost_model: str, keep_batch: bool, output: Path, as_json: bool, **model: object) -> None:
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
            write_problem(problem.tables, output, configurations=[found.splits for found in problem.configurations])
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
