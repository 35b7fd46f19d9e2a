"""Steps in parts on the cluster of one machine: states, recomputation, micro-batches and stages beside their costs.

Besides what searches find there is data parallelism in each mode, in micro-batches and in stages.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pase import Plan, load, search
from pase.graph import Scalar
from pase.graph.parts import micro_batch
from pase.machine import Machine
from pase.planning.constraints import MODES
from pase.planning.steps import TrainingStep
from scripts.benchmarks.cluster import MODELS as WHOLE
from scripts.benchmarks.cluster import NETWORKS, Times, links, measured, run
from scripts.benchmarks.cluster_network import cluster, unsupported
from scripts.benchmarks.modes import Modes, plan_in
from scripts.benchmarks.simulation import spearman
from scripts.benchmarks.tables import markdown, publish

MODELS: Mapping[str, Mapping[str, Scalar]] = {
    "mlp": WHOLE["mlp"],
    "gpt": {**WHOLE["gpt"], "layers": 4},
}
"""Those of `cluster`, deep enough for four stages."""

PARTS: Mapping[str, Modes] = {
    "data parallel": Modes(),
    "zero1": Modes(state="zero1"),
    "zero3": Modes(state="zero3"),
    "recomputed": Modes(is_recomputed=True),
    "recomputed, zero3": Modes(is_recomputed=True, state="zero3"),
    "4 micro-batches": Modes(micro_batches=4),
    "4 micro-batches, zero2": Modes(micro_batches=4, state="zero2"),
    "2 micro-batches, recomputed, zero3": Modes(micro_batches=2, is_recomputed=True, state="zero3"),
    "2 stages, 2 micro-batches": Modes(stages=2, micro_batches=2),
    "2 stages, 4 micro-batches": Modes(stages=2, micro_batches=4),
    "2 stages, 4 micro-batches, gpipe": Modes(stages=2, micro_batches=4, schedule="gpipe"),
    "2 stages, 4 micro-batches, recomputed, zero3": Modes(stages=2, micro_batches=4, is_recomputed=True, state="zero3"),
    "4 stages, 4 micro-batches": Modes(stages=4, micro_batches=4),
    "4 stages, 4 micro-batches, recomputed": Modes(stages=4, micro_batches=4, is_recomputed=True),
}

SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "searched": {"stages": "auto", "micro_batches": "auto", "modes": MODES},
    "searched, 2 stages": {"stages": 2, "micro_batches": "auto", "modes": MODES},
    "searched, in a third of the memory": {"stages": "auto", "micro_batches": "auto", "modes": MODES},
}
SHARES = {"searched, in a third of the memory": 1 / 3}
"""Of what data parallelism needs, that a search has of a device's memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen."""
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), default=tuple(MODELS), metavar="A,B")
    parser.add_argument(
        "--networks", type=lambda text: tuple(map(int, text.split(","))), default=(0, 1, 3),
        metavar="0,2", help="by their numbers in `cluster`, from 0",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="in each, every strategy does one step (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where all times are written, too")


def main(*, write: bool, models: Sequence[str], networks: Sequence[int], rounds: int, keep: Path | None) -> None:
    """Print the tables, or put them into docs/cluster.md; SystemExit where no cluster can be made here."""
    reason = unsupported()
    if reason:
        raise SystemExit(f"no cluster on this machine: {reason}")
    found: dict[tuple[str, str], dict[str, tuple[float, Times]]] = {}
    for number in networks:
        network = NETWORKS[number]
        with tempfile.TemporaryDirectory(prefix="pase-cluster-") as name, cluster(network) as made:
            folder = Path(name)
            machine = measured(made, folder)
            for model in models:
                plans = strategies(model, network.num_ranks, machine)
                times = run(made, plans, folder, model, rounds)
                own = {name: (TrainingStep.of(plan).cost, times[name]) for name, plan in plans.items()}
                found[model, f"{network.num_ranks} × {links(network)}"] = own
                print(
                    model, links(network), {name: _pair(*each) for name, each in own.items()}, _rho([own]), flush=True
                )
    if keep is not None:
        keep.write_text(json.dumps([[*of, own] for of, own in found.items()], indent=2), encoding="utf-8")
    publish("cluster.md", tables(found), write=write)


def strategies(model: str, num_devices: int, machine: Machine) -> dict[str, Plan]:
    """Return the plans of a model that are run, by name."""
    graph, batch = load(model, arguments=MODELS[model]), int(MODELS[model]["batch"])
    settings: dict[str, Any] = {"machine": machine, "cost_model": "step"}
    plans = {
        name: plan_in(micro_batch(graph, modes.micro_batches), modes, num_devices, **settings)
        for name, modes in PARTS.items()
        if batch % (modes.micro_batches * num_devices // modes.stages) == 0
    }
    needed = TrainingStep.of(plans["data parallel"]).peak.bytes
    for name, asked in SEARCHES.items():
        limit = int(SHARES[name] * needed) if name in SHARES else None
        plans[name] = search(graph, num_devices, device_memory_bytes=limit, **settings, **asked)
    return plans


def _rho(settings: Sequence[Mapping[str, tuple[float, Times]]]) -> float:
    """Return Spearman's ρ of what is predicted and measured, over all strategies of some settings."""
    pairs = [(predicted_s, _middle_s(times)) for own in settings for predicted_s, times in own.values()]
    predicted, times = zip(*pairs, strict=True)
    return spearman(predicted, times)


def _middle_s(times: Times) -> float:
    return median(time_s for time_s, _ in times)


def _pair(predicted_s: float, times: Times) -> str:
    return f"{_middle_s(times) * 1e3:.0f} ({predicted_s * 1e3:.0f})"


def tables(found: Mapping[tuple[str, str], Mapping[str, tuple[float, Times]]]) -> dict[str, str]:
    """Return the tables of the page; found: of each model and network the strategies' predictions and times."""
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    rows = [[name, *(_pair(*own[name]) if name in own else "–" for own in found.values())] for name in names]
    rows.append(["Spearman's ρ", *(f"{_rho([own]):.2f}" for own in found.values())])
    rows.append(["the same, all together", f"{_rho(list(found.values())):.3f}", *[""] * (len(found) - 1)])
    return {"parts": markdown(["step", *(f"{model}, {network}" for model, network in found)], rows)}
