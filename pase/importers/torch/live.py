"""`trace_live`: a module's graph, and the objects of the running module that correspond to names in the graph.

A graph has names of weights, constants, inputs and outputs. To run the module under a plan, one also needs the module's
own parameters and buffers for these names, the values that it computes from its inputs before a layer reads them
(shifted labels, masks, positions), and the structure of its result.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from operator import getitem
from types import MappingProxyType
from typing import Any

from pase.errors import ModelError
from pase.graph import Role, Scalar, SliceOf
from pase.graph.body import ModelOutput
from pase.importers.frameworks import ImportedModel, imported
from pase.importers.front_end import framework
from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, Use, Value, check_trace
from pase.importers.passes.views import Depends, dependencies
from pase.importers.torch.capture import Captured, captured
from pase.importers.torch.export import as_trained, call_of, exported, recorded_call, unwrapped
from pase.importers.torch.program import (
    Reader,
    behind,
    dropped_in_attention,
    flat_items,
    location,
    tied_weights,
    trace_of,
)

Layer = str
Tensor = str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeight:
    """A parameter of the module that provides a layer's weight.

    Attributes:
        parameter: Its name among `named_parameters`; tied weights have one.
        row: First row that is read if the layer's weight consists of rows of a larger parameter (a view), else None.
        use: How the layer reads it, as in `weights.read_as`; the elements, row-major, are those of the layer's weight.
        shape: Shape before the use, of the tensor with the trace's name in the module.
    """

    parameter: str
    row: int | None
    use: Use
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConstant:
    """The module's counterpart of a constant in a layer's body.

    Attributes:
        use: How it is read from a value, by the value's name in a `Part`.
        buffer: Buffer of the module that the value is, "" for values that are computed or literals.
        inputs: Inputs of the module that the value depends on: it then differs in every step.
        parameters: Parameters from which it is computed; it has no gradient.
        is_random: Whether it is drawn in every step, the same on all ranks.
        is_written: Whether it is computed from a buffer that calls of the module write.
    """

    use: Use
    buffer: str = ""
    inputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    is_random: bool = False
    is_written: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same in every step until somebody changes a buffer."""
        return not (self.inputs or self.parameters or self.is_random or self.is_written)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveInput:
    """A value that a layer reads and no layer computes.

    Attributes:
        name: Name of the program's input in the layer's body.
        use: How it is read from a value of the module, by the value's name in a `Part`; inputs of the module keep their
            names.
        inputs: Inputs of the module from which it is computed.
        is_given: Whether it is one of these, possibly in another shape.
    """

    name: str
    use: Use
    inputs: tuple[str, ...]
    is_given: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOutput:
    """A tensor that the module returns.

    Attributes:
        name: Its name.
        layer: Layer that computes it, "" for none.
        output: Order of dims in which that layer has it.
        part: Range of one of the layer's dims that it is, None for all of the layer's output.
        is_moved: Whether it has the layer's points in an order that permuting dims does not give.
        inputs: Inputs of the module on which a value depends that no layer computes: a `Part` returns it.
        problem: Why it cannot be returned, "" if it can.
    """

    name: str
    shape: tuple[int, ...]
    layer: str = ""
    output: ModelOutput | None = None
    part: SliceOf | None = None
    is_moved: bool = False
    inputs: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLookup:
    """Integers, computed from only the module's inputs, by which an operator looks something up.

    Attributes:
        value: Their name in a `Part`.
        stop: Upper bound (exclusive); the lower bound is 0.
        ignored: A number that denotes no index, or None.
        what: The operator and its line, for messages.
    """

    value: str
    stop: int
    ignored: int | None
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Values that a module computes from its inputs, buffers and weights before any layer, as a graph of torch calls.

    Attributes:
        graph: A `torch.fx.GraphModule`.
        inputs: Names of the module's inputs that it takes by position.
        state: Names of parameters and buffers that follow them.
        names: Names of its results, a tuple.
        draws: Whether it also takes the key of a step, with which it draws random numbers.
    """

    graph: Any
    inputs: tuple[str, ...]
    state: tuple[str, ...]
    names: tuple[str, ...]
    draws: bool = False

    def __call__(self, inputs: Mapping[str, Any], state: Mapping[str, Any], key: Any = None) -> dict[str, Any]:
        """Return the values, by name; inputs, state: tensors by name, which may include unused ones."""
        given = (*(inputs[name] for name in self.inputs), *(state[name] for name in self.state))
        given = (*given, key) if self.draws else given
        return dict(zip(self.names, self.graph(*given), strict=True))


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """A traced module that can be run under a plan.

    Attributes:
        model: The graph, as `model.graph`, and the trace after every pass.
        weights: The module's parameters by (layer, tensor), for each read of a parameter in the graph.
        constants: The module's counterparts of constants in bodies, by (layer, constant).
        inputs: The module's counterpart of each read that neither a layer nor a parameter provides, by (layer, read).
        outputs: The tensors that the module returns, in order; each tensor once.
        lookups: Input indices whose bounds must be checked, as steps on shards do not check them.
        call: How the module is called: `call.bound(args, kwargs)` returns its inputs by name.
        statistics: For each layer that normalises by running statistics: name of the module that has them, so that
            training updates its `running_mean`, `running_var` and `num_batches_tracked`.
        unread: Names of parameters that no layer reads.
        notes: Assumptions, in words.
        graphs: The module's own graphs, by whether they are of training; empty where it cannot be captured.
    """

    model: ImportedModel
    weights: Mapping[tuple[Layer, Tensor], LiveWeight]
    constants: Mapping[tuple[Layer, str], LiveConstant]
    inputs: Mapping[tuple[Layer, int], LiveInput]
    outputs: tuple[LiveOutput, ...]
    lookups: tuple[LiveLookup, ...]
    call: "LiveCall"
    statistics: Mapping[Layer, str]
    unread: tuple[str, ...]
    notes: tuple[str, ...]
    program: "_Program"
    structure: Any
    graphs: Mapping[bool, Captured]

    def part(self, names: Iterable[str], *, device: object = None) -> Part:
        """Return the graph that computes values of the module from its inputs, buffers and weights.

        Args:
            names: Names of values, as in the uses of `constants`, `inputs` and `outputs`, or their own names.
            device: Device to run it on; default: the module's.

        Raises:
            ModelError: A value depends on results of layers.
        """
        return self.program.part(tuple(dict.fromkeys(names)), device)

    def returned(self, tensors: Sequence[Any]) -> Any:
        """Return the module's result, in its structure; tensors: those of `outputs`, in order."""
        return _mapped(lambda item: tensors[item] if isinstance(item, _Place) else item, self.structure)


