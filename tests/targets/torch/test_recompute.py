"""Layers that are computed again for the backward pass: what ranks find, compute, keep and send then."""

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pase
from pase.planning.plan import Plan
from pase.targets.execute import max_relative_difference
from pase.targets.programs import emit
from pase.targets.torch.parallel import parallelize
from pase.targets.training.counted import kept, step_key
from tests.runtime.networks import small
from tests.runtime.options import options
from tests.runtime.plans import make_plan, random_plan, recomputing
from tests.targets.torch.equality import RELATIVE, difference, full
from tests.targets.torch.ranks import Pool
from tests.targets.torch.test_memory import Functions, kept_bytes, memory_changes
from tests.targets.torch.trained import events


def again(plan: Plan, *layers: str) -> Plan:
    """The plan with these layers computed again."""
    return replace(plan, layers=tuple(replace(layer, is_recomputed=layer.name in layers) for layer in plan.layers))


# -- what is dropped


class Dropping(nn.Module):
    """A block of attention and one of products, behind each of which points are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.attention, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.first, self.second = nn.Dropout(0.3), nn.Dropout(0.2)

    def forward(self, words: Any) -> Any:
        x = self.words(words)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.attention(self.norm(x)).chunk(3, -1))
        x = x + self.first(self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        x = x + self.second(self.down(functional.gelu(self.up(x))))
        return functional.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), words.flatten())


class Masked(nn.Module):
    """Drops the points that masks of numpy say; layer: whose they are."""

    def __init__(self, layer: str, rate: float) -> None:
        super().__init__()
        self.layer, self.rate, self.step = layer, rate, 0

    def forward(self, x: Any) -> Any:
        mask = torch.from_numpy(kept(self.layer, tuple(x.shape), self.rate, step_key(0, self.step)))
        self.step += 1
        return x * mask / (1 - self.rate)


def _words(step: int) -> dict[str, Any]:
    return {"words": torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step))}


def _dropped(module: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """The loss and the gradients of two steps."""
    found = []
    for step in range(2):
        module.zero_grad()
        loss = module(**_words(step))
        loss.backward()
        found.append((loss.item(), {name: full(p.grad).clone() for name, p in module.named_parameters()}))
    return found


def _dropping() -> nn.Module:
    torch.manual_seed(0)
    return Dropping().double()


def _dropped_on_rank(_rank: int, _world: int, plan: Plan) -> Any:
    return _dropped(parallelize((_dropping(), _words(0)), plan, check=False))


def test_the_same_points_are_dropped_again(ranks: Pool) -> None:
    alone = _dropping()
    alone.first, alone.second = Masked("out", 0.3), Masked("down", 0.2)
    plan = random_plan(pase.load((_dropping(), _words(0))), 2, 1)
    again_everywhere = again(plan, *plan.graph.index)
    expected = _dropped(alone)
    for found in ranks.run(_dropped_on_rank, again_everywhere, world=2):
        for (loss, gradients), (own_loss, own) in zip(expected, found, strict=True):
            assert own_loss == pytest.approx(loss, rel=RELATIVE)
            assert all(difference(own[name], x) < RELATIVE for name, x in gradients.items())


# -- what is computed and kept


class Calls(TorchDispatchMode):
    """Counts calls of PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


X = {"x": torch.randn(7, 6)}


@pytest.mark.parametrize(
    ("layers", "points"),
    [
        # Of gelu its argument, of products theirs, of tanh its result.
        ((), 7 * 6 + 7 * 10 + 7 * 10 + 7 * 14),
        (("first",), 7 * 6 + 7 * 10 + 7 * 14),
        (("second",), 7 * 6 + 7 * 10 + 7 * 10 + 7 * 14),
        (("first", "third"), 7 * 6 + 7 * 10 + 7 * 14),
        (("first", "second"), 7 * 6 + 7 * 14),
        (("second", "third"), 7 * 6 + 7 * 10 + 7 * 10),
        (("first", "second", "third"), 7 * 6),
    ],
)
def test_a_run_keeps_what_it_reads_and_is_computed_once_more(layers: tuple[str, ...], points: int) -> None:
    module = Functions()
    parallel = parallelize((module, X), again(pase.search((module, X), devices=1), *layers), check=False)
    assert kept_bytes(parallel, X) == 4 * points
    with Calls() as calls:
        parallel(**X).sum().backward()
    assert calls.count["aten.gelu.default"] == 1 + ("first" in layers)
    assert calls.count["aten.tanh.default"] == 1 + ("second" in layers)


