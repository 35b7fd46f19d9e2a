"""Programs of bodies: what trains an imported model with its loss, and what computes its forward pass."""

from collections.abc import Iterator
from dataclasses import replace
from textwrap import wrap

from pase.errors import EmitError, GraphError, PaseError
from pase.graph import Access, Edge, Operator, Role, SliceOf, verify_operator
from pase.graph.body import MOVES, WINDOWED, Body, Step, elementary, is_before_layout
from pase.graph.loss import is_imported, leading_to, loss_layer
from pase.graph.names import short
from pase.planning.plan import LayerPlan, Plan
from pase.sharding.edges import edge_bytes
from pase.sharding.held import parameter_name
from pase.sharding.layouts import PlainDim, WindowDim, tensor_dims
from pase.targets.mesh_tensorflow.emitter.block import (
    WINDOWS,
    block_dims,
    block_mesh,
    commented,
    declared_windows,
    window_variables,
)
from pase.targets.mesh_tensorflow.emitter.program import assembled, check_splits, layers_import, training_head
from pase.targets.mesh_tensorflow.emitter.steps import Written, formula, nested, written_steps
from pase.targets.mesh_tensorflow.emitter.text import (
    INDENT,
    WIDTH,
    Identifiers,
    Text,
    call,
    code,
    docstring,
    printable,
    together,
    with_comment,
)
from pase.targets.mesh_tensorflow.runtime.data import index_bound
from pase.targets.mesh_tensorflow.runtime.initial import initial_moments, shared_order, weight_name

LAYERS = (
    "arrange",
    "concat",
    "convolve",
    "dims",
    "fan_out",
    "fn",
    "greatest",
    "least",
    "log_softmax",
    "lookup",
    "mean",
    "padded",
    "pick",
    "piece",
    "pool",
    "product",
    "reshard",
    "softmax",
    "total",
    "window",
    "without_later_keys",
)
"""What such a program may import from `pase.targets.mesh_tensorflow.runtime.layers.forward`."""

_WORDS = ("Program", "build", "main", "mesh", "outputs", "program", *WINDOWS, *LAYERS)


def emit_forward(plan: Plan) -> str:
    """Return a Python script that computes what the plan's model computes, one block for each layer.

    Layers that lead to no output are left out, and so are outputs of which the import could not tell how they are
    computed, as long as there is another one; the script says so. Raises EmitError where none is left, and for a
    network that was not imported.
    """
    bodies = _bodies(plan, trains=False)
    ends = _ends(plan, bodies)
    lost = _problems(plan, bodies, ends)
    kept = [name for name in ends if name not in lost] or ends
    wanted = _checked(plan, bodies, kept)
    body = list(_body(plan, bodies, wanted, kept, trains=False))
    return assembled(_head(plan, body, outputs_left_out(plan)), body, plan.num_devices)


def emit_training(plan: Plan) -> str:
    """Return a Python script that trains the plan's model, which returns its loss, one block for each layer.

    The loss is the one output that is a single number; layers that do not lead to it are left out. Raises EmitError
    where there is none or are several, and for a layer of which the import could not tell how it is computed.
    """
    bodies = _bodies(plan, trains=True)
    ends = [loss_layer(plan.graph)]
    wanted = _checked(plan, bodies, ends)
    body = list(_body(plan, bodies, wanted, ends, trains=True))
    layers = {code("pase.targets.mesh_tensorflow.runtime.layers.forward"): LAYERS}
    return assembled(training_head(plan, body, layers), body, plan.num_devices)


def _checked(plan: Plan, bodies: dict[str, Body], ends: list[str]) -> set[str]:
    """Return the layers that lead to some; EmitError for the first that cannot be written."""
    wanted = leading_to(plan.graph, ends)
    for name in sorted(wanted, key=plan.index.__getitem__):
        check_body(plan[name], plan.graph[name], bodies[name])
    return wanted


def outputs_left_out(plan: Plan) -> tuple[str, ...]:
    """Return, in words, which outputs of the model a program of its forward pass leaves out, and why."""
    bodies = _bodies(plan, trains=False)
    lost = _problems(plan, bodies, _ends(plan, bodies))
    return tuple(
        f"output {short(output)} is left out, as layer {short(at)} cannot be written: {printable(reason, 200)}"
        for end, (at, reason) in lost.items()
        for output in ([item.name for item in bodies[end].outputs] or [end])
    )


def _problems(plan: Plan, bodies: dict[str, Body], ends: list[str]) -> dict[str, tuple[str, str]]:
    """Return the ends that cannot be computed, with the first layer that they need and that is the reason."""
    found: dict[str, tuple[str, str]] = {}
    for end in ends:
        needed = sorted(leading_to(plan.graph, [end]), key=plan.index.__getitem__)
        first = next((name for name in needed if bodies[name].problem), None)
        if first is not None:
            found[end] = first, bodies[first].problem
    return found


