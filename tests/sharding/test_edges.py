"""Movements of tensors of which layers have the dims in several forms, counted by hand."""

import pytest

from pase.graph import Access, Dim, Edge, Graph, Operator, SliceOf
from pase.planning.stages import step_bytes
from pase.sharding.traffic import Movement, Phase
from tests.runtime.plans import make_plan

NUMBER = 4
"""Bytes of one."""

SIZES = {"left": 2 * 3 * 2 * NUMBER, "right": 2 * 2 * 5 * NUMBER}


def joined() -> Graph:
    """Two tensors of [a, b] rows, joined along c: of one of them the rows are two dims, with c between them."""
    rows = ("a", "b")
    left, right = (2, 3, 2), (4, 5)
    reads = (
        Access(tensor="x0", shape=left, index_map=("a", SliceOf(dim="c", offset=0, extent=3), "b")),
        Access(tensor="x1", shape=right, index_map=(rows, SliceOf(dim="c", offset=3, extent=5))),
    )
    join = Operator(
        name="join",
        kind="concat",
        dims=(Dim("a", 2), Dim("b", 2), Dim("c", 8)),
        reads=reads,
        writes=(Access(tensor="y", shape=(4, 8), index_map=(rows, "c")),),
    )
    return Graph(
        name="joined",
        operators=(
            _layer("left", ("a", "c", "b"), left),
            _layer("right", ("r", "c"), right),
            join,
        ),
        edges=(
            Edge(producer="left", output=0, consumer="join", input=0),
            Edge(producer="right", output=0, consumer="join", input=1),
        ),
    )


def _layer(name: str, dims: tuple[str, ...], shape: tuple[int, ...]) -> Operator:
    return Operator(
        name=name,
        kind="pointwise",
        dims=tuple(Dim(dim, extent) for dim, extent in zip(dims, shape, strict=True)),
        reads=(Access(tensor="x", shape=shape, index_map=dims),),
        writes=(Access(tensor="y", shape=shape, index_map=dims),),
    )


@pytest.mark.parametrize(
    ("splits", "moved"),
    [
        # All have all of it.
        ({}, {"left": 0, "right": 0}),
        # Rows stay where they are.
        ({"left": {"a": 2}, "right": {"r": 2}, "join": {"a": 2}}, {"left": 0, "right": 0}),
        # Each of two devices takes the half that it lacks.
        ({"left": {"a": 2}, "right": {"r": 2}}, SIZES),
        # The half that it has of other rows is half of what it needs.
        ({"left": {"b": 2}, "right": {"r": 2}, "join": {"a": 2}}, {"left": SIZES["left"] // 2, "right": 0}),
    ],
)
def test_what_is_joined_moves_whatever_form_its_rows_have(
    splits: dict[str, dict[str, int]], moved: dict[str, int]
) -> None:
    found = step_bytes(make_plan(joined(), 2, splits))
    for name, size in moved.items():
        assert found.get(Movement(producer=name, consumer="join", phase=Phase.FORWARD), 0) == size, name
