"""Bodies of vertices: the computation of the source nodes that each vertex represents, as steps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from pase.graph import Access, Operator, Role, SliceOf, Window
from pase.graph.body import Body, ModelInput, ModelOutput, Operand, is_before_layout
from pase.graph.functions import Option, function_of
from pase.graph.operator import DimIndex, access_dims, axis_dims
from pase.graph.sources import TYPES
from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Piece, SourceOperator, Trace, Use, piece_shape
from pase.importers.ir.views import View
from pase.importers.lower.builder import (
    Atom,
    Axes,
    Axis,
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
from pase.importers.lower.steps import COMPUTE, with_own_dims
from pase.importers.passes.views import composed

_MOVES = ops.Concat | ops.Pad | ops.Reshape | ops.Transpose | ops.Broadcast | ops.Slice
"""Operations that only move data."""

_MOVING = ("concat", "opaque", "padded", "piece")
"""Kinds of vertices that are such an operator: their data are moved between devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An input of a vertex.

    Attributes:
        use: Its use of the lowered trace.
        is_laid_out: Whether a vertex before it copied the tensor into the layout of its view.
        is_given: Whether no other vertex computes it.
    """

    use: Use
    is_laid_out: bool = False
    is_given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """Context of a vertex for building its body.

    Attributes:
        trace: The lowered trace.
        node: The node that the vertex represents.
        reads: Inputs of the vertex.
        written: Values that it writes, in the order of its writes.
        made: Layer and number of the write that produce each value, or a slice of it.
    """

    trace: Trace
    node: Node
    reads: Sequence[Read]
    written: Sequence[str]
    made: Mapping[tuple[str, Piece | None], tuple[str, int]]


Sources = Mapping[str, Use]
"""What constants are of the source, by their names."""


def with_moved(trace: Trace, operator: Operator, reads: Sequence[Read]) -> Operator:
    """Return a vertex that moves what others read, with the inputs of the model that it reads."""
    assert operator.body is not None
    return replace(operator, body=replace(operator.body, inputs=tuple(_model_inputs(trace, operator, reads))))


def with_body(operator: Operator, of: Lowering) -> tuple[Operator, Sources, Sources]:
    """Return a vertex with its body, or with the reason why it has none.

    Returns:
        The vertex; the sources of its body's constants, and those of the body for the source's own framework.
    """
    body, sources, is_bound = _body(operator, of, is_own=of.trace.has_calls)
    own, own_sources = body, sources
    if of.trace.has_calls and (is_bound or body.problem or any(c.is_given for c in body.constants)):
        body, sources, _ = _body(operator, of, is_own=False)
        if not own.problem and own != body:
            body = replace(body, own=own)
        else:
            own_sources = sources
    return replace(operator, body=body), sources, own_sources


def _body(operator: Operator, of: Lowering, *, is_own: bool) -> tuple[Body, Sources, bool]:
    """Return a vertex's body, its constants, and whether only the source's framework computes it (needs is_own)."""
    trace, node = of.trace, of.node
    sheet = BodyBuilder(
        taken={access.tensor for access in operator.reads} | set(operator.extents),
        fixed={name: operator.extents[name] for name in operator.unsplittable},
        is_own=is_own,
    )
    held = node.elementary[-1].outputs[0].name
    returned = [found for found in trace.returned if found.use.value == held]
    try:
        value = _Vertex(operator, of, sheet).computed()
        outputs = tuple(
            ModelOutput(name=found.name, dims=_order(sheet, value, found.use), shape=found.shape) for found in returned
        )
        named = {*operator.extents, *sheet.inner}
        if any(not named.issuperset(constant.dims) for constant in sheet.constants):
            raise NoBodyError("it is computed with a value of as many points as its windows read")
        body = Body(
            steps=tuple(sheet.steps),
            constants=tuple(sheet.constants),
            outputs=outputs,
            inner=tuple(sheet.inner.values()),
            untrained=sheet.untrained,
            others=sheet.others,
            borrowed=tuple(sheet.borrowed.values()),
        )
        if is_own:
            reads = {access.tensor: access_dims(access) for access in operator.reads}
            body = with_own_dims(body, tuple(operator.extents), reads)
    except NoBodyError as error:
        where = f" ({node.origin.line})" if node.origin.line else ""
        outputs = tuple(ModelOutput(name=found.name, dims=(), shape=found.shape) for found in returned)
        body = Body(problem=f"{node.origin.operator}{where}: {error}", outputs=outputs)
    body = replace(body, inputs=tuple(_model_inputs(trace, operator, of.reads)))
    return body, sheet.sources, bool(sheet.bound)


def _model_inputs(trace: Trace, operator: Operator, reads: Sequence[Read]) -> Iterator[ModelInput]:
    """Yield the inputs of the model that an operator reads."""
    for i, (access, read) in enumerate(zip(operator.reads, reads, strict=True)):
        leaf = trace.leaf.get(read.use.value)
        if access.role is Role.PARAMETER or not read.is_given or leaf is None:
            continue
        name, shape = leaf.computed_of or (leaf.value.name, leaf.value.shape)
        if read.use.piece is None:
            yield ModelInput(read=i, name=name, shape=shape)
        elif trace.has_calls:
            piece = read.use.piece
            name = f"{leaf.value.name}[{piece.dim}:{piece.start}:{piece.start + piece.size}]"
            yield ModelInput(read=i, name=name, shape=piece_shape(leaf.value.shape, piece))


def _order(sheet: BodyBuilder, value: TensorRef, use: Use) -> tuple[str, ...]:
    """Return the dims of a vertex's output in the order in which a use of it has its points."""
    num_steps = len(sheet.steps)
    known = seen(sheet, value, use)
    if len(sheet.steps) > num_steps:
        raise NoBodyError("what the model returns is a view that cuts a dim")
    return tuple(atom.name for atom in flat(known.dims))


