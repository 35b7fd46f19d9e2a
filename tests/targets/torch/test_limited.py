"""A model that fits the memory of its processes with weights in pieces and recomputation, and not without either."""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.planning.plan import Plan
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import data_parallel_plan
from tests.targets.torch.ranks import Pool, RanksFailedError

WORLD, WIDTH, DEPTH, ROWS = 4, 512, 24, 2048
MODES = {
    "replicated, kept": ("replicated", False),
    "zero3, kept": ("zero3", False),
    "replicated, recomputed": ("replicated", True),
    "zero3, recomputed": ("zero3", True),
}


class Deep(nn.Module):
    """Products of which three tensors each are kept for the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(DEPTH))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(functional.gelu(layer(x)))
        return x.square().mean()


def _given(width: int, rows: int = ROWS) -> tuple[nn.Module, dict[str, Any]]:
    """A module without values, of which each rank draws its own parts."""
    with torch.device("meta"):
        module = Deep(width)
    return module, {"x": torch.ones(rows, width) / 8}


def _plan(modes: str, width: int = WIDTH) -> Plan:
    """Data parallelism in modes; runs of four products are recomputed."""
    state, is_recomputed = MODES[modes]
    plan = replace(data_parallel_plan(pase.load(_given(width)), WORLD), optimiser="adamw")
    products = [position for position, layer in enumerate(plan.layers) if layer.kind == "dense"]
    last = plan.graph.index[next(operator.name for operator in plan.graph.operators if operator.kind == "reduction")]
    begins = {*products[::4], *range(last, len(plan.layers))}
    layers = (
        replace(layer, state=state, is_recomputed=is_recomputed and position not in begins)
        for position, layer in enumerate(plan.layers)
    )
    return replace(plan, layers=tuple(layers))


@contextmanager
def _within(size: int) -> Iterator[None]:
    """Have this process no more than so many bytes of memory of its own beside what it has now."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(line.split()[1]) * 1024 + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _trained(_rank: int, _world: int, modes: str, limit: int | None) -> list[float]:
    # Each tensor has pages of its own, which go back to the system when it is freed.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    # Process groups, threads and what libraries work with are there before.
    _steps(parallelize(_given(64), _plan(modes, 64), check=False), 64)
    with _within(limit) if limit else _within(2**40):
        return _steps(parallelize(_given(WIDTH), _plan(modes), check=False), WIDTH)


def _steps(module: Any, width: int) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    low, high = module.inputs()["x"][0]
    x, losses = _given(width, high - low)[1], []
    for _ in range(2):
        loss = module(**x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are Linux's")
def test_a_model_fits_with_weights_in_pieces_and_recomputation_alone(ranks: Pool) -> None:
    """The limit is two fifths above the peak that is predicted with both, and below that with either."""
    peaks = {modes: _plan(modes).peak.bytes for modes in MODES}
    least = peaks.pop("zero3, recomputed")
    limit = int(1.4 * least)
    assert min(peaks.values()) > limit
    expected = ranks.run(_trained, "replicated, kept", None, world=WORLD)[0]
    assert expected[1] < expected[0]
    for losses in ranks.run(_trained, "zero3, recomputed", limit, world=WORLD):
        assert losses == pytest.approx(expected, rel=1e-5)
    for modes in peaks:
        with pytest.raises(RanksFailedError, match="can't allocate memory"):
            ranks.run(_trained, modes, limit, world=WORLD)
