"""What the source takes apart and puts together again is computed in an operator's dims where that is the same."""

import pytest

from pase.graph.body import Body, Constant, InnerDim, Step
from pase.importers.lower.builder import NoBodyError
from pase.importers.lower.steps import _Rewriting, _TakenApartError, with_own_dims

READS = {"x": {"s", "d"}, "y": {"s", "d"}}


def _inner(**extents: int) -> tuple[InnerDim, ...]:
    return tuple(InnerDim(name=name, extent=extent) for name, extent in extents.items())


def _whole(result: str, tensor: str, own: str, name: str) -> Step:
    return Step(result=result, function="whole", operands=(tensor,), dims=(own, name), options=(("replaced", 1),))


def _view(result: str, tensor: str, before: tuple[str, ...], after: tuple[str, ...]) -> Step:
    options = (("replaced", len(before)),)
    return Step(result=result, function="view", operands=(tensor,), dims=(*before, *after), options=options)


def test_what_stays_together_is_not_gathered() -> None:
    body = Body(
        steps=(
            _whole("t1", "x", "s", "i1"),
            _view("t2", "t1", ("i1",), ("i2", "i3")),
            Step(result="t3", function="softmax", operands=("t2",), dims=("i2", "i3")),
            _view("t4", "t3", ("i2", "i3"), ("s",)),
        ),
        inner=_inner(i1=16, i2=4, i3=4),
    )
    found = with_own_dims(body, ("s", "d"), READS)
    assert found.steps == (Step(result="t3", function="softmax", operands=("x",), dims=("s",)),)
    assert found.inner == ()


def test_part_of_what_is_taken_apart_keeps_it_whole() -> None:
    body = Body(
        steps=(
            _whole("t1", "x", "s", "i1"),
            _view("t2", "t1", ("i1",), ("i2", "i3")),
            Step(result="t3", function="softmax", operands=("t2",), dims=("i3",)),
            _view("t4", "t3", ("i2", "i3"), ("s",)),
        ),
        inner=_inner(i1=16, i2=4, i3=4),
    )
    assert with_own_dims(body, ("s", "d"), READS) == body


def test_two_dims_that_stand_for_the_same_one_stay_two() -> None:
    products = (
        _whole("t1", "x", "s", "i1"),
        _whole("t2", "y", "s", "i2"),
        Step(result="t3", function="einsum", operands=("t1", "t2"), dims=("i1", "i2")),
    )
    sums = (*products[:2], Step(result="t3", function="einsum", operands=("t1", "t2"), dims=("d",)))
    beside = (products[0], Step(result="t3", function="multiply", operands=("t1", "y")))
    for steps in (products, sums, beside):
        body = Body(steps=steps, inner=_inner(i1=16, i2=16))
        assert with_own_dims(body, ("s", "d"), READS) == body


def test_devices_keep_their_parts_of_constants() -> None:
    body = Body(
        steps=(
            _whole("t1", "x", "s", "i1"),
            _view("t2", "t1", ("i1",), ("i2", "i3")),
            Step(result="t3", function="add", operands=("t2", "c1")),
            _view("t4", "t3", ("i2", "i3"), ("s",)),
        ),
        constants=(Constant(name="c1", dims=("i3",)),),
        inner=_inner(i1=16, i2=4, i3=4),
    )
    found = with_own_dims(body, ("s", "d"), READS)
    assert found.steps == (
        Step(result="c1_1", function="repeat", operands=("c1",), dims=("i2", "i3")),
        _view("c1_2", "c1_1", ("i2", "i3"), ("s",)),
        Step(result="t3", function="add", operands=("x", "c1_2")),
    )
    assert {dim.name for dim in found.inner} == {"i2", "i3"}


def test_an_added_dim_of_one_point_is_none_of_the_operator() -> None:
    body = Body(
        steps=(
            _whole("t1", "x", "s", "i1"),
            Step(result="t2", function="sum", operands=("t1",), dims=("i1",)),
            _view("t3", "t2", (), ("i2",)),
            Step(result="t4", function="join", operands=("t3", "t1"), dims=("i2", "i1", "i3")),
        ),
        inner=_inner(i1=16, i2=1, i3=17),
    )
    assert with_own_dims(body, ("s", "d"), READS) == body


def test_an_attempt_that_removes_no_dim_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: object) -> Body:
        raise _TakenApartError(())

    monkeypatch.setattr(_Rewriting, "rewritten", fail)
    with pytest.raises(NoBodyError, match=r"^\[\] of its dims \['s', 'd'\] are taken apart$"):
        with_own_dims(Body(), ("s", "d"), READS)
