"""Modules and programs in the types of a plan: beside the unmodified module under autocast, bytes by type."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.errors import EmitError
from pase.graph import uniform
from pase.planning.plan import Plan
from pase.sharding.traffic import Movement, bytes_by_movement, flows
from pase.targets.programs import emit
from pase.targets.torch.parallel import parallelize
from pase.targets.training.options import TrainingOptions
from tests.networks import small_plan
from tests.runtime.plans import make_plan, random_plan
from tests.targets.torch.equality import full
from tests.targets.torch.modules import Language, floats, words
from tests.targets.torch.ranks import Pool, RanksFailedError
from tests.targets.torch.trained import between_layers, events


class Picture(nn.Module):
    """Convolutions with a bias and without, normalisation by batches, a pooling; the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Linear(8, 4)

    def forward(self, x: Any, targets: Any) -> Any:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        return functional.cross_entropy(self.head(self.second(x).mean((2, 3))), targets)


class Rows(nn.Module):
    """Products whose features are summed in parts, with a bias; a softmax, powers, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.second(functional.gelu(self.first(x))))
        return (x.softmax(-1) * x.exp()).sum() / 64


def _pictures(seed: int) -> dict[str, Any]:
    return floats(seed, "x", 8, 3, 8, 8) | {"targets": torch.arange(8) % 4}


CASES = {
    "language": (Language, lambda seed: words(seed, "words", "targets")),
    "picture": (Picture, _pictures),
    "rows": (Rows, lambda seed: floats(seed, "x", 8, 16)),
}


def _made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    make, batch = CASES[name]
    return make().float(), {k: x.float() if x.is_floating_point() else x for k, x in batch(0).items()}


def _loss(found: Any) -> Any:
    return found["loss"] if isinstance(found, dict) else found


def _graph(name: str) -> Any:
    return pase.load(_made(name))


def _step(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    module, batch = _made(name)
    module.to(getattr(torch, plan.precision.parameters))
    batch = {k: x.to(next(module.parameters()).dtype) if x.is_floating_point() else x for k, x in batch.items()}
    parallel = parallelize((module, batch), plan)
    parallel.traffic.is_counted = True
    loss = _loss(parallel(**batch))
    loss.backward()
    held = {own for own, _ in parallel.named_parameters()}
    sent = {own: size for own, size in parallel.traffic.sent.items() if own.producer not in held}
    return (
        loss.item(),
        {own: full(p.grad).float() for own, p in parallel.named_parameters()},
        {p.grad.dtype for p in parallel.parameters()},
        {own: size for own, size in sent.items() if own.consumer != "the model"},
    )


def _alone(name: str, dtype: torch.dtype | None) -> tuple[float, dict[str, Any]]:
    """Return what the unmodified module finds under autocast, without a type in float32."""
    module, batch = _made(name)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = _loss(module(**batch))
    loss.backward()
    return loss.item(), {own: p.grad for own, p in module.named_parameters()}


def _predicted(plan: Plan) -> dict[Movement, int]:
    return {movement: size for movement, size in bytes_by_movement(flows(plan)).items() if size}


@pytest.mark.parametrize(
    ("name", "world", "seed", "precision"),
    [
        *(("language", 2, 0, "fp16-mixed"), ("picture", 2, 2, "bf16-mixed"), ("rows", 4, 1, "bf16-mixed")),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *(("language", 2, 0, "bf16-mixed"), ("picture", 2, 2, "fp16-mixed"), ("rows", 4, 1, "fp16-mixed")),
            )
        ),
    ],
)
def test_a_module_trains_as_under_autocast(ranks: Pool, name: str, world: int, seed: int, precision: str) -> None:
    plan = random_plan(_graph(name).in_precision(precision), world, seed)
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    tolerance = 4 * torch.finfo(dtype).eps
    (loss, gradients), (_, exact) = _alone(name, dtype), _alone(name, None)
    found = ranks.run(_step, name, plan, world=world)
    sent: Counter[Movement] = Counter()
    for own_loss, own, dtypes, of_rank in found:
        assert own_loss == pytest.approx(loss, rel=tolerance)
        assert dtypes == {torch.float32}
        size = max(float(x.norm()) for x in exact.values())
        for key, expected in exact.items():
            # As far from float32 as autocast is by itself, but for the order of roundings.
            rounding = float((gradients[key] - expected).norm())
            assert (own[key] - expected).norm() < 2 * rounding + tolerance * size, key
        sent.update(of_rank)
    assert {own: size for own, size in sent.items() if size} == _predicted(plan)


@pytest.mark.parametrize("name", ["rows", pytest.param("picture", marks=pytest.mark.full)])
def test_a_module_in_bf16_sends_half(ranks: Pool, name: str) -> None:
    graph = _graph(name)
    plan = random_plan(graph.in_precision("bf16"), 2, 3)
    found = ranks.run(_step, name, plan, world=2)
    sent: Counter[Movement] = Counter()
    for _, _, dtypes, of_rank in found:
        assert dtypes == {torch.bfloat16}
        sent.update(of_rank)
    assert {own: size for own, size in sent.items() if size} == _predicted(plan)
    assert found[0][0] == pytest.approx(_alone(name, torch.bfloat16)[0], rel=0.05)


def _wide(_rank: int, _world: int, plan: Plan) -> None:
    module, batch = _made("rows")
    parallelize((module, batch), plan)


def test_a_module_of_wider_weights_than_the_plans_is_refused(ranks: Pool) -> None:
    plan = make_plan(_graph("rows").in_precision("bf16"), 1, {})
    with pytest.raises(AssertionError, match=r"the plan is of bf16, .* 'first.weight' is float32: give module"):
        ranks.run(_wide, plan, world=1)


def test_what_no_program_computes_in_is_refused() -> None:
    plan = make_plan(_graph("rows"), 1, {})
    eight = replace(plan, graph=plan.graph.in_precision("fp8-mixed"))
    with pytest.raises(EmitError, match=r"do not compute in the types of the plan, fp8-mixed .*bf16-mixed"):
        emit(eight, target="torch")
    masters = replace(plan.graph.in_precision("bf16").precision, masters="float32")
    with pytest.raises(EmitError, match=r"do not compute in the types of the plan, bf16 .*masters float32"):
        emit(replace(plan, graph=plan.graph.in_precision(masters)), target="torch")


def test_programs_say_their_types() -> None:
    plan = make_plan(_graph("rows"), 1, {})
    assert "types" not in emit(plan, target="torch")
    mixed = replace(plan, graph=plan.graph.in_precision("bf16-mixed"))
    assert 'program.types(weights="float32", products="bfloat16")' in emit(mixed, target="torch").replace("'", '"')
    built = small_plan("mlp", 2)
    text = emit(replace(built, graph=built.graph.in_precision("bf16-mixed")), target="mesh_tensorflow")
    assert "program.types" not in text
    assert "numbers are float32 (--dtype float64: float64), not in the types of the plan, bf16-mixed" in text


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_a_program_runs_in_the_types_of_its_plan(ranks: Pool, precision: str) -> None:
    plan = random_plan(_graph("rows").in_precision(precision), 2, 3)
    source, alone = (emit(each, target="torch") for each in (plan, make_plan(plan.graph, 1, {})))
    wide = replace(plan, graph=plan.graph.in_precision(uniform("float64")))
    for dtype, tolerance, sent in (("float32", 0.02, _predicted(plan)), ("float64", 1e-12, _predicted(wide))):
        given = TrainingOptions(steps=2, dtype=dtype)
        expected = ranks.run(events, alone, given, world=1)[0][-1]["losses"]
        found = ranks.run(events, source, given, True, world=2)[0]
        assert found[-1]["losses"] == pytest.approx(expected, rel=tolerance)
        (done,) = (event for event in found if event["event"] == "done")
        assert between_layers(done, plan) == sum(sent.values()) > 0


def test_a_program_does_not_scale_losses(ranks: Pool) -> None:
    source = emit(make_plan(_graph("rows").in_precision("fp16-mixed"), 1, {}), target="torch")
    with pytest.raises(RanksFailedError, match=r"products in float16 need a loss that is scaled"):
        ranks.run(events, source, TrainingOptions(steps=1), world=1)
