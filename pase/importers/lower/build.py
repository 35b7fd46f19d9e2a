"""`lower`: from a trace after its passes to a graph: vertices, edges, and where each weight comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod

from pase.common.containers import connected
from pase.errors import ModelError
from pase.graph import Access, Dim, Edge, Graph, Operator, Role, Scalar, SliceOf, verify
from pase.graph.batch import Span, given_spans
from pase.graph.body import Body, Step
from pase.graph.operator import SCANNED, access_dims
from pase.importers.ir import ops
from pase.importers.ir.trace import Leaf, Names, Node, Piece, Trace, Use, Value, piece_shape
from pase.importers.ir.views import View
from pase.importers.lower.bodies import Lowering, Read, with_body, with_moved
from pase.importers.lower.draft import LoweredOperator, fitted, suggested_names, with_epilogue
from pase.importers.lower.vertices import LOWER, draft_of_view, lower_slice, with_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where the values of a vertex's weight come from: a tensor of the source, perhaps a piece, perhaps seen otherwise.

    The elements, in row-major order of what is read, are those of the weight in its own.
    """

    layer: str
    tensor: str
    source: str
    piece: Piece | None = None


class Weights:
    """How often each weight of a trace is read, and in which pieces."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._pieces = pieces_read(trace)
        reads: dict[str, list[tuple[Leaf, Use]]] = {}
        for node in trace.nodes:
            for use in node.inputs:
                if trace.is_parameter(use):
                    leaf = trace.leaf[use.value]
                    reads.setdefault(_storage(leaf), []).append((leaf, use))
        self._tiled = {name for name, uses in reads.items() if self._is_tiled(uses)}
        self._readers: dict[str, int] = {}
        for uses in reads.values():
            for leaf, use in uses:
                key = self._key(leaf, use)
                self._readers[key] = self._readers.get(key, 0) + 1

    def read(self, access: Access, use: Use, layer: str) -> tuple[Access, WeightSource]:
        """Return a read of a weight, and where that is from.

        One that is read in part, or as something computed of it, is held whole, and its gradient is added up
        everywhere, unless the parts make it up.
        """
        leaf = self._trace.leaf[use.value]
        is_part = use.piece is not None and _storage(leaf) in self._tiled
        if use.seen_as is not None or (use.piece is not None and not is_part):
            over = access.partial_over
            # Parts that differ by dims of the parts it was told to be read in leave sums, too.
            over = None if over is None else tuple(dict.fromkeys((*over, *sorted(access_dims(access)))))
            whole = leaf.value.shape
            access = replace(access, shape=whole, index_map=(None,) * len(whole), partial_over=over)
        key = self._key(leaf, use)
        source = WeightSource(
            layer=layer, tensor=access.tensor, source=leaf.value.name, piece=use.piece if is_part else None
        )
        shared, is_trained = key if self._readers[key] > 1 else "", use.value not in self._trace.frozen
        return replace(access, role=Role.PARAMETER, shared=shared, is_trained=is_trained), source

    def is_held_whole(self, use: Use) -> bool:
        """Return whether a weight is read in a way that tells nothing of its parts."""
        return use.seen_as is not None or (
            use.piece is not None and _storage(self._trace.leaf[use.value]) not in self._tiled
        )

    def _key(self, leaf: Leaf, use: Use) -> str:
        storage = _storage(leaf)
        if use.piece is None or storage not in self._tiled:
            return storage
        return f"{storage}[{use.piece.dim}:{use.piece.start}:{use.piece.start + use.piece.size}]"

    def _is_tiled(self, uses: list[tuple[Leaf, Use]]) -> bool:
        """Whether the pieces in which a weight is read make it up, each element once, and are all that is read."""
        pieces = {use.piece for _, use in uses if use.piece is not None}
        if any(use.piece is None for _, use in uses) or len({piece.dim for piece in pieces}) != 1:
            return False
        at = 0
        for piece in sorted(pieces, key=lambda p: p.start):
            if piece.start != at:
                return False
            at += piece.size
        shapes = {leaf.value.shape for leaf, _ in uses}
        (dim,) = {piece.dim for piece in pieces}
        return all(shape[dim] == at for shape in shapes)


def pieces_read(trace: Trace) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces in which each value is read."""
    found: dict[str, dict[Piece, None]] = {}
    for node in trace.nodes:
        for use in node.inputs:
            if use.piece is not None:
                found.setdefault(use.value, {})[use.piece] = None
    return {name: tuple(pieces) for name, pieces in found.items()}


def _storage(leaf: Leaf) -> str:
    return leaf.storage or leaf.value.name


