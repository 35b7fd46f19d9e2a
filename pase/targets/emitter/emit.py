"""`emit`, `emit_forward`: the source of a Mesh-TensorFlow program for a plan, one block for each layer."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from pase.common.names import short
from pase.errors import EmitError, GraphError
from pase.graph import Edge, Operator, Role, SliceOf, verify_operator
from pase.graph.body import Body, elementary
from pase.planning.plan import LayerPlan, Plan
from pase.targets.emitter.block import LOCALS, WINDOWS, Block
from pase.targets.emitter.steps import KERNELS
from pase.targets.emitter.text import (
    INDENT,
    WIDTH,
    Identifiers,
    Text,
    call,
    code,
    docstring,
    joined,
    printable,
    word,
)
from pase.targets.training.data import data_inputs

LAYERS = (
    "GATES",
    "arrange",
    "attention",
    "concat",
    "convolve",
    "convolve_transposed",
    "cut",
    "dims",
    "dropout",
    "end_to_end",
    "fan_out",
    "fn",
    "greatest",
    "last_state",
    "least",
    "log_softmax",
    "lookup",
    "lstm",
    "mean",
    "normalise",
    "padded",
    "pick",
    "piece",
    "pool",
    "product",
    "recurrent",
    "reshard",
    "select_rows",
    "softmax",
    "softmax_loss",
    "total",
    "view",
    "window",
    "without_later_keys",
)
"""What a program may import from `pase.targets.mesh_tensorflow.runtime.layers`."""

_WORDS = ("Outputs", "Program", "build", "main", "mesh", "mtf", "outputs", "program", *WINDOWS, *LAYERS)


def emit(plan: Plan) -> str:
    """Return a Python script that trains the plan's network with the plan's strategy, one block for each layer.

    Layers that do not lead to the loss are left out. Raises EmitError for a network without one loss, a layer that does
    not tell how it is computed, and a split that does not divide its dim.
    """
    bodies = _bodies(plan, trains=True)
    ends = [plan.graph.loss_layer]
    body = list(_body(plan, bodies, _checked(plan, bodies, ends, trains=True), ends, trains=True))
    title = f"{printable(plan.graph.name, 50)} on {plan.num_devices} devices"
    told = [
        f"{title}: a training program for Mesh-TensorFlow.",
        *_told_of(plan),
        "replicas. Edit the axes of a mesh and run again: the losses stay the same. Bytes are those of a float32 step.",
        "",
        "    python FILE --steps 10 [--data batches.npz] [--dtype float64] [--learning-rate 0.01] [--json]",
    ]
    imports = [
        code("from pase.targets.mesh_tensorflow.primitives.compat import mtf"),
        *_imported_layers(body),
        code("from pase.targets.mesh_tensorflow.runtime.program import Program"),
        code("from pase.targets.mesh_tensorflow.runtime.script import main"),
    ]
    return _assembled([*docstring(told), code(""), *imports], body, plan.num_devices)


def emit_forward(plan: Plan) -> str:
    """Return a Python script that computes what the plan's model computes, one block for each layer.

    Layers that lead to no output are left out, and so are outputs of which the import could not tell how they are
    computed, as long as there is another one; the script says so. Raises EmitError where none is left, and for a
    network that was not imported.
    """
    bodies = _bodies(plan, trains=False)
    if not plan.graph.is_imported:
        raise EmitError(
            f"network {plan.graph.name!r} is a built-in one: programs of a forward pass are written for imported "
            "models; emit one that trains instead (without --forward)"
        )
    ends = _ends(plan, bodies)
    lost = _problems(plan, bodies, ends)
    kept = [name for name in ends if name not in lost] or ends
    body = list(_body(plan, bodies, _checked(plan, bodies, kept, trains=False), kept, trains=False))
    left_out = outputs_left_out(plan)
    title = f"{printable(plan.graph.name, 50)} on {plan.num_devices} devices"
    told = [
        f"{title}: its forward pass, a program for Mesh-TensorFlow.",
        *_told_of(plan, *(line for text in left_out for line in wrap(f"Its {printable(text, 400)}.", 110))),
        "replicas. Edit the axes of a mesh and run again: the outputs stay the same. Bytes are those of float32.",
        "",
        "    python FILE --weights weights.npz --data inputs.npz --output outputs.npz [--json]",
    ]
    imports = [
        code("from pase.targets.mesh_tensorflow.runtime.forward_pass import Outputs, main"),
        *_imported_layers(body),
        code("from pase.targets.mesh_tensorflow.runtime.program import Program"),
    ]
    return _assembled([*docstring(told), code(""), *imports], body, plan.num_devices)


def outputs_left_out(plan: Plan) -> tuple[str, ...]:
    """Return, in words, which outputs of the model a program of its forward pass leaves out, and why."""
    bodies = _bodies(plan, trains=False)
    lost = _problems(plan, bodies, _ends(plan, bodies))
    return tuple(
        f"output {short(output)} is left out, as layer {short(at)} cannot be written: {printable(reason, 200)}"
        for end, (at, reason) in lost.items()
        for output in ([item.name for item in bodies[end].outputs] or [end])
    )


# -- what is written


def _bodies(plan: Plan, *, trains: bool) -> dict[str, Body]:
    """Return what each layer computes; EmitError for one that does not tell it."""
    found: dict[str, Body] = {}
    # A forward pass drops nothing.
    kernels = KERNELS if trains else KERNELS - {"dropout"}
    for operator in plan.graph.operators:
        if operator.body is None:
            raise EmitError(
                f"layer {operator.name!r} is a {operator.kind!r} that does not say how it is computed; give the "
                "operator a body, or search the model again where the plan is an older version's"
            )
        try:
            verify_operator(operator)
        except GraphError as error:
            raise EmitError(str(error)) from None
        found[operator.name] = elementary(operator.body, trains=trains, kernels=kernels)
    return found


def _checked(plan: Plan, bodies: Mapping[str, Body], ends: Sequence[str], *, trains: bool) -> set[str]:
    """Return the layers that lead to some; EmitError for the first that cannot be written."""
    wanted = plan.graph.leading_to(ends)
    for name in sorted(wanted, key=plan.index.__getitem__):
        operator, body = plan.graph[name], bodies[name]
        untrained = body.untrained if trains else ""
        if body.problem or untrained or not body.steps:
            raise EmitError(
                f"layer {name!r} ({operator.kind}) cannot be written as a program: "
                f"{body.problem or untrained or 'it has no steps'}; replace it in the model, or use the plan without "
                "a program"
            )
        _check_splits(plan[name], operator)
    return wanted


def _check_splits(layer: LayerPlan, operator: Operator) -> None:
    """Raise EmitError where a layer's splits are none that a program can have."""
    for dim, parts in layer.splits.items():
        extent = operator.extents.get(dim, 0)
        if not extent or extent % parts or (parts != 1 and dim in operator.unsplittable):
            raise EmitError(
                f"layer {layer.name!r} splits {dim} = {extent} in {parts} parts; a program needs splits that divide "
                f"their dims (of {', '.join(d for d in operator.extents if d not in operator.unsplittable)})"
            )


