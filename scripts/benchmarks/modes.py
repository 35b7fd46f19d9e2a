"""The peak of a step in every mode of layers beside what PyTorch allocates and what its tracker counts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import pase
from pase.graph.parts import cuts, with_cuts
from pase.targets.torch.launch import call
from scripts.benchmarks.peak import MODELS, RANKS, Training
from scripts.benchmarks.tables import markdown, publish

CHOSEN = ("Llama",)
SETTINGS = (("sgd", "float32"),)
BAR = 0.1
"""A prediction that is further off is told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """What layers of a plan do: their weights' state, whether blocks are recomputed; and the parts of a step."""

    state: str = "replicated"
    is_recomputed: bool = False
    micro_batches: int = 1
    stages: int = 1
    schedule: str = "1f1b"


MODES: Mapping[str, Modes] = {
    "replicated": Modes(),
    **{state: Modes(state=state) for state in ("zero1", "zero2", "zero3")},
    "recomputed": Modes(is_recomputed=True),
    "recomputed, zero3": Modes(is_recomputed=True, state="zero3"),
    "4 micro-batches": Modes(micro_batches=4),
    "4 micro-batches, zero2": Modes(micro_batches=4, state="zero2"),
    "2 stages, 4 micro-batches": Modes(stages=2, micro_batches=4),
    "2 stages, 4 micro-batches, recomputed, zero3": Modes(stages=2, micro_batches=4, is_recomputed=True, state="zero3"),
}


def plan_in(graph: pase.Graph, modes: Modes, ranks: int, **settings: Any) -> pase.Plan:
    """Return data parallelism in modes; the first layer of each block is not recomputed, so that each is a run.

    graph: of a micro-batch.
    """
    graph = with_cuts(graph)
    size = ranks // modes.stages
    plan = pase.evaluate(graph, "data_parallel", size, **settings)
    blocks = cuts(graph)
    # Behind as many layers as before it.
    at = [min(blocks, key=lambda i: abs(i - n * len(plan.layers) // modes.stages)) for n in range(1, modes.stages)]

    def of(position: int, layer: Any) -> Any:
        stage = sum(position >= cut for cut in at)
        may_repeat = layer.name in graph.trained and not graph[layer.name].is_loss and position not in blocks
        return replace(
            layer,
            devices=tuple(stage * size + device for device in layer.devices),
            state=modes.state,
            is_recomputed=modes.is_recomputed and may_repeat,
            stage=stage,
        )

    return replace(
        plan,
        layers=tuple(of(position, layer) for position, layer in enumerate(plan.layers)),
        num_devices=ranks,
        num_groups=modes.stages,
        micro_batches=modes.micro_batches,
        schedule=modes.schedule if modes.stages > 1 else "",
    )


def measured(name: str, optimiser: str, precision: str, modes: Modes) -> tuple[int, int, int]:
    """Return what a step in modes allocates on this rank, what the tracker counts, 0 in stages, and the prediction.

    Among real ranks the tracker waits for ever.
    """
    module, batch = MODELS[name]()
    settings: dict[str, Any] = {"machine": "h100", "optimiser": optimiser, "precision": precision}
    plan = plan_in(pase.load((module, batch)), modes, RANKS, **settings)
    many = {key: torch.cat([x] * modes.micro_batches) for key, x in batch.items()}
    training = Training(module, batch, plan, many)
    training.step()
    # Gloo's threads free what they have sent when they come to it, in some steps late.
    allocated = min(training.allocated_bytes() for _ in range(4 if modes.stages > 1 else 1))
    return allocated, 0 if modes.stages > 1 else training.tracked_bytes(), plan.peak.bytes


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/memory.md."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    rows = []
    for name, (optimiser, precision) in product(CHOSEN, SETTINGS):
        for told, modes in MODES.items():
            of = name, optimiser, precision, modes
            # Stages tell each other what they send.
            found = call(measured, *of, ranks=RANKS, threads=1, timeout_s=600) if modes.stages > 1 else [measured(*of)]
            allocated, tracked, predicted = map(max, zip(*found, strict=True))
            off = predicted / (tracked or allocated) - 1
            sizes = [f"{size / 1e6:.1f}" if size else "—" for size in (allocated, tracked, predicted)]
            rows.append([name, optimiser, precision, told, *sizes, f"{off:+.1%}{'' if abs(off) <= BAR else ' *'}"])
            print(*rows[-1], flush=True)
    headers = ["model", "optimizer", "precision", "modes", "allocated, MB", "tracked", "predicted", "error"]
    publish("memory.md", {"modes": markdown(headers, rows)}, write=write)
