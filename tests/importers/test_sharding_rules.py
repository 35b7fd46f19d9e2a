"""Sharding rules of ATen operators, proven by running parts; faults that are planted in rules are found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pase.importers.torch.sharding_rules import ShardingRule, sharding_rule

torch = pytest.importorskip("torch")

from tests.importers import sharding_oracle as oracle  # noqa: E402 - needs PyTorch

aten = torch.ops.aten


def _numbers(*shape: int) -> Any:
    """Return numbers between 0.1 and 1, which every function is defined for."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return 0.1 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)


def _indices(stop: int, *shape: int) -> Any:
    return torch.randint(stop, shape, generator=torch.Generator().manual_seed(stop))


def _matrices(*shape: int) -> Any:
    """Return symmetric, positive definite matrices."""
    x = _numbers(*shape)
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)


_X = _numbers(4, 3, 6)

CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    # points
    "add broadcast": (aten.add.Tensor, (_numbers(4, 1, 6), _numbers(3, 6)), {}, "3 4 6"),
    "add a number": (aten.add.Tensor, (_X, 2.0), {}, "3 4 6"),
    "where": (aten.where.self, (_X > 0.5, _X, _numbers(6)), {}, "3 4 6"),
    "lerp": (aten.lerp.Scalar, (_X, _numbers(4, 3, 6), 0.3), {}, "3 4 6"),
    "addcmul": (aten.addcmul.default, (_X, _numbers(6), _numbers(3, 1)), {"value": 2.0}, "3 4 6"),
    "full_like": (aten.full_like.default, (_X, 3.0), {}, "3 4 6"),
    "masked_fill": (aten.masked_fill.Scalar, (_X, _X > 0.5, 0.0), {}, "3 4 6"),
    "full": (aten.full.default, ([4, 5], 3.0), {"dtype": torch.float64}, "4 5"),
    "new_zeros": (aten.new_zeros.default, (_X, [4, 5]), {}, "4 5"),
    "randn": (aten.randn.default, ([4, 5],), {"dtype": torch.float64}, ""),
    "dropout": (aten.dropout.default, (_X, 0.5, True), {}, ""),
    "dropout in evaluation": (aten.dropout.default, (_X, 0.5, False), {}, "3 4 6"),
    "mse_loss mean": (aten.mse_loss.default, (_X, _numbers(4, 3, 6)), {}, "3 4 6"),
    "mse_loss sum": (aten.mse_loss.default, (_X, _numbers(4, 3, 6), 2), {}, "3 4 6"),
    "smooth_l1_loss none": (aten.smooth_l1_loss.default, (_X, _numbers(4, 3, 6), 0), {}, "3 4 6"),
    # views
    "view merges": (aten.view.default, (_X, [12, -1]), {}, "3 4 6"),
    "view takes apart": (aten.view.default, (_numbers(12, 5), [3, 2, 2, 5]), {}, "2 2 3 5"),
    "view across": (aten.view.default, (_numbers(6, 4), [8, 3]), {}, "2"),
    "reshape": (aten.reshape.default, (_numbers(2, 3, 4, 5), [6, 20]), {}, "2 3 4 5"),
    "unflatten": (aten.unflatten.int, (_numbers(3, 8), 1, [-1, 4]), {}, "2 3 4"),
    "squeeze": (aten.squeeze.dims, (_numbers(3, 1, 4), [1, 2]), {}, "3"),
    "unsqueeze": (aten.unsqueeze.default, (_X, 1), {}, "3 4 6"),
    "expand": (aten.expand.default, (_numbers(4, 1), [3, -1, 6]), {}, "3 4 6"),
    "expand of no points": (aten.expand.default, (torch.zeros(4, 1, 0, dtype=torch.float64), [-1, 3, 0]), {}, ""),
    "permute": (aten.permute.default, (_X, [2, 0, 1]), {}, "3 4 6"),
    "transpose": (aten.transpose.int, (_X, 0, -1), {}, "3 4 6"),
    "slice": (aten.slice.Tensor, (_X, 1, 1, 3), {}, "4 6"),
    "slice of all": (aten.slice.Tensor, (_X, 1, 0, 9223372036854775807), {}, "3 4 6"),
    "select": (aten.select.int, (_X, 0, 2), {}, "3 6"),
    "split": (aten.split_with_sizes.default, (_X, [1, 3], 0), {}, "3 6"),
    "cat": (aten.cat.default, ([_X, _numbers(4, 2, 6)], 1), {}, "4 6"),
    "stack": (aten.stack.default, ([_X, _numbers(4, 3, 6)], 1), {}, "3 4 6"),
    "repeat": (aten.repeat.default, (_numbers(3, 4), [2, 5, 1]), {}, "2 3 4 5"),
    "repeat_interleave": (aten.repeat_interleave.self_int, (_numbers(3, 4), 2, 1), {}, "2 3 4"),
    "flip": (aten.flip.default, (_X, [1]), {}, "4 6"),
    "pad": (aten.constant_pad_nd.default, (_X, [1, 2]), {}, "3 4"),
    "diagonal": (aten.diagonal.default, (_X, 0, 0, 1), {}, "6"),
    "tril": (aten.tril.default, (_X,), {}, "4"),
    "pixel_shuffle": (aten.pixel_shuffle.default, (_numbers(3, 8, 2, 2), 2), {}, "2 3"),
    "slice_scatter": (aten.slice_scatter.default, (_X, _numbers(4, 1, 6), 1, 1, 2), {}, "4 6"),
    "sum_to_size": (aten.sum_to_size.default, (_X, [3, 1]), {}, "3 4 6"),
    # products
    "mm": (aten.mm.default, (_numbers(3, 4), _numbers(4, 5)), {}, "3 4 5"),
    "bmm": (aten.bmm.default, (_numbers(2, 3, 4), _numbers(2, 4, 5)), {}, "2 3 4 5"),
    "matmul broadcast": (aten.matmul.default, (_numbers(2, 1, 3, 4), _numbers(6, 4, 5)), {}, "2 3 4 5 6"),
    "linear": (aten.linear.default, (_numbers(2, 3, 4), _numbers(5, 4), _numbers(5)), {}, "2 3 4 5"),
    "addmm": (aten.addmm.default, (_numbers(5), _numbers(3, 4), _numbers(4, 5)), {"beta": 0.5}, "3 4 5"),
    "baddbmm": (aten.baddbmm.default, (_numbers(2, 1, 5), _numbers(2, 3, 4), _numbers(2, 4, 5)), {}, "2 3 4 5"),
    "einsum": (aten.einsum.default, ("b...hd,kd->b...hk", [_numbers(2, 3, 4, 5), _numbers(6, 5)]), {}, "2 3 4 5 6"),
    "einsum diagonal": (aten.einsum.default, ("iij->j", [_numbers(3, 3, 4)]), {}, "4"),
    "tensordot": (aten.tensordot.default, (_X, _numbers(6, 5, 4), [0, 2], [2, 0]), {}, "3 4 5 6"),
    "kron": (aten.kron.default, (_numbers(2, 3), _numbers(4, 5)), {}, "2 3 4 5"),
    "bilinear": (
        aten.bilinear.default,
        (_numbers(2, 3), _numbers(2, 4), _numbers(5, 3, 4), _numbers(5)),
        {},
        "2 3 4 5",
    ),
    "cdist": (aten.cdist.default, (_numbers(2, 3, 4), _numbers(2, 5, 4)), {}, "2 3 5"),
    "cosine_similarity": (aten.cosine_similarity.default, (_X, _numbers(3, 6), 2), {}, "3 4"),
    # along dims
    "sum": (aten.sum.dim_IntList, (_X, [0, -1]), {}, "3 4 6"),
    "mean": (aten.mean.dim, (_X, [1], True), {}, "3 4 6"),
    "mean of all": (aten.mean.default, (_X,), {}, "3 4 6"),
    "amax": (aten.amax.default, (_X, [1]), {}, "4 6"),
    "var": (aten.var.correction, (_X, [0]), {}, "3 6"),
    "quantile": (aten.quantile.default, (_X, _numbers(2), 1), {}, "4 6"),
    "max": (aten.max.dim, (_X, 1), {}, "4 6"),
    "softmax": (aten._softmax.default, (_X, -1, False), {}, "3 4"),
    "cumsum": (aten.cumsum.default, (_X, 0), {}, "3 6"),
    "sort": (aten.sort.default, (_X, 1), {}, "4 6"),
    "topk": (aten.topk.default, (_X, 2), {}, "3 4"),
    "glu": (aten.glu.default, (_X, 2), {}, "3 4"),
    "gather": (aten.gather.default, (_X, 1, _indices(3, 4, 5, 6)), {}, "4 5 6"),
    "gather of fewer": (aten.gather.default, (_X, 1, _indices(3, 2, 5, 6)), {}, "5 6"),
    "scatter": (aten.scatter.src, (_X, 2, torch.tensor([[[5, 2]] * 3] * 4), _numbers(4, 3, 2)), {}, "3 4"),
    "scatter_add": (aten.scatter_add.default, (_X, 1, _indices(3, 4, 5, 6), _numbers(4, 5, 6)), {}, "4 5 6"),
    "index_select": (aten.index_select.default, (_X, 1, _indices(3, 5)), {}, "4 5 6"),
    "index_add": (aten.index_add.default, (_X, 1, _indices(3, 5), _numbers(4, 5, 6)), {}, "4 5 6"),
    "index": (aten.index.Tensor, (_X, [_indices(4, 2, 1), None, _indices(6, 5)]), {}, "2 3 5"),
    "index_put added": (
        aten.index_put.default,
        (_X, [None, _indices(3, 5)], _numbers(4, 5, 6), True),
        {},
        "4 5 6",
    ),
    "index_put": (aten.index_put.default, (_X, [torch.tensor([2, 0])], _numbers(3, 6)), {}, "3 6"),
    "index_put of a mask": (aten.index_put.default, (_X, [None, _numbers(3, 6) > 0.5], _numbers()), {}, "3 4 6"),
    "embedding": (aten.embedding.default, (_numbers(7, 4), _indices(7, 2, 3), 1), {}, "2 3 4"),
    "fft": (aten._fft_r2c.default, (_X, [2], 0, True), {}, "3 4"),
    # matrices
    "cholesky": (aten.linalg_cholesky_ex.default, (_matrices(3, 4, 4),), {}, "3"),
    "solve": (aten._linalg_solve_ex.default, (_matrices(3, 4, 4), _numbers(3, 4, 2)), {}, "3"),
    "inverse": (aten.linalg_inv_ex.default, (_matrices(3, 4, 4),), {}, "3"),
    # normalisations
    "layer_norm": (aten.layer_norm.default, (_X, [3, 6], _numbers(3, 6), _numbers(3, 6)), {}, "4"),
    "rms_norm": (aten.rms_norm.default, (_X, [6], _numbers(6)), {}, "3 4"),
    "group_norm": (aten.group_norm.default, (_numbers(3, 8, 5), 4, _numbers(8), _numbers(8)), {}, "3 4"),
    "batch_norm": (
        aten._native_batch_norm_legit_functional.default,
        (_numbers(3, 4, 5), _numbers(4), _numbers(4), _numbers(4), _numbers(4), True, 0.1, 1e-5),
        {},
        "4",
    ),
    "batch_norm in evaluation": (
        aten._native_batch_norm_legit_no_training.default,
        (_numbers(3, 4, 5), _numbers(4), _numbers(4), _numbers(4), _numbers(4), 0.1, 1e-5),
        {},
        "3 4 5",
    ),
    # windows
    "conv2d": (aten.conv2d.default, (_numbers(2, 4, 5, 5), _numbers(6, 4, 3, 3), _numbers(6)), {}, "2 4 6"),
    "conv1d of groups": (
        aten.conv1d.default,
        (_numbers(2, 12, 5), _numbers(6, 4, 3), _numbers(6)),
        {"groups": 3},
        "2 2 3 4",
    ),
    "conv_transpose1d of groups": (
        aten.conv_transpose1d.default,
        (_numbers(2, 6, 5), _numbers(6, 4, 3), _numbers(12)),
        {"groups": 3},
        "2 2 3 4",
    ),
    "max_pool2d": (aten.max_pool2d_with_indices.default, (_numbers(2, 3, 6, 6), [2, 2]), {}, "2 3"),
    "upsample": (aten.upsample_bilinear2d.vec, (_numbers(2, 3, 4, 4), [8, 8], False, None), {}, "2 3"),
    "grid_sampler": (
        aten.grid_sampler_2d.default,
        (_numbers(2, 3, 4, 4), _numbers(2, 5, 6, 2), 0, 0, False),
        {},
        "2 3 5 6",
    ),
    "im2col": (aten.im2col.default, (_numbers(2, 3, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1]), {}, "2 3"),
    # sequences
    "attention": (
        aten.scaled_dot_product_attention.default,
        (_numbers(2, 3, 5, 4), _numbers(2, 3, 6, 4), _numbers(2, 3, 6, 7), _numbers(5, 6)),
        {},
        "2 3 5 7",
    ),
    "attention of groups": (
        aten.scaled_dot_product_attention.default,
        (_numbers(2, 6, 5, 4), _numbers(2, 3, 5, 4), _numbers(2, 3, 5, 4)),
        {"is_causal": True, "enable_gqa": True},
        "2 2 3 4",
    ),
    "lstm": (
        aten.lstm.input,
        (
            _numbers(5, 3, 4),
            [_numbers(1, 3, 2), _numbers(1, 3, 2)],
            [_numbers(8, 4), _numbers(8, 2), _numbers(8), _numbers(8)],
            True,
            1,
            0.0,
            True,
            False,
            False,
        ),
        {},
        "3",
    ),
    # losses
    "cross_entropy of shares": (aten.cross_entropy_loss.default, (_X, _numbers(4, 3, 6)), {}, "4 6"),
    "cross_entropy sum": (aten.cross_entropy_loss.default, (_X, _indices(3, 4, 6), _numbers(3), 2, 1), {}, "4 6"),
    "cross_entropy mean": (aten.cross_entropy_loss.default, (_X, _indices(3, 4, 6)), {}, ""),
    "nll_loss none": (aten.nll_loss_nd.default, (_numbers(4, 3), _indices(3, 4), None, 0), {}, "4"),
    "multi_margin_loss": (aten.multi_margin_loss.default, (_numbers(4, 3), _indices(3, 4)), {}, "4"),
}
"""Operators of each family, their arguments, and extents of the factors that may be split."""


