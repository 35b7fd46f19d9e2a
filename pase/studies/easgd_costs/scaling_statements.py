"""Table 4 and its text in You et al. 2017, beside the α-β model of a cluster."""

from collections.abc import Iterator
from functools import cache

from pase.importers import load
from pase.machine import Machine, load_machine
from pase.studies.easgd_costs.algorithms import ALGORITHMS
from pase.studies.easgd_costs.iteration import iteration, num_stages
from pase.studies.easgd_costs.judgement import NO, UNTOLD, YES, Statement
from pase.studies.easgd_costs.paper import CORES_OF_A_NODE, TABLE_4, ScalingSeries
from pase.studies.easgd_costs.platform import Computation, Platform, Weights, platform_of, weights_of

LAST = 64
"""Nodes in Table 4's last column."""


def scaling_statements() -> Iterator[Statement]:
    """Yield each network's last column, how what is lost grows, Intel Caffe's figures, and the headlines."""
    for series in TABLE_4.values():
        yield _last_column(series)
        yield _growth(series)
        yield _caffe(series)
    yield from _headlines()


@cache
def weights(network: str) -> Weights:
    """Return the weights of a network of Table 4."""
    return weights_of(load(network))


@cache
def machine(name: str) -> Machine:
    """Return a preset."""
    return load_machine(name)


def node(network: str, num_workers: int, preset: str) -> Platform:
    """Return what Table 4 ran on, as a preset has it, with the paper's own time of one node."""
    own = Computation(time_s=TABLE_4[network].iteration_s, source="You et al. 2017, Table 4", has_update=True)
    return platform_of(machine(preset), num_workers, weights(network), own)


def scaled_s(network: str, num_workers: int, name: str, *, preset: str = "knl-fdr") -> float:
    """Return the predicted seconds of Table 4's iterations on so many nodes."""
    platform = node(network, num_workers, preset)
    found = iteration(ALGORITHMS[name], num_workers, platform, weights(network))
    return found.round_s * TABLE_4[network].num_iterations


def _last_column(series: ScalingSeries) -> Statement:
    alone_s = series.times[1].value
    hidden_s, seen_s = (scaled_s(series.network, LAST, name) for name in ("sync-easgd3", "sync-easgd2"))
    lost_s, exchange_s = series.excess_s(LAST), (seen_s - alone_s) / series.num_iterations
    return Statement(
        where="Table 4",
        what=f"{series.network}: {series.num_iterations} iterations on {LAST} nodes, by FDR InfiniBand",
        paper=f"{series.times[LAST].text} s, {series.efficiencies[LAST].text} %",
        ours=f"{seen_s:.0f} s, {100 * alone_s / seen_s:.1f} %; "
        f"overlapped {hidden_s:.0f} s, {100 * alone_s / hidden_s:.0f} %",
        verdict=f"{NO}: {lost_s:.2f} s an iteration are lost, {exchange_s:.2f} s are the exchange's",
    )


def _growth(series: ScalingSeries) -> Statement:
    share = num_stages(2) / num_stages(LAST)
    return Statement(
        where="Table 4",
        what=f"{series.network}: what is lost grows as ⌈log2 P⌉, so that 2 nodes lose {share:.0%} of what 64 do",
        paper="Θ(log P)",
        ours=f"{series.excess_s(2) / series.excess_s(LAST):.0%}, by the table's own times",
        verdict=f"{NO}: no β gives both ends",
    )


def _caffe(series: ScalingSeries) -> Statement:
    ((num_nodes, printed),) = series.caffe.items()
    caffe_s = series.iteration_s * (100 / printed.value - 1)
    times = caffe_s / series.excess_s(num_nodes)
    return Statement(
        where="section 7.1",
        what=f"{series.network}: Intel Caffe on {num_nodes * CORES_OF_A_NODE} cores, beside the paper's own",
        paper=f"{printed.text} %, {series.claimed.text} %",
        ours=f"Caffe loses {caffe_s:.2f} s an iteration, {times:.1f} times Table 4's loss",
        verdict=f"{UNTOLD}: how it communicates is not said",
    )


def _headlines() -> Iterator[Statement]:
    google = TABLE_4["googlenet"]
    ratio = 100 * google.times[1].value / google.times[64].value
    yield Statement(
        where="abstract, section 8",
        what="weak scaling of GoogLeNet on 4253 cores (abstract), 4352 (Table 4)",
        paper="91.5 %, 91.6 %",
        ours=f"{google.times[1].text} ÷ {google.times[64].text} s = {ratio:.2f} %, and 64 · 68 = 4352",
        verdict="91.6 % on 4352; 91.5 % is that cut off, or VGG's on 136",
    )
    ratio = 100 * google.times[1].value / google.times[32].value
    yield Statement(
        where="sections 1 and 7.1, Table 4",
        what="weak scaling of GoogLeNet on 2176 cores",
        paper="92 %, 92.3 %",
        ours=f"{google.times[1].text} ÷ {google.times[32].text} s = {ratio:.2f} %",
        verdict=f"{YES}; 92.3 from times with more digits",
    )
