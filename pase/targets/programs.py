"""`emit`: the source of a program for a plan, one block for each layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from textwrap import wrap
from types import MappingProxyType

from pase.common.words import short
from pase.errors import EmitError, GraphError, unknown_name
from pase.graph import Edge, Graph, Operator, Role, SliceOf, verify_operator
from pase.graph.body import Body, Borrowed, elementary
from pase.graph.precision import FLOAT32
from pase.planning.plan import LayerPlan, Plan, check_plain
from pase.planning.stages import check_stages, group_devices, stage_layers
from pase.targets.emitter.block import LOCALS, WINDOWS, Block
from pase.targets.emitter.statements import RETURN, Call, Function, Statement, Value, names_in, nonzero
from pase.targets.emitter.target import LAYERS, Form, Target
from pase.targets.emitter.text import INDENT, WIDTH, Identifiers, Text, code, docstring, joined, printable, word
from pase.targets.mesh_tensorflow import MESH_TENSORFLOW
from pase.targets.torch import TORCH
from pase.targets.training.data import data_inputs

TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in (MESH_TENSORFLOW, TORCH)})
"""Targets by name."""

_WORDS = ("build", "main", "mesh", "outputs", "program", *WINDOWS)


def default_target(plan: Plan) -> str:
    """Return the default target of a plan: PyTorch for an imported model, else Mesh-TensorFlow."""
    return TORCH.name if plan.graph.is_imported or plan.graph.framework else MESH_TENSORFLOW.name


Aten = Mapping[str, tuple[str, tuple[int, ...], tuple[str, ...]]]
"""Layers that nodes of a module's own graph compute: for each the layer on whose mesh it is, the numbers of that
layer's reads that it reads, and additional layers that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgram:
    """A program of a plan.

    Attributes:
        functions: Functions that declare its layers: `build`, or one function for each stage.
        text: Returns the source of its file.
    """

    functions: tuple[Function, ...]
    text: Callable[[], str]


def emit(plan: Plan, *, target: str | Target | None = None) -> str:
    """Return a Python script that trains the plan's network with the plan's strategy, one block for each layer.

    For Mesh-TensorFlow, layers that do not lead to the loss are omitted. For PyTorch, the other outputs of the model
    are returned with the loss, or by themselves if there is no loss. Each stage of a pipeline is a function, and the
    last one returns the loss.

    Args:
        plan: The plan.
        target: A target, or a name of `TARGETS`; default: PyTorch for an imported model, else Mesh-TensorFlow.

    Raises:
        EmitError: Nothing of the network can be returned, the computation of a layer is unknown, the target lacks a
            layer, a split does not divide its dim, the program would not train the model as it trains itself, or the
            model is imported and the target takes only built networks.
        PlanError: The target does not support micro-batches, stages or layer modes.
    """
    return plan_program(plan, target=target).text()


def plan_program(
    plan: Plan,
    *,
    target: str | Target | None = None,
    aten: Aten | None = None,
    updated: Sequence[str] | None = None,
) -> PlanProgram:
    """Return the program whose text `emit` returns, or that of a module.

    Args:
        plan: The plan.
        target: See `emit`.
        aten: Layers that nodes of the module's own exported graph compute before each step from its inputs (masks, for
            example); None where there is no module.
        updated: Layers from whose results the module computes its buffers after a call; None for no such buffers.

    Raises:
        EmitError: See `emit`.
        PlanError: See `emit`.
    """
    chosen = target_of(plan, target)
    _check_built(plan.graph, chosen)
    if aten is None:
        check_trained(plan.graph)
    if not chosen.takes_modes:
        check_plain(plan, f"a program for {chosen.name}")
    plan, told = _in_types_of(plan, chosen)
    bodies = _bodies(plan, chosen, has_module=aten is not None)
    aten = aten or {}
    loss = _loss(plan, chosen)
    writer = _Writer(plan=plan, target=chosen, bodies=bodies, loss=loss, told=told, aten=aten, updated=updated)
    if plan.num_stages > 1:
        assert chosen.stages is not None
        return writer.pipeline(chosen.stages)
    others = [] if chosen.with_outputs is None else [name for name in _ends(plan, bodies) if name != loss]
    lost = _problems(plan, {name: body for name, body in bodies.items() if name not in aten}, others, aten)
    outputs = [name for name in others if name not in lost]
    if loss:
        form = chosen.with_outputs if outputs and chosen.with_outputs else chosen.loss
    else:
        assert chosen.outputs is not None
        form, outputs = chosen.outputs, outputs or others
    return replace(writer, outputs=outputs, told=(*told, *_left_out(bodies, lost))).program(form)


