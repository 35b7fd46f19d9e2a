"""Large training: what a search over stages, micro-batches and modes takes, beside every step that Megatron allows.

Megatron's space is gone through whole, on the same costs (`megatron`).
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import pase
from pase.costs.states import ModeSpace
from pase.graph import Graph
from pase.graph.precision import uniform
from pase.machine import load_machine
from pase.models import build
from pase.planning.constraints import MODES
from pase.planning.spans import Setting
from pase.planning.stages import SEARCHED_SCHEDULES
from scripts.benchmarks import megatron
from scripts.benchmarks.published_steps import LLAMAS, llama
from scripts.benchmarks.tables import markdown, publish
from scripts.benchmarks.timing import in_own_process

SETTINGS: Mapping[str, Any] = {
    "cost_model": "step",
    "precision": "bf16-mixed",
    "optimiser": "adamw",
    "micro_batches": "auto",
    "stages": "auto",
    "modes": MODES,
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
    parser.add_argument(
        "--schedule", choices=SEARCHED_SCHEDULES, default=SEARCHED_SCHEDULES[0], help="of what a search looks at"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of a search")


def main(*, write: bool, models: str, schedule: str, jobs: int) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    names = [name for name in CASES if models == ",".join(CASES) or name in models.split(";")]
    rows = []
    for name in names:
        ours = in_own_process("large", "searched", name, schedule, str(jobs))
        theirs = in_own_process("large", "exhausted", name)
        turns = f" × {ours['chunks']}" * (ours["chunks"] > 1)
        rows.append(
            [
                name,
                f"{CASES[name].devices} {CASES[name].machine}",
                f"{ours['time_s']:.1f}",
                f"{ours['cost']:.4g} s: p {ours['stages']}{turns}, m {ours['micro_batches']}",
                f"{100 * (1 - ours['bound'] / ours['cost']):.2f}%",
                f"{theirs['cost']:.4g} s: {theirs['what']}" if theirs else "–",
                f"{theirs['cost'] / ours['cost']:.3f}" if theirs else "–",
                f"{theirs['time_s']:.0f}, {theirs['num']:,}" if theirs else "–",
            ]
        )
        print(rows[-1], flush=True)
    headers = ["model", "devices", "search, s", "ours", "gap", "Megatron's best", "÷ ours", "its time, s, and steps"]
    publish("benchmarks.md", {"large": markdown(headers, rows)}, write=write)


def searched(name: str, schedule: str, jobs: str) -> None:
    """Print what a search finds."""
    case = CASES[name]
    plan = pase.search(
        case.model(case.batch),
        devices=case.devices,
        machine=case.machine,
        schedule=schedule,
        jobs=int(jobs),
        **case.settings,
    )
    told = {"cost": plan.total_cost, "bound": plan.lower_bound}
    told |= {"stages": plan.num_groups, "chunks": plan.num_stages // plan.num_groups}
    print(json.dumps({**told, "micro_batches": plan.micro_batches}))


def exhausted(name: str) -> None:
    """Print the best step of Megatron's space; nothing for a network that it has no rule for, or that is imported.

    The layers of imported networks are named by what they compute, which the rule knows; their micro-batches are those
    of the graph.
    """
    case = CASES[name]
    graph = pase.load(case.model(case.batch)).in_precision(case.settings["precision"])
    machine = load_machine(case.machine)
    setting = Setting(
        graph=graph,
        num_devices=case.devices,
        machine=machine,
        cost_model=case.settings["cost_model"],
        space=ModeSpace(),
        optimiser=case.settings["optimiser"],
        limit_bytes=0.9 * (machine.device.memory_bytes or inf),
    )
    steps = list(megatron.steps(setting)) if megatron.dims_of(setting) else []
    best = min(steps, default=None)
    print(json.dumps({"cost": best.cost, "what": str(best), "num": len(steps)} if best else {}))