def _call(name: str) -> oracle.Call:
    target, args, kwargs, _ = CALLS[name]
    return oracle.Call(target, args, kwargs)


def _rule(name: str) -> ShardingRule:
    target, args, kwargs, _ = CALLS[name]
    return sharding_rule(target, args, kwargs)


@pytest.fixture(scope="module")
def reports() -> dict[str, oracle.Report]:
    for name in CALLS:
        _rule(name)  # what is loaded at the first call is loaded once, not in each child
    found = oracle.in_child(lambda: {name: oracle.check_call(_call(name)) for name in CALLS}, 120)
    assert isinstance(found, dict), found
    return found


@pytest.mark.parametrize("name", CALLS)
def test_parts_are_parts_of_the_whole(name: str, reports: dict[str, oracle.Report]) -> None:
    rule = _rule(name)
    extents = sorted(rule.extents[factor] for factor in rule.splittable)
    assert " ".join(map(str, extents)) == CALLS[name][-1]
    assert rule.is_known
    assert not reports[name].wrong
    assert reports[name].checked.total() >= 2 * len(extents)


def _without_sums(rule: ShardingRule) -> ShardingRule:
    return replace(rule, sums=frozenset())


def _without_sizes(rule: ShardingRule) -> ShardingRule:
    return replace(rule, sizes=())


