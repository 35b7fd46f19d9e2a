"""Steps of `pase.parallelize` beside PyTorch's own ways: DistributedDataParallel, and `parallelize_module`.

Modules of all contenders live in the same processes and take their steps in turns, so that what else the machine does
falls on all alike.
"""

import argparse
import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import pase
from pase import Plan
from pase.analysis.baselines.registry import EXPERTS, Baseline, meshes
from pase.analysis.baselines.rules import transformer_dims
from pase.errors import PaseError
from pase.machine import Machine, load_machine
from pase.targets.torch.launch import call, run_program
from scripts.benchmarks.tables import markdown, publish

PROCESSES = (2, 4)
ROUNDS = 40
"""Steps of each contender, after `WARM_UP` that do not count."""
WARM_UP = 5
SEED = 20

BARS = {"data parallelism": 1.05, "Megatron": 1.05, "searched": 1.0}
"""What each ratio is to be at most."""
BAR_OF_7B_S = 60.0

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS = 8, 64, 256, 8, 704, 2


# -- the model


class Attention(nn.Module):  # type: ignore[misc]
    """Llama's attention, with rotated queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.part = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.part).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = (
            y * cosine + torch.cat([-y[..., self.part // 2 :], y[..., : self.part // 2]], -1) * sine for y in (q, k)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):  # type: ignore[misc]
    """Llama's gated layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Blocks(nn.Module):  # type: ignore[misc]
    """A stack of Llama's blocks, and a loss of what comes out."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.feed_forward = nn.ModuleList(FeedForward(width, hidden) for _ in range(layers))
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, width // heads, 2) * heads / width))
        self.register_buffer("cosine", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sine", torch.cat([angles, angles], -1).sin())

    def forward(self, x: Any, target: Any) -> Any:
        for layer, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            x = x + attention(self.norms[2 * layer](x), self.cosine, self.sine)
            x = x + feed_forward(self.norms[2 * layer + 1](x))
        return functional.mse_loss(x, target)


def made() -> tuple[Blocks, dict[str, Any]]:
    """Return the model and a whole batch, the same wherever they are made."""
    torch.manual_seed(SEED)
    model = Blocks()
    return model, {name: torch.randn(BATCH, LENGTH, WIDTH) for name in ("x", "target")}


# -- contenders


def calibrated(processes: int) -> Machine:
    """Return this machine as its processes measure it, all at once: what its cores and gloo give each of them."""
    with tempfile.TemporaryDirectory(prefix="pase-race-") as folder:
        path = Path(folder) / "this_machine.toml"
        run_program(
            ["-m", "pase.calibration.ranks", "-o", str(path)], ranks=processes, threads=1, timeout_s=120,
            environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        return load_machine(path)


def plans(processes: int) -> dict[str, Plan]:
    """Return the searched plan, and those of the rules, for this machine."""
    tensor_parallel = Baseline(
        name="megatron",
        choose=lambda problem, _: meshes(problem, _dims(problem.graph), (problem.num_devices,))[0],
        source="",
        needs="",
        description="",
    )
    # As gloo sums.
    found = pase.compare(
        made(), processes, machine=calibrated(processes), cost_model="ring",
        baselines=[EXPERTS["data_parallel"], tensor_parallel],
    )  # fmt: skip
    names = {"pase": "searched", "data_parallel": "data parallelism", "megatron": "Megatron"}
    return {names[each.name]: each.plan for each in found.contenders}


def _dims(graph: Any) -> Any:
    dims = transformer_dims(graph)
    assert dims is not None, "the model has attention"
    return dims


Step = Callable[[], Any]


def _own_part(batch: Mapping[str, Any]) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {name: value.chunk(world_size)[rank].contiguous() for name, value in batch.items()}


def _of_ddp(model: Blocks, batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return nn.parallel.DistributedDataParallel(model), _own_part(batch)


def _of_tensor_parallel(model: Blocks, batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    chosen: dict[str, Any] = {}
    for i in range(LAYERS):
        columns = [f"attention.{i}.{name}" for name in ("query", "key", "value")]
        columns += [f"feed_forward.{i}.{name}" for name in ("gate", "up")]
        chosen |= {name: ColwiseParallel() for name in columns}
        chosen |= {name: RowwiseParallel() for name in (f"attention.{i}.out", f"feed_forward.{i}.down")}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), chosen), batch


# -- the race, on every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Of one contender on one rank: seconds that passed in each step, CPU seconds of all threads, the last loss."""

    times_s: list[float]
    cpu_s: list[float]
    loss: float


