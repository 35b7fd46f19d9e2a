import json
import re
import struct
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

import pase.tables.files
from pase.errors import TablesError
from pase.tables.cost_tables import CostTables, EdgeTable
from pase.tables.files import export_cfn, read_problem, write_problem
from tests.solver.problems import brute_force, small_problems, total_cost

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def example() -> dict[str, np.ndarray]:
    """A path a - b - c; the two edges have the same table. Written by hand from the format's description."""
    return {
        "vertex_offsets": np.array([0, 2, 4, 6], dtype=np.int64),
        "vertex_costs": np.array([1, 5, 2, 0, 3, 3], dtype=np.int64),
        "edges": np.array([[0, 1], [1, 2]], dtype=np.int32),
        "edge_table": np.array([0, 0], dtype=np.int32),
        "table_shape": np.array([[2, 2]], dtype=np.int32),
        "table_offsets": np.array([0, 4], dtype=np.int64),
        "table_values": np.array([0.5, 2.0, 2.0, 0.0]),
        "vertex_names": np.array(["0:a", "1:b", "2:c"]),
        "configs": np.ones((6, 2), dtype=np.int32),
    }


def saved(folder: Path, **changed) -> Path:
    path = folder / "problem.npz"
    np.savez_compressed(path, **{k: v for k, v in {**example(), **changed}.items() if v is not None})
    return path


def test_a_file_is_read_as_it_is_described(tmp_path):
    tables = read_problem(saved(tmp_path))
    assert tables.vertex_names == ("0:a", "1:b", "2:c")
    assert tables.edges == ((0, 1), (1, 2))
    assert tables.domain_sizes == (2, 2, 2)
    assert tables.evaluate([1, 1, 0]) == 5 + 0 + 3 + 0.0 + 2.0
    assert tables.layer_costs(0).dtype == np.float64


def test_files_may_lack_configurations_and_edges(tmp_path):
    assert read_problem(saved(tmp_path, configs=None)).num_vertices == 3
    alone = saved(
        tmp_path,
        vertex_offsets=np.array([0, 2]),
        vertex_costs=np.array([4.0, np.inf]),
        edges=np.zeros((0, 2), np.int32),
        edge_table=np.zeros(0, np.int32),
        table_shape=np.zeros((0, 2), np.int32),
        table_offsets=np.array([0]),
        table_values=np.zeros(0),
        vertex_names=np.array(["only"]),
        configs=np.ones((2, 1), np.int32),
    )
    assert read_problem(alone).domain_sizes == (2,)


def simple_pairs(tables: CostTables) -> set[frozenset[int]]:
    return {frozenset(e) for e in tables.edges}


@in_one_folder
@given(small_problems(max_vertices=5))
def test_what_was_written_is_read_again(tmp_path, tables):
    assume(np.isfinite(brute_force(tables)))  # edges that are added up may forbid everything together
    path = tmp_path / "again.npz"
    write_problem(tables, path)
    again = read_problem(path)
    assert again.vertex_names == tables.vertex_names
    assert len(again.edges) == len(simple_pairs(tables)) == len(simple_pairs(again))
    for choice in product(*(range(k) for k in tables.domain_sizes)):
        assert again.evaluate(choice) == pytest.approx(total_cost(tables, choice), rel=1e-12)
    write_problem(again, tmp_path / "thrice.npz")
    assert (tmp_path / "thrice.npz").read_bytes() == path.read_bytes()


def test_the_written_arrays_have_the_formats_types(tmp_path):
    path = tmp_path / "typed.npz"
    tables = read_problem(saved(tmp_path))
    splits = [np.array(rows, np.int32) for rows in ([[1], [2]], [[1, 4], [2, 2]], [[1], [1]])]
    write_problem(tables, path, splits)
    with np.load(path, allow_pickle=False) as arrays:
        kinds = {name: arrays[name].dtype.str for name in arrays.files}
        assert arrays["vertex_costs"].tolist() == [1, 5, 2, 0, 3, 3]
        assert len(arrays["table_shape"]) == 1  # equal tables are stored once
        assert arrays["configs"].tolist() == [[1, 0], [2, 0], [1, 4], [2, 2], [1, 0], [1, 0]]
    assert kinds.pop("vertex_names").startswith("<U")
    assert kinds == {
        "vertex_offsets": "<i8",
        "vertex_costs": "<i8",
        "edges": "<i4",
        "edge_table": "<i4",
        "table_shape": "<i4",
        "table_offsets": "<i8",
        "table_values": "<f8",  # 0.5 is not a whole number
        "configs": "<i4",
    }


def test_configurations_of_other_tables_are_not_written(tmp_path):
    with pytest.raises(TablesError, match="not those of the tables"):
        write_problem(read_problem(saved(tmp_path)), tmp_path / "x.npz", [np.ones((1, 1), np.int32)] * 3)
    assert not (tmp_path / "x.npz").exists()


