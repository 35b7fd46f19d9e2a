"""Bodies: for each vertex, what the source computes between what it reads and what it writes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from pase.graph import Graph, Operator, Role, SliceOf, Window
from pase.graph.body import Body, ModelInput, ModelOutput, Option, is_before_layout
from pase.importers.execution.sheet import (
    Atom,
    Axes,
    BodyBuilder,
    NoBodyError,
    TensorRef,
    atoms_of,
    behind,
    flat,
    grouped,
    names,
    seen,
)
from pase.importers.execution.source import Source
from pase.importers.execution.steps import COMPUTE, moved_within
from pase.importers.ir import (
    Broadcast,
    Concat,
    Convolve,
    Gather,
    Generic,
    Identity,
    Lookup,
    Node,
    Op,
    Pad,
    Pool,
    Recurrent,
    Reshape,
    Slice,
    Trace,
    Transpose,
    Use,
    View,
)
from pase.importers.lower import Lowered, Read

LAID = MappingProxyType({Convolve: "convolve", Pool: "pool", Lookup: "embedding", Gather: "pick"})
"""Operators that read their tensors as their kind has them: steps of their own."""

_TENSORS = MappingProxyType(
    {"convolve": ("x", "w"), "pool": ("x",), "embedding": ("table", "x"), "pick": ("x", "places")}
)
"""The reads that are their operands."""

MOVED = MappingProxyType(
    {Concat: "concat", Pad: "padded", Reshape: "copy", Transpose: "copy", Broadcast: "copy", Slice: "piece"}
)
"""Operators that move data alone."""

_MOVING = ("concat", "opaque", "padded", "piece")
"""Kinds of vertices that are such an operator: their data are moved between devices."""

_KEEPS_ZERO = frozenset(
    {"relu", "relu6", "gelu", "gelu_tanh", "silu", "tanh", "hard_swish", "leaky_relu", "abs", "multiply", "negate",
     "mish", "softsign", "elu", "selu", "identity", "square", "sqrt", "sign"}
)  # fmt: skip
"""Functions of which the padding of a window may be an argument: zero stays zero."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """graph: its operators with bodies. constants: (layer, constant), what it is of the source before its passes."""

    graph: Graph
    constants: Mapping[tuple[str, str], Use]


def with_bodies(traces: Sequence[Trace], lowered: Lowered) -> Execution:
    """Return the graph of a model whose operators say how their forward pass is computed, or why they cannot."""
    source = Source.of(traces)
    operators: list[Operator] = []
    constants: dict[tuple[str, str], Use] = {}
    for operator in lowered.graph.operators:
        sheet = BodyBuilder(
            taken={access.tensor for access in operator.reads} | set(operator.extents),
            fixed={name: operator.extents[name] for name in operator.unsplittable},
        )
        try:
            body = _body(source, lowered, operator, sheet)
        except NoBodyError as error:
            node = lowered.nodes.get(operator.name, "")
            where = source.described(node)
            outputs = tuple(ModelOutput(name=n, dims=(), shape=s) for n, s in source.returned(node))
            body = Body(problem=f"{where}{error}", outputs=outputs)
        body = replace(body, inputs=tuple(_model_inputs(source, lowered, operator)))
        constants |= {(operator.name, name): use for name, use in sheet.sources.items()}
        operators.append(replace(operator, body=body))
    return Execution(graph=replace(lowered.graph, operators=tuple(operators)), constants=constants)


def _model_inputs(source: Source, lowered: Lowered, operator: Operator) -> Iterator[ModelInput]:
    """Yield the inputs of the model that an operator reads."""
    for i, (access, read) in enumerate(zip(operator.reads, lowered.reads[operator.name], strict=True)):
        if access.role is Role.PARAMETER or (operator.name, i) in lowered.graph.incoming:
            continue
        value = source.final.values.get(read.use.value)
        if value is not None and read.use.piece is None:
            name, shape = source.model_input(value.name)
            yield ModelInput(read=i, name=name, shape=shape)


def _body(source: Source, lowered: Lowered, operator: Operator, sheet: BodyBuilder) -> Body:
    name = lowered.nodes.get(operator.name)
    if name is None:
        function = "piece" if operator.kind in ("piece", "opaque") else "copy"
        sheet.step(function, [operator.reads[0].tensor])
        return Body(steps=tuple(sheet.steps))
    node = source.node(name)
    value = _Vertex(source, lowered, operator, node, sheet).computed()
    outputs = tuple(_returned(source, sheet, node, value))
    return Body(
        steps=tuple(sheet.steps),
        constants=tuple(sheet.constants),
        outputs=outputs,
        inner=tuple(sheet.inner.values()),
        untrained=sheet.untrained,
    )


def _returned(source: Source, sheet: BodyBuilder, node: Node, value: TensorRef) -> Iterator[ModelOutput]:
    """Yield the outputs of the model that a node's first output is, seen as they are returned."""
    for name, use, shape in source.outputs(node):
        num_steps = len(sheet.steps)
        known = seen(sheet, value, use)
        if len(sheet.steps) > num_steps:
            raise NoBodyError("what the model returns is a view that cuts a dim")
        assert known.axes is not None
        yield ModelOutput(name=name, dims=tuple(atom.name for atom in flat(known.axes)), shape=shape)


