"""The program block of one layer: a comment, its dims, its mesh, its windows, its inputs, its computation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from pase.costs import REPLICATED
from pase.errors import EmitError, PaseError, ProgramError
from pase.graph import Access, Dim, Operator, Role
from pase.graph.body import Body, InnerDim, ModelOutput, Step, is_before_layout
from pase.graph.functions import MOVES, WINDOWED
from pase.planning.plan import LayerPlan, Plan
from pase.sharding.layouts import WHOLE, PlainDim, WindowDim, tensor_dims
from pase.sharding.traffic import edge_bytes, parameter_name
from pase.targets.emitter.statements import RETURN, Call, Statement, Value, nonzero
from pase.targets.emitter.steps import Expression, Written, formula, named_dims, nested, written_steps
from pase.targets.emitter.text import INDENT, WIDTH, Identifiers, Text, code, comment, printable
from pase.targets.training.counted import initial_moments, shared_order, weight_name

WINDOWS = (code("planes"), code("rows"), code("columns"))
"""Variables of sliding windows: lines have only the last of them, images the last two."""

GATES = code("GATES")
"""Dim in programs for the gates in an LSTM's weights, which no iteration dim indexes."""

_CALLED: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("add", "p"): "parameter",
        ("attention", "k"): "keys",
        ("attention", "q"): "queries",
        ("attention", "v"): "values",
        ("convolve", "w"): "filters",
        ("convolve_transposed", "w"): "filters",
        ("einsum", "w"): "weights",
        ("masked_attention", "k"): "keys",
        ("masked_attention", "q"): "queries",
        ("masked_attention", "v"): "values",
        ("softmax_loss", "labels"): "targets",
    }
)
"""Variables of tensors, by the function of the step that reads them, where their own names would mislead."""

