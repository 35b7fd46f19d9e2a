"""Take apart dims that a source put together for a product: tokens [batch · steps, width] become [batch, steps, …]."""

from dataclasses import replace
from math import prod

from pase.importers.ir import Contract, Node, Pointwise, Softmax, Trace, Use, Value, View
from pase.importers.ir.trace import piece_shape
from pase.importers.passes.regions import is_activation
from pase.importers.passes.uses import composed

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Parts = dict[str, tuple[int, ...]]
"""The extents that a letter's dim is made of."""


def split_merged_dims(trace: Trace) -> Trace:
    """Return the trace with products over the dims that their operands really have, wherever all readers can follow."""
    state = _State(trace)
    for node in trace.nodes:
        if isinstance(node.op, Contract):
            state.split(state.nodes[node.name])
    return replace(trace, nodes=tuple(state.nodes.values()))


class _State:
    """The nodes while dims are taken apart."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes = {node.name: node for node in trace.nodes}
        self.shapes = {name: value.shape for name, value in trace.values.items()}

    def split(self, node: Node) -> None:
        """Take one product's merged dims apart, unless there are none, or a reader cannot follow."""
        op = node.op
        assert isinstance(op, Contract)
        parts = self._parts(node, op)
        old = node.outputs[0]
        if not parts or old.name in self.trace.outputs:
            return
        own = [self._apart(use, operand, parts) for use, operand in zip(node.inputs, op.operands, strict=False)]
        inputs = [use for use in own if use is not None]
        shape = _expanded(old.shape, op.output, parts)
        whole = View.plain(shape).reshaped(old.shape)
        if len(inputs) < len(own) or whole is None:
            return
        behind = Use(value=old.name, view=whole)
        readers: list[Node] = []
        for reader in self.trace.users.get(old.name, ()):
            uses: list[Use] = []
            for use in self.nodes[reader.name].inputs:
                seen = composed(use, behind, shape) if use.value == old.name else use
                if seen is None:
                    return
                uses.append(seen)
            readers.append(replace(self.nodes[reader.name], inputs=tuple(uses)))
        spare = iter(letter for letter in _LETTERS if letter not in set(op.operands[0] + op.operands[1]))
        letters = {letter: "".join(next(spare) for _ in extents) for letter, extents in parts.items()}

        def told(old_letters: str) -> str:
            return "".join(letters.get(letter, letter) for letter in old_letters)

        changed = replace(op, operands=(told(op.operands[0]), told(op.operands[1])), output=told(op.output))
        new = Value(name=old.name, shape=shape, dtype=old.dtype)
        inputs += node.inputs[2:]
        self.shapes[old.name] = shape
        self.nodes[node.name] = replace(node, op=changed, inputs=tuple(inputs), outputs=(new, *node.outputs[1:]))
        for reader in readers:
            self.nodes[reader.name] = reader

    def _parts(self, node: Node, op: Contract) -> Parts:
        """Return the extents that letters of the output are made of, of those that are made of several."""
        found: Parts = {}
        # Of two activations, what one alone has are the steps of attention, which stay together (those of a window).
        is_of_activations = all(is_activation(self.trace, use) for use in node.inputs[:2])
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
                    # Of both operands (heads and batch): the finer telling; the other one is cut alike or not at all.
                    found[letter] = max(found.get(letter, ()), extents, key=len)
        return found

    def _is_of_merged(self, use: Use) -> bool:
        """Whether an operand is computed point by point of a product that is left with its dims together.

        Probabilities then have the dims of their scores, by which attention is recognised.
        """
        maker = None if use.view is not None else self.trace.producer.get(use.value)
        while maker is not None and isinstance(maker.op, Pointwise | Softmax):
            size = prod(maker.outputs[0].shape)
            above = [self.trace.producer.get(u.value) for u in maker.inputs if prod(self.shapes[u.value]) == size]
            maker = above[0] if above else None
        if maker is None or not isinstance(maker.op, Contract):
            return False
        return self.shapes[maker.outputs[0].name] == maker.outputs[0].shape

    def _apart(self, use: Use, operand: str, parts: Parts) -> Use | None:
        if use.seen_as is not None:
            shape = _expanded(use.seen_as, operand, parts)
            return replace(use, seen_as=shape)
        held = self.shapes[use.value]
        shape = use.view.shape if use.view is not None else piece_shape(held, use.piece)
        new = _expanded(shape, operand, parts)
        if new == shape:
            return use
        view = View.plain(shape).reshaped(new)
        return None if view is None else composed(Use(value=use.value, view=view), use, held)


def _expanded(shape: tuple[int, ...], letters: str, parts: Parts) -> tuple[int, ...]:
    return tuple(e for extent, letter in zip(shape, letters, strict=True) for e in parts.get(letter, (extent,)))
