"""`difference`: what one graph has otherwise than another one that it should be equal to, in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import isclose, isnan

from pase.common.words import short
from pase.graph import Access, AllToAll, Graph, Operator, Role
from pase.graph.body import Body, Step, without_casts
from pase.graph.operators.products import ring_attention
from pase.graph.parts import with_cuts


def difference(expected: Graph, found: Graph) -> str:
    """Return how a model that was imported differs from that of a plan, "" where its plan fits it.

    What a plan depends on is compared: layers, their dims, what they read, write and compute. Names of the models,
    arguments and types of numbers are not: a plan of a model in float32 fits it in bfloat16.

    Args:
        expected: The plan's graph.
        found: The model's; fan-outs, which a search adds, may be missing in either.

    Returns:
        The first difference: the layer, what was expected and what was found.
    """
    expected, found = with_cuts(expected), with_cuts(found)
    names, own = [op.name for op in expected.operators], [op.name for op in found.operators]
    if names != own:
        return _of_names(names, own)
    for one, other in zip(expected.operators, found.operators, strict=True):
        # How keys and values come to all devices is the plan's choice.
        text = next(_of_operators(one, other if one.ring is None else ring_attention(other)), "")
        if text:
            return f"layer {short(one.name)!r} {text}"
    ends, others = (
        {(edge.consumer, edge.input): (edge.producer, edge.output) for edge in graph.edges}
        for graph in (expected, found)
    )
    for (layer, read), end in ends.items():
        other_end = others.get((layer, read))
        if other_end != end:
            said = "nothing" if other_end is None else repr(short(other_end[0]))
            return f"layer {short(layer)!r} reads {said} as input {read}; expected {short(end[0])!r}"
    fed = next((key for key in others if key not in ends), None)
    return "" if fed is None else f"layer {short(fed[0])!r} reads {short(others[fed][0])!r} besides its inputs"


def _of_names(expected: Sequence[str], found: Sequence[str]) -> str:
    missing = [name for name in expected if name not in set(found)]
    more = [name for name in found if name not in set(expected)]
    counts = f"the plan has {len(expected):,} layers, the model {len(found):,}"
    if missing:
        return f"{counts}; layer {short(missing[0])!r} of the plan is not in the model"
    if more:
        return f"{counts}; layer {short(more[0])!r} of the model is not in the plan"
    first, other = next(pair for pair in zip_longest(expected, found) if pair[0] != pair[1])
    return f"layer {short(str(other))!r} comes where the plan has {short(str(first))!r}"


def _of_operators(expected: Operator, found: Operator) -> Iterator[str]:
    """Yield what one layer has otherwise than another."""
    if expected.kind != found.kind:
        yield f"is a {found.kind!r}; expected a {expected.kind!r}"
    if expected.extents != found.extents:
        yield f"has dims {_told(found.extents)}; expected {_told(expected.extents)}"
    for word, own, others in (("reads", expected.reads, found.reads), ("writes", expected.writes, found.writes)):
        if len(own) != len(others):
            yield f"{word} {len(others)} tensors; expected {len(own)}"
        for one, other in zip(own, others, strict=False):
            yield from _of_accesses(word, one, other)
    if _compared(expected) != _compared(found):
        yield "is split otherwise than the plan's, or counts other work"
    if expected.body is not None and found.body is not None:
        yield from _of_bodies(expected.body, found.body)
        if expected.body.own is not None and found.body.own is not None:
            yield from _of_bodies(expected.body.own, found.body.own)


def _compared(operator: Operator) -> tuple[object, ...]:
    # How unevenly rows are routed is no matter of the model.
    exchanges = (replace(x, excess=0.0) if isinstance(x, AllToAll) and x.excess else x for x in operator.exchanges)
    return operator.unsplittable, tuple(exchanges), operator.pipeline


def _of_accesses(word: str, expected: Access, found: Access) -> Iterator[str]:
    called = f"weight {short(found.tensor)!r}" if found.role is Role.PARAMETER else f"tensor {short(found.tensor)!r}"
    if expected.shape != found.shape:
        yield f"{word} {called} of shape {list(found.shape)}; expected {list(expected.shape)}"
    if (expected.role, expected.shared) != (found.role, found.shared):
        tied = f", shared as {short(found.shared)!r}" if found.shared else ""
        held = f", shared as {short(expected.shared)!r}" if expected.shared else ""
        yield f"{word} {called} as {found.role}{tied}; expected {expected.role}{held}"
    if expected.index_map != found.index_map:
        yield f"{word} {called} along other dims than the plan's"


def _of_bodies(expected: Body, found: Body) -> Iterator[str]:
    own, other = without_casts(expected), without_casts(found)
    for one, step in zip_longest(own.steps, other.steps):
        if one is None or step is None or one.function != step.function:
            functions = [repr(each.function) if each else "nothing" for each in (step, one)]
            yield f"computes {functions[0]} where the plan has {functions[1]}"
        else:
            yield from (f"computes {step.function!r} {text}" for text in _of_steps(one, step))
    for word, these, those in (("inputs", own.inputs, other.inputs), ("outputs", own.outputs, other.outputs)):
        if these != those:
            yield f"has {word} {[item.name for item in those]}; expected {[item.name for item in these]}"
    if own.constants != other.constants:
        yield "computes with other constants than the plan's"


def _of_steps(expected: Step, found: Step) -> Iterator[str]:
    """Yield what a step has otherwise than another of its function; numbers are as exact as any type of floats is."""
    if len(expected.operands) != len(found.operands):
        yield f"of {len(found.operands)} operands; expected {len(expected.operands)}"
    for one, other in zip(expected.operands, found.operands, strict=False):
        if not _is_same(one, other):
            yield f"of {_shown(other)} where the plan has {_shown(one)}"
    options, others = dict(expected.options), dict(found.options)
    for name in dict.fromkeys([*options, *others]):
        if not _is_same(options.get(name), others.get(name)):
            yield f"with {name} {_shown(others.get(name))} where the plan has {_shown(options.get(name))}"
    if (expected.result, expected.dims) != (found.result, found.dims):
        yield "of other dims, or as another tensor, than the plan's"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _is_same(expected: object, found: object) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return isclose(expected, found, rel_tol=_LEAST_EXACT) or (isnan(expected) and isnan(found))
    return expected == found


_LEAST_EXACT = 2.0**-8
"""What bfloat16 makes of a number at most, relative to it."""


def _told(extents: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={extent}" for name, extent in extents.items())
