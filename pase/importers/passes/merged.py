"""Split dims that a source has merged: tokens [batch · steps, width] become [batch, steps, …].

For products, this applies to any dim. After the last product, where the losses are, it applies to the leading dim of
the rest: elementwise functions, softmaxes, look-ups of elements and reductions.
"""

from dataclasses import replace
from math import prod

from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, Use, Value, piece_shape
from pase.importers.ir.views import View
from pase.importers.passes.views import composed, reading

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Parts = dict[str, tuple[int, ...]]
"""The extents that make up a letter's dim."""


def split_merged_dims(trace: Trace) -> Trace:
    """Return the trace with products over the dims that their operands really have, wherever all readers can follow."""
    state = _State(trace)
    last = _behind_layers(trace)
    for node in trace.nodes:
        if isinstance(node.op, ops.Contract):
            state.split(state.nodes[node.name])
        elif node.name in last and isinstance(node.op, _OF_ROWS):
            state.split_rows(state.nodes[node.name])
    return replace(trace, nodes=tuple(state.nodes.values()))


_LAYERS = ops.Contract | ops.Convolve | ops.Attention | ops.Recurrent | ops.Lookup | ops.Normalise | ops.Pool
_OF_ROWS = ops.Pointwise | ops.Softmax | ops.Gather | ops.Reduce


def _behind_layers(trace: Trace) -> frozenset[str]:
    """Return the nodes, by name, after which there are no layers, such as those of losses."""
    found: set[str] = set()
    for node in reversed(trace.nodes):
        users = (user for value in node.outputs for user in trace.users.get(value.name, ()))
        if not isinstance(node.op, _LAYERS) and all(user.name in found for user in users):
            found.add(node.name)
    return frozenset(found)