def trace_live(source: Any, *, batch: int | None = None) -> LiveModel:
    """Trace a PyTorch module so that it can be run under a plan of its graph; no weight's value is read.

    The module is restored afterwards. It may be on any device, including 'meta'. Nothing in the result refers to the
    module: callers pass its parameters and buffers to `Part`, by their names in its `state_dict` (and by those of
    buffers that are not part of it).

    Args:
        source: (module, example inputs), as for `load`; the inputs' values are ignored.
        batch: Examples in a step, if it differs from that of the inputs.

    Returns:
        The graph and the module's counterparts. To compare the graph with that of a plan, see
        `pase.importers.frameworks.difference`.

    Raises:
        ModelError: The module cannot be traced, or is given without inputs.
    """
    torch = framework("torch", "torch")
    module, positional, keywords, loss = call_of(torch, source, batch)
    module = unwrapped(torch, module)
    seen: list[Any] = []
    program, notes = exported(torch, module, positional, keywords, loss, on_output=seen.append)
    reader = Reader(torch, module, program)
    call = recorded_call(torch, positional, keywords, has_loss=loss is not None)
    trace = replace(check_trace(trace_of(reader, module, type(module).__name__, notes)), call=call)
    graphs: dict[bool, Captured] = {}
    try:
        for trains in (True, False):
            graphs[trains] = captured(torch, module, positional, keywords, loss, trains=trains)
    except ModelError as error:
        graphs.clear()
        # Its translation trains it, where that is known to equal the module's own training.
        trace = as_trained(torch, trace, module, positional, keywords, loss, unknown=str(error))
        trace = replace(trace, notes=(*trace.notes, f"the module's own graph is not run: {error}"))
    else:
        # Dropout of attention weights in the module's own graph applies.
        untrue = {*dropped_in_attention(module, reader.attentions)}
        trace = replace(trace, notes=tuple(note for note in trace.notes if note not in untrue))
    recorded: dict[str, Scalar] = {} if batch is None else {"batch": batch}
    model = imported(trace, arguments=recorded, framework="torch")
    # Values of weights are given when they are needed: the program holds none.
    program.state_dict.clear()
    written = frozenset(name for graph in graphs.values() for name in graph.written)
    own = _Program(torch=torch, program=program, reader=reader, trace=trace, written=written)
    tied = tied_weights(module)
    weights = {}
    for found in model.lowered.weights:
        name, row = tied.get(found.source, (found.source, None))
        use = Use(value=found.source, piece=found.piece)
        weights[found.layer, found.tensor] = LiveWeight(
            parameter=name, row=row, use=use, shape=trace.values[found.source].shape
        )
    constants = {key: own.constant(use) for key, use in model.lowered.own_constants.items()}
    read = {weight.parameter for weight in weights.values()}
    return LiveModel(
        model=model,
        weights=weights,
        constants=constants,
        inputs=_inputs(model, own),
        outputs=tuple(_output(model, own, name) for name in own.returned),
        lookups=tuple(_lookups(own)),
        call=_call(torch, module, program, positional, keywords, has_loss=loss is not None),
        statistics=_statistics(model, constants),
        unread=tuple(name for name, _ in module.named_parameters() if name not in read),
        notes=trace.notes,
        program=own,
        structure=_structure(torch, seen[-1]),
        graphs=graphs,
    )


