"""`lower`: convert a trace after its passes to a graph.

This names the vertices, adds the work that was folded into them, fits their reads to the layouts of the tensors behind
views, builds the edges, and records the source of each weight.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice, pairwise, zip_longest
from math import prod

from pase.common.containers import connected
from pase.errors import ModelError
from pase.graph import (
    Access,
    AllReduce,
    AllToAll,
    Dim,
    Edge,
    Exchange,
    Graph,
    Operator,
    Relayout,
    Role,
    Scalar,
    SliceOf,
    Window,
    Work,
    verify,
)
from pase.graph.batch import Span, given_spans
from pase.graph.body import Body, Step
from pase.graph.operator import EPILOGUE, SCANNED, DimIndex, access_dims, axis_dims
from pase.importers.ir import ops
from pase.importers.ir.trace import Folded, Leaf, Names, Node, Piece, Trace, Use, Value, piece_shape
from pase.importers.ir.views import View
from pase.importers.lower.bodies import Lowering, Read, with_body, with_moved
from pase.importers.lower.vertices import (
    LOWER,
    LoweredOperator,
    draft_of_view,
    functions_text,
    lower_slice,
    with_routes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Source of a vertex's weight: a tensor of the source, optionally sliced or reshaped.

    The elements, in row-major order of the read, are those of the weight in its own order.
    """

    layer: str
    tensor: str
    source: str
    piece: Piece | None = None


