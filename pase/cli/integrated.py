"""`pase integrated`: the communication of integrated model, batch and domain parallelism, grid by grid."""

from typing import Any

import click

from pase.cli.integrated_output import Timing, print_study, study_document
from pase.cli.names import complete_machines, complete_models
from pase.cli.options import WholeNumber, arguments_option, json_option
from pase.cli.output import print_json, warn
from pase.graph import Scalar
from pase.importers import load
from pase.machine import load_machine
from pase.studies.integrated.chain import CONVENTIONS, Options, chain_of, with_conventions
from pase.studies.integrated.equations import all_grids, network_of, parse_grid
from pase.studies.integrated.study import SAME_GRID, VERSIONS, ComputeTimes, num_iterations, study

MACHINE = "cori-knl"
"""The papers' own: α = 2 µs, 1/β = 6 GB/s."""


def _conventions(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> Options:
    changed = {}
    for value in values:
        name, equals, answer = value.partition("=")
        if not equals or answer not in {"yes", "no"}:
            raise click.BadParameter(f"{value!r} is not of the form NAME=yes or NAME=no")
        changed[name] = answer == "yes"
    return with_conventions(changed)


def _positive(text: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
    seconds: Any = text.strip()
    return float(click.FloatRange(min=0, min_open=True).convert(seconds, param, ctx))


class _ComputeTime(click.ParamType[float | ComputeTimes]):
    """Seconds of a step on any grid, or of steps of several batches on one process."""

    name = "SECONDS|BATCH=SECONDS,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | ComputeTimes:
        """Return the seconds, or the times by batch, ascending."""
        if "=" not in str(value):
            return float(click.FloatRange(min=0).convert(value, param, ctx))
        pairs = [pair.partition("=") for pair in str(value).split(",")]
        points = tuple(
            (
                float(WholeNumber(min=1).convert(batch.strip(), param, ctx)),
                _positive(time_s, param, ctx),
            )
            for batch, _, time_s in pairs
        )
        if [batch for batch, _ in points] != sorted({batch for batch, _ in points}):
            self.fail(f"{value!r} is not usable; expected each batch once, in ascending order", param, ctx)
        return ComputeTimes(points=points)


@click.command(
    "integrated",
    epilog="Example: pase integrated alexnet --arg grouped=true -p 512 -b 2048",
)
@click.argument("model", shell_complete=complete_models)
@click.option("--processes", "-p", type=WholeNumber(min=1), required=True, help="Number of processes, P.")
@click.option("--batch", "-b", type=WholeNumber(min=1), help="Samples in one step, B [the model's own].")
@arguments_option
@click.option("--grid", default="all", show_default=True, metavar="PrxPc|all", help="One grid of processes, or all.")
@click.option("--convolutions", metavar="PrxPc", help="A grid of their own for convolutions, which share images' rows.")
@click.option("--per-layer", is_flag=True, help="Show each layer: its sizes, its crossover batch, its best role.")
@click.option("--memory", is_flag=True, help="Show what each process holds, beside a 2D algorithm.")
@click.option(
    "--version",
    type=click.Choice([str(version) for version in VERSIONS]),
    default="2",
    show_default=True,
    help="Of the paper: 1 is the preprint of 2017, 2 that of 2018.",
)
@click.option(
    "--machine",
    default=MACHINE,
    show_default=True,
    metavar="NAME|FILE",
    shell_complete=complete_machines,
    help="Preset or .toml file: α, β.",
)
@click.option(
    "--convention",
    "options",
    multiple=True,
    metavar="NAME=yes|no",
    callback=_conventions,
    help=f"Read the papers otherwise, as docs/integrated.md says; may be repeated. NAME: {', '.join(CONVENTIONS)}.",
)
@click.option(
    "--compute-time",
    "compute",
    type=_ComputeTime(),
    help="Of a step, on any grid; or by batch, of steps on one process: 32=0.1,256=0.5.",
)
@click.option("--overlap", is_flag=True, help="With --compute-time: hide communication behind the backward pass.")
@click.option("--samples", "num_samples", type=WholeNumber(min=1), help="Of the training set: show an epoch too.")
@json_option
def command(
    model: str,
    processes: int,
    batch: int | None,
    arguments: dict[str, Scalar],
    grid: str,
    convolutions: str | None,
    per_layer: bool,
    memory: bool,
    version: str,
    machine: str,
    options: Options,
    compute: float | ComputeTimes | None,
    overlap: bool,
    num_samples: int | None,
    as_json: bool,
) -> None:
    """Show the communication time of a step of MODEL on every grid of processes.

    On Pr x Pc processes each layer's weights (or, in domain parallelism, each image's rows) are shared by Pr and the
    batch by Pc of them: Gholami et al., "Integrated Model, Batch, and Domain Parallelism in Training Neural Networks".
    """
    if overlap and compute is None:
        raise click.UsageError("--overlap needs --compute-time: what there is to hide communication behind")
    network = network_of(load_machine(machine), processes)
    grids = None if grid == "all" else [parse_grid(grid, processes)]
    chain = chain_of(load(model, arguments=arguments), options)
    found = study(
        chain,
        processes,
        batch or chain.batch,
        network,
        version=int(version),
        grids=grids,
        convolutions=None if convolutions is None else parse_grid(convolutions, processes),
        options=options,
    )
    if not found.is_pure_batch_possible:
        warn(
            f"a batch of {found.batch} has less than one sample for each of {processes} processes: pure batch "
            "parallelism cannot run, its time is for comparison"
        )
    missing = 0 if grids else len(all_grids(processes)) - len(found.candidates[SAME_GRID])
    if missing:
        warn(f"{missing} grids with more columns than the batch has samples are left out")
    steps = None if num_samples is None else num_iterations(num_samples, found.batch, options)
    timing = Timing(compute=compute, overlap=overlap, num_steps=steps)
    if as_json:
        document: dict[str, Any] = {"machine": machine, **study_document(found, network, options, timing)}
        print_json(document)
        return
    print_study(found, network, options, timing, per_layer=per_layer, memory=memory)