# -- inputs, outputs and constants


def _inputs(model: ImportedModel, own: "_Program") -> dict[tuple[Layer, int], LiveInput]:
    """Return the module's counterpart of every read that neither a layer nor a parameter provides."""
    found = {}
    for operator in model.graph.operators:
        for i, access in enumerate(operator.reads):
            if access.role is Role.PARAMETER or (operator.name, i) in model.graph.incoming:
                continue
            use = model.lowered.fed.get((operator.name, i))
            assert use is not None, f"{operator.name} reads {access.tensor}, which nothing makes"
            told = operator.body.inputs if operator.body else ()
            name = next((item.name for item in told if item.read == i), "")
            inputs = own.inputs_of([use.value])
            given = {value.name: value for value in own.given.values()}
            is_given = (use.value in given or name in given) and use.piece is None
            found[operator.name, i] = LiveInput(name=name, use=use, inputs=inputs, is_given=is_given)
    return found


def _output(model: ImportedModel, own: "_Program", name: str) -> LiveOutput:
    """Return the source of an output of the module."""
    shape = own.trace.values[name].shape
    # No-ops are gone after the first pass: such an output is the value behind it.
    behind = dict(zip(own.trace.outputs, model.traces[1].outputs, strict=True))[name]
    for operator in model.graph.operators:
        for output in operator.body.outputs if operator.body else ():
            if output.name == behind:
                body = operator.body and (operator.body.own or operator.body)
                assert body is not None
                found = next(item for item in body.outputs if item.name == behind)
                part, problem = None, body.problem
                use = next((item.use for item in model.traces[-1].returned if item.name == behind), None)
                is_moved = bool(body.problem and use is not None and use.view is not None and not use.view.is_reshape)
                if use is not None and use.piece is not None:
                    axis = operator.writes[0].index_map[use.piece.dim]
                    if isinstance(axis, str):
                        part = SliceOf(dim=axis, offset=use.piece.start, extent=use.piece.size)
                    else:
                        problem = problem or f"output {name!r} is a part of what layer {operator.name!r} computes"
                return LiveOutput(
                    name=name,
                    shape=shape,
                    layer=operator.name,
                    output=found,
                    part=part,
                    is_moved=is_moved,
                    problem=problem,
                )
    is_given = any(value.name == name for value in own.given.values())
    if is_given or own.depends[name] in (Depends.CONSTANT, Depends.INDEX):
        return LiveOutput(name=name, shape=shape, inputs=own.inputs_of([name]))
    made = own.trace.producer.get(name)
    place = f" ({made.origin.operator}, {made.origin.line})" if made is not None else ""
    return LiveOutput(
        name=name, shape=shape, problem=f"output {name!r}{place} is computed of what layers give, by none of them"
    )