def test_tables_too_large_for_a_file_are_refused(tmp_path, monkeypatch):
    tables = read_problem(saved(tmp_path))
    monkeypatch.setattr(pase.tables.files, "MAX_FILE_BYTES", 31)
    with pytest.raises(TablesError, match="use fewer devices"):
        write_problem(tables, tmp_path / "x.npz")
    with pytest.raises(TablesError, match="use fewer devices"):
        export_cfn(tables, tmp_path / "x.cfn")
    with pytest.raises(TablesError, match=r"problem\.npz: its arrays take .* at most 31 are read"):
        read_problem(tmp_path / "problem.npz")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"edges": None}, "the array 'edges' is missing"),
        ({"vertex_names": None}, "the array 'vertex_names' is missing"),
        ({"vertex_offsets": np.array([0, 2, 4])}, "'vertex_offsets' has 3 entries; expected 4"),
        (
            {"vertex_offsets": np.array([0, 2, 4, 7])},
            "'vertex_offsets' must rise from 0 to the length of 'vertex_costs'",
        ),
        ({"vertex_offsets": np.array([0, 4, 2, 6])}, "'vertex_offsets' must rise"),
        ({"vertex_offsets": np.array([-2, 2, 4, 6])}, "'vertex_offsets' must rise"),
        ({"vertex_offsets": np.array([0.0, 2, 4, 6])}, "'vertex_offsets' has the type float64; expected integers"),
        ({"vertex_costs": np.array([[1.0] * 6])}, r"'vertex_costs' has the shape \(1, 6\); expected 1 axes"),
        ({"vertex_costs": np.array([1, np.nan, 1, 1, 1, 1])}, "'vertex_costs' holds NaN or a negative"),
        ({"vertex_costs": np.array([1, -1, 1, 1, 1, 1])}, "'vertex_costs' holds NaN or a negative"),
        ({"vertex_costs": np.array([np.inf, np.inf, 1, 1, 1, 1])}, "all infinite"),
        ({"vertex_costs": np.array([1j] * 6)}, "'vertex_costs' has the type complex128; expected numbers"),
        ({"table_values": np.array([1, 2, 3])}, "'table_offsets' must rise from 0 to the length of 'table_values', 3"),
        ({"table_values": np.array([1, np.nan, 3, 4])}, "'table_values' holds NaN or a negative cost in table 0"),
        ({"table_values": np.full(4, np.inf)}, "edge table 0 are all infinite"),
        ({"table_shape": np.array([[2, 3]])}, r"'table_shape' gives table 0 the shape \(2, 3\)"),
        ({"table_shape": np.array([[-2, -2]])}, r"'table_shape' gives table 0 the shape \(-2, -2\)"),
        ({"table_shape": np.array([[4, 1]])}, r"shape \(4, 1\); its vertices have 2 and 2"),
        ({"table_shape": np.array([[2, 2, 1]])}, r"'table_shape' has the shape \(1, 3\); expected 2 columns"),
        ({"edges": np.array([[0, 1], [1, 3]])}, "edge 1 joins vertices 1 and 3"),
        ({"edges": np.array([[0, 1], [1, 0]])}, "not connected: 1 of 3"),
        ({"edges": np.array([[0, 1], [2, 2]])}, "joins vertex '2:c' to itself"),
        ({"edge_table": np.array([0])}, "'edge_table' has 1 entries; there are 2 edges"),
        ({"edge_table": np.array([0, 7])}, "edge 1 refers to table 7"),
        ({"edge_table": np.array([0, -1])}, "edge 1 refers to table -1"),
        ({"vertex_names": np.array(["a", "b", "a"])}, "two vertices are named 'a'"),
        ({"vertex_names": np.array([1, 2, 3])}, "'vertex_names' has the type int64; expected text"),
        ({"configs": np.ones((5, 1), np.int32)}, "'configs' has 5 rows; there are 6 configurations"),
    ],
)
def test_a_wrong_array_is_named(tmp_path, changed, message):
    with pytest.raises(TablesError, match=rf"problem\.npz: .*{message}"):
        read_problem(saved(tmp_path, **changed))


def test_an_empty_problem_is_refused(tmp_path):
    nothing = {name: np.zeros((0, 2) if a.ndim == 2 else 0, a.dtype) for name, a in example().items()}
    path = saved(tmp_path, **{**nothing, "vertex_offsets": np.array([0]), "table_offsets": np.array([0])})
    with pytest.raises(TablesError, match="no vertices"):
        read_problem(path)


def test_objects_in_a_file_are_never_loaded(tmp_path):
    path = tmp_path / "problem.npz"
    names = np.array(["a", "b", "c"], dtype=object)
    np.savez(path, allow_pickle=True, **{**example(), "vertex_names": names})
    with pytest.raises(TablesError, match=r"'vertex_names' has the type '\|O', Python objects"):
        read_problem(path)


