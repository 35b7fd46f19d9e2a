"""`parallelize`: modules of PyTorch under random plans, on ranks, against the unmodified module in one process."""

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

import pase
from pase.errors import ModelError, ProgramError
from pase.planning.plan import Plan
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import make_plan, random_plan
from tests.targets.torch.equality import difference, full
from tests.targets.torch.modules import Batch, Language, Module, floats, words
from tests.targets.torch.ranks import Pool


class Picture(nn.Module):
    """Normalisation by batches and by groups, a convolution and a transposed one; no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.groups = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Any) -> Any:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        x = functional.silu(self.groups(self.second(x)))
        return self.head(functional.avg_pool2d(self.up(x), 2).flatten(1))


class Pieces(nn.Module):
    """A product whose pieces, heads before steps, are turned in part and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 96), nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        parts = self.first(x).unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, -1)
        q, k = (torch.cat([part[..., :4].sin(), part[..., 4:]], -1) for part in parts[:2])
        return self.last((q * k + parts[2]).transpose(1, 2).flatten(2)).square().mean()


def _words(seed: int) -> Batch:
    return words(seed, "words", "targets")


def _pictures(seed: int) -> Batch:
    return floats(seed, "x", 8, 3, 16, 16)


CASES = {
    "language": Module(make=Language, batch=_words),
    "pieces": Module(make=Pieces, batch=lambda seed: floats(seed, "x", 4, 6, 16), loss=lambda found: found),
    "picture": Module(
        make=Picture, batch=_pictures, loss=lambda found: functional.cross_entropy(found, torch.arange(8))
    ),
}


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().double()


