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

from pase.targets.torch.layers import batch_norm, dropout, fn, normalise, reshard
from pase.targets.torch.program import Program
from pase.targets.torch.tensor import Dim, Tensor
from pase.targets.training.masks import kept as kept_points
from pase.targets.training.masks import step_key
from tests.targets.torch.lockstep import Computed, computed

RELATIVE = 1e-12
RANKS = (2, 4, 6)

Axes = list[tuple[str, int]]
Operands = Mapping[str, Sequence[Dim]]


def meshes(dims: Sequence[Dim], *, number: int = 3, fixed: Sequence[Dim] = ()) -> Iterator[tuple[int, Axes, list[int]]]:
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
    number: int = 3,
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
        given[name] = drawn([dim.size for dim in dims], name).mul(1e6).long().remainder(below)
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
            return {"y": layer(**tensors)}

        found = computed(build, num_ranks, given, upstream={"y": dy}, trains=trains, key=key)
        where = f"{axes} on {devices}"
        assert_near(found.outputs["y"], y.detach(), f"values under {where}")
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


NORMALISED = {
    "batch": ((B, C, H, W), (B, H, W), (C,)),
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