def test_a_missing_file_a_folder_and_a_text_file(tmp_path):
    with pytest.raises(TablesError, match="No such file"):
        read_problem(tmp_path / "none.npz")
    with pytest.raises(TablesError, match="cannot be read"):
        read_problem(tmp_path)
    (tmp_path / "text.npz").write_text("not a zip file")
    with pytest.raises(TablesError, match=r"not a zip file; expected a complete \.npz file"):
        read_problem(tmp_path / "text.npz")


def test_every_truncation_is_noticed(tmp_path):
    whole = saved(tmp_path).read_bytes()
    path = tmp_path / "cut.npz"
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(TablesError, match=r"cut\.npz"):
            read_problem(path)


def test_damaged_bytes_give_an_error_or_the_same_problem(tmp_path):
    whole = bytearray(saved(tmp_path).read_bytes())
    path = tmp_path / "damaged.npz"
    rng = np.random.default_rng(1)
    outcomes = []
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            outcomes.append(read_problem(path).evaluate([1, 1, 0]) == 10.0)
        except TablesError as error:
            outcomes.append("damaged.npz" in str(error))
    assert all(outcomes)


def with_header(folder: Path, name: str, header: str, data: bytes = b"") -> Path:
    """Return a file in which one array has a header of our own."""
    path = folder / "crafted.npz"
    saved(folder)
    raw = header.encode("latin1")
    with zipfile.ZipFile(folder / "problem.npz") as source, zipfile.ZipFile(path, "w") as target:
        for item in source.namelist():
            if item == f"{name}.npy":
                target.writestr(item, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + data)
            else:
                target.writestr(item, source.read(item))
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }\n", "more than the"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }\n", "claims the shape"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n", "expected 8 bytes got 0"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (6,), }\n", r"type '\|O', Python objects"),
        ("{'descr': '<f8', 'shape': (6,), }\n", "no readable header"),
        ("__import__('os').system('true')\n", "no readable header"),
    ],
)
def test_a_crafted_header_is_refused_before_anything_is_allocated(tmp_path, header, message):
    with pytest.raises(TablesError, match=f"'vertex_costs'.*{message}"):
        read_problem(with_header(tmp_path, "vertex_costs", header))


def test_no_more_is_read_than_the_shape_says(tmp_path):
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (6,), }\n"
    with pytest.raises(TablesError, match="has more bytes than the 48"):
        read_problem(with_header(tmp_path, "vertex_costs", header, bytes(56)))


def cfn_costs(path: Path) -> tuple[float, dict]:
    """Return the upper bound and the document, checked against toulbar2's description of the format."""
    document = json.loads(path.read_text())
    assert set(document) == {"problem", "variables", "functions"}
    match = re.fullmatch(r"<(\d+(\.\d+)?)", document["problem"]["mustbe"])
    assert match
    return float(match[1]), document


def cheapest(document: dict, bound: float) -> float:
    names = list(document["variables"])
    values = [range(len(v)) for v in document["variables"].values()]
    sizes = dict(zip(names, map(len, values), strict=True))
    least = np.inf
    for choice in product(*values):
        at = dict(zip(names, choice, strict=True))
        total = 0.0
        for function in document["functions"].values():
            index = np.ravel_multi_index([at[x] for x in function["scope"]], [sizes[x] for x in function["scope"]])
            total += function["costs"][index]
        least = min(least, total)
    return least if least < bound else np.inf


@in_one_folder
@given(small_problems(max_vertices=5))
def test_an_exported_network_has_the_same_optimum(tmp_path, tables):
    path = tmp_path / "network.cfn"
    export_cfn(tables, path)
    bound, document = cfn_costs(path)
    assert list(document["variables"]) == [f"v{v}_layer{v}" for v in range(tables.num_vertices)]
    optimum = brute_force(tables)
    # An infeasible problem stays one: what is forbidden costs the bound, which no solution may reach.
    assert cheapest(document, bound) == pytest.approx(optimum, rel=1e-9, abs=1e-9)


def test_exported_decimals_fit_64_bits_and_names_are_plain(tmp_path):
    costs = np.array([1.25e-6, 3e-6])
    tables = CostTables(
        vertex_names=('0:"x"', "1:é"),
        vertex_costs=(costs,),
        vertex_table=(0, 0),
        edges=((0, 1),),
        edge_tables=(EdgeTable.from_dense(np.array([[0, 1e-6], [np.inf, 2e-6]])),),
        edge_table=(0,),
    )
    export_cfn(tables, tmp_path / "small.cfn")
    bound, document = cfn_costs(tmp_path / "small.cfn")
    assert list(document["variables"]) == ["v0_0__x_", "v1_1__"]
    assert document["functions"]["layer_0"]["costs"] == [1.25e-6, 3e-6]
    assert document["functions"]["transfer_0"]["costs"] == [0, 1e-6, bound, 2e-6]
    assert "e" not in document["problem"]["mustbe"]