def _check_built(graph: Graph, target: Target) -> None:
    """Raise EmitError for an imported model, if the target takes only built networks."""
    if target.takes_imported or not (graph.is_imported or graph.framework):
        return
    raise EmitError(
        f"{printable(graph.name, 100)!r} is an imported model: programs for {target.name} are written of built-in "
        "networks and of those made with Builder; use --target torch, or pase.parallelize of the PyTorch module or the "
        "JAX function"
    )


def check_trained(graph: Graph, problem: str | None = None) -> None:
    """Raise EmitError where programs would not train the model of a graph as it trains itself.

    Args:
        graph: Graph of the model.
        problem: The reason, where a newer one than that of the import is known; "" for no reason.
    """
    told = graph.untrained if problem is None else problem
    if told:
        raise EmitError(
            f"{graph.name!r} cannot be trained under a plan: {printable(told, 500)}; replace that in the model, or use "
            "the plan without a program"
        )


def target_of(plan: Plan, target: str | Target | None) -> Target:
    """Return a target, given itself or its name, by default that of the plan; EmitError for an unknown name."""
    if isinstance(target, Target):
        return target
    chosen = default_target(plan) if target is None else target
    if chosen not in TARGETS:
        raise EmitError(unknown_name("target", chosen, TARGETS))
    return TARGETS[chosen]


def _in_types_of(plan: Plan, target: Target) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan with the number types that its program computes in, and notes where they differ from the plan's.

    Raises EmitError for types that no program computes in.
    """
    own = plan.precision
    if own == FLOAT32 or not target.takes_types:
        told = f"numbers are float32 (--dtype float64: float64), not in the types of the plan, {own.name}"
        return replace(plan, graph=plan.graph.in_precision(FLOAT32)), () if own == FLOAT32 else (told,)
    kept = {own.parameters, own.gradients, own.collectives, own.moments, own.masters or own.parameters}
    if "float8" in (*own.multiplied, *kept) or len(kept) > 1:
        raise EmitError(
            f"programs for {target.name} do not compute in the types of the plan, {own.text}: products are in bfloat16 "
            "or float16, and weights, gradients, sums and the optimiser in one type; search with --precision bf16-mixed"
        )
    return plan, ()


def _left_out(bodies: Mapping[str, Body], lost: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    return tuple(
        f"output {short(output)} is left out, as layer {short(at)} cannot be written: {printable(reason, 200)}"
        for end, (at, reason) in lost.items()
        for output in ([item.name for item in bodies[end].outputs] or [end])
    )


# -- checks


def _loss(plan: Plan, target: Target) -> str:
    """Return the layer that computes the loss; "" where there is none and the target's programs return outputs."""
    try:
        return plan.graph.loss_layer
    except EmitError:
        if target.with_outputs is None or not plan.graph.is_imported:
            raise
        return ""


def _bodies(plan: Plan, target: Target, *, has_module: bool) -> dict[str, Body]:
    """Return the body of each layer; EmitError for a layer whose computation is unknown.

    Without the module, a layer whose own body reads tensors that the module computes from its inputs uses the body for
    all targets.
    """
    return {operator.name: _body(operator, target, has_module=has_module) for operator in plan.graph.operators}


def _body(operator: Operator, target: Target, *, has_module: bool) -> Body:
    if operator.body is None:
        raise EmitError(
            f"layer {operator.name!r} is a {operator.kind!r} that does not say how it is computed; give the "
            "operator a body, or search the model again where the plan is an older version's"
        )
    try:
        verify_operator(operator)
    except GraphError as error:
        raise EmitError(str(error)) from None
    body, own = operator.body, operator.body.own
    if own is not None and not has_module and any(constant.is_given for constant in own.constants):
        body = replace(body, own=None)
    return elementary(body, trains=True, kernels=target.kernels)


def trains_as_written(graph: Graph, layer: str, target: str) -> bool:
    """Return whether a program that has its module available can be written for a layer and trains it."""

    def body_of(name: str) -> Body:
        return _body(graph[name], TARGETS[target], has_module=True)

    try:
        body = body_of(layer)
        edges = [graph.incoming.get((layer, i)) for i in range(len(graph[layer].reads))]
        are_told = [_is_nameable(graph[edge.producer], body_of(edge.producer), edge.output) for edge in edges if edge]
    except EmitError:
        return False
    return _problem(body) == "" and all(are_told)


