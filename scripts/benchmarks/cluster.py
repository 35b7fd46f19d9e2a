"""Training steps on a cluster of one machine, whose links decide: measured beside T of the cost model `step`.

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
from pase.costs import Problem, cost_model
from pase.graph import Scalar
from pase.machine import Machine
from pase.planning.steps import plan_layers, total_cost
from scripts.benchmarks import figure6
from scripts.benchmarks.cluster_network import Cluster, Network, cluster, unsupported
from scripts.benchmarks.simulation import spearman
from scripts.benchmarks.tables import ROOT, markdown, publish
from scripts.benchmarks.trials import random_strategy

SEARCHED = {"searched": "step", "searched, alpha_beta": "alpha_beta"}
"""Strategies that are searched, and by which cost model: as all are predicted, and as sums would go by nodes."""

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

BAR = 0.1
"""How far a prediction may be off."""

PAPER_NAMES = {"alexnet": "alexnet", "gpt": "transformer"}
"""Which network of the paper's Fig. 6 ours stands beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A strategy in one setting.

    predicted_s: T, each layer's axes laid over the levels as suits it best. placed_s: the same where the plan has them.
    times_s: of its steps until gradients are summed, and as a whole, each
    as long as on the slowest rank.
    """

    name: str
    predicted_s: float
    placed_s: float
    times_s: tuple[tuple[float, float], ...]

    @property
    def measured_s(self) -> float:
        """Of the middle step, until gradients are summed."""
        return median(time_s for time_s, _ in self.times_s)


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
    def correlations(self) -> tuple[float, float]:
        """Spearman's ρ of T and measurement, and of the placed T."""
        measured_s = [timed.measured_s for timed in self.timed]
        predictions = ([timed.predicted_s for timed in self.timed], [timed.placed_s for timed in self.timed])
        ours, placed = (spearman(predicted_s, measured_s) for predicted_s in predictions)
        return ours, placed

    def speedup(self, name: str) -> tuple[float, float]:
        """Return how much faster a strategy is than data parallelism: measured, and by T of the placed plans."""
        base, other = self.of(DATA_PARALLEL), self.of(name)
        return base.measured_s / other.measured_s, base.placed_s / other.placed_s


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


_KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(64 * 2**20)}
"""Has glibc keep memory that was freed: to get it back from the kernel can take longer than to compute with it."""


def _environment() -> dict[str, str]:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **_KEEPING}


def _settings(made: Cluster, machine: Machine, folder: Path, models: Sequence[str], rounds: int) -> Iterator[Setting]:
    """Yield what each model shows on a cluster."""
    for model in models:
        plans = strategies(load(model, arguments=MODELS[model]), made.network.num_ranks, machine)
        times = run(made, plans, folder, model, rounds)
        yield Setting(
            model=model,
            network=made.network,
            timed=tuple(
                Timed(
                    name=name,
                    predicted_s=total_cost(plan.layers),
                    placed_s=plan.placed_cost,
                    times_s=times[name],
                )
                for name, plan in plans.items()
            ),
        )


Times = tuple[tuple[float, float], ...]
"""Of each round: how long a step takes until gradients are summed, and as a whole."""


def run(made: Cluster, plans: Mapping[str, Plan], folder: Path, name: str, rounds: int) -> dict[str, Times]:
    """Run the programs of plans on a cluster, in turns; name: what their files are called."""
    sources = {plan: emit(plans[plan], target="torch") for plan in plans}
    # Of equal programs one runs.
    files = {source: f"{name}{number}.py" for number, source in enumerate(dict.fromkeys(sources.values()))}
    for source, file in files.items():
        (folder / file).write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "scripts.benchmarks.cluster_rank", "--rounds", str(rounds)]
    command += [str(folder / file) for file in files.values()]
    first, *_ = made.run(command, environment=_environment(), cwd=folder)
    times = json.loads(first)
    return {plan: tuple((summed_s, whole_s) for summed_s, whole_s in times[files[sources[plan]]]) for plan in plans}


def strategies(graph: Graph, num_devices: int, machine: Machine) -> dict[str, Plan]:
    """Return the plans that are run, by name: the searched one, data parallelism, Megatron's, random ones."""
    baselines = (EXPERTS[DATA_PARALLEL], _MEGATRON)
    found = {
        name: compare(graph, num_devices, machine=machine, cost_model=model, baselines=baselines).contenders
        for name, model in SEARCHED.items()
    }
    plans = {name: next(entry.plan for entry in entries if entry.name == PASE) for name, entries in found.items()}
    plans[BY_NODES] = costed(plans[BY_NODES], plans[OURS].cost_model)
    plans |= {entry.name: entry.plan for entry in found[OURS] if entry.name != PASE}
    return plans | {f"random {seed}": randomly(plans[OURS], seed) for seed in range(RANDOM)}


def costed(plan: Plan, model: str) -> Plan:
    """Return the plan with the costs of another cost model."""
    costs = cost_model(model, plan.machine, plan.num_devices, plan.precision)
    splits, devices = [layer.splits for layer in plan.layers], [layer.devices for layer in plan.layers]
    layers = plan_layers(plan.graph, plan.num_devices, costs, splits, devices)
    return replace(plan, cost_model=model, layers=layers)


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


def links(network: Network) -> str:
    """Return the rates of a process' and of a node's link, in Mbit/s."""
    return f"{network.rank_bits_per_s / MEGABIT:.0f} / {network.node_bits_per_s / MEGABIT:.0f}"


