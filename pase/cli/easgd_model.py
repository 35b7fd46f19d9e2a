"""`pase easgd-model`: what the EASGD family costs on workers that each hold a replica, beside the paper's figures."""

import textwrap
from dataclasses import dataclass
from math import inf
from typing import Any

import click

from pase.cli.options import (
    WholeNumber,
    arguments_option,
    batch_option,
    complete_models,
    json_option,
    machine_option,
)
from pase.cli.output import print_json, print_table, quantity, say
from pase.graph import Graph, Scalar
from pase.importers import load
from pase.machine import Machine, load_machine
from pase.studies.easgd_costs.iteration import (
    ALGORITHMS,
    Algorithm,
    Computation,
    Iteration,
    Platform,
    ScalingRow,
    Weights,
    algorithm_named,
    bandwidth_for,
    check_workers,
    computation_of,
    iteration,
    platform_of,
    weak_scaling,
    weights_of,
)
from pase.studies.easgd_costs.paper import CORES_OF_A_NODE, PARTS, TABLE_4, ScalingSeries
from pase.studies.easgd_costs.statements import statements, table_3

WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What was asked for. algorithms: in parts. scaled: in weak scaling. series: the paper's times beside, or None."""

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
        """Return what so many workers run on."""
        return platform_of(self.machine, num_workers, self.weights, self.computation)

    def iteration(self, algorithm: Algorithm, num_workers: int) -> Iteration:
        """Return an iteration."""
        return iteration(algorithm, num_workers, self.platform(num_workers), self.weights, packed=self.packed)

    def scaling(self, algorithm: Algorithm) -> tuple[ScalingRow, ...]:
        """Return the weak scaling of an algorithm."""
        return weak_scaling(
            algorithm, self.workers, self.platform, self.weights, num_batches=self.num_batches, packed=self.packed
        )


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
@machine_option("knl-fdr", "Preset or .toml file: α, β.")
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


# -- JSON


def study_document(study: Study, *, of_paper: bool) -> dict[str, Any]:
    """Return the JSON form; of_paper: with the paper's statements and Table 3."""
    link = study.platform(study.workers[-1]).worker_link
    packed_s, per_layer_s = _message_times(study)
    series = study.series
    document: dict[str, Any] = {
        "network": study.graph.name,
        "num_parameters": study.graph.num_parameters,
        "weight_bytes": study.weights.num_bytes,
        "num_arrays": study.weights.num_arrays,
        "machine": study.machine.name,
        "latency_s": link.latency_s,
        "bandwidth_bytes_per_s": 1 / link.s_per_byte,
        "packed": study.packed,
        "iteration_time_s": study.computation.time_s,
        "iteration_time_source": study.computation.source,
        "num_batches": study.num_batches,
        "weak_scaling": [
            {
                "algorithm": algorithm.name,
                "rows": [
                    {"workers": row.num_workers, "time_s": row.time_s, "efficiency": row.efficiency}
                    for row in study.scaling(algorithm)
                ],
            }
            for algorithm in study.scaled
        ],
        "iterations": [
            {
                "algorithm": found.algorithm.name,
                "workers": found.num_workers,
                "batches": found.num_batches,
                "time_s": found.time_s,
                "round_s": found.round_s,
                "parts_s": found.breakdown.as_dict(),
                "hidden_s": found.hidden_s,
                "communication_ratio": found.breakdown.communication_ratio,
                "messages": found.num_messages,
                "bytes": found.num_bytes,
            }
            for algorithm in study.algorithms
            for found in (study.iteration(algorithm, num_workers) for num_workers in study.workers)
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
                "bandwidth_that_explains_it": _needed(study, series, num_workers),
            }
            for num_workers, printed in series.times.items()
        ],
    }
    if of_paper:
        document["table_3"] = [
            {
                "algorithm": row.measured.algorithm,
                "iterations": row.measured.num_iterations,
                "paper_time_s": row.measured.time.value,
                "time_s": row.time_s,
                "paper_communication_ratio": row.measured.ratio.value / 100,
                "communication_ratio": row.iteration.breakdown.communication_ratio,
                "paper_parts_s": {name: row.measured.part_s(name) for name in PARTS},
                "parts_s": row.iteration.breakdown.as_dict(),
                "calibrates": list(row.uses),
            }
            for row in table_3()
        ]
        document["statements"] = [
            {"where": s.where, "what": s.what, "paper": s.paper, "ours": s.ours, "verdict": _plain(s.verdict)}
            for s in statements()
        ]
    return document


def _message_times(study: Study) -> tuple[float, float]:
    link = study.platform(study.workers[-1]).worker_link
    return study.weights.message_s(link, packed=True), study.weights.message_s(link, packed=False)


def _needed(study: Study, series: ScalingSeries, num_workers: int) -> float | None:
    """Return the bandwidth at which the exchange, not overlapped, takes what the paper's iterations are longer."""
    link = study.platform(num_workers).worker_link
    return bandwidth_for(study.weights, num_workers, series.excess_s(num_workers), latency_s=link.latency_s)