# -- vertices and edges


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """graph: of the model. weights: where their values are from. approximations: (layer, what is not charged as it is).

    scopes: of each layer, the module or layer of the source. nodes: of each layer that is a node of the trace that was
    lowered, its name. constants: (layer, constant of its body), what it is of the source; own_constants: those of the
    bodies that the source's own framework computes. fed: (layer, read), of what
    no layer makes and is no weight, what of the source it reads; the elements, row-major, are those of the read.
    reads: of each layer, what it reads of that trace. written: (layer, output), what it is of that trace.
    """

    graph: Graph
    weights: tuple[WeightSource, ...]
    approximations: tuple[tuple[str, str], ...]
    scopes: Mapping[str, str]
    nodes: Mapping[str, str]
    constants: Mapping[tuple[str, str], Use]
    own_constants: Mapping[tuple[str, str], Use]
    fed: Mapping[tuple[str, int], Use]
    reads: Mapping[str, tuple[Use, ...]]
    written: Mapping[tuple[str, int], Use]


def lower(trace: Trace, *, arguments: Mapping[str, Scalar] | None = None, framework: str = "") -> Lowered:
    """Return the graph of a trace; ModelError where nothing is left to compute.

    Parts that share no tensor (two towers whose results are returned side by side) are joined by a vertex "outputs".
    """
    batch = (arguments or {}).get("batch")
    builder = _Builder(trace, batch if isinstance(batch, int) else None)
    for node in trace.nodes:
        builder.add(node)
    if not builder.operators:
        raise ModelError(f"model {trace.name!r} has no operator that computes with floats; there is nothing to split")
    operators, edges = joined(_scanned(builder), builder.edges)
    graph = Graph(
        name=trace.name,
        operators=tuple(operators),
        edges=tuple(edges),
        arguments=tuple((arguments or {}).items()),
        framework=framework,
        call=trace.call,
    )
    return Lowered(
        graph=verify(graph),
        weights=tuple(builder.weights),
        approximations=tuple(builder.approximations),
        scopes=builder.scopes,
        nodes=builder.nodes,
        constants=builder.constants,
        own_constants=builder.own_constants,
        fed=builder.fed,
        reads=builder.reads,
        written={made: Use(value=value, piece=piece) for (value, piece), made in builder.made.items()},
    )


def _scanned(builder: "_Builder") -> list[Operator]:
    """Return the vertices, those of a loop that is written out with their place in its body, which all turns share."""
    turns = {node.name: node.origin.turn for node in builder.trace.nodes}
    loops: dict[int, dict[int, list[Operator]]] = {}
    for operator in builder.operators:
        turn = turns.get(builder.nodes.get(operator.name, ""))
        if turn is not None:
            loops.setdefault(turn[0], {}).setdefault(turn[1], []).append(operator)
    places: dict[str, str] = {}
    for number, bodies in loops.items():
        # Where a turn's body has become another one, no place of it stands for those of the others.
        if len({tuple((op.kind, op.dims) for op in body) for body in bodies.values()}) == 1 < len(bodies):
            places |= {op.name: f"{number}.{i}" for body in bodies.values() for i, op in enumerate(body)}
    return [
        replace(op, attributes=(*op.attributes, (SCANNED, places[op.name]))) if op.name in places else op
        for op in builder.operators
    ]