LOCALS = (*_CALLED.values(), "x", "bias", "table", "scale", "shift")
"""Names that blocks use for their inputs, so that layers must not have them."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer of a program.

    Attributes:
        body: Body of the layer, with only elementary steps and kernels.
        variables: Variables of all dims.
        sources: Variable of each input's tensor.
        result: Variable of the result, "" if it is returned directly.
        reserved: Variables and words that must not be reused.
        is_loss: Whether it computes the loss, one number.
        others: Variables of further outputs, by the number of the write.
        borrowed: Variables of other layers' outputs that it takes unsplit, by name.
    """

    plan: Plan
    layer: LayerPlan
    body: Body
    variables: Mapping[str, Text]
    sources: Mapping[int, Value]
    result: Text
    reserved: frozenset[str]
    is_loss: bool
    others: Mapping[int, Text]
    borrowed: Mapping[str, Text]

    @property
    def operator(self) -> Operator:
        """The layer's operator."""
        return self.plan.graph[self.layer.name]

    def lines(self) -> Iterator[Statement | Text]:
        """Yield the comment of the block and its statements."""
        before, body = _taken_apart(self.body)
        body, there = _from_where_it_is(body)
        local = Identifiers(self.reserved)
        used = {name for step in body.steps for name in step.operands}
        reads = [(i, access) for i, access in enumerate(self.operator.reads) if access.tensor in used]
        inputs = [(i, access) for i, access in reads if access.role is not Role.PARAMETER]
        found = [dim for _, access in reads for dim in self._dims_of(access) if isinstance(dim, WindowDim)]
        windows = dict(zip(found, WINDOWS[-len(found) :], strict=True)) if found else {}
        names = self._input_names(inputs, local)
        yield _comment(self.layer, printable(formula(self.operator, body), 200))
        yield _declared_dims((*self.operator.dims, *body.inner), self.variables)
        yield _declared_mesh(self.layer)
        if windows:
            yield Statement((*windows.values(),), tuple(self._window(dim) for dim in windows))
        if not self._is_moved:
            for i, access in inputs:
                source = self.sources[i]
                if before and access.tensor == "x":
                    source = nested(before, {"x": Expression(source)})
                yield self._read(i, names[access.tensor].value, source, windows)
        names |= {
            name: Expression(self.sources[i])
            for i, access in enumerate(self.operator.reads)
            if (name := there.get(access.tensor)) is not None
        }
        for item in body.borrowed:
            name = local.new(item.name, fallback="numbers")
            names[item.name] = Expression(name, self._whole_dims(item.name))
            dims = [self._variable(dim) for dim in self._whole_dims(item.name)]
            yield Statement(name, Call(code("reshard"), [self.borrowed[item.name], code("mesh"), dims]))
        weights, declared = self._weights([access for i, access in reads if access.role is Role.PARAMETER], used, local)
        if declared:
            variables, calls = zip(*declared, strict=True)
            yield Statement(variables, calls)
        written = Written(
            operator=self.operator,
            dims=self.variables,
            names=names | weights,
            windows=tuple(windows.values()),
            target=self.target,
            result_names=() if self.is_loss else named_dims(self.operator.writes[0]),
            others={
                result: (self.others[i], named_dims(self.operator.writes[i]))
                for i, result in enumerate(body.others, start=1)
                if result
            },
            new=local.new,
        )
        steps = written_steps(body, written)
        if self._is_moved and len(steps) == len(steps[0].lines()) == 1:
            steps = [replace(steps[0], comment=self._bytes([i for i, _ in inputs]))]
        yield from steps

    def aten_lines(self, first: LayerPlan, others: Mapping[str, Text]) -> Iterator[Statement | Text]:
        """Yield the comment and the statements of a block that nodes of the module's own exported graph compute.

        Args:
            first: The layer on whose mesh it is, and to whose reads `sources` belong.
            others: Variables of its additional inputs, by layer.
        """
        laid = {dim for output in self.body.outputs if self._is_laid_out(output) for dim in output.dims}
        yield _comment(self.layer, "by the module's own operators")
        if laid:
            yield _declared_dims([dim for dim in self.operator.dims if dim.name in laid], self.variables)
        yield _declared_mesh(first)
        yield Statement(self.target, Call(code("program.aten"), [code("mesh"), self.layer.name, self.sources, others]))

    @property
    def target(self) -> Text:
        """Variable of the layer's result, or RETURN."""
        return self.result or RETURN

    def returned(self, identifiers: Identifiers) -> Iterator[tuple[str, Text, tuple[int, ...], list[Statement]]]:
        """Yield the outputs of the model that the layer computes: name, variable, shape, layout statements."""
        if not self.body.outputs:
            yield self.operator.name, self.result, self.operator.writes[0].shape, []
        for output in self.body.outputs:
            if not self._is_laid_out(output):
                yield output.name, self.result, output.shape, []
                continue
            variable = identifiers.new(f"{output.name}_out", fallback="output")
            dims = [self.variables[dim] for dim in output.dims]
            laid = Statement(variable, Call(code("arrange"), [self.result, dims]))
            yield output.name, variable, output.shape, [laid]

    def _is_laid_out(self, output: ModelOutput) -> bool:
        """Return whether an output of the model has the dims of the layer's output in another order."""
        own = named_dims(self.operator.writes[0])
        kept = tuple(dim for dim in own if self.operator.extents.get(dim, 1) > 1)
        return output.dims not in (kept, ())

    @cached_property
    def _is_moved(self) -> bool:
        """Whether the layer only moves data: it takes its inputs in their own layouts."""
        return any(step.function in MOVES for step in self.body.steps)

    def _dims_of(self, access: Access) -> tuple[PlainDim | WindowDim, ...]:
        """Return the dims of a tensor on the layer's mesh; none for a tensor that stays in its own layout."""
        if self._is_moved and access.role is not Role.PARAMETER:
            return ()
        own = sorted((dim for dim in self.body.inner if dim.tensor == access.tensor), key=lambda dim: dim.axis)
        inner = iter([PlainDim(dim.name, dim.extent) for dim in own])
        found = tensor_dims(self.operator, access)
        return tuple(next(inner, dim) if isinstance(dim, PlainDim) and dim.name == WHOLE else dim for dim in found)

    def _whole_dims(self, tensor: str) -> tuple[str, ...]:
        """Return the dims of a tensor that are complete on every device."""
        own = sorted((dim for dim in self.body.inner if dim.tensor == tensor), key=lambda dim: dim.axis)
        return tuple(dim.name for dim in own)

    def _variable(self, dim: str) -> Text:
        if dim == WHOLE and any(step.function == "lstm" for step in self.body.steps):
            return GATES
        if dim not in self.variables:
            raise EmitError(
                f"layer {self.layer.name!r} ({self.operator.kind}) cannot be written as a program: a dim of one of its "
                "tensors is none of its iteration space; give it a name there"
            )
        return self.variables[dim]

    def _input_names(self, inputs: Sequence[tuple[int, Access]], local: Identifiers) -> dict[str, Expression]:
        """Return the expression of each input: on the layer's mesh, or in its own layout if data are moved."""
        names = {}
        for i, access in inputs:
            if i not in self.sources:
                raise EmitError(
                    f"layer {self.layer.name!r} reads a part of an input of the model, which programs cannot take yet"
                )
            dims = tuple(dim.out if isinstance(dim, WindowDim) else dim.name for dim in self._dims_of(access))
            value = self.sources[i] if self._is_moved else self._new(access, local)
            names[access.tensor] = Expression(
                value, None if self._is_moved else dims, is_index=access.role is Role.INDEX
            )
        return names

    def _new(self, access: Access, local: Identifiers) -> Text:
        """Return a variable of a tensor that the layer reads."""
        first = next(step.function for step in self.body.steps if access.tensor in step.operands)
        fallback = "w" if access.role is Role.PARAMETER else "x"
        return local.new(_CALLED.get((first, access.tensor), access.tensor), fallback=fallback)

    def _window(self, dim: WindowDim) -> Call:
        stride, dilation = (step if step != 1 else 0 for step in (dim.stride, dim.dilation))
        options = nonzero(stride=stride, dilation=dilation, pad=dim.pad)
        return Call(
            code("window"), [self._variable(dim.out), self._variable(dim.kernel)], {"of": dim.extent, **options}
        )

    def _read(self, read: int, name: Value, source: Value, windows: Mapping[WindowDim, Text]) -> Statement:
        """Return the statement that redistributes an input to the layer's mesh."""
        assert isinstance(name, Text)
        dims = [
            windows[dim] if isinstance(dim, WindowDim) else self._variable(dim.name)
            for dim in self._dims_of(self.operator.reads[read])
        ]
        pools = any(s.function == "pool" and s.option("reduction", "max") == "max" for s in self.body.steps)
        options = {"fill": float("-inf")} if pools and windows else {}
        return Statement(name, Call(code("reshard"), [source, code("mesh"), dims], options), self._bytes([read]))

    def _weights(
        self, parameters: Sequence[Access], used: set[str | float], local: Identifiers
    ) -> tuple[dict[str, Expression], list[tuple[Text, Call]]]:
        """Return the expressions of weights and constants, and the variables and calls that declare them."""
        names: dict[str, Expression] = {}
        declared = []
        for access in parameters:
            dims, values, options = self._weight(access)
            name = self._new(access, local)
            names[access.tensor] = Expression(name, dims)
            shape = [self._variable(dim) for dim in dims]
            weight = Call(code("program.weight"), [code("mesh"), self._weight_name(access), shape, *values], options)
            declared.append((name, weight))
        for item in self.body.constants:
            if item.name in used:
                name = local.new(item.name, fallback="w")
                names[item.name] = Expression(name, item.dims)
                shape = [self._variable(dim) for dim in item.dims]
                initial = self._initial(item.name)
                function = code("program.constant") if initial is None else code("program.statistic")
                options = nonzero(initial=initial or 0.0)
                constant = Call(function, [code("mesh"), f"{self.layer.name}/{item.name}", shape], options)
                declared.append((name, constant))
        return names, declared

    def _initial(self, constant: str) -> float | None:
        """Return the initial value of a running statistic; None for a constant."""
        for step in self.body.steps:
            if step.function == "keep" and step.operands[0] == constant:
                return float(step.option("initial", 0.0))
            # A mean starts at 0, a variance at 1.
            if step.function == "batch_norm" and constant in step.operands[3:] and step.option("momentum", 0.0):
                return float(step.operands.index(constant) - 3)
        return None

    def _weight_name(self, access: Access) -> str:
        """Return the name under which a weight is stored; for a shared trained weight that of its first layer."""
        graph = self.plan.graph
        return weight_name(graph, self.operator, access) if graph.is_imported else parameter_name(self.operator, access)

    def _weight(self, access: Access) -> tuple[tuple[str, ...], list[float], dict[str, Value]]:
        """Return the dims of a weight, in the order of the layer that declares it, and its initialisation.

        The initialisation is given as positional and keyword arguments.
        """
        dims = tuple(dim.name for dim in self._dims_of(access) if isinstance(dim, PlainDim))
        order = shared_order(self.plan.graph, self.operator, access)
        if len(order) == len(dims):
            dims = tuple(dims[order.index(i)] for i in range(len(order)))
        mean, deviation = initial_moments(self.operator, access)
        options = nonzero(mean=0.0 if deviation else mean, is_frozen=not access.is_trained)
        return dims, [deviation] if deviation else [], options

    def _bytes(self, reads: Sequence[int]) -> str:
        """Return the transfers of the layer's inputs, for a comment; empty if they are unknown."""
        edges = (self.plan.graph.incoming.get((self.layer.name, i)) for i in reads)
        try:
            moved = [edge_bytes(self.plan, edge) for edge in edges if edge is not None]
        except ProgramError as error:
            raise EmitError(str(error)) from error
        except PaseError:
            return ""
        if not moved:
            return ""
        forward, backward = (sum(column) for column in zip(*moved, strict=True))
        return f"{forward} B forward + {backward} B backward" if forward or backward else "nothing moves"