_BY_LABEL = frozenset(
    {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward"}
)
_BY_ROW = frozenset({"embedding", "embedding_bag", "_embedding_bag"})
_BY_PLACE = frozenset({"gather", "index_select"})
_IGNORED = -100
"""The label that losses ignore by default."""


def _lookups(own: "_Program") -> Iterator[LiveLookup]:
    for node in own.program.graph.nodes:
        name = str(getattr(getattr(node.target, "_schema", None), "name", "")).removeprefix("aten::")
        if name not in _BY_LABEL | _BY_ROW | _BY_PLACE:
            continue
        given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False))
        given |= node.kwargs
        table = given["weight" if name in _BY_ROW else "self"].meta["val"]
        numbers = given[next(key for key in ("target", "indices", "index") if key in given)]
        dim = given.get("dim", 0)
        if name in _BY_LABEL and table.dim() > 1:
            dim = 1
        ignored = given.get("ignore_index", _IGNORED) if name in _BY_LABEL else None
        value = own.reader.made.get(numbers.name)
        if isinstance(value, Value) and not value.is_float and table.dim() and own.is_of_inputs(numbers):
            line, _ = location(node.meta.get("stack_trace") or "")
            what = f"{name} at {line}" if line else name
            yield LiveLookup(value=value.name, stop=table.shape[dim], ignored=ignored, what=what)


def _statistics(model: ImportedModel, constants: Mapping[tuple[Layer, str], LiveConstant]) -> dict[Layer, str]:
    found = {}
    for operator in model.graph.operators:
        body = operator.body and (operator.body.own or operator.body)
        for step in body.steps if body else ():
            if step.function == "batch_norm" and isinstance(step.operands[3], str):
                known = constants.get((operator.name, step.operands[3]))
                if known is not None and known.buffer.endswith("running_mean"):
                    found[operator.name] = known.buffer.removesuffix("running_mean").removesuffix(".")
    return found


# -- the exported program, of which parts are taken


