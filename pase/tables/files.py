"""Problem files: cost tables as one `.npz`, and as a cost function network (`.cfn`) for other solvers.

The `.npz` format, V vertices, E edges, T distinct tables, K_v configurations of vertex v:

    vertex_offsets  int64 [V+1]              vertex v owns vertex_costs[o[v]:o[v+1]]
    vertex_costs    float64 or int64 [ΣK_v]  layer costs, concatenated
    edges           int32 [E, 2]             (u, v), producer first; no pair occurs twice in either order
    edge_table      int32 [E]                number of the edge's table
    table_shape     int32 [T, 2]             (K_u, K_v) of the table
    table_offsets   int64 [T+1]              table t is table_values[o[t]:o[t+1]], row-major
    table_values    float64 or int64 [...]   the distinct tables
    vertex_names    unicode [V]              unique
    configs         int32 [ΣK_v, D]          split factors of each configuration, padded at the end with 0

A file is not trusted: its headers are checked before anything is allocated, and nothing in it is executed.
"""

from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from math import ceil, isfinite, log10
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pase.common.array_files import Array, ArrayArchive, opened_archive, reading
from pase.common.documents import write_atomically
from pase.errors import TablesError
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray, verify_tables

MAX_FILE_BYTES = 2 << 30
"""A file whose arrays take more memory than this is refused."""


_ARRAYS = {  # the kinds of values by NumPy's letters (i integer, f floating point, U text), and the number of axes
    "vertex_offsets": ("iu", 1),
    "vertex_costs": ("iuf", 1),
    "edges": ("iu", 2),
    "edge_table": ("iu", 1),
    "table_shape": ("iu", 2),
    "table_offsets": ("iu", 1),
    "table_values": ("iuf", 1),
    "vertex_names": ("U", 1),
}
_OPTIONAL = {"configs": ("iu", 2)}


def read_problem(path: str | Path) -> CostTables:
    """Return the cost tables in a problem file; equal rows and columns of a table become one layout.

    Raises TablesError, with the file's name and the array's, for a file that is missing, damaged or not as described
    above, and for tables that `verify_tables` refuses.
    """
    arrays = _read_arrays(Path(path))
    try:
        tables = _tables(arrays)
        verify_tables(tables)
    except TablesError as error:
        raise TablesError(f"{path}: {error}") from None
    return tables


def write_problem(
    tables: CostTables, path: str | Path, configurations: Sequence[NDArray[np.int32]] | None = None
) -> None:
    """Write cost tables as a problem file, replacing a file of that name as a whole.

    configurations: for each vertex its [K_v, D_v] split factors; without them `configs` has no columns. Edges between
    the same two vertices are added up, as the format has one table for a pair. Raises TablesError when the tables are
    not well formed or would take more than MAX_FILE_BYTES, OSError when the file cannot be written.
    """
    _check_sums(tables)
    pairs = _pairs(tables)
    sizes = tables.domain_sizes
    num_bytes = 8 * sum({key: sizes[u] * sizes[v] for (u, v), key in pairs.items()}.values())
    if num_bytes > MAX_FILE_BYTES:
        raise TablesError(
            f"the distinct tables take {num_bytes:,} bytes configuration by configuration; a problem file holds "
            f"at most {MAX_FILE_BYTES:,}: use fewer devices"
        )
    number: dict[bytes, int] = {}
    of_key: dict[tuple[tuple[int, bool], ...], int] = {}
    distinct: list[FloatArray] = []
    for key in pairs.values():
        if key in of_key:
            continue
        values = _added(tables, key)
        of_key[key] = number.setdefault(values.tobytes() + repr(values.shape).encode(), len(distinct))
        if of_key[key] == len(distinct):
            distinct.append(values)
    stream = BytesIO()
    np.savez_compressed(
        stream,
        allow_pickle=False,
        vertex_offsets=_offsets(sizes),
        vertex_costs=_compact(np.concatenate([tables.layer_costs(v) for v in range(tables.num_vertices)])),
        edges=np.array(list(pairs), dtype=np.int32).reshape(-1, 2),
        edge_table=np.array([of_key[key] for key in pairs.values()], dtype=np.int32),
        table_shape=np.array([t.shape for t in distinct], dtype=np.int32).reshape(-1, 2),
        table_offsets=_offsets([t.size for t in distinct]),
        table_values=_compact(np.concatenate([t.ravel() for t in distinct]) if distinct else np.zeros(0)),
        vertex_names=np.array(tables.vertex_names),
        configs=_padded(configurations, sizes),
    )
    write_atomically(Path(path), stream.getvalue())


