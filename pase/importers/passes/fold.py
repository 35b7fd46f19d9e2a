"""Fold elementwise functions of one tensor into the operator that computes it, or into its only consumer."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from pase.graph.operators.pointwise import function_work
from pase.importers.ir import ops
from pase.importers.ir.trace import Folded, Node, Trace, Use, computed_together, lying
from pase.importers.ir.views import View
from pase.importers.passes.views import composed, reading

_NOT_INTO = ops.Slice | ops.Concat | ops.Pad | ops.Reshape | ops.Transpose | ops.Broadcast
"""Operations that only move data, into which nothing is folded."""


def fold_pointwise(trace: Trace) -> Trace:
    """Return the trace with biases, activations and the like as part of their neighbours."""
    return _folding(trace, lambda _, node: isinstance(node.op, ops.Pointwise) and len(node.outputs) == 1)


def add_biases(trace: Trace) -> Trace:
    """Return the trace with additions of one dim to a product or a convolution converted to its bias."""
    return _folding(trace, _State.is_bias)


def _folding(trace: Trace, is_folded: "Callable[[_State, Node], bool]") -> Trace:
    state = _State(trace)
    for node in trace.nodes:
        current = state.nodes.get(node.name)
        if current is not None and is_folded(state, current):
            state.fold(current)
    return replace(trace, nodes=tuple(state.nodes.values()), outputs=tuple(state.returned))


class _State:
    """The nodes while some of them are folded into others."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes = {node.name: node for node in trace.nodes}
        self.returned = list(trace.outputs)
        self.producers = {value.name: node.name for node in trace.nodes for value in node.outputs}
        self.users: dict[str, set[str]] = {}
        for node in trace.nodes:
            for use in node.inputs:
                self.users.setdefault(use.value, set()).add(node.name)

    def fold(self, node: Node) -> None:
        """Fold one node wherever it can be."""
        assert isinstance(node.op, ops.Pointwise)
        # A tensor that is read in two ways (added to its transpose) is two tensors to what reads it.
        reads = {use for use in node.inputs if self.trace.is_activation(use)}
        if len(reads) != 1:
            return
        (read,) = reads
        if read.piece is not None or read.seen_as is not None or self.trace.shape(read) != node.outputs[0].shape:
            return
        if node.op.mixes or not self._into_producer(node, read):
            self._into_consumer(node, read)

    def is_bias(self, node: Node) -> bool:
        """Return whether a node adds a bias to the result of a product or a convolution."""
        if not isinstance(node.op, ops.Pointwise) or len(node.inputs) != 2 or len(node.outputs) != 1:
            return False
        weights = [use for use in node.inputs if self.trace.is_parameter(use)]
        reads = [use for use in node.inputs if use not in weights]
        maker = self.nodes.get(self.producers.get(reads[0].value, "")) if len(reads) == 1 else None
        return maker is not None and _bias(self.trace, maker, node, reads[0], weights) is not None

    def _into_producer(self, node: Node, read: Use) -> bool:
        maker = self.nodes.get(self.producers.get(read.value, ""))
        value = node.outputs[0].name
        if (
            maker is None
            or isinstance(maker.op, _NOT_INTO)
            or maker.outputs[0].name != read.value
            or self.users[read.value] != {node.name}
            or read.value in self.returned
        ):
            return False
        is_seen_otherwise = read.view is not None
        if is_seen_otherwise and value in self.returned:
            return False
        users = self._redirected(value, read, (lying(self.trace.values[value], read),))
        if users is None:
            return False
        weights = [use for use in node.inputs if self.trace.is_parameter(use)]
        together = computed_together(maker.elementary, node.elementary)
        self._replace(replace(_with_epilogue(self.trace, maker, node, read, weights), computes=together))
        self._remove(node, users)
        self.returned = [read.value if name == value else name for name in self.returned]
        return True

    def _into_consumer(self, node: Node, read: Use) -> bool:
        value = node.outputs[0].name
        users = self.users.get(value, set())
        if len(users) != 1 or value in self.returned:
            return False
        (name,) = users
        if isinstance(self.nodes[name].op, _NOT_INTO):
            return False
        whole = _needed_whole(node, self.nodes[name], value)
        redirected = self._redirected(value, read, node.elementary)
        if redirected is None or whole is None:
            return False
        (user,) = redirected
        # Their dims are those of the input, not of the vertex's output: they are unsplit in all parts.
        weights = tuple(_whole_weight(self.trace, use) for use in node.inputs if self.trace.is_parameter(use))
        user = replace(
            user,
            inputs=(*user.inputs, *weights),
            folded=(*user.folded, *_folded(self.trace, node, read.value)),
            whole=(*user.whole, *whole),
        )
        self._remove(node, [user])
        return True

    def _redirected(self, value: str, read: Use, makers: tuple[Node, ...]) -> list[Node] | None:
        """Return the users of a value, reading the tensor behind it through its makers; None where one cannot."""
        shape = self.trace.values[read.value].shape
        found = []
        for name in self.users.get(value, ()):
            user = reading(self.nodes[name], value, read, shape)
            if user is None:
                return None
            told = tuple(replace(f, argument=read.value) if f.argument == value else f for f in user.folded)
            together = computed_together(makers, self.nodes[name].elementary)
            found.append(replace(user, folded=told, computes=together))
        return found

    def _replace(self, node: Node) -> None:
        self.nodes[node.name] = node
        for use in node.inputs:
            self.users.setdefault(use.value, set()).add(node.name)

    def _remove(self, node: Node, changed: list[Node]) -> None:
        del self.nodes[node.name]
        for use in node.inputs:
            self.users[use.value].discard(node.name)
        for other in changed:
            self._replace(other)