@dataclass(frozen=True, kw_only=True)
class _Program:
    """The exported program, and where each value of the trace is made in it. written: buffers that calls write."""

    torch: Any
    program: Any
    reader: Reader
    trace: Trace
    written: frozenset[str]

    @cached_property
    def made(self) -> dict[str, tuple[Any, int | None]]:
        """The program's node of each value that one gives, by the value's name, and which of several it is."""
        found: dict[str, tuple[Any, int | None]] = {}
        for node in self.program.graph.nodes:
            held = self.reader.made.get(node.name)
            for i, value in enumerate(flat_items([held])):
                if isinstance(value, Value):
                    found.setdefault(value.name, (node, i if isinstance(held, list | tuple) else None))
        return found

    @cached_property
    def given(self) -> dict[Any, Value]:
        """Inputs of the module, by the nodes that represent them."""
        own = {leaf.value.name for leaf in self.trace.leaves if leaf.role == "input"}
        found = {node: self.reader.made.get(node.name) for node in self.program.graph.nodes if node.op == "placeholder"}
        return {node: value for node, value in found.items() if isinstance(value, Value) and value.name in own}

    @cached_property
    def held(self) -> dict[str, str]:
        """Names of parameters and buffers, by those of the nodes that represent them."""
        signature = self.program.graph_signature
        return {**signature.inputs_to_parameters, **signature.inputs_to_buffers}

    @cached_property
    def depends(self) -> Mapping[str, Depends]:
        """What each value of the trace depends on."""
        return dependencies(self.trace)

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """The values that the module returns, by name, in order."""
        values = (self.reader.made.get(name) for name in self.program.graph_signature.user_outputs)
        return tuple(value.name for value in values if isinstance(value, Value))

    def constant(self, use: Use) -> LiveConstant:
        """Return the module's counterpart of a constant."""
        nodes = self.needed([use.value])
        own = self.made.get(use.value, (None, None))[0]
        buffer = self.program.graph_signature.inputs_to_buffers.get(getattr(own, "name", ""), "")
        parameters = self.program.graph_signature.inputs_to_parameters
        return LiveConstant(
            use=use,
            buffer=buffer,
            inputs=tuple(self.given[node].name for node in nodes if node in self.given),
            parameters=tuple(parameters[node.name] for node in nodes if node.name in parameters),
            is_random=any(self._is_random(node) for node in nodes),
            is_written=any(self.held.get(node.name) in self.written for node in nodes),
        )

    def inputs_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the inputs of the module that values are computed of."""
        return tuple(self.given[node].name for node in self.needed(names) if node in self.given)

    def needed(self, names: Iterable[str]) -> list[Any]:
        """Return the nodes of the program that values are computed by, in order."""
        return behind(self.program, [node for name in names for node in self._nodes(name)])

    def _nodes(self, name: str) -> list[Any]:
        """Return the nodes of the program that a value, perhaps one between two steps of a translation, needs."""
        if name in self.made:
            return [self.made[name][0]]
        return [node for use in self.trace.producer[name].inputs for node in self._nodes(use.value)]

    def is_of_inputs(self, node: Any) -> bool:
        """Return whether a node is computed from only inputs of the module."""
        needed = behind(self.program, [node])
        leaves = [each for each in needed if each.op != "call_function"]
        is_known = all(each in self.given for each in leaves) and not any(map(self._is_random, needed))
        return bool(leaves) and is_known

    def _is_random(self, node: Any) -> bool:
        return self.torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

    def part(self, names: tuple[str, ...], device: object) -> Part:
        """Return the part of the program that computes some values."""
        torch = self.torch
        nodes = self.needed(names)
        graph, env = torch.fx.Graph(), dict[Any, Any]()
        root = torch.nn.Module()
        inputs = [node for node in nodes if node in self.given]
        state = [node for node in nodes if node.op == "placeholder" and node.name in self.held]
        for node in (*inputs, *state):
            env[node] = graph.placeholder(node.name)
        for node in state:
            if self.held[node.name] in self.written:
                # Tensors saved for backward must not change.
                env[node] = graph.call_function(torch.ops.aten.clone.default, (env[node],))

        def placed(item: Any) -> Any:
            return torch.device(device) if device is not None and isinstance(item, torch.device) else item

        for node in nodes:
            if node in env:
                continue
            if node.op in ("placeholder", "get_attr"):
                env[node] = graph.get_attr(self._literal(root, node, device))
                continue
            made = env[node] = graph.node_copy(node, lambda other: env[other])
            made.args, made.kwargs = (torch.fx.node.map_aggregate(item, placed) for item in (made.args, made.kwargs))
        values: dict[str, Any] = {}
        for name in names:
            self._value(graph, env, values, name)
        graph.output(tuple(values[name] for name in names))
        graph.lint()
        return Part(
            graph=torch.fx.GraphModule(root, graph),
            inputs=tuple(self.given[node].name for node in inputs),
            state=tuple(self.held[node.name] for node in state),
            names=names,
        )

    def _literal(self, root: Any, node: Any, device: object) -> str:
        """Hold a tensor that is written into the source; return its name."""
        lifted = self.program.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
        found = self.program.constants.get(lifted or node.target)
        if found is None or found.is_meta or hasattr(found, "fake_mode"):
            raise ModelError(
                f"tensor {lifted or node.target!r} of the module was made without values (on the device 'meta'); make "
                "it a buffer that is not, or compute it in the forward pass"
            )
        root.register_buffer(node.name, found.detach() if device is None else found.detach().to(device))
        return str(node.name)

    def _value(self, graph: Any, env: Mapping[Any, Any], values: dict[str, Any], name: str) -> Any:
        """Write what gives a value of the trace."""
        if name not in values:
            if name in self.made:
                node, i = self.made[name]
                values[name] = env[node] if i is None else graph.call_function(getitem, (env[node], i))
            else:
                step = self.trace.producer[name]
                operands = [self._value(graph, env, values, use.value) for use in step.inputs]
                values[name] = _step(self.torch, graph, step, operands, self.trace)
        return values[name]


def _step(torch: Any, graph: Any, node: Node, operands: Sequence[Any], trace: Trace) -> Any:
    """Write a step between two values of a translation, as torch's own call."""
    aten = torch.ops.aten
    shape, dtype = node.outputs[0].shape, getattr(torch, node.outputs[0].dtype)
    match node.op:
        case ops.Reshape():
            return graph.call_function(aten.reshape.default, (operands[0], list(shape)))
        case ops.Identity():
            return graph.call_function(aten.to.dtype, (operands[0], dtype))
        case ops.Transpose(order=order):
            return graph.call_function(aten.permute.default, (operands[0], list(order)))
        case ops.Broadcast(places=places):
            whole = [1] * len(shape)
            for place, extent in zip(places, trace.shape(node.inputs[0]), strict=True):
                whole[place] = extent
            apart = graph.call_function(aten.reshape.default, (operands[0], whole))
            return graph.call_function(aten.expand.default, (apart, list(shape)))
        case ops.Slice(starts=starts, steps=steps):
            made = operands[0]
            for dim, (start, step, extent) in enumerate(zip(starts, steps, shape, strict=True)):
                if step < 1:
                    break
                made = graph.call_function(aten.slice.Tensor, (made, dim, start, start + extent * step, step))
            else:
                return made
        case ops.Pointwise(functions=("not_equal",), constant=float(number)):
            return graph.call_function(aten.ne.Scalar, (operands[0], number))
        case ops.Reduce(function="sum", over=over, keeps_dims=keeps):
            return graph.call_function(aten.sum.dim_IntList, (operands[0], list(over), keeps), {"dtype": dtype})
    raise ModelError(
        f"{node.outputs[0].name!r}, which {node.origin.operator} makes ({node.origin.line}), is computed of inputs in "
        "a way that no program can tell; use another operator"
    )