def export_cfn(tables: CostTables, path: str | Path) -> None:
    """Write cost tables as a cost function network in toulbar2's JSON format, replacing a file of that name.

    Costs are written with as many decimals as its 64-bit fixed-point sums leave room for; an infinite cost is written
    as the upper bound, which forbids the combination. Raises TablesError when the tables are not well formed or would
    take more than MAX_FILE_BYTES, OSError when the file cannot be written.
    """
    _check_sums(tables)
    num_values = sum(tables.domain_sizes) + sum(k_u * k_v for k_u, k_v in (t.shape for t in tables.edge_tables))
    if 16 * num_values > MAX_FILE_BYTES:
        raise TablesError(f"the tables have {num_values:,} values, too many for a text file: use fewer devices")
    bound = _upper_bound(tables)
    decimals = min(max(0, 15 - ceil(log10(max(bound, 1e-300)))), 15)
    whole = all((v[np.isfinite(v)] % 1 == 0).all() for v in _all_values(tables))
    decimals = 0 if whole else decimals
    top = f"{bound:.{decimals}f}"
    names = _cfn_names(tables.vertex_names)
    vectors = [_decimal(c, decimals, top) for c in tables.vertex_costs]
    matrices = [_decimal(t.dense().ravel(), decimals, top) for t in tables.edge_tables]
    variables = [
        f'"{name}":[{",".join(f"{chr(34)}c{c}{chr(34)}" for c in range(size))}]'
        for name, size in zip(names, tables.domain_sizes, strict=True)
    ]
    functions = [
        f'"layer_{v}":{{"scope":["{names[v]}"],"costs":[{vectors[t]}]}}' for v, t in enumerate(tables.vertex_table)
    ]
    functions += [
        f'"transfer_{e}":{{"scope":["{names[u]}","{names[v]}"],"costs":[{matrices[t]}]}}'
        for e, ((u, v), t) in enumerate(zip(tables.edges, tables.edge_table, strict=True))
    ]
    separator = ",\n"
    text = (
        f'{{"problem":{{"name":"pase","mustbe":"<{top}"}},\n"variables":{{\n{separator.join(variables)}\n}},\n'
        f'"functions":{{\n{separator.join(functions)}\n}}}}\n'
    )
    write_atomically(Path(path), text)


def _read_arrays(path: Path) -> dict[str, Array]:
    expected = "expected a complete .npz file of cost tables"
    with reading(TablesError, f"{path}: cannot be read", expected), opened_archive(path) as found:
        missing = [name for name in _ARRAYS if name not in found.names]
        if missing:
            raise TablesError(f"{path}: the array {missing[0]!r} is missing; a problem file has {', '.join(_ARRAYS)}")
        if found.claimed_bytes > MAX_FILE_BYTES:
            raise TablesError(
                f"{path}: its arrays take {found.claimed_bytes:,} bytes; at most {MAX_FILE_BYTES:,} are read"
            )
        described = _ARRAYS | {name: _OPTIONAL[name] for name in _OPTIONAL if name in found.names}
        return {name: _read_array(found, path, name, *expected) for name, expected in described.items()}


def _read_array(archive: ArrayArchive, path: Path, name: str, kinds: str, num_axes: int) -> Array:
    called = f"{path}: the array {name!r}"
    header = archive.header(name)
    if header.dtype.kind not in kinds:
        expected = {"U": "text", "iu": "integers", "iuf": "numbers"}[kinds]
        raise TablesError(f"{called} has the type {header.dtype}; expected {expected}")
    if len(header.shape) != num_axes:
        raise TablesError(f"{called} has the shape {header.shape}; expected {num_axes} axes")
    return archive.array(name)


def _tables(arrays: dict[str, Array]) -> CostTables:
    names = tuple(str(n) for n in arrays["vertex_names"])
    offsets = _checked_offsets(arrays, "vertex_offsets", "vertex_costs", len(names))
    starts = _checked_offsets(arrays, "table_offsets", "table_values", len(arrays["table_shape"]))
    edges, shapes = arrays["edges"], arrays["table_shape"]
    for name, pairs in (("edges", edges), ("table_shape", shapes)):
        if pairs.shape[1] != 2:
            raise TablesError(f"the array {name!r} has the shape {pairs.shape}; expected 2 columns")
    if len(arrays["edge_table"]) != len(edges):
        raise TablesError(
            f"the array 'edge_table' has {len(arrays['edge_table'])} entries; there are {len(edges)} edges"
        )
    if "configs" in arrays and len(arrays["configs"]) != offsets[-1]:
        raise TablesError(
            f"the array 'configs' has {len(arrays['configs'])} rows; there are {offsets[-1]} configurations"
        )
    costs = arrays["vertex_costs"].astype(np.float64, copy=False)
    values = arrays["table_values"].astype(np.float64, copy=False)
    shape_list = [(int(r), int(c)) for r, c in shapes.tolist()]
    for t, (rows, cols) in enumerate(shape_list):
        if rows < 1 or cols < 1 or rows * cols != starts[t + 1] - starts[t]:
            raise TablesError(
                f"the array 'table_shape' gives table {t} the shape ({rows}, {cols}); "
                f"'table_offsets' gives it {starts[t + 1] - starts[t]} values"
            )
    number: dict[bytes, int] = {}
    vertex_costs: list[FloatArray] = []
    vertex_table = []
    for v in range(len(names)):
        own = costs[offsets[v] : offsets[v + 1]]
        t = number.setdefault(own.tobytes(), len(vertex_costs))
        if t == len(vertex_costs):
            vertex_costs.append(own)
        vertex_table.append(t)
    dense = [values[starts[t] : starts[t + 1]].reshape(shape) for t, shape in enumerate(shape_list)]
    for t, matrix in enumerate(dense):
        if not (matrix >= 0).all():
            raise TablesError(
                f"the array 'table_values' holds NaN or a negative cost in table {t}; costs are 0 or more"
            )
    if not (costs >= 0).all():
        raise TablesError("the array 'vertex_costs' holds NaN or a negative cost; costs are 0 or more")
    return CostTables(
        vertex_names=names,
        vertex_costs=tuple(vertex_costs),
        vertex_table=tuple(vertex_table),
        edges=tuple((int(u), int(v)) for u, v in edges.tolist()),
        edge_tables=tuple(EdgeTable.factored(matrix) for matrix in dense),
        edge_table=tuple(int(t) for t in arrays["edge_table"].tolist()),
    )


