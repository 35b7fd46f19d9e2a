"""The strategies at p = 32 beside the PaSE paper's Table II, and InceptionV3's graph beside section III-C."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pase import load
from pase.costs import CostModel, Problem, build_problem, cost_model, traffic_of
from pase.errors import ConfigurationError, TablesError
from pase.graph import Graph, Operator
from pase.machine import load_machine
from pase.planning.problems import data_parallel_cost
from pase.solver import Solution, solve
from pase.solver.ordering import breadth_first, generate_seq
from pase.tables.cost_tables import CostTables, restricted
from scripts.benchmarks.recurrences import dependent_sets, naive_dependent_sets
from scripts.benchmarks.tables import markdown, publish

NUM_DEVICES = 32
MACHINE = "1080ti"

Splits = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of Table II: what the paper calls the layers, which of ours they are, their configuration there."""

    label: str
    layers: Callable[[Operator], bool]
    splits: Splits


def _named(pattern: str, kind: str = "") -> Callable[[Operator], bool]:
    # The paper has no fan-outs: these follow the layers.
    return lambda op: not op.is_fan_out and re.fullmatch(pattern, op.name) is not None and (not kind or op.kind == kind)


def complete(problem: Problem, fixed: Mapping[str, Mapping[str, int]]) -> Solution:
    """Return the cheapest strategy in which the named layers have the given configurations.

    fixed: for a layer, the split factor of each dim that is split. Raises ConfigurationError for a layer or a
    dim that does not exist, or a configuration that the number of devices does not allow.
    """
    choice = {}
    for name, splits in fixed.items():
        if name not in problem.graph.index:
            raise ConfigurationError(f"there is no layer {name!r} in graph {problem.graph.name!r}")
        operator = problem.graph[name]
        unknown = set(splits) - set(operator.extents)
        if unknown:
            raise ConfigurationError(
                f"layer {name!r} has no dim {', '.join(sorted(unknown))}; its dims are {', '.join(operator.extents)}"
            )
        vertex = problem.graph.index[name]
        found = problem.choice(vertex, tuple(splits.get(dim, 1) for dim in operator.extents))
        if found is None:
            raise ConfigurationError(
                f"{dict(splits)} is no configuration of layer {name!r} ({operator.extents}) "
                f"on {problem.num_devices} devices"
            )
        choice[vertex] = found
    solution = solve(restrict(problem.tables, choice))
    return replace(solution, choice=tuple(choice.get(v, c) for v, c in enumerate(solution.choice)))


def restrict(tables: CostTables, choice: Mapping[int, int]) -> CostTables:
    """Return the problem in which the given vertices have one configuration left, that of the given index.

    Raises TablesError for a vertex or a configuration that does not exist.
    """
    for vertex, index in choice.items():
        if not 0 <= vertex < tables.num_vertices:
            raise TablesError(f"there is no vertex {vertex}; they are 0 to {tables.num_vertices - 1}")
        if not 0 <= index < tables.domain_sizes[vertex]:
            raise TablesError(
                f"vertex {tables.vertex_names[vertex]!r} has no configuration {index}; "
                f"they are 0 to {tables.domain_sizes[vertex] - 1}"
            )
    return restricted(tables, {vertex: np.array([index], dtype=np.int32) for vertex, index in choice.items()})