# -- the call of the module


@dataclass(frozen=True, kw_only=True)
class LiveCall:
    """The traced call of a module.

    Attributes:
        names: Names of its tensor inputs, in order, as in the trace.
        shapes: Their shapes.
        positional, keywords: Names of the parameters of the forward pass that were passed in either way; positional is
            a number where these have no names.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    positional: tuple[str, ...] | int
    keywords: tuple[str, ...]
    _signature: inspect.Signature | None
    _spec: Any
    _leaves: tuple[Any, ...]
    _flatten: Callable[[Any], tuple[list[Any], Any]]

    def bound(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        parts: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return the module's inputs by name; ModelError where the call differs from the traced one.

        Arguments may be given by position or by name; those omitted in the traced call must be omitted, or equal their
        default.

        parts: shapes that inputs, by name, may have instead.
        """
        given = self._arranged(args, kwargs)
        leaves, spec = self._flatten(given)
        if spec != self._spec:
            raise ModelError(
                f"the inputs are nested otherwise than those that the module was traced with: found {spec}, expected "
                f"{self._spec}"
            )
        found: dict[str, Any] = {}
        for leaf, (name, expected) in zip(leaves, self._leaves, strict=True):
            if isinstance(expected, tuple):
                shape = tuple(getattr(leaf, "shape", ())) if hasattr(leaf, "shape") else None
                if shape not in (expected, part := parts.get(name, expected)):
                    also = "" if part == expected else f", or of {list(part)}, what this rank reads of it"
                    said = f"of shape {list(shape)}" if shape is not None else f"a {type(leaf).__name__}"
                    raise ModelError(
                        f"input {name!r} is {said}; the plan is for a tensor of shape {list(expected)}{also}: pad the "
                        "last batch or leave it out (drop_last=True), or search for this shape"
                    )
                found[name] = leaf
            elif leaf != expected[0]:
                raise ModelError(
                    f"input {name!r} is {leaf!r}; the module was traced with {expected[0]!r}, and may compute "
                    "something else with another value"
                )
        return found

    def split(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        numbers: Iterable[int],
        part: Callable[[str, Any, int], Any],
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments of several calls; part: returns a call's part of an input, by the call's number."""
        given = self._arranged(args, kwargs)
        leaves, spec = self._flatten(given)
        if spec != self._spec:
            yield given  # `bound` reports the error.
            return
        names = [name if isinstance(expected, tuple) else "" for name, expected in self._leaves]
        for number in numbers:
            parts = [part(name, x, number) if name else x for name, x in zip(names, leaves, strict=True)]
            yield spec.unflatten(parts)

    def _arranged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return inputs by position and by name as they were given when the module was traced."""
        if self._signature is None or isinstance(self.positional, int):
            return args, {name: kwargs[name] for name in self.keywords if name in kwargs}
        try:
            arguments = _named_arguments(self._signature, args, kwargs)
        except TypeError as error:
            raise ModelError(f"the inputs do not fit the module's forward pass: {error}") from None
        names = (*self.positional, *self.keywords)
        missing = [name for name in names if name not in arguments]
        if missing:
            raise ModelError(f"input {missing[0]!r} is missing; the module was traced with {', '.join(names)}")
        defaults = {name: parameter.default for name, parameter in self._signature.parameters.items()}
        for name, value in arguments.items():
            if name not in names and value is not None and value is not defaults.get(name, inspect.Parameter.empty):
                raise ModelError(
                    f"input {name!r} is given, which the module was not traced with; it was with {', '.join(names)}: "
                    "leave it out, or search with it"
                )
        return tuple(arguments[name] for name in self.positional), {name: arguments[name] for name in self.keywords}


def _named_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by their names; those that a function takes by any name among them."""
    found = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


def _call(
    torch: Any, module: Any, program: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any], *, has_loss: bool
) -> LiveCall:
    signature: inspect.Signature | None = None
    by_position: tuple[str, ...] | int = len(positional)
    is_bound = not has_loss or not positional
    if is_bound:
        signature = inspect.signature(module.forward)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if has_loss or inspect.Parameter.VAR_POSITIONAL in kinds:
            signature = None
        else:
            by_position = tuple(list(signature.parameters)[: len(positional)])
    specs = [spec.arg for spec in program.graph_signature.input_specs if "USER_INPUT" in str(spec.kind)]
    examples = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    # The order of the program's inputs, which may be another one than that of the names.
    order = tuple(program.call_spec.in_spec.child(1).context) if keywords else ()
    shapes = {spec.name: tuple(examples[spec.name].shape) for spec in specs if not hasattr(spec, "value")}
    leaves = [(spec.name, [spec.value] if hasattr(spec, "value") else shapes[spec.name]) for spec in specs]
    return LiveCall(
        names=tuple(shapes),
        shapes=tuple(shapes.values()),
        positional=by_position,
        keywords=order,
        _signature=signature,
        _spec=program.call_spec.in_spec,
        _leaves=tuple(leaves),
        _flatten=torch.utils._pytree.tree_flatten,
    )


# -- the structure of a module's result


class _Place(int):
    """Position of a tensor in a module's result: its number among the outputs."""


def _structure(torch: Any, output: Any) -> Any:
    """Return a module's result with tensors replaced by places; caches and similar objects become None."""
    numbers: dict[int, int] = {}

    def told(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _Place(numbers.setdefault(id(item), len(numbers)))
        return item if item is None or isinstance(item, str | int | float | bool) else None

    return _mapped(told, output)


def _mapped(function: Callable[[Any], Any], item: Any) -> Any:
    """Return a module's result with a function applied to all leaves of its records, mappings and lists."""
    if _is_record(item):
        return _with_items(item, {own.name: _mapped(function, getattr(item, own.name)) for own in fields(item)})
    if isinstance(item, Mapping):
        found = {key: _mapped(function, value) for key, value in item.items()}
        return found if type(item) is dict else _like(item, found)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_mapped(function, value) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_mapped(function, value) for value in item)
    return function(item)


def _is_record(item: Any) -> bool:
    return is_dataclass(item) and not isinstance(item, type)


def _with_items(record: Any, items: Mapping[str, Any]) -> Any:
    """Return a dataclass with other items; one that is also a dict (as in transformers) with these as its items."""
    if isinstance(record, Mapping):
        return type(record)(**{name: value for name, value in items.items() if value is not None})
    found = copy(record)
    for name, value in items.items():
        object.__setattr__(found, name, value)
    return found


def _like(mapping: Mapping[Any, Any], items: Mapping[Any, Any]) -> Any:
    """Return a mapping of the same class."""
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:
        return dict(items)
