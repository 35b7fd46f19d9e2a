"""Speedups over data parallelism in simulated training steps, beside the PaSE paper's Fig. 6."""

from collections.abc import Mapping
from dataclasses import dataclass

from pase import load, load_machine
from pase.analysis.baselines.compare import Comparison, compare
from pase.analysis.baselines.registry import chosen
from pase.analysis.simulation.simulation import simulate
from pase.machine import Machine, override_machine
from pase.machine.machine import BY_LEVEL
from scripts.benchmarks.tables import markdown, publish

DEVICES = (4, 8, 16, 32, 64)

MACHINE, LARGEST_MACHINE = "1080ti", "2080ti"

EXPERTS = {"alexnet": "owt", "inception_v3": "owt", "rnnlm": "rnn", "transformer": "mesh_tensorflow"}
"""The paper's experts for each network (section IV), by their names among our baselines."""

# Fig. 6a of the paper, 1080 Ti: speedups over data parallelism by number of devices.
PAPER: Mapping[str, tuple[float, ...]] = {
    "alexnet": (1.652, 1.749, 1.852, 1.443, 1.413),
    "inception_v3": (1.033, 1.078, 1.066, 1.092, 1.121),
    "rnnlm": (1.848, 1.760, 1.451, 1.413, 1.358),
    "transformer": (1.027, 1.020, 1.546, 1.505, 1.433),
}

# Fig. 6b, 2080 Ti: the largest of each network that the text gives.
PAPER_LARGEST: Mapping[str, float] = {"alexnet": 4.004, "rnnlm": 2.410, "transformer": 2.703}


SOME_DEVICES = (8, 32)
"""For which assumptions are changed, one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """Something that a simulation takes for granted, changed.

    peak: share of the devices' peak that they reach. cost_model: by which the strategy is found.
    """

    text: str
    peak: float = 1.0
    collectives: str = BY_LEVEL
    overlaps: bool = True
    cost_model: str = "paper"


ASSUMPTIONS = (
    Assumption(text="as above"),
    Assumption(text="without overlap", overlaps=False),
    Assumption(text="sums as emitted programs do them", collectives="program"),
    Assumption(text="the same, our strategy by `program`", collectives="program", cost_model="program"),
    Assumption(text="devices at a quarter of their peak", peak=0.25),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedups:
    """Of one network on some devices of a machine, over data parallelism.

    step_s: data parallelism's own simulated step. by_paper, by_alpha_beta: of the strategies that are cheapest under
    each cost model. expert: of the experts'. costs_paper, costs_alpha_beta: what each cost model says of its own.
    """

    num_devices: int
    step_s: float
    by_paper: float
    by_alpha_beta: float
    expert: float
    costs_paper: float
    costs_alpha_beta: float


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/paper.md."""
    found = {
        name: {machine: _network(name, load_machine(machine)) for machine in (MACHINE, LARGEST_MACHINE)}
        for name in PAPER
    }
    rows = [
        _row(name, speedups, paper)
        for name, machines in found.items()
        for speedups, paper in zip(machines[MACHINE], PAPER[name], strict=True)
    ]
    headers = [
        *("network", "p", "paper, Fig. 6", "ours, `paper`", "ours, `alpha_beta`", "experts", "data parallel step"),
        *("cost ratio, `paper`", "cost ratio, `alpha_beta`"),
    ]
    largest = [_largest_row(name, machines[LARGEST_MACHINE]) for name, machines in found.items()]
    largest_headers = ["network", "paper, largest", "ours, `paper`", "ours, `alpha_beta`", "experts"]
    changed_headers = ["network", "p", "paper, Fig. 6", *(assumption.text for assumption in ASSUMPTIONS)]
    publish(
        "paper.md",
        {
            "figure 6": markdown(headers, rows),
            "figure 6, 2080 Ti": markdown(largest_headers, largest),
            "figure 6, assumptions": markdown(changed_headers, [_changed_row(*case) for case in _changed_cases()]),
        },
        write=write,
    )


def _network(name: str, machine: Machine) -> list[Speedups]:
    return [_speedups(name, devices, machine) for devices in DEVICES]


def _speedups(name: str, devices: int, machine: Machine) -> Speedups:
    graph, baselines = load(name), chosen(["data_parallel", EXPERTS[name]])
    paper, alpha_beta = (
        compare(graph, devices, machine=machine, cost_model=model, baselines=baselines)
        for model in ("paper", "alpha_beta")
    )
    step_s = _step_s(alpha_beta, "data_parallel")
    return Speedups(
        num_devices=devices,
        step_s=step_s,
        by_paper=step_s / _step_s(paper, "pase"),
        by_alpha_beta=step_s / _step_s(alpha_beta, "pase"),
        # Where experts leave a size open, they choose it for this machine.
        expert=step_s / _step_s(alpha_beta, EXPERTS[name]),
        costs_paper=1 / paper.contenders[0].ratio_to_data_parallel,
        costs_alpha_beta=1 / alpha_beta.contenders[0].ratio_to_data_parallel,
    )


def _step_s(found: Comparison, name: str) -> float:
    plans = {contender.name: contender.plan for contender in found.contenders}
    if name not in plans:
        raise SystemExit(f"{name!r} does not apply to {found.contenders[0].plan.graph.name}")
    return simulate(plans[name]).step_time_s


def _row(name: str, found: Speedups, paper: float) -> list[str]:
    return [
        name,
        str(found.num_devices),
        f"{paper:.3f}",
        *(f"{value:.3f}" for value in (found.by_paper, found.by_alpha_beta, found.expert)),
        f"{found.step_s * 1e3:.1f} ms",
        *(f"{value:.3f}" for value in (found.costs_paper, found.costs_alpha_beta)),
    ]


def _largest_row(name: str, found: list[Speedups]) -> list[str]:
    cells = []
    for values in (
        [(speedups.by_paper, speedups.num_devices) for speedups in found],
        [(speedups.by_alpha_beta, speedups.num_devices) for speedups in found],
        [(speedups.expert, speedups.num_devices) for speedups in found],
    ):
        value, devices = max(values)
        cells.append(f"{value:.3f} (p = {devices})")
    return [name, f"{PAPER_LARGEST[name]:.3f}" if name in PAPER_LARGEST else "not given", *cells]


def _changed_cases() -> list[tuple[str, int]]:
    return [(name, devices) for name in PAPER for devices in SOME_DEVICES]


def _changed_row(name: str, devices: int) -> list[str]:
    """Return the speedup of our strategy under each assumption, searched for it anew."""
    return [
        name,
        str(devices),
        f"{PAPER[name][DEVICES.index(devices)]:.3f}",
        *(f"{_changed(name, devices, assumption):.3f}" for assumption in ASSUMPTIONS),
    ]


def _changed(name: str, devices: int, assumption: Assumption) -> float:
    machine = load_machine(MACHINE)
    slowed = override_machine(
        machine, flop_per_s=assumption.peak * machine.peak_flop_per_s(), bandwidth_bytes_per_s=None
    )
    found = compare(
        load(name), devices, machine=slowed, cost_model=assumption.cost_model, baselines=chosen(["data_parallel"])
    )
    ours, data_parallel = (
        simulate(contender.plan, collectives=assumption.collectives, overlaps=assumption.overlaps).step_time_s
        for contender in found.contenders
    )
    return data_parallel / ours