# Table II of the paper; dims that it does not name are not split.
TABLE_II: dict[str, tuple[Row, ...]] = {
    "alexnet": (
        Row(label="Conv 1–4", layers=_named("conv[1-4]"), splits={"b": 32}),
        Row(label="Conv 5", layers=_named("conv5"), splits={"b": 16, "c": 2}),
        Row(label="FC 1, FC 3", layers=_named("fc[13]"), splits={"n": 4, "c": 8}),
        Row(label="FC 2", layers=_named("fc2"), splits={"n": 8, "c": 4}),
        Row(label="Softmax", layers=_named("softmax"), splits={"n": 4}),
    ),
    "inception_v3": (
        Row(label="Modules A–D", layers=_named("[a-d][0-9]?_.*"), splits={"b": 32}),
        Row(label="Module E", layers=_named("e[0-9]_.*", "conv2d"), splits={"b": 16, "n": 2}),
        Row(label="FC", layers=_named("fc"), splits={"n": 2, "c": 16}),
        Row(label="Softmax", layers=_named("softmax"), splits={"n": 2}),
    ),
    "rnnlm": (
        Row(label="Embedding", layers=_named("embedding"), splits={"v": 32}),
        Row(label="LSTM", layers=_named("lstm"), splits={"l": 2, "b": 4, "d": 2, "e": 2}),
        Row(label="FC", layers=_named("fc"), splits={"v": 32}),
        Row(label="Softmax", layers=_named("softmax"), splits={"v": 32}),
    ),
    "transformer": (
        Row(label="Embedding", layers=_named(".*_embedding", "embedding"), splits={"v": 16}),
        Row(label="Multi-head attention", layers=_named(".*_(q|k|v|attention|o)"), splits={"b": 16, "h": 2}),
        Row(label="Feed forward", layers=_named(".*_ff_[12]"), splits={"b": 16, "e": 2}),
        Row(label="FC", layers=_named("fc"), splits={"v": 16}),
        Row(label="Softmax", layers=_named("softmax"), splits={"v": 16}),
    ),
}


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/paper.md."""
    tables = {name: _strategy_table(name) for name in TABLE_II}
    tables["totals"] = _totals()
    tables["dependent sets"] = _dependent_sets()
    publish("paper.md", tables, write=write)


def _problem(name: str) -> tuple[Problem, CostModel]:
    model = cost_model("paper", load_machine(MACHINE), NUM_DEVICES)
    return build_problem(load(name), NUM_DEVICES, model), model


def _fixed(graph: Graph, rows: tuple[Row, ...]) -> dict[str, Splits]:
    fixed = {op.name: row.splits for row in rows for op in graph.operators if row.layers(op)}
    for row in rows:
        if not any(row.layers(op) for op in graph.operators):
            raise SystemExit(f"{graph.name}: no layer is what the paper calls {row.label!r}")
    return fixed


def _strategy_table(name: str) -> str:
    problem, model = _problem(name)
    best = solve(problem.tables)
    lines = []
    for row in TABLE_II[name]:
        members = [v for v, op in enumerate(problem.graph.operators) if row.layers(op)]
        if not members:
            raise SystemExit(f"{name}: no layer is what the paper calls {row.label!r}")
        ours = [_text(problem.splits(v, best.choice[v])) for v in members]
        forced = complete(problem, {problem.graph.operators[v].name: row.splits for v in members})
        our_cost = [_cost_parts(problem, model, best.choice, v) for v in members]
        their_cost = [_cost_parts(problem, model, forced.choice, v) for v in members]
        lines.append(
            [
                row.label,
                _text(row.splits),
                _summary(ours),
                _parts(np.sum(our_cost, axis=0)),
                _parts(np.sum(their_cost, axis=0)),
                f"{(forced.cost - best.cost) / 1e9:+.2f} ({(forced.cost / best.cost - 1):+.2%})",
            ]
        )
    headers = [
        "layers",
        "paper",
        "ours",
        "ours: compute + inside + edges, GFLOP",
        "paper's: compute + inside + edges, GFLOP",
        "price of the paper's choice here, GFLOP",
    ]
    return markdown(headers, lines)


def _cost_parts(problem: Problem, model: CostModel, choice: tuple[int, ...], vertex: int) -> list[float]:
    """Return (computation, communication inside the layer, transfers on all its edges), in GFLOP."""
    splits = problem.configurations[vertex][choice[vertex]][None, :]
    traffic = traffic_of(problem.graph, problem.graph.operators[vertex], splits)
    compute = sum(float(model.work(work)[0]) for work in (traffic.forward, traffic.backward))
    communication = sum(float(cost[0]) for cost in model.messages(traffic))
    tables = problem.tables
    edges = sum(tables.edge(e).cost(choice[u], choice[v]) for e, (u, v) in enumerate(tables.edges) if vertex in (u, v))
    return [compute / 1e9, communication / 1e9, edges / 1e9]


def _totals() -> str:
    lines = []
    for name, rows in TABLE_II.items():
        problem, _ = _problem(name)
        best = solve(problem.tables)
        papers = complete(problem, _fixed(problem.graph, rows))
        data_parallel = data_parallel_cost(problem)
        if not best.exact or best.cost > papers.cost:
            raise SystemExit(f"{name}: the search's {best.cost} is not proven to be at most the paper's {papers.cost}")
        lines.append(
            [
                name,
                f"{best.cost / 1e9:.2f}",
                f"{papers.cost / 1e9:.2f}",
                f"{papers.cost / best.cost:.3f}",
                f"{data_parallel / 1e9:.2f}",
                f"{data_parallel / best.cost:.2f}",
            ]
        )
    return markdown(
        ["network", "ours, GFLOP", "paper's strategy, GFLOP", "ratio", "data parallelism, GFLOP", "ratio"], lines
    )


def _dependent_sets() -> str:
    lines = []
    for name in TABLE_II:
        graph = load(name)
        sizes = [1] * len(graph.operators)
        degrees = [len(n) for n in graph.neighbours]
        cells = [name, str(len(graph.operators)), str(len(graph.edges)), str(sum(d >= 5 for d in degrees))]
        # Recurrence (2) sees breadth-first order without connected sets; recurrence (4) is what GenerateSeq serves.
        naive = naive_dependent_sets(graph.neighbours, breadth_first(graph.neighbours, sizes))
        efficient = dependent_sets(graph.neighbours, generate_seq(graph.neighbours, sizes)).dependent
        cells += [str(max(map(len, sets))) for sets in (naive, efficient)]
        lines.append(cells)
    return markdown(
        ["network", "vertices", "edges", "of degree ≥ 5", "largest dependent set, breadth-first", "GenerateSeq"], lines
    )


def _text(splits: Splits) -> str:
    return ", ".join(f"{dim} {k}" for dim, k in splits.items() if k > 1) or "not split"


def _summary(texts: list[str]) -> str:
    """Return the distinct configurations, the most frequent first, with how many layers have each."""
    counts = {text: texts.count(text) for text in dict.fromkeys(texts)}
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    if len(ordered) == 1:
        return ordered[0][0]
    return "; ".join(f"{text} (×{count})" for text, count in ordered)


def _parts(cost: np.ndarray) -> str:
    return " + ".join(f"{part:.2f}" for part in cost)