def _machines(machines: Sequence[tuple[Network, Machine]]) -> str:
    headers = [
        *("processes", "asked for: links of a process / of a node, Mbit/s", "measured, Mbit/s"),
        *("α within a node / between nodes", "one of them computes", "its memory", "error of kernels", "a launch", "ω"),
    ]
    rows = []
    for network, machine in machines:
        rates = " / ".join(f"{level.bandwidth_bytes_per_s * 8 / MEGABIT:.1f}" for level in machine.levels)
        latencies = " / ".join(f"{level.latency_s * 1e6:.0f} µs" for level in machine.levels)
        memory = machine.device.memory_bandwidth_bytes_per_s or 0.0
        kernels, overlap = machine.kernels, machine.overlap
        rows.append(
            [
                *(str(network.num_ranks), links(network), rates, latencies),
                *(f"{machine.peak_flop_per_s() / 1e9:.1f} GFLOP/s", f"{memory / 1e9:.1f} GB/s"),
                *((f"{kernels.error or 0:.0%}", f"{kernels.launch_s * 1e6:.0f} µs") if kernels else ("", "")),
                f"{overlap.share:.2f}" if overlap else "",
            ]
        )
    return markdown(headers, rows)


def _steps(settings: Sequence[Setting]) -> str:
    headers = [
        *("network", "p", "links, Mbit/s", "searched", "by `alpha_beta`", "data parallel", "Megatron's", "random"),
        *("searched ÷ best other", "ρ of T", "ρ of the placed T"),
    ]
    rows = []
    for setting in settings:
        others = [timed for timed in setting.timed if timed.name not in (*SEARCHED, DATA_PARALLEL, MEGATRON)]
        rows.append(
            [
                *(setting.model, str(setting.network.num_ranks), links(setting.network)),
                *(_pair(setting.of(name)) for name in (*SEARCHED, DATA_PARALLEL, MEGATRON)),
                ", ".join(map(_pair, sorted(others, key=lambda timed: timed.measured_s))),
                f"{1 + setting.behind:.2f}",
                *(f"{value:.2f}" for value in setting.correlations),
            ]
        )
    return markdown(headers, rows)


def _pair(timed: Timed) -> str:
    return f"{timed.measured_s * 1e3:.0f} ({timed.predicted_s * 1e3:.0f}, {timed.placed_s * 1e3:.0f})"


def _summary(settings: Sequence[Setting]) -> str:
    everything = [timed for setting in settings for timed in setting.timed]
    found, predicted, placed = zip(*((t.measured_s, t.predicted_s, t.placed_s) for t in everything), strict=True)
    after = [median(whole_s - time_s for time_s, whole_s in t.times_s) for t in everything]
    behind = max(setting.behind for setting in settings)
    counts = {limit: sum(setting.behind <= limit for setting in settings) for limit in (0.0, TOLERANCE)}
    by_nodes = [setting.behind_others(BY_NODES) for setting in settings]
    rows = [
        ["settings in which the searched strategy is the fastest", f"{counts[0.0]} of {len(settings)}"],
        [f"the same, or as fast up to {TOLERANCE:.0%}", f"{counts[TOLERANCE]} of {len(settings)}"],
        ["the most that it is behind", f"{behind:+.1%}"],
        ["the one searched by `alpha_beta` is the fastest", f"{sum(b <= 0 for b in by_nodes)} of {len(settings)}"],
        ["the most that that one is behind", f"{max(by_nodes):+.1%}"],
        *_judged("T", predicted, found, [setting.correlations[0] for setting in settings]),
        *_judged("the placed T", placed, found, [setting.correlations[1] for setting in settings]),
        ["what comes after the sums: median, largest", f"{median(after) * 1e3:.0f} ms, {max(after) * 1e3:.0f} ms"],
    ]  # fmt: skip
    return markdown(["figure", "value"], rows)


def _judged(
    what: str, predicted: Sequence[float], found: Sequence[float], within: Sequence[float]
) -> Iterator[list[str]]:
    """Yield rows of how far predictions agree with what was measured; within: ρ of each setting."""
    errors = [p / m - 1 for p, m in zip(predicted, found, strict=True)]
    within_text = f"{sum(abs(error) <= BAR for error in errors)} of {len(errors)}"
    yield [f"{what} within {BAR:.0%} of the measured step", within_text]
    yield [
        "its error: least, median of the sizes, largest",
        f"{min(errors):+.1%}, {median(map(abs, errors)):.1%}, {max(errors):+.1%}",
    ]
    yield ["Spearman's ρ of it and the measured step, all settings together", f"{spearman(predicted, found):.3f}"]
    yield ["the same within a setting: least, median", f"{min(within):.2f}, {median(within):.2f}"]


def _figure6(settings: Sequence[Setting]) -> str:
    headers = ["network", "p", "links, Mbit/s", "searched, measured", "searched, predicted", "Megatron's, measured"]
    rows = []
    for setting in settings:
        (ours, predicted), (megatron, _) = setting.speedup(OURS), setting.speedup(MEGATRON)
        rows.append(
            [
                *(setting.model, str(setting.network.num_ranks), links(setting.network)),
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
        f"{setting.model}, {setting.network.num_ranks} processes, {links(setting.network)} Mbit/s: {cells} ms "
        f"(T, placed); ρ {setting.correlations[0]:.2f}, searched {setting.behind:+.1%}"
    )


def document(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Return all times, as `--keep` writes them."""
    return [
        {
            "model": setting.model,
            "processes": setting.network.num_ranks,
            "links_mbit_per_s": links(setting.network),
            "strategies": {
                timed.name: {"predicted_s": timed.predicted_s, "placed_s": timed.placed_s, "times_s": timed.times_s}
                for timed in setting.timed
            },
        }
        for setting in settings
    ]
