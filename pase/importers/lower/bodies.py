"""Bodies: for each vertex, what the nodes of the source that it stands for compute, as steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from pase.graph import Operator, Role, SliceOf, Window
from pase.graph.body import Body, ModelInput, ModelOutput, Option, is_before_layout
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
    Piece,
    Pool,
    Recurrent,
    Reshape,
    Slice,
    Trace,
    Transpose,
    Use,
    View,
)
from pase.importers.lower.builder import (
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
from pase.importers.lower.draft import is_parameter
from pase.importers.lower.steps import COMPUTE, moved_within
from pase.importers.passes.views import composed

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a vertex reads. use: of the lowered trace; is_laid_out: a vertex before it laid it out as its view.

    is_given: no other vertex makes it.
    """

    use: Use
    is_laid_out: bool = False
    is_given: bool = False


def with_body(
    trace: Trace, operator: Operator, node: Node | None, reads: Sequence[Read]
) -> tuple[Operator, Mapping[str, Use]]:
    """Return a vertex with what it computes, or why that cannot be told, and what its constants are of the source.

    Args:
        trace: that is lowered.
        operator: the vertex.
        node: that it is; None for a vertex that moves what others read.
        reads: of the vertex.
    """
    sheet = BodyBuilder(
        taken={access.tensor for access in operator.reads} | set(operator.extents),
        fixed={name: operator.extents[name] for name in operator.unsplittable},
    )
    returned = [] if node is None else [r for r in trace.returned if r.use.value == node.elementary[-1].outputs[0].name]
    try:
        if node is None:
            sheet.step("piece" if operator.kind in ("piece", "opaque") else "copy", [operator.reads[0].tensor])
            outputs: tuple[ModelOutput, ...] = ()
        else:
            value = _Vertex(trace, operator, node, reads, sheet).computed()
            outputs = tuple(
                ModelOutput(name=found.name, dims=_order(sheet, value, found.use), shape=found.shape)
                for found in returned
            )
        body = Body(
            steps=tuple(sheet.steps),
            constants=tuple(sheet.constants),
            outputs=outputs,
            inner=tuple(sheet.inner.values()),
            untrained=sheet.untrained,
        )
    except NoBodyError as error:
        assert node is not None
        where = f" ({node.origin.line})" if node.origin.line else ""
        outputs = tuple(ModelOutput(name=found.name, dims=(), shape=found.shape) for found in returned)
        body = Body(problem=f"{node.origin.operator}{where}: {error}", outputs=outputs)
    body = replace(body, inputs=tuple(_model_inputs(trace, operator, reads)))
    return replace(operator, body=body), sheet.sources


def _model_inputs(trace: Trace, operator: Operator, reads: Sequence[Read]) -> Iterator[ModelInput]:
    """Yield the inputs of the model that an operator reads."""
    for i, (access, read) in enumerate(zip(operator.reads, reads, strict=True)):
        leaf = trace.leaf.get(read.use.value)
        if access.role is not Role.PARAMETER and read.is_given and leaf is not None and read.use.piece is None:
            name, shape = leaf.computed_of or (leaf.value.name, leaf.value.shape)
            yield ModelInput(read=i, name=name, shape=shape)


def _order(sheet: BodyBuilder, value: TensorRef, use: Use) -> tuple[str, ...]:
    """Return the dims of what a vertex writes in the order in which a use of it has their points."""
    num_steps = len(sheet.steps)
    known = seen(sheet, value, use)
    if len(sheet.steps) > num_steps:
        raise NoBodyError("what the model returns is a view that cuts a dim")
    assert known.axes is not None
    return tuple(atom.name for atom in flat(known.axes))


