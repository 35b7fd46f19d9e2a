"""What the tests of `pase.targets.torch.watch` run on the session's ranks: one rank does otherwise than the others."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pase
from pase import Plan
from pase.targets.torch import watch
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.launch import join, rank_environment
from pase.targets.torch.messages import told_by_all
from tests.runtime.plans import make_plan

LIMIT_S = 6.0
"""Ranks of a busy machine come to a collective seconds apart."""


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.last(torch.tanh(self.first(x))), y)


def inputs(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(2 * world, 6, generator=draw), torch.randn(2 * world, 1, generator=draw)


def plan_of(world: int, width: int = 6, axis: str = "batch") -> Plan:
    """Data parallelism, or the first layer's outputs split."""
    graph = pase.load((Net(width), inputs(world)))
    splits = {op.name: {next(iter(op.extents)): world} for op in graph.operators if op.extents}
    if axis == "outputs":
        splits[graph.operators[0].name] = {list(graph.operators[0].extents)[1]: world}
    return make_plan(graph, world, splits)


@contextmanager
def joined(rank: int, world: int, port: int, limit_s: float) -> Iterator[None]:
    """Be in a process group as a process of torchrun's is, where nobody else watches over this machine's ranks."""
    dist.destroy_process_group()
    environment = rank_environment(rank, world, port, 1) | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        join(timeout_s=limit_s)
        yield


class Timed:
    """A stream that writes the time before each text, by the clock that all processes of a machine share."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(f"[{time.monotonic():.2f}] {text}")

    def flush(self) -> None:
        self.stream.flush()


def training(rank: int, world: int, port: int, victim: int, how: str, limit_s: float, differs: str) -> None:
    """Train for ever, and end as a program does; after two steps one rank does otherwise.

    Args:
        rank: This rank.
        world: How many there are.
        port: Where they meet.
        victim: The rank that does otherwise.
        how: What it does.
        limit_s: How long ranks wait for each other.
        differs: The file that the victim writes the time into at which it begins to do otherwise.
    """
    sys.stderr = Timed(sys.stderr)
    try:
        with joined(rank, world, port, limit_s):
            train(rank, world, victim, how, differs)
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def train(rank: int, world: int, victim: int, how: str, differs: str) -> None:
    model = pase.parallelize((Net(), inputs(world)), plan_of(world), check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in count():
        is_time = rank == victim and step == 2
        if is_time:
            Path(differs).write_text(str(time.monotonic()))
        if is_time and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_time and how == "sleeping":
            time.sleep(600)
        if is_time and how == "thrown":
            # As Python does with an error that nobody catches; other threads go on.
            sys.excepthook(ValueError, ValueError("the third batch is empty"), None)
            time.sleep(600)
        with naming_lost_ranks():
            loss = model(*inputs(world))
            if is_time and how == "held":
                with model.no_sync():
                    loss.backward()
            elif not (is_time and how == "missing"):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


def differing(rank: int, world: int, port: int, what: str) -> None:
    """Make a module parallel, the last rank's of another kind; errors have a note of their times."""
    is_other = rank == world - 1
    seed, width, axis = 5, 6, "batch"
    if is_other and what == "seed":
        seed = 7
    if is_other and what == "model":
        width = 12
    if is_other and what == "splits":
        axis = "outputs"
    plan = plan_of(world, width, axis)
    if is_other and what == "order":
        plan = replace(plan, layers=tuple(replace(x, devices=x.devices[::-1]) for x in plan.layers))
    if is_other and what == "failing":
        width = 3
    compared_s: list[float] = []

    def compared(own: object) -> list[Any]:
        compared_s.append(time.monotonic())
        return told_by_all(own)

    with joined(rank, world, port, 200.0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "told_by_all", compared)
        try:
            pase.parallelize((Net(width), inputs(world)), plan, seed=seed)
        except Exception as error:
            error.add_note(f"compared at {compared_s[0]:.2f} s, told at {time.monotonic():.2f} s")
            raise
