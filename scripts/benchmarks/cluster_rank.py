"""One rank of a cluster: it runs the steps of several programs in turns; the first rank prints what they took."""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pase.targets.torch.collectives import Groups
from pase.targets.torch.program import Program
from pase.targets.training.data import Batches

_RATE = 1e-3
_LIMIT_S = 120


def main() -> None:
    """Run the programs that the arguments name; print a list of seconds for each, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT_S))
    groups = Groups(dist.get_rank(), dist.get_world_size())
    steps = {path.name: step_of(path, groups) for path in arguments.programs}
    times = timed(steps, arguments.rounds)
    if dist.get_rank() == 0:
        print(json.dumps(times), flush=True)
    dist.barrier()
    # Without gloo's own end: with many groups its threads now and then end the process as if it had failed.
    os._exit(0)


def step_of(path: Path, groups: Groups) -> Callable[[], object]:
    """Return what does one training step of a program: forward, backward, gradient descent."""
    namespace: dict[str, Any] = {"__name__": "emitted"}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if "targets.torch.script" not in line)
    exec(compile(text, str(path), "exec"), namespace)
    program = Program(rank=dist.get_rank(), num_devices=dist.get_world_size(), groups=groups)
    traced = program.traced(namespace["build"](program))
    numbers = torch.Generator().manual_seed(dist.get_rank())
    weights = {
        name: torch.nn.Parameter(weight.deviation * torch.randn(weight.tensor.shard, generator=numbers) + weight.mean)
        for name, weight in traced.weights.items()
    }
    batch = {name: torch.as_tensor(array) for name, array in Batches(traced.inputs.values(), seed=0).batch(0).items()}
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    values = [weights[name] if name in weights else batch[name] for name in traced.arguments]
    optimizer = torch.optim.SGD(list(weights.values()), lr=_RATE)

    def step() -> None:
        loss, *_ = traced.module(*values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return how long each step took in each round, on the rank where it took longest; one round before is not counted.

    All ranks shuffle alike.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    order, numbers = list(steps), random.Random(0)
    for number in range(rounds + 1):
        numbers.shuffle(order)
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if number:
                found[name].append(seconds.item())
    return found


if __name__ == "__main__":
    main()
