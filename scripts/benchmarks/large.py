"""Large training: what a search over stages, micro-batches and modes takes, beside every step that Megatron allows.

Megatron's space is gone through whole, on the same costs: t devices that split heads, hidden units and vocabularies,
p stages whose computation is as even as cuts allow, d replicas, m micro-batches, all layers recomputed or none, weights
in one of ZeRO's states; one choice for all layers.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

import pase
from pase.analysis.baselines.rules import largest_splits, transformer_dims
from pase.costs.modes import STATES, ModeSpace
from pase.costs.schedules import ONE_FORWARD_ONE_BACKWARD, step_s
from pase.errors import ConfigurationError
from pase.graph import Graph
from pase.graph.micro_batch import micro_batch
from pase.graph.precision import uniform
from pase.graph.stages import cuts, with_cuts
from pase.machine import load_machine
from pase.models import build
from pase.planning.pipelines import work_s, works_s
from pase.planning.spans import Setting
from pase.planning.steps import LayerChoice, Step, choice_in
from pase.sharding.configurations import divisors
from scripts.benchmarks.published_steps import LLAMAS, llama
from scripts.benchmarks.tables import ROOT, markdown, publish

SETTINGS: Mapping[str, Any] = {
    "cost_model": "step",
    "precision": "bf16-mixed",
    "optimiser": "adamw",
    "micro_batches": "auto",
    "stages": "auto",
    "modes": ("zero1", "zero2", "zero3", "recompute"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained. model: makes it, for a batch; devices of a preset; Megatron's space is one of transformers."""

    model: Callable[[int], Any]
    batch: int
    devices: int
    machine: str
    settings: Mapping[str, Any]


def _gpt(**arguments: int) -> Callable[[int], Any]:
    return lambda batch: build("gpt", batch=batch, arguments=arguments)


def _hugging_face(kind: str, config: str, steps: int, **sizes: Any) -> Callable[[int], Any]:
    def make(batch: int) -> Any:
        import torch
        import transformers

        with torch.device("meta"):
            model = getattr(transformers, kind)(getattr(transformers, config)(use_cache=False, **sizes))
            tokens = torch.zeros(batch, steps, dtype=torch.long)
        return model, {"input_ids": tokens, "labels": tokens}

    return make


GPT_3 = {"layers": 96, "model_width": 12288, "heads": 96, "steps": 2048, "vocabulary": 51200}


def _llama_70b(batch: int) -> Graph:
    """Llama 3 70B, built: PyTorch takes most of a minute to export it."""
    sizes = LLAMAS["Llama 3.1 70B"]
    return llama(sizes, uniform("float32"), batch, 8192, blocks=[f"block{n}" for n in range(sizes.layers)])


MIXTRAL = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

