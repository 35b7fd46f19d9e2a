"""Megatron's space: nothing that is left out is cheaper, no bound is too high, layers are split as its papers say."""

import random
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest

import pase
from pase.costs import cost_model, traffic_of
from pase.costs.states import ModeSpace
from pase.planning.spans import Setting, batch_of
from pase.planning.steps import TrainingStep
from scripts.benchmarks import megatron
from scripts.benchmarks.megatron import MODES, Degrees, Mode

SIZES = {"layers": 4, "model_width": 64, "heads": 4, "steps": 32, "vocabulary": 96}


def setting_of(limit_bytes: float = inf) -> Setting:
    return Setting(
        graph=pase.load("gpt", batch=4, arguments=SIZES),
        num_devices=2,
        machine=pase.load_machine("v100"),
        cost_model="step",
        space=ModeSpace(),
        optimiser="adamw",
        limit_bytes=limit_bytes,
    )


@cache
def every_step() -> dict[Degrees, tuple[TrainingStep, dict[Mode, tuple[float, float]]]]:
    """All steps: of each mode what it takes, and what a device needs."""
    setting, found = setting_of(), {}
    for degrees in megatron._all_degrees(setting):
        step = megatron._step(setting, degrees)
        costs = {mode: cost for cost, mode in megatron._costs(setting, degrees, step)}
        in_modes = {mode: megatron._in_mode(setting, step, mode) for mode in costs}
        found[degrees] = step, {mode: (cost, in_modes[mode].peak.bytes) for mode, cost in costs.items()}
    return found


@pytest.mark.parametrize("limit_bytes", [pytest.param(inf, marks=pytest.mark.full), 2_200_000.0])
def test_nothing_that_is_left_out_is_cheaper(limit_bytes: float) -> None:
    found = list(megatron.steps(setting_of(limit_bytes)))
    every = [each for _, modes in every_step().values() for each in modes.values()]
    fitting = [cost for cost, memory in every if memory <= limit_bytes]
    assert (len(fitting) < len(every)) == (limit_bytes < inf)
    assert 0 < len(found) < len(fitting)
    assert min(found).cost == pytest.approx(min(fitting), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_mode_is_that_of_its_layers(seed: int) -> None:
    """A step whose layers have it one by one costs as much, and needs as much."""
    numbers = random.Random(seed)
    degrees, (step, modes) = numbers.choice(list(every_step().items()))
    mode = numbers.choice(MODES)
    fixed = batch_of(step.graph, 1, has_cuts=True).fixed
    again = {
        "": set[str](),
        "attention": {f"layer{number}_self_attention" for number in range(1, 5)},
        "all": set(step.graph.index) - fixed,
    }
    layers = (
        replace(layer, state=mode.state, is_recomputed=operator.name in again[mode.again])
        for layer, operator in zip(step.layers, step.graph.operators, strict=True)
    )
    own = replace(step, layers=tuple(layers))
    assert modes[mode] == pytest.approx((own.cost, own.peak.bytes), rel=1e-6), degrees


def test_no_bound_is_too_high() -> None:
    setting = setting_of()
    assert {(own.by_sequence, own.stages, own.chunks) for own in every_step()} >= {(True, 1, 1), (False, 2, 2)}
    for degrees, (step, modes) in every_step().items():
        low = {mode: cost for cost, mode in megatron._least(setting, degrees, step)}
        assert all(low[mode] <= cost * (1 + 1e-12) for mode, (cost, _) in modes.items())
        for mode, (_, peak_bytes) in modes.items():
            # What fits is not left out for what it has in memory at least.
            within = replace(setting, limit_bytes=float(peak_bytes))
            assert mode in {own for _, own in megatron._least(within, degrees, step)}
        assert megatron._even_s(setting, degrees) <= min(low.values()) * (1 + 1e-12)


def test_layers_are_split_as_the_papers_say() -> None:
    """Shoeybi et al. 2019, figure 3; Korthikanti et al. 2022, figure 5."""
    setting = setting_of()
    for by_sequence, between in ((False, {}), (True, {"s": 2})):
        degrees = Degrees(2, by_sequence, 1, 1, 1, 2)
        step = megatron._step(setting, degrees)
        splits = {
            operator.name: {dim: parts for dim, parts in layer.splits.items() if parts > 1 and dim != "b"}
            for operator, layer in zip(step.graph.operators, step.layers, strict=True)
        }
        for part in ("q", "k", "v", "attention", "o"):
            assert splits[f"layer2_self_{part}"] == {"h": 2}
        assert splits["layer2_ff_1"] == splits["layer2_ff_2"] == {"e": 2}
        assert splits["tokens"] == splits["fc"] == splits["softmax"] == {"v": 2}
        # The gradients of q, k and v are parts of one sum.
        assert splits["layer2_self_norm_fan_out"] == {"g": 2}
        for name in ("self_norm", "self_add", "self_add_fan_out", "ff_norm", "ff_add", "ff_add_fan_out"):
            assert splits[f"layer2_{name}"] == between


@pytest.mark.parametrize("by_sequence", [False, True])
def test_a_block_sends_four_all_reduces(by_sequence: bool) -> None:
    """With the sequence split between layers or not, a block sends as much (Korthikanti et al. 2022, section 4.2.2)."""
    setting = setting_of()
    machine = setting.machine
    free = replace(machine, levels=tuple(replace(level, latency_s=0.0) for level in machine.levels))
    step = megatron._step(replace(setting, machine=free), Degrees(2, by_sequence, 1, 1, 1, 1))
    model = cost_model("step", free, 2, step.graph.precision)
    ((problem, choice),) = step.problems
    sent = 0.0
    for operator, modes, c in zip(step.graph.operators, problem.tables.layers, choice, strict=True):
        if operator.name.startswith("layer2_"):
            row = np.array([[*step.layers[step.graph.index[operator.name]].splits.values()]], dtype=np.int32)
            does = traffic_of(step.graph, operator, row)
            sent += modes.figures.repeated[c] - float((model.work(does.forward) + model.work(does.backward))[0])
    for (u, v), edge in zip(problem.tables.ends, problem.tables.edges, strict=True):
        if step.graph.operators[v].name.startswith("layer2_") and not edge.is_weight:
            sent += edge.cost.cost(choice[u], choice[v])
    activations_bytes, all_reduce = 4 * 32 * 64 * 4, 2 * (2 - 1) / 2
    assert sent == pytest.approx(4 * all_reduce * activations_bytes / free.levels[0].bandwidth_bytes_per_s, rel=1e-6)
