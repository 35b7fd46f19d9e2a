"""Where the batch lies, worked out by hand."""

import pytest

from pase.graph import Access, Builder, Dim, Operator, Role
from pase.graph.batch import given_spans
from pase.graph.operators import dense, elementwise


def _reader(shape: tuple[int, ...], dims: tuple[int, ...] | None = None, groups: tuple[int, ...] = ()) -> Operator:
    """A function of a tensor; groups: how many iteration dims each dim of the tensor is made of, extents in dims."""
    names = "abcdef"
    extents = dims or shape
    axes: list[str | tuple[str, ...]] = []
    at = 0
    for count in groups or (1,) * len(shape):
        axes.append(names[at] if count == 1 else tuple(names[at : at + count]))
        at += count
    access = Access(tensor="x", shape=shape, index_map=tuple(axes))
    return Operator(
        name="reader",
        kind="test",
        dims=tuple(Dim(n, e) for n, e in zip(names, extents, strict=False)),
        reads=(access,),
        writes=(Access(tensor="y", shape=shape, index_map=tuple(axes)),),
    )


@pytest.mark.parametrize(
    ("written", "read", "dims", "groups", "expected"),
    [
        ((8, 3, 4), (8, 3, 4), None, (), {"a": 8}),
        ((8, 3, 4), (24, 4), None, (), {"a": 8}),  # batch · steps: cut 8 ways between examples, and no more
        ((8, 3, 4), (8, 12), None, (), {"a": 8}),
        ((8, 6), (2, 4, 6), None, (), {"a": 2, "b": 4}),  # micro-batches
        ((8, 6), (8, 6), (2, 4, 6), (2, 1), {"a": 2, "b": 4}),
        ((8, 1, 5), (1, 8, 5), None, (), {"b": 8}),
        ((8, 6), (48,), None, (), {"a": 8}),
        ((8, 6), (16, 3), None, (), {"a": 8}),
        ((8, 6), (4, 12), None, (), {"a": 4, "b": 2}),  # what is left of the batch is the outer part of the second
    ],
)
def test_a_reshape_leaves_the_batch_where_it_is(
    written: tuple[int, ...],
    read: tuple[int, ...],
    dims: tuple[int, ...] | None,
    groups: tuple[int, ...],
    expected: dict[str, int],
) -> None:
    net = Builder("net")
    x = net.add(elementwise, "first", net.input(written), dims=tuple("uvw"[: len(written)]), function="relu")
    net.add(lambda _, shape: _reader(shape, dims, groups), "reader", net.reshape(x, read))
    graph = net.build()
    assert dict(graph.batch["reader"].dims) == expected
    assert graph.batch["reader"].examples == 8


def test_an_inner_part_of_a_dim_cannot_be_cut_between_examples() -> None:
    """[steps, batch] as one dim: its halves hold half of the steps of all examples."""
    net = Builder("net")
    first = Operator(
        name="turned",
        kind="test",
        dims=(Dim("b", 8), Dim("s", 3)),
        reads=(Access(tensor="x", shape=(8, 3), index_map=("b", "s")),),
        writes=(Access(tensor="y", shape=(3, 8), index_map=("s", "b")),),
    )
    x = net.add(lambda *_: first, "turned", net.input((8, 3)))
    net.add(lambda _, shape: _reader(shape), "reader", net.reshape(x, (24,)))
    graph = net.build()
    assert dict(graph.batch["turned"].dims) == {"b": 8}
    assert dict(graph.batch["reader"].dims) == {}


def test_weights_carry_no_batch_even_of_its_size() -> None:
    net = Builder("net")
    net.add(dense, "fc", net.input((16, 16)), out=(("n", 16),))
    graph = net.build()
    assert dict(graph.batch["fc"].dims) == {"b": 16}
    assert all(read.role is not Role.PARAMETER or "b" not in read.index_map for read in graph["fc"].reads)


@pytest.mark.parametrize(
    ("shapes", "batch", "expected"),
    [
        ([(4, 7)], None, [(1, 4)]),
        ([(4, 7), (4,), (9, 9)], None, [(1, 4), (1, 4), None]),
        ([(7, 4), (7, 4, 3)], 4, [(7, 4), (7, 4)]),
        ([(7, 4), (5, 4)], None, [(7, 4), (5, 4)]),
        ([(7, 4), (7, 5)], None, [(1, 7), (1, 7)]),
        ([(7, 4)], 9, [(1, 7)]),  # the argument means something else
        ([()], None, [None]),
        ([], None, []),
    ],
)
def test_the_batch_of_what_a_network_is_given(
    shapes: list[tuple[int, ...]], batch: int | None, expected: list[tuple[int, int] | None]
) -> None:
    assert [span and span[:2] for span in given_spans(shapes, batch)] == expected