def _problem(body: Body) -> str:
    """Return why no program can be written for a body, "" if one can."""
    return body.problem or body.untrained or ("" if body.steps else "it has no steps")


def _checked(
    plan: Plan,
    target: Target,
    bodies: Mapping[str, Body],
    ends: Sequence[str],
    aten: Aten,
) -> set[str]:
    """Return the layers that lead to some layers; EmitError for the first that cannot be written.

    Args:
        plan: The plan.
        target: The target.
        bodies: Body of each layer.
        ends: The layers to reach.
        aten: Layers that are not written from their bodies.
    """
    wanted = plan.graph.leading_to(ends, aten)
    for name in sorted(wanted, key=plan.index.__getitem__):
        operator, problem = plan.graph[name], _problem(bodies[name])
        if name not in aten and problem:
            raise EmitError(
                f"layer {name!r} ({operator.kind}) cannot be written as a program: {problem}; replace it in the "
                "model, or use the plan without a program"
            )
        if not target.takes_imported and bodies[name].constants:
            raise EmitError(
                f"layer {name!r} ({operator.kind}) computes with constants, which programs for {target.name} do not "
                "have; use --target torch"
            )
        _check_splits(plan[name], operator, target)
    return wanted


def _check_splits(layer: LayerPlan, operator: Operator, target: Target) -> None:
    """Raise EmitError where a layer's splits are not possible in a program."""
    for dim, parts in layer.splits.items():
        extent = operator.extents.get(dim, 0)
        is_possible = parts <= extent if target.takes_uneven_parts else extent > 0 and not extent % parts
        if not is_possible or (parts != 1 and dim in operator.unsplittable):
            needed = "leave a point to each part" if target.takes_uneven_parts else "divide their dims"
            raise EmitError(
                f"layer {layer.name!r} splits {dim} = {extent} in {parts} parts; a program for {target.name} needs "
                f"splits that {needed} (of {', '.join(d for d in operator.extents if d not in operator.unsplittable)})"
            )


def _ends(plan: Plan, bodies: Mapping[str, Body]) -> list[str]:
    """Return the layers whose outputs the model returns; layers without consumers where that is unknown."""
    returned = [name for name, body in bodies.items() if body.outputs]
    read = {edge.producer for edge in plan.graph.edges}
    return returned or [operator.name for operator in plan.graph.operators if operator.name not in read]


def _problems(
    plan: Plan, bodies: Mapping[str, Body], ends: Sequence[str], aten: Aten = MappingProxyType({})
) -> dict[str, tuple[str, str]]:
    """Return the ends that cannot be computed, with the first layer that they need and that cannot, and the reason."""
    found: dict[str, tuple[str, str]] = {}
    for end in ends:
        needed = sorted(plan.graph.leading_to([end], aten), key=plan.index.__getitem__)
        first = next((name for name in needed if name in bodies and bodies[name].problem), None)
        if first is not None:
            found[end] = first, bodies[first].problem
    return found


# -- the text


