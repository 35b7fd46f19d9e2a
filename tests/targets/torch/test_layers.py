"""Layers of shards against their definitions: values and gradients in float64, however their dims are split.

Definitions are written out in elementary functions of whole tensors. Ranks are threads (`lockstep`).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.layers import (
    GATES,
    attention,
    batch_norm,
    concat,
    convolve_transposed,
    cut,
    dropout,
    end_to_end,
    fn,
    greatest,
    grouped,
    last_state,
    lookup,
    lstm,
    normalise,
    padded,
    pick,
    piece,
    pool,
    product,
    recurrent,
    reductions,
    reshard,
    routed,
    select_rows,
    softmax,
    softmax_loss,
    view,
    window,
    without_later_keys,
)
from pase.targets.torch.program import Program
from pase.targets.torch.tensor import Dim, Tensor
from pase.targets.training.counted import kept as kept_points
from pase.targets.training.counted import step_key
from tests.targets.torch.lockstep import Computed, computed

RELATIVE = 1e-12
RANKS = (2, 4, 6)

Axes = list[tuple[str, int]]
Operands = Mapping[str, Sequence[Dim]]


def meshes(dims: Sequence[Dim], *, number: int, fixed: Sequence[Dim] = ()) -> Iterator[tuple[int, Axes, list[int]]]:
    """Yield numbers of ranks, random splits of dims, which divide them, and orders of the ranks."""
    for num_ranks in RANKS:
        for seed in range(number):
            numbers = random.Random(f"{[dim.name for dim in dims]} {num_ranks} {seed}")
            left, axes = num_ranks, []
            for dim in numbers.sample(list(dims), len(dims)):
                choices = [k for k in range(1, left + 1) if left % k == 0 and dim.size % k == 0]
                parts = 1 if dim in fixed else numbers.choice(choices if numbers.random() < 0.3 else choices[-1:])
                left //= parts
                axes += [(dim.name, parts)] if parts > 1 else []
            yield num_ranks, axes, numbers.sample(range(num_ranks), num_ranks)


def drawn(shape: Sequence[int], name: str) -> Any:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 101 + prod(shape))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def assert_near(found: Any, expected: Any, what: str) -> None:
    """Differences are small beside the largest number: a sum of others may be next to nothing."""
    assert found.shape == expected.shape, what
    size = float(expected.abs().max()) if expected.numel() else 0.0
    difference = float((found - expected).abs().max()) if expected.numel() else 0.0
    assert difference <= RELATIVE * size, f"{what}: {difference} of {size}"


def check(
    layer: Callable[..., Tensor],
    definition: Callable[..., Any],
    operands: Operands,
    *,
    indices: Mapping[str, tuple[Sequence[Dim], int]] | None = None,
    fixed: Sequence[Dim] = (),
    values: Mapping[str, Any] | None = None,
    inner: Sequence[Dim] = (),
    number: int = 2,
    trains: bool = True,
    key: Any = None,
) -> list[Computed]:
    """Compare a layer with its definition under random splits.

    Args:
        layer: of the operands.
        definition: of the operands, whole.
        operands: dims of each; they are trained.
        indices: dims of each operand that holds whole numbers, and below what they are.
        fixed: dims that are not split.
        values: of operands that are not random.
        inner: dims of the mesh besides those of the operands.
        number: of splits for each number of ranks.
        trains: as the program is told.
        key: of random masks.
    """
    indices = indices or {}
    given = {name: drawn([dim.size for dim in dims], name) for name, dims in operands.items()} | dict(values or {})
    for name, (dims, below) in indices.items():
        given.setdefault(name, drawn([dim.size for dim in dims], name).mul(1e6).long().remainder(below))
    leaves = {name: x.clone().requires_grad_(name in operands) for name, x in given.items()}
    y = definition(**leaves)
    dy = drawn(y.shape, "upstream")
    y.backward(dy)
    every = dict.fromkeys(
        [dim for dims in (*operands.values(), *(d for d, _ in indices.values()), inner) for dim in dims]
    )
    results = []
    for num_ranks, axes, devices in meshes(list(every), number=number, fixed=fixed):

        def build(program: Program, axes: Axes = axes, devices: list[int] = devices) -> dict[str, Tensor]:
            mesh = program.mesh("layer", axes, devices)
            tensors = {name: program.weight(mesh, name, dims) for name, dims in operands.items()}
            for name, (dims, below) in indices.items():
                source = program.indices(name, [dim.size for dim in dims], below=below)
                tensors[name] = reshard(source, mesh, dims)
            return {"result": layer(**tensors)}

        found = computed(build, num_ranks, given, upstream={"result": dy}, trains=trains, key=key)
        where = f"{axes} on {devices}"
        assert_near(found.outputs["result"], y.detach(), f"values under {where}")
        for name in operands:
            gradient = leaves[name].grad
            expected = torch.zeros_like(given[name]) if gradient is None else gradient
            own = found.gradients.get(name, torch.zeros_like(given[name]))
            assert_near(own, expected, f"gradient of {name} under {where}")
        results.append(found)
    return results


B, C, H, W = (Dim(*item) for item in (("b", 6), ("c", 12), ("h", 4), ("w", 2)))


# -- normalisation


def normal(x: Any, over: Sequence[int], epsilon: float) -> tuple[Any, Any, Any]:
    mean = sum_over(x, over) / prod(x.shape[i] for i in over)
    variance = sum_over((x - mean) ** 2, over) / prod(x.shape[i] for i in over)
    return (x - mean) / (variance + epsilon) ** 0.5, mean, variance


def sum_over(x: Any, over: Sequence[int]) -> Any:
    for place in over:
        x = torch.stack(x.unbind(place)).sum(0).unsqueeze(place)
    return x


def place(x: Any, dims: Sequence[Dim], of: Sequence[Dim]) -> Any:
    """Put a tensor of some dims beside one of others."""
    order = [dim for dim in of if dim in dims]
    x = x.permute([list(dims).index(dim) for dim in order])
    return x.reshape([dim.size if dim in dims else 1 for dim in of])


ONE = Dim("one", 1)

NORMALISED = {
    "batch": ((B, C, H, W), (B, H, W), (C,)),
    "batch, images of one point": ((B, C, ONE), (B,), (C,)),
    "batch, channels last": ((B, H, W, C), (B, H, W), (C,)),
    "batch of rows": ((B, C), (B,), (C,)),
    "channels of two dims": ((B, H, C, W), (B, W), (H, C)),
    "channels of two dims, turned": ((B, H, C, W), (B, W), (C, H)),
    "channels apart": ((H, B, C, W), (B, W), (H, C)),
    "layer": ((B, H, C), (C,), (C,)),
    "layer of two dims": ((B, H, C), (H, C), (H, C)),
    "layer, one scale": ((B, H, C), (H, C), (C,)),
    "group": ((B, C, H, W), (H, W), (C, H)),
    "instance": ((B, C, H, W), (H, W), (C,)),
    "first": ((B, C, H), (B,), (H,)),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_normalise(name: str) -> None:
    dims, over, weighted = NORMALISED[name]
    places = [dims.index(dim) for dim in over]

    def definition(x: Any, scale: Any, shift: Any) -> Any:
        return normal(x, places, 1e-3)[0] * place(scale, weighted, dims) + place(shift, weighted, dims)

    check(
        lambda x, scale, shift: normalise(fn.tanh(x), scale, shift, over, epsilon=1e-3),
        lambda x, scale, shift: definition(torch.tanh(x), scale, shift),
        {"x": dims, "scale": weighted, "shift": weighted},
    )


def test_a_large_mean_costs_no_digits() -> None:
    dims = (B, C, H, W)
    x = drawn([dim.size for dim in dims], "x") + 1e6
    exact = x.numpy().astype(np.longdouble)
    mean = exact.mean((0, 2, 3), keepdims=True)
    expected = (exact - mean) / np.sqrt(((exact - mean) ** 2).mean((0, 2, 3), keepdims=True) + 1e-5)

    def build(program: Program, axes: Axes) -> dict[str, Tensor]:
        mesh = program.mesh("layer", axes)
        weights = [program.weight(mesh, "scale", [C]), program.weight(mesh, "shift", [C])]
        return {"y": normalise(program.weight(mesh, "x", dims), *weights, [B, H, W], epsilon=1e-5)}

    given = {"x": x, "scale": torch.ones(C.size).double(), "shift": torch.zeros(C.size).double()}
    for axes in ([("c", 2)], [("b", 2)]):
        found = computed(lambda program, axes=axes: build(program, axes), 2, given)
        difference = np.abs(found.outputs["y"].numpy() - expected.astype(np.float64)).max()
        assert difference < 1e-8


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dims", [(B, C, H, W), (B, H, C), (B, C)])
def test_batch_norm(dims: tuple[Dim, ...], trains: bool, numbers: bool) -> None:
    over = [dim for dim in dims if dim != C]
    places = [dims.index(dim) for dim in over]
    count = prod(dim.size for dim in over)
    mean, variance = drawn([C.size], "mean"), drawn([C.size], "variance").square()

    def layer(x: Tensor, **weights: Tensor) -> Tensor:
        program, mesh = x.mesh.program, x.mesh
        assert isinstance(program, Program)
        kept = [program.statistic(mesh, "mean", [C]), program.statistic(mesh, "variance", [C], initial=1.0)]
        scale, shift = (weights["scale"], weights["shift"]) if weights else (1.0, 0.0)
        options: dict[str, Any] = {"epsilon": 1e-5, "momentum": 0.1, "factor": count / (count - 1)}
        return batch_norm(program, fn.tanh(x), scale, shift, over, kept=kept, **options)

    def definition(x: Any, mean: Any, variance: Any, **weights: Any) -> Any:
        x = torch.tanh(x)
        if trains:
            y = normal(x, places, 1e-5)[0]
        else:
            y = (x - place(mean, [C], dims)) / (place(variance, [C], dims) + 1e-5) ** 0.5
        return y * place(weights["scale"], [C], dims) + place(weights["shift"], [C], dims) if weights else y

    operands: dict[str, Sequence[Dim]] = {"x": dims} | ({} if numbers else {"scale": [C], "shift": [C]})
    results = check(layer, definition, operands, values={"mean": mean, "variance": variance}, trains=trains)
    x = torch.tanh(drawn([dim.size for dim in dims], "x"))
    _, own_mean, own_variance = normal(x, places, 1e-5)
    for found in results:
        assert set(found.kept) == ({"mean", "variance"} if trains else set())
        if trains:
            # By the rule of torch.nn: the variance of a population of which the batch is a sample.
            assert_near(found.kept["mean"], own_mean.flatten(), "mean")
            assert_near(found.kept["variance"], own_variance.flatten() * count / (count - 1), "variance")


def test_batch_norm_keeps_what_pytorch_keeps() -> None:
    own = torch.nn.BatchNorm2d(C.size, momentum=0.1).double()
    x = drawn((B.size, C.size, H.size, W.size), "x")
    count = B.size * H.size * W.size

    def build(program: Program) -> dict[str, Tensor]:
        mesh = program.mesh("layer", [("c", 2), ("h", 2)])
        kept = [program.statistic(mesh, "mean", [C]), program.statistic(mesh, "variance", [C], initial=1.0)]
        options: dict[str, Any] = {"epsilon": 1e-5, "momentum": 0.1, "factor": count / (count - 1)}
        x = program.weight(mesh, "x", [B, C, H, W])
        return {"y": batch_norm(program, x, 1.0, 0.0, [B, H, W], kept=kept, **options)}

    given = {"x": x, "mean": own.running_mean.clone(), "variance": own.running_var.clone()}
    for _ in range(3):
        found = computed(build, 4, given)
        assert_near(found.outputs["y"], own(x).detach(), "y")
        for name in ("mean", "variance"):
            given[name] = given[name].lerp(found.kept[name], 0.1)
    assert_near(given["mean"], own.running_mean, "mean")
    assert_near(given["variance"], own.running_var, "variance")


# -- dropout


@pytest.mark.parametrize("trains", [True, False])
def test_dropout(trains: bool) -> None:
    key = step_key(3, 5)
    is_kept = torch.from_numpy(kept_points("layer", (B.size, C.size, H.size), 0.3, key))
    assert 0.6 < is_kept.double().mean() < 0.8

    def definition(x: Any) -> Any:
        return torch.where(is_kept, x / 0.7, 0.0) if trains else x

    check(
        lambda x: dropout(x, x.mesh.program.mask_key, rate=0.3),
        definition,
        {"x": (B, C, H)},
        trains=trains,
        key=torch.from_numpy(key),
    )


# -- sums of products


N, J, K, L = (Dim(*item) for item in (("n", 6), ("j", 4), ("k", 12), ("l", 2)))

PRODUCTS = {
    "matrices": ([(N, K), (K, J)], (N, J), "nk,kj->nj"),
    "turned": ([(N, K), (J, K)], (N, J), "nk,jk->nj"),
    "sequence": ([(N, L, K), (K, J)], (N, L, J), "nlk,kj->nlj"),
    "heads": ([(N, K), (K, J, L)], (N, J, L), "nk,kjl->njl"),
    "of heads": ([(N, J, K), (J, K, L)], (N, L), "njk,jkl->nl"),
    "result's dims turned": ([(N, K), (K, J, L)], (N, L, J), "nk,kjl->nlj"),
    "batches": ([(N, J, K), (N, K, L)], (N, J, L), "njk,nkl->njl"),
    "outer": ([(N,), (J,)], (N, J), "n,j->nj"),
    "three": ([(N, K), (K, J), (J,)], (N,), "nk,kj,j->n"),
    "repeated": ([(N, K), (K, J)], (N, L, J), "nk,kj->nj"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str) -> None:
    dims, out, equation = PRODUCTS[name]

    def definition(**xs: Any) -> Any:
        found = torch.einsum(equation, *xs.values())
        return found.unsqueeze(1).expand([dim.size for dim in out]) if name == "repeated" else found

    operands = {f"x{number}": own for number, own in enumerate(dims)}
    check(lambda **xs: product(*xs.values(), list(out)), definition, operands, inner=out)


@pytest.mark.parametrize("frozen", [-1, 5])
@pytest.mark.parametrize("columns", [(), (J,), (J, Dim("m", 3))])
def test_lookup(frozen: int, columns: tuple[Dim, ...]) -> None:
    def definition(table: Any, places: Any) -> Any:
        rows = [row.detach() if number == frozen else row for number, row in enumerate(table)]
        return torch.stack([torch.stack([rows[i] for i in row]) for row in places.tolist()])

    check(
        lambda table, places: lookup(table, places, K, *columns, frozen=frozen),
        definition,
        {"table": (K, *columns)},
        indices={"places": ((N, L), K.size)},
    )


def test_rows_of_groups_that_are_split_go_to_their_groups_and_what_is_made_of_them_back() -> None:
    groups, rows, columns, features = Dim("e", 6), Dim("r", 4), Dim("m", 12), Dim("f", 8)
    # Some groups have no row, one has a third of them.
    ends = torch.tensor([5, 5, 13, 16, 16, 24])

    def definition(x: Any, w: Any, ends: Any) -> Any:
        of_row = torch.searchsorted(ends, torch.arange(24), right=True)
        return torch.einsum("rf,rmf->rm", x.reshape(24, 8), w[of_row]).reshape(6, 4, 12)

    found = check(
        lambda x, w, ends: grouped(x, w, ends, (groups, rows, columns, features)),
        definition,
        {"x": (groups, rows, features), "w": (groups, columns, features)},
        indices={"ends": ((Dim("ends", 6),), 25)},
        fixed=(Dim("ends", 6),),
        values={"ends": ends},
        number=4,
    )
    assert any(own.sent for own in found)

    def build(program: Program) -> dict[str, Tensor]:
        mesh = program.mesh("layer", [("e", 3)], [2, 0, 1])
        x = program.weight(mesh, "x", (groups, rows, features))
        w = program.weight(mesh, "w", (groups, columns, features))
        given = reshard(program.indices("ends", [6], below=25), mesh, [Dim("ends", 6)])
        return {"result": grouped(x, w, given, (groups, rows, columns, features))}

    values = {"x": drawn((6, 4, 8), "x"), "w": drawn((6, 12, 8), "w"), "ends": ends}
    own = computed(build, 3, values, upstream={"result": drawn((6, 4, 12), "up")})
    # Rows 5 to 7 lie with the first two groups, and are of the third: they go there, and back; so do gradients.
    assert list(own.sent.values()) == [2 * 3 * (8 + 12) * 8]


@pytest.mark.parametrize(("rows", "places"), [((K,), (K,)), ((K,), (K, L)), ((K, L), (K,))])
@pytest.mark.parametrize("columns", [(), (J,), (J, Dim("m", 3))])
def test_rows_that_places_ask_for(rows: tuple[Dim, ...], places: tuple[Dim, ...], columns: tuple[Dim, ...]) -> None:
    asked = Dim("asked", prod(dim.size for dim in places))
    num_rows = prod(dim.size for dim in rows)

    def definition(table: Any, numbers: Any) -> Any:
        shape = [dim.size for dim in columns]
        found = torch.stack([table.reshape(num_rows, *shape)[i] for i in numbers.tolist()])
        return found.reshape([dim.size for dim in places] + shape)

    found = check(
        lambda table, numbers: routed(table, numbers, places, rows),
        definition,
        {"table": (*rows, *columns)},
        indices={"numbers": ((asked,), num_rows)},
        fixed=(asked, L),
    )
    assert any(own.sent for own in found)


@pytest.mark.parametrize("several", [False, True])
def test_pick(several: bool) -> None:
    own = (N, L) if several else (N,)

    def definition(x: Any, places: Any) -> Any:
        return torch.stack(
            [torch.stack([x[i, p] for p in row]) for i, row in enumerate(places.reshape(N.size, -1).tolist())]
        ).reshape(places.shape)

    check(lambda x, places: pick(x, places, K), definition, {"x": (N, K)}, indices={"places": (own, K.size)})


# -- functions over dims


@pytest.mark.parametrize(
    ("name", "definition"),
    [
        ("total", lambda x, over: sum_over(x, over)),
        ("mean", lambda x, over: sum_over(x, over) / prod(x.shape[i] for i in over)),
        ("greatest", lambda x, over: x.amax(over, keepdim=True)),
        ("least", lambda x, over: x.amin(over, keepdim=True)),
        ("softmax", lambda x, over: torch.exp(x) / sum_over(torch.exp(x), over)),
        ("log_softmax", lambda x, over: x - torch.log(sum_over(torch.exp(x), over))),
    ],
)
@pytest.mark.parametrize("over", [(K,), (N, K)])
def test_functions_over_dims(name: str, definition: Any, over: tuple[Dim, ...]) -> None:
    dims = (N, J, K)
    places = [dims.index(dim) for dim in over]
    keeps = name.endswith("softmax")

    def whole(x: Any, y: Any) -> Any:
        found = definition(x * y, places)
        return found if keeps else found.squeeze(places)

    layer = getattr(reductions, name)
    # A function of a product, whose points may be parts of sums where they are read.
    check(lambda x, y: layer(fn.multiply(x, y), over), whole, {"x": dims, "y": (K,)})


def test_the_greatest_of_equal_points_share_a_gradient() -> None:
    x = drawn((N.size, K.size), "x").round()
    check(lambda x: greatest(x, [K]), lambda x: x.amax(1), {"x": (N, K)}, values={"x": x})


def test_softmax_of_large_numbers_is_finite() -> None:
    x = drawn((N.size, K.size), "x") * 1e4
    check(lambda x: softmax(x, [K]), lambda x: torch.softmax(x, 1), {"x": (N, K)}, values={"x": x})


def test_without_later_keys() -> None:
    query, key = Dim("s", 6), Dim("t", 12)
    is_later = torch.tensor([[t > s for t in range(12)] for s in range(6)])

    def layer(x: Tensor) -> Tensor:
        return softmax(without_later_keys(x, query, key), [key])

    check(layer, lambda x: torch.softmax(torch.where(is_later, -torch.inf, x), 2), {"x": (N, query, key)})
    turned = (key, N, query)
    check(
        layer,
        lambda x: torch.softmax(torch.where(is_later.T.unsqueeze(1), -torch.inf, x), 0),
        {"x": turned},
        number=1,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    batch, query, key, heads, feature = (Dim(*item) for item in (("b", 2), ("s", 6), ("t", 12), ("h", 4), ("k", 6)))

    def definition(q: Any, k: Any, v: Any) -> Any:
        scores = (q.unsqueeze(2) * k.unsqueeze(1)).sum(-1) * 0.3
        if causal:
            later = torch.tensor([[t > s for t in range(12)] for s in range(6)])
            scores = scores.masked_fill(later.reshape(1, 6, 12, 1), -torch.inf)
        powers = torch.exp(scores)
        return ((powers / powers.sum(2, keepdim=True)).unsqueeze(-1) * v.unsqueeze(1)).sum(2)

    operands = {
        "q": (batch, query, heads, feature),
        "k": (batch, key, heads, feature),
        "v": (batch, key, heads, feature),
    }
    check(lambda q, k, v: attention(q, k, v, scale=0.3, causal=causal), definition, operands)


def test_softmax_loss() -> None:
    def definition(x: Any, labels: Any) -> Any:
        own = [
            torch.log(torch.exp(row).sum()) - row[label]
            for row, label in zip(x.flatten(0, 1), labels.flatten(), strict=True)
        ]
        return torch.stack(own).mean()

    check(
        lambda x, labels: softmax_loss(x, labels, K), definition, {"x": (N, L, K)}, indices={"labels": ((N, L), K.size)}
    )


# -- windows


def test_convolution_transposed() -> None:
    b, c, o, h, w, y, z, r, s = (
        Dim(*item)
        for item in (("b", 6), ("c", 4), ("o", 6), ("h", 3), ("w", 2), ("y", 6), ("z", 4), ("r", 3), ("s", 2))
    )

    def definition(x: Any, filters: Any) -> Any:
        found = torch.zeros(b.size, o.size, y.size, z.size, dtype=torch.float64)
        for i, j, k, m in np.ndindex(h.size, w.size, r.size, s.size):
            row, column = 2 * i + k - 1, j + 2 * m
            if 0 <= row < y.size and column < z.size:
                found[:, :, row, column] = found[:, :, row, column] + x[:, :, i, j] @ filters[:, :, k, m]
        return found

    check(
        lambda x, filters: convolve_transposed(
            x, filters, [[h, y, r], [w, z, s]], [b, o, y, z], strides=[2, 1], dilations=[1, 2], pads=[1, 0]
        ),
        definition,
        {"x": (b, c, h, w), "filters": (c, o, r, s)},
        fixed=(h, w, r, s),
    )


@pytest.mark.parametrize("function", ["max", "mean", "counted mean"])
@pytest.mark.parametrize("dilation", [1, 2])
def test_pool(function: str, dilation: int) -> None:
    x, h, w, r, s = (Dim("c", 4), Dim("h", 6), Dim("w", 4), Dim("r", 3), Dim("s", 2))
    height, width = 11, 8
    fill = -torch.inf if function == "max" else 0.0

    def definition(x: Any) -> Any:
        found = []
        for i, j in np.ndindex(h.size, w.size):
            rows = [2 * i + dilation * k - 1 for k in range(3)]
            columns = [2 * j + k for k in range(2)]
            inside = [(a, b) for a in rows for b in columns if 0 <= a < height and 0 <= b < width]
            points = torch.stack([x[:, :, a, b] for a, b in inside])
            if function == "max":
                found.append(points.amax(0))
            else:
                found.append(points.sum(0) / (6 if function == "counted mean" else len(inside)))
        return torch.stack(found, -1).reshape(*x.shape[:2], h.size, w.size)

    def layer(x: Tensor) -> Tensor:
        windows = [window(h, r, of=height, stride=2, dilation=dilation, pad=1), window(w, s, of=width, stride=2)]
        mesh = x.mesh.program.mesh(
            "pool",
            [("h", 2)]
            if x.mesh.program.num_devices == 2
            else [("h", 2), ("w", 2)]
            if x.mesh.program.num_devices == 4
            else [("h", 3), ("c", 2)],
        )
        seen = reshard(x, mesh, [N, x.dims[1], *windows], fill=fill)
        how = "max" if function == "max" else "mean"
        return pool(seen, windows, [N, x.dims[1], h, w], function=how, count_padding=function == "counted mean")

    check(
        layer,
        definition,
        {"x": (N, x, Dim("rows", height), Dim("columns", width))},
        number=1,
        fixed=(Dim("rows", height),),
    )


# -- moves


def test_joined_pieces_and_padding() -> None:
    first, second, whole = Dim("p", 4), Dim("q", 2), Dim("m", 6)

    def layer(x: Tensor, y: Tensor) -> Tensor:
        program = x.mesh.program
        mesh = program.mesh("joined", [("m", program.num_devices if program.num_devices != 4 else 2)])
        joined = concat([x, y], mesh, [N, whole], along=whole)
        return padded(piece(joined, "m", 1, 4), mesh, [N, whole], before=[0, 2], shape=[N.size, 4])

    def definition(x: Any, y: Any) -> Any:
        joined = torch.cat([x, y], 1)[:, 1:5]
        return torch.cat([torch.zeros(N.size, 2).double(), joined], 1)

    check(layer, definition, {"x": (N, first), "y": (N, second)})


def test_whole_dims() -> None:
    part, pair, rows = Dim("part", 6), (Dim("u", 4), Dim("v", 3)), Dim("rows", 4)
    check(
        lambda x: cut(x, K, part, start=1, step=2),
        lambda x: x[:, 1::2],
        {"x": (N, K)},
        fixed=(K,),
        inner=(part,),
    )
    check(
        lambda x, y: end_to_end([x, y], [J, L], part),
        lambda x, y: torch.cat([x, y], 1),
        {"x": (N, J), "y": (N, L)},
        fixed=(J, L),
        inner=(part,),
    )
    check(lambda x: view(x, [K], list(pair)), lambda x: x.reshape(N.size, 4, 3), {"x": (N, K)}, fixed=(K,), inner=pair)
    check(
        lambda table, places: select_rows(table, places, K),
        lambda table, places: torch.stack([table[i] for i in places.flatten().tolist()]).reshape(6, 4, 2),
        {"table": (K, L)},
        indices={"places": ((N, rows), K.size)},
        fixed=(K,),
    )


def test_gradients_of_rows_of_a_shared_table_are_summed_once_as_those_of_the_table() -> None:
    """Rows for each pair of steps, of which each rank takes its part along both, as attention with a bias does."""
    table, heads, here, there = Dim("v", 12), Dim("h", 3), Dim("s", 4), Dim("t", 4)
    first, second = Dim("i1", 4), Dim("i2", 4)
    places = (torch.arange(4)[:, None] * 3 + torch.arange(4)) % 12
    values = {"table": drawn((12, 3), "table"), "places": places}
    values |= {name: drawn((4, 4, 3), name) for name in ("one", "two")}
    upstream = {name: drawn((4, 4, 3), f"up {name}") for name in ("one", "two")}

    def build(program: Program) -> dict[str, Tensor]:
        results = {}
        given = program.indices("places", [4, 4], below=12)
        for layer in ("one", "two"):
            mesh = program.mesh(layer, [("s", 2), ("t", 2)], [3, 1, 0, 2])
            rows = select_rows(
                program.weight(mesh, "table", [table, heads]), reshard(given, mesh, [first, second]), table
            )
            rows = view(view(rows, [first], [here]), [second], [there])
            x = program.weight(mesh, layer, [here, there, heads])
            results[layer] = fn.multiply(x, rows)
        return results

    found = computed(build, 4, values, upstream=upstream)
    leaf = values["table"].clone().requires_grad_()
    torch.autograd.backward([leaf[places] * values[name] for name in upstream], list(upstream.values()))
    assert_near(found.gradients["table"], leaf.grad, "table")
    # The first layer sums the table's gradient for both, over all four ranks: each adds a quarter and sends the sum.
    assert found.sent == {Movement.within("one", Phase.BACKWARD): 2 * 3 * 12 * 3 * 8}


# -- recurrent layers


def lstm_of(x: Any, w: Any, u: Any, bias: Any) -> Any:
    """By the paper's formulas, gates in the order input, forget, output, candidate."""
    for layer in range(w.shape[0]):
        hidden, cell, outputs = x[:, 0] * 0, x[:, 0] * 0, []
        for step in range(x.shape[1]):
            gates = [x[:, step] @ w[layer, :, g] + hidden @ u[layer, :, g] + bias[layer, g] for g in range(4)]
            into, forget, out = (1 / (1 + torch.exp(-gate)) for gate in gates[:3])
            cell = forget * cell + into * torch.tanh(gates[3])
            hidden = out * torch.tanh(cell)
            outputs.append(hidden)
        x = torch.stack(outputs, 1)
    return x


