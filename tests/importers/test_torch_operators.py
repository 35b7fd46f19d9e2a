"""What PyTorch's operators are translated into computes what they compute: each step is done again with NumPy."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import pytest

import pase
from pase.importers.frameworks import import_model
from pase.importers.ir.trace import Trace
from tests.importers.torch_zoo import module
from tests.importers.traces import evaluate

torch = pytest.importorskip("torch")


def _arrays(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.normal(size=shape)) for shape in shapes]


def _replaced(x: Any, y: Any) -> Any:
    x = x.clone()
    x[:, 1:3] = y
    return x


def _over_one(x: Any, y: Any) -> Any:
    x = x.clone()
    x[2] = y
    x.add_(1)
    x.view(-1).mul_(2.0)
    return x


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "matmul 1 1": (torch.matmul, ((4,), (4,))),
    "matmul 1 2": (torch.matmul, ((4,), (4, 3))),
    "matmul 2 1": (torch.matmul, ((3, 4), (4,))),
    "matmul 1 3": (torch.matmul, ((4,), (2, 4, 3))),
    "matmul 4 1": (torch.matmul, ((2, 5, 3, 4), (4,))),
    "matmul 4 2": (torch.matmul, ((2, 5, 3, 4), (4, 6))),
    "matmul 2 4": (torch.matmul, ((3, 4), (2, 5, 4, 6))),
    "matmul broadcast": (torch.matmul, ((2, 1, 3, 4), (5, 4, 6))),
    "matmul broadcast both": (torch.matmul, ((2, 1, 3, 4), (1, 5, 4, 6))),
    "addmm vector": (torch.addmm, ((6,), (3, 4), (4, 6))),
    "addmm matrix": (torch.addmm, ((3, 6), (3, 4), (4, 6))),
    "baddbmm": (torch.baddbmm, ((2, 1, 6), (2, 3, 4), (2, 4, 6))),
    "baddbmm without": (lambda *a: torch.baddbmm(*a, beta=0), ((2, 3, 6), (2, 3, 4), (2, 4, 6))),
    "addmv": (torch.addmv, ((3,), (3, 4), (4,))),
    "addmm scaled": (lambda *a: torch.addmm(*a, alpha=2.0, beta=0.5), ((6,), (3, 4), (4, 6))),
    "baddbmm scaled": (lambda *a: torch.baddbmm(*a, alpha=3, beta=0), ((2, 3, 6), (2, 3, 4), (2, 4, 6))),
    "addmv scaled": (lambda *a: torch.addmv(*a, alpha=2.0, beta=0.5), ((3,), (3, 4), (4,))),
    "outer": (torch.outer, ((3,), (4,))),
    "inner": (torch.inner, ((3, 4), (5, 2, 4))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([0, 2], [1, 0])), ((3, 4, 5), (5, 3, 2))),
    "bilinear": (torch.nn.functional.bilinear, ((2, 3, 4), (2, 3, 5), (6, 4, 5), (6,))),
    "linear": (torch.nn.functional.linear, ((2, 3, 4), (6, 4), (6,))),
    "linear of a vector": (torch.nn.functional.linear, ((4,), (6, 4))),
    "einsum": (lambda *a: torch.einsum("bqhd,bkhd->bhqk", *a), ((2, 3, 4, 5), (2, 6, 4, 5))),
    "einsum without output": (lambda *a: torch.einsum("ji,jk", *a), ((4, 3), (4, 5))),
    "einsum dots": (lambda *a: torch.einsum("...ij,jk->...ik", *a), ((2, 7, 3, 4), (4, 5))),
    "einsum of dots": (lambda *a: torch.einsum("b...d,...d->b...", *a), ((2, 3, 4), (3, 4))),
    "einsum of three": (lambda *a: torch.einsum("bi,ij,jk->kb", *a), ((2, 3), (3, 4), (4, 5))),
    "einsum of one": (lambda a: torch.einsum("bij->jb", a), ((2, 3, 4),)),
    "einsum without a sum": (lambda *a: torch.einsum("bi,bj->jib", *a), ((2, 3), (2, 4))),
    "einsum with a sum apart": (lambda *a: torch.einsum("bi,ijk->bk", *a), ((2, 3), (3, 4, 5))),
    "einsum of one element": (lambda *a: torch.einsum("bi,bj->bij", *a).sum(2), ((1, 3), (2, 4))),
    "permute": (lambda x: x.permute(2, 0, -2), ((2, 3, 4),)),
    "transpose": (lambda x: x.transpose(-1, 0), ((2, 3, 4),)),
    "movedim": (lambda x: x.movedim((0, 1), (2, 0)), ((2, 3, 4),)),
    "mT": (lambda x: x.mT, ((2, 3, 4),)),
    "expand": (lambda x: x.expand(5, -1, 3), ((4, 1),)),
    "repeat": (lambda x: x.repeat(2, 3, 1, 2), ((2, 1, 3),)),
    "repeat each": (lambda x: x.repeat_interleave(3, dim=1), ((2, 4, 3),)),
    "repeat each of all": (lambda x: x.repeat_interleave(2), ((2, 3),)),
    "slice": (lambda x: x[:, -3:-1, ::2], ((2, 5, 6),)),
    "select": (lambda x: x.select(1, -1), ((2, 5, 6),)),
    "split": (lambda x: x.split((1, 4), dim=1), ((2, 5),)),
    "chunk": (lambda x: x.chunk(3, dim=-1), ((2, 7),)),
    "unbind": (lambda x: x.unbind(1), ((2, 3, 4),)),
    "concat": (lambda x, y: torch.cat([x, y, x], dim=-1), ((2, 3), (2, 1))),
    "stack": (lambda x, y: torch.stack([x, y], dim=1), ((2, 3), (2, 3))),
    "pad": (lambda x: torch.nn.functional.pad(x, (1, 2, 0, 3)), ((2, 3, 4),)),
    "pieces replaced": (_replaced, ((2, 5), (2, 2))),
    "written over": (_over_one, ((4, 3), (3,))),
    "windows": (lambda x: x.unfold(1, 3, 3), ((2, 6, 4),)),
    "pixel shuffle": (lambda x: torch.nn.functional.pixel_shuffle(x, 2), ((2, 12, 3, 4),)),
    "pixel unshuffle": (lambda x: torch.nn.functional.pixel_unshuffle(x, 2), ((2, 3, 4, 6),)),
    "channel shuffle": (lambda x: torch.nn.functional.channel_shuffle(x, 3), ((2, 6, 4, 5),)),
    "upsample": (lambda x: torch.nn.functional.interpolate(x, scale_factor=(2, 3)), ((2, 3, 4, 5),)),
    "mean": (lambda x: x.mean((-1, 0), keepdim=True), ((2, 3, 4),)),
    "max": (lambda x: x.max(dim=1).values, ((2, 3, 4),)),
    "amin": (lambda x: x.amin(), ((2, 3),)),
    "var": (lambda x: torch.var_mean(x, 1), ((2, 3),)),
    "glu": (lambda x: torch.nn.functional.glu(x, 1), ((2, 6, 3),)),
    "cosine": (torch.cosine_similarity, ((2, 6, 3), (6, 1))),
    "cosine of the last": (lambda x, y: torch.cosine_similarity(x, y, -1, 1e-6), ((2, 1, 3), (4, 3))),
    "distance": (torch.pairwise_distance, ((2, 6, 3), (6, 1))),
    "distance of sums": (lambda x, y: torch.pairwise_distance(x, y, 1.0, 0.1, True), ((2, 6), (6,))),
    "largest distance": (lambda x, y: torch.pairwise_distance(x, y, float("inf")), ((2, 6), (2, 6))),
    "slopes": (torch.nn.functional.prelu, ((2, 3, 4), (3,))),
    "one slope": (torch.nn.functional.prelu, ((2, 3, 4), (1,))),
    "softplus": (lambda x: torch.nn.functional.softplus(x, 2.0, 0.5), ((3, 4),)),
    "cut and padded": (lambda x: torch.nn.functional.pad(x, (-1, 2, 3, -2)), ((2, 5, 6),)),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(x)), ((2, 3, 2),)),
    "in place": (lambda x: torch.relu_(x + 1), ((2, 3),)),
}
_WRITING = ("pieces replaced", "written over", "in place")
"""These are written anew before they are read, each in a program of its own."""


_F = torch.nn.functional
_CLASSES = torch.tensor([3, 0, 5, 5, 2, 1])
_WEIGHTS = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
_SHAPES = {"one": (6,), "rows": (6, 6), "image": (2, 6, 3)}
_REDUCTIONS = ("none", "mean", "sum")

Calls = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""By a name, a function and what it is called with."""


