"""`Precision`: the number types that a network is trained in, and the resulting type of every tensor.

A policy specifies the types of stored weights, of products, of gradients and their all-reduces, and of the optimiser's
state. If they are all equal, every tensor has that type. Mixed policies follow `torch.autocast` on a GPU: products take
operands of the low type and write it; functions that would lose too much accuracy are computed in float32 (see
`pase.graph.functions`); all others keep the widest type of their operands. Integers keep their type.

Approximations: a weight that is added to a product's result counts as its bias. Constants, including masks, take the
type of the tensors they are combined with. An operator that only its own framework knows keeps the widest type of its
operands.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import Annotated

from pase.common.structs import choice
from pase.errors import GraphError, unknown_name
from pase.graph.functions import TypeRule, function_of
from pase.graph.operator import Access, AllReduce, Exchange, Intermediate, Operator, Role

ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int32": 4}
)
"""Bytes of a number, by its type."""

UNIT_ROUNDOFFS: Mapping[str, float] = MappingProxyType(
    {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-4}
)
"""The largest relative error of rounding to a type."""

_OF_SUMS, _OF_RESULTS = 256.0, 4.0
"""Bounds on the rounding errors, in unit roundoffs, of a layer's sums and of its results, without cancellation."""

INDEX = "int32"
"""Type of integers, under every policy."""

_NUMBERS = tuple(dtype for dtype in ITEMSIZES if dtype != INDEX)
_Numbers = Annotated[str, choice(_NUMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A policy: the types of what a training step stores, computes and sends."""

    name: str
    """Name of the policy."""
    parameters: _Numbers
    """Type of weights, and of everything that is not a product's result."""
    products: _Numbers
    """Type of the operands of products with a weight, which run at the machine's peak for it."""
    results: _Numbers
    """Type of products' results, and of the operands of other products (convolutions, attention)."""
    gradients: _Numbers
    """Type in which gradients of weights are stored."""
    collectives: _Numbers
    """Type in which gradients of weights are all-reduced."""
    masters: Annotated[str, choice((*_NUMBERS, ""))] = ""
    """Type of the master weights that the optimiser updates; empty if these are the weights themselves."""
    moments: _Numbers
    """Type of the rest of the optimiser's state."""

    @property
    def is_mixed(self) -> bool:
        """Whether tensors have several types."""
        return self.results != self.parameters or self.products != self.results

    @property
    def multiplied(self) -> tuple[str, ...]:
        """Types of the operands of products."""
        return tuple(dict.fromkeys((self.products, self.results)))

    @property
    def itemsize(self) -> int:
        """Bytes of a weight element."""
        return ITEMSIZES[self.parameters]

    @property
    def text(self) -> str:
        """Description of the types; "" where they are all float32, the default."""
        types_by_use = {
            "products": " and ".join(self.multiplied),
            "weights": self.parameters,
            "gradients": self.gradients,
            "summed in": self.collectives,
            "masters": self.masters,
            "optimiser": self.moments,
        }
        types = {each for each in types_by_use.values() if each}
        if types == {"float32"}:
            return ""
        if len(types) == 1:
            return f"{self.name}   (all numbers {types.pop()})"
        return f"{self.name}   ({', '.join(f'{name} {each}' for name, each in types_by_use.items() if each)})"


def uniform(dtype: str, name: str = "") -> Precision:
    """Return the policy with one type for all numbers, by default named after the type."""
    one = dict.fromkeys(("parameters", "products", "results", "gradients", "collectives", "moments"), dtype)
    return Precision(name=name or dtype, **one)


def _mixed(name: str, *, products: str, results: str) -> Precision:
    wide = dict.fromkeys(("parameters", "gradients", "collectives", "moments"), "float32")
    return Precision(name=name, products=products, results=results, **wide)


FLOAT32 = uniform("float32")

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            FLOAT32,
            uniform("bfloat16", "bf16"),
            _mixed("bf16-mixed", products="bfloat16", results="bfloat16"),
            _mixed("fp16-mixed", products="float16", results="float16"),
            _mixed("fp8-mixed", products="float8", results="bfloat16"),
        )
    }
)
"""Policies by name. Mixed ones store weights, their gradients and the optimiser's state in float32: the weights are
their own masters, and gradients are reduced in float32."""

OF_ITEMSIZE: Mapping[int, Precision] = MappingProxyType({2: PRECISIONS["bf16"], 4: FLOAT32, 8: uniform("float64")})
"""Policies with one type, by its size in bytes."""