class _State:
    """The nodes while dims are split."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes = {node.name: node for node in trace.nodes}
        self.shapes = {name: value.shape for name, value in trace.values.items()}
        self._roots: dict[str, Node | None] = {}

    def split(self, node: Node) -> None:
        """Split one product's merged dims, unless there are none, or a consumer cannot follow."""
        op = node.op
        assert isinstance(op, ops.Contract)
        parts = self._parts(node, op)
        old = node.outputs[0]
        if not parts or old.name in self.trace.outputs:
            return
        own = [
            self._seen_as(use, _expanded(self._shape(use), operand, parts))
            for use, operand in zip(node.inputs, op.operands, strict=False)
        ]
        inputs = [use for use in own if use is not None]
        shape = _expanded(old.shape, op.output, parts)
        readers = self._following(old, shape)
        if len(inputs) < len(own) or readers is None:
            return
        spare = iter(letter for letter in _LETTERS if letter not in set(op.operands[0] + op.operands[1]))
        letters = {letter: "".join(next(spare) for _ in extents) for letter, extents in parts.items()}

        def told(old_letters: str) -> str:
            return "".join(letters.get(letter, letter) for letter in old_letters)

        changed = replace(op, operands=(told(op.operands[0]), told(op.operands[1])), output=told(op.output))
        self._replace(replace(node, op=changed, inputs=(*inputs, *node.inputs[2:])), shape, readers)

    def split_rows(self, node: Node) -> None:
        """Split the leading dim of a node, unless it is not merged, or a consumer cannot follow."""
        op, old = node.op, node.outputs[0]
        own = [self._shape(use) for use in node.inputs]
        whole = own[0] if isinstance(op, ops.Reduce) else old.shape
        if not whole or len(node.outputs) > 1:
            return
        led = [shape[:1] == whole[:1] and len(shape) == len(whole) for shape in own]
        found = [_factors(use) for use, is_led in zip(node.inputs, led, strict=True) if is_led]
        extents = max(found, key=len, default=())
        more = len(extents) - 1
        changed = _with_more_dims(op, more) if more > 0 else None
        if changed is None:
            return
        is_summed = isinstance(op, ops.Reduce) and 0 in op.over
        shape = old.shape if is_summed else (*extents, *old.shape[1:])
        readers = self._following(old, shape)
        if readers is None or (not is_summed and old.name in self.trace.outputs):
            return
        inputs: list[Use] = []
        for use, before, is_led in zip(node.inputs, own, led, strict=True):
            is_repeated = len(before) == len(whole) and before[0] == 1
            lead = extents if is_led else (1,) * len(extents)
            seen = self._seen_as(use, (*lead, *before[1:])) if is_led or is_repeated else use
            if seen is None:
                return
            inputs.append(seen)
        self._replace(replace(node, op=changed, inputs=tuple(inputs)), shape, readers)

    def _shape(self, use: Use) -> tuple[int, ...]:
        if use.seen_as is not None:
            return use.seen_as
        return use.view.shape if use.view is not None else piece_shape(self.shapes[use.value], use.piece)

    def _seen_as(self, use: Use, shape: tuple[int, ...]) -> Use | None:
        """Return a use in another shape; None where the shapes do not align."""
        if use.seen_as is not None:
            return replace(use, seen_as=shape)
        if shape == self._shape(use):
            return use
        view = View.plain(self._shape(use)).reshaped(shape)
        return None if view is None else composed(Use(value=use.value, view=view), use, self.shapes[use.value])

    def _following(self, old: Value, shape: tuple[int, ...]) -> list[Node] | None:
        """Return the readers of a value as they read it in another shape; None where one cannot."""
        whole = View.plain(shape).reshaped(old.shape)
        if whole is None:
            return None
        behind = Use(value=old.name, view=None if whole.is_plain else whole)
        users = self.trace.users.get(old.name, ())
        readers = [reading(self.nodes[user.name], old.name, behind, shape) for user in users]
        told = [reader for reader in readers if reader is not None]
        return told if len(told) == len(readers) else None

    def _replace(self, node: Node, shape: tuple[int, ...], readers: list[Node]) -> None:
        """Put a node in its place, whose first output has another shape, and its readers."""
        old = node.outputs[0]
        new = Value(name=old.name, shape=shape, dtype=old.dtype)
        self.shapes[old.name] = shape
        # It is not the source's own call any more.
        self.nodes[node.name] = replace(node, outputs=(new, *node.outputs[1:]), source=None)
        for reader in readers:
            self.nodes[reader.name] = reader

    def _parts(self, node: Node, op: ops.Contract) -> Parts:
        """Return the extents that make up the output's letters, for merged dims."""
        found: Parts = {}
        # For two activations, dims of only one are attention's steps, which stay merged (those of a window).
        is_of_activations = all(self.trace.is_activation(use) for use in node.inputs[:2])
        for i, (use, operand) in enumerate(zip(node.inputs, op.operands, strict=False)):
            if use.view is None:
                continue
            is_of_merged = self._is_of_merged(node.inputs[1 - i])
            for letter, factors in zip(operand, use.view.dims, strict=True):
                extents = tuple(factor.extent for factor in factors)
                is_bias_dim = op.has_bias and letter == op.output[-1]
                is_step = is_of_activations and not all(letter in other for other in op.operands)
                is_kept = is_of_merged and letter in op.operands[1 - i]
                if len(extents) > 1 and letter in op.output and not (is_bias_dim or is_step or is_kept):
                    # For dims of both operands (heads and batch), the finer factors apply; the other operand is divided
                    # equally or not.
                    found[letter] = max(found.get(letter, ()), extents, key=len)
        return found

    def _is_of_merged(self, use: Use) -> bool:
        """Whether an operand is computed point by point of a product that is left with its dims together.

        Probabilities then have the dims of their scores, by which attention is recognised.
        """
        root = None if use.view is not None else self._root(self.trace.producer.get(use.value))
        if root is None or not isinstance(root.op, ops.Contract):
            return False
        return self.shapes[root.outputs[0].name] == root.outputs[0].shape

    def _root(self, maker: Node | None) -> Node | None:
        """Return the node that a chain of functions of points starts with; what chains share is read once."""
        chain: list[str] = []
        while maker is not None and maker.name not in self._roots and isinstance(maker.op, ops.Pointwise | ops.Softmax):
            chain.append(maker.name)
            size = prod(maker.outputs[0].shape)
            above = [self.trace.producer.get(u.value) for u in maker.inputs if prod(self.shapes[u.value]) == size]
            maker = above[0] if above else None
        root = None if maker is None else self._roots.get(maker.name, maker)
        self._roots.update(dict.fromkeys(chain, root))
        return root


def _expanded(shape: tuple[int, ...], letters: str, parts: Parts) -> tuple[int, ...]:
    return tuple(e for extent, letter in zip(shape, letters, strict=True) for e in parts.get(letter, (extent,)))


def _with_more_dims(op: ops.Op, more: int) -> ops.Op | None:
    """Return an operation on rows whose leading dim is split into more dims; None where it works along that dim."""
    match op:
        case ops.Softmax(dim=dim) | ops.Gather(dim=dim) if dim > 0:
            return replace(op, dim=dim + more)
        case ops.Pointwise(mixes=mixes) if 0 not in mixes:
            return replace(op, mixes=tuple(i + more for i in mixes))
        case ops.Reduce(over=over, keeps_dims=keeps) if 0 not in over or not keeps:
            return replace(op, over=(*(range(more) if 0 in over else ()), *(i + more for i in over)))
        case _:
            return None


def _factors(use: Use) -> tuple[int, ...]:
    """Return the extents that make up the leading dim of a read; empty where it is one dim of its tensor."""
    if use.view is None or not use.view.dims:
        return ()
    return tuple(factor.extent for factor in use.view.dims[0])