def _bodies(plan: Plan, *, trains: bool) -> dict[str, Body]:
    found: dict[str, Body] = {}
    for operator in plan.graph.operators:
        body = operator.body
        if body is None:
            raise EmitError(
                f"layer {operator.name!r} of network {plan.graph.name!r} does not say how it is computed: programs of "
                "a forward pass are written for imported models; emit one that trains instead (without --forward)"
            )
        try:
            verify_operator(operator)
        except GraphError as error:
            raise EmitError(str(error)) from None
        found[operator.name] = elementary(body, trains=trains)
    return found


def _ends(plan: Plan, bodies: dict[str, Body]) -> list[str]:
    """Return the layers that the model returns; those that nobody reads where it is not told which these are."""
    returned = [name for name, body in bodies.items() if body.outputs]
    read = {edge.producer for edge in plan.graph.edges}
    return returned or [operator.name for operator in plan.graph.operators if operator.name not in read]


def check_body(layer: LayerPlan, operator: Operator, body: Body) -> None:
    """Raise EmitError where a layer cannot be written by its body, or its splits are none of a program."""
    if body.problem or not body.steps:
        raise EmitError(
            f"layer {operator.name!r} ({operator.kind}) cannot be written as a program: "
            f"{body.problem or 'it has no steps'}; replace it in the model, or use the plan without a program"
        )
    check_splits(layer, operator)


def _head(plan: Plan, body: list[Text], left_out: tuple[str, ...]) -> list[Text]:
    arguments = ", ".join(f"{name}={value}" for name, value in plan.graph.arguments)
    title = f"{printable(plan.graph.name, 50)} on {plan.num_devices} devices"
    built = [f"The network was imported with {printable(arguments, 90)}.", ""] if arguments else []
    told = [
        f"{title}: its forward pass, a program for Mesh-TensorFlow.",
        "",
        *built,
        *(line for text in left_out for line in wrap(f"Its {printable(text, 400)}.", 110)),
        *([""] if left_out else []),
        "A block is a layer: its dims, its mesh, what it reads, what it computes. The axes of a mesh are the dims that",
        "are split, with their numbers of parts; the parts go to the devices row-major, and devices left over hold",
        "replicas. Edit the axes of a mesh and run again: the outputs stay the same. Bytes are those of float32.",
        "",
        "    python FILE --weights weights.npz --data inputs.npz --output outputs.npz [--json]",
    ]
    return [
        *docstring(told),
        code(""),
        *layers_import(code("pase.targets.mesh_tensorflow.runtime.layers.forward"), LAYERS, body),
        code("from pase.targets.mesh_tensorflow.runtime.forward_pass import Outputs, main"),
        code("from pase.targets.mesh_tensorflow.runtime.program import Program"),
    ]


def _body(plan: Plan, bodies: dict[str, Body], wanted: set[str], ends: list[str], *, trains: bool) -> Iterator[Text]:
    if trains:
        yield code("def build(program: Program) -> mtf.Tensor:")
        yield code('{}"""Declare the layers in order and return the loss."""', INDENT)
    else:
        yield code("def build(program: Program) -> Outputs:")
        yield code('{}"""Declare the layers in order and return what the network computes."""', INDENT)
    graph = plan.graph
    identifiers = Identifiers((*_WORDS, "Outputs", "mtf"))
    dim_names = sorted({dim.name for operator in graph.operators for dim in operator.dims})
    variables = {name: identifiers.new(name, fallback="dim") for name in dim_names}
    fed, lines = _inputs(plan, bodies, wanted, identifiers)
    yield from lines
    results: dict[str, Text] = {}
    returned: list[tuple[str, Text, tuple[int, ...]]] = []
    for layer in plan.layers:
        if layer.name not in wanted:
            continue
        results[layer.name] = identifiers.new(layer.name)
        taken = {*variables.values(), *fed.values(), *results.values(), *(name for _, name, _ in returned)}
        sources = {
            i: fed[layer.name, i] if (layer.name, i) in fed else _made(plan, graph.incoming[layer.name, i], results)
            for i, access in enumerate(graph[layer.name].reads)
            if access.role is not Role.PARAMETER and ((layer.name, i) in fed or (layer.name, i) in graph.incoming)
        }
        block = BodyBlock(
            plan, layer, bodies[layer.name], variables, sources, results[layer.name], taken, trains=trains
        )
        yield code("")
        yield from block.lines()
        if layer.name in ends and not trains:
            for name, variable, shape, extra in block.returned(identifiers):
                yield from extra
                returned.append((name, variable, shape))
    yield code("")
    if trains:
        loss = results[ends[0]]
        is_plain = not _written_dims(graph[ends[0]])
        yield code("{}return {}", INDENT, loss) if is_plain else code("{}return arrange({}, [])", INDENT, loss)
        return
    items = [code("{}: ({}, {})", name, variable, _tuple(shape)) for name, variable, shape in returned]
    line = code("{}return {{}}", INDENT, items)
    if len(line) <= WIDTH:
        yield line
        return
    yield code("{}return {", INDENT)
    yield from (code("{}{}{},", INDENT, INDENT, item) for item in items)
    yield code("{}}", INDENT)


