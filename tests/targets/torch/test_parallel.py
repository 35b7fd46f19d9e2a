"""`parallelize`: modules of PyTorch under random plans, on ranks, against the unmodified module in one process."""

import builtins
import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

import pase
from pase.errors import ModelError, ProgramError
from pase.planning.plan import Plan
from pase.targets.emitter.statements import Function
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import random_plan
from tests.targets.torch.equality import assert_close, full
from tests.targets.torch.modules import MODULES, made
from tests.targets.torch.plans import in_stages
from tests.targets.torch.ranks import Pool
from tests.targets.torch.watched import Net, inputs, plan_of

LANGUAGE, GPT, PICTURE = (MODULES[name] for name in ("nanogpt", "gpt", "picture"))


def _evaluated(_rank: int, _world: int, plan: Plan) -> Any:
    module = made("picture")
    parallel = parallelize((copy.deepcopy(module), PICTURE.batch(0)), plan)
    for each in (module, parallel):
        each(**PICTURE.batch(1))
        each.eval()
    with torch.no_grad():
        return module(**PICTURE.batch(2)), parallel(**PICTURE.batch(2))


def test_evaluation_is_by_the_statistics_that_training_kept(ranks: Pool) -> None:
    plan = random_plan(pase.load((made("picture"), PICTURE.batch(0))), 2, 5)
    for expected, found in ranks.run(_evaluated, plan, world=2):
        assert_close(found, expected, "outputs")


