"""Steps on a GPU that is not there: fake tensors on cuda:0, on one rank of a process group of up to 1,024 fake ones.

Fake tensors have a shape, a type and a device, and no values: whoever asks for some on the host raises an error, and so
does whoever computes with tensors of two devices. They need PyTorch's build for CUDA: `scripts/test -m fake_gpu`.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pase.graph import AllToAll, Graph
from pase.graph.precision import PRECISIONS
from pase.importers.torch.live import LiveModel, trace_live
from pase.planning.plan import Plan
from pase.targets.torch import module as module_of_plans
from pase.targets.torch.module import Parallel
from pase.targets.torch.states import local_of
from pase.targets.torch.values import from_tensors
from tests.runtime.plans import random_plan, split_along
from tests.targets.torch.modules import MODULES, Module, floats
from tests.targets.torch.plans import in_modes

pytestmark = [
    pytest.mark.fake_gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch is not built for CUDA: scripts/test -m fake_gpu"),
]

RANK, WORLDS = 1, (8, 64, 1024)
CARD = torch.device("cuda", 0)
EXPERTS = ("mixtral", "qwen2_moe")

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.convolution, _ATEN.convolution_backward}


class Watched(TorchDispatchMode):
    """Notes what a step computes elsewhere than on the card, and in which types.

    Attributes:
        elsewhere: Operators with a tensor on another device.
        products: A product in each of the types that products multiply in.
        types: Of all floats.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()
        self.products: dict[torch.dtype, str] = {}
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        tensors = [*read, *(x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor))]
        if any(x.device != CARD for x in tensors):
            self.elsewhere.add(f"{func} of {[(tuple(x.shape), str(x.device)) for x in tensors]}")
        self.types |= {x.dtype for x in tensors if x.is_floating_point()}
        # Not of one column by one row: modules compute the angles of rotary embeddings so, in float32.
        if func.overloadpacket in _PRODUCTS and read[0].shape[-1] > 1:
            self.products |= {x.dtype: f"{func} of {[(tuple(x.shape), x.dtype) for x in read]}" for x in read}
        return made


class OnCard(FakeTensorMode):
    """Makes tensors on the card that C++ would make on 'meta', see `backward_runs`."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == torch.device("meta"):
            kwargs["device"] = CARD
        return super().dispatch(func, types, args, kwargs)


def mode() -> OnCard:
    """What the module has as constants is on the CPU: it is found there if a step computes with it."""
    return OnCard(allow_non_fake_inputs=True)


@contextmanager
def backward_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have autograd's engine run without a driver of CUDA.

    It asks for the streams of the devices that it finds in C++; there a fake tensor is on 'meta' from here on, and on
    its device for Python and for the dispatcher.
    """
    make = torch.Tensor._make_subclass

    def made(cls: Any, *args: Any, dispatch_device: bool = False, **named: Any) -> Any:
        return make(cls, *args, dispatch_device=dispatch_device and cls is not FakeTensor, **named)

    with monkeypatch.context() as patched, torch.autograd.set_multithreading_enabled(False):
        patched.setattr(torch.Tensor, "_make_subclass", staticmethod(made))
        yield


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process find one GPU."""
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "current_device_index": 0,
        "current_accelerator": CARD,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    # Attention without a kernel of its own computes in float32 otherwise, whatever it is given.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    mesh_of = module_of_plans.mesh_of

    def mesh(*given: Any) -> Any:
        # It reads the numbers of its ranks.
        with unset_fake_temporarily():
            return mesh_of(*given)

    monkeypatch.setattr(module_of_plans, "mesh_of", mesh)
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


class Dropping(nn.Module):
    """Points that are dropped, and noise if it is asked for."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        y = self.drop(functional.gelu(self.first(x)))
        y = y + self.noise * torch.randn_like(y) if self.noise else y
        return self.last(y).square().mean()


NETWORKS = {
    **MODULES,
    "dropping": Module(make=lambda: Dropping(0.0), batch=lambda seed: floats(seed, "x", 8, 8)),
    "noisy": Module(make=lambda: Dropping(0.1), batch=lambda seed: floats(seed, "x", 8, 8)),
}


@cache
def traced(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any], LiveModel]:
    """Return a network with parameters of a type, a batch, and what plans are made of."""
    pytest.importorskip(NETWORKS[name].package)
    torch.manual_seed(0)
    module = NETWORKS[name].make().to(dtype).train()
    batch = {key: x.to(dtype) if x.is_floating_point() else x for key, x in NETWORKS[name].batch(0).items()}
    return module, batch, trace_live((module, batch))


def exchanged_along(graph: Graph) -> dict[str, str]:
    """Return the layers whose rows go to the rank of their expert, and the dim that splits the experts."""
    found = ((op.name, x) for op in graph.operators for x in op.exchanges)
    return {name: x.over[0] for name, x in found if isinstance(x, AllToAll)}


