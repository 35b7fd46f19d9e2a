"""`pase integrated`: communication of integrated model, batch and domain parallelism; `pase halo`: halos of a dim."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import click

from pase.cli.options import arguments_option, choice_option, flag, json_option, machine_option, model_argument
from pase.cli.output import print_json, print_table, say, warn
from pase.common.documents import attributes
from pase.common.options import POSITIVE, SECONDS, WholeNumber, option
from pase.common.words import quantity
from pase.graph import Scalar
from pase.importers import load
from pase.machine import load_machine
from pase.sharding.boxes import Range
from pase.sharding.halos import Kernel, regions
from pase.studies.integrated.chain import CONVENTIONS, Options, WeightedLayer, chain_of, with_conventions
from pase.studies.integrated.equations import (
    Network,
    all_grids,
    crossover_batch,
    equal_volume_batch,
    largest_model_batch,
    network_of,
    parse_grid,
)
from pase.studies.integrated.study import (
    SAME_GRID,
    VERSIONS,
    Candidate,
    ComputeTimes,
    Study,
    held,
    held_2d,
    moved,
    moved_stationary_a,
    num_iterations,
    step_time,
    study,
)

MACHINE = "cori-knl"
"""The papers' machine: α = 2 µs, 1/β = 6 GB/s."""

VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "same_grid": "weights of every layer (Eq. 8)",
        "dense_only": "weights of dense layers; batch over all in convolutions",
        "domain": "rows in convolutions, weights in dense layers (Eq. 9)",
        "per_layer": "rows or weights, as is cheaper, in each layer (Eq. 9)",
        "own_grids": "weights of dense layers; rows in convolutions, on a grid of their own (Fig. 10)",
    }
)
"""What the P_r processes of each variant share."""


