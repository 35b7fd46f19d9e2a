"""Recognise attention: two products with a softmax between them become one operator."""

from dataclasses import dataclass, replace
from math import prod

from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, Use, Value, computed_together, lying
from pase.importers.ir.views import View
from pase.importers.passes.views import see_views, seen_through, without_dead_nodes


def recover_attention(trace: Trace) -> Trace:
    """Return the trace with ``softmax(q · kᵀ) · v`` as one vertex wherever nothing else reads its intermediates."""
    gone: set[str] = set()
    made: dict[str, list[Node]] = {}
    for node in trace.nodes:
        if isinstance(node.op, ops.Softmax) and not node.op.is_log:
            found = _around(trace, node)
            if found is not None:
                nodes, inner = found
                gone.update(inner)
                made[nodes[0].name] = nodes
    if not made:
        return trace
    kept = [other for node in trace.nodes if node.name not in gone for other in made.get(node.name, [node])]
    # Where the source writes its result in another order of dims, that is a view of what attention writes.
    return see_views(without_dead_nodes(replace(trace, nodes=tuple(kept))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """The product of queries and keys before a softmax; between: nodes in between; masks: further inputs of these."""

    product: Node
    between: tuple[str, ...] = ()
    masks: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Letters:
    """Roles of letters in the product of queries and keys.

    Attributes:
        query: Which operand the queries are.
        summed: Letters that are summed over.
        batch: Batch letters, in order.
    """

    query: int
    batch: str
    step: str
    key: str
    summed: str


def _around(trace: Trace, softmax: Node) -> tuple[list[Node], set[str]] | None:
    """Return the attention that a softmax is part of, with views of it, and the names of the nodes that it replaces."""
    assert isinstance(softmax.op, ops.Softmax)
    scores, below = _above(trace, softmax, softmax), _below(trace, softmax)
    if scores is None or below is None or softmax.op.dim != len(softmax.outputs[0].shape) - 1:
        return None
    values, probabilities, down = below
    first, second = scores.product.op, values.op
    assert isinstance(first, ops.Contract)
    assert isinstance(second, ops.Contract)
    letters = _letters(first)
    place = next((i for i, use in enumerate(values.inputs[:2]) if use.value == probabilities), None)
    if letters is None or first.has_bias or second.has_bias or place is None:
        return None
    read, others = values.inputs[place], values.inputs[1 - place]
    is_as_written = read.piece is None and (read.view is None or read.view.is_reshape)
    if not is_as_written or trace.shape(read) != scores.product.outputs[0].shape or others.value == read.value:
        return None
    # Letters of the second product in those of the first; new ones belong to the values only.
    same = dict(zip(second.operands[place], first.output, strict=True))
    value = "".join(same.get(letter, letter.upper()) for letter in second.operands[1 - place])
    result = "".join(same.get(letter, letter.upper()) for letter in second.output)
    new = [letter for letter in result if letter not in first.output]
    wanted = {*letters.batch, letters.key, *new}
    if len(new) != 1 or set(value) != wanted or set(result) != {*letters.batch, letters.step, *new}:
        return None
    told = first.operands[letters.query], first.operands[1 - letters.query], value
    uses = (scores.product.inputs[letters.query], scores.product.inputs[1 - letters.query], others)
    last = ((letters.step, letters.summed), (letters.key, letters.summed), (letters.key, new[0]))
    arranged = [_arranged(trace, u, t, (*letters.batch, *own)) for u, t, own in zip(uses, told, last, strict=True)]
    heads = _heads(trace, arranged, len(letters.batch))
    if heads is None:
        return None
    names = {scores.product.name, softmax.name, values.name, *scores.between, *down}
    kept = tuple(use for use in scores.masks if trace.is_activation(use) or trace.is_parameter(use))
    together = computed_together(*(node.elementary for node in trace.nodes if node.name in names))
    attention = replace(values, op=ops.Attention(), inputs=(*heads, *kept), computes=together)
    order = (*letters.batch, letters.step, *new)
    return _written(trace, attention, order, result), names - {values.name}


def _written(trace: Trace, attention: Node, order: tuple[str, ...], result: str) -> list[Node]:
    """Return attention, which writes [b, h, s, e], and the views of it that have the dims of `result`."""
    old = attention.outputs[0]
    extents = dict(zip(result, old.shape, strict=True))
    shape = tuple(extents[letter] for letter in order)
    q, v = trace.shape(attention.inputs[0]), trace.shape(attention.inputs[2])
    canonical = (*q[:3], v[3])
    heads = Value(name=f"{old.name}:heads", shape=canonical, dtype=old.dtype)
    apart = Value(name=f"{old.name}:apart", shape=shape, dtype=old.dtype)
    if canonical == old.shape and order == tuple(result):
        return [attention]
    places = tuple(order.index(letter) for letter in result)
    origin = attention.origin
    seen = View.plain(old.shape).transposed([result.index(letter) for letter in order]).reshaped(canonical)
    assert seen is not None, "dims of the batch are put together, or one is taken apart"
    own = lying(heads, Use(value=old.name, view=seen))
    return [
        replace(attention, outputs=(heads,), computes=(*attention.computes, own)),
        Node(
            name=f"{attention.name}:apart",
            op=ops.Reshape(),
            inputs=(Use(value=heads.name),),
            outputs=(apart,),
            origin=origin,
        ),
        Node(
            name=f"{attention.name}:ordered",
            op=ops.Transpose(order=places),
            inputs=(Use(value=apart.name),),
            outputs=(old,),
            origin=origin,
        ),
    ]


def _letters(op: ops.Contract) -> _Letters | None:
    """Return the roles of a product's dims in attention; None where it is not a product of queries and keys."""
    if not op.output:
        return None
    key = op.output[-1]
    query = 1 if key in op.operands[0] else 0
    q, k = op.operands[query], op.operands[1 - query]
    shared = [letter for letter in q if letter in k]
    batch = "".join(letter for letter in op.output if letter in shared)
    summed = [letter for letter in shared if letter not in op.output]
    steps = [letter for letter in q if letter not in shared]
    if key in q or len(summed) != 1 or len(steps) != 1 or op.output != f"{batch}{steps[0]}{key}":
        return None
    if {*k} - {*shared} != {key} or op.share != 1:
        return None
    return _Letters(query=query, batch=batch, step=steps[0], key=key, summed=summed[0])


def _arranged(trace: Trace, use: Use, letters: str, wanted: tuple[str, ...]) -> Use | None:
    """Return a use with its dims in the wanted order."""
    if sorted(letters) != sorted(wanted):
        return None
    order = [letters.index(letter) for letter in wanted]
    view = View.plain(trace.shape(use)).transposed(order)
    return seen_through(trace, use, view)


def _heads(trace: Trace, uses: list[Use | None], num_batch: int) -> tuple[Use, Use, Use] | None:
    """Return uses of [batch…, steps, width] as [b, h, steps, width]: the last of the batch dims are the heads.

    A single batch dim that merges two is divided; any other is the batch, with one head.
    """
    found: list[Use] = []
    first = uses[0].view if uses[0] is not None else None
    for use in uses:
        if use is None:
            return None
        shape = trace.shape(use)
        lead, rest = shape[:num_batch], shape[num_batch:]
        b, h = prod(lead[:-1]), lead[-1] if lead else 1
        if num_batch == 1:
            parts = first.dims[0] if first is not None else ()
            b = parts[0].extent if len(parts) == 2 else h
            h = h // b
        view = View.plain(shape).reshaped((b, h, *rest))
        seen = seen_through(trace, use, view)
        if seen is None:
            return None
        found.append(seen)
    q, k, v = found
    return q, k, v


def _above(trace: Trace, node: Node, softmax: Node) -> _Scores | None:
    """Return the product of queries and keys that a node's input goes back to, point by point."""
    size, keys = prod(softmax.outputs[0].shape), softmax.outputs[0].shape[-1]
    for i, use in enumerate(node.inputs):
        above = trace.producer.get(use.value)
        if above is None or not _continues(trace, use, node, size, keys):
            continue
        others = [other for j, other in enumerate(node.inputs) if j != i]
        if any(other.value == use.value for other in others):
            continue
        masks = tuple(_mask(trace, other, node, softmax) for other in others)
        if isinstance(above.op, ops.Contract):
            if _is_of_activations(trace, above):
                return _Scores(product=above, masks=masks)
            continue
        if not isinstance(above.op, ops.Pointwise) or above.op.mixes:
            continue
        found = _above(trace, above, softmax)
        if found is not None:
            return replace(found, between=(above.name, *found.between), masks=(*masks, *found.masks))
    return None


def _continues(trace: Trace, use: Use, node: Node, size: int, keys: int) -> bool:
    """Return whether a use consists of scores that only this node reads, completely, row by row."""
    shape = trace.values[use.value].shape
    is_as_written = use.piece is None and use.seen_as is None and (use.view is None or use.view.is_reshape)
    is_alone = len(trace.users[use.value]) == 1 and use.value not in trace.outputs
    is_whole = prod(shape) == size and shape[-1:] == (keys,) == node.outputs[0].shape[-1:]
    return is_as_written and is_alone and is_whole and prod(node.outputs[0].shape) == size


def _mask(trace: Trace, use: Use, node: Node, softmax: Node) -> Use:
    """Return a mask in the shape of scores [b, h, s, t]; in an opaque shape where the source has other dims."""
    if len(node.outputs[0].shape) == len(softmax.outputs[0].shape) == 4:
        return use
    return replace(use, piece=None, view=None, seen_as=trace.shape(use))


def _below(trace: Trace, softmax: Node) -> tuple[Node, str, tuple[str, ...]] | None:
    """Return the product with the values below a softmax, the value that it reads, and the names of nodes between."""
    value, names = softmax.outputs[0].name, list[str]()
    while True:
        users = trace.users.get(value, ())
        if len(users) != 1 or value in trace.outputs:
            return None
        (below,) = users
        if isinstance(below.op, ops.Contract):
            return (below, value, tuple(names)) if _is_of_activations(trace, below) else None
        reads = [use for use in below.inputs if trace.is_activation(use)]
        has_weights = any(map(trace.is_parameter, below.inputs))
        if not isinstance(below.op, ops.Pointwise) or below.op.mixes or has_weights:
            return None
        if len(reads) != 1 or reads[0].view is not None:
            return None
        names.append(below.name)
        value = below.outputs[0].name


def _is_of_activations(trace: Trace, node: Node) -> bool:
    return all(trace.is_activation(use) for use in node.inputs[:2]) and prod(node.outputs[0].shape) > 0
