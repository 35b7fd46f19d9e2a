"""What bodies say that PyTorch alone computes is what the module computes: losses and gradients, in float64."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pase.errors import GraphError, PaseError  # noqa: E402
from pase.graph.body import Body, InnerDim, Step, verify_body  # noqa: E402
from pase.importers.torch.live import trace_live  # noqa: E402
from pase.targets.emitter import emit  # noqa: E402
from pase.targets.torch.layers.experts import rows_of_groups  # noqa: E402
from pase.targets.torch.layers.source import source  # noqa: E402
from tests.importers.architectures import _DECODER, ARCHITECTURES, _of_transformers  # noqa: E402
from tests.importers.torch_reference import computed  # noqa: E402
from tests.runtime.plans import random_plan  # noqa: E402

F = torch.nn.functional
Made = tuple[Any, dict[str, Any]]


def random(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def whole(below: int, *shape: int) -> Any:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(below))


def of_transformers(name: str) -> Made:
    makes = {
        **ARCHITECTURES["transformers"],
        "qwen2_moe": _of_transformers(
            "Qwen2MoeConfig",
            "Qwen2MoeForCausalLM",
            {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
             "shared_expert_intermediate_size": 32},
            "tokens", "next",
        ),
    }  # fmt: skip
    module, inputs, more = makes[name](4)
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")
    given = {key: random(*x.shape) if x.is_floating_point() else x.clone() for key, x in inputs.items()}
    if given["labels"].dim() == 2:
        given["labels"][0, 3:] = -100
    return module, given | more


class Recommender(torch.nn.Module):  # type: ignore[misc]
    """Bags of rows of tables, products of all pairs of what they give, a binary cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleList(torch.nn.EmbeddingBag(n, 8, mode="sum") for n in (20, 30))
        self.bottom, self.top = torch.nn.Linear(6, 8), torch.nn.Linear(11, 1)

    def forward(self, x: Any, first: Any, second: Any, targets: Any) -> Any:
        dense = self.bottom(x).relu()
        rows = torch.stack([dense, *(bag(i) for bag, i in zip(self.bags, (first, second), strict=True))], dim=1)
        pairs = rows @ rows.transpose(1, 2)
        i, j = torch.tensor([1, 2, 2]), torch.tensor([0, 0, 1])
        return F.binary_cross_entropy_with_logits(
            self.top(torch.cat([dense, pairs[:, i, j]], dim=1)).squeeze(1), targets
        )