def _of_classes(form: str) -> Calls:
    """Return losses of classes, in every reduction and weighting."""
    (x, shares), shape = _arrays(_SHAPES[form], _SHAPES[form]), _SHAPES[form]
    rows = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    target = _CLASSES[: 1 if not rows else 6].reshape(rows)
    options = {"plain": {}, "weighted": {"weight": _WEIGHTS, "ignore_index": 0}, "ignoring": {"ignore_index": 5}}
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for reduction, (name, given) in product(_REDUCTIONS, options.items()):
        entropy = partial(_F.cross_entropy, reduction=reduction, **given)
        end = f"{form} {reduction} {name}"
        found[f"nll {end}"] = partial(_F.nll_loss, reduction=reduction, **given), (x, target)
        found[f"cross-entropy {end}"] = entropy, (x, target)
        found[f"smoothed {end}"] = partial(entropy, label_smoothing=0.1), (x, target)
        if name != "ignoring":
            shared = partial(entropy, ignore_index=-100)
            found[f"probabilities {end}"] = shared, (x, shares)
            found[f"smoothed probabilities {end}"] = partial(shared, label_smoothing=0.1), (x, shares)
    return found


def _gathered() -> Calls:
    (x,), (y,), (z,) = _arrays((2, 6, 3, 4)), _arrays((3, 5)), _arrays((3, 5, 2))
    at, four = torch.tensor([4, 0, 3]), torch.tensor([4])
    return {
        "nll of images": (_F.nll_loss, (x, torch.arange(24).reshape(2, 3, 4) % 6)),
        "gathered": (lambda x, at: x.gather(1, at), (y, torch.tensor([[1, 4], [0, 0], [3, 2]]))),
        "an element of each row": (lambda x, at: x[torch.arange(3), at], (y, at)),
        "a row of each": (lambda x, at: x[range(3), at], (z, at)),
        "the last but one": (lambda x, at: x[:, [-2]] + at, (y, four)),
        "rows that follow": (lambda x, at: _F.embedding(torch.arange(1, 3), x) + at, (y, four)),
        "columns that follow": (lambda x, at: x.index_select(1, torch.arange(2, 5)) + at, (y, four)),
        "gathered of less": (lambda x, at: x.gather(0, at), (y, torch.tensor([[1, 2, 0, 0]]))),
    }


