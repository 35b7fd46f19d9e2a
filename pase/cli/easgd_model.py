"""`pase easgd-model`: what the EASGD family costs on workers that each hold a replica, beside the paper's figures."""

from math import inf

import click

from pase.cli.easgd_model_output import Study, print_paper, print_study, study_document
from pase.cli.names import complete_machines, complete_models
from pase.cli.options import WholeNumber, arguments_option, batch_option, json_option
from pase.cli.output import print_json
from pase.graph import Graph, Scalar
from pase.importers import load
from pase.machine import Machine, load_machine
from pase.studies.easgd_costs.iteration import (
    ALGORITHMS,
    Computation,
    algorithm_named,
    check_workers,
    computation_of,
    weights_of,
)
from pase.studies.easgd_costs.paper import TABLE_4

ALL = "all"
SHOWN = ("sync-easgd2", "sync-easgd3")
"""Whose weak scaling is shown for all of them: the paper's for clusters, not overlapped and overlapped."""

MAX_ROWS = 64
KNL = "Intel Xeon Phi 7250"
"""The paper's node, whose own time it prints."""


def _workers(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise click.BadParameter(f"{text!r} is no list of numbers; expected one such as 1,2,4,8")
    if len(words) > MAX_ROWS:
        raise click.BadParameter(f"there are {len(words)} numbers; expected {MAX_ROWS} at most")
    return tuple(sorted({int(word) for word in words}))


def _finite(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < inf:
        raise click.BadParameter(f"{value} is not possible; expected a number of seconds above 0")
    return value


@click.command("easgd-model", epilog="Example: pase easgd-model --network vgg19 --workers 1,8,64")
@click.option(
    "--network",
    default="googlenet",
    show_default=True,
    shell_complete=complete_models,
    help="A model, built in or a file, as in search.",
)
@click.option(
    "--workers",
    default="1,2,4,8,16,32,64",
    show_default=True,
    metavar="LIST",
    callback=_workers,
    help="Numbers of workers, each of which trains a replica.",
)
@click.option(
    "--machine",
    default="knl-fdr",
    show_default=True,
    metavar="NAME|FILE",
    shell_complete=complete_machines,
    help="Preset or .toml file: α, β.",
)
@click.option(
    "--algorithm",
    type=click.Choice([*ALGORITHMS, ALL]),
    default=ALL,
    show_default=True,
    metavar="NAME",
    help=f"One of them, or all: {', '.join(ALGORITHMS)}.",
)
@click.option(
    "--packed/--per-layer",
    default=True,
    show_default=True,
    help="All weights in one message, or one message for each array.",
)
@click.option(
    "--iteration-time",
    "iteration_s",
    type=float,
    callback=_finite,
    metavar="SECONDS",
    help="Of one batch on one worker alone [the paper's, where it has one, or FLOP ÷ peak].",
)
@click.option("--iterations", type=WholeNumber(min=1), help="Batches of each worker [the paper's, or 1].")
@batch_option
@arguments_option
@click.option("--paper", "of_paper", is_flag=True, help="Show what the paper states of times, and which reproduce.")
@json_option
def command(
    network: str,
    workers: tuple[int, ...],
    machine: str,
    algorithm: str,
    packed: bool,
    iteration_s: float | None,
    iterations: int | None,
    batch: int | None,
    arguments: dict[str, Scalar],
    of_paper: bool,
    as_json: bool,
) -> None:
    """Show what training across workers costs with each algorithm of the EASGD family.

    Every message of n bytes costs α + βn: You et al. 2017, "Scaling Deep Learning on GPU and Knights Landing
    clusters". For GoogLeNet and VGG-19 its measured weak scaling stands beside.
    """
    for num_workers in workers:
        check_workers(num_workers)
    graph, loaded = load(network, batch=batch, arguments=arguments), load_machine(machine)
    is_papers = graph.name in TABLE_4 and batch is None and not arguments and loaded.device.name == KNL
    series = TABLE_4[graph.name] if is_papers else None
    study = Study(
        graph=graph,
        weights=weights_of(graph),
        machine=loaded,
        workers=workers,
        algorithms=tuple(map(algorithm_named, ALGORITHMS if algorithm == ALL else (algorithm,))),
        scaled=tuple(map(algorithm_named, SHOWN if algorithm == ALL else (algorithm,))),
        packed=packed,
        computation=_computation(graph, loaded, iteration_s, is_papers=is_papers),
        num_batches=iterations or (series.num_iterations if series else 1),
        # Beside a node of another speed, or other numbers of iterations, its times would say nothing.
        series=series if series and iteration_s is None and iterations in (None, series.num_iterations) else None,
    )
    if as_json:
        print_json(study_document(study, of_paper=of_paper))
    elif of_paper:
        print_paper()
    else:
        print_study(study)


def _computation(graph: Graph, machine: Machine, iteration_s: float | None, *, is_papers: bool) -> Computation:
    if iteration_s is not None:
        return Computation(time_s=iteration_s, source="given", has_update=True)
    if is_papers:
        series = TABLE_4[graph.name]
        source = f"the paper's Table 4, {series.times[1].text} s for {series.num_iterations} on one node"
        return Computation(time_s=series.iteration_s, source=source, has_update=True)
    return computation_of(graph, machine)