class _Builder:
    """Vertices and edges while they are made."""

    def __init__(self, trace: Trace, batch: int | None) -> None:
        self.trace = trace
        given = [leaf.value for leaf in trace.leaves if leaf.role == "input"]
        spans = given_spans([value.shape for value in given], batch)
        self._batch = {value.name: span for value, span in zip(given, spans, strict=True) if span is not None}
        self.operators: list[Operator] = []
        self.edges: list[Edge] = []
        self.weights: list[WeightSource] = []
        self.approximations: list[tuple[str, str]] = []
        self.scopes: dict[str, str] = {}
        self.nodes: dict[str, str] = {}
        self.constants: dict[tuple[str, str], Use] = {}
        self.own_constants: dict[tuple[str, str], Use] = {}
        self.fed: dict[tuple[str, int], Use] = {}
        self._names = Names()
        self._suggested_names = suggested_names(trace)
        self.reads: dict[str, tuple[Use, ...]] = {}
        # Who writes a value, or a piece of it: (operator, output).
        self.made: dict[tuple[str, Piece | None], tuple[str, int]] = {}
        self._pieces = pieces_read(trace)
        self._weights = Weights(trace)
        self._reads = {use.value for node in trace.nodes for use in node.inputs}

    def add(self, node: Node) -> None:
        """Add the vertex of a node, and those that its reads need."""
        name = self._names.new(self._suggested_names[node.name])
        draft = with_epilogue(self.trace, node, LOWER[type(node.op)](self.trace, node, node.op, name))
        self.approximations += [(name, text) for text in draft.approximations]
        self.nodes[name] = node.name
        values = [v for v in node.outputs if v.is_float or v.name in self._reads] or list(node.outputs)
        self._place(draft, tuple(values), node.origin.scope, node)

    def _place(self, draft: LoweredOperator, values: tuple[Value, ...], scope: str, node: Node | None = None) -> None:
        """Add a vertex, and before it those that lay out or cut what it reads; values: what it writes, in order."""
        name = draft.operator.name
        self.scopes[name] = scope
        operator, sources = self._fitted(draft, scope)
        operator = self._as_read(operator, sources)
        self.reads[name] = tuple(sources)
        writes = [
            write
            if order is None
            else replace(
                write, shape=tuple(write.shape[j] for j in order), index_map=tuple(write.index_map[j] for j in order)
            )
            for write, order in zip_longest(operator.writes, draft.orders[: len(operator.writes)])
        ]
        for i, value in enumerate(values[: len(writes)]):
            self.made[value.name, None] = name, i
            for piece in self._pieces.get(value.name, ()) if writes[i].shape == value.shape else ():
                part = _part(writes[i], piece, operator)
                if part is not None:
                    self.made[value.name, piece] = name, len(writes)
                    writes.append(part)
        reads: list[Read] = []
        for i, (own, use) in enumerate(zip(draft.sources, sources, strict=True)):
            found = self._producer(use, scope)
            reads.append(Read(use=own, is_laid_out=own != use, is_given=found is None))
            if found is not None:
                producer, output = found
                self.edges.append(Edge(producer=producer, output=output, consumer=name, input=i))
            elif operator.reads[i].role is not Role.PARAMETER:
                self.fed[name, i] = Use(value=use.value, piece=use.piece if use.seen_as is None else None)
        if operator.body and operator.dims != draft.operator.dims and any(step.dims for step in operator.body.steps):
            operator = replace(operator, body=Body(problem="what it reads is seen in other dims than its own"))
        operator = replace(operator, writes=tuple(writes))
        if node is None:
            operator = with_moved(self.trace, operator, reads)
        else:
            of = Lowering(
                trace=self.trace, node=node, reads=reads, written=[value.name for value in values], made=self.made
            )
            operator, constants, of_own = with_body(operator, of)
            operator = with_routes(operator)
            self.constants |= {(name, constant): source for constant, source in constants.items()}
            self.own_constants |= {(name, constant): source for constant, source in of_own.items()}
        self.operators.append(operator)

    def _fitted(self, draft: LoweredOperator, scope: str) -> tuple[Operator, list[Use]]:
        """Return the operator with its reads as their tensors lie, and its sources.

        What cannot be read as it lies, by itself or besides the reads before it, is laid out by a vertex of its own.
        """
        sources = list(draft.sources)
        views = [None if use.seen_as is not None else use.view for use in sources]
        for i, (use, view) in enumerate(zip(sources, views, strict=True)):
            if draft.operator.kind in ("concat", "padded") and view is not None and view.repeats:
                # What moves data alone takes each element to one place.
                sources[i], views[i] = self._laid_out(use, view, draft.operator.name, scope), None
        operator = fitted(draft.operator, views)
        for i, (use, view) in enumerate(zip(sources, views, strict=True)):
            if operator is not None:
                break
            if view is None or view.is_reshape:
                continue
            if fitted(draft.operator, [v if j <= i else None for j, v in enumerate(views)]) is None:
                sources[i], views[i] = self._laid_out(use, view, draft.operator.name, scope), None
                operator = fitted(draft.operator, views)
        assert operator is not None, "an operator fits its own shapes"
        return operator, sources

    def _laid_out(self, use: Use, view: View, reader: str, scope: str) -> Use:
        """Add the vertex that lays a tensor out as a view has it; return the use of what it writes."""
        name = self._names.new(f"{reader}/layout")
        value = Value(name=f"{name}:0", shape=view.shape, dtype=self.trace.values[use.value].dtype)
        self._place(draft_of_view(use, view, name), (value,), scope)
        return Use(value=value.name)

    def _producer(self, use: Use, scope: str) -> tuple[str, int] | None:
        """Return who writes what a use reads; None for a leaf."""
        # A tensor of which nothing is told but that it is read: whole.
        key = (use.value, use.piece if use.seen_as is None else None)
        if key in self.made:
            return self.made[key]
        if (use.value, None) not in self.made:
            return None
        # A piece that its producer cannot write as such is taken out by a vertex of its own.
        assert use.piece is not None
        value = self.trace.values[use.value]
        name = self._names.new(f"{self.made[use.value, None][0]}/piece")
        shape = piece_shape(value.shape, use.piece)
        starts = tuple(use.piece.start if i == use.piece.dim else 0 for i in range(len(shape)))
        op = ops.Slice(starts=starts, steps=(1,) * len(shape))
        node = Node(
            name=name,
            op=op,
            inputs=(Use(value=use.value),),
            outputs=(replace(value, name=name, shape=shape),),
            origin=self.trace.producer[use.value].origin,
        )
        self._place(lower_slice(self.trace, node, op, name), (), scope)
        self.made[key] = name, 0
        return name, 0

    def _as_read(self, operator: Operator, sources: list[Use]) -> Operator:
        """Return the operator with the role of every read, weights shared where they are."""
        reads = []
        for access, use in zip(operator.reads, sources, strict=True):
            if self.trace.is_parameter(use):
                weight, source = self._weights.read(access, use, operator.name)
                if self._weights.is_held_whole(use) and weight.size > 1:
                    self.approximations.append((operator.name, _HELD_WHOLE))
                self.weights.append(source)
                reads.append(weight)
                continue
            value = self.trace.values.get(use.value)
            is_float = value is None or value.is_float
            if use.seen_as is not None and value is not None:
                access = replace(access, shape=value.shape, index_map=(None,) * len(value.shape), partial_over=None)
            span = self._batch_of(use)
            role = Role.ACTIVATION if is_float else Role.INDEX
            reads.append(replace(access, role=role, batch=span and span[:2]))
        return replace(operator, reads=tuple(reads))

    def _batch_of(self, use: Use) -> Span | None:
        """Return where the batch lies in data as a use reads them: a tensor in its own order, or a piece of it."""
        span, piece = self._batch.get(use.value), use.piece
        if span is None or use.seen_as is not None:
            return None
        if piece is None:
            return span
        shape = self.trace.values[use.value].shape
        blocks, examples, _ = span
        outside = prod(shape[: piece.dim])
        if outside >= blocks * examples:
            return span
        return Span(blocks // shape[piece.dim] * piece.size, examples) if outside * shape[piece.dim] <= blocks else None


_HELD_WHOLE = "a weight is read in part, or as something computed of it: every device holds all of it"


def _part(write: Access, piece: Piece, operator: Operator) -> Access | None:
    """Return the write of a piece; None where a dim of the tensor is more than one iteration dim."""
    axis = write.index_map[piece.dim]
    if not isinstance(axis, str) or operator.extents[axis] != write.shape[piece.dim]:
        return None
    part = SliceOf(dim=axis, offset=piece.start, extent=piece.size)
    shape = piece_shape(write.shape, piece)
    axes = tuple(part if i == piece.dim else old for i, old in enumerate(write.index_map))
    return replace(write, tensor=f"{write.tensor}[{piece.start}]", shape=shape, index_map=axes)


def joined(operators: Sequence[Operator], edges: Sequence[Edge]) -> tuple[list[Operator], list[Edge]]:
    """Return operators and edges with a vertex "outputs" that reads one element of every part, where there are several.

    That element is the same on every device: it costs nothing, whatever the strategy, so that the optimum of the
    whole is the sum of those of the parts.
    """
    parts = _connected_parts(operators, edges)
    if len(parts) == 1:
        return list(operators), list(edges)
    names = {operator.name for operator in operators}
    name = next(wish for i in range(len(names) + 1) if (wish := f"outputs_{i + 1}" if i else "outputs") not in names)
    last = {part[-1] for part in parts}
    token = Access(tensor="token", shape=(1,), index_map=(None,), partial_over=())
    told = [replace(op, writes=(*op.writes, token)) if i in last else op for i, op in enumerate(operators)]
    sources = [operators[i] for i in sorted(last)]
    reads = tuple(replace(token, tensor=f"x{i}") for i in range(len(sources)))
    body = Body(steps=(Step(result="t1", function="copy", operands=("x0",)),))
    end = Operator(name=name, kind="outputs", dims=(Dim("i", 1),), reads=reads, writes=(token,), body=body)
    more = [
        Edge(producer=source.name, output=len(source.writes), consumer=name, input=i)
        for i, source in enumerate(sources)
    ]
    return [*told, end], [*edges, *more]


def _connected_parts(operators: Sequence[Operator], edges: Sequence[Edge]) -> list[list[int]]:
    """Return the positions of the operators of each part, in order."""
    index = {operator.name: i for i, operator in enumerate(operators)}
    return connected(index.values(), ((index[edge.producer], index[edge.consumer]) for edge in edges))
