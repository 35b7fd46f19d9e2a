"""`Graph`: an immutable computation graph, figures derived from it, and its HTML display in notebooks.

The HTML has no script, and names are escaped. It works on light and dark pages: it inherits the page's colours, and
bars have the text's colour, made translucent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from html import escape
from math import inf, prod
from types import MappingProxyType

from pase.common.containers import FrozenDict
from pase.common.words import listed, quantity, short, visible
from pase.errors import EmitError, GraphError
from pase.graph.batch import Batch, batches
from pase.graph.operator import Access, AllToAll, Exchange, Operator, Role, Scalar
from pase.graph.precision import FLOAT32, LayerTypes, Precision, layer_types, precision_of

_PARTS = frozenset(part.name for part in fields(Operator)) - {"name"}
"""Fields of an operator other than its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor that flows from a producer to a consumer.

    Attributes:
        output: Position among the producer's writes.
        input: Position among the consumer's reads.
    """

    producer: str
    output: int
    consumer: str
    input: int


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A weakly connected, directed acyclic graph of operators, in topological order (PaSE section II).

    Notebooks show a graph as a table of its operators.

    Attributes:
        name, arguments: The model and the arguments it was built with.
        precision: Number types that it is trained in.
        framework: Framework of the model, "" for a network built with this package.
        call: Arguments of the model call, "" if unknown.
        untrained: Why emitted programs would train the model differently from the model itself, "" if they would not.
    """

    name: str
    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    arguments: tuple[tuple[str, Scalar], ...] = ()
    precision: Precision = FLOAT32
    framework: str = ""
    call: str = ""
    untrained: str = ""

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each operator by name."""
        return FrozenDict({operator.name: i for i, operator in enumerate(self.operators)})

    @cached_property
    def repeated(self) -> tuple[int, ...]:
        """[V] position of the first operator that is equal to each one except for names; possibly its own."""
        first: dict[Operator, int] = {}
        # Most equal operators share their parts, so that a comparison by identity settles them.
        same: dict[tuple[int, ...], int] = {}
        found = []
        for position, operator in enumerate(self.operators):
            parts = tuple(id(part) for name, part in vars(operator).items() if name in _PARTS)
            if parts not in same:
                same[parts] = first.setdefault(operator.unnamed, position)
            found.append(same[parts])
        return tuple(found)

    @cached_property
    def incoming(self) -> Mapping[tuple[str, int], Edge]:
        """Edge that feeds a read, by (consumer, input)."""
        return FrozenDict({(edge.consumer, edge.input): edge for edge in self.edges})

    @cached_property
    def outgoing(self) -> Mapping[str, tuple[Edge, ...]]:
        """Edges that leave each operator, by its name; operators without consumers are omitted."""
        found: dict[str, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.producer, []).append(edge)
        return FrozenDict({name: tuple(edges) for name, edges in found.items()})

    @cached_property
    def readers(self) -> Mapping[tuple[str, int], tuple[Edge, ...]]:
        """Edges from each tensor to its consumers, by (producer, output); tensors without consumers are omitted."""
        found: dict[tuple[str, int], list[Edge]] = {}
        for edge in self.edges:
            found.setdefault((edge.producer, edge.output), []).append(edge)
        return FrozenDict({tensor: tuple(edges) for tensor, edges in found.items()})

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        """[V] positions of the operators that share an edge with each one, N(v)."""
        sets: list[set[int]] = [set() for _ in self.operators]
        for edge in self.edges:
            u, v = self.index[edge.producer], self.index[edge.consumer]
            sets[u].add(v)
            sets[v].add(u)
        return tuple(frozenset(s) for s in sets)

    @cached_property
    def sharing(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """The reads of each shared weight, (layer, position), the owner's first, by the weight's name."""
        found: dict[str, list[tuple[str, int]]] = {}
        for operator in self.operators:
            for position, access in enumerate(operator.reads):
                if access.shared:
                    found.setdefault(access.shared, []).append((operator.name, position))
        return FrozenDict({weight: tuple(reads) for weight, reads in found.items()})

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """The first layer that uses each shared weight, by the weight's name."""
        return FrozenDict({weight: reads[0][0] for weight, reads in self.sharing.items()})

    @cached_property
    def _gradients(self) -> frozenset[tuple[str, int]]:
        # Trained weights, and outputs of layers with such a read: layers are in topological order.
        found: set[tuple[str, int]] = set()
        trained: set[str] = set()
        for operator in self.operators:
            for position, read in enumerate(operator.reads):
                edge = self.incoming.get((operator.name, position))
                is_computed = read.is_differentiable and edge is not None and edge.producer in trained
                if is_computed or (read.role is Role.PARAMETER and read.is_trained):
                    found.add((operator.name, position))
                    trained.add(operator.name)
        return frozenset(found)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Layers that are trained or depend on trained layers: gradients flow back to these."""
        return frozenset(name for name, _ in self._gradients)

    def leading_to(
        self,
        ends: Iterable[str],
        instead: Mapping[str, tuple[str, Sequence[int], Sequence[str]]] = MappingProxyType({}),
    ) -> set[str]:
        """Return the layers on which some layers depend, including themselves.

        Args:
            ends: The layers.
            instead: For layers with other dependencies than their reads: the layer whose reads replace theirs, the
                numbers of these reads, and additional layers.
        """
        wanted = set(ends)
        for operator in reversed(self.operators):
            if operator.name in wanted:
                own = (operator.name, range(len(operator.reads)), ())
                reader, numbers, more = instead.get(operator.name, own)
                wanted.update(more)
                reads = ((reader, number) for number in numbers)
                wanted.update(self.incoming[read].producer for read in reads if read in self.incoming)
        return wanted

    @property
    def is_imported(self) -> bool:
        """Whether it is an imported model: its layers record which inputs and outputs of the model they have."""
        return any(operator.body and (operator.body.inputs or operator.body.outputs) for operator in self.operators)

    @property
    def loss_layer(self) -> str:
        """The layer that computes the loss; EmitError where there is none or several.

        For an imported model it is the layer of the only output that is a single number.
        """
        where = f"network {short(self.name)!r}"
        if not self.is_imported:
            found = [operator.name for operator in self.operators if operator.is_loss]
            if len(found) != 1:
                raise EmitError(
                    f"{where} has {len(found)} losses; a training program needs exactly one (a softmax_loss layer)"
                )
            return found[0]
        told = [(o.name, output) for o in self.operators if o.body for output in o.body.outputs]
        numbers = [(name, output.name) for name, output in told if prod(output.shape) == 1]
        if len(numbers) != 1:
            names = listed([name for _, name in numbers])
            many = f"{len(numbers)} of its outputs are single numbers: {names}"
            raise EmitError(
                f"{where} has no loss that is known: {many if numbers else 'none of its outputs is a single number'}; "
                "to train it let its forward pass return the loss alone or with its outputs, or have a factory "
                "return (model, inputs, loss)"
            )
        return numbers[0][0]

    @cached_property
    def batch(self) -> Mapping[str, Batch]:
        """Position of the batch in the iteration space of each layer, by its name."""
        return FrozenDict(batches(self.operators, self._producers, self.repeated))

    @cached_property
    def types(self) -> Mapping[str, LayerTypes]:
        """Number types of each layer's tensors, by its name."""
        return FrozenDict(layer_types(self.operators, self._producers, self.precision))

    @property
    def _producers(self) -> dict[tuple[str, int], tuple[str, int]]:
        return {read: (edge.producer, edge.output) for read, edge in self.incoming.items()}

    def in_precision(self, policy: Precision | str | None) -> "Graph":
        """Return the graph trained under a precision policy, by its name; None for the model's own."""
        precision = self.precision if policy is None else precision_of(policy)
        return self if precision == self.precision else replace(self, precision=precision)

    def with_imbalance(self, factor: float | None) -> "Graph":
        """Return the graph with a load imbalance of its experts: the busiest device's rows relative to an equal share.

        None returns the graph unchanged. Raises GraphError for a factor below 1.
        """
        if factor is None:
            return self
        if not isinstance(factor, int | float) or not 1 <= factor < inf:
            raise GraphError(
                f"imbalance is {factor!r}; expected a number of 1 or more: the number of rows on the device with the "
                "busiest experts, relative to an equal share"
            )

        def routed(exchange: Exchange) -> Exchange:
            if isinstance(exchange, AllToAll) and exchange.excess is not None:
                return replace(exchange, excess=factor - 1.0)
            return exchange

        found = (tuple(map(routed, operator.exchanges)) for operator in self.operators)
        operators = tuple(
            operator if exchanges == operator.exchanges else replace(operator, exchanges=exchanges)
            for operator, exchanges in zip(self.operators, found, strict=True)
        )
        return self if operators == self.operators else replace(self, operators=operators)

    @property
    def imbalance(self) -> float:
        """Number of rows on the device with the busiest experts, relative to an equal share."""
        exchanges = (exchange for operator in self.operators for exchange in operator.exchanges)
        return 1.0 + max((x.excess or 0.0 for x in exchanges if isinstance(x, AllToAll)), default=0.0)

    def __repr__(self) -> str:
        return f"<Graph {short(self.name)}: {len(self.operators):,} operators, {len(self.edges):,} edges>"

    def __getitem__(self, name: str) -> Operator:
        """Return the operator of that name; KeyError if there is none."""
        return self.operators[self.index[name]]

    def has_gradient(self, operator: Operator, read: int) -> bool:
        """Return whether the backward pass computes a read's gradient: it is trained, or depends on trained weights.

        Data and indices have no gradient, nor do tensors that are computed from them without trained weights.
        """
        return (operator.name, read) in self._gradients

    @cached_property
    def _read_gradients(self) -> Mapping[str, tuple[bool, ...]]:
        gradients = self._gradients
        return FrozenDict(
            {o.name: tuple((o.name, read) in gradients for read in range(len(o.reads))) for o in self.operators}
        )

    def read_gradients(self, operator: Operator) -> tuple[bool, ...]:
        """Return for each read of an operator whether it has a gradient."""
        return self._read_gradients[operator.name]

    @property
    def num_parameters(self) -> int:
        """Number of weight elements, frozen ones included; a shared parameter counts once."""
        sizes: dict[str, int] = {}
        for operator in self.operators:
            for access in operator.parameters:
                sizes[access.shared or f"{operator.name}/{access.tensor}"] = access.size
        return sum(sizes.values())

    def forward_flop(self, *, contractions_only: bool = False) -> float:
        """Return the FLOP of one forward pass over the batch, a multiply-add counted as two."""
        return sum(
            work.flop_per_point * operator.work_points(work)
            for operator in self.operators
            for work in operator.work
            if work.contraction or not contractions_only
        )

    def _repr_html_(self) -> str:
        counts = [
            f"{len(self.operators):,} operators, {len(self.edges):,} edges, {self.num_parameters:,} parameters",
            f"{quantity(self.forward_flop(), 'FLOP')} in a forward pass",
        ]
        producers = {read: edge.producer for read, edge in self.incoming.items()}
        return page_html(
            name_html(self.name),
            list(map(escape, counts)),
            ("operator", "kind", "iteration space", "reads", "writes"),
            [_operator_cells(operator, producers) for operator in self.operators],
        )