def _ends(plan: Plan, bodies: Mapping[str, Body]) -> list[str]:
    """Return the layers that the model returns; those that nobody reads where it is not told which these are."""
    returned = [name for name, body in bodies.items() if body.outputs]
    read = {edge.producer for edge in plan.graph.edges}
    return returned or [operator.name for operator in plan.graph.operators if operator.name not in read]


def _problems(plan: Plan, bodies: Mapping[str, Body], ends: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the ends that cannot be computed, with the first layer that they need and that is the reason."""
    found: dict[str, tuple[str, str]] = {}
    for end in ends:
        needed = sorted(plan.graph.leading_to([end]), key=plan.index.__getitem__)
        first = next((name for name in needed if bodies[name].problem), None)
        if first is not None:
            found[end] = first, bodies[first].problem
    return found


# -- the text


def _told_of(plan: Plan, *told: str) -> list[str]:
    """Return the middle of a program's docstring: how the network was made, other lines, how to read the program."""
    arguments = ", ".join(f"{name}={value}" for name, value in plan.graph.arguments)
    made = "imported" if plan.graph.is_imported else "built"
    return [
        "",
        *([f"The network was {made} with {printable(arguments, 90)}.", ""] if arguments else []),
        *told,
        *([""] if told else []),
        "A block is a layer: its dims, its mesh, what it reads, what it computes. The axes of a mesh are the dims that",
        "are split, with their numbers of parts; the parts go to the devices row-major, and devices left over hold",
    ]


def _imported_layers(body: Sequence[Text]) -> list[Text]:
    """Return the import of the layers that a program's body uses."""
    used = {node.id for node in ast.walk(ast.parse(joined(body))) if isinstance(node, ast.Name)}
    names = [word(name, LAYERS) for name in LAYERS if name in used]
    line = code("from pase.targets.mesh_tensorflow.runtime.layers import {}", names)
    if len(line) <= WIDTH:
        return [line]
    head = code("from pase.targets.mesh_tensorflow.runtime.layers import (")
    return [head, *(code("{}{},", INDENT, name) for name in names), code(")")]


def _assembled(head: Sequence[Text], body: Sequence[Text], num_devices: int) -> str:
    """Return the source of a program, which is checked to be Python's."""
    apart = (code(""), code(""))
    foot = [code('if __name__ == "__main__":'), code("{}main(build, num_devices={})", INDENT, num_devices), code("")]
    source = str(joined([*head, *apart, *body, *apart, *foot]))
    compile(source, "<emitted>", "exec", dont_inherit=True)
    return source


def _body(
    plan: Plan, bodies: Mapping[str, Body], wanted: set[str], ends: Sequence[str], *, trains: bool
) -> Iterator[Text]:
    """Yield the lines of the function that declares the layers."""
    returned, told = (code("mtf.Tensor"), code("the loss")) if trains else (code("Outputs"), code("its outputs"))
    yield code("def build(program: Program) -> {}:", returned)
    yield code('{}"""Declare the layers in order and return {}."""', INDENT, told)
    graph = plan.graph
    identifiers = Identifiers(_WORDS)
    iterated = {dim.name for operator in graph.operators for dim in operator.dims}
    dim_names = sorted(iterated | {dim.name for name in wanted for dim in bodies[name].inner})
    variables = {name: identifiers.new(name, fallback="dim") for name in dim_names}
    for name in LOCALS:
        identifiers.new(name)
    fed, lines = _inputs(plan, wanted, identifiers)
    yield from lines
    results: dict[str, Text] = {}
    outputs: list[tuple[str, Text, tuple[int, ...]]] = []
    for layer in plan.layers:
        if layer.name not in wanted:
            continue
        is_end = layer.name in ends
        results[layer.name] = code("") if trains and is_end else identifiers.new(layer.name)
        taken = {*variables.values(), *fed.values(), *results.values(), *(name for _, name, _ in outputs)}
        sources = {
            i: fed[layer.name, i]
            if (layer.name, i) in fed
            else _made(plan, bodies, graph.incoming[layer.name, i], results)
            for i, access in enumerate(graph[layer.name].reads)
            if access.role is not Role.PARAMETER and ((layer.name, i) in fed or (layer.name, i) in graph.incoming)
        }
        block = Block(
            plan=plan,
            layer=layer,
            body=bodies[layer.name],
            variables=variables,
            sources=sources,
            result=results[layer.name],
            reserved=frozenset({*taken, *_WORDS}),
            trains=trains,
        )
        yield code("")
        yield from block.lines()
        if is_end and not trains:
            for name, variable, shape, extra in block.returned(identifiers):
                yield from extra
                outputs.append((name, variable, shape))
    if trains:
        return
    yield code("")
    items = [code("{}: ({}, {})", name, variable, _tuple(shape)) for name, variable, shape in outputs]
    line = code("{}return {{}}", INDENT, items)
    if len(line) <= WIDTH:
        yield line
        return
    yield code("{}return {", INDENT)
    yield from (code("{}{}{},", INDENT, INDENT, item) for item in items)
    yield code("{}}", INDENT)


def _tuple(shape: tuple[int, ...]) -> Text:
    return code("({},)" if len(shape) == 1 else "({})", shape)


def _inputs(plan: Plan, wanted: set[str], identifiers: Identifiers) -> tuple[dict[tuple[str, int], Text], list[Text]]:
    """Return the variable of each read that inputs of the program feed, and the lines that declare these."""
    fed: dict[tuple[str, int], Text] = {}
    declared: dict[str, Text] = {}
    lines: list[Text] = []
    for (layer, read), item in data_inputs(plan.graph, wanted).items():
        if item.name not in declared:
            declared[item.name] = identifiers.new(item.name, fallback="input")
            head = code("{} = program.indices" if item.below else "{} = program.floats", declared[item.name])
            below = [code("below={}", item.below)] if item.below else []
            lines += call(head, [code("{}", item.name), code("[{}]", item.shape), *below])
        fed[layer, read] = declared[item.name]
    return fed, lines


def _made(plan: Plan, bodies: Mapping[str, Body], edge: Edge, results: Mapping[str, Text]) -> Text:
    """Return what a producer wrote: the first of it, what recurrent layers hold in the end, or a piece of these."""
    producer = plan.graph[edge.producer]
    name = results[edge.producer]
    write, number = producer.writes[edge.output], producer.wholes.get(edge.output, edge.output)
    parts = [axis for axis in write.index_map if isinstance(axis, SliceOf)]
    whole = producer.writes[number]
    is_state = number > 0 and bodies[edge.producer].steps[-1].function == "recurrent"
    is_piece = len(parts) == 1 and parts[0].dim in whole.index_map
    if (number and not is_state) or (number != edge.output and not is_piece):
        raise EmitError(
            f"layer {edge.consumer!r} reads output {edge.output} of layer {edge.producer!r}, which programs cannot "
            "tell apart from the first yet"
        )
    made = code("last_state({}, {})", name, number) if number else name
    if number == edge.output:
        return made
    return code("piece({}, {}, {}, {})", made, parts[0].dim, parts[0].offset, parts[0].extent)