class Projected(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(3, 16)
        self.lstm = torch.nn.LSTM(8, 8, 2, batch_first=True, proj_size=3)

    def forward(self, x: Any, y: Any) -> Any:
        found, _ = self.lstm(self.table(x))
        return F.cross_entropy(self.head(found).flatten(0, 1), y.flatten())


class UNet(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.up = torch.nn.GroupNorm(4, 8), torch.nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Any, y: Any) -> Any:
        wide = F.silu(self.norm(self.down(x)))
        narrow = F.silu(self.mid(F.max_pool2d(wide, 2)))
        smooth = F.interpolate(narrow, scale_factor=2, mode="nearest")
        return F.mse_loss(self.up(torch.cat([smooth, wide], dim=1)), y)


class Resized(torch.nn.Module):  # type: ignore[misc]
    """Padding by reflection, another resolution, a roll, a cumulative sum, a mask that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: Any, mask: Any) -> Any:
        x = F.interpolate(F.pad(self.layer(x), (1, 1, 1, 1), mode="reflect"), size=(5, 7), mode="bilinear")
        x = torch.roll(x, 2, dims=3).cumsum(2) * (mask > 0).to(x.dtype)[:, None, None, None]
        return x.square().mean()


OWN: Mapping[str, Callable[[], Made]] = {
    "recommender": lambda: (
        Recommender(),
        {"x": random(4, 6), "first": whole(20, 4, 3), "second": whole(30, 4, 3), "targets": random(4).sigmoid()},
    ),
    "projected": lambda: (Projected(), {"x": whole(16, 4, 6), "y": whole(15, 4, 6)}),
    "unet": lambda: (UNet(), {"x": random(4, 3, 8, 8), "y": random(4, 3, 8, 8)}),
    "resized": lambda: (Resized(), {"x": random(4, 3, 8, 8), "mask": torch.tensor([1, 0, 1, 1])}),
}
QUICK = ("mixtral", "t5", "swin")
OTHERS = ("llama", "bert", "vit", "whisper", "gptj", "segformer", "wav2vec2", "qwen2_moe")


@pytest.mark.parametrize(
    "name",
    [
        *OWN,
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS),
    ],
)
def test_bodies_compute_what_the_module_computes(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = OWN[name]() if name in OWN else of_transformers(name)
    module = module.double().eval()
    live = trace_live((module, inputs))
    expected = module(**inputs)
    found = computed(live, module, live.call.bound((), inputs))
    losses = [x if isinstance(x, torch.Tensor) else x.loss for x in (expected, found)]
    assert type(found) is type(expected)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    own, others = (torch.autograd.grad(loss, weights, allow_unused=True) for loss in losses)
    largest = max(float(g.abs().max()) for g in own if g is not None)
    for one, other in zip(own, others, strict=True):
        if one is not None and other is not None:
            # Some are zero but for rounding (those of a bias of keys).
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12 * largest)
        else:
            assert all(g is None or not g.any() for g in (one, other))


@pytest.mark.parametrize("name", ["projected", "resized"])
def test_other_targets_say_what_they_cannot_write(name: str) -> None:
    module, inputs = OWN[name]()
    plan = random_plan(trace_live((module.double(), inputs)).model.graph, 2, 0)
    assert "source(" in emit(plan, target="torch")
    with pytest.raises(PaseError, match=r"cannot be written as a program: aten\."):
        emit(plan, target="mesh_tensorflow")


# -- hostile plans


def call(operator: str, arguments: str = '[[{"operand": 0}], {}]', layouts: str = '[[["b"]], [["b"]]]') -> Step:
    options = (("operator", operator), ("arguments", arguments), ("layouts", layouts), ("number", 0))
    return Step(result="t1", function="source", operands=("x",), dims=("b",), options=options)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (call("aten.relu_.default"), "expected an operator of PyTorch's 'aten'"),
        (call("os.system.default"), "expected an operator of PyTorch's 'aten'"),
        (call("aten.from_file.default", '[["/etc/passwd", {"module": "os"}], {}]'), "arguments that cannot be read"),
        (replace(call("aten.from_file.default"), operands=()), "has 0 operands"),
        (call("aten.relu.default", '[[{"operand": 3}], {}]'), "arguments that cannot be read"),
        (call("aten.relu.default", "[" * 3000), "arguments that cannot be read"),
        (call("aten.relu.default", layouts='[[["q"]], [["b"]]]'), "names dims"),
    ],
)
def test_a_hostile_call_is_refused_where_a_plan_is_read(step: Step, message: str) -> None:
    body = Body(steps=(step,))
    with pytest.raises(GraphError, match=message):
        verify_body(body, layer="l", reads=["x"], dims=("b",))
    with pytest.raises(GraphError, match=message):
        verify_body(Body(own=body), layer="l", reads=["x"], dims=("b",))
    verify_body(Body(steps=(call("aten.relu.default"),)), layer="l", reads=["x"], dims=("b",))


def test_a_body_within_the_own_body_is_refused() -> None:
    inner = Body(inner=(InnerDim(name="i1", extent=2),))
    with pytest.raises(GraphError, match="has another one in it"):
        verify_body(Body(own=replace(inner, own=inner)), layer="l", reads=["x"], dims=("b",))


@pytest.mark.parametrize(
    "operator", ["aten.from_file.default", "aten.rand_like.default", "aten.add.out", "aten.no_such.default"]
)
def test_an_operator_that_is_no_pure_function_is_refused(operator: str) -> None:
    with pytest.raises(PaseError, match=r"no function of its operands alone|has no operator"):
        source(operator, [], json.dumps([[], {}]), [[]])


def test_rows_of_groups_are_those_of_one_product_for_each() -> None:
    rows, weights, ends = random(12, 5), random(4, 6, 5), torch.tensor([2, 2, 9, 11])
    expected = torch.stack([
        weights[int((ends > i).nonzero()[0])] @ rows[i] if i < 11 else torch.zeros(6, dtype=torch.float64)
        for i in range(12)
    ])  # fmt: skip
    torch.testing.assert_close(rows_of_groups(rows, weights, [2, 0, 7, 2]), expected)