def test_lstm() -> None:
    b, s, d, e, n = (Dim(*item) for item in (("b", 4), ("s", 6), ("d", 12), ("e", 12), ("l", 2)))
    check(
        lambda x, w, u, bias: lstm(x, w, u, bias, [b, s, e]),
        lstm_of,
        {"x": (b, s, d), "w": (n, d, GATES, e), "u": (n, d, GATES, e), "bias": (n, GATES, e)},
        fixed=(GATES,),
        number=4,
    )


def cells_of(cell: str, gates: list[Any], old: list[Any], hidden: Any, kept: Any) -> tuple[Any, Any]:
    """A step of a cell by PyTorch's documentation; gates, old: of the input, of the hidden state."""

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + torch.exp(-x))

    if cell == "lstm":
        into, forget, candidate, out = (x + y for x, y in zip(gates, old, strict=True))
        kept = sigmoid(forget) * kept + sigmoid(into) * torch.tanh(candidate)
        return sigmoid(out) * torch.tanh(kept), kept
    if cell == "gru":
        reset, update = sigmoid(gates[0] + old[0]), sigmoid(gates[1] + old[1])
        return (1 - update) * torch.tanh(gates[2] + reset * old[2]) + update * hidden, kept
    total = gates[0] + old[0]
    return (torch.tanh(total) if cell == "rnn_tanh" else total * (total > 0)), kept


