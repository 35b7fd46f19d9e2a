"""`Source`: a model before its vertices were put together, and what of it each vertex stands for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, prod, sqrt
from types import MappingProxyType

from pase.importers.execution.sheet import NoBodyError, TensorRef
from pase.importers.ir import Broadcast, Identity, Node, Pointwise, Reduce, Reshape, Trace, Transpose, Use, View
from pase.importers.passes import PASSES
from pase.importers.passes.constants import Depends, dependencies
from pase.importers.passes.regions import is_activation
from pase.importers.passes.views import composed, seen_by

_BEFORE_CONSTANTS, _SPELT_OUT = "drop constants and indices", "add biases"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model before its vertices were put together.

    first: the trace as it was read. before: with its constants. spelt: with views seen through, nothing put together.
    final: as lowered.
    """

    first: Trace
    before: Trace
    spelt: Trace
    final: Trace

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "Source":
        """Return the source of a model, given its traces before the first pass and after each."""
        order = list(PASSES)
        before, spelt = (traces[order.index(name)] for name in (_BEFORE_CONSTANTS, _SPELT_OUT))
        return cls(first=traces[0], before=before, spelt=spelt, final=traces[-1])

    @cached_property
    def _nodes(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.final.nodes}

    @cached_property
    def _before(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.before.nodes}

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {node.name: i for i, node in enumerate(self.spelt.nodes)}

    @cached_property
    def _depends(self) -> Mapping[str, Depends]:
        return dependencies(self.before)

    @cached_property
    def rates(self) -> Mapping[str, float]:
        """By value, the rate at which points are dropped while the network is trained; -1 if not for all readers."""
        found: dict[str, float] = {}
        for node in self.first.nodes:
            if not isinstance(node.op, Identity) or not node.op.rate:
                continue
            value, is_read_alone = node.inputs[0].value, True
            while True:
                is_read_alone &= len(self.first.users.get(value, ())) == 1 and value not in self.first.outputs
                maker = self.first.producer.get(value)
                if maker is None or value in self.spelt.producer or len(maker.inputs) != 1:
                    break
                value = maker.inputs[0].value
            found[value] = node.op.rate if is_read_alone and value not in found else -1.0
        return found

    def node(self, name: str) -> Node:
        """Return a node that was lowered."""
        return self._nodes[name]

    def described(self, name: str) -> str:
        """Return the operator of the source behind a node, for messages."""
        if name not in self._nodes:
            return ""
        origin = self._nodes[name].origin
        where = f" ({origin.line})" if origin.line else ""
        return f"{origin.operator}{where}: "

    def shape(self, use: Use) -> tuple[int, ...]:
        """Return the shape in which a value is read."""
        return self.spelt.shape(use)

    def is_computed(self, value: str) -> bool:
        """Whether floats that depend on the input are in a value, or it is an input of indices."""
        leaf = self.final.leaf.get(value)
        return leaf is None or leaf.role == "input"

    def is_of_input(self, value: str) -> bool:
        """Whether a value depends on an input of the model."""
        return self._depends.get(value) in (Depends.INDEX, Depends.CHOICE, Depends.ACTIVATION)

    def is_truth(self, value: str) -> bool:
        """Whether a value holds truth values."""
        return self.spelt.values[value].dtype == "bool"

    def held(self, value: str) -> str:
        """Return the value that is held in the end where another one was, for what was folded into its maker."""
        maker = self.final.producer.get(value)
        if maker is None or maker.outputs[0].name != value:
            return value
        return maker.computes or (maker.stands_for[0] if maker.stands_for else value)

    def final_use(self, node: Node, value: str) -> Use | None:
        """Return how a lowered node reads a value; None where it reads it in several ways."""
        found = {use for use in node.inputs if use.value == value}
        return found.pop() if len(found) == 1 else None

    def between(self, value: str, entries: set[str]) -> list[Node]:
        """Return the nodes that compute a value from others, in order."""
        wanted, frontier = set[str](), [value]
        while frontier:
            name = frontier.pop()
            node = self.spelt.producer.get(name)
            if node is None or node.name in wanted or (name in entries and name != value):
                continue
            wanted.add(node.name)
            frontier += [use.value for use in node.inputs if use.value not in entries]
        places = self._places
        return [self.spelt.nodes[i] for i in sorted(places[name] for name in wanted)]

    def view_of_held(self, value: str, name: str) -> View | None:
        """Return how a value that is held lies over the one that its maker wrote first; None where it is that."""
        view: View | None = None
        maker = self.final.producer.get(name)
        first, seen = (maker.stands_for if maker is not None else None) or (name, None)
        while value != first:
            node = self.spelt.producer[value]
            (use, *others) = [
                use for use in node.inputs if is_activation(self.spelt, use) and self._leads_to(use.value, first)
            ]
            shape = self.shape(use)
            own = use.view or View.plain(shape)
            if prod(shape) == prod(node.outputs[0].shape) != 0 and shape != node.outputs[0].shape:
                # A mean over dims of one point, or the like.
                own = own.reshaped(node.outputs[0].shape) or own
            is_plain = isinstance(node.op, Pointwise | Reduce) and all(other.view == use.view for other in others)
            if own.shape != node.outputs[0].shape or (not is_plain and any(o.view is not None for o in (use, *others))):
                raise NoBodyError("what its producer holds is not told")
            view = own if view is None else view.of(own)
            if view is None:
                raise NoBodyError("a view cuts a dim")
            value = use.value
        if seen is not None:
            view = seen if view is None else view.of(seen)
            if view is None:
                raise NoBodyError("a view cuts a dim")
        return None if view is None or view.is_plain else view

    def _leads_to(self, value: str, name: str) -> bool:
        frontier, done = [value], set[str]()
        while frontier:
            at = frontier.pop()
            if at == name:
                return True
            if at not in done and at in self.spelt.producer:
                done.add(at)
                frontier += [use.value for use in self.spelt.producer[at].inputs]
        return False

    def model_input(self, value: str) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of the input of the model whose elements a value holds, in their order.

        A value that is computed of inputs stands for itself.
        """
        name = value
        while name in self.before.producer:
            node = self.before.producer[name]
            if self._is_counted_from_the_end(node):
                name = node.inputs[2].value
                continue
            size = prod(self.before.shape(node.inputs[0])) if node.inputs else 0
            if not isinstance(node.op, Identity | Reshape) or size != prod(node.outputs[0].shape):
                return value, self.before.values[value].shape
            name = node.inputs[0].value
        return name, self.before.values[name].shape

    def _is_counted_from_the_end(self, node: Node) -> bool:
        """Whether a node is what JAX makes of indices, of which negative ones count from the end: data hold none."""
        if not isinstance(node.op, Pointwise) or node.op.functions != ("where",) or len(node.inputs) != 3:
            return False
        test, _, index = (use.value for use in node.inputs)
        maker = self.before.producer.get(test)
        is_test = maker is not None and isinstance(maker.op, Pointwise) and maker.op.functions == ("less",)
        if maker is None or not is_test or not isinstance(maker.op, Pointwise) or maker.op.constant != 0:
            return False
        return maker.inputs[0].value == index and self._depends.get(index) is Depends.INDEX

    def number(self, value: str) -> float | None:
        """Return the number that all elements of a value are, for data of the model's vocabulary; None where they vary.

        Targets that a loss leaves out are negative numbers, which a program takes no data of: none is left out.
        """
        node = self.before.producer.get(value)
        if node is None:
            leaf = self.before.leaf.get(value)
            return None if leaf is None else leaf.number
        numbers = [self.number(use.value) for use in node.inputs]
        match node.op:
            case Pointwise(functions=("not_equal",), constant=float(ignored)) if ignored < 0:
                return 1.0 if self._depends.get(node.inputs[0].value) is Depends.INDEX else None
            case Identity() | Reshape() | Transpose() | Broadcast() | Pointwise(functions=("cast",)):
                return numbers[0]
            case Reduce(function="sum") if numbers[0] is not None:
                return numbers[0] * prod(self.before.shape(node.inputs[0])) / prod(node.outputs[0].shape)
            case Pointwise(functions=("where",)) if numbers[0] is not None and len(numbers) == 3:
                return numbers[1] if numbers[0] else numbers[2]
            case Pointwise(functions=(str(function),)) if function in _OF_NUMBERS and None not in numbers:
                own = [number for number in numbers if number is not None]
                if node.op.constant is not None:
                    own = [node.op.constant, *own] if node.op.constant_first else [*own, node.op.constant]
                return _computed(function, own)
        return None

    def is_zero(self, value: str) -> bool:
        """Whether a value is made of zeros, as PyTorch makes the first states of recurrent layers."""
        node = self.before.producer.get(value)
        return node is not None and node.origin.operator.split(".")[:2] in (["aten", "zeros"], ["aten", "zeros_like"])

    def num_inputs(self, node: Node) -> int:
        """Return how many inputs a node had before weights that its weights are computed of were added to them."""
        own = self._before.get(node.name)
        return len(node.inputs) if own is None else min(len(own.inputs), len(node.inputs))

    def is_weight(self, value: str) -> bool:
        """Whether a value is a weight, or stands for what is computed of weights alone."""
        leaf = self.spelt.leaf.get(value)
        return leaf is not None and leaf.role == "parameter"

    def constant(self, node: Node, position: int) -> TensorRef | None:
        """Return what depends on no input of the model and on no weight; a number where it is one."""
        use = node.inputs[position]
        leaf = self.spelt.leaf.get(use.value)
        if leaf is None or leaf.role != "constant":
            return None
        own = self.use_before(node, position) or use
        number = leaf.number if leaf.number is not None or own.piece or own.view else self.number(own.value)
        if number is not None:
            return TensorRef(operand=number, shape=(1,), axes=((),))
        return TensorRef(operand="", shape=self.shape(use), source=use)

    def use_before(self, node: Node, position: int) -> Use | None:
        """Return how a node read an input before weights stood for what is computed of them; None where it did not."""
        own = self._before.get(node.name)
        return None if own is None or position >= len(own.inputs) else own.inputs[position]

    def depends_on_weights(self, value: str) -> bool:
        """Whether a value is computed of weights."""
        frontier, done = [value], set[str]()
        while frontier:
            at = frontier.pop()
            leaf = self.before.leaf.get(at)
            if leaf is not None and leaf.role == "parameter":
                return True
            if at not in done and at in self.before.producer:
                done.add(at)
                frontier += [use.value for use in self.before.producer[at].inputs]
        return False

    def outputs(self, node: Node) -> Iterator[tuple[str, Use, tuple[int, ...]]]:
        """Yield what the model returns of a node: its name, how it is read of what the node holds, and its shape."""
        held = self.held(node.outputs[0].name)
        for name, use in self._returned(held):
            yield name, self._as_spelt(use, self.spelt.values[held].shape), self.before.values[name].shape

    def returned(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of what the model returns of a node, by its name; nothing where it is none."""
        node = self._nodes.get(name)
        for output, _ in self._returned(self.held(node.outputs[0].name)) if node is not None else ():
            yield output, self.before.values[output].shape

    def _returned(self, held: str) -> Iterator[tuple[str, Use]]:
        """Yield the outputs of the model that are a value, or a view of it, and how they are read of it."""
        for name in self.before.outputs:
            use: Use | None = Use(value=name)
            while use is not None and use.value != held and use.value in self.before.producer:
                maker = self.before.producer[use.value]
                if isinstance(maker.op, Identity):
                    behind: Use | None = maker.inputs[0]
                else:
                    behind = seen_by(self.before, maker)
                shape = None if behind is None else self.before.values[behind.value].shape
                use = None if behind is None or shape is None else composed(use, behind, shape)
            if use is not None and use.value == held:
                yield name, use

    def _as_spelt(self, use: Use, shape: tuple[int, ...]) -> Use:
        """Return a use of a value whose merged dims may have been taken apart since."""
        before = self.before.values[use.value].shape
        if before == shape:
            return use
        whole = View.plain(shape).reshaped(before)
        found = None if whole is None else composed(use, Use(value=use.value, view=whole), shape)
        if found is None or prod(before) != prod(shape):
            raise NoBodyError("what the model returns is a view that is not told")
        return found


_OF_NUMBERS: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "add": lambda x, y: x + y,
        "divide": lambda x, y: x / y,
        "exp": exp,
        "log": log,
        "multiply": lambda x, y: x * y,
        "negate": lambda x: -x,
        "power": pow,
        "rsqrt": lambda x: 1 / sqrt(x),
        "sqrt": sqrt,
        "subtract": lambda x, y: x - y,
    }
)
"""Functions of numbers that a source computes with beside its tensors."""


def _computed(function: str, numbers: Sequence[float]) -> float | None:
    """Return a function of numbers; None where it has no value."""
    try:
        return float(_OF_NUMBERS[function](*numbers))
    except (ArithmeticError, TypeError, ValueError):
        return None
