import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pase.errors import TablesError
from pase.tables.cost_tables import CostTables, EdgeTable, verify_tables
from tests.solver.problems import small_problems, total_cost


def two_layers(**changed) -> CostTables:
    parts = {
        "vertex_names": ("a", "b"),
        "vertex_costs": (np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0])),
        "vertex_table": (0, 1),
        "edges": ((0, 1),),
        "edge_tables": (EdgeTable.from_dense(np.arange(6.0).reshape(2, 3)),),
        "edge_table": (0,),
    }
    return CostTables(**{**parts, **changed})


@given(
    arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.sampled_from([0.0, 1.0, np.inf]))
)
def test_factoring_keeps_every_cost_and_no_layout_twice(values):
    table = EdgeTable.factored(values)
    np.testing.assert_array_equal(table.dense(), values)
    assert table.shape == values.shape
    assert table.values.shape == (len(np.unique(values, axis=0)), len(np.unique(values, axis=1).T))


def test_layouts_are_numbered_as_they_occur_whatever_the_values():
    rng = np.random.default_rng(0)
    for values in (
        rng.integers(0, 3, (400, 2)).astype(float),
        rng.integers(0, 9, (500, 3)) * 2.0**40,
        rng.random((9, 9)),
    ):
        table = EdgeTable.factored(values)
        numbers, first = np.unique(table.row_class, return_index=True)
        assert numbers.tolist() == list(range(len(np.unique(values, axis=0))))
        assert (np.diff(first) > 0).all()
        np.testing.assert_array_equal(table.dense(), values)


def test_a_dense_table_and_its_costs():
    table = EdgeTable.from_dense(np.arange(6.0).reshape(2, 3))
    assert table.shape == (2, 3)
    assert table.cost(1, 2) == 5.0


@given(small_problems(), st.data())
def test_evaluate_adds_up_layers_and_transfers(tables, data):
    choice = [data.draw(st.integers(0, k - 1)) for k in tables.domain_sizes]
    assert tables.evaluate(choice) == pytest.approx(total_cost(tables, choice), rel=1e-12)


def test_the_sum_is_correctly_rounded():
    tables = two_layers(vertex_costs=(np.array([1e16, 2.0]), np.array([1.0, 4.0, 5.0])))
    tables = CostTables(
        vertex_names=("a", "b"),
        vertex_costs=tables.vertex_costs,
        vertex_table=(0, 1),
        edges=((0, 1),),
        edge_tables=(EdgeTable.from_dense(np.ones((2, 3))),),
        edge_table=(0,),
    )
    assert tables.evaluate([0, 0]) == 1e16 + 2  # 1e16 + 1 + 1 from left to right is 1e16


def test_a_strategy_that_does_not_fit_is_refused():
    with pytest.raises(TablesError, match="each of 2 vertices; found 1"):
        two_layers().evaluate([0])
    with pytest.raises(TablesError, match="'b' has configurations 0 to 2; found 3"):
        two_layers().evaluate([0, 3])
    with pytest.raises(TablesError, match="'a' has configurations 0 to 1; found -1"):
        two_layers().evaluate([-1, 0])


def test_sizes_and_neighbours():
    tables = two_layers(
        edges=((0, 1), (1, 0)),
        edge_tables=(EdgeTable.from_dense(np.ones((2, 3))), EdgeTable.from_dense(np.ones((3, 2)))),
        edge_table=(0, 1),
    )
    verify_tables(tables)
    assert tables.domain_sizes == (2, 3)
    assert tables.neighbours == (frozenset({1}), frozenset({0}))


def test_well_formed_tables_pass():
    verify_tables(two_layers())
    verify_tables(two_layers(vertex_costs=(np.array([1.0, np.inf]), np.array([3.0, 4.0, 5.0]))))


def edge(values) -> tuple[EdgeTable, ...]:
    return (EdgeTable.from_dense(np.array(values, dtype=float)),)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vertex_names": (), "vertex_table": (), "edges": (), "edge_table": ()}, "no vertices"),
        ({"vertex_names": ("a", "a")}, "two vertices are named 'a'"),
        ({"vertex_table": (0,)}, "2 vertex entries refer to tables by 1 numbers"),
        ({"vertex_table": (0, 2)}, r"vertex 1 refers to table 2; there are 2 \(numbered from 0\)"),
        ({"vertex_table": (0, -1)}, "vertex 1 refers to table -1"),
        ({"edge_table": ()}, "1 edge entries refer to tables by 0 numbers"),
        ({"edge_table": (1,)}, "edge 0 refers to table 1"),
        ({"vertex_costs": (np.array([1.0, 2.0]), np.zeros(0))}, r"layer costs 1 have the shape \(0,\)"),
        ({"vertex_costs": (np.array([1.0, 2.0]), np.zeros((3, 1)))}, r"layer costs 1 have the shape \(3, 1\)"),
        ({"vertex_costs": (np.array([1.0, np.nan]), np.ones(3))}, r"layer costs 0 \(of vertex 'a'\) hold NaN"),
        ({"vertex_costs": (np.array([1.0, -2.0]), np.ones(3))}, r"negative cost \(-2.0\)"),
        ({"vertex_costs": (np.full(2, np.inf), np.ones(3))}, "all infinite"),
        ({"edges": ((0, 2),)}, "edge 0 joins vertices 0 and 2; there are 2"),
        ({"edges": ((1, 1),)}, "edge 0 joins vertex 'b' to itself"),
        ({"edges": ((1, 0),)}, r"shape \(2, 3\); its vertices have 3 and 2"),
        ({"edge_tables": edge([[1, np.nan, 3], [1, 2, 3]])}, "edge table 0 hold NaN"),
        ({"edge_tables": edge([[1, -1, 3], [1, 2, 3]])}, "edge table 0 hold a negative"),
        ({"edge_tables": edge(np.full((2, 3), np.inf))}, "edge table 0 are all infinite"),
        ({"edges": (), "edge_table": ()}, "not connected: 1 of 2 vertices, 'b' the first"),
        (
            {
                "edge_tables": (
                    EdgeTable(
                        row_class=np.array([0, 2], np.int32), col_class=np.zeros(3, np.int32), values=np.ones((2, 1))
                    ),
                )
            },
            "row layouts from 0 to 2; its values have 2 rows",
        ),
        (
            {
                "edge_tables": (
                    EdgeTable(row_class=np.array([0, 0], np.int32), col_class=np.zeros(3, np.int32), values=np.ones(2)),
                )
            },
            "expected a matrix by layouts",
        ),
    ],
)
def test_malformed_tables_are_refused(changed, message):
    with pytest.raises(TablesError, match=message):
        verify_tables(two_layers(**changed))