def _tuple(shape: tuple[int, ...]) -> Text:
    return code("({},)" if len(shape) == 1 else "({})", shape)


def _inputs(
    plan: Plan, bodies: dict[str, Body], wanted: set[str], identifiers: Identifiers
) -> tuple[dict[tuple[str, int], Text], list[Text]]:
    """Return the variable of each read that the model's inputs feed, and the lines that declare these."""
    fed: dict[tuple[str, int], Text] = {}
    declared: dict[str, Text] = {}
    lines: list[Text] = []
    for operator in plan.graph.operators:
        if operator.name not in wanted:
            continue
        for item in bodies[operator.name].inputs:
            if item.name not in declared:
                declared[item.name] = identifiers.new(item.name, fallback="input")
                read = operator.reads[item.read]
                is_index = read.role is Role.INDEX
                head = code("{} = program.indices" if is_index else "{} = program.floats", declared[item.name])
                below = [code("below={}", index_bound(operator, read))] if is_index else []
                lines += call(head, [code("{}", item.name), code("[{}]", item.shape), *below])
            fed[operator.name, item.read] = declared[item.name]
    return fed, lines


def _made(plan: Plan, edge: Edge, results: dict[str, Text]) -> Text:
    """Return what a producer wrote, or the piece of it that an edge carries."""
    producer = plan.graph[edge.producer]
    name = results[edge.producer]
    if edge.output == 0:
        return name
    write = producer.writes[edge.output]
    parts = [axis for axis in write.index_map if isinstance(axis, SliceOf)]
    whole = producer.writes[0]
    if len(parts) != 1 or parts[0].dim not in whole.index_map:
        raise EmitError(
            f"layer {edge.consumer!r} reads output {edge.output} of layer {edge.producer!r}, which programs cannot "
            "tell apart from the first yet"
        )
    part = parts[0]
    return code("piece({}, {}, {}, {})", name, part.dim, part.offset, part.extent)