def _comment(layer: LayerPlan, formula_text: str) -> Text:
    """Return the comment at the start of a block: name, splits, computation."""
    splits = " ".join(f"{dim}={parts}" for dim, parts in layer.splits.items() if parts != 1) or "not split"
    head = f"-- {printable(layer.name)}   {printable(splits)}"
    room = WIDTH - len(INDENT) - len("# ")
    padded = f"{head:<49} {formula_text}"
    return code("{}{}", INDENT, comment(padded if len(padded) <= room else f"{head}   {formula_text}"[:room].rstrip()))


def _declared_dims(dims: Sequence[Dim | InnerDim], variables: Mapping[str, Text]) -> Statement:
    """Return the statement that declares the dims of a layer."""
    # Extents are keywords where the dim's name is its variable, otherwise pairs before them.
    pairs = [dim for dim in dims if variables[dim.name] != dim.name]
    plain = [dim for dim in dims if variables[dim.name] == dim.name]
    targets = tuple(variables[dim.name] for dim in (*pairs, *plain))
    extents = {dim.name: dim.extent for dim in plain}
    return Statement(targets, Call(code("dims"), [(dim.name, dim.extent) for dim in pairs], extents))


def _declared_mesh(layer: LayerPlan) -> Statement:
    """Return the statement that declares a layer's mesh."""
    axes = [(dim, parts) for dim, parts in layer.splits.items() if parts != 1]
    options = nonzero(
        devices=[] if tuple(layer.devices) == tuple(range(len(layer.devices))) else [*layer.devices],
        recompute=layer.is_recomputed,
        state="" if layer.state == REPLICATED else layer.state,
    )
    return Statement(code("mesh"), Call(code("program.mesh"), [layer.name, axes], options))


def _from_where_it_is(body: Body) -> tuple[Body, dict[str, str]]:
    """Return a body in which tensors read in their own layout have separate names, and these names by tensor."""
    names = {
        str(step.operands[0]): f"{step.operands[0]} where it is"
        for step in body.steps
        if step.function == "whole" and not step.option("replaced", 0)
    }
    steps = (
        replace(step, operands=(names[str(step.operands[0])],))
        if step.function == "whole" and not step.option("replaced", 0)
        else step
        for step in body.steps
    )
    return (replace(body, steps=tuple(steps)) if names else body), names


def _taken_apart(body: Body) -> tuple[tuple[Step, ...], Body]:
    """Split the steps into pointwise functions before the tensor is laid out for its windows, and the rest."""
    place = next((i for i, step in enumerate(body.steps) if step.function in WINDOWED), 0)
    before = body.steps[:place]
    if not before or not is_before_layout(before, "x"):
        return (), body
    laid = body.steps[place]
    laid = replace(laid, operands=tuple("x" if operand == before[-1].result else operand for operand in laid.operands))
    return before, replace(body, steps=(laid, *body.steps[place + 1 :]))
