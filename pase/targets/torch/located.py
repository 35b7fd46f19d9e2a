"""`differing_layers`: the layers at which a module under a plan starts to differ from its trace.

A plan that returns every layer's result runs next to the traced graph, PyTorch's own calls in one process. A difference
originates in a layer whose producers are all correct while its own result is not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pase.graph import Graph
from pase.graph.body import ModelOutput
from pase.importers.torch.live import LiveModel
from pase.planning.plan import Plan
from pase.targets.differences import Difference
from pase.targets.emitter.steps import named_dims
from pase.targets.torch.comparison import NOWHERE, distance, layer_places, numbers_of, whole
from pase.targets.torch.module import Parallel
from pase.targets.torch.values import Source

_PREFIX = "layer "


class _Shown(Parallel):
    """A module under a plan that records every layer's result, without dropout."""

    _drops_nothing = True

    def _returned(self, mode: Any, _loss: Any, outputs: Sequence[Any], _values: Mapping[str, Any]) -> Any:
        computed = dict(zip(mode.traced.results, outputs, strict=True))
        return {
            name.removeprefix(_PREFIX): whole(
                self._output(computed[name], _kept_shape(self.plan.graph, name.removeprefix(_PREFIX)), placed)
            )
            for name, placed in mode.placed.items()
            if name.startswith(_PREFIX)
        }


def differing_layers(
    module: nn.Module,
    live: LiveModel,
    plan: Plan,
    given: tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    rank: int,
    weights: Source,
    held: Mapping[str, torch.Tensor],
    explained: float,
) -> list[Difference]:
    """Return the layers that compute something else in evaluation, though all that they read of others is right.

    All ranks call it.

    Args:
        module: In evaluation.
        live: What was traced of it.
        plan: Without a pipeline.
        given: The positional and keyword inputs of a micro-batch.
        rank: This one.
        weights: Of the module.
        held: Its parameters and buffers by name.
        explained: The relative difference that rounding explains.
    """
    positional, keywords = given
    shown = replace(plan, graph=_with_all_results(plan.graph))
    parallel = _Shown(module, live, shown, rank=rank, weights=weights, seed=0).eval()
    with torch.no_grad():
        found = parallel(*positional, **keywords)
    expected = _traced_values(live, list(found), live.call.bound(positional, keywords), held)
    places, wrong = layer_places(live), dict[str, Difference]()
    for name, values in expected.items():
        # The trace may have the dims in another order.
        ours, theirs = (numbers_of(x).flatten().sort().values for x in (found[name], values))
        if ours.shape != theirs.shape:
            continue
        relative, at = distance(ours, theirs, 0.0)
        if relative > explained and at is not None:
            place = places.get(name, NOWHERE)
            wrong[name] = Difference(
                what=f"what layer {name!r} computes",
                line=place.line,
                found=float(ours[at]),
                expected=float(theirs[at]),
                relative=relative,
                explained=explained,
                order=(-1, place.number),
            )
    return [wrong[name] for name in wrong if not any(other in wrong for other in _producers(plan.graph, name))]


def _with_all_results(graph: Graph) -> Graph:
    """Return a graph of which every layer's result is an output of the model."""
    operators = []
    for operator in graph.operators:
        body = operator.body
        if body is not None and not operator.is_fan_out and not body.problem and _kept_shape(graph, operator.name):
            dims = tuple(dim for dim in named_dims(operator.writes[0]) if operator.extents.get(dim, 1) > 1)
            output = ModelOutput(name=f"{_PREFIX}{operator.name}", dims=dims, shape=operator.writes[0].shape)
            own = body.own and replace(body.own, outputs=(*body.own.outputs, output))
            operator = replace(operator, body=replace(body, outputs=(*body.outputs, output), own=own))
        operators.append(operator)
    return replace(graph, operators=tuple(operators))


def _kept_shape(graph: Graph, name: str) -> tuple[int, ...]:
    """Return the extents of the dims that a layer's result has, but for those of one point."""
    operator = graph[name]
    extents = (operator.extents.get(dim, 1) for dim in named_dims(operator.writes[0]))
    return tuple(extent for extent in extents if extent > 1)


def _traced_values(
    live: LiveModel, layers: Sequence[str], inputs: Mapping[str, Any], held: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the traced graph's values that layers write, as far as there are any."""
    nodes = {node.name: node for node in live.model.traces[-1].nodes}
    names = {}
    for layer in layers:
        node = nodes.get(live.model.lowered.nodes.get(layer, ""))
        if node is not None:
            # The last of the nodes that it represents computes its output.
            names[layer] = node.elementary[-1].outputs[0].name
    known = {layer: name for layer, name in names.items() if name in live.program.made}
    part = live.part(known.values())
    with torch.no_grad():
        values = part(inputs, held)
    return {layer: values[name] for layer, name in known.items()}


def _producers(graph: Graph, name: str) -> Iterator[str]:
    """Yield the layers that a layer reads, without fan-outs."""
    for number in range(len(graph[name].reads)):
        edge = graph.incoming.get((name, number))
        while edge is not None and graph[edge.producer].is_fan_out:
            edge = graph.incoming.get((edge.producer, 0))
        if edge is not None:
            yield edge.producer
