"""The best published steps beside those that a search finds for the same model on the same devices.

Theirs is a `TrainingStep` with their splits, stages, micro-batches, states of weights and recomputation, so that both
have the same costs. Kernels and copies that no search chooses (the sum of gradients over micro-batches, the optimizer,
a cross-entropy in many kernels) are left out of both; `published_steps` has them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pase
from pase.costs.states import REPLICATED
from pase.errors import MemoryLimitError
from pase.graph import Graph, Operator
from pase.graph.parts import micro_batch, with_cuts
from pase.machine import Machine
from pase.planning.constraints import MODES
from pase.planning.plan import Plan
from pase.planning.stages import schedule_of
from pase.planning.steps import LayerChoice, TrainingStep
from scripts.benchmarks.large_steps import layer_splits, stage_layers
from scripts.benchmarks.published_steps import (
    AGAIN_SELECTIVE,
    FSDP_BF16,
    FSDP_FLOAT8,
    Row,
    Titan,
    gpt,
    llama,
    machine_of,
    measured_s,
    model_flop,
    predicted,
    published_steps,
)
from scripts.benchmarks.tables import markdown, publish
from scripts.benchmarks.timing import in_own_process

OPTIMISER = "adamw"


def best_rows() -> list[Row]:
    """Return of each model and number of devices the row that does most of the model's FLOP in a second.

    The smaller clusters come first.
    """
    best: dict[tuple[str, int], Row] = {}
    for row in published_steps():
        other = best.setdefault((row.model, row.gpus), row)
        if model_flop(row) / measured_s(row) > model_flop(other) / measured_s(other):
            best[row.model, row.gpus] = row
    return sorted(best.values(), key=lambda row: (row.gpus, row.id))


def graph_of(row: Row) -> Graph:
    """Return the model of a row, for the whole batch."""
    if not row.parallelism:
        return gpt(row, row.gbs, _blocks(row.layers))
    titan = Titan.of(row)
    precision = FSDP_FLOAT8 if titan.is_float8 else FSDP_BF16
    return llama(titan.sizes, precision, row.local_batch * titan.fsdp, row.seq, _blocks(titan.sizes.layers))


def _blocks(layers: int) -> list[str]:
    return [f"block{number}" for number in range(layers)]


def cluster_of(row: Row) -> Machine:
    """Return the devices of a row."""
    return machine_of("h100" if row.parallelism else "a100")


def theirs(row: Row, graph: Graph, *, in_turns: bool = True) -> TrainingStep:
    """Return the step of a row.

    torchtitan shares weights over all replicas; those of a pipeline stay gathered through a step, as in `zero1`.

    Args:
        row: a published step.
        graph: its model, for the whole batch.
        in_turns: whether groups of devices have several stages where they do; else each has one.
    """
    parts: Sequence[str] | None = None
    if row.parallelism:
        titan = Titan.of(row)
        tensor, layers = dict.fromkeys("ghuev", titan.tp) | {"s": titan.tp}, titan.sizes.layers
        apart = {"b": titan.fsdp, "s": titan.cp}
        groups, chunks, m = titan.pp, titan.chunks, titan.micro_batches
        state = "zero1" if groups > 1 else "zero3"
        if titan.is_selective:
            parts = AGAIN_SELECTIVE
    else:
        is_by_sequence = "sequence parallel" in row.recompute
        tensor, layers = dict.fromkeys("ghev", row.tp) | ({"s": row.tp} if is_by_sequence else {}), row.layers
        apart = {"b": row.dp}
        groups, chunks, m = row.pp, row.vp, row.gbs // (row.dp * row.mbs)
        state = REPLICATED
        if row.recompute.startswith("selective"):
            parts = CORE
    chunks = chunks if in_turns else 1
    part = with_cuts(micro_batch(graph, m))
    begins = _beginnings(part.operators, layers)
    counts = accumulate(stage_layers(layers, groups * chunks)[:-1])
    at = [begins[count] for count in counts]
    choices = tuple(
        LayerChoice(
            splits=layer_splits(operator, tensor, apart),
            state=state,
            is_recomputed=v not in begins and _is_again(operator.name, parts),
            stage=sum(v >= cut for cut in at),
        )
        for v, operator in enumerate(part.operators)
    )
    return TrainingStep(
        graph=part,
        num_devices=row.gpus,
        machine=cluster_of(row),
        cost_model="step",
        optimiser=OPTIMISER,
        micro_batches=m,
        schedule=schedule_of(chunks) if at else "",
        layers=choices,
        chunks=chunks,
    )


CORE = ("core_scores", "core_softmax", "core_dropout", "core_values", "core_copy")
"""What of a block Megatron-LM's selective recomputation does once more."""


def _beginnings(operators: Sequence[Operator], layers: int) -> list[int]:
    """Return where each block begins: with the fan-out before its first norm."""
    names = [operator.name for operator in operators]
    return [names.index(f"{block}_norm1") - 1 for block in _blocks(layers)]


