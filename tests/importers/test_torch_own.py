"""What bodies say that PyTorch alone computes is what the module computes; what such a plan may not say is refused."""

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pase.errors import GraphError, ProgramError  # noqa: E402
from pase.graph.body import Body, InnerDim, Step, verify_body  # noqa: E402
from pase.graph.sources import SOURCE_OPERATORS  # noqa: E402
from pase.importers.torch.live import trace_live  # noqa: E402
from pase.importers.torch.operators import TRANSLATIONS  # noqa: E402
from pase.targets.programs import plan_program  # noqa: E402
from pase.targets.torch.layers.experts import rows_of_groups  # noqa: E402
from pase.targets.torch.layers.sources import source  # noqa: E402
from pase.targets.torch.parallel import parallelize  # noqa: E402
from pase.targets.torch.program import Program  # noqa: E402
from pase.targets.torch.tensor import Dim, reshard  # noqa: E402
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


class Sorted(torch.nn.Module):  # type: ignore[misc]
    """Values in order, the largest ones, some replaced, a convolution that keeps the extent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 4, 3, padding="same"))

    def forward(self, x: Any) -> Any:
        x = self.layer(x).sort(-1).values
        x = torch.where(x > 0.5, x, 0.25).index_put((torch.tensor([0, 2]),), torch.tensor(0.5, dtype=x.dtype))
        return x.topk(3).values.square().mean()


OWN: Mapping[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "projected": lambda: (Projected(), {"x": whole(16, 4, 6), "y": whole(15, 4, 6)}),
    "sorted": lambda: (Sorted(), {"x": random(4, 3, 8)}),
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
def test_programs_call_what_pytorch_alone_computes(name: str) -> None:
    module, inputs = OWN[name]()
    plan = random_plan(trace_live((module.double(), inputs)).model.graph, 2, 0)
    # The mask of one is computed by the module.
    assert "source(" in plan_program(plan, target="torch", aten={}).text()


# -- hostile plans


def call(
    operator: str,
    arguments: str = '[[{"operand": 0}], {}]',
    layouts: str = '[[["b"]], [["b"]]]',
    number: int = 0,
) -> Step:
    options = (("operator", operator), ("arguments", arguments), ("layouts", layouts), ("number", number))
    return Step(result="t1", function="source", operands=("x",), dims=("b",), options=options)


PADDED = '[[{"operand": 0}, [9223372036854775807, 9223372036854775807, 0, -1]], {}]'
"""Extents that add up to a small one, by overflow: PyTorch reads beyond the operand (SIGSEGV)."""

HOSTILE = (
    "aten.max_pool2d_with_indices_backward.default", "aten._embedding_bag_dense_backward.default",
    "aten._reshape_alias.default", "aten.as_strided.default", "aten.as_strided_copy.default",
    "aten.set.source_Tensor", "aten.resize.default", "aten._resize_output.default", "aten.empty_like.default",
    "aten._unsafe_view.default", "aten._unsafe_index.Tensor", "aten._unsafe_masked_index.default",
    "aten._fft_c2r.default", "aten.ctc_loss.Tensor", "aten.from_file.default", "aten.rand_like.default",
    "aten.bernoulli.default", "aten.relu_.default", "os.system.default", "aten.relu", "",
)  # fmt: skip
"""Operators that trust what they are given, read memory or files, write into operands, or are random."""


@pytest.mark.parametrize(
    ("step", "message"),
    [
        *((call(name), f"calls '{re.escape(name)}'; expected an operator of PyTorch's 'aten'") for name in HOSTILE),
        (replace(call("aten.relu.default"), operands=()), "has 0 operands"),
        (call("aten.relu.default", '[["/etc/passwd", {"module": "os"}], {}]'), "arguments that cannot be read"),
        (call("aten.relu.default", '[[{"operand": 3}], {}]'), "arguments that cannot be read"),
        (call("aten.relu.default", "[" * 3000), "arguments that cannot be read"),
        (call("aten.replication_pad2d.default", PADDED), "a number of 63 bits is not a valid argument"),
        (call("aten.relu.default", layouts='[[["q"]], [["b"]]]'), "names dims"),
        (call("aten.relu.default", number=-1), "there is no result -1"),
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


@pytest.mark.parametrize("operator", HOSTILE)
def test_a_hostile_operator_is_refused_where_a_program_is_built(operator: str) -> None:
    with pytest.raises(ProgramError, match="which is none of the operators that imports write into plans"):
        source(operator, [], json.dumps([[], {}]), [[]])


@pytest.mark.parametrize("operator", ["aten.add.out", "aten.relu.no_such", "aten.einsum.out"])
def test_an_overload_that_writes_or_is_not_there_is_refused(operator: str) -> None:
    with pytest.raises(ProgramError, match=r"does not return tensors alone|has no operator"):
        source(operator, [], json.dumps([[], {}]), [[]])


def test_operators_that_programs_may_call_are_functions_of_their_operands() -> None:
    """By PyTorch's own table: some overload writes nowhere, takes a tensor, draws no numbers, and returns tensors."""
    for name in SOURCE_OPERATORS:
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        assert any(
            not one._schema.is_mutable
            and any("Tensor" in str(argument.type) for argument in one._schema.arguments)
            and all("Tensor" in str(result.type) for result in one._schema.returns)
            for one in overloads
        ), name
        assert "backward" not in name
        random = {"lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention"}  # by a rate that is 0
        assert all(torch.Tag.nondeterministic_seeded not in one.tags for one in overloads) or name in random, name


