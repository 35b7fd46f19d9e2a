"""`pase easgd-model`: costs of the EASGD family on workers with a replica each, compared with the paper's figures."""

import textwrap
from dataclasses import dataclass
from math import inf
from typing import Any

import click

from pase.cli.options import (
    arguments_option,
    batch_option,
    choice_option,
    complete_models,
    flag,
    json_option,
    machine_option,
    whole_numbers,
)
from pase.cli.output import print_json, print_table, say
from pase.common.documents import attributes
from pase.common.options import POSITIVE, option
from pase.common.words import percentage, quantity
from pase.graph import Graph, Scalar
from pase.importers import load
from pase.machine import Machine, load_machine
from pase.studies.easgd_costs import (
    ALGORITHMS,
    Algorithm,
    Computation,
    Iteration,
    Platform,
    ScalingRow,
    Weights,
    bandwidth_for,
    check_workers,
    computation_of,
    iteration,
    platform_of,
    weak_scaling,
    weights_of,
)
from pase.studies.easgd_paper import CORES_OF_A_NODE, PARTS, TABLE_4, ScalingSeries, statements, table_3
from pase.studies.integrated.equations import Network

WIDTH = 96
MAX_ROWS = 64
ALL = "all"

SHOWN = ("sync-easgd2", "sync-easgd3")
"""Algorithms whose weak scaling represents all: the paper's for clusters, not overlapped and overlapped."""

KNL = "Intel Xeon Phi 7250"
"""The paper's node, whose own measured time is printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The requested study.

    Attributes:
        algorithms: Algorithms whose rounds are broken down.
        scaled: Algorithms whose weak scaling is shown.
        series: The paper's times to compare with, or None.
    """

    graph: Graph
    weights: Weights
    machine: Machine
    workers: tuple[int, ...]
    algorithms: tuple[Algorithm, ...]
    scaled: tuple[Algorithm, ...]
    packed: bool
    computation: Computation
    num_batches: int
    series: ScalingSeries | None

    def platform(self, num_workers: int) -> Platform:
        return platform_of(self.machine, num_workers, self.weights, self.computation)

    @property
    def link(self) -> Network:
        return self.platform(self.workers[-1]).worker_link

    def message_s(self, *, packed: bool) -> float:
        """Return the time to send all weights from one worker to another."""
        return self.weights.message_s(self.link, packed=packed)

    def iteration(self, algorithm: Algorithm, num_workers: int) -> Iteration:
        return iteration(algorithm, num_workers, self.platform(num_workers), self.weights, packed=self.packed)

    def scaling(self, algorithm: Algorithm) -> tuple[ScalingRow, ...]:
        return weak_scaling(
            algorithm, self.workers, self.platform, self.weights, num_batches=self.num_batches, packed=self.packed
        )

    def needed(self, num_workers: int) -> float | None:
        """Return the bandwidth at which the exchange, not overlapped, explains the paper's longer iterations."""
        assert self.series is not None
        latency_s = self.platform(num_workers).worker_link.latency_s
        return bandwidth_for(self.weights, num_workers, self.series.excess_s(num_workers), latency_s=latency_s)


def _workers(text: str) -> tuple[int, ...]:
    found = whole_numbers(text)
    if len(found) > MAX_ROWS:
        raise click.BadParameter(f"there are {len(found)} numbers; expected {MAX_ROWS} at most")
    return tuple(sorted(set(found)))


