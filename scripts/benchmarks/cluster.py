"""Training steps on a cluster of one machine, whose links decide: measured beside `simulate`'s prediction.

Processes in network namespaces are the devices. In each network of links they first measure it, as a machine file; for
that machine strategies are searched and predicted, and their PyTorch programs run, all in one run and in turns.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from pase import Graph, Plan, emit, load, load_machine
from pase.analysis.baselines.compare import OURS as PASE
from pase.analysis.baselines.compare import compare
from pase.analysis.baselines.registry import EXPERTS, Baseline, meshes
from pase.analysis.baselines.rules import choice_of, dense_product, split_in_turn, transformer_dims
from pase.analysis.simulation.simulation import simulate
from pase.costs import Problem, cost_model
from pase.graph import Scalar
from pase.machine import Machine
from pase.planning.strategy import plan_layers
from scripts.benchmarks import figure6
from scripts.benchmarks.cluster_network import Cluster, Network, cluster, unsupported
from scripts.benchmarks.simulation import spearman
from scripts.benchmarks.tables import ROOT, markdown, publish
from scripts.benchmarks.trials import random_strategy

SEARCHED = {"searched": "ring", "searched, alpha_beta": "alpha_beta"}
"""Strategies that are searched, and by which cost model: as gloo sums, and as sums would go by nodes."""

COLLECTIVES = "ring"
"""How gloo sums, in simulated steps."""

OURS, BY_NODES = SEARCHED
DATA_PARALLEL, MEGATRON = "data_parallel", "megatron"
RANDOM = 3
"""Random strategies of each setting."""

RANKS_PER_NODE = 2

MODELS: Mapping[str, Mapping[str, Scalar]] = {
    "mlp": {"batch": 1024, "inputs": 512, "hidden": 768, "classes": 256, "layers": 4},
    "alexnet": {"batch": 64, "image": 99, "width": 4, "classes": 64},
    "gpt": {"batch": 16, "vocabulary": 512, "steps": 64, "model_width": 192, "heads": 4, "layers": 2},
}
"""Arguments of the builders: little to compute for what has to be sent."""

MEGABIT = 1e6

NETWORKS = tuple(
    Network(
        num_ranks=ranks,
        ranks_per_node=RANKS_PER_NODE,
        rank_bits_per_s=rank * MEGABIT,
        node_bits_per_s=node * MEGABIT,
    )
    for ranks, rank, node in ((4, 200, 50), (4, 400, 200), (4, 1000, 200), (8, 200, 100), (8, 400, 200))
)

TOLERANCE = 0.03
"""Behind the fastest strategy: no more than what the steps of one differ by."""

PAPER_NAMES = {"alexnet": "alexnet", "gpt": "transformer"}
"""Which network of the paper's Fig. 6 ours stands beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A strategy in one setting. times_s: of its steps, each as long as on the slowest rank."""

    name: str
    predicted_s: float
    times_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """Of the middle step."""
        return median(self.times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model on one network, under several strategies."""

    model: str
    network: Network
    timed: tuple[Timed, ...]

    def of(self, name: str) -> Timed:
        """Return a strategy by its name."""
        return next(timed for timed in self.timed if timed.name == name)

    @property
    def behind(self) -> float:
        """How much longer than the fastest that was not searched the searched one takes; below 0 where it is faster."""
        return self.behind_others(OURS)

    def behind_others(self, name: str) -> float:
        """Return the same for a searched strategy by its name."""
        return self.of(name).measured_s / min(t.measured_s for t in self.timed if t.name not in SEARCHED) - 1

    @property
    def correlation(self) -> float:
        """Spearman's ρ of prediction and measurement."""
        return spearman([t.predicted_s for t in self.timed], [t.measured_s for t in self.timed])

    def speedup(self, name: str) -> tuple[float, float]:
        """Return how much faster a strategy is than data parallelism: measured, and predicted."""
        base, other = self.of(DATA_PARALLEL), self.of(name)
        return base.measured_s / other.measured_s, base.predicted_s / other.predicted_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen."""
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), default=tuple(MODELS), metavar="A,B")
    parser.add_argument(
        "--networks", type=lambda text: tuple(map(int, text.split(","))), default=tuple(range(len(NETWORKS))),
        metavar="0,2", help="by their numbers, from 0; by default all",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="in each, every strategy does one step (%(default)s)")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where programs, machine files and all times are written, too"
    )


def main(*, write: bool, models: Sequence[str], networks: Sequence[int], rounds: int, keep: Path | None) -> None:
    """Print the tables, or put them into docs/cluster.md; SystemExit where no cluster can be made here."""
    reason = unsupported()
    if reason:
        raise SystemExit(f"no cluster on this machine: {reason}")
    settings: list[Setting] = []
    machines: list[tuple[Network, Machine]] = []
    for number in networks:
        network = NETWORKS[number]
        with tempfile.TemporaryDirectory(prefix="pase-cluster-") as name, cluster(network) as made:
            folder = Path(name) if keep is None else keep / f"network{number}"
            folder.mkdir(parents=True, exist_ok=True)
            machine = measured(made, folder)
            machines.append((network, machine))
            for setting in _settings(made, machine, folder, models, rounds):
                settings.append(setting)
                print(_told(setting), flush=True)
    if keep is not None:
        (keep / "steps.json").write_text(json.dumps(document(settings), indent=2), encoding="utf-8")
    publish("cluster.md", tables(settings, machines), write=write)


def measured(made: Cluster, folder: Path) -> Machine:
    """Return the machine that the processes of a cluster measure, all at once."""
    path = folder / "cluster.toml"
    made.run([sys.executable, "-m", "pase.calibration.ranks", "-o", str(path)], environment=_environment(), cwd=folder)
    return load_machine(path)


def _environment() -> dict[str, str]:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _settings(made: Cluster, machine: Machine, folder: Path, models: Sequence[str], rounds: int) -> Iterator[Setting]:
    """Yield what each model shows on a cluster."""
    for model in models:
        plans = strategies(load(model, arguments=MODELS[model]), made.network.num_ranks, machine)
        sources = {name: emit(plan, target="torch") for name, plan in plans.items()}
        # Of equal programs one runs.
        files = {source: f"{model}{number}.py" for number, source in enumerate(dict.fromkeys(sources.values()))}
        for source, file in files.items():
            (folder / file).write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "scripts.benchmarks.cluster_rank", "--rounds", str(rounds)]
        command += [str(folder / file) for file in files.values()]
        first, *_ = made.run(command, environment=_environment(), cwd=folder)
        times: dict[str, list[float]] = json.loads(first)
        yield Setting(
            model=model,
            network=made.network,
            timed=tuple(
                Timed(
                    name=name,
                    predicted_s=simulate(plan, collectives=COLLECTIVES, overlaps=False).step_time_s,
                    times_s=tuple(times[files[sources[name]]]),
                )
                for name, plan in plans.items()
            ),
        )


def strategies(graph: Graph, num_devices: int, machine: Machine) -> dict[str, Plan]:
    """Return the plans that are run, by name: the searched one, data parallelism, Megatron's, random ones."""
    baselines = (EXPERTS[DATA_PARALLEL], _MEGATRON)
    found = {
        name: compare(graph, num_devices, machine=machine, cost_model=model, baselines=baselines).contenders
        for name, model in SEARCHED.items()
    }
    plans = {name: next(entry.plan for entry in entries if entry.name == PASE) for name, entries in found.items()}
    plans |= {entry.name: entry.plan for entry in found[OURS] if entry.name != PASE}
    return plans | {f"random {seed}": randomly(plans[OURS], seed) for seed in range(RANDOM)}


def randomly(plan: Plan, seed: int) -> Plan:
    """Return the plan with a random configuration of each layer, placed as plans are."""
    costs = cost_model(plan.cost_model, plan.machine, plan.num_devices, plan.precision)
    splits = [layer.splits for layer in random_strategy(plan, seed).layers]
    sizes = [level.num_devices for level in plan.machine.levels_spanned(plan.num_devices)[:-1]]
    return replace(plan, layers=plan_layers(plan.graph, plan.num_devices, costs, splits, group_sizes=sizes))


def megatron_like(problem: Problem, machine: Machine) -> tuple[int, ...]:
    """Return pairs of products split by columns and by rows over the devices of a node, the batch over the rest.

    Of a transformer as the baseline `megatron` has it, with t the devices of a node; elsewhere of dense layers in their
    order, and what is in no pair is data parallel.
    """
    t = machine.levels[0].num_devices
    dims = transformer_dims(problem.graph)
    if dims is not None:
        (choice,) = meshes(problem, dims, [t])
        return choice
    return choice_of(problem, pairs_of_products(problem.graph, problem.num_devices, t))


def pairs_of_products(graph: Graph, num_devices: int, ways: int) -> list[dict[str, int]]:
    """Return the splits of a chain's layers: of each two dense layers the first by columns, the second by rows."""
    products = [(operator.name, product) for operator in graph.operators if (product := dense_product(operator))]
    splits: dict[str, tuple[str, ...]] = {}
    for (first, columns), (second, rows) in zip(products[::2], products[1::2], strict=False):
        splits |= {first: columns.out, second: rows.reduce}
    found = []
    for operator in graph.operators:
        own = split_in_turn(operator, splits.get(operator.name, ()), ways)
        batch = split_in_turn(operator, ["b"], num_devices // prod(own.values() or [1]))
        found.append({**own, **batch})
    return found


_MEGATRON = Baseline(
    name=MEGATRON,
    choose=megatron_like,
    source="Shoeybi et al. 2019",
    needs="anything",
    description="pairs of products split by columns and rows within a node, the batch over the rest",
)


# -- tables


def tables(settings: Sequence[Setting], machines: Sequence[tuple[Network, Machine]]) -> dict[str, str]:
    """Return the tables of the page."""
    return {
        "machines": _machines(machines),
        "steps": _steps(settings),
        "summary": _summary(settings),
        "figure 6": _figure6(settings),
    }


def _links(network: Network) -> str:
    return f"{network.rank_bits_per_s / MEGABIT:.0f} / {network.node_bits_per_s / MEGABIT:.0f}"


def _machines(machines: Sequence[tuple[Network, Machine]]) -> str:
    headers = [
        *("processes", "asked for: links of a process / of a node, Mbit/s", "measured, Mbit/s"),
        *("α within a node / between nodes", "one of them computes", "its memory"),
    ]
    rows = []
    for network, machine in machines:
        rates = " / ".join(f"{level.bandwidth_bytes_per_s * 8 / MEGABIT:.1f}" for level in machine.levels)
        latencies = " / ".join(f"{level.latency_s * 1e6:.0f} µs" for level in machine.levels)
        memory = machine.device.memory_bandwidth_bytes_per_s or 0.0
        rows.append(
            [
                *(str(network.num_ranks), _links(network), rates, latencies),
                *(f"{machine.peak_flop_per_s() / 1e9:.1f} GFLOP/s", f"{memory / 1e9:.1f} GB/s"),
            ]
        )
    return markdown(headers, rows)


def _steps(settings: Sequence[Setting]) -> str:
    headers = [
        *("network", "p", "links, Mbit/s", "searched", "by `alpha_beta`", "data parallel", "Megatron's", "random"),
        *("searched ÷ best other", "ρ"),
    ]
    rows = []
    for setting in settings:
        others = [timed for timed in setting.timed if timed.name not in (*SEARCHED, DATA_PARALLEL, MEGATRON)]
        rows.append(
            [
                *(setting.model, str(setting.network.num_ranks), _links(setting.network)),
                *(_pair(setting.of(name)) for name in (*SEARCHED, DATA_PARALLEL, MEGATRON)),
                ", ".join(map(_pair, sorted(others, key=lambda timed: timed.measured_s))),
                f"{1 + setting.behind:.2f}",
                f"{setting.correlation:.2f}",
            ]
        )
    return markdown(headers, rows)


def _pair(timed: Timed) -> str:
    return f"{timed.measured_s * 1e3:.0f} ({timed.predicted_s * 1e3:.0f})"


def _summary(settings: Sequence[Setting]) -> str:
    everything = [timed for setting in settings for timed in setting.timed]
    predicted, found = [t.predicted_s for t in everything], [t.measured_s for t in everything]
    ratios = sorted(m / p for m, p in zip(found, predicted, strict=True))
    correlations = [setting.correlation for setting in settings]
    behind = max(setting.behind for setting in settings)
    counts = {limit: sum(setting.behind <= limit for setting in settings) for limit in (0.0, TOLERANCE)}
    by_nodes = [setting.behind_others(BY_NODES) for setting in settings]
    rows = [
        ["settings in which the searched strategy is the fastest", f"{counts[0.0]} of {len(settings)}"],
        [f"the same, or as fast up to {TOLERANCE:.0%}", f"{counts[TOLERANCE]} of {len(settings)}"],
        ["the most that it is behind", f"{behind:+.1%}"],
        ["the one searched by `alpha_beta` is the fastest", f"{sum(b <= 0 for b in by_nodes)} of {len(settings)}"],
        ["the most that that one is behind", f"{max(by_nodes):+.1%}"],
        ["Spearman's ρ of prediction and measurement, all settings together", f"{spearman(predicted, found):.3f}"],
        ["the same within a setting: least, median", f"{min(correlations):.2f}, {median(correlations):.2f}"],
        ["measured ÷ predicted: least, median, largest", f"{ratios[0]:.2f}, {median(ratios):.2f}, {ratios[-1]:.2f}"],
    ]  # fmt: skip
    return markdown(["figure", "value"], rows)


def _figure6(settings: Sequence[Setting]) -> str:
    headers = ["network", "p", "links, Mbit/s", "searched, measured", "searched, predicted", "Megatron's, measured"]
    rows = []
    for setting in settings:
        (ours, predicted), (megatron, _) = setting.speedup(OURS), setting.speedup(MEGATRON)
        rows.append(
            [
                *(setting.model, str(setting.network.num_ranks), _links(setting.network)),
                *(f"{value:.2f}" for value in (ours, predicted, megatron)),
                _paper(setting),
            ]
        )
    return markdown([*headers, "paper, Fig. 6 (1080 Ti)"], rows)


def _paper(setting: Setting) -> str:
    name = PAPER_NAMES.get(setting.model)
    if name is None or setting.network.num_ranks not in figure6.DEVICES:
        return "not in it"
    value = figure6.PAPER[name][figure6.DEVICES.index(setting.network.num_ranks)]
    return f"{value:.3f}" + ("" if name == setting.model else f" ({name.capitalize()})")


def _told(setting: Setting) -> str:
    cells = ", ".join(f"{timed.name} {_pair(timed)}" for timed in setting.timed)
    return (
        f"{setting.model}, {setting.network.num_ranks} processes, {_links(setting.network)} Mbit/s: {cells} ms "
        f"(predicted); ρ {setting.correlation:.2f}, searched {setting.behind:+.1%}"
    )


def document(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Return all times, as `--keep` writes them."""
    return [
        {
            "model": setting.model,
            "processes": setting.network.num_ranks,
            "links_mbit_per_s": _links(setting.network),
            "strategies": {
                timed.name: {"predicted_s": timed.predicted_s, "times_s": timed.times_s} for timed in setting.timed
            },
        }
        for setting in settings
    ]