_HOW_TO_READ = (
    "A block is a layer: its dims, its mesh, what it reads, what it computes. The axes of a mesh are the dims that",
    "are split, with their numbers of parts; the parts go to the devices row-major, and devices left over hold",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Writes the program of a plan.

    Attributes:
        bodies: Bodies of all layers.
        loss: Layer that computes the loss, "" for none.
        outputs: Layers whose results are returned with the loss or alone.
        told: Notes for the program's docstring.
    """

    plan: Plan
    target: Target
    bodies: Mapping[str, Body]
    loss: str
    outputs: Sequence[str] = ()
    told: Sequence[str] = ()
    aten: Aten = field(default_factory=dict)
    updated: Sequence[str] | None = None

    def program(self, form: Form) -> PlanProgram:
        """Return a program that returns the loss, outputs, or both."""
        loss, outputs, plan = self.loss, self.outputs, self.plan
        ends = [*([loss] if loss else []), *outputs, *(self.updated or ())]
        wanted = _checked(plan, self.target, self.bodies, ends, self.aten)
        returned = (
            code("the loss and its outputs") if loss and outputs else code("the loss") if loss else code("its outputs")
        )
        build = Function(
            name=code("build"),
            parameters=(),
            returned=form.returned,
            about=code("Declare the layers in order and return {}.", returned),
            body=tuple(self._body(wanted, Identifiers(_reserved(self.target)), plan.layers)),
        )
        count = plan.micro_batches if plan.micro_batches > 1 else 0
        options = nonzero(num_devices=plan.num_devices, micro_batches=count)
        main = Statement(None, Call(code("main"), [build.name], options))
        return PlanProgram(functions=(build,), text=partial(self._source, form, (build,), [main]))

    def pipeline(self, form: Form) -> PlanProgram:
        """Return a program whose stages are functions: each takes the result of the one before it."""
        plan = self.plan
        check_stages(plan)
        last = plan.num_stages - 1
        if not self.loss or plan[self.loss].stage != last:
            where = f"its loss in stage {plan[self.loss].stage} of 0 to {last}" if self.loss else "no loss"
            raise EmitError(f"a pipeline ends with the loss, and the plan has {where}; search without stages")
        wanted = _checked(plan, self.target, self.bodies, [self.loss], self.aten)
        stages = tuple(self._stage(number, wanted) for number in range(plan.num_stages))
        names = tuple(stage.name for stage in stages)
        steps: dict[str, Value] = {
            "schedule": plan.schedule,
            "micro_batches": plan.micro_batches,
            "num_groups": plan.num_groups,
        }
        main = [
            Statement(code("stages"), Call(code("Pipeline"), [names], steps)),
            Statement(None, Call(code("main"), [code("stages")], {"num_devices": plan.num_devices})),
        ]
        order = (
            f"step has {plan.micro_batches} micro-batches, which go through {plan.num_stages} stages in the order of "
            f"{plan.schedule!r}; devices are counted from the first of a stage's own"
        )
        writer = replace(self, told=[*self.told, order])
        return PlanProgram(functions=stages, text=partial(writer._source, form, stages, main))

    def _stage(self, number: int, wanted: set[str]) -> Function:
        """Return the function of a stage, by its number; `wanted` are the layers that lead to the loss."""
        plan = self.plan
        layers = stage_layers(plan, number)
        received, sent = _crossing(plan, number, wanted), _crossing(plan, number + 1, wanted)
        identifiers = Identifiers(_reserved(self.target))
        given = {(e.consumer, e.input): identifiers.new(e.producer, fallback="received") for e in received}
        own = group_devices(plan, number)
        devices = code("device {}" if len(own) == 1 else "devices {} to {}", *sorted({own[0], own[-1]}))
        is_last = number == plan.num_stages - 1
        returned = code("the loss") if is_last else code("what stage {} reads", number + 1)
        names = wanted & {layer.name for layer in layers}
        return Function(
            name=code("stage_{}", number),
            parameters=tuple(given.values()),
            returned=code("Tensor"),
            about=code("Declare the layers of stage {}, on {}, and return {}.", number, devices, returned),
            body=tuple(self._body(names, identifiers, layers, given=given, sent=sent)),
        )

    def _source(self, form: Form, functions: Sequence[Function], main: Sequence[Statement]) -> str:
        """Return a file: its docstring, imports, functions that declare the layers, and the call of `main`."""
        plan = self.plan
        arguments = ", ".join(f"{name}={value}" for name, value in plan.graph.arguments)
        made = "imported" if plan.graph.is_imported else "built"
        types = plan.precision.name
        of = f"a {types} {'step' if plan.num_groups == 1 else 'micro-batch'}"
        same = "losses" if self.loss else "outputs"
        lines = [line for text in self.told for line in wrap(f"Its {printable(text, 400)}.", 110)]
        head = docstring(
            [
                f"{printable(plan.graph.name, 50)} on {plan.num_devices} devices: {form.title}.",
                "",
                *([f"The network was {made} with {printable(arguments, 90)}.", ""] if arguments else []),
                *lines,
                *([""] if lines else []),
                *_HOW_TO_READ,
                f"replicas. Edit the axes of a mesh and run again: the {same} stay the same. Bytes are those of {of}.",
                "",
                *form.usage(plan.num_devices),
            ]
        )
        apart = (code(""), code(""))
        imports = [*form.before, *_imported_layers(functions, self.target), *form.after]
        body = [line for function in functions for line in (*apart, *function.lines())]
        foot = [code('if __name__ == "__main__":'), *(line for each in main for line in each.lines()), code("")]
        return str(joined([*head, code(""), *imports, *body, *apart, *foot]))

    def _body(
        self,
        wanted: set[str],
        identifiers: Identifiers,
        layers: Sequence[LayerPlan],
        *,
        given: Mapping[tuple[str, int], Text] = MappingProxyType({}),
        sent: Sequence[Edge] = (),
    ) -> Iterator[Statement | Text]:
        """Yield the body of a function that declares layers.

        Args:
            wanted: Layers to declare.
            identifiers: Identifiers of the function, including its parameters.
            layers: All layers.
            given: Variables of reads that parameters feed, by (layer, input).
            sent: The edge whose tensor it returns, if it does not compute the loss.
        """
        plan, bodies, outputs = self.plan, self.bodies, self.outputs
        graph, types = plan.graph, plan.precision
        if types != FLOAT32:
            own = {"weights": types.parameters, "products": types.results}
            yield Statement(None, Call(code("program.types"), [], own))
        words, lacking = _reserved(self.target), frozenset(LAYERS) - {*self.target.layers}
        iterated = {dim.name for operator in graph.operators for dim in operator.dims}
        dim_names = sorted(iterated | {dim.name for name in wanted for dim in bodies[name].inner})
        variables = {name: identifiers.new(name, fallback="dim") for name in dim_names}
        for name in LOCALS:
            identifiers.new(name)
        firsts = {own[0] for name, own in self.aten.items() if name in wanted}
        fed, inputs = _inputs(plan, wanted | firsts, identifiers)
        fed |= given
        yield from inputs
        results: dict[str, Text] = {}
        returned: dict[str, tuple[Text, tuple[int, ...]]] = {}
        # Further outputs of layers: (layer, number of the write).
        written: dict[tuple[str, int], Text] = {}
        for layer in layers:
            if layer.name not in wanted:
                continue
            is_loss = layer.name == self.loss
            is_returned = is_loss and not outputs and self.updated is None
            results[layer.name] = code("") if is_returned else identifiers.new(layer.name)
            taken = {*variables.values(), *fed.values(), *results.values(), *written.values()}
            taken |= {variable for variable, _ in returned.values()}
            all_reads = tuple(range(len(graph[layer.name].reads)))
            first, numbers, additional = self.aten.get(layer.name, (layer.name, all_reads, ()))
            sources = {
                i: fed[first, i]
                if (first, i) in fed
                else _made(plan, bodies, graph.incoming[first, i], results, written)
                for i in numbers
                if graph[first].reads[i].role is not Role.PARAMETER
                if (first, i) in fed or (first, i) in graph.incoming
            }
            others = {
                i: identifiers.new(f"{layer.name}_{i}", fallback="other")
                for i, result in enumerate(bodies[layer.name].others, start=1)
                if result
            }
            written |= {(layer.name, i): name for i, name in others.items()}
            block = Block(
                plan=plan,
                layer=layer,
                body=bodies[layer.name],
                variables=variables,
                sources=sources,
                result=results[layer.name],
                reserved=frozenset({*taken, *words}),
                is_loss=is_loss,
                others=others,
                borrowed={
                    item.name: _borrowed(item, layer.name, results, written) for item in bodies[layer.name].borrowed
                },
            )
            yield code("")
            if layer.name in self.aten:
                on = next(own for own in layers if own.name == first)
                lines = [*block.aten_lines(on, {name: results[name] for name in additional})]
            else:
                lines = [*block.lines()]
            if missing := sorted(names_in(lines) & lacking):
                raise EmitError(
                    f"layer {layer.name!r} needs {', '.join(missing)}, which programs for {self.target.name} do not "
                    f"have (they have {', '.join(self.target.layers)}); choose another target, or give "
                    f"{self.target.module} what is missing"
                )
            yield from lines
            if layer.name in outputs:
                for name, variable, shape, extra in block.returned(identifiers):
                    yield from extra
                    returned[name] = variable, shape
        if self.updated is not None:
            yield code("")
            updates = {name: results[name] for name in self.updated}
            yield Statement(None, Call(code("program.update"), [updates]))
        for edge in sent:
            yield Statement(RETURN, _made(plan, bodies, edge, results, written))
        if not outputs:
            if self.updated is not None and self.loss:
                yield Statement(RETURN, results[self.loss])
            return
        yield code("")
        if self.loss:
            yield Statement(code("outputs"), returned)
            yield Statement(RETURN, (results[self.loss], code("outputs")))
        else:
            yield Statement(RETURN, returned)


def _crossing(plan: Plan, number: int, wanted: set[str]) -> list[Edge]:
    """Return the edge on which a stage receives from the one before it, if there is one; EmitError for several."""
    ends = ((plan[edge.producer].stage, plan[edge.consumer].stage, edge) for edge in plan.graph.edges)
    found = [edge for first, last, edge in ends if first < number <= last and edge.consumer in wanted]
    is_single = (
        len(found) == 1 and plan[found[0].producer].stage == number - 1 and plan[found[0].consumer].stage == number
    )
    if 0 < number < plan.num_stages and not is_single:
        names = ", ".join(f"{short(edge.producer)} → {short(edge.consumer)}" for edge in found)
        raise EmitError(
            f"stages {number - 1} and {number} of the plan have {len(found)} edges between them ({names}); expected "
            "one, from the one to the other: search again"
        )
    return found


def _reserved(target: Target) -> tuple[str, ...]:
    forms = (target.loss, *([target.outputs] if target.outputs else []))
    imports = (line for form in forms for line in (*form.before, *form.after))
    imported = (name for line in imports for name in line.replace(",", "").split())
    return (*_WORDS, *imported, *LAYERS, *target.layers)


def _imported_layers(functions: Sequence[Function], target: Target) -> list[Text]:
    """Return the import of the layers that a program's functions use."""
    used = names_in(line for function in functions for line in function.body)
    names = [word(name, target.layers) for name in target.layers if name in used]
    if not names:
        return []
    line = code("from {} import {}", target.module, names)
    if len(line) <= WIDTH:
        return [line]
    head = code("from {} import (", target.module)
    return [head, *(code("{}{},", INDENT, name) for name in names), code(")")]


def _inputs(
    plan: Plan, wanted: set[str], identifiers: Identifiers
) -> tuple[dict[tuple[str, int], Text], list[Statement]]:
    """Return the variable of each read that the program's inputs feed, and the statements that declare these."""
    fed: dict[tuple[str, int], Text] = {}
    declared: dict[str, Text] = {}
    statements: list[Statement] = []
    for (layer, read), item in data_inputs(plan.graph, wanted).items():
        if item.name not in declared:
            declared[item.name] = identifiers.new(item.name, fallback="input")
            function = code("program.indices") if item.below else code("program.floats")
            call = Call(function, [item.name, [*item.shape]], nonzero(below=item.below))
            statements.append(Statement(declared[item.name], call))
        fed[layer, read] = declared[item.name]
    return fed, statements


def _borrowed(item: Borrowed, layer: str, results: Mapping[str, Text], written: Mapping[tuple[str, int], Text]) -> Text:
    """Return the variable of another layer's output."""
    if item.output == 0 and item.layer in results and item.layer != layer:
        return results[item.layer]
    if (item.layer, item.output) not in written:
        raise EmitError(
            f"layer {layer!r} takes output {item.output} of layer {item.layer!r}, which does not stand before it"
        )
    return written[item.layer, item.output]


def _is_nameable(producer: Operator, body: Body, output: int) -> bool:
    """Return whether a program can name one of the tensors that a layer writes."""
    number = producer.wholes.get(output, output)
    is_other = number > 0 and any(body.others[number - 1 : number])
    is_state = number > 0 and bool(body.steps) and body.steps[-1].function == "recurrent"
    parts = [axis for axis in producer.writes[output].index_map if isinstance(axis, SliceOf)]
    is_piece = len(parts) == 1 and parts[0].dim in producer.writes[number].index_map
    return (number == 0 or is_other or is_state) and (number == output or is_piece)


def _made(
    plan: Plan,
    bodies: Mapping[str, Body],
    edge: Edge,
    results: Mapping[str, Text],
    written: Mapping[tuple[str, int], Text],
) -> Value:
    """Return the value on an edge: the producer's first output, a recurrent layer's final states, or a slice."""
    producer = plan.graph[edge.producer]
    name = results[edge.producer]
    write, number = producer.writes[edge.output], producer.wholes.get(edge.output, edge.output)
    if not _is_nameable(producer, bodies[edge.producer], edge.output):
        raise EmitError(
            f"layer {edge.consumer!r} reads output {edge.output} of layer {edge.producer!r}, which programs cannot "
            "tell apart from the first yet"
        )
    made: Value = written.get((edge.producer, number), name)
    if number > 0 and (edge.producer, number) not in written:
        made = Call(code("last_state"), [name, number])
    if number == edge.output:
        return made
    (part,) = (axis for axis in write.index_map if isinstance(axis, SliceOf))
    return Call(code("piece"), [made, part.dim, part.offset, part.extent])