def _needed_whole(node: Node, user: Node, value: str) -> tuple[tuple[int, int], ...] | None:
    """Return the (input, dim) along which a consumer then also needs other points; None where that is unknown."""
    assert isinstance(node.op, ops.Pointwise)
    if not node.op.mixes:
        return ()
    if not isinstance(user.op, ops.Attention | ops.Contract):
        return None
    found = []
    plain = View.plain(node.outputs[0].shape)
    for position, use in enumerate(user.inputs):
        if use.value != value:
            continue
        if use.piece is not None or use.seen_as is not None:
            return None
        view = use.view or plain
        for dim in node.op.mixes:
            bases = list(view.homes[dim])
            own = [i for i, factors in enumerate(view.dims) if [factor.base for factor in factors] == bases]
            if len(own) != 1:
                return None
            found.append((position, own[0]))
    return tuple(found)


def _whole_weight(trace: Trace, use: Use) -> Use:
    return Use(value=use.value, seen_as=trace.shape(use))


def _with_epilogue(trace: Trace, maker: Node, node: Node, read: Use, weights: list[Use]) -> Node:
    assert isinstance(node.op, ops.Pointwise)
    bias = _bias(trace, maker, node, read, weights)
    if bias is not None:
        assert isinstance(maker.op, ops.Contract | ops.Convolve)
        inputs = (*maker.inputs[:2], bias)
        return replace(maker, op=replace(maker.op, has_bias=True), inputs=inputs)
    # A weight is aligned with the last dims of the output, unless that is reshaped in between.
    own = weights if read.view is None else [_whole_weight(trace, use) for use in weights]
    return replace(
        maker,
        inputs=(*maker.inputs, *own),
        epilogue=(*maker.epilogue, *node.op.functions),
        folded=(*maker.folded, *_folded(trace, node)),
    )


def _bias(trace: Trace, maker: Node, node: Node, read: Use, weights: list[Use]) -> Use | None:
    """Return the bias that a node adds to a product or a convolution, in one dim."""
    assert isinstance(node.op, ops.Pointwise)
    if node.op.functions != ("add",) or len(weights) != 1 or maker.epilogue or len(maker.inputs) != 2:
        return None
    shape = maker.outputs[0].shape
    match maker.op:
        case ops.Contract(has_bias=False):
            dim = len(shape) - 1
        case ops.Convolve(has_bias=False, channels=channels):
            dim = channels
        case _:
            return None
    weight = trace.shape(weights[0])
    plain = View.plain(shape)
    seen = (read.view or plain).dims
    # Its dims are the last ones of the tensor it is added to: that dim completely, extent 1 in the others.
    along = [(extent, factors) for extent, factors in zip(reversed(weight), reversed(seen), strict=False) if extent > 1]
    if len(along) != 1 or along[0] != (shape[dim], plain.dims[dim]) or weights[0].seen_as is not None:
        return None
    view = View.plain(weight).reshaped((shape[dim],))
    assert view is not None
    return composed(Use(value=weights[0].value, view=view), weights[0], trace.values[weights[0].value].shape)


def _folded(trace: Trace, node: Node, argument: str = "") -> tuple[Folded, ...]:
    """Return the work of a node that is folded into another, and of what was folded into it itself."""
    assert isinstance(node.op, ops.Pointwise)
    points = prod(node.outputs[0].shape)
    # Constants have no gradient.
    leaves = [trace.leaf.get(use.value) for use in node.inputs]
    num_reads = sum(leaf is None or leaf.role != "constant" for leaf in leaves)
    work = function_work((), node.op.functions, node.op.flop_per_point, num_reads)
    own = Folded(
        flop=points * sum(w.flop_per_point for w in work),
        backward_flop=points * sum(w.flop_per_point * len(w.inputs) for w in work),
    )
    return tuple(replace(folded, argument=argument) for folded in (own, *node.folded))
