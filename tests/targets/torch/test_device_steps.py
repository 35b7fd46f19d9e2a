"""What a step does on its device: the host does not wait, tensors are made there, and none for inputs of others."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pase
from pase.errors import ProgramError
from pase.importers.torch.live import trace_live
from pase.planning.plan import Plan
from pase.targets.torch.layers import grouped, routed
from pase.targets.torch.layers.experts import rows_of_groups
from pase.targets.torch.module import Parallel
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.program import Program
from pase.targets.torch.tensor import Dim, Tensor, reshard
from pase.targets.torch.values import from_tensors
from tests.runtime.plans import data_parallel_plan, make_plan
from tests.targets.torch.plans import with_states
from tests.targets.torch.ranks import Pool

# -- the host does not wait


def _traced(build: Any) -> Any:
    """Return the graph of a program of one rank, that of evaluation."""
    program = Program(rank=0, num_devices=1, trains=False)
    return program.traced(None, build(program))


def test_experts_that_are_not_split_are_multiplied_without_the_host() -> None:
    """A fake tensor has no values, so that whoever asks for some of the host raises an error."""
    group, row, column, feature = Dim("e", 4), Dim("r", 6), Dim("m", 8), Dim("f", 8)
    rows, width = Dim("rows", 24), Dim("width", 8)

    def experts(program: Program) -> dict[str, Tensor]:
        mesh = program.mesh("experts", [])
        x = program.weight(mesh, "x", (group, row, feature))
        w = program.weight(mesh, "w", (group, column, feature))
        ends = reshard(program.indices("ends", [4], below=25), mesh, [Dim("ends", 4)])
        return {"y": grouped(x, w, ends, (group, row, column, feature))}

    def dispatch(program: Program) -> dict[str, Tensor]:
        mesh = program.mesh("dispatch", [])
        table = program.weight(mesh, "table", (rows, width))
        places = reshard(program.indices("places", [24], below=24), mesh, [Dim("places", 24)])
        return {"y": routed(table, places, [Dim("places", 24)], [rows])}

    values = {
        "weight x": torch.zeros(4, 6, 8, dtype=torch.bfloat16),
        "weight w": torch.zeros(4, 8, 8, dtype=torch.bfloat16),
        "weight table": torch.zeros(24, 8),
        "input ends": torch.tensor([6, 12, 18, 24]),
        "input places": torch.arange(24),
    }
    for build, shape in ((experts, (4, 6, 8)), (dispatch, (24, 8))):
        traced = _traced(build)
        with FakeTensorMode() as mode:
            given = [mode.from_tensor(values[name]) for name in traced.arguments]
            _, (found,), _ = traced.module(*given)
        assert tuple(found.shape) == shape
    # PyTorch has no such product of float64, whose rows the host has to divide.
    doubles = (torch.zeros(24, 8).double(), torch.zeros(4, 8, 8).double(), torch.tensor([6, 12, 18, 24]))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in doubles]
        with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
            rows_of_groups(*fakes)


# -- on the device


class Dropping(nn.Module):
    """A padded mean of windows, and points that are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.5), nn.Linear(64, 1)

    def forward(self, x: Any) -> Any:
        y = functional.avg_pool2d(self.first(x), 3, 2, padding=1, count_include_pad=False)
        return self.last(self.drop(y.flatten(1))).square().mean()


def _kept(_rank: int, _world: int) -> set[str]:
    torch.manual_seed(0)
    module, x = Dropping(), torch.randn(4, 2, 8, 8)
    # The layers' own functions, which hold what they need in buffers.
    live = replace(trace_live((module, {"x": x})), graphs={})
    values = from_tensors(module.state_dict())
    parallel = Parallel(module, live, make_plan(live.model.graph, 1, {}), rank=0, weights=values, seed=0)
    # In place of a GPU.
    parallel._device = torch.device("meta")
    mode = parallel._mode(False)
    training = parallel._mode(True)
    (key,) = (get for get, name in zip(training.given, training.traced.arguments, strict=True) if name == "mask_key")
    buffers = list(mode.traced.module.buffers())
    assert buffers
    return {key({}).device.type, *(own.device.type for own in buffers)}


def test_what_a_program_keeps_and_the_key_of_its_masks_are_on_its_device(ranks: Pool) -> None:
    assert ranks.run(_kept, world=1) == [{"meta"}]


# -- inputs


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple) else (made,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return made


class Images(nn.Module):
    """Images, and what is told of each in some numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 16 * 16, 8)

    def forward(self, images: Any, targets: Any) -> Any:
        return (self.layer(images.flatten(1)) - targets).square().mean()


BATCH = 64


def _images() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Images(), {"images": torch.randn(BATCH, 3, 16, 16), "targets": torch.randn(BATCH, 8)}


def _stepped(_rank: int, _world: int, plan: Plan, has_all: bool) -> tuple[int, float, Any]:
    """Return the bytes of the largest tensor that a step makes, its loss and the gradient."""
    module, batch = _images()
    parallel = parallelize((module, batch), plan, check=False)
    boxes = {name: tuple(slice(*along) for along in box) for name, box in parallel.inputs().items()}
    given = batch if has_all else {name: x[boxes[name]].clone() for name, x in batch.items()}
    with Largest() as watched:
        loss = parallel(**given)
    loss.backward()
    return watched.largest, loss.item(), parallel.get_parameter("layer.weight").grad.clone()


@pytest.mark.parametrize("has_all", [False, True])
def test_a_rank_makes_no_tensor_of_the_size_of_the_batch(ranks: Pool, has_all: bool) -> None:
    module, batch = _images()
    plan = data_parallel_plan(pase.load((module, batch)), 4)
    loss = module(**batch)
    loss.backward()
    for largest, found, gradient in ranks.run(_stepped, plan, has_all, world=4):
        # A rank's part of the images, or all of them where they are given.
        assert largest <= batch["images"].nbytes // (1 if has_all else 4)
        assert found == pytest.approx(loss.item(), rel=1e-6)
        torch.testing.assert_close(gradient, module.layer.weight.grad)


# -- compiled


def _compiled(_rank: int, _world: int, plan: Plan) -> str:
    module, batch = _images()
    parallel = parallelize((module, batch), plan, check=False)
    compiled = torch.compile(parallel, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|.*should not be instantiated")
        with torch.no_grad():
            compiled(**batch)
        with pytest.raises(ProgramError) as raised:
            compiled(**batch)
    return str(raised.value)


def test_a_compiled_module_that_would_keep_gathered_weights_is_refused(ranks: Pool) -> None:
    plan = with_states(data_parallel_plan(pase.load(_images()), 2), "zero3")
    for text in ranks.run(_compiled, plan, world=2):
        assert text == (
            "layer 'layer' is zero3, and a compiled graph would keep its whole weights until the backward pass: train "
            "without torch.compile, or search for a plan that recomputes such layers, or with another state (zero2)"
        )