@contextmanager
def _without_text() -> Iterator[None]:
    """Refuse PaSE to write the functions of a program, to compile anything and to execute it; PyTorch may."""

    def refused(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].partition(".")[0] == "pase":
                raise AssertionError(f"{function.__name__} of {args[0]!r}")
            return function(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patched:
        for name in ("compile", "eval", "exec"):
            patched.setattr(builtins, name, refused(getattr(builtins, name)))
        patched.setattr(Function, "lines", lambda _: pytest.fail("text is written"))
        yield


def _trained_without_text(_rank: int, _world: int, plan: Plan) -> list[float]:
    with _without_text():
        parallel = parallelize((made("cnn"), MODULES["cnn"].batch(0)), plan)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        losses = []
        for seed in (1, 1):
            optimizer.zero_grad()
            losses.append(float(parallel.accumulate(**MODULES["cnn"].batch(seed))))
            optimizer.step()
        with pytest.raises(pytest.fail.Exception, match="text is written"):
            _ = parallel.program
    assert "program.mesh(" in parallel.program
    return losses


@pytest.mark.parametrize("in_a_pipeline", [False, True])
def test_a_module_trains_without_text_of_a_program(in_a_pipeline: bool, ranks: Pool) -> None:
    graph = pase.load((made("cnn"), MODULES["cnn"].batch(0)))
    plan = in_stages(graph, 2, 2, 1, "1f1b", 1) if in_a_pipeline else random_plan(graph, 2, 1)
    module = made("cnn")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for seed in (1, 1):
        optimizer.zero_grad()
        loss = module(**MODULES["cnn"].batch(seed))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found in ranks.run(_trained_without_text, plan, world=2):
        assert found == pytest.approx(losses, rel=1e-12)


class Named(nn.Module):
    """Its names are those of attributes that what `parallelize` returns has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.notes = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.traffic = nn.Sequential(nn.BatchNorm1d(8))
        self.plan = nn.Parameter(torch.randn(4))

    def forward(self, x: Any) -> Any:
        return (self.notes(functional.relu(self.traffic(self.inputs(x)))) * self.plan).square().sum()


def _from_other_seeds(rank: int, _world: int, plan: Plan) -> Any:
    torch.manual_seed(rank)
    module, batch = Named(), {"x": torch.ones(8, 4)}
    parallel = parallelize((module, batch), plan)
    begun = parallel.full_state_dict(on_all=True)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(**batch).backward()
    optimizer.step()
    assert parallel.plan is plan
    assert all(p.grad is not None for p in parallel.parameters())
    # What torch.distributed.checkpoint is given to save, and loads.
    model, slots = get_state_dict(parallel, optimizer)
    assert list(model) == list(begun) == list(parallel.state_dict())
    assert set(slots["state"]) == {name for name, _ in parallel.named_parameters()}
    assert model["traffic.0.num_batches_tracked"] == 1
    set_state_dict(parallel, optimizer, model_state_dict=model, optim_state_dict=slots)
    return module.state_dict(), begun


def test_training_starts_from_the_values_of_rank_0_whatever_they_are_called(ranks: Pool) -> None:
    plan = random_plan(pase.load((Named(), {"x": torch.ones(8, 4)})), 2, 3)
    answers = ranks.run(_from_other_seeds, plan, world=2)
    expected = answers[0][0]
    assert not torch.equal(answers[1][0]["plan"], expected["plan"])
    for _, found in answers:
        assert list(found) == list(expected)
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def _steps(module: nn.Module, step: Any) -> tuple[list[float], dict[str, Any]]:
    """Return losses and the first gradients of some steps; step: what computes the module."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-5)
    losses, first = [], dict[str, Any]()
    for seed in range(3):
        loss = PICTURE.loss(step(**PICTURE.batch(seed)))
        loss.backward()
        first = first or {name: full(p.grad).clone() for name, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def _by_adafactor(_rank: int, world: int, axis: str) -> None:
    model = pase.parallelize((Net(), inputs(world)), plan_of(world, axis=axis))
    optimizer = torch.optim.Adafactor(model.parameters())
    before = {name: value.clone() for name, value in model.full_state_dict(on_all=True).items()}
    model(*inputs(world)).backward()
    if axis == "batch":
        optimizer.step()
        return
    with pytest.raises(
        ProgramError,
        match=r"torch\.optim\.Adafactor takes means over rows and columns in place, which PyTorch does not do for "
        r"split parameters, here one of shape \[6, 6\] as .*: use pase\.targets\.torch\.optimizers\.Adafactor, which",
    ):
        optimizer.step()
    for name, value in model.full_state_dict(on_all=True).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("axis", ["batch", "outputs"])
def test_adafactor_is_refused_for_split_parameters_alone(ranks: Pool, axis: str) -> None:
    ranks.run(_by_adafactor, axis, world=2)


def _compiled(_rank: int, _world: int, plan: Plan) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    parallel = parallelize((made("picture"), PICTURE.batch(0)), plan)
    with warnings.catch_warnings():
        # PyTorch's compiler itself looks for gradients of what is no leaf, and makes objects of functions.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|.*should not be instantiated")
        trained = _steps(parallel, torch.compile(parallel, backend=backend))
    parts = [str(part.graph) for part in graphs[-1].modules() if isinstance(part, torch.fx.GraphModule)]
    return trained, len({str(graph.graph) for graph in graphs}), "".join(parts)


@pytest.mark.full
def test_a_compiled_module_is_one_graph_with_its_collectives(ranks: Pool) -> None:
    plan = random_plan(pase.load((made("picture"), PICTURE.batch(0))), 2, 2)
    module = made("picture")
    losses, gradients = _steps(module, module)
    for (found_losses, found_gradients), graphs, text in ranks.run(_compiled, plan, world=2):
        assert graphs == 1
        assert "all_to_all_single" in text
        assert "all_reduce" in text
        assert found_losses == pytest.approx(losses, rel=1e-12)
        for key, expected in gradients.items():
            if expected.norm() > 1e-12:
                assert_close(found_gradients[key], expected, f"gradient of {key}")


# -- alone in this process: one rank


def _alone(name: str) -> tuple[nn.Module, Any]:
    module = made(name)
    return module, pase.search((module, MODULES[name].batch(0)), devices=1)


def test_a_plan_tells_what_its_module_is_called_with() -> None:
    module, plan = _alone("nanogpt")
    parallel = parallelize(module, plan)
    expected, found = module(**LANGUAGE.batch(3)), parallel(**LANGUAGE.batch(3))
    assert type(found) is dict
    assert_close(found["loss"], expected["loss"], "loss")
    assert_close(full(found["logits"]), expected["logits"], "logits")
    assert "def build(program: Program)" in parallel.program


def test_what_does_not_fit_is_refused() -> None:
    module, plan = _alone("gpt")
    module.blocks[0].up = nn.Linear(16, 32).double()
    module.blocks[0].down = nn.Linear(32, 16).double()
    with pytest.raises(ProgramError, match=r"the plan is of another model: layer 'blocks\.0\.up'.*search a plan"):
        parallelize(module, plan)
    two = pase.search((made("gpt"), GPT.batch(0)), devices=2)
    with pytest.raises(ProgramError, match=r"the plan is for 2 devices, and there are 1 processes; .*nproc-per-node 2"):
        parallelize(made("gpt"), two)
    parallel = parallelize(made("gpt"), plan)
    with pytest.raises(ModelError, match=r"input 'tokens' is of shape \[3, 8\]; the plan is for a tensor of shape \[4"):
        parallel(tokens=GPT.batch(0)["tokens"][:3], targets=GPT.batch(0)["targets"][:3])


def test_a_module_that_nothing_refers_to_is_freed() -> None:
    """Its weights and process groups, too; a backward pass that is left over says so."""
    parallel = parallelize(*_alone("gpt"))
    parallel(**GPT.batch(0)).backward()
    loss, gone = parallel(**GPT.batch(1)), weakref.ref(parallel)
    del parallel
    gc.collect()
    assert gone() is None
    with pytest.raises(ProgramError, match="the parallel module is gone that this backward pass is of; keep it until"):
        loss.backward()


def test_autocast_is_that_of_the_module() -> None:
    module, plan = _alone("picture")
    parallel = parallelize(module, plan)
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel(**PICTURE.batch(0)).dtype == module(**PICTURE.batch(0)).dtype