class BodyBlock:
    """The lines of one layer. sources: variable of each input's tensor."""

    def __init__(
        self,
        plan: Plan,
        layer: LayerPlan,
        body: Body,
        variables: dict[str, Text],
        sources: dict[int, Text],
        result: Text,
        taken: set[Text],
        *,
        trains: bool,
    ) -> None:
        self._trains = trains
        self._plan, self._layer = plan, layer
        self._before, self._body = _taken_apart(body)
        self._operator = plan.graph[layer.name]
        self._variables, self._sources, self._result = variables, sources, result
        self._local = Identifiers({*taken, *_WORDS})
        # A layer that moves data takes its inputs from where they are.
        self._is_moved = body.steps[0].function in MOVES
        used = {name for step in self._body.steps for name in step.operands if isinstance(name, str)}
        self._used = [i for i, access in enumerate(self._operator.reads) if access.tensor in used]
        self._windows: dict[WindowDim, Text] = {}
        self._names: dict[str, Text] = {}

    def lines(self) -> Iterator[Text]:
        """Yield the block."""
        operator = self._operator
        yield commented(self._layer, printable(formula(operator, self._body), 200))
        yield from block_dims(operator, self._variables)
        yield from block_mesh(self._plan, self._layer)
        yield from self._declared_windows()
        for i in self._used:
            yield from self._read(i)
        yield from self._weights()
        written = Written(
            operator=operator,
            dims=self._variables,
            names=dict(self._names),
            windows=tuple(self._windows.values()),
            result=self._result,
            new=self._local.new,
        )
        lines, moved = written_steps(self._body, written), self._bytes(self._used) if self._is_moved else ""
        yield from with_comment(lines, moved) if len(lines) == 1 else lines

    def returned(self, identifiers: Identifiers) -> Iterator[tuple[str, Text, tuple[int, ...], list[Text]]]:
        """Yield the outputs of the model that the layer computes: name, variable, shape, lines that lay them out."""
        operator = self._operator
        own = _written_dims(operator)
        if not self._body.outputs:
            yield operator.name, self._result, operator.writes[0].shape, []
        for output in self._body.outputs:
            kept = tuple(dim for dim in own if operator.extents.get(dim, 1) > 1)
            if output.dims == kept or not output.dims:
                yield output.name, self._result, output.shape, []
                continue
            variable = identifiers.new(f"{output.name}_out", fallback="output")
            dims = [self._variables[dim] for dim in output.dims]
            lines = call(code("{} = arrange", variable), [self._result, code("[{}]", dims)])
            yield output.name, variable, output.shape, lines

    def _declared_windows(self) -> list[Text]:
        reads = [self._operator.reads[i] for i in self._used]
        found = [dim for access in reads for dim in self._dims_of(access) if isinstance(dim, WindowDim)]
        self._windows = window_variables(found)
        return declared_windows(self._windows, self._variables)

    def _dims_of(self, access: Access) -> tuple[PlainDim | WindowDim, ...]:
        return () if self._is_moved else tensor_dims(self._operator, access)

    def _read(self, position: int) -> Iterator[Text]:
        access = self._operator.reads[position]
        if access.role is Role.PARAMETER:
            return
        source = self._sources.get(position)
        if source is None:
            raise EmitError(
                f"layer {self._operator.name!r} reads a part of an input of the model, which programs cannot take yet"
            )
        if self._is_moved:
            self._names[access.tensor] = source
            return
        name = self._local.new(access.tensor, fallback="x")
        self._names[access.tensor] = name
        if access.tensor == "x" and self._before:
            source = nested(self._before, {"x": source})
        dims = [
            self._windows[dim] if isinstance(dim, WindowDim) else self._variables[dim.name]
            for dim in self._dims_of(access)
        ]
        arguments = [source, code("mesh"), code("[{}]", dims)]
        if self._operator.attribute("reduction", "") == "max" and self._windows:
            arguments.append(code("fill={}", float("-inf")))
        yield from with_comment(call(code("{} = reshard", name), arguments), self._bytes([position]))

    def _weights(self) -> list[Text]:
        operator = self._operator
        lines = []
        for i in self._used:
            access = operator.reads[i]
            if access.role is Role.PARAMETER:
                self._names[access.tensor] = self._local.new(access.tensor, fallback="w")
                lines.append((self._names[access.tensor], code("program.weight"), self._weight(access)))
        used = {name for step in self._body.steps for name in step.operands}
        for item in self._body.constants:
            if item.name in used:
                self._names[item.name] = self._local.new(item.name, fallback="w")
                shape = code("[{}]", [self._variables[dim] for dim in item.dims])
                arguments = [code("mesh"), code("{}", f"{operator.name}/{item.name}"), shape]
                lines.append((self._names[item.name], code("program.constant"), arguments))
        return together(lines)

    def _weight(self, access: Access) -> list[Text]:
        """Return the arguments that declare a weight; layers that share it name the first of them, if it is trained."""
        operator = self._operator
        dims = [d.name for d in tensor_dims(operator, access) if isinstance(d, PlainDim)]
        name, values = f"{operator.name}/{access.tensor}", list[Text]()
        if self._trains:
            order = shared_order(self._plan.graph, operator, access)
            if len(order) == len(dims):
                dims = [dims[order.index(i)] for i in range(len(order))]
            graph = self._plan.graph
            name = weight_name(graph, operator, access) if is_imported(graph) else parameter_name(operator, access)
            mean, deviation = initial_moments(operator, access)
            values = [code("{}", deviation)] if deviation else [code("mean={}", mean)] if mean else []
        return [code("mesh"), code("{}", name), code("[{}]", [self._variables[dim] for dim in dims]), *values]

    def _bytes(self, reads: list[int]) -> str:
        edges = [self._plan.graph.incoming.get((self._layer.name, i)) for i in reads]
        try:
            moved = [edge_bytes(self._plan, edge) for edge in edges if edge is not None]
        except PaseError:
            return ""
        if not moved:
            return ""
        forward, backward = (sum(column) for column in zip(*moved, strict=True))
        if self._trains:
            return f"{forward} B forward + {backward} B backward" if forward or backward else "nothing moves"
        return f"{forward} B" if forward else "nothing moves"


def _taken_apart(body: Body) -> tuple[tuple[Step, ...], Body]:
    """Return functions that are applied before a tensor is laid out for its windows, and the other steps."""
    place = next((i for i, step in enumerate(body.steps) if step.function in WINDOWED), 0)
    before = body.steps[:place]
    if not before or not is_before_layout(before, "x"):
        return (), body
    laid = body.steps[place]
    laid = replace(laid, operands=tuple("x" if operand == before[-1].result else operand for operand in laid.operands))
    return before, replace(body, steps=(laid, *body.steps[place + 1 :]))


def _written_dims(operator: Operator) -> tuple[str, ...]:
    """Return the iteration dims of what a layer writes first, in order."""
    found: list[str] = []
    for axis in operator.writes[0].index_map:
        found += [axis] if isinstance(axis, str) else list(axis) if isinstance(axis, tuple) else []
    return tuple(found)
