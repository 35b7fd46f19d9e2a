"""Figures 5 to 10 of Gholami et al. 2018, drawn anew from the equations alone, with the paper's machine and network."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from pase import load
from pase.machine import load_machine
from pase.studies.integrated.chain import Chain, Options, chain_of
from pase.studies.integrated.equations import Grid, Network, Role, Terms, integrated, network_of
from pase.studies.integrated.study import OWN_GRIDS, Candidate, Study, num_iterations, step_time, study
from scripts.benchmarks.charts import Bar, Curve, Panel, Part, curves, stacked_bars
from scripts.benchmarks.integrated_multiply import multiplication

NUM_SAMPLES = 1_200_000
STRONG_BATCH = 2048
STRONG_PROCESSES = (8, 32, 128, 512)
"""The text gives the first and the last; those between are ours."""
WEAK = ((8, 32), (32, 128), (128, 512), (512, 2048))
"""P and B of Fig. 9, which the text does not give: four samples for each process, the last one as in Fig. 6."""
BEYOND_BATCH = 512
BEYOND_PROCESSES = (512, 1024, 2048, 4096)
COMPUTE_LIMIT_S = 0.2
CUT_OFF = 1.5
"""Bars are cut off at so many times pure batch parallelism; on extreme grids they would flatten the rest."""

PARTS = (
    Part(name="outputs and ΔX, among rows", colour="#e08214"),
    Part(name="halos", colour="#35978f"),
    Part(name="ΔW, among columns", colour="#8073ac", hatched=True),
)


@cache
def alexnet(options: Options | None = None) -> Chain:
    """Return the paper's AlexNet: two towers, 60,954,656 weights."""
    return chain_of(load("alexnet", arguments={"grouped": True}), options)


@cache
def cori() -> Network:
    """Return the paper's machine: α = 2 µs, 1/β = 6 GB/s."""
    return network_of(load_machine("cori-knl"), 512)


@cache
def studied(num_processes: int, batch: int, *, version: int = 2, options: Options | None = None) -> Study:
    """Return all grids of the paper's network on the paper's machine."""
    return study(alexnet(options), num_processes, batch, cori(), version=version, options=options)


def halves(chain: Chain) -> tuple[Chain, Chain]:
    """Return the convolutions and the dense layers."""
    first = tuple(layer for layer in chain.layers if layer.is_convolution)
    return replace(chain, layers=first), replace(chain, layers=chain.layers[len(first) :])


def convolutions_beyond(num_processes: int, role: Role) -> Terms:
    """Return the convolutions' communication where each image has P/B processes, by what these share of a layer."""
    first, _ = halves(alexnet())
    grid = Grid(num_processes // BEYOND_BATCH, BEYOND_BATCH)
    options = Options(halo_at_one=False)  # at P = B the convolutions are in pure batch parallelism
    return integrated(first, {layer.name: role for layer in first.layers}, BEYOND_BATCH, grid, cori(), options)


def beyond(num_processes: int) -> tuple[Candidate, ...]:
    """Return the dense layers' grids for Fig. 10: each image has P/B processes in the convolutions."""
    convolutions = Grid(num_processes // BEYOND_BATCH, BEYOND_BATCH)
    return study(alexnet(), num_processes, BEYOND_BATCH, cori(), convolutions=convolutions).candidates[OWN_GRIDS]


def figures() -> Mapping[str, str]:
    """Return the SVG text of each figure, by its file name."""
    return {
        "figure5.svg": multiplication(),
        "figure6.svg": _bars([(p, STRONG_BATCH) for p in STRONG_PROCESSES], "same_grid"),
        "figure7.svg": _bars([(p, STRONG_BATCH) for p in STRONG_PROCESSES], "dense_only"),
        "figure8.svg": _overlap(),
        "figure9.svg": _bars(list(WEAK), "same_grid"),
        "figure9-dense-only.svg": _bars(list(WEAK), "dense_only"),
        "figure10.svg": _beyond_batch(),
        "version1-figure5.svg": _bars([(p, STRONG_BATCH) for p in STRONG_PROCESSES], "same_grid", version=1),
    }


def _bars(settings: list[tuple[int, int]], variant: str, *, version: int = 2) -> str:
    panels = []
    for letter, (num_processes, batch) in zip("abcd", settings, strict=True):
        found = studied(num_processes, batch, version=version)
        best = found.best(variant)
        assert best is not None
        bars = tuple(
            Bar(
                label=str(candidate.grid),
                heights=_heights(candidate.terms, batch),
                note=f"{found.speedup(best.time_s):.1f}×" if candidate is best else "",
            )
            for candidate in found.candidates[variant]
        )
        limit = CUT_OFF * sum(_heights(found.pure_batch, batch))
        panels.append(Panel(title=f"({letter}) P = {num_processes}, B = {batch}", bars=bars, limit=limit))
    return stacked_bars(panels, PARTS, unit="communication in an epoch, s")


def _heights(terms: Terms, batch: int) -> tuple[float, ...]:
    steps = num_iterations(NUM_SAMPLES, batch, Options())
    rows = terms.activation_all_gather + terms.input_gradient_all_reduce
    return rows * steps, (terms.halo_forward + terms.halo_backward) * steps, terms.weight_gradient_all_reduce * steps


def _beyond_batch() -> str:
    panels = []
    for letter, num_processes in zip("abcd", BEYOND_PROCESSES, strict=True):
        found = beyond(num_processes)
        best = min(found, key=lambda candidate: candidate.terms.time_s)
        bars = tuple(
            Bar(
                label=str(candidate.grid),
                heights=_heights(candidate.terms, BEYOND_BATCH),
                note=f"{candidate.terms.time_s * 1e3:.1f} ms" if candidate is best else "",
            )
            for candidate in found
        )
        split = f"convolutions on {found[0].convolutions}"
        panels.append(Panel(title=f"({letter}) P = {num_processes}, B = {BEYOND_BATCH}, {split}", bars=bars))
    return stacked_bars(panels, PARTS, unit="communication in an epoch, s")


def _overlap() -> str:
    found = studied(512, STRONG_BATCH)
    times = [COMPUTE_LIMIT_S * k / 100 for k in range(101)]
    lines = []
    for variant, colour in (("same_grid", "#e08214"), ("dense_only", "#8073ac")):
        best = found.best(variant)
        assert best is not None
        for overlap in (False, True):
            points = tuple(
                (
                    1e3 * s,
                    step_time(found.pure_batch.time_s, s, overlap=overlap) / step_time(best.time_s, s, overlap=overlap),
                )
                for s in times
            )
            name = f"{variant} {best.grid}{', overlapped' if overlap else ''}"
            lines.append(Curve(name=name, colour=colour, points=points, dashed=overlap))
    return curves(
        lines,
        title="P = 512, B = 2048: how many times as fast as pure batch parallelism a step is",
        x_label="computation of a step, ms (not known: the paper measures it, and prints no figure)",
        y_label="speed-up",
    )