# -- HTML for notebooks


SHOWN_ROWS = 40
"""Number of table rows that are expanded; the others open at a click."""

MOST_ROWS = 500
"""Maximum number of table rows."""

_CELL = "text-align:left;vertical-align:top;padding:0.15em 0.8em 0.15em 0"
_NUMBER = "display:inline-block;min-width:3.5em"
_BAR = "display:inline-block;height:0.7em;background:currentColor;opacity:0.45"


def name_html(name: str) -> str:
    """Return a name as text in HTML; a name that is too long to show has its full text as a tooltip."""
    shown, whole = short(name), visible(name)
    return escape(shown) if shown == whole else f'<span title="{escape(whole)}">{escape(shown)}</span>'


def bar_html(share: float, largest: float) -> str:
    """Return a share between 0 and 1 with a bar, scaled so that the largest share has the longest."""
    length = share / largest if largest else 0.0
    return f'<span style="{_NUMBER}">{share:.1%}</span><span style="{_BAR};width:{6 * length:.2f}em"></span>'


def page_html(title: str, lines: Sequence[str], headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a title, lines and a table as HTML; title, lines and rows are HTML already, headers are text.

    The first rows of a long table are expanded and the others collapsed; a very long one is truncated.
    """
    rest = rows[SHOWN_ROWS:MOST_ROWS]
    missing = len(rows) - SHOWN_ROWS - len(rest)
    parts = [f"<div><p><strong>{title}</strong>", *(f"<br>{line}" for line in lines), "</p>"]
    parts += [_table(headers, rows[:SHOWN_ROWS])]
    if rest:
        parts += [f"<details><summary>{len(rest)} more</summary>", _table(headers, rest), "</details>"]
    if missing > 0:
        parts += [f"<p>and {missing} that are not shown</p>"]
    return "".join((*parts, "</div>"))


def _operator_cells(operator: Operator, producers: Mapping[tuple[str, int], str]) -> list[str]:
    reads = [
        f"{_tensor(access)}{_origin(access, producers.get((operator.name, i)))}"
        for i, access in enumerate(operator.reads)
    ]
    return [
        name_html(operator.name),
        name_html(operator.kind),
        " ".join(f"{name_html(dim.name)}={dim.extent}" for dim in operator.dims),
        "<br>".join(reads),
        "<br>".join(map(_tensor, operator.writes)),
    ]


def _tensor(access: Access) -> str:
    return f"{name_html(access.tensor)} {'×'.join(map(str, access.shape))}"


def _origin(access: Access, producer: str | None) -> str:
    if producer is not None:
        return f" from {name_html(producer)}"
    if access.role is Role.PARAMETER:
        return f", weight shared as {name_html(access.shared)}" if access.shared else ", weight"
    return ", data"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th style="{_CELL}">{escape(header)}</th>' for header in headers)
    cells = [[f'<td style="{_CELL}">{cell}</td>' for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
