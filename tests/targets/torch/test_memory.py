"""What is predicted that a rank keeps to the backward pass, beside what PyTorch's autograd keeps there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.targets.torch.parallel import parallelize
from tests.targets.torch.ranks import Pool
from tests.test_device_memory import device_memory


class Functions(nn.Module):
    """Functions of points behind products, each of which keeps its argument or its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 10), nn.Linear(10, 14), nn.Linear(14, 5, bias=False)

    def forward(self, x: Any) -> Any:
        return self.third(self.second(functional.gelu(self.first(x))).tanh())


class Residual(nn.Module):
    """A gated block with a scale of each feature, twice, around a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.up, self.gate = (nn.ModuleList(nn.Linear(8, 12) for _ in range(2)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(12, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        for norm, up, gate, down in zip(self.norms, self.up, self.gate, self.down, strict=True):
            y = norm(x)
            x = x + self.scale * down(functional.silu(gate(y)) * up(y))
        return x


class Pictures(nn.Module):
    """Convolutions of windows that need padding and of one point, normalised in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Any) -> Any:
        return self.last(functional.silu(self.norm(self.first(x))))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "functions": (Functions, (7, 6)),
    "residual": (Residual, (3, 5, 8)),
    "pictures": (Pictures, (2, 3, 8, 8)),
}


PADDING = {"pictures": 2 * 3 * (10 * 10 - 8 * 8) * 4}
"""Bytes around the inputs of convolutions, of which programs of layers keep a padded copy, and PyTorch's own none."""

NOT_SAVED = {"residual": 4 * 3 * 5 * 8, "pictures": 4 * 2 * 3 * 10 * 10}
"""Bytes of inputs that stay for the whole step, and that no backward pass needs as they come: a residual sum's, and one
of which a convolution's padded copy counts. Three examples are not split over two ranks."""


def kept_bytes(module: Any, batch: dict[str, Any]) -> int:
    """Return the bytes of all that autograd keeps, each storage once: numbers, no weights, masks and places."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in weights and tensor.is_floating_point() and tensor.ndim:
            kept[where] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(**batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _on_rank(_rank: int, _world: int, name: str, plan: pase.Plan) -> int:
    make, shape = CASES[name]
    batch = {"x": torch.randn(shape)}
    return kept_bytes(parallelize((make(), batch), plan, check=False), batch)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *(("functions", 1), ("residual", 2), ("pictures", 1)),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("functions", 2), ("residual", 1), ("pictures", 2))),
    ],
)
def test_what_is_kept_is_what_is_predicted(ranks: Pool, name: str, world: int) -> None:
    make, shape = CASES[name]
    graph = pase.load((make(), {"x": torch.randn(shape)}))
    plan = pase.evaluate(graph, "data_parallel", world)
    found = max(ranks.run(_on_rank, name, plan, world=world))
    not_saved = NOT_SAVED.get(name, 0) // (world if name == "pictures" else 1)
    assert found == device_memory(plan).kept - not_saved - PADDING.get(name, 0) // world


def memory_changes(step: Callable[[], Any]) -> list[int]:
    """Return what the allocator hands out, in bytes, and takes back, one after the other."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = step()
    assert profiled.profiler is not None
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    del kept
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