def race(chosen: Mapping[str, Plan], rounds: int) -> dict[str, Steps]:
    """Return the steps of each contender; rounds: how many are timed."""
    model, batch = made()
    contenders = {name: (pase.parallelize((copy.deepcopy(model), batch), plan), batch) for name, plan in chosen.items()}
    contenders["DistributedDataParallel"] = _of_ddp(copy.deepcopy(model), batch)
    contenders["parallelize_module"] = _of_tensor_parallel(copy.deepcopy(model), batch)
    optimizers = {name: torch.optim.AdamW(module.parameters(), lr=1e-4) for name, (module, _) in contenders.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    names = list(contenders)
    for number in range(WARM_UP + rounds):
        # Nobody always comes after the same one.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            module, given = contenders[name]
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            loss = module(**given)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            dist.barrier()
            found[name].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
            losses[name] = _mean(loss, name)
    return {
        name: Steps(times_s=[t for t, _ in steps[WARM_UP:]], cpu_s=[c for _, c in steps[WARM_UP:]], loss=losses[name])
        for name, steps in found.items()
    }


def _mean(loss: Any, name: str) -> float:
    whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss.detach().clone()
    if name == "DistributedDataParallel":
        dist.all_reduce(whole)
        whole /= dist.get_world_size()
    return float(whole)


# -- Llama-2 7B


def time_of_7b(plan: Plan) -> tuple[float, float, float]:
    """Return seconds, CPU seconds and bytes of `parallelize` for Llama-2 7B on the meta device, on one rank of 8."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = llama_7b()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    parallel = pase.parallelize(model, plan)
    time_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    shards = (getattr(p, "_local_tensor", p) for p in parallel.parameters())
    held = sum(p.numel() * p.element_size() for p in shards)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return time_s, cpu_s, float(held)


def llama_7b() -> tuple[Any, dict[str, Any]]:
    """Return Llama-2 7B on the meta device, and what it reads."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(8, 1024, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


# -- tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """What of ours was held against which of PyTorch's; values: of each round; cpu: of CPU seconds, of all ranks."""

    ours: str
    theirs: str
    ours_s: float
    theirs_s: float
    values: list[float]
    cpu: float

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return self.ours_s / self.theirs_s


def ratios(times_s: Mapping[str, list[float]], cpu_s: Mapping[str, list[float]]) -> list[Ratio]:
    """Return the three ratios of a race: of both rules, and of the searched plan to the better of PyTorch's ways."""
    peers = ("DistributedDataParallel", "parallelize_module")
    better = min(peers, key=lambda name: median(times_s[name]))
    found = []
    for ours, theirs in zip(BARS, (*peers, better), strict=True):
        values = sorted(a / b for a, b in zip(times_s[ours], times_s[theirs], strict=True))
        ours_s, theirs_s = median(times_s[ours]), median(times_s[theirs])
        cpu = median(cpu_s[ours]) / median(cpu_s[theirs])
        found.append(Ratio(ours=ours, theirs=theirs, ours_s=ours_s, theirs_s=theirs_s, values=values, cpu=cpu))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each that are timed (%(default)s)")
    parser.add_argument("--without-7b", action="store_true", help="leave out Llama-2 7B")


def main(*, write: bool, rounds: int, without_7b: bool) -> None:
    """Print the tables, or put them into docs/benchmarks.md."""
    rows, predictions = [], []
    for processes in PROCESSES:
        chosen = plans(processes)
        times_s, cpu_s = measured(chosen, processes, rounds)
        for each in ratios(times_s, cpu_s):
            low, high = (each.values[round(share * (len(each.values) - 1))] for share in (0.1, 0.9))
            rows.append(
                [
                    *(str(processes), each.ours, each.theirs, f"{1e3 * each.ours_s:.1f}", f"{1e3 * each.theirs_s:.1f}"),
                    *(f"{each.ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{each.cpu:.2f}", f"{BARS[each.ours]:.2f}"),
                ]
            )
        base = "data parallelism"
        for name, plan in chosen.items():
            known = plan.total_cost / chosen[base].total_cost, median(times_s[name]) / median(times_s[base])
            seconds = 1e3 * plan.total_cost, 1e3 * median(times_s[name])
            share = sum(split != chosen[base][layer].splits for layer, split in _splits(plan)) / len(plan)
            found = [f"{seconds[0]:.1f}", f"{seconds[1]:.1f}", *(f"{ratio:.2f}" for ratio in known), f"{share:.0%}"]
            predictions.append([str(processes), name, *found])
    heads = [
        "processes",
        "plan",
        "beside",
        "ours, ms",
        "theirs, ms",
        "ratio",
        "of single rounds",
        "of CPU seconds",
        "at most",
    ]
    of_plans = ["processes", "plan", "predicted, ms", "measured, ms"]
    of_plans += [f"{what} ÷ data parallelism" for what in ("predicted", "measured")] + [
        "layers split otherwise than it"
    ]
    tables = {"torch": markdown(heads, rows), "torch predictions": markdown(of_plans, predictions)}
    if not without_7b:
        tables["torch 7b"] = _table_of_7b()
    publish("benchmarks.md", tables, write=write)


def _splits(plan: Plan) -> Iterator[tuple[str, Mapping[str, int]]]:
    return ((layer.name, layer.splits) for layer in plan.layers)


def measured(
    chosen: Mapping[str, Plan], processes: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each contender's steps, those that pass on the slowest rank and the CPU's on all of them.

    SystemExit where they do not compute the same.
    """
    answers = call(race, chosen, rounds, ranks=processes, threads=1, timeout_s=1200)
    losses = {name: steps.loss for name, steps in answers[0].items()}
    if max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
        raise SystemExit(f"the contenders do not compute the same losses: {losses}")
    of_ranks = {name: [answer[name] for answer in answers] for name in losses}
    times_s = {n: [max(each) for each in zip(*(s.times_s for s in all_), strict=True)] for n, all_ in of_ranks.items()}
    cpu_s = {n: [sum(each) for each in zip(*(s.cpu_s for s in all_), strict=True)] for n, all_ in of_ranks.items()}
    return times_s, cpu_s


def _table_of_7b() -> str:
    start_s = time.perf_counter()
    plan = pase.search(llama_7b(), 8, machine="h100")
    search_s = time.perf_counter() - start_s
    try:
        time_s, cpu_s, held = call(time_of_7b, plan, ranks=1, timeout_s=1200)[0]
        row = [f"{search_s:.1f}", f"{time_s:.1f}", f"{cpu_s:.1f}", f"{held / 2**30:.1f}", f"{BAR_OF_7B_S:g}"]
    except PaseError as error:
        row = [f"{search_s:.1f}", str(error), "", "", f"{BAR_OF_7B_S:g}"]
    heads = ["import and search, s", "`parallelize`, s", "CPU s", "shards of a rank, GiB", "at most, s"]
    return markdown(heads, [row])
