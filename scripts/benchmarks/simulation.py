"""Random strategies in simulated steps and in measured ones: whether both put them in the same order."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from pase import Plan, emit, load, load_machine, search
from pase.analysis.simulation.simulation import simulate
from pase.calibration.measured import calibrate, measured_machine
from pase.costs import cost_model
from pase.graph import Scalar
from pase.machine import Machine
from pase.planning.steps import plan_layers, total_cost
from pase.targets.training.options import CPU, DEFAULT_GPU_MEMORY_MIB, DeviceChoice
from scripts.benchmarks.tables import markdown, publish
from scripts.benchmarks.trials import random_strategy

NUM_DEVICES = 4

NETWORKS: dict[str, dict[str, Scalar]] = {
    "mlp": {"batch": 1024, "inputs": 1536, "hidden": 1536, "classes": 512, "layers": 4},
    "alexnet": {"batch": 64, "image": 123, "width": 2, "classes": 64},
    "transformer": {
        "batch": 32, "vocabulary": 2048, "steps": 64, "model_width": 256, "heads": 8, "hidden": 1024, "layers": 1
    },
}  # fmt: skip
"""Arguments of the builders: large enough that a step is more than the calls that it consists of."""

_STEPS = 2
"""Of each program in a round; those of the first round are not counted."""

_LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One strategy. measured_s: of a step. processor_s: of all cores together. paper, alpha_beta: what the costs are.

    simulated_s: with sums as the program does them; hierarchical_s: with the best algorithm.
    """

    measured_s: float
    processor_s: float
    simulated_s: float
    hierarchical_s: float
    paper: float
    alpha_beta: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen."""
    parser.add_argument("--machine", metavar="FILE", help="the machine that runs them; by default it is measured first")
    parser.add_argument("--number", type=int, default=20, help="random strategies of each network (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="in each, every strategy does two steps (%(default)s)")


def main(*, write: bool, machine: str | None, number: int, rounds: int) -> None:
    """Print the table, or put it into docs/simulation.md."""
    found = _measured() if machine is None else load_machine(machine)
    timed = {network: _timed(network, found, number, rounds) for network in NETWORKS}
    rows = [_row(network, times) for network, times in timed.items()]
    headers = [
        *("network", "built with", "strategies", "measured", "simulated", "measured ÷ simulated"),
        *("ρ", "ρ, processor time", "ρ, `hierarchical`", "ρ, cost by `alpha_beta`", "ρ, cost by `paper`"),
    ]
    publish(
        "simulation.md",
        {"machine": _machine_table(found), "ranks": markdown(headers, rows)},
        write=write,
    )


def spearman(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return Spearman's rank correlation: Pearson's of the ranks, equal values at the mean of theirs."""
    return float(np.corrcoef(_ranks(ours), _ranks(others))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _measured() -> Machine:
    device = DeviceChoice(kind=CPU, virtual=False, memory_mib=DEFAULT_GPU_MEMORY_MIB)
    samples = calibrate(NUM_DEVICES, device)
    return measured_machine(samples, date=datetime.now(UTC).date().isoformat(), name="measured").machine


def _machine_table(machine: Machine) -> str:
    device, (level, *_) = machine.device, machine.levels
    memory = device.memory_bandwidth_bytes_per_s
    return markdown(
        ["one of the devices computes", "its memory", "α", "a link"],
        [
            [
                f"{machine.peak_flop_per_s() / 1e9:.1f} GFLOP/s",
                "not modelled" if memory is None else f"{memory / 1e9:.1f} GB/s",
                f"{level.latency_s * 1e6:.1f} µs",
                f"{level.bandwidth_bytes_per_s / 1e9:.2f} GB/s",
            ]
        ],
    )


def _timed(network: str, machine: Machine, number: int, rounds: int) -> list[Timed]:
    searched = search(load(network, arguments=NETWORKS[network]), NUM_DEVICES, machine=machine)
    plans = [random_strategy(searched, seed) for seed in range(number)]
    found = []
    for seed, (plan, (measured_s, processor_s)) in enumerate(zip(plans, _step_times(plans, rounds), strict=True)):
        timed = Timed(
            measured_s=measured_s,
            processor_s=processor_s,
            simulated_s=simulate(plan, collectives="program").step_time_s,
            hierarchical_s=simulate(plan).step_time_s,
            paper=_cost(plan, "paper"),
            alpha_beta=_cost(plan, "alpha_beta"),
        )
        found.append(timed)
        print(
            f"{network} {seed}: {measured_s * 1e3:.1f} ms measured, {timed.simulated_s * 1e3:.1f} ms simulated",
            flush=True,
        )
    return found


def _cost(plan: Plan, model: str) -> float:
    costs = cost_model(model, plan.machine, plan.num_devices, plan.precision)
    splits, devices = zip(*((layer.splits, layer.devices) for layer in plan.layers), strict=True)
    return total_cost(plan_layers(plan.graph, plan.num_devices, costs, splits, devices))


def _step_times(plans: Sequence[Plan], rounds: int) -> list[tuple[float, float]]:
    """Return how long a step of each plan's program takes: its fastest, and the processor time of the middle one.

    Programs take turns, so that all meet the same machine; as in a calibration, what else used it meanwhile is kept out
    by the fastest step, or does not count as this process's time.
    """
    wall_s: list[list[float]] = [[] for _ in plans]
    processor_s: list[list[float]] = [[] for _ in plans]
    with ExitStack() as stack:
        trainings = [stack.enter_context(_training(plan)) for plan in plans]
        for number in range(rounds + 1):
            for i, (training, batch) in enumerate(trainings):
                for _ in range(_STEPS):
                    start_s, begin_s = perf_counter(), process_time()
                    training.step(batch)
                    if number:
                        wall_s[i].append(perf_counter() - start_s)
                        processor_s[i].append(process_time() - begin_s)
    return [(min(wall), median(processor)) for wall, processor in zip(wall_s, processor_s, strict=True)]


@contextmanager
def _training(plan: Plan) -> Iterator[tuple[Any, Any]]:
    """Give the training of a plan's program on virtual devices, and a batch."""
    from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
    from pase.targets.mesh_tensorflow.runtime.program import Program
    from pase.targets.mesh_tensorflow.runtime.training import Training
    from pase.targets.training.data import Batches

    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(emit(plan), "<emitted>", "exec"), namespace)
    with ProgramGraph().as_default():
        program = Program(num_devices=plan.num_devices)
        loss = namespace["build"](program)
        batch = Batches(program.inputs, seed=0).batch(0)
        training = Training.start(program, loss, learning_rate=_LEARNING_RATE, seed=0)
    try:
        yield training, batch
    finally:
        training.close()


def _row(network: str, times: Sequence[Timed]) -> list[str]:
    ratios = sorted(timed.measured_s / timed.simulated_s for timed in times)
    pairs = [
        ("simulated_s", "measured_s"),
        ("simulated_s", "processor_s"),
        *((name, "measured_s") for name in ("hierarchical_s", "alpha_beta", "paper")),
    ]
    columns = {name: [getattr(timed, name) for timed in times] for pair in pairs for name in pair}
    return [
        network,
        ", ".join(f"{name} {value}" for name, value in NETWORKS[network].items()),
        str(len(times)),
        _range_ms(columns["measured_s"]),
        _range_ms(columns["simulated_s"]),
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}",
        *(f"{spearman(columns[ours], columns[others]):.2f}" for ours, others in pairs),
    ]


def _range_ms(times_s: Sequence[float]) -> str:
    return f"{min(times_s) * 1e3:.0f} to {max(times_s) * 1e3:.0f} ms"