WHOLE = """
    _weight_norm_interface addbmm addr binary_cross_entropy binary_cross_entropy_with_logits cdist
    cosine_embedding_loss cross hinge_embedding_loss huber_loss isin kl_div kron l1_loss linalg_cross linalg_inv
    linalg_solve margin_ranking_loss mse_loss multi_margin_loss one_hot poisson_nll_loss rot90 smooth_l1_loss
    soft_margin_loss special_xlog1py trace triplet_margin_loss
"""
"""Operators that have no translation: PyTorch takes most of them apart where a module is traced."""

NEVER = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _embedding_bag _fft_c2r _fft_r2c _native_batch_norm_legit
    _native_batch_norm_legit_no_training alias as_strided copy fill
"""
"""Of PyTorch's core operators those that a module is not traced to, that write into an operand, or read by strides."""


def test_operators_that_programs_may_call_are_those_that_imports_produce() -> None:
    """The list and the importer's table are kept together by the tags of PyTorch's own table."""
    assert SOURCE_OPERATORS - {*TRANSLATIONS} == {*WHOLE.split()}
    core = set()
    for name in TRANSLATIONS:
        packet = getattr(torch.ops.aten, name, None)
        overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
        draws = any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)
        for one in overloads:
            schema = one._schema
            is_of_tensors = any("Tensor" in str(item.type) for item in schema.arguments)
            is_of_tensors &= all("Tensor" in str(item.type) for item in schema.returns)
            if torch.Tag.core in one.tags and is_of_tensors and not schema.is_mutable and not draws:
                core.add(name)
    assert len(core) > 100
    assert core - SOURCE_OPERATORS == {*NEVER.split()}


def calls(arguments: str, *, rows: int, is_index: bool = False, operator: str = "aten.gather.default") -> Any:
    """Call an operator of 4 rows of 3 floats and of 4 rows of 3 whole numbers in a program of one rank."""
    program = Program(rank=0, num_devices=1)
    mesh = program.mesh("layer", [])
    b, n, r = Dim("b", 4), Dim("n", 3), Dim("r", rows)
    x = reshard(program.floats("x", (4, 3)), mesh, [b, n])
    places = reshard(program.indices("places", (4, 3), below=3), mesh, [b, n])
    return source(operator, [x, places], arguments, [[[b], [n]], [[b], [n]], [[r], [n]]], is_index=is_index)


BOTH = '[[{"operand": 0}, {"operand": 1}], {}]'
PICKED = '[[{"operand": 0}, 1, {"operand": 1}], {}]'


def test_a_number_is_no_type() -> None:
    """PyTorch looks it up in a table: SIGFPE, or whatever stands behind the table."""
    for arguments in ('[[{"operand": 0}, 1000], {}]', '[[{"operand": 0}], {"dtype": "x"}]'):
        with pytest.raises(ProgramError, match=r"'aten.view.dtype' with (1000|'x') for its dtype; expected a type"):
            calls(arguments, rows=4, operator="aten.view.dtype")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            PICKED,
            {"rows": 5},
            r"for floats of shape \[5, 3\], but of operands .* its result has shape \[4, 3\] and type",
        ),
        (BOTH, {"rows": 4, "operator": "aten.eq.Tensor"}, r"for floats of shape \[4, 3\], but .* type torch.bool"),
        (BOTH, {"rows": 4, "operator": "aten.atan2.default", "is_index": True}, r"for whole numbers .* torch.float32"),
        ('[[{"operand": 0}, 9, {"operand": 1}], {}]', {"rows": 4}, "it fails: Dimension out of range"),
        ('[[{"operand": 0}, 1, {"operand": 0}], {}]', {"rows": 4}, r"it fails: gather.* index"),
        (
            '[[{"operand": 0}, [1099511627776, 4]], {}]',
            {"rows": 4, "operator": "aten.repeat.default"},
            "result has shape",
        ),
        ('[[{"operand": 0}, "x"], {}]', {"rows": 4, "operator": "aten.softmax.int"}, "it fails: "),
    ],
)
def test_arguments_that_give_another_result_are_refused_before_anything_runs(
    arguments: str, options: dict[str, Any], message: str
) -> None:
    assert calls(PICKED, rows=4).names == ("r", "n")
    with pytest.raises(ProgramError, match=f"layer 'layer' calls PyTorch's .*{message}"):
        calls(arguments, **options)