# -- tables


def print_study(study: Study) -> None:
    """Print a study as tables."""
    graph, weights = study.graph, study.weights
    link = study.platform(study.workers[-1]).worker_link
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
    packed_s, per_layer_s = _message_times(study)
    arrays = study.weights.num_arrays
    saved = (per_layer_s - packed_s) / per_layer_s if per_layer_s else 0.0
    say(
        f"packed, all weights go in {quantity(packed_s, 's')}; in {arrays} messages, one an array, in "
        f"{quantity(per_layer_s, 's')}: {saved:.2%} saved"
    )
    if study.series is not None:
        say("what of the paper reproduces: pase easgd-model --paper, docs/easgd-model.md")


def _print_scaling(study: Study) -> None:
    batches = "1 batch" if study.num_batches == 1 else f"{study.num_batches} batches"
    how = "; ".join(f"{a.name}: {'overlapped' if a.overlap else 'nothing overlapped'}" for a in study.scaled)
    say(f"weak scaling, {batches} on every worker; {how}")
    headers = ["workers"]
    rows = {num_workers: [str(num_workers)] for num_workers in study.workers}
    for algorithm in study.scaled:
        headers += [algorithm.name, "efficiency"]
        for row in study.scaling(algorithm):
            rows[row.num_workers] += [_seconds(row.time_s), f"{row.efficiency:.1%}"]
    if study.series is not None:
        headers += ["paper", "efficiency", "explained by"]
        for num_workers, cells in rows.items():
            cells += _paper_cells(study, study.series, num_workers)
    print_table(headers, list(rows.values()))
    if study.series is not None:
        say("paper: measured; a worker is a node of 68 cores")
        say("explained by: the bandwidth at which the exchange, not overlapped, is all that is lost")


def _paper_cells(study: Study, series: ScalingSeries, num_workers: int) -> list[str]:
    if num_workers not in series.times:
        return ["", "", ""]
    needed = _needed(study, series, num_workers)
    return [
        _seconds(series.times[num_workers].value),
        f"{series.efficiencies[num_workers].text}%",
        "" if needed is None else quantity(needed, "B/s"),
    ]


def _print_parts(study: Study) -> None:
    num_workers = study.workers[-1]
    say(f"parts of a round, in which each of {num_workers} workers trains one batch")
    headers = ["<algorithm", "workers' link", "master's link", "for/backward", "updates", "in all", "comm", "messages"]
    rows = []
    for algorithm in study.algorithms:
        found = study.iteration(algorithm, num_workers)
        rounds = num_workers // found.num_batches
        parts = found.times(rounds)
        rows.append(
            [
                algorithm.name,
                *map(_seconds, (parts.worker_exchange_s, parts.host_exchange_s, parts.compute_s)),
                _seconds(parts.worker_update_s + parts.host_update_s),
                _seconds(parts.total_s),
                f"{parts.communication_ratio:.1%}",
                f"{found.num_messages * rounds:,}",
            ]
        )
    print_table(headers, rows)


def _seconds(time_s: float) -> str:
    return f"{time_s:.0f} s" if time_s >= 100 else quantity(time_s, "s")


# -- the paper


def print_paper() -> None:
    """Print Table 3 with its prediction, then every statement with its verdict."""
    _print_table_3()
    for statement in statements():
        say()
        for line in textwrap.wrap(f"{statement.where}: {statement.what}", WIDTH):
            say(line)
        text = f"paper: {statement.paper}; ours: {statement.ours}; {_plain(statement.verdict)}"
        for line in textwrap.wrap(text, WIDTH - 4):
            say(f"    {line}")


def _print_table_3() -> None:
    rows = table_3()
    say("Table 3: ms of an iteration, paper / model; = for what calibrates the model (docs/easgd-model.md)")
    cells = [
        [
            text,
            *(
                _pair(row.measured.part_s(name), row.iteration.breakdown.as_dict()[name], name in row.uses)
                for row in rows
            ),
        ]
        for name, text in PARTS.items()
    ]
    cells.append(["in all", *(_pair(row.measured.iteration_s, row.iteration.time_s, False) for row in rows)])
    ratios = [(row.measured.ratio.text, row.iteration.breakdown.communication_ratio) for row in rows]
    cells.append(["communication", *(f"{paper} / {100 * ours:.0f} %" for paper, ours in ratios)])
    headers = ["<", *(row.iteration.algorithm.title for row in rows)]
    print_table(headers, cells)


def _pair(paper_s: float, ours_s: float, calibrates: bool) -> str:
    return f"{1e3 * paper_s:.2f} {'=' if calibrates else '/'} {1e3 * ours_s:.2f}"


def _plain(verdict: str) -> str:
    return verdict.replace("**", "")