def _without_whole(rule: ShardingRule) -> ShardingRule:
    return replace(rule, whole=frozenset())


def _unweighted(rule: ShardingRule) -> ShardingRule:
    return replace(rule, is_mean=False)


def _added_always(rule: ShardingRule) -> ShardingRule:
    return replace(rule, once=())


def _never_added(rule: ShardingRule) -> ShardingRule:
    return replace(rule, added=())


def _linear_in_all(rule: ShardingRule) -> ShardingRule:
    return replace(rule, linear=tuple(range(len(rule.operands))))


FAULTS: list[tuple[Callable[[ShardingRule], ShardingRule], str]] = [
    (
        _without_sums,
        "mm|linear|sum|mean|index_add|scatter_add|index_put added|conv2d|mse_loss sum|einsum",
    ),
    (
        _without_sizes,
        "view merges|expand|full|repeat|repeat_interleave|group_norm|conv1d of groups|unflatten",
    ),
    (_without_whole, "softmax|cumsum|layer_norm|amax|var|sort|gather|cholesky|attention of groups|batch_norm|topk|cat"),
    (_unweighted, "mean|mean of all|mse_loss mean|multi_margin_loss|cross_entropy of shares"),
    (_added_always, "linear|addmm|baddbmm|bilinear|conv2d|index_add|scatter_add|index_put added"),
    (_never_added, "linear|addmm|where|cat|add broadcast|lerp|scatter"),
    (_linear_in_all, "softmax|mse_loss sum|layer_norm|attention|sort|addcmul"),
]