OUT_OF_RANGE = """
import torch
a = torch.ops.aten
x, rows, t = torch.rand(4, 3), torch.rand(4), torch.rand(4, 3, 2, 2)
for far in (2**40, -2**40, 5, -5):
    at, one = torch.full((4, 3), far), torch.full((4,), far)
    for name, call in {
        "embedding": lambda: a.embedding(x, at),
        "gather": lambda: a.gather(x, 1, at),
        "index": lambda: a.index(x, [one]),
        "index_add": lambda: a.index_add(x, 0, one, x),
        "index_copy": lambda: a.index_copy(x, 0, one, x),
        "index_fill": lambda: a.index_fill(x, 0, one, 1.0),
        "index_put": lambda: a.index_put(x, [one], x),
        "index_select": lambda: a.index_select(x, 0, one),
        "scatter": lambda: a.scatter(x, 1, at, x),
        "scatter_add": lambda: a.scatter_add(x, 1, at, x),
        "scatter_reduce": lambda: a.scatter_reduce(x, 1, at, x, "sum"),
        "searchsorted": lambda: a.searchsorted(rows, x, sorter=one),
        "nll_loss": lambda: a.nll_loss(x, one),
        "nll_loss2d": lambda: a.nll_loss2d(t, torch.full((4, 2, 2), far)),
        "nll_loss_nd": lambda: a.nll_loss_nd(x, one),
        "cross_entropy_loss": lambda: a.cross_entropy_loss(x, one),
        "multi_margin_loss": lambda: a.multi_margin_loss(x, one),
        "one_hot": lambda: a.one_hot(at, 3),
        "repeat_interleave": lambda: a.repeat_interleave(x, one, 0, output_size=8),
    }.items():
        try:
            call()
        except (RuntimeError, IndexError):
            print(name, flush=True)
# Classes from the first that is below 0 on count as none.
try:
    a.multilabel_margin_loss(x, torch.full((4, 3), 2**40))
except (RuntimeError, IndexError):
    print("multilabel_margin_loss", flush=True)
try:
    a.masked_scatter(x, torch.ones(4, 3, dtype=torch.bool), rows)
except RuntimeError:
    print("masked_scatter", flush=True)
"""


def test_pytorch_checks_the_numbers_that_operators_look_up_by() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", OUT_OF_RANGE], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    counts = Counter(finished.stdout.split())
    looked_up = {
        "embedding", "gather", "index", "index_add", "index_copy", "index_fill", "index_put",
        "index_select", "scatter", "scatter_add", "scatter_reduce", "searchsorted", "nll_loss", "nll_loss2d",
        "nll_loss_nd", "cross_entropy_loss", "multi_margin_loss", "one_hot", "repeat_interleave",
    }  # fmt: skip
    assert looked_up <= SOURCE_OPERATORS
    assert counts == {**dict.fromkeys(looked_up, 4), "multilabel_margin_loss": 1, "masked_scatter": 1}


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 5), (torch.float32, 8), (torch.bfloat16, 8)])
def test_rows_of_groups_are_those_of_one_product_for_each(dtype: Any, width: int) -> None:
    """With gradients; PyTorch's own product, where it takes the type, leaves rows of no group undefined."""
    ends = torch.tensor([2, 2, 9, 11])
    rows, weights = random(12, width).to(dtype), random(4, 16, width).to(dtype)
    own, alone = ([x.clone().requires_grad_() for x in (rows, weights)] for _ in range(2))
    found = rows_of_groups(*own, ends)
    expected = torch.stack([
        alone[1][int((ends > i).nonzero()[0])] @ alone[0][i] if i < 11 else torch.zeros(16, dtype=dtype)
        for i in range(12)
    ])  # fmt: skip
    torch.testing.assert_close(found, expected)
    for made in (found, expected):
        made.square().sum().backward()
    # In bfloat16 a sum over rows is rounded after each row, or at its end.
    allowed = {"rtol": 0.05, "atol": 0.2} if dtype == torch.bfloat16 else {}
    for mine, theirs in zip(own, alone, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **allowed)


def test_rows_of_groups_have_the_type_of_autocast() -> None:
    rows, weights, ends = random(12, 8).float(), random(4, 16, 8).float(), torch.tensor([2, 2, 9, 11])
    with torch.autocast("cpu", torch.bfloat16):
        assert rows_of_groups(rows, weights, ends).dtype == (rows @ weights[0].t()).dtype == torch.bfloat16
