"""`emit`: the source of a Mesh-TensorFlow training program for a plan."""

from collections.abc import Iterator

from pase.errors import EmitError, ProgramError
from pase.graph import Access, Operator, Role
from pase.graph.body import elementary
from pase.graph.loss import is_imported, leading_to
from pase.planning.plan import LayerPlan, Plan
from pase.sharding.edges import edge_bytes
from pase.sharding.held import parameter_name
from pase.sharding.layouts import WHOLE, PlainDim, WindowDim, tensor_dims
from pase.targets.mesh_tensorflow.emitter.block import (
    WINDOWS,
    block_dims,
    block_mesh,
    commented,
    declared_windows,
    window_variables,
)
from pase.targets.mesh_tensorflow.emitter.forward import LAYERS, BodyBlock, check_body, emit_training
from pase.targets.mesh_tensorflow.emitter.kinds import KINDS, Block
from pase.targets.mesh_tensorflow.emitter.program import assembled, check_splits, training_head
from pase.targets.mesh_tensorflow.emitter.text import (
    INDENT,
    WIDTH,
    Identifiers,
    Text,
    call,
    code,
    together,
    with_comment,
)
from pase.targets.mesh_tensorflow.runtime.data import data_inputs
from pase.targets.mesh_tensorflow.runtime.initial import initial_deviation, shared_order

_LAYERS = (
    "GATES",
    "attention",
    "batch_norm",
    "concat",
    "conv1d",
    "conv2d",
    "conv3d",
    "dims",
    "dropout",
    "embedding",
    "fan_out",
    "gelu",
    "global_pool",
    "layer_norm",
    "lstm",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mean_pool1d",
    "mean_pool2d",
    "mean_pool3d",
    "relu",
    "reshard",
    "sigmoid",
    "softmax_loss",
    "tanh",
    "window",
)
"""What an emitted program may import from `pase.targets.mesh_tensorflow.runtime.layers`."""

_OF_BODIES = tuple(name for name in LAYERS if name not in _LAYERS)
"""What it may import besides, for layers that say themselves what they compute."""

_WORDS = ("Program", "build", "loss", "main", "mesh", "mtf", "program", *WINDOWS, *_LAYERS)
_LOCALS = (
    "x",
    "weights",
    "filters",
    "bias",
    "table",
    "parameter",
    "scale",
    "shift",
    "queries",
    "keys",
    "values",
    "targets",
)


def emit(plan: Plan) -> str:
    """Return a Python script that trains the plan's network with the plan's strategy, one block for each layer.

    Layers that do not lead to the loss are left out. Raises EmitError for a layer of a kind that cannot be written
    yet, a split that does not divide its dim, and a network without one loss.
    """
    if is_imported(plan.graph):
        return emit_training(plan)
    wanted = _leading_to_loss(plan)
    for layer in plan.layers:
        if layer.name in wanted:
            _check(plan, layer)
    body = list(_body(plan, wanted))
    layers: dict[Text, tuple[str, ...]] = {code("pase.targets.mesh_tensorflow.runtime.layers"): _LAYERS}
    if any(_is_told(plan.graph[name]) for name in wanted):
        layers[code("pase.targets.mesh_tensorflow.runtime.layers.forward")] = _OF_BODIES
    return assembled(training_head(plan, body, layers), body, plan.num_devices)


def _is_told(operator: Operator) -> bool:
    """Return whether an operator is of no kind of ours, and says itself what it computes."""
    return operator.kind not in KINDS and operator.body is not None


def _leading_to_loss(plan: Plan) -> set[str]:
    losses = [o.name for o in plan.graph.operators if o.kind in KINDS and KINDS[o.kind].is_loss]
    unknown = [o for o in plan.graph.operators if o.kind not in KINDS and not _is_told(o)]
    if unknown:
        operator = unknown[0]
        raise EmitError(
            f"layer {operator.name!r} is a {operator.kind!r}, which cannot be written as a program yet; "
            f"kinds that can are {', '.join(sorted(KINDS))}, and any whose operators have a body"
        )
    if len(losses) != 1:
        raise EmitError(
            f"network {plan.graph.name!r} has {len(losses)} losses; a training program needs exactly one "
            "(a softmax_loss layer)"
        )
    return leading_to(plan.graph, losses)


def _check(plan: Plan, layer: LayerPlan) -> None:
    operator = plan.graph[layer.name]
    if operator.body is not None and _is_told(operator):
        check_body(layer, operator, operator.body)
        return
    problem = KINDS[operator.kind].why_not(operator)
    if problem:
        raise EmitError(f"layer {layer.name!r} ({operator.kind}) cannot be written as a program: {problem}")
    whole = [access.tensor for access in (*operator.reads, *operator.writes) if None in access.index_map]
    if whole and not KINDS[operator.kind].whole:
        raise EmitError(
            f"layer {layer.name!r} ({operator.kind}) cannot be written as a program: a dim of its tensor {whole[0]!r} "
            "is none of its iteration space; give it a name there"
        )
    check_splits(layer, operator)


