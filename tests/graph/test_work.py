"""Work that follows from bodies, beside counts by hand (docs/method.md, FLOP)."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import GraphError
from pase.graph import Access, Dim, Operator, Role, Work
from pase.graph.body import Body, Constant, InnerDim, Step
from pase.graph.operators import lstm

EXTENTS = {"b": 2, "n": 3, "c": 5}


def operator(*steps: Step, reads: dict[str, str], writes: str, weights: str = "", **more: object) -> Operator:
    """Return an operator that reads and writes tensors whose dims are letters."""
    accesses = [
        Access(
            tensor=name,
            shape=tuple(EXTENTS[dim] for dim in dims),
            index_map=tuple(dims),
            role=Role.PARAMETER if name in weights else Role.ACTIVATION,
        )
        for name, dims in {**reads, "result": writes}.items()
    ]
    return Operator(
        name="layer",
        kind="own",
        dims=tuple(Dim(name, extent) for name, extent in EXTENTS.items()),
        reads=tuple(accesses[:-1]),
        writes=(accesses[-1],),
        body=Body(steps=steps, **more),  # type: ignore[arg-type]
    )


def forward(layer: Operator) -> float:
    return sum(work.flop_per_point * layer.work_points(work) for work in layer.work)


def backward(layer: Operator, *has_gradient: bool) -> float:
    return sum(w.flop_per_point * layer.work_points(w) * w.num_gradients(has_gradient) for w in layer.work)


@given(st.lists(st.text("bnc", min_size=1, max_size=3).map(lambda x: "".join(sorted({*x}))), min_size=2, max_size=4))
def test_product_multiplies_and_adds_at_every_point_of_its_tensors(tensors: list[str]) -> None:
    names = [f"x{i}" for i in range(len(tensors))]
    dims = sorted({*"".join(tensors)})
    layer = operator(
        Step(result="y", function="einsum", operands=tuple(names), dims=("b",)),
        reads=dict(zip(names, tensors, strict=True)),
        writes="b",
    )
    loops = 0
    for _ in product(*(range(EXTENTS[dim]) for dim in dims)):
        loops += len(tensors) - 1  # the products
        loops += 1  # the sum
    assert forward(layer) == loops
    assert backward(layer, *(True for _ in names)) == loops * len(tensors)
    assert backward(layer, True, *(False for _ in names[1:])) == loops
    assert all(work.contraction for work in layer.work)


def test_each_step_counts_and_has_the_gradients_of_all_that_it_comes_of() -> None:
    layer = operator(
        Step(result="offsets", function="subtract", operands=("x", "w")),
        Step(result="squares", function="square", operands=("offsets",)),
        Step(result="sums", function="sum", operands=("squares",), dims=("c",)),
        Step(result="roots", function="sqrt", operands=("sums",)),
        reads={"x": "bc", "w": "nc"},
        writes="bn",
        weights="w",
    )
    assert forward(layer) == 3 * 30 + 6, "offsets, squares and sums at each point, roots of each sum"
    assert backward(layer, False, True) == 2 * 30 + 6, "a difference hands its gradient on as it is"
    assert backward(layer, False, False) == 0


def test_sum_of_n_tensors_costs_n_less_one_and_a_product_as_much_again_for_each_factor() -> None:
    reads = {"x": "bc", "y": "bc", "z": "bc"}
    added = operator(Step(result="r", function="add", operands=("x", "y", "z")), reads=reads, writes="bc")
    assert (forward(added), backward(added, True, True, True)) == (20, 0)
    scaled = operator(Step(result="r", function="multiply", operands=("x", "y", "z")), reads=reads, writes="bc")
    assert (forward(scaled), backward(scaled, True, False, True)) == (20, 40)
    by_number = operator(Step(result="r", function="multiply", operands=("x", 2.0)), reads={"x": "bc"}, writes="bc")
    assert (forward(by_number), backward(by_number, True)) == (10, 10)


def test_comparisons_have_no_gradient_and_what_is_made_of_weights_alone_is_not_counted() -> None:
    layer = operator(
        Step(result="factor", function="add", operands=("w", 1.0)),
        Step(result="is_less", function="less", operands=("x", 0.0)),
        Step(result="y", function="where", operands=("is_less", "x", "factor")),
        reads={"x": "bc", "w": "c"},
        writes="bc",
        weights="w",
    )
    assert forward(layer) == 10 + 10
    assert backward(layer, True, True) == 10 + 20, "of the choice both, of the comparison none"


def test_inner_dims_count_at_each_point() -> None:
    layer = operator(
        Step(result="parts", function="view", operands=("x",), dims=("c", "i"), options=(("replaced", 1),)),
        Step(result="shifted", function="add", operands=("parts", "mask")),
        Step(result="sums", function="sum", operands=("shifted",), dims=("i",)),
        reads={"x": "bc"},
        writes="b",
        inner=(InnerDim(name="i", extent=5),),
        constants=(Constant(name="mask", dims=("i",)),),
    )
    assert layer.work == (Work(dims=("b",), flop_per_point=5), Work(dims=("b",), flop_per_point=5, inputs=(0,)))


def test_recurrent_work_is_declared() -> None:
    layer = lstm("cells", (4, 6, 8), layers=2, units=8)
    assert forward(layer) == prod((2, 4, 6)) * (2 * 8 * 4 * 2 * 8 + 9 * 8)
    told = {field: getattr(layer, field) for field in ("name", "kind", "dims", "reads", "writes", "body")}
    with pytest.raises(GraphError, match=r"^layer 'cells': its work does not follow from a step 'lstm'; declare it"):
        Operator(**told)


def test_declared_work_is_what_counts_and_stays() -> None:
    layer = operator(Step(result="y", function="relu", operands=("x",)), reads={"x": "bc"}, writes="bc")
    assert forward(layer) == 10
    free = replace(layer, work=())
    assert free.work == () == replace(free, name="other").work
    assert replace(layer, body=None).work == layer.work