def _is_again(name: str, parts: Sequence[str] | None) -> bool:
    """Return whether a layer is recomputed where those parts of blocks are, or, with None, all of them."""
    block, _, part = name.removesuffix("_fan_out").partition("_")
    return block.startswith("block") and (parts is None or part in parts)


# -- ours


def searched(number: str, time_limit_s: str) -> None:
    """Print the step of a row, and the one that a search finds within the same memory."""
    row = next(row for row in published_steps() if row.id == int(number))
    graph = graph_of(row)
    step = theirs(row, graph)
    limits = [step.machine.device.memory_bytes, step.peak.bytes]
    for limit in limits:
        try:
            plan = searched_plan(step, graph, limit, float(time_limit_s))
            break
        except MemoryLimitError:
            # Theirs did fit, so that what it takes by our count is a limit, too.
            if limit == limits[-1]:
                raise
    ours = _told(TrainingStep.of(plan)) | {"bound": plan.lower_bound}
    told = _told(step) | {"in_one": theirs(row, graph, in_turns=False).cost}
    print(json.dumps({"theirs": told, "ours": ours, "limit": limit}))


def searched_plan(step: TrainingStep, graph: Graph, limit_bytes: int | None, time_limit_s: float) -> Plan:
    """Return the plan that a search finds of a step's model on its devices, in turns too if it has these.

    graph: for the whole batch.
    """
    return pase.search(
        graph,
        devices=step.num_devices,
        machine=step.machine,
        cost_model=step.cost_model,
        optimiser=step.optimiser,
        micro_batches="auto",
        stages="auto",
        schedule=schedule_of(step.chunks),
        modes=MODES,
        device_memory_bytes=limit_bytes,
        time_limit_s=time_limit_s,
    )


def _told(step: TrainingStep) -> dict[str, Any]:
    return {"cost": step.cost, "memory": step.peak.bytes, "shape": shape_of(step)}


def shape_of(step: TrainingStep) -> dict[str, str]:
    """Return what sets a step apart, by name; of layers' splits and states those of most products with weights."""
    ways: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for operator, layer in zip(step.graph.operators, step.layers, strict=True):
        if operator.kind == "dense":
            split = Counter({"t": 1, "d": 1, "s": 1})
            for dim, parts in layer.splits.items():
                split["d" if dim == "b" else "s" if dim == "s" else "t"] *= parts
            ways[", ".join(f"{letter} {parts}" for letter, parts in split.items() if parts > 1)] += 1
            states[layer.state] += 1
    again = sum(layer.is_recomputed for layer in step.layers) / len(step.layers)
    return {
        "stages": f"{step.num_groups}" + f" × {step.chunks}" * (step.chunks > 1),
        "micro-batches": str(step.micro_batches),
        "splits": _mostly(ways),
        "weights": _mostly(states),
        "recomputed": f"{again:.0%} of layers",
    }


def _mostly(counts: Counter[str]) -> str:
    (most, _), *others = counts.most_common()
    return most + f" and {len(others)} more" * bool(others)


HEADERS = (
    *("row", "model", "GPUs", "measured, s", "predicted, s", "theirs on our costs, s", "GiB", "ours, s", "GiB", "gap"),
    *("theirs ÷ ours", "theirs", "what differs in ours"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen."""
    parser.add_argument("--rows", default="", metavar="ID,ID", help="some of them; no table is written then")
    parser.add_argument("--time-limit", type=float, default=150.0, metavar="SECONDS", help="of a search")


def main(*, write: bool, rows: str, time_limit: float) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    cells = []
    for row in best_rows():
        if not rows or str(row.id) in rows.split(","):
            found = in_own_process("published_search", "searched", str(row.id), str(time_limit))
            cells.append(_cells(row, found))
            print(" | ".join(cells[-1]), flush=True)
    publish("benchmarks.md", {"published-search": markdown(HEADERS, cells)}, write=write and not rows)


def _cells(row: Row, found: Mapping[str, Any]) -> list[str]:
    theirs, ours = found["theirs"], found["ours"]
    cells = [str(row.id), row.model, str(row.gpus), f"{measured_s(row):.2f}", f"{predicted(row).step_s:.2f}"]
    in_one = f" ({theirs['in_one']:.2f})" * (theirs["in_one"] != theirs["cost"])
    cells += [f"{theirs['cost']:.2f}{in_one}", f"{theirs['memory'] / 2**30:.0f}"]
    is_theirs = found["limit"] == theirs["memory"]
    cells += [f"{ours['cost']:.2f}", f"{ours['memory'] / 2**30:.0f}" + "*" * is_theirs]
    cells += [f"{1 - ours['bound'] / ours['cost']:.1%}"]
    cells += [f"{theirs['cost'] / ours['cost']:.3f}", _shape(theirs["shape"])]
    differs = {name: own for name, own in ours["shape"].items() if own != theirs["shape"][name]}
    return [*cells, _shape(differs)]


def _shape(shape: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {own}" for name, own in shape.items())