class _Vertex:
    """One vertex while its body is written."""

    def __init__(self, operator: Operator, of: Lowering, sheet: BodyBuilder) -> None:
        self._written, self._made = of.written, of.made
        self._trace = trace = of.trace
        self._operator = operator
        self._node = of.node
        self._reads = of.reads
        self._sheet = sheet
        self._known: dict[str, TensorRef] = {}
        self._inside = _on_held(trace, of.node)
        self._values = dict(trace.values) | {value.name: value for own in self._inside for value in own.outputs}
        # Values that steps need of calls that give several.
        self._asked = {use.value for own in self._inside for use in own.inputs} | set(of.written)

    def _shape(self, use: Use) -> tuple[int, ...]:
        """Return the shape in which a use reads a value."""
        if use.seen_as is not None:
            return use.seen_as
        return use.view.shape if use.view is not None else piece_shape(self._values[use.value].shape, use.piece)

    def computed(self) -> TensorRef:
        """Write the steps; return the vertex's output."""
        for node in self._inside:
            name = node.outputs[0].name
            self._known[name] = self._dropped(node.rate, self._computed(node))
        sheet = self._sheet
        if any(step.function == "source" for step in sheet.steps) and len(self._written) > 1:
            # Further results of the source's own call are written before the first one, which is the last step.
            others = [self._other(name, i) for i, name in enumerate(self._written[1:], start=1)]
            sheet.others = tuple(others) if any(others) else ()
        made = self._laid_as_written(self._known[self._inside[-1].outputs[0].name])
        if sheet.others and sheet.steps[-1].result != made.operand:
            made = replace(made, operand=sheet.step("identity", [made.operand]))
        return made

    def _other(self, name: str, place: int) -> str:
        """Return the name of a further result as it is written, "" where it is not expressed."""
        if name not in self._known or place >= len(self._operator.writes):
            return ""
        try:
            return str(self._laid_as_written(self._known[name], place).operand)
        except NoBodyError:
            return ""

    def _computed(self, node: Node, *, is_aside: bool = False) -> TensorRef:
        """Return a node's first output, by steps for any framework, otherwise by its source's own call.

        is_aside: whether it is computed from only weights or integers, not from the vertex's inputs.
        """
        sheet, source = self._sheet, node.source
        # Copies grow with the body: they are made only where steps may be taken back.
        mark = (sheet.mark(), dict(self._known)) if sheet.is_own else None
        try:
            if source is not None and not source.is_exact:
                raise NoBodyError("it is none of the functions that are known")
            return self._within(node) if is_aside else self._step(node)
        except NoBodyError as error:
            if mark is None:
                raise
            before, known = mark
            sheet.reset(before)
            self._known = known
            if source is None:
                return self._whole(node, error)
            sheet.bound = sheet.bound or str(error)
            return self._called(node, source)

    def _whole(self, node: Node, error: NoBodyError) -> TensorRef:
        """Return the result of a node computed from tensors that every device holds completely."""
        kind: type[ops.Op] = type(node.op)
        if kind not in COMPUTE or (isinstance(node.op, ops.Contract) and node.op.has_ends):
            raise error
        found = []
        for i in range(len(node.inputs)):
            known = self._input(node, i)
            if known.axes is not None and not isinstance(known.operand, float):
                known = self._sheet.named(known)
                known, _ = self._sheet.unsplit(known, flat(known.dims))
            found.append(known)
        self._sheet.bound = self._sheet.bound or str(error)
        return COMPUTE[kind](self._sheet, node.op, node, found)

    def _called(self, node: Node, source: SourceOperator) -> TensorRef:
        """Return the first output of the source's own call, and note the others that somebody reads."""
        sheet = self._sheet
        layouts: list[Axes] = []
        operands: list[Operand] = []
        kept: list[Axis | None] = [None] * len(source.passes)
        for i in range(len(node.inputs)):
            known = self._plain_input(node, i)
            axes = list(known.dims)
            for place, axis in enumerate(known.dims):
                group = next((g for g, (own, _) in enumerate(source.passes) if own[i] == place), None)
                if group is not None and kept[group] is None and all(atom.name for atom in axis):
                    kept[group] = axis
                if group is not None and kept[group] is not None:
                    target = kept[group]
                    assert target is not None
                    if axis != target:
                        known = sheet.laid(known, (*axes[:place], target, *axes[place + 1 :]))
                        axes[place] = target
                        known = replace(known, axes=tuple(axes))
                    continue
                known, axes[place] = sheet.unsplit(known, axis)
                known = replace(known, axes=tuple(axes))
            layouts.append(tuple(axes))
            operands.append(self._truths(node, i, replace(known, axes=tuple(axes))))
        first = node.outputs[0]
        wanted = [value for value in node.outputs if value.name in self._asked] or [first]
        for value in reversed(wanted):
            number = source.results.index(value.name)
            result: list[Axis] = [()] * len(value.shape)
            for (_, after), own in zip(source.passes, kept, strict=True):
                if own is not None and after[number] >= 0:
                    result[after[number]] = own
            result = [
                axis or ((sheet.dim(extent),) if extent > 1 else ())
                for axis, extent in zip(result, value.shape, strict=True)
            ]
            told = json.dumps([[names(axis) for axis in axes] for axes in (*layouts, result)])
            dims = names(flat(tuple(result)))
            options: dict[str, Option] = {"operator": source.operator, "arguments": source.arguments, "layouts": told}
            name = sheet.step("source", operands, dims, **options, number=number, is_index=not value.is_float)
            self._known[value.name] = TensorRef(operand=name, shape=value.shape, axes=tuple(result))
        return self._known[wanted[0].name]

    def _truths(self, node: Node, position: int, known: TensorRef) -> Operand:
        """Return an input of the source's own call, as truth values where the source has them: steps have 0 and 1."""
        made = {step.result: step.function for step in self._sheet.steps}
        if self._dtype(node.inputs[position]) != "bool" or made.get(str(known.operand), "source") == "source":
            return known.operand
        layout = [names(axis) for axis in known.dims]
        options: dict[str, Option] = {
            "operator": "aten.ne.Scalar",
            "arguments": '[[{"operand": 0}, 0], {}]',
            "layouts": json.dumps([layout, layout]),
        }
        return self._sheet.step("source", [known.operand], names(flat(known.dims)), **options, number=0, is_index=True)

    def _dtype(self, use: Use) -> str:
        return self._values[use.of or use.value].dtype

    def _plain_input(self, node: Node, position: int) -> TensorRef:
        """Return an input as a tensor all of whose points have a dim."""
        use, sheet = node.inputs[position], self._sheet
        known = self._input(node, position, is_plain=True)
        shape = self._shape(use)
        if known.axes is None:
            axes: Axes = tuple((sheet.dim(extent),) if extent > 1 else () for extent in shape)
            known = sheet.constant(replace(known, shape=shape), axes)
        if isinstance(known.operand, float):
            raise NoBodyError("a number takes the place of a tensor")
        if len(known.dims) != len(shape) or known.shape != shape:
            known = sheet.grouped(known, shape)
        return sheet.named(known)

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

    def _laid_as_written(self, known: TensorRef, place: int = 0) -> TensorRef:
        """Return the output with inner dims replaced by the dims of the iteration space."""
        if known.axes is None:
            return known
        write = self._operator.writes[place]
        atoms = atoms_of(self._operator, write)
        if atoms is None and self._sheet.bound and prod(known.shape) == prod(write.shape):
            return self._laid_in_part(self._seen_as(known, write.shape), write)
        is_inner = any(self._sheet.is_inner((atom,)) for atom in flat(known.axes))
        is_other = self._sheet.is_own and atoms is not None and not {*names(flat(known.axes))} <= {*names(atoms)}
        if not is_inner and not is_other:
            return known
        target = None if atoms is None else grouped(atoms, known.shape)
        if target is None:
            raise NoBodyError("what it writes is not told by its iteration space")
        return self._sheet.laid(known, target)

    def _laid_in_part(self, known: TensorRef, write: Access) -> TensorRef:
        """Return an output of which every device holds all points of some dims that no iteration dim indexes."""
        sheet = self._sheet
        target: list[Axis] = []
        for i, (axis, extent) in enumerate(zip(write.index_map, write.shape, strict=True)):
            own = self._told(axis, extent)
            if own is None:
                known, own = sheet.unsplit(known, known.dims[i])
            target.append(own)
        known = sheet.laid(known, tuple(target))
        # In the order of the output: not all of these dims are the operator's.
        name = sheet.step("repeat", [known.operand], names(flat(tuple(target))))
        return replace(known, operand=name, axes=tuple(target))

    def _step(self, node: Node) -> TensorRef:
        op = node.op
        if isinstance(op, ops.Slice) and self._sheet.is_own and not self._is_box():
            self._sheet.bound = self._sheet.bound or "it takes a box of a tensor"
            return self._within(node)
        if isinstance(op, ops.Concat) and self._sheet.is_own and not self._is_joined():
            self._sheet.bound = self._sheet.bound or "it joins tensors that are repeated for that"
            return self._within(node)
        if isinstance(op, _MOVES) and self._operator.kind in _MOVING and not self._known:
            return self._joined(node, op) if isinstance(op, ops.Concat) else self._own(node)
        if isinstance(op, ops.Recurrent):
            return self._recurrent(node, op)
        if isinstance(op, ops.Convolve | ops.Gather | ops.Generic | ops.Lookup | ops.Pool):
            return self._own(node)
        return self._within(node)

    def _is_box(self) -> bool:
        """Return whether a slicing vertex slices one dim of its tensor only, with iteration dims throughout."""
        parts = [axis for axis in self._operator.writes[0].index_map if isinstance(axis, SliceOf)]
        is_plain = all(isinstance(axis, str | tuple) for axis in self._operator.reads[0].index_map)
        return self._operator.kind not in _MOVING or (len(parts) == 1 and is_plain)

    def _is_joined(self) -> bool:
        """Return whether all inputs of a concatenation have the dims of its output."""
        written = {name for axis in self._operator.writes[0].index_map for name in axis_dims(axis)}
        reads = [access for access in self._operator.reads if access.role is not Role.PARAMETER]
        return self._operator.kind != "concat" or all(access_dims(access) == written for access in reads)

    def _within(self, node: Node) -> TensorRef:
        """The steps of an operator on tensors of any dims."""
        inputs = self._cast(node, [self._input(node, i) for i in range(len(node.inputs))])
        kind: type[ops.Op] = type(node.op)
        if kind is ops.Identity:
            return self._converted(node, inputs[0])
        if kind in COMPUTE:
            return COMPUTE[kind](self._sheet, node.op, node, inputs)
        raise NoBodyError(f"it is the result of {node.origin.operator}")

    def _converted(self, node: Node, known: TensorRef) -> TensorRef:
        """Return a tensor converted to another kind of numbers, where integers become others."""
        before, to = self._dtype(node.inputs[0]), node.outputs[0].dtype
        if before == to or (before in TYPES and to in TYPES):
            return known
        if not self._sheet.is_own and (before not in TYPES or to in TYPES):
            return known
        if to not in TYPES or known.axes is None or isinstance(known.operand, float):
            raise NoBodyError(f"{before} becomes {to}")
        return replace(known, operand=self._sheet.cast(known.operand, to))

    def _cast(self, node: Node, inputs: list[TensorRef]) -> list[TensorRef]:
        """Return inputs in the type of numbers in which their source computes with them: that of the result."""
        to = node.outputs[0].dtype
        types = [self._dtype(use) for use in node.inputs]
        sizes = [TYPES.index(dtype) if dtype in TYPES else -1 for dtype in types]
        if to not in TYPES or all(dtype == to or size < 0 for dtype, size in zip(types, sizes, strict=True)):
            return inputs
        # Every framework converts the other tensors to the type of the reference tensor.
        is_brought = isinstance(node.op, ops.Pointwise) and to in types
        found = []
        for known, dtype, size in zip(inputs, types, sizes, strict=True):
            is_same = dtype == to or size < 0 or isinstance(known.operand, float)
            if is_same or (is_brought and size < TYPES.index(to)):
                found.append(known)
            elif known.source is not None:
                found.append(replace(known, dtype=to))
            else:
                found.append(replace(known, operand=self._sheet.cast(str(known.operand), to)))
        return found

    def _own(self, node: Node) -> TensorRef:
        """Steps of the vertex's own kind, on its inputs in their vertex layout."""
        own = self._operator.body
        if own is None and not isinstance(node.op, ops.Generic):
            raise NoBodyError("it is split along its batch alone, and cannot be written yet")
        if own is None or own.problem or not own.steps:
            raise NoBodyError((own and own.problem) or "nothing is known of what it computes")
        if isinstance(node.op, _MOVES) and any(access.role is Role.PARAMETER for access in self._operator.reads):
            raise NoBodyError("a weight is moved by a layer of its own")
        is_table = all(isinstance(axis, str) for access in self._operator.reads[1:2] for axis in access.index_map)
        if self._sheet.is_own and isinstance(node.op, ops.Lookup) and not is_table:
            raise NoBodyError("a table is looked up whose dims are put together of others")
        # A separate step adds the bias.
        first, *others = node.inputs[:2] if isinstance(node.op, ops.Convolve) else node.inputs or (Use(value=""),)
        if any(use.value in self._known for use in others):
            raise NoBodyError("functions are applied to what it reads")
        results = {"x": self._before_layout(node)} if first.value in self._known else {}
        for i, use in enumerate((first, *others)):
            if use.of and not (self._sheet.is_own and i and isinstance(node.op, ops.Lookup | ops.Gather)):
                raise NoBodyError(f"it reads {use.of!r}, which is computed of weights")
            if use.of:
                results |= self._places(node, i)
        for step in own.steps[:1] if isinstance(node.op, ops.Convolve) else own.steps:
            operands = [results.get(o, o) if isinstance(o, str) else o for o in step.operands]
            results[step.result] = self._sheet.step(step.function, operands, step.dims, **dict(step.options))
        made = self._result(node, results[step.result])
        if isinstance(node.op, ops.Convolve) and node.op.has_bias:
            bias = self._input(node, 2)
            bias = self._sheet.laid(bias, (made.dims[node.op.channels],))
            made = replace(made, operand=self._sheet.step("add", [made.operand, bias.operand]))
        return made

    def _places(self, node: Node, position: int) -> dict[str, str]:
        """Return integers computed from the vertex's inputs, laid out for its look-ups."""
        places = self._plain_input(node, position)
        write = self._operator.writes[0]
        atoms = atoms_of(self._operator, write)
        axes = None if atoms is None else grouped(atoms, node.outputs[0].shape)
        if axes is None:
            raise NoBodyError("what it writes is not told by its iteration space")
        read = next(access.tensor for access in self._operator.reads if access.role is Role.INDEX)
        # The dims of the indices are the first ones of the result.
        places = self._sheet.laid(places, axes[: len(places.dims)])
        return {read: str(places.operand)}

    def _before_layout(self, node: Node) -> str:
        """Return the result of functions of an input that can be applied before it is laid out."""
        known = self._known[node.inputs[0].value]
        is_alone = is_before_layout(self._sheet.steps, "x")
        if not isinstance(node.op, ops.Convolve | ops.Gather | ops.Pool) or isinstance(known.operand, float):
            raise NoBodyError("functions are applied to what it reads")
        if not isinstance(node.op, ops.Convolve) and self._is_padded() and not is_alone:
            raise NoBodyError("a function is applied to what is pooled with padding")
        if (
            self._is_padded()
            and not is_alone
            and not all(function_of(s.function).keeps_zero for s in self._sheet.steps)
        ):
            raise NoBodyError("a function that does not keep zeros is applied to what is padded")
        return known.operand

    def _recurrent(self, node: Node, op: ops.Recurrent) -> TensorRef:
        """Recurrent layers over a sequence; first states that are not given are zero."""
        if not op.equations:
            raise NoBodyError("how this recurrent layer computes its gates is not told")
        if op.rate and op.layers > 1:
            self._sheet.untrained = self._sheet.untrained or "points are dropped between its layers"
        x, *rest = node.inputs
        if any(use.of for use in rest):
            raise NoBodyError("a recurrent layer reads what is computed of weights")
        weights = [use for use in rest if self._trace.is_parameter(use)]
        states = [use for use in rest if use not in weights]
        num_cells = op.layers * (1 + op.is_bidirectional)
        of_gates = [access for access in self._operator.parameters if ("g", "e") in access.index_map]
        if len(weights) not in (2 * num_cells, 4 * num_cells) or len(of_gates) != len(weights):
            raise NoBodyError(
                "a recurrent layer has weights other than those of its gates (a projection, first states)"
            )
        options: dict[str, Option] = {"cell": op.equations, "layers": op.layers}
        operands = [self._as_it_lies(x.value, x.piece)]
        operands += [self._in_order(self._as_it_lies(use.value, use.piece), op.gates) for use in weights]
        for name, state in zip(("hidden", "kept"), states, strict=False):
            leaf = self._trace.leaf.get(state.value)
            if leaf is None or leaf.number != 0:
                options[name] = True
                operands.append(self._as_it_lies(state.value, state.piece))
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

    def _joined(self, node: Node, op: ops.Concat) -> TensorRef:
        """Concatenation: inputs in their own layout, and others laid out for it."""
        reads = (access.tensor for access in self._operator.reads if access.role is not Role.PARAMETER)
        tensors = [
            next(reads) if self._is_read(use) else self._end(self._input(node, i), op)
            for i, use in enumerate(node.inputs)
        ]
        along = self._operator.attribute("along", "")
        return self._result(node, self._sheet.step("concat", tensors, along=along))

    def _end(self, known: TensorRef, op: ops.Concat) -> str:
        """Return one of the tensors that are joined end to end, laid out for that."""
        write = self._operator.writes[0]
        if isinstance(known.operand, float) or any(not isinstance(axis, str) for axis in write.index_map):
            raise NoBodyError("numbers are joined to it")
        if len(write.index_map) != len(known.shape):
            raise NoBodyError("tensors of other dims than it writes are joined")
        along = self._sheet.dim(known.shape[op.dim])
        axes = [Atom(str(axis), extent) for axis, extent in zip(write.index_map, write.shape, strict=True)]
        axes[op.dim] = along
        target = tuple((atom,) if atom.extent > 1 else () for atom in axes)
        return self._sheet.step("repeat", [self._sheet.laid(known, target).operand], [atom.name for atom in axes])

    def _result(self, node: Node, name: str) -> TensorRef:
        """Return the result of a step that has the dims of the operator's first output."""
        write = self._operator.writes[0]
        shape = node.outputs[0].shape
        if any(isinstance(axis, SliceOf) for axis in write.index_map):
            # A slice is a dim of its own.
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

    def _input(self, node: Node, position: int, *, is_plain: bool = False) -> TensorRef:
        """Return an input of a node; is_plain: as a tensor without windows, with all of its points."""
        use = node.inputs[position]
        leaf = self._trace.leaf.get(use.value)
        if use.of and (leaf is None or leaf.role != "parameter"):
            return self._seen_as(self._of_weights(use.of), self._shape(use))
        if use.value in self._known:
            return seen(self._sheet, self._known[use.value], use)
        if self._is_read(use):
            return self._as_read(use, self._read_at(node, position), is_plain=is_plain)
        if leaf is None:
            return seen(self._sheet, self._of_weights(use.value), use)
        if leaf.role == "parameter":
            return self._weight(use)
        is_given = leaf.role == "input" or leaf.computed_of is not None
        shape, is_truth = self._shape(use), leaf.value.dtype == "bool"
        if self._sheet.is_own and (is_given or is_plain):
            return TensorRef(operand="", shape=shape, source=use, is_truth=is_truth, is_given=is_given)
        if leaf.number is not None:
            return TensorRef(operand=leaf.number, shape=(1,), axes=((),))
        if is_given:
            raise NoBodyError("it is computed with what depends on an input of the model that no layer reads")
        return TensorRef(operand="", shape=shape, source=use, is_truth=is_truth)

    def _seen_as(self, known: TensorRef, shape: tuple[int, ...]) -> TensorRef:
        return known if known.shape == shape else self._sheet.grouped(known, shape)

    def _is_read(self, use: Use) -> bool:
        """Whether the vertex reads a tensor that another one makes, or an input of the model."""
        is_read = any(read.use.value == use.value for read in self._reads)
        return is_read and (use.value not in self._trace.leaf or self._trace.leaf[use.value].role == "input")

    def _read_at(self, node: Node, position: int) -> int | None:
        """Return the read of an input if one tensor is read as several operands; None where its name suffices."""
        value = node.inputs[position].value
        reads = [i for i, read in enumerate(self._reads) if read.use.value == value]
        uses = [(n.name, i) for n in self._inside for i, use in enumerate(n.inputs) if use.value == value]
        return reads[uses.index((node.name, position))] if len(reads) == len(uses) > 1 else None

    def _as_read(self, use: Use, read: int | None = None, *, is_plain: bool = False) -> TensorRef:
        """Return a tensor that another vertex computes, or a weight; read: its position, if known."""
        if read is None or self._reads[read].use.piece != use.piece:
            found = [i for i, r in enumerate(self._reads) if (r.use.value, r.use.piece) == (use.value, use.piece)]
            views = [use.view, *(other.view for other in self._node.inputs if other.value == use.value)]
            equal_views = (i for view in views for i in found if self._reads[i].use.view == view)
            read = next(equal_views, found[0] if found else None)
        if read is None and use.piece is not None and not self._trace.is_parameter(use):
            return seen(self._sheet, self._as_read(Use(value=use.value)), use)
        if read is None:
            raise NoBodyError("a part of a tensor is read in a way that is not told")
        access, view = self._operator.reads[read], self._reads[read].use.view
        if self._trace.is_parameter(use) and prod(access.shape) > 1 and not any(access.index_map):
            return seen(self._sheet, self._sheet.whole(access.tensor, access.shape), use)
        is_windowed = any(isinstance(axis, Window) for axis in access.index_map)
        atoms = None if is_plain and is_windowed else atoms_of(self._operator, access)
        if atoms is None and self._sheet.is_own:
            held = self._held(access)
            if use.view is None or use.view.is_reshape:
                return self._sheet.grouped(held, self._shape(use))
            return self._sheet.seen(held, use.view)
        if atoms is not None and view is not None and self._reads[read].is_laid_out:
            axes = grouped(atoms, view.shape)
            if use.view == view and axes is not None:
                return TensorRef(operand=access.tensor, shape=view.shape, axes=axes)
            atoms = None if axes is None else behind(view, axes)
        if atoms is None:
            raise NoBodyError("a tensor is read whole, in a way that is not told")
        known = TensorRef(operand=access.tensor, shape=(prod(access.shape),), axes=(atoms,))
        if use.view is None or use.view.is_reshape:
            return self._sheet.grouped(known, self._shape(use))
        return self._sheet.seen(known, use.view)

    def _held(self, access: Access) -> TensorRef:
        """Return a tensor that is read with dims that no iteration dim indexes throughout."""
        sheet = self._sheet
        if not any(isinstance(axis, Window | SliceOf) for axis in access.index_map):
            extents = self._operator.extents
            dims = [tuple(Atom(name, extents[name]) for name in axis_dims(axis)) for axis in access.index_map]
            return sheet.read(access.tensor, dims, access.shape)
        axes = [self._told(axis, extent) for axis, extent in zip(access.index_map, access.shape, strict=True)]
        return sheet.from_where_it_is(access.tensor, axes, access.shape)

    def _told(self, axis: DimIndex, extent: int) -> Axis | None:
        """Return the atoms of a dim that iteration dims index throughout; None for any other."""
        extents = self._operator.extents
        if not isinstance(axis, str | tuple) or (isinstance(axis, str) and extent != extents[axis]):
            return None
        return tuple(Atom(name, extents[name]) for name in axis_dims(axis) if extents[name] > 1)

    def _weight(self, use: Use) -> TensorRef:
        """Return a weight that the vertex reads, or a value computed from only weights."""
        sheet, shape = self._sheet, self._shape(use)
        try:
            return sheet.grouped(self._of_weights(use.of), shape) if use.of else self._as_read(use)
        except NoBodyError as error:
            sheet.untrained = sheet.untrained or f"{use.of or use.value!r} is computed of weights: {error}"
            if use.of:
                whole = self._values[use.of].shape
                use = Use(value=use.of, view=None if whole == shape else View.plain(whole).reshaped(shape))
            return TensorRef(operand="", shape=shape, source=use)

    def _of_weights(self, value: str) -> TensorRef:
        """Return a value computed from only weights, or only integers, of which every device holds all."""
        if value not in self._known:
            makers = [node for node in self._trace.of_weights if any(made.name == value for made in node.outputs)]
            if not makers and (value, None) in self._made and not self._values[value].is_float:
                layer, output = self._made[value, None]
                return self._sheet.borrow(value, layer, output, self._values[value].shape)
            if not makers or (makers[0].outputs[0].name != value and not self._sheet.is_own):
                raise NoBodyError("one of several results")
            self._asked.add(value)
            made = self._computed(makers[0], is_aside=True)
            self._known.setdefault(makers[0].outputs[0].name, made)
            if value not in self._known:
                raise NoBodyError("one of several results")
        return self._known[value]


def _on_held(trace: Trace, node: Node) -> list[Node]:
    """Return the source nodes that a node represents, in terms of tensors that other vertices store."""
    made = {value.name for own in node.elementary for value in own.outputs}
    held: dict[str, Node] = {}
    found: list[Node] = []
    for own in node.elementary:
        uses: list[Use] = []
        for use in own.inputs:
            behind = held[use.value].inputs[0] if use.value in held else None
            read = use if behind is None else composed(use, behind, trace.values[behind.value].shape)
            if read is None:
                # A view of a view that cuts its dims.
                found.append(held.pop(use.value))
            uses.append(read or use)
        changed = replace(own, inputs=tuple(uses))
        if isinstance(own.op, ops.Identity) and own.inputs[0].value not in made - {*held}:
            held[own.outputs[0].name] = changed
        else:
            found.append(changed)
    return found