class _Vertex:
    """One vertex while its body is written."""

    def __init__(self, source: Source, lowered: Lowered, operator: Operator, node: Node, sheet: BodyBuilder) -> None:
        self._source = source
        self._operator = operator
        self._node = node
        self._sheet = sheet
        self._reads = lowered.reads[operator.name]
        self._known: dict[str, TensorRef] = {}
        self._inside: Sequence[Node] = ()
        # Of weights, before they stood for what is computed of them.
        self._computed: dict[str, TensorRef] = {}
        # What stands before the passes for what the node reads: the values that its producers hold in the end.
        self._entries = {source.held(use.value): use.value for use in node.inputs if source.is_computed(use.value)}

    def computed(self) -> TensorRef:
        """Write the steps; return what the vertex writes."""
        inside = self._source.between(self._source.held(self._node.outputs[0].name), set(self._entries))
        self._inside = inside
        if not inside:
            what = type(self._node.op).__name__.lower()
            raise NoBodyError(
                f"several operations of the source were recognised as {what}, and how they compute it cannot be "
                "followed yet"
            )
        for node in inside:
            name = node.outputs[0].name
            self._known[name] = self._dropped(name, self._step(node))
        return self._laid_as_written(self._known[inside[-1].outputs[0].name])

    def _dropped(self, value: str, known: TensorRef) -> TensorRef:
        """Return a tensor of which points are dropped while the network is trained, where the source does so."""
        rate = self._source.rates.get(value)
        if rate is None:
            return known
        sheet = self._sheet
        atoms = () if known.axes is None else flat(known.axes)
        if any(step.function == "dropout" for step in sheet.steps):
            sheet.untrained = sheet.untrained or "points are dropped twice in it"
        elif not atoms or not all(atom.name for atom in atoms):
            sheet.untrained = sheet.untrained or "points are dropped of a tensor whose dims are not told"
        elif rate < 0:
            sheet.untrained = sheet.untrained or "points of a tensor are dropped for some of those that read it alone"
        else:
            return replace(known, operand=sheet.step("dropout", [known.operand], names(atoms), rate=rate))
        return known

    def _laid_as_written(self, known: TensorRef) -> TensorRef:
        """Return what is written with the dims of the iteration space in place of inner ones."""
        if known.axes is None or not any(self._sheet.is_inner((atom,)) for atom in flat(known.axes)):
            return known
        atoms = atoms_of(self._operator, self._operator.writes[0])
        target = None if atoms is None else grouped(atoms, known.shape)
        if target is None:
            raise NoBodyError("what it writes is not told by its iteration space")
        return self._sheet.laid(known, target)

    def _step(self, node: Node) -> TensorRef:
        kind: type[Op] = type(node.op)
        if kind in COMPUTE:
            inputs = [self._input(node, i) for i in range(self._source.num_inputs(node))]
            return COMPUTE[kind](self._sheet, node, inputs)
        if kind in LAID:
            return self._laid(node)
        if kind in MOVED and self._operator.kind in _MOVING and not any(u.value in self._known for u in node.inputs):
            return self._moved(node)
        if kind in MOVED:
            inputs = [self._input(node, i) for i in range(self._source.num_inputs(node))]
            return moved_within(self._sheet, node, inputs)
        if isinstance(node.op, Generic):
            return self._own(node)
        assert isinstance(node.op, Recurrent), f"{kind} is not computed"
        return self._recurrent(node, node.op)

    def _own(self, node: Node) -> TensorRef:
        """The steps of an operator of a user's own."""
        own = self._operator.body
        if own is None or own.problem or not own.steps:
            raise NoBodyError((own and own.problem) or "nothing is known of what it computes")
        results: dict[str, str] = {}
        for step in own.steps:
            operands = [results.get(o, o) if isinstance(o, str) else o for o in step.operands]
            results[step.result] = self._sheet.step(step.function, operands, step.dims, **dict(step.options))
        return self._result(node, results[own.steps[-1].result])

    def _laid(self, node: Node) -> TensorRef:
        """A step of the operator's own kind, on its reads as they are laid out."""
        tensors = _TENSORS[LAID[type(node.op)]]
        known = {access.tensor for access in self._operator.reads}
        if not set(tensors) <= known:
            raise NoBodyError("it is split along its batch alone, and cannot be written yet")
        operands: list[str | float] = [*tensors]
        place = tensors.index("x")
        before = self._known.get(node.inputs[0].value)
        if before is not None:
            is_alone = is_before_layout(self._sheet.steps, "x")
            if LAID[type(node.op)] != "convolve" and self._is_padded() and not is_alone:
                raise NoBodyError("a function is applied to what is pooled with padding")
            if self._is_padded() and not is_alone and any(s.function not in _KEEPS_ZERO for s in self._sheet.steps):
                raise NoBodyError("a function that does not keep zeros is applied to what is padded")
            operands[place] = before.operand
        options: dict[str, Option] = {}
        if isinstance(node.op, Pool):
            options = {"reduction": node.op.function, "count_padding": node.op.counts_padding}
        if isinstance(node.op, Lookup) and node.op.frozen >= 0:
            options = {"frozen": node.op.frozen}
        if isinstance(node.op, Gather) and "k" in self._operator.extents:
            raise NoBodyError("several elements of each row cannot be written yet")
        dims: tuple[str, ...] = (self._operator.attribute("along", ""),) if isinstance(node.op, Gather) else ()
        function = LAID[type(node.op)]
        if isinstance(node.op, Convolve) and node.op.is_transposed:
            function, dims, options = "convolve_transposed", self._operator.unsplittable, self._transposed(node.op)
        made = self._result(node, self._sheet.step(function, operands, dims, **options))
        if isinstance(node.op, Convolve) and node.op.has_bias:
            bias = self._input(node, 2)
            assert made.axes is not None
            if bias.source is not None:
                channel = (made.axes[node.op.channels],)
                bias = self._sheet.constant(bias, channel)
            made = replace(made, operand=self._sheet.step("add", [made.operand, bias.operand]))
        return made

    def _transposed(self, op: Convolve) -> dict[str, Option]:
        """Return the options of a transposed convolution, where its result's shape follows from them."""
        if op.is_reversed:
            raise NoBodyError("the filters of a transposed convolution are read backwards")
        extents = self._operator.extents
        for i, (stride, dilation, pads) in enumerate(zip(op.stride, op.dilation, op.pads, strict=True)):
            reached = (extents[f"i{i}"] - 1) * stride + (extents[f"k{i}"] - 1) * dilation + 1
            # What a framework adds after the last point, which no window reaches, is less than a step.
            if not 0 <= extents[f"o{i}"] + sum(pads) - reached < max(stride, dilation) or min(pads) < 0:
                raise NoBodyError("the padding of a transposed convolution is not told")
        before = tuple(first for first, _ in op.pads)
        return {"strides": tuple(op.stride), "dilations": tuple(op.dilation), "pads": before}

    def _recurrent(self, node: Node, op: Recurrent) -> TensorRef:
        """Recurrent layers over a sequence, their first states zero."""
        if not op.equations:
            raise NoBodyError("how this recurrent layer computes its gates is not told")
        if op.rate and op.layers > 1:
            self._sheet.untrained = self._sheet.untrained or "points are dropped between its layers"
        x, *rest = range(self._source.num_inputs(node))
        weights = [i for i in rest if self._source.is_weight(node.inputs[i].value)]
        if not all(self._source.is_zero(node.inputs[i].value) for i in rest if i not in weights):
            raise NoBodyError("a recurrent layer is given its first states, where zeros alone can be written")
        num_cells = op.layers * (1 + op.is_bidirectional)
        of_gates = [access for access in self._operator.parameters if ("g", "e") in access.index_map]
        if len(weights) not in (2 * num_cells, 4 * num_cells) or len(of_gates) != len(weights):
            raise NoBodyError("a recurrent layer has weights besides those of its gates (a projection, first states)")
        first = node.inputs[x].value
        read = [self._entries.get(first, ""), *(node.inputs[i].value for i in weights)]
        operands = [self._as_it_lies(value) for value in read]
        options: dict[str, Option] = {"cell": op.equations, "layers": op.layers}
        return self._result(node, self._sheet.step("recurrent", operands, ("b", "s", "r", "g", "e"), **options))

    def _as_it_lies(self, value: str) -> str:
        """Return a tensor that is read as the operator has it; dims that no iteration dim indexes are inner ones."""
        found = [i for i, read in enumerate(self._reads) if read.use.value == value]
        if len(found) != 1 or self._reads[found[0]].use.piece is not None:
            raise NoBodyError("what a recurrent layer reads is computed within it")
        access = self._operator.reads[found[0]]
        for i, (axis, extent) in enumerate(zip(access.index_map, access.shape, strict=True)):
            if axis is None and extent > 1:
                self._sheet.dim(extent, access.tensor, i)
        return access.tensor

    def _is_padded(self) -> bool:
        for access in self._operator.reads:
            for axis, extent in zip(access.index_map, access.shape, strict=True):
                if isinstance(axis, Window):
                    outs, kernel = self._operator.extents[axis.out], self._operator.extents[axis.kernel]
                    last = (outs - 1) * axis.stride + (kernel - 1) * axis.dilation - axis.pad
                    if axis.pad or last >= extent:
                        return True
        return False

    def _moved(self, node: Node) -> TensorRef:
        """What moves data alone, straight from what is read."""
        options = {"along": self._operator.attribute("along", "")} if isinstance(node.op, Concat) else {}
        tensors = [access.tensor for access in self._operator.reads]
        if isinstance(node.op, Concat):
            tensors = [self._end(node, i) for i in range(len(node.inputs))]
        elif any(access.role is Role.PARAMETER for access in self._operator.reads):
            raise NoBodyError("a weight is moved by a layer of its own")
        return self._result(node, self._sheet.step(MOVED[type(node.op)], tensors, **options))

    def _end(self, node: Node, position: int) -> str:
        """Return one of the tensors that are joined end to end: a read as it is, or what is laid out for that."""
        use = node.inputs[position]
        if use.value in self._entries:
            reads = [access for access in self._operator.reads if access.role is not Role.PARAMETER]
            before = [other for other in node.inputs[:position] if other.value in self._entries]
            return reads[len(before)].tensor
        known = self._input(node, position)
        write = self._operator.writes[0]
        along = self._sheet.dim(known.shape[node.op.dim])  # type: ignore[union-attr]
        axes = [Atom(str(axis), extent) for axis, extent in zip(write.index_map, write.shape, strict=True)]
        if isinstance(known.operand, float) or any(not isinstance(axis, str) for axis in write.index_map):
            raise NoBodyError("numbers are joined to it")
        axes[node.op.dim] = along  # type: ignore[union-attr]
        target = tuple((atom,) if atom.extent > 1 else () for atom in axes)
        known = self._sheet.constant(known, target) if known.source is not None else self._sheet.laid(known, target)
        return self._sheet.step("repeat", [known.operand], [atom.name for atom in axes])

    def _result(self, node: Node, name: str) -> TensorRef:
        """What a step gives that has the dims of the operator's first output."""
        write = self._operator.writes[0]
        shape = node.outputs[0].shape
        if any(isinstance(axis, SliceOf) for axis in write.index_map):
            # A piece is a dim of its own.
            axes: Axes | None = tuple(
                () if extent == 1 else (Atom(axis.dim if isinstance(axis, SliceOf) else str(axis), extent),)
                for axis, extent in zip(write.index_map, write.shape, strict=True)
            )
        else:
            atoms = atoms_of(self._operator, write)
            axes = None if atoms is None else grouped(atoms, shape)
        if axes is None:
            raise NoBodyError("what it writes is not told by its iteration space")
        return TensorRef(operand=name, shape=shape, axes=axes)

    def _input(self, node: Node, position: int) -> TensorRef:
        use = node.inputs[position]
        if use.value in self._known:
            return seen(self._sheet, self._known[use.value], use)
        if use.value in self._entries:
            return self._entry(use, self._read_at(node, position))
        if self._source.is_weight(use.value):
            return self._weight(node, position)
        known = self._source.constant(node, position)
        known = known or TensorRef(operand="", shape=self._source.shape(use), source=use)
        if known.source is not None and self._source.is_of_input(known.source.value):
            number = self._source.number(known.source.value)
            if number is not None:
                return TensorRef(operand=number, shape=(1,), axes=((),))
            raise NoBodyError("it is computed with what depends on an input of the model that no layer reads")
        return replace(known, is_truth=self._source.is_truth(use.value))

    def _read_at(self, node: Node, position: int) -> int | None:
        """Return which read an input is where one tensor is read as several operands; None where its name tells it."""
        value = node.inputs[position].value
        reads = [i for i, read in enumerate(self._reads) if read.use.value == self._entries[value]]
        uses = [(n.name, i) for n in self._inside for i, use in enumerate(n.inputs) if use.value == value]
        return reads[uses.index((node.name, position))] if len(reads) == len(uses) > 1 else None

    def _entry(self, use: Use, read: int | None = None) -> TensorRef:
        """A tensor that an earlier vertex makes; read: where it is told."""
        name = self._entries[use.value]
        if read is None or self._reads[read].use.piece != use.piece:
            last = self._source.final_use(self._node, name)
            read = self._read(name, use.piece, None if last is None else last.view)
        if read is None and use.piece is not None:
            return seen(self._sheet, self._entry(Use(value=use.value)), use)
        if read is None:
            raise NoBodyError("a part of a tensor is read in a way that is not told")
        view = self._source.view_of_held(use.value, name) if use.piece is None else None
        whole = use.view if view is None else view if use.view is None else use.view.of(view)
        if whole is not None and whole == self._reads[read].use.view:
            return self._as_it_is_read(read, whole)
        known = self._as_made(read)
        if view is not None:
            known = self._sheet.seen(known, view)
        return self._viewed(known, use)

    def _as_it_is_read(self, read: int, view: View) -> TensorRef:
        """A tensor that is read in the very shape of the operator's access, or of its producer's dims."""
        atoms = atoms_of(self._operator, self._operator.reads[read])
        if atoms is None:
            raise NoBodyError("a tensor is read whole, in a way that is not told")
        known = TensorRef(operand=self._operator.reads[read].tensor, shape=view.shape, axes=(atoms,))
        if _is_in_view_order(self._reads[read], view):
            return self._sheet.grouped(known, view.shape)
        return self._sheet.seen(known, view)

    def _weight(self, node: Node, position: int) -> TensorRef:
        """A weight that the vertex reads, or what is computed of weights alone."""
        use = node.inputs[position]
        before = self._source.use_before(node, position)
        sheet = self._sheet
        try:
            if before is None or (use.seen_as is None and not self._is_computed_of_weights(before.value)):
                return self._weight_as_read(use)
            return seen(sheet, self._of_weights(before.value), before)
        except NoBodyError as error:
            source = before or use
            sheet.untrained = sheet.untrained or f"{source.value!r} is computed of weights: {error}"
            return TensorRef(operand="", shape=self._source.shape(use), source=source)

    def _is_computed_of_weights(self, value: str) -> bool:
        """Whether a value is more than a view of a weight that is read as such."""
        producer = self._source.before.producer
        while value in producer:
            if not isinstance(producer[value].op, Reshape | Transpose | Slice | Broadcast | Identity):
                return True
            value = producer[value].inputs[0].value
        return False

    def _weight_as_read(self, use: Use) -> TensorRef:
        read = self._read(use.value, use.piece, use.view)
        if read is None:
            raise NoBodyError("a part of a weight is read in a way that is not told")
        access = self._operator.reads[read]
        if access.index_map and all(axis is None for axis in access.index_map) and prod(access.shape) > 1:
            return seen(self._sheet, self._sheet.whole(access.tensor, access.shape), use)
        if use.view is not None and use.view == self._reads[read].use.view:
            return self._as_it_is_read(read, use.view)
        return self._viewed(self._as_made(read), use)

    def _of_weights(self, value: str) -> TensorRef:
        """Compute a value of weights, of which every device holds all."""
        if value in self._computed:
            return self._computed[value]
        before = self._source.before
        leaf = before.leaf.get(value)
        if leaf is not None and leaf.number is not None:
            return TensorRef(operand=leaf.number, shape=(1,), axes=((),))
        if leaf is not None and leaf.role == "parameter":
            found = [i for i, read in enumerate(self._reads) if read.use.value == value]
            if not found or any(axis is not None for axis in self._operator.reads[found[0]].index_map):
                raise NoBodyError(f"weight {value!r} is not held whole")
            return self._sheet.whole(self._operator.reads[found[0]].tensor, leaf.value.shape)
        if not self._source.depends_on_weights(value):
            known = TensorRef(operand="", shape=before.values[value].shape, source=Use(value=value))
            return replace(known, is_truth=before.values[value].dtype == "bool")
        node = before.producer[value]
        if node.outputs[0].name != value:
            raise NoBodyError("one of several results")
        inputs = [seen(self._sheet, self._of_weights(use.value), use) for use in node.inputs]
        kind: type[Op] = type(node.op)
        if kind is Identity:
            made = inputs[0]
        elif kind in COMPUTE:
            made = COMPUTE[kind](self._sheet, node, inputs)
        elif kind in MOVED or kind is Lookup:
            made = moved_within(self._sheet, node, inputs)
        else:
            raise NoBodyError(f"it is the result of {node.origin.operator}")
        self._computed[value] = made
        return made

    def _viewed(self, known: TensorRef, use: Use) -> TensorRef:
        if use.view is not None:
            return self._sheet.seen(known, use.view)
        return self._sheet.grouped(known, self._source.shape(use))

    def _read(self, value: str, piece: object, view: View | None) -> int | None:
        found = [i for i, read in enumerate(self._reads) if read.use.value == value and read.use.piece == piece]
        same = [i for i in found if self._reads[i].use.view == view]
        return next(iter([*same, *found]), None)

    def _as_made(self, position: int) -> TensorRef:
        """Return what is read, row-major as its producer has it."""
        access, read = self._operator.reads[position], self._reads[position]
        atoms = atoms_of(self._operator, access)
        view = read.use.view
        if atoms is not None and _is_in_view_order(read, view):
            assert view is not None
            axes = grouped(atoms, view.shape)
            atoms = None if axes is None else behind(view, axes)
        if atoms is None:
            raise NoBodyError("a tensor is read whole, in a way that is not told")
        return TensorRef(operand=access.tensor, shape=(prod(access.shape),), axes=(atoms,))


def _is_in_view_order(read: Read, view: View | None) -> bool:
    return view is not None and (view.is_reshape or read.is_laid_out)