def precision_of(policy: "Precision | str") -> Precision:
    """Return a policy, by its name; GraphError for an unknown name."""
    if isinstance(policy, Precision):
        return policy
    if policy not in PRECISIONS:
        raise GraphError(unknown_name("precision", str(policy), PRECISIONS))
    return PRECISIONS[policy]


_STATISTICS = frozenset({"log_sums", "moments", "normalised", "softmax"})
"""Temporary tensors of operators that are computed in float32, by name."""


_SUMS_OF_PRODUCTS = frozenset({"gates", "hidden_gradient"})
"""Sums of products within operators, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTypes:
    """Number types of a layer's tensors.

    Attributes:
        precision: The policy.
        reads: Type in which each read arrives.
        operands: Type in which each read is used.
        writes: Type of each write.
        product: Type of the operands of its products.
        statistics: Type of small tensors that it reduces internally.
    """

    precision: Precision
    reads: tuple[str, ...]
    operands: tuple[str, ...]
    writes: tuple[str, ...]
    product: str
    statistics: str

    def read_bytes(self, position: int) -> int:
        """Return the bytes per element of a read as it arrives, and of its gradient as it is sent back to a layer."""
        return ITEMSIZES[self.reads[position]]

    def operand_bytes(self, position: int) -> int:
        """Return the bytes per element of a read as the layer uses it."""
        return ITEMSIZES[self.operands[position]]

    def write_bytes(self, position: int) -> int:
        """Return the bytes per element of a write, and of its gradient."""
        return ITEMSIZES[self.writes[position]]

    def gradient_sum_bytes(self, operator: Operator, position: int) -> int:
        """Return the bytes per element of the gradient of a read in its all-reduce."""
        is_weight = operator.reads[position].role is Role.PARAMETER
        return ITEMSIZES[self.precision.collectives] if is_weight else self.read_bytes(position)

    def exchange_bytes(self, exchange: Exchange) -> int:
        """Return the bytes per element of an exchange within an operator, averaged over all of its times."""
        own, wide = self.write_bytes(0), ITEMSIZES[self.statistics]
        if not isinstance(exchange, AllReduce) or exchange.tensor in _SUMS_OF_PRODUCTS:
            return own
        # Scores are the result of a product; their gradient is that of a softmax.
        return (own + wide) // 2 if exchange.tensor == "scores" and exchange.times == 2 else wide

    def intermediate_bytes(self, made: Intermediate) -> int:
        """Return the bytes per element of a temporary tensor of an operator."""
        size = ITEMSIZES[self.statistics if made.tensor in _STATISTICS else self.writes[0]]
        # The softmax within attention is saved in its own type, and in that of the next product's operands.
        is_taken = made.tensor == "softmax" and self.writes[0] != self.statistics
        return size + ITEMSIZES[self.writes[0]] * is_taken

    def is_cast(self, position: int) -> bool:
        """Return whether a read is converted to another type before use."""
        return self.reads[position] != self.operands[position]


def uniform_types(operator: Operator, precision: Precision) -> LayerTypes:
    """Return the types of an operator's tensors where all numbers except indices have one type."""
    own = precision.parameters
    reads = tuple(own if read.is_differentiable else INDEX for read in operator.reads)
    writes = tuple(own if write.is_differentiable else INDEX for write in operator.writes)
    return LayerTypes(
        precision=precision, reads=reads, operands=reads, writes=writes, product=precision.products, statistics=own
    )


def layer_types(
    operators: Sequence[Operator], producers: Mapping[tuple[str, int], tuple[str, int]], precision: Precision
) -> dict[str, LayerTypes]:
    """Return the types of each layer's tensors, by its name.

    Args:
        operators: The layers in topological order.
        producers: For each read that a layer feeds, (layer, position in its reads): the producer and the number of its
            output.
        precision: The policy.
    """
    found: dict[str, LayerTypes] = {}
    if not precision.is_mixed:
        return {operator.name: uniform_types(operator, precision) for operator in operators}
    for operator in operators:
        reads = []
        for position, read in enumerate(operator.reads):
            fed = producers.get((operator.name, position))
            own = precision.parameters if read.is_differentiable else INDEX
            reads.append(found[fed[0]].writes[fed[1]] if fed is not None and read.is_differentiable else own)
        found[operator.name] = _Typed(operator, tuple(reads), precision).types()
    return found