def _trained(
    module: nn.Module, case: Module, step: Any = None
) -> tuple[list[float], dict[str, Any], dict[str, Any], list[float]]:
    """Return losses, the first gradients, the state after three steps and the norms of the gradients.

    step: what computes the module, where that is not itself.
    """
    # Gradients that are zero but for rounding (of biases of keys and before norms) are not blown up by this ε.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-5, foreach=True)
    losses, norms, first = [], [], dict[str, Any]()
    for seed in range(3):
        loss = case.loss((module if step is None else step)(**case.batch(seed)))
        loss.backward()
        first = first or {name: full(p.grad).clone() for name, p in module.named_parameters()}
        norms.append(float(full(nn.utils.clip_grad_norm_(module.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, {name: full(x).clone() for name, x in module.state_dict().items()}, norms


def _on_rank(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    case = CASES[name]
    return _trained(parallelize((_made(name), case.batch(0)), plan), case)


def _assert_close(found: Any, expected: Any, what: str) -> None:
    error = difference(found, expected)
    assert error < 1e-12, (what, error)


@pytest.mark.parametrize(
    ("name", "world", "seed"),
    [("language", 2, 0), ("language", 4, 1), ("picture", 2, 2), ("picture", 4, 3), ("pieces", 4, 5)]
    + [
        pytest.param(name, world, seed, marks=pytest.mark.full)
        for name in CASES
        for world in (2, 4)
        for seed in range(4, 24)
    ],
)
def test_a_module_trains_under_a_random_plan(ranks: Pool, name: str, world: int, seed: int) -> None:
    case = CASES[name]
    plan = random_plan(pase.load((_made(name), case.batch(0))), world, seed)
    losses, gradients, state, norms = _trained(_made(name), case)
    for found_losses, found_gradients, found_state, found_norms in ranks.run(_on_rank, name, plan, world=world):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert found_norms == pytest.approx(norms, rel=1e-12)
        assert list(found_state) == list(state)
        for key, expected in gradients.items():
            if expected.norm() > 1e-12 * norms[0]:
                _assert_close(found_gradients[key], expected, f"gradient of {key}")
        for key, expected in state.items():
            _assert_close(found_state[key].double(), expected.double(), key)


def _evaluated(_rank: int, _world: int, plan: Plan) -> Any:
    case, module = CASES["picture"], _made("picture")
    parallel = parallelize((copy.deepcopy(module), case.batch(0)), plan)
    for each in (module, parallel):
        each(**case.batch(1))
        each.eval()
    with torch.no_grad():
        return module(**case.batch(2)), parallel(**case.batch(2))


def test_evaluation_is_by_the_statistics_that_training_kept(ranks: Pool) -> None:
    plan = random_plan(pase.load((_made("picture"), _pictures(0))), 2, 5)
    for expected, found in ranks.run(_evaluated, plan, world=2):
        _assert_close(found, expected, "outputs")


def _accumulated(_rank: int, _world: int, plan: Plan) -> Any:
    case, module = CASES["language"], _made("language")
    parallel = parallelize((copy.deepcopy(module), case.batch(0)), plan)
    for seed in range(3):
        case.loss(module(**case.batch(seed))).backward()
    with parallel.no_sync():
        case.loss(parallel(**case.batch(0))).backward()
    case.loss(parallel(**case.batch(1))).backward()
    # Without no_sync gradients are summed each time, and added to what is there.
    case.loss(parallel(**case.batch(2))).backward()
    pairs = zip(module.parameters(), parallel.parameters(), strict=True)
    return [(own.grad, full(other.grad)) for own, other in pairs]


def test_gradients_accumulate(ranks: Pool) -> None:
    plan = random_plan(pase.load((_made("language"), _words(0))), 2, 6)
    for pairs in ranks.run(_accumulated, plan, world=2):
        for expected, found in pairs:
            if expected.norm() > 1e-12:
                _assert_close(found, expected, "gradient")


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


def _by_parts(rank: int, world: int, name: str, plan: Plan) -> Any:
    case, parallel = CASES[name], parallelize((_made(name), CASES[name].batch(0)), plan)
    boxes = parallel.inputs()
    assert [parallel.inputs(other) for other in range(world)][rank] == boxes
    batch = {key: value[tuple(slice(*one) for one in boxes[key])] for key, value in case.batch(0).items()}
    sampler = parallel.sampler(19, seed=3)
    return case.loss(parallel(**batch)).item(), boxes, list(sampler)


def test_every_rank_may_be_given_its_own_part(ranks: Pool) -> None:
    # Examples are split throughout: half of them is all that a rank reads.
    graph = pase.load((_made("picture"), _pictures(0)))
    plan = make_plan(graph, 2, {o.name: {"b": 2} for o in graph.operators if "b" in o.extents})
    expected = CASES["picture"].loss(_made("picture")(**_pictures(0))).item()
    found = ranks.run(_by_parts, "picture", plan, world=2)
    assert [boxes["x"][0] for _, boxes, _ in found] == [(0, 4), (4, 8)]
    assert [loss for loss, _, _ in found] == pytest.approx([expected] * 2, rel=1e-12)
    samples = [batches for _, _, batches in found]
    assert [len(batches) for batches in samples] == [2, 2]
    for first, second in zip(*samples, strict=True):
        assert len(first) == len(second) == 4
    assert len({number for batches in samples for batch in batches for number in batch}) == 16


def _compiled(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    case, graphs = CASES[name], list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    parallel = parallelize((_made(name), case.batch(0)), plan)
    with warnings.catch_warnings():
        # PyTorch's compiler itself looks for gradients of what is no leaf, and makes objects of functions.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|.*should not be instantiated")
        trained = _trained(parallel, case, step=torch.compile(parallel, backend=backend))
    parts = [str(part.graph) for part in graphs[-1].modules() if isinstance(part, torch.fx.GraphModule)]
    return trained, len({str(graph.graph) for graph in graphs}), "".join(parts)


@pytest.mark.slow
def test_a_compiled_module_is_one_graph_with_its_collectives(ranks: Pool) -> None:
    name = "picture"
    plan = random_plan(pase.load((_made(name), CASES[name].batch(0))), 2, 2)
    losses, gradients, _, _ = _trained(_made(name), CASES[name])
    for (found_losses, found_gradients, _, _), graphs, text in ranks.run(_compiled, name, plan, world=2):
        assert graphs == 1
        assert "all_to_all_single" in text
        assert "all_reduce" in text
        assert found_losses == pytest.approx(losses, rel=1e-12)
        for key, expected in gradients.items():
            if expected.norm() > 1e-12:
                _assert_close(found_gradients[key], expected, f"gradient of {key}")


# -- alone in this process: one rank


def _alone(name: str) -> tuple[nn.Module, Any]:
    case, module = CASES[name], _made(name)
    return module, pase.search((module, case.batch(0)), devices=1)


def test_a_plan_tells_what_its_module_is_called_with() -> None:
    module, plan = _alone("language")
    parallel = parallelize(module, plan)
    expected, found = module(**_words(3)), parallel(**_words(3))
    assert type(found) is dict
    _assert_close(found["loss"], expected["loss"], "loss")
    _assert_close(full(found["logits"]), expected["logits"], "logits")
    assert "def build(program: Program)" in parallel.program


def test_what_does_not_fit_is_refused() -> None:
    module, plan = _alone("language")
    module.blocks[0].up = nn.Linear(24, 48).double()
    module.blocks[0].down = nn.Linear(48, 24).double()
    with pytest.raises(ProgramError, match=r"the plan is of another model: layer 'blocks\.0\.up'.*search a plan"):
        parallelize(module, plan)
    two = pase.search((_made("language"), _words(0)), devices=2)
    with pytest.raises(ProgramError, match=r"the plan is for 2 devices, and there are 1 processes; .*nproc-per-node 2"):
        parallelize(_made("language"), two)
    parallel = parallelize(_made("language"), plan)
    with pytest.raises(ModelError, match=r"input 'words' is of shape \[3, 8\]; the plan is for a tensor of shape \[4"):
        parallel(words=_words(0)["words"][:3], targets=_words(0)["targets"][:3])


def test_a_module_that_nothing_refers_to_is_freed() -> None:
    """Its weights and process groups, too; a backward pass that is left over says so."""
    parallel = parallelize(*_alone("language"))
    parallel(**_words(0))["loss"].backward()
    loss, gone = parallel(**_words(1))["loss"], weakref.ref(parallel)
    del parallel
    gc.collect()
    assert gone() is None
    with pytest.raises(ProgramError, match="the parallel module is gone that this backward pass is of; keep it until"):
        loss.backward()


def test_autocast_is_that_of_the_module() -> None:
    module, plan = _alone("picture")
    parallel = parallelize(module, plan)
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel(**_pictures(0)).dtype == module(**_pictures(0)).dtype