def _left(_rank: int, _world: int, plan: Plan, x: Any) -> int:
    """Return the bytes that the allocator has handed out and not taken back when a forward pass is over."""
    parallel = parallelize((Functions(), {"x": x}), plan, check=False)
    parallel(x).sum().backward()
    found = []
    changes = memory_changes(lambda: found.append(parallel(x)))
    return sum(changes) - int(found[0].nbytes)


def test_what_is_not_kept_is_given_back(ranks: Pool) -> None:
    x = torch.randn(1024, 6)
    plan = pase.search((Functions(), {"x": x}), devices=1)
    own = [ranks.run(_left, each, x, world=1)[0] for each in (plan, again(plan, *plan.graph.index))]
    assert own[0] == 4 * 1024 * (10 + 10 + 14)
    # What little is left is on the host, to find the run again.
    assert own[1] < 64


# -- programs


def test_a_program_says_what_is_computed_again() -> None:
    plan = recomputing(random_plan(small("transformer"), 4, 3), 2)
    source = emit(plan, target="torch")
    assert source.count("recompute=True") == sum(layer.is_recomputed for layer in plan) > 0


@pytest.mark.parametrize("split", [{"l": 2, "s": 2}, pytest.param({"s": 2, "e": 2}, marks=pytest.mark.full)])
def test_chains_of_ranks_are_computed_again(ranks: Pool, split: dict[str, int]) -> None:
    # Not above: ranks load this module, too, and need no TensorFlow.
    from pase.targets.mesh_tensorflow.runtime.reference import reference_losses

    graph = small("lstm_lm")
    (name,) = (operator.name for operator in graph.operators if operator.kind == "lstm")
    plan = again(make_plan(graph, 4, {name: split}), *graph.index)
    found = [own[-1]["losses"] for own in ranks.run(events, emit(plan, target="torch"), options(3), world=4)]
    assert max_relative_difference(found[0], reference_losses(graph, options(3))) < RELATIVE


def _compiled(_rank: int, _world: int, plan: Plan) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    whole, passes = list[str](), list[Counter[str]]()

    def compiled(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        passes.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    parts = aot_autograd(fw_compiler=compiled, bw_compiler=compiled)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        whole.append(str(graph))
        return parts(graph, inputs)

    module = parallelize((_dropping(), _words(0)), plan)
    with warnings.catch_warnings():
        # PyTorch's compiler itself looks for gradients of what is no leaf, and makes objects of functions.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|.*should not be instantiated")
        step = torch.compile(module, backend=backend)
        found = _dropped(step)
    return found, len(set(whole)), passes


@pytest.mark.full
def test_a_compiled_module_computes_again_in_one_graph(ranks: Pool) -> None:
    plan = random_plan(pase.load((_dropping(), _words(0))), 2, 1)
    plan = again(plan, *plan.graph.index)
    alike = zip(ranks.run(_compiled, plan, world=2), ranks.run(_dropped_on_rank, plan, world=2), strict=True)
    for (found, graphs, (forward, backward)), expected in alike:
        assert graphs == 1
        for (own_loss, own), (loss, gradients) in zip(found, expected, strict=True):
            assert own_loss == pytest.approx(loss, rel=RELATIVE)
            assert all(difference(own[f"_orig_mod.{name}"], x) < RELATIVE for name, x in gradients.items())
        moves = [each["_c10d_functional.all_to_all_single.default"] for each in (forward, backward)]
        assert moves[1] >= 2 * moves[0] > 0
        assert forward["aten.gelu.default"] == backward["aten.gelu.default"] == 1