class _Typed:
    """Derives the types within one operator, step by step; `known` has each tensor's, "" for numbers and constants."""

    def __init__(self, operator: Operator, reads: tuple[str, ...], precision: Precision) -> None:
        self.operator, self.reads, self.precision = operator, reads, precision
        self.body = operator.body and (operator.body.own or operator.body)
        self.known = {read.tensor: dtype for read, dtype in zip(operator.reads, reads, strict=True)}
        self.weights = {read.tensor for read in operator.reads if read.role is Role.PARAMETER}
        self.products: set[str] = set()
        self.taken: dict[str, str] = {}
        self.product = precision.results

    def types(self) -> LayerTypes:
        """Return the types of the operator's tensors."""
        operator = self.operator
        if self.body is not None and self.body.steps:
            first = self._steps()
            others = dict(enumerate(self.body.others, start=1))
            results = [first, *(self.known.get(others.get(i, ""), first) for i in range(1, len(operator.writes)))]
        else:
            results = [self._by_kind()] * len(operator.writes)
        writes = tuple(self._own(result, write) for result, write in zip(results, operator.writes, strict=True))
        return LayerTypes(
            precision=self.precision,
            reads=self.reads,
            operands=tuple(
                self.taken.get(read.tensor) or own for read, own in zip(operator.reads, self.reads, strict=True)
            ),
            writes=tuple(writes[operator.wholes.get(i, i)] for i in range(len(writes))),
            product=self.product,
            statistics="float32",
        )

    def _own(self, dtype: str, access: Access) -> str:
        return dtype if access.is_differentiable else INDEX

    def _steps(self) -> str:
        """Evaluate the steps in order; return the type of the last one's result."""
        assert self.body is not None
        result = ""
        for step in self.body.steps:
            tensors = [operand for operand in step.operands if isinstance(operand, str)]
            function, wanted = step.function, ""
            types = function_of(function).types
            if function == "batch_norm" or (function == "normalise" and self.operator.kind == "batch_norm"):
                result = self.known.get(tensors[0], "")
            elif types is TypeRule.PRODUCT:
                result = self.precision.results
                is_by_weight = function == "einsum" and not self.weights.isdisjoint(tensors)
                self.product = wanted = self.precision.products if is_by_weight else result
                self.products.add(step.result)
            elif types is TypeRule.FLOAT32:
                result = wanted = "float32"
            elif function == "cast":
                result = str(step.option("to", "float32"))
            elif function == "add" and self._adds_bias(tensors):
                result = wanted = self.precision.results
                self.products.add(step.result)
            elif types is TypeRule.FIRST:
                result = self.known.get(tensors[0], "")
            else:
                result = self._widest(tensors)
            for tensor in tensors:
                if wanted and self.known.get(tensor, INDEX) != INDEX:
                    self.taken.setdefault(tensor, wanted)
            self.known[step.result] = result
        return result or self.precision.parameters

    def _adds_bias(self, tensors: Sequence[str]) -> bool:
        return len(tensors) == 2 and tensors[0] in self.products and tensors[1] in self.weights

    def _by_kind(self) -> str:
        """Return the type of the output of an operator without steps."""
        operator, floats = self.operator, [r.tensor for r in self.operator.reads if r.is_differentiable]
        if any(work.contraction for work in operator.work):
            self.taken = dict.fromkeys(floats, self.precision.results)
            return self.precision.results
        if operator.is_loss or "softmax" in operator.kind or operator.kind in ("layer_norm", "group_norm", "rms_norm"):
            self.taken = dict.fromkeys(floats, "float32")
            return "float32"
        return self._widest(floats) or self.precision.parameters

    def _widest(self, tensors: Iterable[str]) -> str:
        found = [dtype for tensor in tensors if (dtype := self.known.get(tensor, "")) not in ("", INDEX)]
        return max(found, key=ITEMSIZES.__getitem__, default="")


def rounding(results: str, sums: str, num_layers: int) -> float:
    """Return the relative rounding error of a chain of layers.

    Errors of layers are independent, so they grow with the square root of their number. The errors of one layer are
    those of its sums of many terms, and of writing the result.

    Args:
        results: Type that layers write.
        sums: Type that they accumulate in; float32 at least, even if they write a narrower type.
        num_layers: Number of consecutive layers.
    """
    of_sums = min(UNIT_ROUNDOFFS[sums], UNIT_ROUNDOFFS["float32"])
    return (_OF_SUMS * of_sums + _OF_RESULTS * UNIT_ROUNDOFFS[results]) * sqrt(max(1, num_layers))