@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for fault, names in FAULTS for name in names.split("|") if name in CALLS],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_a_fault_in_a_rule_is_found(fault: Callable[[ShardingRule], ShardingRule], name: str) -> None:
    faulty = fault(_rule(name))
    assert faulty != _rule(name)
    report = oracle.in_child(lambda: oracle.check_call(_call(name), rule_of=lambda *_, **__: faulty), 60)
    # A kernel that writes where it should not may end the child.
    assert isinstance(report, str) or report.wrong


def test_nothing_is_known_of_an_operator_outside_of_the_table() -> None:
    rule = sharding_rule(
        aten._cdist_backward.default, (_numbers(3, 5), _numbers(3, 4), _numbers(5, 4), 2.0, _numbers(3, 5)), {}
    )
    assert not rule.is_known
    assert not rule.splittable
    assert [len(dims) for dims in (*rule.operands, *rule.results)] == [2, 2, 2, 2, 2]


def test_a_result_of_a_number_of_points_that_values_tell_has_no_rule() -> None:
    rule = sharding_rule(aten.nonzero.default, (_X,), {})
    assert (rule.is_known, rule.splittable, rule.results) == (False, (), ())


def test_nothing_is_known_of_sparse_tensors() -> None:
    sparse = torch.eye(4, dtype=torch.float64).to_sparse()
    rule = sharding_rule(aten.mm.default, (sparse, _numbers(4, 3)), {}, results=_numbers(4, 3))
    assert (rule.is_known, rule.splittable) == (False, ())


def test_tensors_without_values_have_the_same_rule() -> None:
    args = (_numbers(2, 3, 4), _numbers(5, 4), _numbers(5))
    meta = tuple(tensor.to("meta") for tensor in args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = tuple(mode.from_tensor(tensor) for tensor in args)
        made = aten.linear.default(*fake)
    rule = sharding_rule(aten.linear.default, args, {})
    assert sharding_rule(aten.linear.default, meta, {}) == rule
    assert sharding_rule(aten.linear.default, fake, {}) == rule
    assert sharding_rule(aten.linear.default, fake, {}, results=made) == rule


@pytest.mark.full
def test_operators_of_the_database_are_equal_on_parts() -> None:
    entries = oracle.operators()
    found = list(oracle.outcomes(entries, samples=4))
    table = oracle.table_of(found)
    equal = [outcome for outcome in found if outcome.exported and not outcome.report.wrong]
    assert not [wrong for outcome in found for wrong in outcome.report.wrong], table
    assert len(equal) >= 480, table
    assert sum(bool(outcome.report.checked) for outcome in equal) >= 450, table