def _finite(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < inf:
        raise click.BadParameter(f"{value} is not possible; expected a number of seconds above 0")
    return value


@click.command("easgd-model", epilog="Example: pase easgd-model --network vgg19 --workers 1,8,64")
@option(
    "--network", default="googlenet", shell_complete=complete_models, help="A model, built in or a file, as in search."
)
@option(
    "--workers",
    default="1,2,4,8,16,32,64",
    metavar="LIST",
    type=_workers,
    help="Numbers of workers, each of which trains a replica.",
)
@machine_option("knl-fdr", "Preset or .toml file: α, β.")
@choice_option(
    "--algorithm",
    [*ALGORITHMS, ALL],
    default=ALL,
    metavar="NAME",
    help=f"One of them, or all: {', '.join(ALGORITHMS)}.",
)
@option("--packed/--per-layer", default=True, help="All weights in one message, or one message for each array.")
@option(
    "--iteration-time",
    "iteration_s",
    type=float,
    callback=_finite,
    metavar="SECONDS",
    help="Of one batch on one worker alone [the paper's, where it has one, or FLOP ÷ peak].",
)
@option("--iterations", type=POSITIVE, help="Batches of each worker [the paper's, or 1].")
@batch_option
@arguments_option
@flag("--paper", "of_paper", help="Show what the paper states of times, and which reproduce.")
@json_option
def easgd_model_command(
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
    clusters". For GoogLeNet and VGG-19 its measured weak scaling is shown, too.
    """
    for num_workers in workers:
        check_workers(num_workers)
    graph, loaded = load(network, batch=batch, arguments=arguments), load_machine(machine)
    is_papers = graph.name in TABLE_4 and batch is None and not arguments and loaded.device.name == KNL
    series = TABLE_4[graph.name] if is_papers else None
    computation = computation_of(graph, loaded)
    if iteration_s is not None:
        computation = Computation(time_s=iteration_s, source="given", has_update=True)
    elif series:
        source = f"the paper's Table 4, {series.times[1].text} s for {series.num_iterations} on one node"
        computation = Computation(time_s=series.iteration_s, source=source, has_update=True)
    study = Study(
        graph=graph,
        weights=weights_of(graph),
        machine=loaded,
        workers=workers,
        algorithms=tuple(ALGORITHMS[name] for name in (ALGORITHMS if algorithm == ALL else (algorithm,))),
        scaled=tuple(ALGORITHMS[name] for name in (SHOWN if algorithm == ALL else (algorithm,))),
        packed=packed,
        computation=computation,
        num_batches=iterations or (series.num_iterations if series else 1),
        # The paper's times are not comparable with nodes of another speed, or other numbers of iterations.
        series=series if series and iteration_s is None and iterations in (None, series.num_iterations) else None,
    )
    if as_json:
        print_json(_document(study) | (_paper_document() if of_paper else {}))
    elif of_paper:
        _print_paper()
    else:
        _print_study(study)


# -- JSON


def _document(study: Study) -> dict[str, Any]:
    packed_s, per_layer_s = study.message_s(packed=True), study.message_s(packed=False)
    shown = "network=graph.name num_parameters=graph.num_parameters weight_bytes=weights.num_bytes"
    shown += " num_arrays=weights.num_arrays machine=machine.name packed num_batches latency_s=link.latency_s"
    shown += " iteration_time_s=computation.time_s iteration_time_source=computation.source"
    of_iteration = "algorithm=algorithm.name workers=num_workers batches=num_batches time_s round_s hidden_s"
    of_iteration += " communication_ratio=breakdown.communication_ratio messages=num_messages bytes=num_bytes"
    iterations = [study.iteration(each, num_workers) for each in study.algorithms for num_workers in study.workers]
    series = study.series
    return {
        **attributes(study, shown),
        "bandwidth_bytes_per_s": 1 / study.link.s_per_byte,
        "weak_scaling": [
            {
                "algorithm": algorithm.name,
                "rows": [attributes(row, "workers=num_workers time_s efficiency") for row in study.scaling(algorithm)],
            }
            for algorithm in study.scaled
        ],
        "iterations": [
            {**attributes(found, of_iteration), "parts_s": found.breakdown.as_dict()} for found in iterations
        ],
        "packing": {"packed_s": packed_s, "per_layer_s": per_layer_s, "saved_s": per_layer_s - packed_s},
        "paper": series
        and [
            {
                "workers": num_workers,
                "cores": num_workers * CORES_OF_A_NODE,
                "time_s": printed.value,
                "efficiency": series.efficiencies[num_workers].value / 100,
                "lost_s_per_iteration": series.excess_s(num_workers),
                "bandwidth_that_explains_it": study.needed(num_workers),
            }
            for num_workers, printed in series.times.items()
        ],
    }


def _paper_document() -> dict[str, Any]:
    shown = "algorithm=measured.algorithm iterations=measured.num_iterations paper_time_s=measured.time.value time_s"
    shown += " communication_ratio=iteration.breakdown.communication_ratio calibrates=uses"
    return {
        "table_3": [
            {
                **attributes(row, shown),
                "paper_communication_ratio": row.measured.ratio.value / 100,
                "paper_parts_s": {name: row.measured.part_s(name) for name in PARTS},
                "parts_s": row.iteration.breakdown.as_dict(),
            }
            for row in table_3()
        ],
        "statements": [
            {**attributes(each, "where what paper ours"), "verdict": _plain(each.verdict)} for each in statements()
        ],
    }


# -- tables


def _print_study(study: Study) -> None:
    graph, weights, link = study.graph, study.weights, study.link
    say(
        f"{graph.name}: {graph.num_parameters:,} parameters, {quantity(weights.num_bytes, 'B')}, in "
        f"{weights.num_messages(packed=study.packed)} message{'s' if not study.packed else ''}; "
        f"{study.machine.name}: α {quantity(link.latency_s, 's')}, 1/β {quantity(1 / link.s_per_byte, 'B/s')}"
    )
    say(f"a batch on one worker: {quantity(study.computation.time_s, 's')} ({study.computation.source})")
    say()
    _print_scaling(study)
    say()
    _print_parts(study)
    say()
    packed_s, per_layer_s = study.message_s(packed=True), study.message_s(packed=False)
    saved = (per_layer_s - packed_s) / per_layer_s if per_layer_s else 0.0
    say(
        f"packed, all weights go in {quantity(packed_s, 's')}; in {weights.num_arrays} messages, one an array, in "
        f"{quantity(per_layer_s, 's')}: {saved:.2%} saved"
    )
    if study.series is not None:
        say("what of the paper reproduces: pase easgd-model --paper, docs/easgd-model.md")


def _print_scaling(study: Study) -> None:
    batches = "1 batch" if study.num_batches == 1 else f"{study.num_batches} batches"
    how = "; ".join(f"{a.name}: {'overlapped' if a.overlap else 'nothing overlapped'}" for a in study.scaled)
    say(f"weak scaling, {batches} on every worker; {how}")
    series, headers = study.series, ["workers"]
    rows = {num_workers: [f"{num_workers}"] for num_workers in study.workers}
    for algorithm in study.scaled:
        headers += [algorithm.name, "efficiency"]
        for row in study.scaling(algorithm):
            rows[row.num_workers] += [_seconds(row.time_s), percentage(row.efficiency)]
    if series is not None:
        headers += ["paper", "efficiency", "explained by"]
        for num_workers, cells in rows.items():
            if num_workers not in series.times:
                cells += ["", "", ""]
                continue
            needed = study.needed(num_workers)
            cells += [_seconds(series.times[num_workers].value), f"{series.efficiencies[num_workers].text}%"]
            cells.append("" if needed is None else quantity(needed, "B/s"))
    print_table(headers, rows.values())
    if series is not None:
        say("paper: measured; a worker is a node of 68 cores")
        say("explained by: the bandwidth at which the exchange, not overlapped, is all that is lost")


def _print_parts(study: Study) -> None:
    num_workers = study.workers[-1]
    say(f"parts of a round, in which each of {num_workers} workers trains one batch")
    rows: list[list[object]] = []
    for algorithm in study.algorithms:
        found = study.iteration(algorithm, num_workers)
        rounds = num_workers // found.num_batches
        parts = found.times(rounds)
        times_s = (parts.worker_exchange_s, parts.host_exchange_s, parts.compute_s)
        updates_s = parts.worker_update_s + parts.host_update_s
        rows.append([algorithm.name, *map(_seconds, (*times_s, updates_s, parts.total_s))])
        rows[-1] += [percentage(parts.communication_ratio), found.num_messages * rounds]
    headers = ["<algorithm", "workers' link", "master's link", "for/backward", "updates", "in all", "comm", "messages"]
    print_table(headers, rows)


def _seconds(time_s: float) -> str:
    return f"{time_s:.0f} s" if time_s >= 100 else quantity(time_s, "s")


# -- the paper


def _print_paper() -> None:
    """Print Table 3 with its prediction, then every statement with its verdict."""
    rows = table_3()
    say("Table 3: ms of an iteration, paper / model; = for what calibrates the model (docs/easgd-model.md)")
    cells = []
    for name, text in PARTS.items():
        parts = [(row.measured.part_s(name), row.iteration.breakdown.as_dict()[name], name in row.uses) for row in rows]
        cells.append([text, *(_pair(*part) for part in parts)])
    cells.append(["in all", *(_pair(row.measured.iteration_s, row.iteration.time_s) for row in rows)])
    ratios = [(row.measured.ratio.text, row.iteration.breakdown.communication_ratio) for row in rows]
    cells.append(["communication", *(f"{paper} / {100 * ours:.0f} %" for paper, ours in ratios)])
    print_table(["<", *(row.iteration.algorithm.title for row in rows)], cells)
    for statement in statements():
        say()
        for line in textwrap.wrap(f"{statement.where}: {statement.what}", WIDTH):
            say(line)
        text = f"paper: {statement.paper}; ours: {statement.ours}; {_plain(statement.verdict)}"
        for line in textwrap.wrap(text, WIDTH - 4):
            say(f"    {line}")


def _pair(paper_s: float, ours_s: float, calibrates: bool = False) -> str:
    return f"{1e3 * paper_s:.2f} {'=' if calibrates else '/'} {1e3 * ours_s:.2f}"


def _plain(verdict: str) -> str:
    return verdict.replace("**", "")