class _Vertex:
    """One vertex while its body is written."""

    def __init__(self, trace: Trace, operator: Operator, node: Node, reads: Sequence[Read], sheet: BodyBuilder) -> None:
        self._trace = trace
        self._operator = operator
        self._node = node
        self._reads = reads
        self._sheet = sheet
        self._known: dict[str, TensorRef] = {}
        # Of weights, before they stood for what is computed of them.
        self._computed: dict[str, TensorRef] = {}
        inside = node.elementary
        made = {value.name for own in inside for value in own.outputs}
        # How values lie in what other vertices hold.
        self._held = {
            own.outputs[0].name: own.inputs[0]
            for own in inside
            if isinstance(own.op, Identity) and own.inputs[0].value not in made
        }
        self._inside = [own for own in inside if own.outputs[0].name not in self._held]

    def computed(self) -> TensorRef:
        """Write the steps; return what the vertex writes."""
        for node in self._inside:
            name = node.outputs[0].name
            self._known[name] = self._dropped(node.rate, self._step(node))
        return self._laid_as_written(self._known[self._inside[-1].outputs[0].name])

    def _dropped(self, rate: float, known: TensorRef) -> TensorRef:
        """Return a tensor of which points are dropped while the network is trained, where the source does so."""
        if not rate:
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
            return COMPUTE[kind](self._sheet, node, [self._input(node, i) for i in range(len(node.inputs))])
        if kind is Identity:
            return self._input(node, 0)
        if kind in LAID:
            return self._laid(node)
        if kind in MOVED and self._operator.kind in _MOVING and not any(u.value in self._known for u in node.inputs):
            return self._moved(node)
        if kind in MOVED:
            return moved_within(self._sheet, node, [self._input(node, i) for i in range(len(node.inputs))])
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
        extents = self._operator.extents
        for i, (stride, dilation, pads) in enumerate(zip(op.stride, op.dilation, op.pads, strict=True)):
            reached = (extents[f"i{i}"] - 1) * stride + (extents[f"k{i}"] - 1) * dilation + 1
            # What a framework adds after the last point, which no window reaches, is less than a step.
            if not 0 <= extents[f"o{i}"] + sum(pads) - reached < max(stride, dilation) or min(pads) < 0:
                raise NoBodyError("the padding of a transposed convolution is not told")
        before = tuple(first for first, _ in op.pads)
        options: dict[str, Option] = {"strides": tuple(op.stride), "dilations": tuple(op.dilation), "pads": before}
        return options | ({"backwards": True} if op.is_reversed else {})

    def _recurrent(self, node: Node, op: Recurrent) -> TensorRef:
        """Recurrent layers over a sequence; first states that are not given are zero."""
        if not op.equations:
            raise NoBodyError("how this recurrent layer computes its gates is not told")
        if op.rate and op.layers > 1:
            self._sheet.untrained = self._sheet.untrained or "points are dropped between its layers"
        x, *rest = node.inputs
        weights = [use for use in rest if is_parameter(self._trace, use)]
        states = [use for use in rest if use not in weights]
        num_cells = op.layers * (1 + op.is_bidirectional)
        of_gates = [access for access in self._operator.parameters if ("g", "e") in access.index_map]
        if len(weights) not in (2 * num_cells, 4 * num_cells) or len(of_gates) != len(weights):
            raise NoBodyError("a recurrent layer has weights besides those of its gates (a projection, first states)")
        options: dict[str, Option] = {"cell": op.equations, "layers": op.layers}
        operands = [self._as_it_lies(self._root(x), x.piece)]
        operands += [self._in_order(self._as_it_lies(use.value, use.piece), op.gates) for use in weights]
        for name, state in zip(("hidden", "kept"), states, strict=False):
            leaf = self._trace.leaf.get(state.value)
            if leaf is None or leaf.number != 0:
                options[name] = True
                operands.append(self._as_it_lies(self._root(state), state.piece))
        return self._result(node, self._sheet.step("recurrent", operands, ("b", "s", "r", "g", "e"), **options))

    def _in_order(self, weight: str, order: Sequence[int]) -> str:
        """Return a weight with its gates at other places."""
        if not order:
            return weight
        dims = [self._sheet.dim(1).name for _ in order]
        gates = [
            self._sheet.step("cut", [weight], ("g", dim), start=place, step=1)
            for dim, place in zip(dims, order, strict=True)
        ]
        return self._sheet.step("join", gates, (*dims, "g"))

    def _as_it_lies(self, value: str, piece: Piece | None = None) -> str:
        """Return a tensor that is read as the operator has it; dims that no iteration dim indexes are inner ones."""
        found = [i for i, read in enumerate(self._reads) if (read.use.value, read.use.piece) == (value, piece)]
        if len(found) != 1:
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
        known_of = [self._is_read(use) for use in node.inputs[: position + 1]]
        if known_of[-1]:
            reads = [access for access in self._operator.reads if access.role is not Role.PARAMETER]
            return reads[sum(known_of) - 1].tensor
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
        if self._is_read(use):
            return self._as_read(use, self._read_at(node, position))
        leaf = self._trace.leaf.get(use.value)
        if is_parameter(self._trace, use):
            return self._weight(use)
        assert leaf is not None, f"{use.value} is computed by another vertex"
        if leaf.number is not None:
            return TensorRef(operand=leaf.number, shape=(1,), axes=((),))
        if leaf.role == "input" or leaf.computed_of is not None:
            raise NoBodyError("it is computed with what depends on an input of the model that no layer reads")
        shape = self._trace.shape(use)
        return TensorRef(operand="", shape=shape, source=use, is_truth=leaf.value.dtype == "bool")

    def _behind(self, use: Use) -> Use | None:
        """Return a use as one of what another vertex holds, or of a leaf; None where it cannot be told so."""
        found: Use | None = use
        while found is not None and found.value in self._held:
            held = self._held[found.value]
            found = composed(found, held, self._trace.values[held.value].shape)
        return found

    def _root(self, use: Use) -> str:
        """Return the value that is read where a use reads one that lies in it."""
        value = use.value
        while value in self._held:
            value = self._held[value].value
        return value

    def _is_read(self, use: Use) -> bool:
        """Whether floats that depend on the input are read, or it is an input of indices that the vertex reads."""
        value = self._root(use)
        leaf = self._trace.leaf.get(value)
        is_read = leaf is not None and leaf.role == "input" and any(read.use.value == value for read in self._reads)
        return value not in self._known and (leaf is None or is_read)

    def _read_at(self, node: Node, position: int) -> int | None:
        """Return which read an input is where one tensor is read as several operands; None where its name tells it."""
        value = self._root(node.inputs[position])
        reads = [i for i, read in enumerate(self._reads) if read.use.value == value]
        uses = [(n.name, i) for n in self._inside for i, use in enumerate(n.inputs) if self._root(use) == value]
        return reads[uses.index((node.name, position))] if len(reads) == len(uses) > 1 else None

    def _as_read(self, use: Use, read: int | None = None) -> TensorRef:
        """Return a tensor that another vertex makes; read: where it is told."""
        own = self._behind(use)
        if own is None:
            return seen(self._sheet, self._as_read(self._held[use.value], read), use)
        use = own
        if read is None or self._reads[read].use.piece != use.piece:
            found = {other for other in self._node.inputs if other.value == use.value}
            read = self._read(use.value, use.piece, found.pop().view if len(found) == 1 else None)
        if read is None and use.piece is not None:
            return seen(self._sheet, self._as_read(Use(value=use.value)), use)
        if read is None:
            raise NoBodyError("a part of a tensor is read in a way that is not told")
        if use.view is not None and use.view == self._reads[read].use.view:
            return self._as_it_is_read(read, use.view)
        return self._viewed(self._as_made(read), use)

    def _as_it_is_read(self, read: int, view: View) -> TensorRef:
        """A tensor that is read in the very shape of the operator's access, or of its producer's dims."""
        atoms = atoms_of(self._operator, self._operator.reads[read])
        if atoms is None:
            raise NoBodyError("a tensor is read whole, in a way that is not told")
        known = TensorRef(operand=self._operator.reads[read].tensor, shape=view.shape, axes=(atoms,))
        if _is_in_view_order(self._reads[read], view):
            return self._sheet.grouped(known, view.shape)
        return self._sheet.seen(known, view)

    def _weight(self, use: Use) -> TensorRef:
        """Return a weight that the vertex reads, or what is computed of weights alone."""
        sheet, shape = self._sheet, self._trace.shape(use)
        try:
            return sheet.grouped(self._of_weights(use.of), shape) if use.of else self._weight_as_read(use)
        except NoBodyError as error:
            sheet.untrained = sheet.untrained or f"{use.of or use.value!r} is computed of weights: {error}"
            if use.of:
                whole = self._trace.values[use.of].shape
                use = Use(value=use.of, view=None if whole == shape else View.plain(whole).reshaped(shape))
            return TensorRef(operand="", shape=shape, source=use)

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
        """Compute a value of weights."""
        if value in self._computed:
            return self._computed[value]
        leaf = self._trace.leaf.get(value)
        if leaf is not None and leaf.number is not None:
            return TensorRef(operand=leaf.number, shape=(1,), axes=((),))
        if leaf is not None and leaf.role == "parameter":
            found = [i for i, read in enumerate(self._reads) if read.use.value == value]
            if not found or any(axis is not None for axis in self._operator.reads[found[0]].index_map):
                raise NoBodyError(f"weight {value!r} is not held whole")
            return self._sheet.whole(self._operator.reads[found[0]].tensor, leaf.value.shape)
        if leaf is not None:
            own = leaf.value
            return TensorRef(operand="", shape=own.shape, source=Use(value=value), is_truth=own.dtype == "bool")
        node = next(node for node in self._trace.of_weights if value in {made.name for made in node.outputs})
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
        return self._sheet.grouped(known, self._trace.shape(use))

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