CALLS: Mapping[str, Calls] = {
    "losses of one": _of_classes("one"),
    "losses of rows": _of_classes("rows"),
    "losses of images": _of_classes("image"),
    "gathered": _gathered(),
    "operators": {name: (f, tuple(_arrays(*shapes))) for name, (f, shapes) in CASES.items() if name not in _WRITING},
    **{name: {name: (CASES[name][0], tuple(_arrays(*CASES[name][1])))} for name in _WRITING},
}
"""What one program computes: tracing takes much longer than an operator."""


@pytest.mark.parametrize("program", CALLS)
def test_the_steps_compute_what_the_operators_do(program: str) -> None:
    _check(CALLS[program])


@pytest.mark.parametrize("reduction", _REDUCTIONS)
def test_the_steps_compute_the_multilabel_margin(reduction: str) -> None:
    """Which pairs of classes count is told by whole numbers of the input alone: that mask is made here."""
    (x,) = _arrays((2, 4))
    target = torch.tensor([[3, 0, -1, 1], [1, -1, 2, 2]])
    counts = np.zeros((2, 4, 4), bool)
    for i, (own, others) in enumerate((((3, 0), (1, 2)), ((1,), (0, 2, 3)))):
        for j, _ in enumerate(own):
            counts[i, j, list(others)] = True
    function = partial(_F.multilabel_margin_loss, reduction=reduction)
    _check({"": (function, (x, target))}, made={"counted": counts})