def _body(plan: Plan, wanted: set[str]) -> Iterator[Text]:
    yield code("def build(program: Program) -> mtf.Tensor:")
    yield code('{}"""Declare the layers in order and return the loss."""', INDENT)
    graph = plan.graph
    dim_names = sorted({dim.name for operator in graph.operators for dim in operator.dims})
    words = (*_WORDS, *(_OF_BODIES if any(map(_is_told, graph.operators)) else ()))
    identifiers = Identifiers(words)
    dim_variables = {name: identifiers.new(name, fallback="dim") for name in dim_names}
    for word in _LOCALS:
        identifiers.new(word)
    inputs = {key: item for key, item in data_inputs(graph).items() if key[0] in wanted}
    tensors: dict[tuple[str, int], Text] = {}
    for key, item in inputs.items():
        tensors[key] = identifiers.new(item.name, fallback="input")
        declare = code("{} = program.indices" if item.below else "{} = program.floats", tensors[key])
        below = [code("below={}", item.below)] if item.below else []
        yield from call(declare, [code("{}", item.name), code("[{}]", item.shape), *below])
    results: dict[str, Text] = {}
    for layer in plan.layers:
        if layer.name not in wanted:
            continue
        operator = graph[layer.name]
        kind = KINDS.get(operator.kind)
        results[layer.name] = code("loss") if kind and kind.is_loss else identifiers.new(layer.name)
        sources = {
            i: tensors[layer.name, i] if (layer.name, i) in tensors else results[graph.incoming[layer.name, i].producer]
            for i, access in enumerate(operator.reads)
            if access.role is not Role.PARAMETER
        }
        taken = {*dim_variables.values(), *tensors.values(), *results.values()}
        yield code("")
        if operator.body is not None and _is_told(operator):
            body = elementary(operator.body, trains=True)
            yield from BodyBlock(
                plan, layer, body, dim_variables, sources, results[layer.name], taken, trains=True
            ).lines()
        else:
            yield from _layer(plan, layer, dim_variables, sources, results[layer.name], taken)


def _layer(
    plan: Plan,
    layer: LayerPlan,
    dim_variables: dict[str, Text],
    sources: dict[int, Text],
    result: Text,
    taken: set[Text],
) -> Iterator[Text]:
    """Write one block. sources: variable of each input's tensor. taken: variables that must keep their values."""
    operator = plan.graph[layer.name]
    kind = KINDS[operator.kind]
    own = dict(kind.variables)
    dim_variables = {**dim_variables, WHOLE: kind.whole}
    local = Identifiers({*taken, *_WORDS})
    names = [local.new(own.get(access.tensor, access.tensor), fallback="x") for access in operator.reads]
    yield commented(layer, kind.formula(operator))
    yield from block_dims(operator, dim_variables)
    yield from block_mesh(plan, layer)
    found = [dim for access in operator.reads for dim in _dims_of(operator, access) if isinstance(dim, WindowDim)]
    windows = window_variables(found)
    yield from declared_windows(windows, dim_variables)
    if not kind.joins:
        for i, source in sources.items():
            dims = [
                windows[dim] if isinstance(dim, WindowDim) else dim_variables[dim.name]
                for dim in _dims_of(operator, operator.reads[i])
            ]
            arguments = [source, code("mesh"), code("[{}]", dims)]
            if kind.fill(operator):
                arguments.append(code("fill={}", kind.fill(operator)))
            yield from with_comment(call(code("{} = reshard", names[i]), arguments), _bytes(plan, layer.name, [i]))
    yield from together(
        [
            (names[i], code("program.weight"), _weight(plan, operator, i, dim_variables))
            for i, access in enumerate(operator.reads)
            if access.role is Role.PARAMETER
        ]
    )
    reads = tuple(sources[i] if kind.joins and i in sources else name for i, name in enumerate(names))
    block = Block(operator=operator, dims=dim_variables, reads=reads, windows=tuple(windows.values()))
    head = code("{}return ", INDENT) if kind.is_loss else code("{}{} = ", INDENT, result)
    line = [code("{}{}", head, kind.result(block))]
    if len(line[0]) > WIDTH:
        line = [code("{}(", head), code("{}{}{}", INDENT, INDENT, kind.result(block)), code("{})", INDENT)]
    yield from with_comment(line, _bytes(plan, layer.name, list(sources)) if kind.joins else "")


def _dims_of(operator: Operator, access: Access) -> tuple[PlainDim | WindowDim, ...]:
    return () if KINDS[operator.kind].joins else tensor_dims(operator, access)


def _weight(plan: Plan, operator: Operator, read: int, variables: dict[str, Text]) -> list[Text]:
    access = operator.reads[read]
    dims = [dim for dim in tensor_dims(operator, access) if isinstance(dim, PlainDim)]
    order = shared_order(plan.graph, operator, access)
    if len(dims) == len(order):
        # As the layer that declares it has them.
        dims = [dims[order.index(i)] for i in range(len(order))]
    name, shape = parameter_name(operator, access), [variables[dim.name] for dim in dims]
    deviation = initial_deviation(operator, access)
    return [code("mesh"), code("{}", name), code("[{}]", shape), *([code("{}", deviation)] if deviation else [])]


def _bytes(plan: Plan, layer: str, reads: list[int]) -> str:
    edges = [plan.graph.incoming[layer, i] for i in reads if (layer, i) in plan.graph.incoming]
    if not edges:
        return ""
    try:
        moved = [edge_bytes(plan, edge) for edge in edges]
    except ProgramError as error:
        raise EmitError(str(error)) from error
    forward, backward = (sum(column) for column in zip(*moved, strict=True))
    return f"{forward} B forward + {backward} B backward" if forward or backward else "nothing moves"
