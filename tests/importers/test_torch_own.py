"""What bodies say that PyTorch alone computes is what the module computes; what such a plan may not say is refused."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pase.errors import GraphError, PaseError  # noqa: E402
from pase.graph.body import Body, InnerDim, Step, verify_body  # noqa: E402
from pase.importers.torch.live import trace_live  # noqa: E402
from pase.targets.programs import emit  # noqa: E402
from pase.targets.torch.layers.experts import rows_of_groups  # noqa: E402
from pase.targets.torch.layers.points import source  # noqa: E402
from pase.targets.torch.parallel import parallelize  # noqa: E402
from tests.runtime.plans import random_plan  # noqa: E402
from tests.targets.torch.equality import check, compared, difference, full  # noqa: E402
from tests.targets.torch.ranks import Pool  # noqa: E402

F = torch.nn.functional


def random(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def whole(below: int, *shape: int) -> Any:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(below))


class Projected(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(3, 16)
        self.lstm = torch.nn.LSTM(8, 8, 2, batch_first=True, proj_size=3)

    def forward(self, x: Any, y: Any) -> Any:
        found, _ = self.lstm(self.table(x))
        return F.cross_entropy(self.head(found).flatten(0, 1), y.flatten())


class Resized(torch.nn.Module):  # type: ignore[misc]
    """Padding by reflection, another resolution, a roll, a cumulative sum, a mask that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: Any, mask: Any) -> Any:
        x = F.interpolate(F.pad(self.layer(x), (1, 1, 1, 1), mode="reflect"), size=(5, 7), mode="bilinear")
        x = torch.roll(x, 2, dims=3).cumsum(2) * (mask > 0).to(x.dtype)[:, None, None, None]
        return x.square().mean()


OWN: Mapping[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "projected": lambda: (Projected(), {"x": whole(16, 4, 6), "y": whole(15, 4, 6)}),
    "resized": lambda: (Resized(), {"x": random(4, 3, 8, 8), "mask": torch.tensor([1, 0, 1, 1])}),
}


@pytest.mark.parametrize("name", ["mixtral", *(pytest.param(n, marks=pytest.mark.full) for n in ("swin", "t5"))])
def test_models_of_transformers_train_as_by_themselves(ranks: Pool, name: str) -> None:
    """The others that people train, under more strategies, are in tests/targets/torch."""
    pytest.importorskip("transformers")
    check(ranks.run(compared, "random", name, (0,), world=2))


def beside(_rank: int, world: int, name: str) -> list[float]:
    """Return how a module's loss and gradients under a random plan differ from those that it has by itself."""
    torch.manual_seed(0)
    module, inputs = OWN[name]()
    own = copy.deepcopy(module.double())
    parallel = parallelize((module, inputs), random_plan(trace_live((module, inputs)).model.graph, world, 0))
    losses = [each(**inputs) for each in (parallel, own)]
    for loss in losses:
        loss.backward()
    pairs = zip(parallel.parameters(), own.parameters(), strict=True)
    return [difference(*losses), *(difference(full(one.grad), other.grad) for one, other in pairs)]


@pytest.mark.parametrize("name", OWN)
def test_modules_compute_what_they_do_by_themselves(ranks: Pool, name: str) -> None:
    for found in ranks.run(beside, name, world=2):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize("name", OWN)
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
