"""Join parts of a model that share no tensor, so that they are one graph: searched, placed and reported as one."""

from collections.abc import Sequence
from dataclasses import replace

from pase.graph import Access, Dim, Edge, Operator


def joined(operators: Sequence[Operator], edges: Sequence[Edge]) -> tuple[list[Operator], list[Edge]]:
    """Return operators and edges with a vertex "outputs" that reads one element of every part, where there are several.

    That element is the same on every device: it costs nothing, whatever the strategy, so that the optimum of the
    whole is the sum of those of the parts.
    """
    parts = _parts(operators, edges)
    if len(parts) == 1:
        return list(operators), list(edges)
    names = {operator.name for operator in operators}
    name = next(wish for i in range(len(names) + 1) if (wish := f"outputs_{i + 1}" if i else "outputs") not in names)
    last = {part[-1] for part in parts}
    token = Access(tensor="token", shape=(1,), axes=(None,), partial_over=())
    told = [replace(op, writes=(*op.writes, token)) if i in last else op for i, op in enumerate(operators)]
    sources = [operators[i] for i in sorted(last)]
    reads = tuple(replace(token, tensor=f"x{i}") for i in range(len(sources)))
    end = Operator(name=name, kind="outputs", dims=(Dim("i", 1),), reads=reads, writes=(token,))
    more = [
        Edge(producer=source.name, output=len(source.writes), consumer=name, input=i)
        for i, source in enumerate(sources)
    ]
    return [*told, end], [*edges, *more]


def _parts(operators: Sequence[Operator], edges: Sequence[Edge]) -> list[list[int]]:
    """Return the positions of the operators of each part, in order."""
    index = {operator.name: i for i, operator in enumerate(operators)}
    parent = list(range(len(operators)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for edge in edges:
        parent[root(index[edge.producer])] = root(index[edge.consumer])
    found: dict[int, list[int]] = {}
    for i in range(len(operators)):
        found.setdefault(root(i), []).append(i)
    return [*found.values()]