class Weights:
    """How often each weight of a trace is read, and in which pieces."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
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
        """Return a read of a weight, and its source.

        A weight that is partly read, or read as a value computed from it, is stored completely, and its gradient is
        all-reduced over all devices, unless the slices make it up.
        """
        leaf = self._trace.leaf[use.value]
        if self.is_held_whole(use):
            over = access.partial_over
            # Slices that differ in dims of the declared slices leave partial sums, too.
            over = None if over is None else tuple(dict.fromkeys((*over, *sorted(access_dims(access)))))
            whole = leaf.value.shape
            access = replace(access, shape=whole, index_map=(None,) * len(whole), partial_over=over)
        key = self._key(leaf, use)
        piece = use.piece if self._is_part(use) else None
        source = WeightSource(layer=layer, tensor=access.tensor, source=leaf.value.name, piece=piece)
        shared, is_trained = key if self._readers[key] > 1 else "", use.value not in self._trace.frozen
        return replace(access, role=Role.PARAMETER, shared=shared, is_trained=is_trained), source

    def is_held_whole(self, use: Use) -> bool:
        """Return whether a weight is read in a way that does not determine its shards."""
        return use.seen_as is not None or (use.piece is not None and not self._is_part(use))

    def _is_part(self, use: Use) -> bool:
        """Whether a use is of one of the pieces that make a weight up."""
        return use.piece is not None and _storage(self._trace.leaf[use.value]) in self._tiled

    def _key(self, leaf: Leaf, use: Use) -> str:
        storage = _storage(leaf)
        if use.piece is None or not self._is_part(use):
            return storage
        return f"{storage}[{use.piece.dim}:{use.piece.start}:{use.piece.start + use.piece.size}]"

    def _is_tiled(self, uses: list[tuple[Leaf, Use]]) -> bool:
        """Whether the pieces in which a weight is read make it up, each element once, and are all that is read."""
        pieces = {use.piece for _, use in uses if use.piece is not None}
        if any(use.piece is None for _, use in uses) or len({piece.dim for piece in pieces}) != 1:
            return False
        first, *_ = ordered = sorted(pieces, key=lambda piece: piece.start)
        *starts, end = accumulate((piece.size for piece in ordered), initial=0)
        is_whole = all(leaf.value.shape[first.dim] == end for leaf, _ in uses)
        return is_whole and [piece.start for piece in ordered] == starts


def _storage(leaf: Leaf) -> str:
    return leaf.storage or leaf.value.name


# -- vertices and edges


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """Result of lowering.

    Attributes:
        graph: Graph of the model.
        weights: Sources of the weights' values.
        approximations: (layer, approximation in its costs).
        scopes: Module or layer of the source, for each layer.
        nodes: Name of the lowered trace's node, for each layer that is one.
        constants: Sources of (layer, constant of its body).
        own_constants: Those of the bodies for the source's own framework.
        fed: For each (layer, read) that is neither computed by a layer nor a weight, the use of the source that it
            reads; the elements, row-major, are those of the read.
        reads: Uses of that trace by each layer.
        written: (layer, output) as uses of that trace.
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
    """Return the graph of a trace; ModelError where nothing remains to compute.

    Components that share no tensor (two towers whose results are both returned) are joined by a vertex "outputs".
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
        untrained=trace.untrained,
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
    """Return the vertices; those of an unrolled loop record their place in its body, equal for all iterations."""
    turns = {node.name: node.origin.turn for node in builder.trace.nodes}
    loops: dict[int, dict[int, list[Operator]]] = {}
    for operator in builder.operators:
        turn = turns.get(builder.nodes.get(operator.name, ""))
        if turn is not None:
            loops.setdefault(turn[0], {}).setdefault(turn[1], []).append(operator)
    places: dict[str, str] = {}
    for number, bodies in loops.items():
        # If the body of an iteration was transformed differently, its places do not correspond to those of the others.
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
        # Producers of values, or of slices of them: (operator, output).
        self.made: dict[tuple[str, Piece | None], tuple[str, int]] = {}
        # The pieces in which each value is read, in that order.
        self._pieces: dict[str, dict[Piece, None]] = {}
        for use in (use for node in trace.nodes for use in node.inputs):
            if use.piece is not None:
                self._pieces.setdefault(use.value, {})[use.piece] = None
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
        """Add a vertex, preceded by vertices that lay out or slice its inputs; values: its outputs, in order."""
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
        """Return the operator with its reads fitted to their tensors' layouts, and its sources.

        Reads that cannot be fitted, alone or together with earlier reads, are laid out by separate vertices.
        """
        sources = list(draft.sources)
        views = [None if use.seen_as is not None else use.view for use in sources]
        for i, (use, view) in enumerate(zip(sources, views, strict=True)):
            if draft.operator.kind in ("concat", "padded") and view is not None and view.repeats:
                # Data movement puts each element in one place.
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
        """Add the vertex that copies a tensor into the layout of a view; return the use of its output."""
        name = self._names.new(f"{reader}/layout")
        value = Value(name=f"{name}:0", shape=view.shape, dtype=self.trace.values[use.value].dtype)
        self._place(draft_of_view(use, view, name), (value,), scope)
        return Use(value=value.name)

    def _producer(self, use: Use, scope: str) -> tuple[str, int] | None:
        """Return the producer of a use; None for a leaf."""
        # A tensor that is read in an opaque shape: all of it.
        key = (use.value, use.piece if use.seen_as is None else None)
        if key in self.made:
            return self.made[key]
        if (use.value, None) not in self.made:
            return None
        # A slice that its producer cannot write as such is taken by a separate vertex.
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
        """Return the operator with the role of every read, and with shared weights marked."""
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
        """Return the batch of data in terms of a use: a tensor in its own order, or a slice of it."""
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
    """Return operators and edges; several components are joined by a vertex "outputs" that reads one element of each.

    This element is the same on every device and costs nothing under any strategy, so the optimum of the whole is the
    sum of those of the components.
    """
    index = {operator.name: i for i, operator in enumerate(operators)}
    parts = connected(index.values(), ((index[edge.producer], index[edge.consumer]) for edge in edges))
    if len(parts) == 1:
        return list(operators), list(edges)
    name = next(wish for i in range(len(index) + 1) if (wish := f"outputs_{i + 1}" if i else "outputs") not in index)
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


# -- names of vertices: the module or layer of the source, and its function there if there are several


def suggested_names(trace: Trace) -> dict[str, str]:
    """Return preferred names for the vertex of each node, by the node's name; not unique yet.

    A module with one vertex gives it its name. Of several vertices in a module, those with weights of their own get it.
    """
    count = Counter(node.origin.scope for node in trace.nodes)
    found = {}
    for node in trace.nodes:
        scope = node.origin.scope
        if not scope:
            found[node.name] = node.name
        elif count[scope] == 1 or _has_own_weights(trace, node):
            found[node.name] = scope
        else:
            found[node.name] = f"{scope}/{_does(node)}"
    return found


def _has_own_weights(trace: Trace, node: Node) -> bool:
    return any(trace.is_parameter(use) and use.value.startswith(node.origin.scope) for use in node.inputs)


def _does(node: Node) -> str:
    """Return a word for the function of a node."""
    op = node.op
    if isinstance(op, ops.Pointwise):
        return op.functions[-1] if op.functions else "identity"
    if isinstance(op, ops.Reduce):
        return op.function
    if isinstance(op, ops.Pool):
        return f"{op.function}_pool"
    if isinstance(op, ops.Normalise):
        return op.kind if op.kind == "statistics" else f"{op.kind}_norm"
    return _WORDS.get(type(op), node.name)


_WORDS: dict[type, str] = {
    ops.Attention: "attention",
    ops.Concat: "concat",
    ops.Contract: "product",
    ops.Convolve: "convolution",
    ops.Gather: "gather",
    ops.Lookup: "lookup",
    ops.Pad: "pad",
    ops.Recurrent: "recurrent",
    ops.Slice: "piece",
    ops.Softmax: "softmax",
}


# -- work folded into a node: FLOP, names of functions, weights, dims that must not be split


def with_epilogue(trace: Trace, node: Node, draft: LoweredOperator) -> LoweredOperator:
    """Return the draft with what was folded into it, and with weights that its kind does not tell of."""
    read = {use.value for use in draft.sources}
    others = [(i, use) for i, use in enumerate(node.inputs) if trace.is_parameter(use) and use.value not in read]
    if not node.folded and not node.epilogue and not node.whole and not others:
        return draft
    operator = draft.operator
    write = operator.writes[0]
    # The dims of the output, in the order of the trace.
    order = draft.orders[0] or range(len(write.index_map))
    written = [(write.shape[i], write.index_map[i]) for i in order]
    points = tuple(dict.fromkeys(dim for axis in write.index_map for dim in axis_dims(axis)))
    size, values = prod(operator.extents[dim] for dim in points), [use.value for use in draft.sources]
    work = (*operator.work, *(more for folded in node.folded for more in _work(points, size, folded, values)))
    reads, sources = list(operator.reads), list(draft.sources)
    for position, use in others:
        shape = trace.shape(use)
        axes = _aligned(shape, written)
        named = {dim for axis in axes for dim in axis_dims(axis)}
        summed = tuple(dim for dim in points if dim not in named)
        reads.append(
            Access(tensor=f"e{position}", shape=shape, index_map=axes, role=Role.PARAMETER, partial_over=summed)
        )
        sources.append(use)
    told = ((EPILOGUE, functions_text(node.epilogue)),) if node.epilogue else ()
    held = dict.fromkeys(dim for i, j in node.whole for dim in axis_dims(operator.reads[i].index_map[j]))
    operator = replace(
        operator,
        work=work,
        reads=tuple(reads),
        attributes=(*operator.attributes, *told),
        unsplittable=tuple(dict.fromkeys((*operator.unsplittable, *held))),
    )
    return replace(draft, operator=operator, sources=tuple(sources))


def _work(points: tuple[str, ...], size: int, folded: Folded, reads: Sequence[str]) -> tuple[Work, ...]:
    """Return the work of what was folded into an operator that reads these values."""
    own = tuple(i for i, value in enumerate(reads) if value == folded.argument)
    argument = own or tuple(range(len(reads)))
    # In the backward pass as many times as factors have a gradient; part of the work once more than the rest.
    times = int(folded.backward_flop // folded.flop) if folded.flop else 0
    more = folded.backward_flop - times * folded.flop
    works = (
        Work(dims=points, flop_per_point=(folded.flop - more) / size, inputs=(argument,) * times),
        Work(dims=points, flop_per_point=more / size, inputs=(argument,) * (times + 1)),
    )
    return tuple(work for work in works if work.flop_per_point)


def _aligned(shape: tuple[int, ...], written: list[tuple[int, DimIndex]]) -> tuple[DimIndex, ...]:
    """Return the axes of a tensor that is broadcast to an output; None for dims that differ."""
    if len(shape) > len(written):
        return (None,) * len(shape)
    last = written[len(written) - len(shape) :]
    return tuple(
        axis if isinstance(axis, str | tuple) and extent == full and extent > 1 else None
        for extent, (full, axis) in zip(shape, last, strict=True)
    )


# -- fitting a read to the tensor behind its view: the iteration dims are mapped to the dims of the producer's tensor
#
# A dim of the operator that the view merges from several places of the tensor (heads and channels, merged to one dim
# after a transpose) is refined into several iteration dims. If that is impossible the result is None, and the view
# remains a vertex that moves the data.


Pieces = Mapping[str, tuple[str, ...]]
"""Parts into which a dim is refined."""


def fitted(operator: Operator, views: Sequence[View | None]) -> Operator | None:
    """Return the operator with every viewed read in the shape of its view's base; None where that is impossible.

    views: [reads], each with the shape of the read.
    """
    cuts: dict[str, set[int]] = {}
    for access, view in zip(operator.reads, views, strict=True):
        if view is not None and not view.is_reshape:
            found = _cuts(access, view)
            if found is None:
                return None
            for dim, inner in found.items():
                cuts.setdefault(dim, set()).update(inner)
    refined = _refined(operator, cuts)
    if refined is None:
        return None
    operator = refined
    reads = []
    for access, view in zip(operator.reads, views, strict=True):
        new = access if view is None else _on_base(access, view, operator.extents)
        if new is None:
            return None
        reads.append(new)
    return replace(operator, reads=tuple(reads))


def _cuts(access: Access, view: View) -> dict[str, set[int]] | None:
    """Return where the dims of an operator must be divided: for each, the extents inside of the divisions."""
    runs = view.runs()
    found: dict[str, set[int]] = {}
    for dim, (axis, factors) in enumerate(zip(access.index_map, view.dims, strict=True)):
        starts = {own[0] for run_dim, own in runs if run_dim == dim}
        # A cut before each factor that begins a run or is broadcast, and after each that ends one.
        bounds: set[int] = set()
        for i, factor in enumerate(factors):
            begins = factor in starts and factor.base is not None
            is_apart = factor.base is None or (i > 0 and factors[i - 1].base is None)
            if i > 0 and (begins or is_apart):
                bounds.add(prod(f.extent for f in factors[i:]))
        if bounds and not isinstance(axis, str):
            return None
        if bounds and isinstance(axis, str):
            found[axis] = found.get(axis, set()) | bounds
    return found


def _refined(operator: Operator, cuts: Mapping[str, set[int]]) -> Operator | None:
    pieces: dict[str, tuple[str, ...]] = {}
    extents: dict[str, int] = {}
    for dim, bounds in cuts.items():
        whole = operator.extents[dim]
        chain = [whole, *sorted((b for b in bounds if 1 < b < whole), reverse=True), 1]
        if any(outer % inner for outer, inner in pairwise(chain)):
            return None
        if len(chain) == 2:
            continue
        free = (name for number in count(1) if (name := f"{dim}{number}") not in operator.extents)
        names = tuple(islice(free, len(chain) - 1))
        pieces[dim] = names
        extents |= {name: chain[i] // chain[i + 1] for i, name in enumerate(names)}
    if not pieces:
        return operator
    used: list[Sequence[DimIndex]] = [access.index_map for access in (*operator.reads, *operator.writes)]
    used += [work.dims for work in operator.work]
    if any(isinstance(a, Window | SliceOf) and not {*_named(a)}.isdisjoint(pieces) for axes in used for a in axes):
        return None

    def expanded(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(part for name in names for part in pieces.get(name, (name,)))

    def points(dims: Sequence[str | SliceOf]) -> tuple[str | SliceOf, ...]:
        return tuple(new for dim in dims for new in ((dim,) if isinstance(dim, SliceOf) else expanded([dim])))

    def axes(old: tuple[DimIndex, ...]) -> tuple[DimIndex, ...]:
        return tuple(_axis(axis, pieces) for axis in old)

    def access(old: Access) -> Access:
        over = None if old.partial_over is None else expanded(old.partial_over)
        return replace(old, index_map=axes(old.index_map), partial_over=over)

    def exchange(old: Exchange) -> Exchange | None:
        match old:
            case AllReduce() | AllToAll():
                return replace(old, index_map=axes(old.index_map), over=expanded(old.over))
            case Relayout():
                return replace(old, index_map=axes(old.index_map), read=axes(old.read))
            case _:
                return None

    exchanges = [exchange(old) for old in operator.exchanges]
    if any(new is None for new in exchanges):
        return None
    dims = tuple(
        Dim(part, extents.get(part, dim.extent)) for dim in operator.dims for part in pieces.get(dim.name, (dim.name,))
    )
    return replace(
        operator,
        dims=dims,
        reads=tuple(access(old) for old in operator.reads),
        writes=tuple(access(old) for old in operator.writes),
        work=tuple(replace(work, dims=points(work.dims)) for work in operator.work),
        unsplittable=expanded(operator.unsplittable),
        exchanges=tuple(new for new in exchanges if new is not None),
        intermediates=tuple(replace(old, index_map=axes(old.index_map)) for old in operator.intermediates),
    )


def _named(axis: Window | SliceOf) -> tuple[str, ...]:
    return (axis.out, axis.kernel) if isinstance(axis, Window) else (axis.dim,)


def _axis(axis: DimIndex, pieces: Pieces) -> DimIndex:
    match axis:
        case str():
            parts = pieces.get(axis, (axis,))
            return parts[0] if len(parts) == 1 else parts
        case tuple():
            return tuple(part for name in axis for part in pieces.get(name, (name,)))
        case _:
            return axis


def _on_base(access: Access, view: View, extents: Mapping[str, int]) -> Access | None:
    """Return a read in the shape of the tensor behind its view."""
    if view.is_reshape:
        return access
    shape: list[int] = []
    axes: list[DimIndex] = []
    done: dict[int, int] = {}
    for dim, factors in view.runs():
        size = prod(factor.extent for factor in factors)
        axis = access.index_map[dim]
        match axis:
            case None:
                found: DimIndex = None
            case Window() | SliceOf():
                if size != access.shape[dim]:
                    return None
                found = axis
            case _:
                names = (axis,) if isinstance(axis, str) else axis
                own = _covered(names, extents, view.dims[dim], factors)
                if own is None:
                    return None
                found = own[0] if len(own) == 1 else own
        shape.append(size)
        axes.append(found)
        done[dim] = done.get(dim, 0) + 1
    for dim, factors in enumerate(view.dims):
        # A factor of extent 1 may be anywhere.
        if not factors and isinstance(access.index_map[dim], str | Window):
            shape.append(1)
            axes.append(access.index_map[dim])
    return replace(access, shape=tuple(shape), index_map=tuple(axes))


def _covered(
    names: tuple[str, ...], extents: Mapping[str, int], every: Sequence[object], factors: Sequence[object]
) -> tuple[str, ...] | None:
    """Return the dims that a run of a view's factors covers; None where their boundaries do not align."""
    start = every.index(factors[0])
    before = prod(factor.extent for factor in every[:start])  # type: ignore[attr-defined]
    size = prod(factor.extent for factor in factors)  # type: ignore[attr-defined]
    outer, found, at = 1, list[str](), 1
    for name in names:
        if outer == before and at < size:
            found.append(name)
            at *= extents[name]
        elif outer < before:
            outer *= extents[name]
    return tuple(found) if at == size and outer == before else None