def _checked_offsets(arrays: dict[str, Array], name: str, into: str, num_parts: int) -> list[int]:
    offsets = [int(o) for o in arrays[name].tolist()]
    if len(offsets) != num_parts + 1:
        raise TablesError(f"the array {name!r} has {len(offsets)} entries; expected {num_parts + 1}")
    if offsets[0] != 0 or offsets[-1] != len(arrays[into]) or any(a > b for a, b in pairwise(offsets)):
        raise TablesError(f"the array {name!r} must rise from 0 to the length of {into!r}, {len(arrays[into])}")
    return offsets


def _pairs(tables: CostTables) -> dict[tuple[int, int], tuple[tuple[int, bool], ...]]:
    """Return, for each pair of joined vertices, the (table, is transposed) of its edges, in a canonical order."""
    pairs: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    for (u, v), t in zip(tables.edges, tables.edge_table, strict=True):
        if (v, u) in pairs:
            pairs[v, u].append((t, True))
        else:
            pairs.setdefault((u, v), []).append((t, False))
    return {pair: tuple(sorted(parts)) for pair, parts in pairs.items()}


def _check_sums(tables: CostTables) -> None:
    """Raise TablesError unless tables are well formed and additive."""
    verify_tables(tables)
    if tables.hiding is not None:
        raise TablesError(
            "some of these costs overlap with others, so they are not additive, and files of cost tables hold additive "
            "costs; write the tables of an additive cost model (alpha_beta)"
        )


def _added(tables: CostTables, parts: Sequence[tuple[int, bool]]) -> FloatArray:
    total = None
    for t, transposed in parts:
        values = tables.edge_tables[t].dense()
        values = values.T if transposed else values
        total = values if total is None else total + values
    assert total is not None
    return np.ascontiguousarray(total)


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)


def _compact(values: FloatArray) -> NDArray[np.int64] | FloatArray:
    """Return the values as int64 where each is a whole number that float64 holds exactly."""
    if values.size and np.isfinite(values).all() and float(values.max()) < 2.0**53 and (values % 1 == 0).all():
        return values.astype(np.int64)
    return values


def _padded(configurations: Sequence[NDArray[np.int32]] | None, sizes: Sequence[int]) -> NDArray[np.int32]:
    if configurations is None:
        return np.zeros((sum(sizes), 0), dtype=np.int32)
    if [len(c) for c in configurations] != list(sizes):
        raise TablesError("the configurations to write are not those of the tables: their numbers differ")
    padded = np.zeros((sum(sizes), max(c.shape[1] for c in configurations)), dtype=np.int32)
    for start, rows in zip(_offsets(sizes), configurations, strict=False):
        padded[start : start + len(rows), : rows.shape[1]] = rows
    return padded


def _all_values(tables: CostTables) -> list[FloatArray]:
    return [*tables.vertex_costs, *(t.values for t in tables.edge_tables)]


def _upper_bound(tables: CostTables) -> float:
    """Return a cost above the cheapest strategy's: that of the cheapest layers, or of the dearest finite entries."""
    known = tables.evaluate([int(tables.layer_costs(v).argmin()) for v in range(tables.num_vertices)])
    if isfinite(known):
        return known * (1 + 1e-6) + 1
    dearest = [float(v[np.isfinite(v)].max()) for v in _all_values(tables)]
    num_costs = len(tables.vertex_costs)
    return (sum(dearest[t] for t in tables.vertex_table) + sum(dearest[num_costs + t] for t in tables.edge_table)) * (
        1 + 1e-6
    ) + 1


def _cfn_names(names: Sequence[str]) -> list[str]:
    """Return names of letters, digits and underscores that start with the vertex's number, so that they are unique."""
    return [f"v{v}_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in n) for v, n in enumerate(names)]


def _decimal(values: FloatArray, decimals: int, top: str) -> str:
    return ",".join(f"{x:.{decimals}f}" if isfinite(x) else top for x in values.tolist())
