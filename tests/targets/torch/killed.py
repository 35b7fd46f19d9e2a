"""Ranks that write checkpoints, one of which is killed at a random time; then others that load what is left.

Processes are forks of one that has loaded PyTorch and used none of it, so that many kills take little time.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pase.targets.torch.checkpoints import load_checkpoint, save_checkpoint
from pase.targets.torch.parameters import held_by
from pase.targets.torch.values import cut
from tests.targets.torch.test_parameters import model_of, parallel

WORLD = 2


def forked(function: Callable[..., None], rank: int, *arguments: Any) -> int:
    """Return the process that runs `function(rank, *arguments)` and ends."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        function(rank, *arguments)
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def join(rank: int, store: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )


def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    root = parallel(rank, WORLD, "mixed", model_of())[0]
    return root, torch.optim.AdamW(root.parameters())


def whole(name: str, shape: torch.Size, step: int, dtype: torch.dtype) -> torch.Tensor:
    """What there is to be at a step, of everything."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=draw, dtype=torch.float32).to(dtype)


def written(root: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Have a model and its optimizer be as they are to be at a step."""
    with torch.no_grad():
        for name, parameter in root.named_parameters():
            kept = optimizer.state[parameter]
            for slot in ("", "exp_avg", "exp_avg_sq"):
                value = whole(name + slot, parameter.shape, step, parameter.dtype)
                tensor: Any = kept.setdefault(slot, torch.zeros_like(parameter)) if slot else parameter
                tensor.to_local().copy_(cut(value, held_by(tensor)))
            kept["step"] = torch.tensor(float(step))


def saves(rank: int, store: Path, folder: Path, pipe: int) -> None:
    """Write one checkpoint after the other; rank 0 says which are written."""
    join(rank, store)
    root, optimizer = made(rank)
    found = load_checkpoint(folder, root, optimizer)
    for step in count(1 if found is None else found.step + 1):
        written(root, optimizer, step)
        save_checkpoint(folder, root, optimizer, step=step)
        if rank == 0:
            os.write(pipe, f"{step}\n".encode())


def loads(rank: int, store: Path, folder: Path, pipe: int) -> None:
    """Load the newest checkpoint, which is to be that of its step, bit for bit."""
    join(rank, store)
    root, optimizer = made(rank)
    found = load_checkpoint(folder, root, optimizer)
    assert found is not None
    for name, parameter in root.named_parameters():
        kept = optimizer.state[parameter]
        for slot in ("", "exp_avg", "exp_avg_sq"):
            tensor: Any = kept[slot] if slot else parameter
            assert torch.equal(tensor.full_tensor(), whole(name + slot, parameter.shape, found.step, parameter.dtype))
        assert kept["step"].item() == found.step
    if rank == 0:
        os.write(pipe, f"{found.step}\n".encode())


def told(pipe: int) -> int:
    """Return the last number that came through a pipe, 0 for none."""
    lines = os.read(pipe, 1 << 16).split()
    return int(lines[-1]) if lines else 0


def ended(processes: list[int], within_s: float) -> list[int]:
    """Return how processes ended; those that do not in time are killed."""
    statuses: dict[int, int] = {}
    end_s = time.monotonic() + within_s
    while len(statuses) < len(processes):
        for process in processes:
            if process not in statuses:
                if time.monotonic() > end_s:
                    os.kill(process, signal.SIGKILL)
                done, status = os.waitpid(process, 0 if time.monotonic() > end_s else os.WNOHANG)
                if done:
                    statuses[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return [statuses[process] for process in processes]


def main() -> None:
    """Kill a rank so many times, and write a line about each time."""
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    torch.set_num_threads(1)
    for number in range(kills):
        ours, theirs = os.pipe()
        processes = [forked(saves, rank, folder / f"store-{number}", folder, theirs) for rank in range(WORLD)]
        told(ours)  # Until the first one is written.
        begin_s = time.monotonic()
        saved = told(ours)
        one_s = time.monotonic() - begin_s
        time.sleep(draw.uniform(0, 3 * one_s))
        in_part = any(folder.glob(".*.part"))
        victim = draw.randrange(WORLD)
        os.kill(processes[victim], signal.SIGKILL)
        ended(processes, 20)
        os.set_blocking(ours, False)
        with suppress(BlockingIOError):
            saved = max(saved, told(ours))
        os.set_blocking(ours, True)
        readers = [forked(loads, rank, folder / f"store-{number}-again", folder, theirs) for rank in range(WORLD)]
        statuses = ended(readers, 60)
        if any(statuses):
            sys.exit(f"kill {number} of rank {victim}: what was left does not load, statuses {statuses}")
        line = {"victim": victim, "saved": saved, "loaded": told(ours), "in_part": in_part, "one_s": one_s}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        os.close(ours)
        os.close(theirs)