CELLS = [
    ("lstm", 2, 2, 2, True),
    ("lstm", 1, 1, 0, False),
    ("gru", 2, 1, 2, True),
    ("gru", 1, 2, 0, False),
    ("rnn_tanh", 2, 1, 2, False),
    ("rnn_relu", 1, 2, 1, True),
]


@pytest.mark.parametrize(
    ("cell", "layers", "directions", "num_biases", "has_first", "which"),
    # All outputs, the last hidden state, and that which an LSTM keeps besides.
    [
        pytest.param(*cell, which, marks=[pytest.mark.full] if which < last and cell[-1] else [])
        for cell in CELLS
        for last in [2 if cell[0] == "lstm" else 1]
        for which in range(last + 1)
    ],
)
def test_recurrent(cell: str, layers: int, directions: int, num_biases: int, has_first: bool, which: int) -> None:
    b, s, d, e, r = (Dim(*item) for item in (("b", 4), ("s", 3), ("d", 5), ("e", 6), ("r", directions)))
    gate = Dim("g", {"lstm": 4, "gru": 3}.get(cell, 1))
    number = layers * directions
    operands: dict[str, Sequence[Dim]] = {"x": (b, s, d)}
    for i in range(number):
        width = d if i < directions else Dim("wide", directions * e.size)
        operands |= {f"w{i}": (gate, e, width), f"u{i}": (gate, e, Dim("old", e.size))}
        operands |= {f"bias{i}_{k}": (gate, e) for k in range(num_biases)}
    lead = (Dim("n", number),) if number > 1 else ()
    states = ["hidden", *(["kept"] if cell == "lstm" else [])] if has_first else []
    operands |= dict.fromkeys(states, (*lead, b, e))

    def layer(x: Tensor, **own: Tensor) -> Tensor:
        first = {name: own.pop(name) for name in states}
        y = recurrent(x, list(own.values()), gate, [b, s, r, e], cell=cell, layers=layers, **first)
        return last_state(y, which) if which else y

    def definition(x: Any, **own: Any) -> Any:
        zeros = torch.zeros(number, b.size, e.size, dtype=torch.float64)
        hidden, kept = (own.get(name, zeros).reshape(zeros.shape) for name in ("hidden", "kept"))
        after: list[list[Any]] = [[], []]
        for n in range(layers):
            both = []
            for turn in range(directions):
                i = n * directions + turn
                w, u = own[f"w{i}"], own[f"u{i}"]
                biases = [own[f"bias{i}_{k}"] for k in range(num_biases)] + [torch.zeros(gate.size, e.size)] * 2
                state, cells, outputs = hidden[i], kept[i], [None] * s.size
                for step in reversed(range(s.size)) if turn else range(s.size):
                    gates = [x[:, step] @ w[g].T + biases[0][g] for g in range(gate.size)]
                    old = [state @ u[g].T + biases[1][g] for g in range(gate.size)]
                    state, cells = cells_of(cell, gates, old, state, cells)
                    outputs[step] = state
                both.append(torch.stack(outputs, 1))
                after[0].append(state)
                after[1].append(cells)
            x = torch.cat(both, -1)
        if which:
            return torch.stack(after[which - 1]).reshape([dim.size for dim in (*lead, b, e)])
        return x.reshape(b.size, s.size, directions, e.size)

    fixed = [dim for dims in operands.values() for dim in dims if dim not in (b, e)]
    check(layer, definition, operands, fixed=fixed)
