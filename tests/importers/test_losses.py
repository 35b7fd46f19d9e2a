"""Losses of imported models: what they are to the search, and what a split of theirs costs."""

from collections.abc import Callable
from typing import Any

import pytest

from pase import load, search
from pase.importers.frameworks import import_model
from tests.importers.agreement import check_apart

torch = pytest.importorskip("torch")

BATCH, STEPS, CLASSES, WIDTH = 8, 16, 32, 64
F = torch.nn.functional
_TOKENS = torch.zeros(BATCH, STEPS, dtype=torch.long)
_FLOATS = torch.zeros(BATCH, STEPS, CLASSES)


class Model(torch.nn.Module):  # type: ignore[misc]
    """Tokens through a layer to scores of classes, and their loss."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.table, self.body = torch.nn.Embedding(CLASSES, WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.head, self.loss = torch.nn.Linear(2 * WIDTH, CLASSES), loss

    def forward(self, tokens: Any, *targets: Any) -> Any:
        return self.loss(self.head(torch.relu(self.body(self.table(tokens)))), *targets)


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


_WEIGHTS = torch.ones(CLASSES)
OF_TOKENS: dict[str, Callable[..., Any]] = {
    "cross-entropy": lambda x, t: F.cross_entropy(_rows(x), t.view(-1)),
    "each": lambda x, t: F.cross_entropy(_rows(x), t.view(-1), reduction="none").view(t.shape).mean(),
    "sum": lambda x, t: F.cross_entropy(_rows(x), t.view(-1), reduction="sum"),
    "smoothed": lambda x, t: F.cross_entropy(_rows(x), t.view(-1), label_smoothing=0.1),
    "ignoring": lambda x, t: F.cross_entropy(_rows(x), t.view(-1), ignore_index=3),
    "weighted": lambda x, t: F.cross_entropy(_rows(x), t.view(-1), weight=_WEIGHTS),
    "classes second": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "classes second, smoothed": lambda x, t: F.cross_entropy(x.transpose(1, 2), t, label_smoothing=0.1),
    "shifted": lambda x, t: F.cross_entropy(_rows(x[:, :-1]), t[:, 1:].reshape(-1)),
    "nll": lambda x, t: F.nll_loss(_rows(x).log_softmax(-1), t.view(-1)),
    "nll of images": lambda x, t: F.nll_loss(x.transpose(1, 2)[..., None].log_softmax(1), t[..., None]),
    "gathered": lambda x, t: -x.log_softmax(-1).gather(-1, t[..., None]).mean(),
    "multi-margin": lambda x, t: F.multi_margin_loss(_rows(x), t.view(-1)),
}
OF_FLOATS: dict[str, Callable[..., Any]] = {
    "probabilities": lambda x, t: F.cross_entropy(_rows(x), _rows(t)),
    "probabilities, smoothed": lambda x, t: F.cross_entropy(_rows(x), _rows(t), label_smoothing=0.1),
    "binary": lambda x, t: F.binary_cross_entropy(x.sigmoid(), t),
    "binary of logits": lambda x, t: F.binary_cross_entropy_with_logits(x, t),
    "binary of logits, weighted": lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=_WEIGHTS),
    "squares": F.mse_loss,
    "absolute": F.l1_loss,
    "smooth absolute": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "divergence": lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="batchmean"),
    "divergence of logarithms": lambda x, t: F.kl_div(x.log_softmax(-1), t, log_target=True, reduction="sum"),
    "poisson": lambda x, t: F.poisson_nll_loss(x, t, full=True),
    "gaussian": lambda x, t: F.gaussian_nll_loss(x, t, F.softplus(x), full=True),
    "gaussian of rows": lambda x, t: F.gaussian_nll_loss(x, t, torch.ones(x.shape[:-1]), reduction="sum"),
    "hinge": F.hinge_embedding_loss,
    "soft margin": F.soft_margin_loss,
    "multilabel soft margin": lambda x, t: F.multilabel_soft_margin_loss(_rows(x), _rows(t)),
    "multilabel margin": lambda x, t: F.multilabel_margin_loss(_rows(x), _rows(t).long()),
    "cosine": lambda x, t: F.cosine_embedding_loss(_rows(x), _rows(2 * x), t[..., 0].reshape(-1)),
    "ranking": lambda x, t: F.margin_ranking_loss(x, 2 * x, t),
    "triplet": lambda x, t: F.triplet_margin_loss(_rows(x), _rows(2 * x), _rows(t)),
    "triplet of distance": lambda x, t: F.triplet_margin_with_distance_loss(_rows(x), _rows(2 * x), _rows(t)),
}

_IN_THE_SUITE = (
    "cross-entropy", "smoothed", "weighted", "classes second", "shifted", "gathered", "multi-margin", "probabilities",
    "binary of logits, weighted", "squares", "divergence", "gaussian of rows", "multilabel margin", "cosine", "triplet",
)  # fmt: skip
"""Of losses that are alike one each."""


def _model(name: str) -> tuple[Any, tuple[Any, ...]]:
    if name in OF_TOKENS:
        return Model(OF_TOKENS[name]), (_TOKENS, _TOKENS.clone())
    return Model(OF_FLOATS[name]), (_TOKENS, _FLOATS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in _IN_THE_SUITE else pytest.mark.full) for n in (*OF_TOKENS, *OF_FLOATS)]
)
def test_a_loss_is_known_and_keeps_examples_and_steps_apart(name: str) -> None:
    """Each of its vertices can be split by examples alone and by steps alone, and its classes wherever it has them."""
    model = import_model(_model(name), is_strict=True)
    graph = model.graph
    assert not list(model.generic)
    assert model.differences == ()
    loss = [op for op in graph.operators if op.name not in ("table", "body", "head")]
    check_apart(loss, BATCH, STEPS - (name == "shifted"), along_all=False)
    assert any(CLASSES in operator.extents.values() for operator in loss)


def test_the_loss_of_a_language_model_leaves_the_batch_split() -> None:
    """A loss that nothing was known of kept all of the model from being split."""
    tokens = torch.zeros(64, 64, dtype=torch.long)
    spelt, found = (
        search(load((Model(OF_TOKENS[name]), (tokens, tokens.clone()))), devices=4)
        for name in ("gathered", "classes second")
    )
    assert spelt.exact
    assert found.exact
    for layer in ("table", "body", "head"):
        # By examples or steps, which cost the same here.
        assert found[layer].splits["b"] * found[layer].splits["s"] == 4
    assert found.total_cost == pytest.approx(spelt.total_cost, rel=0.01)


def test_one_tensor_given_twice_is_two_inputs() -> None:
    """`torch.export` takes it for one: the program looked the targets up."""
    x = torch.zeros(BATCH, STEPS, dtype=torch.long)
    model = Model(OF_TOKENS["cross-entropy"])
    twice, apart = import_model((model, (x, x))), import_model((model, (x, x.clone())))
    assert twice.graph == apart.graph
    assert [leaf.role for leaf in twice.traces[0].leaves].count("input") == 2
    (lookup,) = (op for op in twice.graph.operators if op.kind == "embedding")
    (gather,) = (op for op in twice.graph.operators if op.kind == "gather")
    fed = {op.name: op.body.inputs[0].name for op in (lookup, gather) if op.body is not None}
    assert fed[lookup.name] != fed[gather.name]


def test_one_tensor_given_by_two_names_is_two_inputs() -> None:
    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(OF_TOKENS["cross-entropy"])

        def forward(self, *, ids: Any, targets: dict[str, Any]) -> Any:
            return self.model(ids, targets["first"])

    x = torch.zeros(BATCH, STEPS, dtype=torch.long)
    trace = import_model((Named(), {"ids": x, "targets": {"first": x}})).traces[0]
    assert [leaf.role for leaf in trace.leaves].count("input") == 2
