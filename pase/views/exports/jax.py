"""A plan for JAX: a module with a mesh and the PartitionSpec of each tensor of each layer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pase.common.names import listed
from pase.common.quantities import quantity
from pase.graph import Graph, Operator
from pase.graph.operator import SCANNED
from pase.planning.constraints import with_ties
from pase.planning.plan import Plan, check_even, check_plain
from pase.planning.planner import problem_of
from pase.solver import Solution, solve
from pase.tables.cost_tables import CostTables, EdgeTable
from pase.targets.emitter.text import Text, code, joined
from pase.targets.jax.miscomputed import without_miscomputed
from pase.targets.named_mesh import NamedDim, NamedTensor, named_mesh, notes
from pase.views.exports.named_mesh import constants, heading, table
from pase.views.exports.registry import Exported, ExportOptions

_TIME_LIMIT_S = 10.0


def scan_notes(plan: Plan) -> tuple[str, ...]:
    """Return a line that names the layers of a loop that are split otherwise in another turn, if there are any."""
    places = scanned_layers(plan.graph)
    unlike = [
        name for names in places.values() if len({tuple(plan[n].splits.items()) for n in names}) > 1 for name in names
    ]
    if not unlike:
        return ()
    problem = problem_of(plan.graph, plan.num_devices, plan.machine, plan.cost_model)
    groups = [[problem.graph.index[name] for name in names] for names in places.values()]
    if problem.tables.hiding is None:
        solution = cheapest_alike(problem.tables, groups)
    else:  # which layers are joined makes a difference to what hides
        solution = solve(with_ties(problem, places.values()).tables, time_limit_s=_TIME_LIMIT_S)
    found = "the cheapest strategy" if solution.exact else "a strategy"
    told = (
        f"split differently in the turns of one lax.scan: {listed(unlike)}; a scan has one body, and so one spec for "
        f"all turns: write the loop out, or give all turns the specs of one; {found} with all turns alike costs "
        f"{quantity(solution.cost, plan.cost_unit)}, this one {quantity(plan.total_cost, plan.cost_unit)}"
    )
    return (told,)


def scanned_layers(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Return the layers of all turns of a loop, by their place in its body; those alone that can be split alike."""
    found: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        place = operator.attribute(SCANNED, "")
        if place:
            found.setdefault(place, []).append(operator)
    return {
        place: tuple(operator.name for operator in turns)
        for place, turns in found.items()
        if len({(operator.dims, operator.unsplittable) for operator in turns}) == 1
    }


def cheapest_alike(tables: CostTables, groups: Sequence[Sequence[int]]) -> Solution:
    """Return a cheapest strategy in which the vertices of each group have one configuration; they have the same ones.

    The solution's choice is of all vertices.
    """
    first = list(range(tables.num_vertices))
    for group in groups:
        for vertex in group:
            first[vertex] = group[0]
    kept = sorted(set(first))
    place = {vertex: i for i, vertex in enumerate(kept)}
    costs = [np.zeros(tables.domain_sizes[vertex]) for vertex in kept]
    for vertex, number in enumerate(tables.vertex_table):
        costs[place[first[vertex]]] += tables.vertex_costs[number]
    joined: Counter[tuple[int, int, int, bool]] = Counter()
    for (u, v), number in zip(tables.edges, tables.edge_table, strict=True):
        a, b = place[first[u]], place[first[v]]
        if a == b:
            table = tables.edge_tables[number]
            costs[a] += table.values[table.row_class, table.col_class]
        else:
            joined[min(a, b), max(a, b), number, a > b] += 1
    edge_tables = []
    for (_, _, number, is_turned), count in joined.items():
        table = tables.edge_tables[number]
        rows, cols, values = table.row_class, table.col_class, table.values * count
        edge_tables.append(
            EdgeTable(row_class=cols, col_class=rows, values=np.ascontiguousarray(values.T))
            if is_turned
            else EdgeTable(row_class=rows, col_class=cols, values=values)
        )
    solution = solve(
        CostTables(
            vertex_names=tuple(tables.vertex_names[vertex] for vertex in kept),
            vertex_costs=tuple(costs),
            vertex_table=tuple(range(len(kept))),
            edges=tuple((a, b) for a, b, _, _ in joined),
            edge_tables=tuple(edge_tables),
            edge_table=tuple(range(len(edge_tables))),
        ),
        time_limit_s=_TIME_LIMIT_S,
    )
    return replace(solution, choice=tuple(solution.choice[place[vertex]] for vertex in first))


_USE = code(
    """\
    mesh = make_mesh()
    w = jax.device_put(w, sharding(mesh, SPECS[layer]["parameters"]["w"]))
    x = jax.lax.with_sharding_constraint(x, sharding(mesh, SPECS[layer]["inputs"][0]))   # within jax.jit

A spec has an entry for each dim of the tensor, in the order of its shape, which stands beside it."""
)

_IMPORTS = code(
    """\
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
"""
)

_FUNCTIONS = code(
    '''
def make_mesh(devices=None):
    """Return the mesh; devices: that the plan numbers from 0, by default those of JAX."""
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < len(DEVICE_ORDER):
        raise ValueError(f"the plan is for {len(DEVICE_ORDER)} devices; found {len(devices)}")
    ordered = np.empty(len(DEVICE_ORDER), dtype=object)
    ordered[:] = [devices[number] for number in DEVICE_ORDER]
    return Mesh(ordered.reshape(MESH_SHAPE), AXIS_NAMES)


def sharding(mesh, spec):
    """Return how a tensor lies on the mesh."""
    return NamedSharding(mesh, spec)

'''
)


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return a Python module that defines a mesh and SPECS, the PartitionSpec of each tensor of each layer.

    Where a spec cannot say how the plan splits a dim of a tensor that a layer makes, it leaves the dim to the compiler;
    data and parameters are not split there, nor what XLA would compute wrong (`without_miscomputed`). Notes name the
    layers.
    """
    check_plain(plan, "JAX")
    check_even(plan, "JAX")
    mesh = without_miscomputed(plan, named_mesh(plan))
    found = (*scan_notes(plan), *notes(mesh))
    groups = {"inputs": _spec, "parameters": _spec, "outputs": _spec}
    lines = [
        *heading(plan, code("JAX"), found, _USE),
        _IMPORTS,
        *constants(mesh, "The plan's number of the device at each place of the mesh, row-major."),
        _FUNCTIONS,
        *table(code("SPECS"), mesh.layers, groups),
        code(""),
    ]
    return Exported(text=joined(lines), notes=found)


def _spec(tensor: NamedTensor) -> Text:
    return code("P({})", [_entry(dim, is_made=tensor.is_made) for dim in tensor.dims])


def _entry(dim: NamedDim, *, is_made: bool) -> Text:
    if dim.is_open and is_made:
        return code("P.UNCONSTRAINED")
    match dim.axes:
        case ():
            return code("None")
        case (axis,):
            return code("{}", axis)
        case axes:
            return code("({})", axes)
