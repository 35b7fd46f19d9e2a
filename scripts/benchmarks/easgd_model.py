"""You et al. 2017 from its cost model: Tables 3 and 4 beside what is predicted, and what its text states."""

from pase.common.words import quantity
from pase.easgd.algorithms import Exchange
from pase.importers import load
from pase.machine import load_machine
from pase.studies.easgd_costs import ALGORITHMS, Algorithm, bandwidth_for, weights_of
from pase.studies.easgd_paper import (
    CORES_OF_A_NODE,
    PARTS,
    TABLE_4,
    node,
    predicted,
    scaled_s,
    statements,
    table_3,
    weights,
)
from pase.studies.integrated.equations import network_of
from scripts.benchmarks.tables import markdown, publish

ROUND = {
    Exchange.ROUND_ROBIN: "2P(α+nβ)",
    Exchange.FIRST_COME: "max(own work, P · service)",
    Exchange.LOCK_FREE: "max(own work, P · nβ)",
    Exchange.TOGETHER: "2⌈log2 P⌉(α+nβ)",
}
"""What P workers' exchange, each once, takes; n: bytes of all weights."""

NETWORKS = ("knl-fdr", "knl-qdr", "knl-10gbe", "cori-knl")
PACKED = ("lenet5", "alexnet", "googlenet", "vgg19")


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/."""
    publish("easgd-model.md", tables(), write=write)


def tables() -> dict[str, str]:
    """Return the tables of docs/easgd-model.md by name."""
    return {
        "algorithms": _algorithms(),
        "statements": markdown(
            ["where", "what the text states", "paper", "ours", "does it follow?"],
            [[s.where, s.what, s.paper, s.ours, s.verdict] for s in statements()],
        ),
        "table 3": _table_3(),
        "gpus": _gpus(),
        **{f"table 4 {name}": _table_4(name) for name in TABLE_4},
        "packing": _packing(),
    }


def _algorithms() -> str:
    rows = []
    for algorithm in ALGORITHMS.values():
        passes = f"{algorithm.worker_passes}, {algorithm.centre_passes}"
        cells = [algorithm.exchange.value, algorithm.place.value, ROUND[algorithm.exchange], passes]
        rows.append([f"`{algorithm.name}`", algorithm.equations, *cells, _overlap(algorithm)])
    headers = ["algorithm", "in the paper", "who is served", "centre", "a round's exchange"]
    return markdown([*headers, "passes, worker's and centre's", "overlapped"], rows)


def _overlap(algorithm: Algorithm) -> str:
    if algorithm.overlap is None:
        return ""
    return f"{PARTS[algorithm.overlap.hidden]} behind {' and '.join(PARTS[p] for p in algorithm.overlap.behind)}"


def _table_3() -> str:
    rows = []
    for row in table_3():
        cells = []
        for name, ours in row.iteration.breakdown.as_dict().items():
            low, high = row.measured.part_interval_s(name)
            within = name not in row.uses and low <= ours <= high
            text = f"{1e3 * row.measured.part_s(name):.2f} / {1e3 * ours:.2f}"
            cells.append(f"**{text}**" if name in row.uses else text + (" ✓" if within else ""))
        total = f"{1e3 * row.measured.iteration_s:.1f} / {1e3 * row.iteration.time_s:.1f}"
        ratio = f"{row.measured.ratio.text} / {100 * row.iteration.breakdown.communication_ratio:.0f}"
        rows.append([row.iteration.algorithm.title.replace("*", "\\*"), *cells, total, ratio])
    return markdown(["ms of an iteration, paper / model", *PARTS.values(), "in all", "communication, %"], rows)


def _gpus() -> str:
    rows = []
    for name, algorithm in ALGORITHMS.items():
        found = predicted(name)
        cells = [f"{1e3 * found.time_s:.2f}", str(found.num_batches), f"{1e3 * found.time_s / found.num_batches:.2f}"]
        ratio = f"{100 * found.breakdown.communication_ratio:.0f}"
        rows.append([algorithm.title.replace("*", "\\*"), *cells, ratio, str(found.num_messages)])
    headers = ["algorithm", "an iteration, ms", "its batches", "a batch, ms", "communication, %"]
    return markdown([*headers, "messages of an iteration"], rows)


def _table_4(network: str) -> str:
    series = TABLE_4[network]
    alone_s = series.times[1].value
    rows = []
    for num_nodes, printed in series.times.items():
        cells = [str(num_nodes), str(num_nodes * CORES_OF_A_NODE), printed.text, series.efficiencies[num_nodes].text]
        for preset in ("knl-fdr", "cori-knl"):
            ours_s = scaled_s(network, num_nodes, "sync-easgd2", preset=preset)
            cells.append(f"{ours_s:.0f} ({100 * alone_s / ours_s:.1f} %)")
        hidden_s = scaled_s(network, num_nodes, "sync-easgd3")
        cells.append(f"{hidden_s:.0f} ({100 * alone_s / hidden_s:.0f} %)")
        lost_s, link = series.excess_s(num_nodes), node(network, num_nodes, "knl-fdr").worker_link
        needed = bandwidth_for(weights(network), num_nodes, lost_s, latency_s=link.latency_s)
        rows.append([*cells, f"{lost_s:.2f}", "" if needed is None else quantity(needed, "B/s")])
    headers = ["nodes", "cores", "paper, s", "paper, %", "FDR, s", "Cori as Gholami et al. have it, s", "overlapped, s"]
    return markdown([*headers, "lost in an iteration, s", "bandwidth that explains it"], rows)


def _packing() -> str:
    rows = []
    for name in PACKED:
        found = weights_of(load(name))
        row = [name, str(found.num_arrays), quantity(found.num_bytes, "B")]
        for preset in NETWORKS:
            link = network_of(load_machine(preset), 2)
            packed_s, per_layer_s = (found.message_s(link, packed=packed) for packed in (True, False))
            row.append(f"{quantity(packed_s, 's')}, {1 - packed_s / per_layer_s:.2%} less")
        rows.append(row)
    return markdown(["network", "arrays", "weights", *NETWORKS], rows)