CASES: Mapping[str, Case] = {
    "GPT-2": Case(model=_gpt(), batch=64, devices=8, machine="a100", settings={**SETTINGS, "cost_model": "alpha_beta"}),
    "Mixtral 8x7B": Case(
        model=_hugging_face("MixtralForCausalLM", "MixtralConfig", 4096, **MIXTRAL),
        batch=256,
        devices=64,
        machine="h100",
        settings=SETTINGS,
    ),
    "Llama-3 70B": Case(
        model=_llama_70b,
        batch=512,
        devices=512,
        machine="h100",
        settings=SETTINGS,
    ),
    "GPT-3 175B, 64": Case(model=_gpt(**GPT_3), batch=64, devices=64, machine="a100", settings=SETTINGS),
    "GPT-3 175B": Case(model=_gpt(**GPT_3), batch=1536, devices=1024, machine="a100", settings=SETTINGS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen."""
    parser.add_argument("--models", default=",".join(CASES), metavar="A;B", help="some of them, with ; between")
    parser.add_argument("--jobs", type=int, default=2, help="processes of a search")


def main(*, write: bool, models: str, jobs: int) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    names = [name for name in CASES if models == ",".join(CASES) or name in models.split(";")]
    rows = []
    for name in names:
        ours, theirs = _apart("searched", name, str(jobs)), _apart("exhausted", name)
        rows.append(
            [
                name,
                f"{CASES[name].devices} {CASES[name].machine}",
                f"{ours['time_s']:.1f}",
                f"{ours['cost']:.4g} s: p {ours['stages']}, m {ours['micro_batches']}",
                f"{100 * (1 - ours['bound'] / ours['cost']):.2f}%",
                f"{theirs['cost']:.4g} s: {theirs['what']}" if theirs else "–",
                f"{theirs['cost'] / ours['cost']:.3f}" if theirs else "–",
                f"{theirs['time_s']:.0f}, {theirs['num']:,}" if theirs else "–",
            ]
        )
        print(rows[-1], flush=True)
    headers = ["model", "devices", "search, s", "ours", "gap", "Megatron's best", "÷ ours", "its time, s, and steps"]
    publish("benchmarks.md", {"large": markdown(headers, rows)}, write=write)


def _apart(what: str, *arguments: str) -> dict[str, Any]:
    """Return what a function of this file does in a process of its own, and how long that took with all imports."""
    code = f"from scripts.benchmarks import large; large.{what}(*{arguments!r})"
    start_s = perf_counter()
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**found, "time_s": perf_counter() - start_s} if found else found


def searched(name: str, jobs: str) -> None:
    """Print what a search finds."""
    case = CASES[name]
    plan = pase.search(
        case.model(case.batch),
        devices=case.devices,
        machine=case.machine,
        jobs=int(jobs),
        **case.settings,
    )
    told = {"cost": plan.total_cost, "bound": plan.lower_bound}
    print(json.dumps({**told, "stages": plan.num_groups, "micro_batches": plan.micro_batches}))


def exhausted(name: str) -> None:
    """Print the best step of Megatron's space; nothing for a network that it has no rule for, or that is imported.

    The layers of imported networks are named by what they compute, which the rule knows; their micro-batches are those
    of the graph.
    """
    case = CASES[name]
    graph = pase.load(case.model(case.batch)).in_precision(case.settings["precision"])
    best: dict[str, Any] = {}
    num = 0
    if transformer_dims(graph) is not None:
        for step in megatron(graph, case):
            num += 1
            if not best or step["cost"] < best["cost"]:
                best = step
    print(json.dumps({**best, "num": num} if best else {}))


def megatron(graph: Graph, case: Case) -> Iterator[dict[str, Any]]:
    """Yield the steps that fit, with what they cost; those that cannot be better than one before are left out."""
    machine = load_machine(case.machine)
    limit = 0.9 * (machine.device.memory_bytes or inf)
    setting = Setting(
        graph=graph,
        num_devices=case.devices,
        machine=machine,
        cost_model=case.settings["cost_model"],
        space=ModeSpace(),
        optimiser=case.settings["optimiser"],
        limit_bytes=limit,
    )
    best = inf
    for m in divisors(case.batch):
        try:
            work, part = work_s(setting, m), with_cuts(micro_batch(graph, m))
        except ConfigurationError:
            continue  # experts have no micro-batches
        dims = transformer_dims(part)
        assert dims is not None
        split = dims.heads | dims.hidden
        extents = [part[name].extents[dim] for (name, dim), number in dims.classes.items() if number in split]
        places = cuts(part)
        weight = np.cumsum(works_s(part, setting.cost_model, machine))
        for p in divisors(case.devices):
            if p > len(places) + 1 or (m + p - 1) * work / case.devices >= best:
                continue
            for t in divisors(case.devices // p):
                d = case.devices // p // t
                if any(extent % t for extent in extents) or case.batch // m % d:
                    continue
                rule = [(dims.batch, d), (dims.vocabulary | dims.hidden | dims.heads, t)]
                for found in _in_modes(setting, part, m, _even(weight, places, p), rule, dims.classes):
                    best = min(best, found["cost"])
                    yield {**found, "what": f"t {t}, p {p}, d {d}, m {m}, {found['what']}"}


def _even(weight: Any, places: tuple[int, ...], num: int) -> list[int]:
    """Return the cuts, of some places, at which each of some stages has as much to compute as the others."""
    at: list[int] = []
    for number in range(1, num):
        free = [place for place in places[: len(places) - (num - 1 - number)] if not at or place > at[-1]]
        at.append(min(free, key=lambda place: abs(weight[place - 1] - weight[-1] * number / num)))
    return at


def _in_modes(
    setting: Setting, graph: Graph, m: int, at: list[int], rule: Any, classes: Any
) -> Iterator[dict[str, Any]]:
    """Yield what the steps cost that have all layers in one mode, of those that fit."""
    stages = np.searchsorted(at, np.arange(len(graph.operators)), side="right").tolist()
    layers = tuple(
        LayerChoice(
            splits=dict.fromkeys(operator.extents, 1) | largest_splits(operator, classes, rule),
            state=STATES[0],
            is_recomputed=False,
            stage=stage,
        )
        for operator, stage in zip(graph.operators, stages, strict=True)
    )
    step = Step(
        graph=graph,
        num_devices=setting.num_devices,
        machine=setting.machine,
        cost_model=setting.cost_model,
        optimiser=setting.optimiser,
        micro_batches=m,
        schedule=ONE_FORWARD_ONE_BACKWARD if at else "",
        layers=layers,
    )
    kept = {0, *cuts(graph)}
    for state in STATES:
        for again in (False, True):
            sums, held = [], 0.0
            for stage, ((problem, _), (first, beyond)) in enumerate(zip(step.problems, step.bounds, strict=True)):
                choice = [
                    choice_in(modes, state, is_recomputed=again and v not in kept)
                    for v, modes in zip(range(first, beyond), problem.tables.layers, strict=True)
                ]
                sums.append(problem.sums(choice))
                held = max(held, sums[-1].memory_bytes(step.in_flight(stage)))
            if held <= setting.limit_bytes:
                cost = step_s([s.micro_batch for s in sums], [s.step for s in sums], m)
                yield {"cost": cost, "what": state + ", recomputed" * again}
