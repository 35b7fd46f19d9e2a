"""Labels and numbers of rows that are out of range raise under every plan, where PyTorch raises, and only there."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.errors import ModelError
from pase.planning.plan import Plan
from tests.runtime.plans import make_plan
from tests.targets.torch.ranks import Pool

ROWS, CLASSES = 10, 6
LOSSES = {
    "cross_entropy": functional.cross_entropy,
    "summed": lambda x, y: functional.cross_entropy(x, y, reduction="sum", label_smoothing=0.1),
    "ignoring 2": lambda x, y: functional.cross_entropy(x, y, ignore_index=2),
    "nll_loss": lambda x, y: functional.nll_loss(x.log_softmax(-1), y),
    "gather": lambda x, y: x.gather(1, y[:, None]).mean(),
    "moved": lambda x, y: functional.cross_entropy(x[:-1], y[1:]),
    "pictures": lambda x, y: functional.cross_entropy(x.reshape(2, 4, 6).mT, y.reshape(2, 4)),
}


class Classifier(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.table, self.scores, self.loss = nn.Embedding(ROWS, 8), nn.Linear(8, CLASSES), loss

    def forward(self, tokens: Any, labels: Any) -> Any:
        return LOSSES[self.loss](self.scores(self.table(tokens)), labels)


def _batch(at: str = "", number: int = 0) -> dict[str, Any]:
    batch = {"tokens": torch.arange(8), "labels": torch.arange(8) % CLASSES}
    if at:
        batch[at][5] = number
    return batch


NUMBERS = (("tokens", 9), ("tokens", 10), ("tokens", -1), *(("labels", n) for n in (-100, -3, -1, 2, 5, 6)))


@pytest.mark.parametrize("loss", LOSSES)
def test_numbers_out_of_range_raise_where_they_do_in_pytorch(loss: str) -> None:
    torch.manual_seed(0)
    module = Classifier(loss)
    parallel = pase.parallelize(module, pase.search((module, _batch()), devices=1))
    for at, number in NUMBERS:
        batch = _batch(at, number)
        try:
            expected = module(**batch)
        except (IndexError, RuntimeError):
            by = "embedding" if at == "tokens" else "gather" if loss == "gather" else "cross_entropy_loss|nll_loss"
            where = rf"({by})\w* at test_bounds\.py:\d+ is given {number}, out of range; expected 0 to \d"
            with pytest.raises(ModelError, match=where):
                parallel(**batch)
        else:
            assert parallel(**batch).item() == pytest.approx(expected.item(), rel=1e-6)


def _with_split_tables(_rank: int, _world: int, plan: Plan) -> list[str]:
    torch.manual_seed(0)
    parallel = pase.parallelize(Classifier("cross_entropy"), plan)
    said = []
    for at, number in (("tokens", 12), ("labels", 7)):
        try:
            parallel(**_batch(at, number))
        except ModelError as error:
            said.append(str(error))
    assert parallel(**_batch()).isfinite()
    return said


def test_they_raise_on_every_rank_where_no_rank_has_the_row(ranks: Pool) -> None:
    graph = pase.load((Classifier("cross_entropy"), _batch()))
    classes = next(op.name for op in graph.operators if any(step.function == "pick" for step in op.body.steps))
    plan = make_plan(graph, 2, {"table": {"v": 2}, "scores": {"n": 2}, classes: {"n": 2}})
    for tokens, labels in ranks.run(_with_split_tables, plan, world=2):
        assert "embedding at test_bounds.py" in tokens
        assert "is given 12, out of range; expected 0 to 9" in tokens
        assert "is given 7, out of range; expected 0 to 5 or -100" in labels