def plan_of(name: str, world: int, precision: str) -> Plan:
    """Return a random plan with states and layers that are recomputed; experts are not split.

    Devices are in order: groups of all layers in random orders would be some thousand.
    """
    policy = PRECISIONS[precision]
    graph = traced(name, getattr(torch, policy.parameters))[2].model.graph.in_precision(policy)
    plan, whole = random_plan(graph, world, seed=world), exchanged_along(graph)
    layers = (
        replace(
            layer,
            splits=dict.fromkeys(layer.splits, 1) if layer.name in whole else layer.splits,
            devices=tuple(range(world)),
        )
        for layer in plan.layers
    )
    return in_modes(replace(plan, layers=tuple(layers)), world)


def on_card(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return fake tensors like these on the card."""
    return {key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CARD) for key, x in tensors.items()}


def forward(name: str, plan: Plan) -> tuple[Watched, Any, Parallel]:
    """Return what a forward pass in training computes where, the loss, and the module under the plan."""
    module, batch, live = traced(name, getattr(torch, plan.precision.parameters))
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=plan.num_devices)
    values = on_card({**dict(module.named_buffers(remove_duplicate=False)), **module.state_dict()})
    parallel = Parallel(module, live, plan, rank=RANK, weights=from_tensors(values), seed=0)
    parallel.train()
    given, watched = on_card(batch), Watched()
    with watched:
        loss = NETWORKS[name].loss(parallel(**given))
    return watched, loss, parallel


ASKS = {
    **dict.fromkeys(
        product(EXPERTS, ["float32"]), "PyTorch multiplies rows by the matrices of their experts in bfloat16 alone"
    ),
    **dict.fromkeys(
        product(["noisy"], PRECISIONS),
        "operators that draw are seeded on the host, by a key on the CPU",
    ),
}
"""Why the host reads tensors in a step, by network and precision."""


def expected_to_ask(request: pytest.FixtureRequest, name: str, precision: str) -> None:
    if reason := ASKS.get((name, precision)):
        request.applymarker(pytest.mark.xfail(raises=DataDependentOutputException, reason=reason))


def check_types(watched: Watched, loss: Any, plan: Plan) -> None:
    policy = plan.precision
    parameters, products = (getattr(torch, dtype) for dtype in (policy.parameters, policy.products))
    assert watched.products.keys() <= {products}, watched.products
    # What is too delicate for 16 bits is computed in float32.
    assert watched.types <= {parameters, products, torch.float32}
    # That of some networks is computed outside of the module, of what it returns; others take it in float32 themselves.
    assert loss.dtype in {parameters, products, torch.float32}


@pytest.mark.parametrize(("precision", "world"), [*(("float32", world) for world in WORLDS), ("bf16", WORLDS[0])])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_stays_on_the_card(
    card: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str, precision: str, world: int
) -> None:
    """Forward and backward: all tensors on it, in the types of the plan, and nothing that the host waits for."""
    expected_to_ask(request, name, precision)
    plan = plan_of(name, world, precision)
    with backward_runs(monkeypatch), mode():
        watched, loss, parallel = forward(name, plan)
        with watched:
            loss.backward()
    assert not watched.elsewhere
    check_types(watched, loss, plan)
    for key, parameter in parallel.named_parameters():
        for x in (parameter, parameter.grad):
            if x is not None:
                assert (local_of(x).device, x.dtype) == (CARD, getattr(torch, plan.precision.gradients)), key


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_in_the_low_type_of_mixed_precision(
    card: None, request: pytest.FixtureRequest, name: str, world: int
) -> None:
    """In the forward pass: autocast goes by the device of C++, which is another one where the backward pass runs."""
    expected_to_ask(request, name, "bf16-mixed")
    plan = plan_of(name, world, "bf16-mixed")
    with mode():
        watched, loss, _ = forward(name, plan)
    assert not watched.elsewhere
    check_types(watched, loss, plan)


@pytest.mark.xfail(
    raises=(DataDependentOutputException, DynamicOutputShapeException),
    reason="ranks have to know on the host how many rows they send each other",
)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_are_split_do_not_ask_the_host(card: None, name: str) -> None:
    plan = plan_of(name, 8, "bf16-mixed")
    with mode():
        forward(name, split_along(plan, exchanged_along(plan.graph)))


class Astray(torch.autograd.Function):
    """Computes on the CPU in its backward pass."""

    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, dy: Any) -> Any:
        return dy * torch.ones(())


def test_what_leaves_the_card_is_noticed(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with backward_runs(monkeypatch), mode(), Watched() as watched:
        x = torch.ones(4, device=CARD, requires_grad=True)
        loss = Astray.apply(x).sum()
        assert not watched.elsewhere
        loss.backward()
        assert len(watched.elsewhere) == 2, watched.elsewhere
        with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):
            loss.item()
