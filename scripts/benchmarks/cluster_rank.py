"""One rank of a cluster: it runs the steps of several programs in turns; the first rank prints what they took.

Timed is what a cost model tells of: until gradients are summed; and apart what comes after, the update and the check
that all numbers are finite.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from pase.targets.torch import script
from pase.targets.torch.launch import Ranks, join
from pase.targets.torch.training import program_training
from pase.targets.training.data import Batches
from pase.targets.training.options import TrainingOptions

_RATE = 1e-3
_LIMIT_S = 120


def main() -> None:
    """Run the programs that the arguments name; print the seconds of each round for each, as JSON."""
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


Parts = tuple[Callable[[], Any], Callable[[Any], object]]
"""Of a step: what makes the gradients, and what uses its result to update the weights."""


def step_of(path: Path, ranks: Ranks) -> Parts:
    """Return what does one training step of a program in float32, as its own script does it."""
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    with patch.object(script, "main") as main:
        exec(code, {"__name__": "__main__"})
    (build,), count = main.call_args.args, main.call_args.kwargs.get("micro_batches", 1)
    training = program_training(build, ranks, TrainingOptions(steps=1), micro_batches=count)
    batch = Batches(training.module.step_inputs, seed=0).batch(0)
    return partial(training.gradients, batch), partial(training.descend, learning_rate=_RATE)


def timed(steps: dict[str, Parts], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return how long each step's gradients took in each round, and all of it, on the rank where either took longest.

    A round before is not counted. All ranks shuffle alike.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order, numbers = list(steps), random.Random(0)
    for number in range(rounds + 1):
        numbers.shuffle(order)
        for name in order:
            dist.barrier()
            gradients, descend = steps[name]
            begin = time.perf_counter()
            made = gradients()
            summed = time.perf_counter()
            descend(made)
            seconds = torch.tensor([summed - begin, time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if number:
                found[name].append((seconds[0].item(), seconds[1].item()))
    return found


if __name__ == "__main__":
    main()