def _conventions(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> Options:
    changed = {}
    for value in values:
        name, equals, answer = value.partition("=")
        if not equals or answer not in {"yes", "no"}:
            raise click.BadParameter(f"{value!r} is not of the form NAME=yes or NAME=no")
        changed[name] = answer == "yes"
    return with_conventions(changed)


def _compute_time(text: str) -> float | ComputeTimes:
    """Return the seconds of a step on any grid, or times of steps on one process by batch, in ascending order."""
    if "=" not in text:
        return float(click.FloatRange(min=0)(text))
    pairs = [pair.partition("=") for pair in text.split(",")]
    points = tuple((float(POSITIVE(batch.strip())), float(SECONDS(time_s.strip()))) for batch, _, time_s in pairs)
    if [batch for batch, _ in points] != sorted({batch for batch, _ in points}):
        raise click.BadParameter(f"{text!r} is not usable; expected each batch once, in ascending order")
    return ComputeTimes(points=points)


@click.command("integrated", epilog="Example: pase integrated alexnet --arg grouped=true -p 512 -b 2048")
@model_argument
@option("--processes", "-p", type=POSITIVE, required=True, help="Number of processes, P.")
@option("--batch", "-b", type=POSITIVE, help="Samples in one step, B [the model's own].")
@arguments_option
@option("--grid", default="all", metavar="PrxPc|all", help="One grid of processes, or all.")
@option("--convolutions", metavar="PrxPc", help="A grid of their own for convolutions, which share images' rows.")
@flag("--per-layer", help="Show each layer: its sizes, its crossover batch, its best role.")
@flag("--memory", help="Show what each process holds, compared with a 2D algorithm.")
@choice_option(
    "--version", map(str, VERSIONS), default="2", help="Of the paper: 1 is the preprint of 2017, 2 that of 2018."
)
@machine_option(MACHINE, "Preset or .toml file: α, β.")
@option(
    "--convention",
    "options",
    multiple=True,
    metavar="NAME=yes|no",
    callback=_conventions,
    help=f"Read the papers otherwise, as docs/integrated.md says; may be repeated. NAME: {', '.join(CONVENTIONS)}.",
)
@option(
    "--compute-time",
    "compute",
    type=_compute_time,
    metavar="SECONDS|BATCH=SECONDS,…",
    help="Of a step, on any grid; or by batch, of steps on one process: 32=0.1,256=0.5.",
)
@flag("--overlap", help="With --compute-time: overlap communication with the backward pass.")
@option("--samples", "num_samples", type=POSITIVE, help="Of the training set: show an epoch too.")
@json_option
def integrated_command(
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
        raise click.UsageError("--overlap needs --compute-time: the computation that communication overlaps with")
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
        print_json({"machine": machine, **_document(found, network, options, timing)})
        return
    _print_study(found, network, timing)
    if memory:
        say()
        _print_memory(found, options)
    if per_layer:
        say()
        _print_layers(found, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timing options of a study.

    Attributes:
        compute: Computing time of a step, one for all grids or by batch; None if only communication is of interest.
        overlap: Whether communication and computation overlap.
        num_steps: Steps of an epoch, None for no epoch.
    """

    compute: float | ComputeTimes | None
    overlap: bool
    num_steps: float | None

    def compute_s(self, study: Study, candidate: Candidate | None) -> float | None:
        """Return the computing time of a candidate, None for pure batch parallelism; None where it is unknown."""
        if not isinstance(self.compute, ComputeTimes):
            return self.compute
        if candidate is None:
            return self.compute.of_batch(study.batch / study.num_processes)
        return self.compute.on_grid(study.chain, study.batch, candidate.grid, candidate.roles)

    def step_s(self, study: Study, candidate: Candidate) -> tuple[float, float] | None:
        """Return the time of a candidate's step and its speed-up over pure batch parallelism; None if unknown."""
        compute_s, pure_s = self.compute_s(study, candidate), self.compute_s(study, None)
        if compute_s is None or pure_s is None:
            return None
        step_s = step_time(candidate.time_s, compute_s, overlap=self.overlap)
        return step_s, step_time(study.pure_batch.time_s, pure_s, overlap=self.overlap) / step_s if step_s else 1.0


def _document(study: Study, network: Network, options: Options, timing: Timing) -> dict[str, Any]:
    """Return the JSON form of a study: `grids` and `best` are of the 1.5D algorithm, the others under `variants`."""

    def entry(candidate: Candidate | None) -> dict[str, Any] | None:
        return None if candidate is None else _entry(study, candidate, timing)

    variants = {
        name: {"grids": [entry(candidate) for candidate in candidates], "best": entry(study.best(name))}
        for name, candidates in study.candidates.items()
    }
    best = study.best()
    shown = "model=chain.model processes=num_processes batch version num_weights=chain.num_weights"
    shown += " pure_model_s=pure_model.time_s pure_batch_s=pure_batch.time_s pure_batch_possible=is_pure_batch_possible"
    return {
        **attributes(study, shown),
        "latency_s": network.latency_s,
        "bandwidth_bytes_per_s": 1 / network.s_per_byte,
        "pure_domain_convolutions_s": study.pure_domain and study.pure_domain.time_s,
        **variants.pop(SAME_GRID),
        "variants": variants,
        "best_of_all": best and {"variant": best.variant, **_entry(study, best, timing)},
        "layers": [_layer_document(study, layer, options) for layer in study.chain.layers],
        "conventions": {name: getattr(options, name) for name in CONVENTIONS} | {"word_bytes": options.itemsize},
    }


def _entry(study: Study, candidate: Candidate, timing: Timing) -> dict[str, Any]:
    grid = "pr=num_rows pc=num_columns"
    document = {
        **attributes(candidate.grid, grid),
        "time_s": candidate.time_s,
        "speedup_over_pure_batch": study.speedup(candidate.time_s),
        "terms_s": candidate.terms.as_dict(),
        "held_words": attributes(held(study.chain, study.batch, candidate.grid, candidate.roles), "weights data"),
    }
    if timing.num_steps is not None:
        document["epoch_time_s"] = candidate.time_s * timing.num_steps
    if candidate.convolutions is not None:
        document["convolutions"] = attributes(candidate.convolutions, grid)
    if step := timing.step_s(study, candidate):
        document["compute_time_s"] = timing.compute_s(study, candidate)
        document["step_time_s"], document["step_speedup_over_pure_batch"] = step
    return document


def _layer_document(study: Study, layer: WeightedLayer, options: Options) -> dict[str, Any]:
    best = study.best("per_layer")
    shown = "name is_convolution input_words output_words num_weights kernel stride groups=num_groups"
    return {
        **attributes(layer, shown),
        "crossover_batch": crossover_batch(layer, options),
        "equal_volume_batch": equal_volume_batch(layer, options),
        "largest_model_batch": largest_model_batch(layer, options),
        "best_role": best and best.roles[layer.name].value,
    }


def _seconds(*times_s: float) -> list[str]:
    return [quantity(time_s, "s") for time_s in times_s]


def _print_study(study: Study, network: Network, timing: Timing) -> None:
    chain = study.chain
    say(
        f"{chain.model}: {len(chain.layers)} weighted layers, {chain.num_weights:,} weights"
        + (f" ({chain.num_unweighed:,} biases and the like are not counted)" if chain.num_unweighed else "")
    )
    say(
        f"{study.num_processes} processes, batch {study.batch}; α {quantity(network.latency_s, 's')}, "
        f"1/β {quantity(1 / network.s_per_byte, 'B/s')}; communication of one step, version {study.version}"
    )
    say()
    say(f"pure model parallelism    {quantity(study.pure_model.time_s, 's')}")
    say(f"pure batch parallelism    {quantity(study.pure_batch.time_s, 's')}")
    if study.pure_domain is not None:
        say(f"pure domain parallelism   {quantity(study.pure_domain.time_s, 's')}, of the convolutions alone")
    for name, candidates in study.candidates.items():
        say()
        if not candidates:
            say(f"{name}: on none of these grids")
            continue
        where = candidates[0].convolutions
        say(f"{name}: Pr processes share {VARIANTS[name]}" + (f", {where}" if where else ""))
        _print_grids(study, candidates, timing)
    best = study.best()
    if best is not None:
        say()
        say(
            f"best: {best.variant} on {best.grid}, {quantity(best.time_s, 's')}, "
            f"{study.speedup(best.time_s):.2f} times as fast as pure batch parallelism"
        )


def _print_grids(study: Study, candidates: tuple[Candidate, ...], timing: Timing) -> None:
    halos_s = {c.grid: c.terms.halo_forward + c.terms.halo_backward + c.terms.redistribution for c in candidates}
    has_halo, has_epoch = any(halos_s.values()), timing.num_steps is not None
    rows = []
    for candidate in candidates:
        terms, time_s = candidate.terms, candidate.time_s
        times_s = [terms.activation_all_gather, terms.input_gradient_all_reduce, terms.weight_gradient_all_reduce]
        times_s += [halos_s[candidate.grid]] * has_halo + [time_s * (timing.num_steps or 0)] * has_epoch
        row = [str(candidate.grid), quantity(time_s, "s"), f"{study.speedup(time_s):.2f}", *_seconds(*times_s)]
        if step := timing.step_s(study, candidate):
            row += [quantity(step[0], "s"), f"{step[1]:.2f}"]
        rows.append(row)
    headers = ["<grid", "time", "speed-up", "outputs", "ΔX", "ΔW", *["halos, moves"] * has_halo, *["epoch"] * has_epoch]
    print_table([*headers, *(["step", "speed-up"] if timing.compute is not None else [])], rows)


def _print_memory(study: Study, options: Options) -> None:
    """Print the memory of each process with the weights of every layer shared, and the traffic of a 2D algorithm."""
    chain, size = study.chain, options.itemsize
    rows = []
    for candidate in study.candidates[SAME_GRID]:
        words = held(chain, study.batch, candidate.grid, candidate.roles)
        told = [x for x in chain.layers if moved_stationary_a(x, study.batch, candidate.grid) is not None]
        ours = sum(moved(x, study.batch, candidate.grid) for x in told)
        theirs = sum(moved_stationary_a(x, study.batch, candidate.grid) or 0.0 for x in told)
        sizes = [quantity(x * size, "B") for x in (words.weights, words.data, words.total, ours, theirs)]
        rows.append([str(candidate.grid), *sizes, f"{len(told)} of {len(chain.layers)}"])
    print_table(["<grid", "weights", "data", "both", "moved forward", "by a 2D algorithm", "layers"], rows)
    least = quantity(held_2d(chain, study.batch, study.num_processes).total * size, "B")
    say()
    say(f"each process holds W, and X and Y of all layers (section 2.3); with a 2D algorithm {least}")
    say("moved: by Y = W X where there are more weights than B d(i), in 1.5D and by stationary-A SUMMA (section 4)")


def _print_layers(study: Study, options: Options) -> None:
    """Print the layers; the last column is the role in the best grid of the variant per_layer."""
    best = study.best("per_layer")
    headers = ["<layer", "d(i-1)", "d(i)", "weights", "Eq. 5", "model wins to", "equal at"]
    rows: list[list[object]] = []
    for layer in study.chain.layers:
        row = [layer.name, layer.input_words, layer.output_words, layer.num_weights]
        row += [f"{crossover_batch(layer, options):.2f}", str(largest_model_batch(layer, options))]
        rows.append([*row, f"{equal_volume_batch(layer, options):.2f}"])
        rows[-1] += [best.roles[layer.name].value] if best else []
    print_table([*headers, *([f"role on {best.grid}"] if best else [])], rows)
    say()
    say("Eq. 5: the batch above which a layer moves less in batch parallelism, if d(i-1) is d(i)")
    say("equal at: the batch at which it moves the same under Eqs. 3 and 4, each size as it is")


@click.command("halo", epilog="Example: pase halo --extent 11 --kernel 5 --padding 2 --workers 3")
@option("--extent", type=POSITIVE, required=True, help="Points of the input.")
@option("--kernel", type=POSITIVE, required=True, help="Points of the kernel.")
@option("--stride", type=POSITIVE, default=1, help="Points from output to output.")
@option("--dilation", type=POSITIVE, default=1, help="Between the kernel's points.")
@option("--padding", type=WholeNumber(min=0), default=0, help="Points added at each end.")
@option("--workers", type=POSITIVE, required=True, help="Workers that share the input and the output.")
@json_option
def halo_command(
    extent: int, kernel: int, stride: int, dilation: int, padding: int, workers: int, as_json: bool
) -> None:
    """Show the halos of a convolution or pooling along one dim, for each worker.

    Ranges begin at 0 and leave out their end; they are clipped to the tensor, and padding is counted apart. Input and
    output are both balanced: of n points on P workers, the first n mod P own one more.
    """
    slid = Kernel(extent=kernel, stride=stride, dilation=dilation, padding=(padding, padding))
    found, num_outputs = regions(extent, slid, workers), slid.num_outputs(extent)
    if as_json:
        names = "output owned_input=owned needed_input=needed halo_left halo_right unused_left unused_right"
        told = [attributes(region, f"{names} padding_left padding_right") for region in found]
        sizes = {"kernel": kernel, "stride": stride, "dilation": dilation, "padding": padding}
        print_json({"extent": extent, **sizes, "output_extent": num_outputs, "workers": told})
        return
    say(
        f"input {extent}, output {num_outputs}: kernel {kernel}, stride {stride}, dilation {dilation}, "
        f"padding {padding}"
    )
    say()
    print_table(
        ["worker", "output", "owns", "needs", "halo", "unused", "padding"],
        [
            [
                i,
                *map(_range, (region.output, region.owned, region.needed)),
                f"{region.halo_left} | {region.halo_right}",
                f"{region.unused_left} | {region.unused_right}",
                f"{region.padding_left} | {region.padding_right}",
            ]
            for i, region in enumerate(found)
        ],
    )
    say()
    say("left | right; halo: needed, owned by others; unused: owned, not needed")


def _range(limits: Range) -> str:
    low, high = limits
    return f"[{low}, {high})" if low < high else "none"
