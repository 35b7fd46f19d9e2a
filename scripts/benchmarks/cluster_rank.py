"""One rank of a cluster: it runs the steps of several programs in turns; the first rank prints what they took."""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pase.targets.torch.launch import Ranks, join
from pase.targets.torch.script import RankTraining
from pase.targets.training.data import Batches
from pase.targets.training.options import TrainingOptions

_RATE = 1e-3
_LIMIT_S = 120


def main() -> None:
    """Run the programs that the arguments name; print a list of seconds for each, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = join(device="cpu", timeout_s=_LIMIT_S)
    times = timed({path.name: step_of(path, ranks) for path in arguments.programs}, arguments.rounds)
    if ranks.rank == 0:
        print(json.dumps(times), flush=True)
    dist.barrier()
    # Without gloo's own end: with many groups its threads now and then end the process as if it had failed.
    os._exit(0)


def step_of(path: Path, ranks: Ranks) -> Callable[[], object]:
    """Return what does one training step of a program in float32, as its own script does it."""
    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    training = RankTraining(namespace["build"], ranks, TrainingOptions(steps=1))
    batch = Batches(training.program.inputs.values(), seed=0).batch(0)
    return partial(training.step, batch, learning_rate=_RATE)


def timed(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return how long each step took in each round, on the rank where it took longest; a round before is not counted.

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