def _check(calls: Calls, made: Mapping[str, Any] | None = None) -> None:
    """Check the trace of a program of these calls, done again; made: values of nodes without inputs, by their names'
    ends.
    """
    from pase.importers.torch.export import trace_module

    def every(_: Any, *inputs: Any) -> list[Any]:
        given = iter(inputs)
        return [function(*islice(given, len(own))) for function, own in calls.values()]

    expected = {name: function(*(x.clone() for x in own)) for name, (function, own) in calls.items()}
    # Each has its own inputs: one tensor given twice would be one input.
    inputs = [x.clone() for _, own in calls.values() for x in own]
    trace = trace_module(module(every), tuple(inputs), {})
    leaves = [leaf.value.name for leaf in trace.leaves if leaf.role == "input"]
    constants = {leaf.value.name: np.ones(leaf.value.shape) for leaf in trace.leaves if leaf.role == "constant"}
    for leaf in trace.leaves:
        # Weights of classes that the function holds.
        if leaf.role == "constant" and leaf.value.shape == _WEIGHTS.shape:
            constants[leaf.value.name] = _WEIGHTS.numpy()
    nodes = tuple(node for node in trace.nodes if node.inputs)
    for node in trace.nodes:
        if not node.inputs:
            constants |= {v.name: x for v in node.outputs for end, x in (made or {}).items() if v.name.endswith(end)}
    held = constants | dict(zip(leaves, (x.numpy() for x in inputs), strict=True))
    values = evaluate(Trace(name="x", leaves=trace.leaves, nodes=nodes, outputs=trace.outputs), held)
    wanted = [(n, x) for n, each in expected.items() for x in (each if isinstance(each, tuple | list) else [each])]
    for output, (name, other) in zip(trace.outputs, wanted, strict=True):
        np.testing.assert_allclose(values[output], other.numpy(), atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("given", "expected"), [(None, torch.finfo(torch.float32).eps), (0.0, 0.0), (1e-6, 1e-6)])
def test_a_normalisation_adds_what_pytorch_adds(given: float | None, expected: float) -> None:
    graph = pase.load((torch.nn.RMSNorm(8, eps=given), torch.zeros(4, 8)))
    (added,) = (s for op in graph.operators for s in (op.body.steps if op.body else ()) if s.function == "add")
    assert added.operands[1] == expected


def test_what_attention_would_drop_is_named() -> None:
    class Attention(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.attn_dropout, self.lin = rate, torch.nn.Linear(8, 24)

        def forward(self, x: Any) -> Any:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.lin(x).chunk(3, -1))
            rate = self.attn_dropout if self.training else 0.0
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(2)

    def notes(rate: float) -> list[str]:
        model = torch.nn.Sequential(Attention(rate), torch.nn.Linear(8, 8), Attention(rate))
        return [n for n in import_model((model, torch.zeros(4, 6, 8))).traces[0].notes if "attention" in n]

    assert notes(0.0) == []
    assert notes(0.25) == [
        (
            "attention of '0' and 1 more has attn_dropout=0.25: in training its weights are not dropped, since "
            "attention is traced outside training"
        )
    ]
