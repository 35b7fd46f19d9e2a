"""What a strategy must keep to: pinned configurations, dims that are not split, layers that are alike, one mesh.

A constraint names layers by their names, in which ``*`` stands for any text, and leaves some of their configurations;
the search is exact among the strategies that are left. A configuration is written as PaSE prints it, "n=4 c=2": dims
that it does not name are not split, unless it ends in ``*``, which leaves them free. "×8" at its end, by which PaSE
says that eight devices have each part, is held against the number of devices. Beside dims a pin may name a state of
weights, "n=4 zero2", and what is forbidden may be states, and that a layer is recomputed: "h w zero3 recompute".

    tie = ["layers.*.attn.q, layers.*.attn.k"]

    [pin]
    "fc1" = "n=4 c=2"
    "decoder.*.mlp.*" = "n=8 *"

    [forbid]
    "conv*" = "h w"
    "*" = "zero3"

    [mesh]
    data = 8
    model = 4

    [devices]
    "fc1" = [0, 2, 4, 6, 1, 3, 5, 7]
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.common.documents import DocumentSource, StrPath, read_text, toml_document
from pase.common.structs import Document, Positive, Whole, json_schema, read
from pase.costs import Problem
from pase.costs.states import STATES, ModeSpace
from pase.errors import ConfigurationError
from pase.graph import Graph, Operator
from pase.sharding.shards import IndexArray, enumerate_configurations
from pase.tables.cost_tables import EdgeTable, restricted_edge

Mask = NDArray[np.bool_]

MOST_SHOWN = 6
"""Of names and configurations that an error lists."""

RECOMPUTE = "recompute"
MODES = (*STATES[1:], RECOMPUTE)
"""Of layers, that a search may choose."""

NOT_SPLIT = "not split"
"""The configuration that has nothing to name, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """layers: patterns of those that it is about; () for all. where: what messages call it."""

    layers: tuple[str, ...] = ()
    where: str = field(default="a constraint", compare=False)

    def allowed(self, operator: Operator, configurations: IndexArray) -> Mask:
        """Return which of a layer's configurations, [K, D], are left; ConfigurationError where it makes no sense."""
        del operator
        return np.ones(len(configurations), dtype=bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin(Constraint):
    """Layers have this configuration.

    splits: by dim. is_partial: whether the dims that it does not name are free. copies: how many devices have each
    part, where that is said; it follows from the splits and the number of devices. state: of the weights, in `STATES`;
    None where that is free.
    """

    splits: Mapping[str, int]
    is_partial: bool = False
    copies: int | None = None
    state: str | None = None

    def allowed(self, operator: Operator, configurations: IndexArray) -> Mask:
        """Return which configurations agree with it."""
        _check_dims(self.where, operator, self.splits)
        mask = np.ones(len(configurations), dtype=bool)
        for column, dim in enumerate(operator.extents):
            if dim in self.splits or not self.is_partial:
                mask &= configurations[:, column] == self.splits.get(dim, 1)
        return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbid(Constraint):
    """Layers do not split these dims, where they have them, and are in none of these modes, in `MODES`."""

    dims: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()

    def allowed(self, operator: Operator, configurations: IndexArray) -> Mask:
        """Return which configurations leave the dims whole."""
        columns = [column for column, dim in enumerate(operator.extents) if dim in self.dims]
        mask: Mask = (configurations[:, columns] == 1).all(axis=1)
        return mask


class Tie(Constraint):
    """All of these layers have the same configuration."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMesh(Constraint):
    """Every layer is split along the axes of one mesh: each axis splits one of its dims, or none. axes: sizes."""

    axes: Mapping[str, int]

    def allowed(self, operator: Operator, configurations: IndexArray) -> Mask:
        """Return which configurations are products of axes."""
        del operator
        made = {(1,) * configurations.shape[1]}
        for size in self.axes.values():
            made |= {(*row[:i], row[i] * size, *row[i + 1 :]) for row in made for i in range(len(row))}
        return np.fromiter((tuple(row) in made for row in configurations.tolist()), bool, len(configurations))


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesOf(Constraint):
    """The devices of a layer's parts, row-major over the dims that are split and then the replicas: costs stay."""

    devices: tuple[int, ...]


Constraints = tuple[Constraint, ...]


# -- from text, files and Python


def splits_text(splits: Mapping[str, int]) -> str:
    """Return what `pin` reads as a whole configuration: "b=4 n=2", or "not split"."""
    return " ".join(f"{dim}={k}" for dim, k in splits.items() if k > 1) or NOT_SPLIT


def pin(layers: str, text: str, where: str) -> Pin:
    """Return the pin of layers to a configuration as PaSE prints it; ConfigurationError for another text.

    text: "n=4 c=2", "n=4 c=2 ×8" or "not split ×8", and "n=4 *" where the other dims are free. Any may name a state of
    weights, too, "n=4 zero2"; a state alone leaves all dims free.
    """
    splits: dict[str, int] = {}
    words = text.replace(",", " ").split()
    states = [word for word in words if word in STATES]
    if len(states) > 1:
        raise ConfigurationError(f"{where} names the states {' and '.join(states)}; a layer has one of them")
    words = [word for word in words if word not in STATES] or ["*"] * bool(states)
    if not words:
        raise ConfigurationError(f"{where} is empty; expected splits such as 'n=4 c=2', or '{NOT_SPLIT}'")
    copies = re.fullmatch(r"[×x]([1-9][0-9]{0,8})", words[-1])
    is_partial = words[-1] == "*"
    named = words[:-1] if is_partial or (copies and len(words) > 1) else words
    for word in [] if named == NOT_SPLIT.split() else named:
        found = re.fullmatch(r"([^=\s]+)=([1-9][0-9]{0,8})", word)
        if not found or found[1] in splits:
            what = f"names dim {found[1]!r} twice" if found else f"has {word[:60]!r}"
            raise ConfigurationError(
                f"{where} {what}; expected splits such as 'n=4 c=2', with ' *' where the other dims are free"
            )
        splits[found[1]] = int(found[2])
    return Pin(
        layers=(layers,),
        splits=splits,
        is_partial=is_partial,
        copies=int(copies[1]) if copies else None,
        state=states[0] if states else None,
        where=where,
    )


def forbid(layers: str, text: str, where: str) -> Forbid:
    """Return what forbids dims, "h w", to be split, and modes, "zero3 recompute"."""
    words = tuple(text.replace(",", " ").split())
    if not words:
        raise ConfigurationError(
            f"{where} names no dim; expected those that are not split, such as 'h w', or modes: {', '.join(MODES)}"
        )
    dims, modes = (tuple(word for word in words if (word in MODES) == is_mode) for is_mode in (False, True))
    return Forbid(layers=(layers,), dims=dims, modes=modes, where=where)


def tie(text: str, where: str) -> Tie:
    """Return what ties layers, "q, k", to one configuration."""
    layers = tuple(part for part in (part.strip() for part in text.split(",")) if part)
    if not layers:
        raise ConfigurationError(f"{where} names no layer; expected patterns such as 'layers.*.q, layers.*.k'")
    return Tie(layers=layers, where=where)


def one_mesh(axes: Mapping[str, int], where: str) -> OneMesh:
    """Return what has all layers use one mesh."""
    if not axes:
        raise ConfigurationError(f"{where} has no axis; expected sizes by name, such as data=8,model=4")
    return OneMesh(axes=dict(axes), where=where)


class ConstraintsDocument(Document, forbid_unknown_fields=True):
    """What a strategy must keep to: the search is exact among the strategies that do. Layers are named by their names,
    in which * stands for any text."""

    pin: dict[str, str] = msgspec.field(default_factory=dict)
    """Configurations by layer: splits by dim, 'n=4 c=2'; other dims are not split, unless ' *' at the end leaves them
    free; 'not split' for none. A state of weights, 'n=4 zero2', or alone, is kept to, too."""
    forbid: dict[str, str] = msgspec.field(default_factory=dict)
    """Dims that are not split and modes that layers are not in, by layer, 'h w zero3': zero1, zero2, zero3,
    recompute."""
    tie: tuple[str, ...] = ()
    """Groups of layers that have the same configuration, 'layers.*.q, layers.*.k'."""
    mesh: dict[str, Positive] | UnsetType = UNSET
    """Axes of one mesh, with the number of devices along each: every layer is split by products of some of them, each
    axis splitting one of its dims at most."""
    devices: dict[str, Annotated[tuple[Whole, ...], Meta(min_length=1, extra_json_schema={"uniqueItems": True})]] = (
        msgspec.field(default_factory=dict)
    )
    """The devices of a layer's parts, by layer: row-major over the dims that are split and then the replicas; every
    device once."""

    @classmethod
    def of(cls, value: Constraints, **others: Any) -> Self:
        document = cls(pin={}, forbid={}, devices={}, **others)
        for constraint in value:
            match constraint:
                case Pin(splits=splits, is_partial=is_partial, copies=copies, state=state):
                    words = [f"{dim}={k}" for dim, k in splits.items()] or ([] if is_partial else [NOT_SPLIT])
                    words += [state] if state else []
                    # A state alone leaves dims free.
                    more = ["*"] if is_partial and words != [state] else [f"×{copies}"] if copies else []
                    document.pin[constraint.layers[0]] = " ".join([*words, *more])
                case Forbid(dims=dims, modes=modes):
                    document.forbid[constraint.layers[0]] = " ".join([*dims, *modes])
                case Tie():
                    document.tie += (", ".join(constraint.layers),)
                case OneMesh(axes=axes):
                    document.mesh = dict(axes)
                case DevicesOf(devices=devices):
                    document.devices[constraint.layers[0]] = devices
        return document

    def constraints(self, where: str) -> Constraints:
        """Return the constraints; ConfigurationError for texts that are none. where: what messages begin with."""
        found: list[Constraint] = [
            *(pin(layers, text, f"{where}pin.{layers}") for layers, text in self.pin.items()),
            *(forbid(layers, text, f"{where}forbid.{layers}") for layers, text in self.forbid.items()),
            *(tie(text, f"{where}tie[{number}]") for number, text in enumerate(self.tie)),
        ]
        if self.mesh is not UNSET:
            found.append(one_mesh(self.mesh, f"{where}mesh"))
        found += [
            DevicesOf(layers=(layers,), devices=devices, where=f"{where}devices.{layers}")
            for layers, devices in self.devices.items()
        ]
        return combined(found)


KINDS = ConstraintsDocument.__struct_fields__


def constraint_texts(constraints: Constraints) -> tuple[str, ...]:
    """Return constraints as people write them on a command line: "pin fc1: n=4 c=2"."""
    found = []
    for kind, entries in ConstraintsDocument.of(constraints).builtins().items():
        match kind:
            case "tie":
                found += [f"tie {layers}" for layers in entries]
            case "mesh":
                found.append("mesh " + ", ".join(f"{axis}={size}" for axis, size in entries.items()))
            case "devices":
                found += [f"devices of {layers}: {' '.join(map(str, devices))}" for layers, devices in entries.items()]
            case _:
                found += [f"{kind} {layers}: {text}" for layers, text in entries.items()]
    return tuple(found)


def combined(constraints: Iterable[Constraint]) -> Constraints:
    """Return constraints of several origins together; ConfigurationError where one kind speaks twice of a layer."""
    found: dict[Hashable, Constraint] = {}
    for each in constraints:
        first = found.setdefault((type(each), each.layers), each)
        if first is not each and first != each:
            raise ConfigurationError(f"{each.where} speaks of what {first.where} does, too; give one of them")
    # As documents list them, so that they come back from one in the same order.
    return tuple(sorted(found.values(), key=lambda constraint: _ORDER.index(type(constraint))))


_ORDER = (Pin, Forbid, Tie, OneMesh, DevicesOf, Constraint)


def load_constraints(path: StrPath) -> Constraints:
    """Return the constraints in a TOML file; ConfigurationError names the file and the field."""
    source = DocumentSource(ConfigurationError, f"constraints file {path}")
    return _read(toml_document(read_text(path, source.error, source.name), source), source)


def _read(document: object, source: DocumentSource) -> Constraints:
    return read(ConstraintsDocument, document, source).constraints(f"{source.name}: ")


def constraints_of(given: object) -> Constraints:
    """Return constraints that a caller gives: some of them, a document as files have it, or the path of a file."""
    if isinstance(given, str | Path):
        return load_constraints(given)
    if isinstance(given, Mapping):
        return _read(_plain(given), DocumentSource(ConfigurationError, "constraints"))
    if isinstance(given, Sequence) and all(isinstance(each, Constraint) for each in given):
        return combined(given)
    raise ConfigurationError(
        f"constraints are {given!r:.60}; expected the path of a file, a dict with {', '.join(KINDS)}, or some of "
        "pase.planning.constraints"
    )


def _plain(value: object) -> object:
    """Return a value with lists and dicts for all of their kind."""
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, list | tuple | range) else value


def constraints_schema() -> str:
    """Return the JSON Schema of constraints files, as text."""
    return json_schema(ConstraintsDocument, identifier="urn:pase:constraints:1", title="PaSE constraints")


# -- what they leave of a problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allowed:
    """What constraints leave of the strategies for a graph on a number of devices.

    every: the configurations that a layer has without them, beside those that a pin names as a whole: their splits need
    not divide the extents. of: by layer, the constraints that are about it. ties: groups of layers that are alike, by
    name, each with one of the ties that make it.
    """

    every: Callable[[Graph, Operator], IndexArray]
    of: Mapping[str, Constraints]
    ties: tuple[tuple[Tie, tuple[str, ...]], ...]
    num_devices: int
    _known: dict[Hashable, IndexArray] = field(default_factory=dict)

    def configurations(self, graph: Graph, operator: Operator) -> IndexArray:
        """Return the configurations of a layer, [K, D]; ConfigurationError where none is left."""
        tied = next(((each, names) for each, names in self.ties if operator.name in names), None)
        key = (operator.unnamed, tuple(map(id, self.of[operator.name]))) if tied is None else tied[1]
        if key in self._known:
            return self._known[key]
        found = self._own(graph, operator)
        for name in tied[1] if tied else ():
            common = set(map(tuple, self._own(graph, graph[name]).tolist()))
            left = found[[tuple(row) in common for row in found.tolist()]]
            if tied and not len(left):
                raise _nothing_left(tied[0], operator, found, f"; layer {name!r} has none of these")
            found = left
        self._known[key] = found
        return found

    def mapping(self, graph: Graph) -> dict[str, IndexArray]:
        """Return the configurations of the layers that constraints are about, by name."""
        tied = {name for _, names in self.ties for name in names}
        return {
            operator.name: self.configurations(graph, operator)
            for operator in graph.operators
            if self.of[operator.name] or operator.name in tied
        }

    def with_pinned(self, graph: Graph, operator: Operator) -> IndexArray:
        """Return all configurations of a layer, and those that pins name as a whole if parts are one point or more."""
        found = self.every(graph, operator)
        for each in self.of[operator.name]:
            if not isinstance(each, Pin) or each.is_partial:
                continue
            row = np.array([each.splits.get(dim, 1) for dim in operator.extents], dtype=found.dtype)
            is_possible = self.num_devices % prod(row.tolist()) == 0 and all(
                k == 1 or (k <= extent and dim not in operator.unsplittable)
                for k, (dim, extent) in zip(row.tolist(), operator.extents.items(), strict=True)
            )
            if is_possible and not (found == row).all(axis=1).any():
                found = np.concatenate([found, row[np.newaxis]])
        return found

    def uneven(self, graph: Graph) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
        """Return the layers for which a pin names, as a whole, splits that do not divide their dims, with these."""
        return tuple(
            (name, tuple(each.splits.items()))
            for name, of_layer in self.of.items()
            for each in of_layer
            if isinstance(each, Pin)
            and not each.is_partial
            and any(graph[name].extents.get(dim, k) % k for dim, k in each.splits.items())
        )

    def _own(self, graph: Graph, operator: Operator) -> IndexArray:
        """Return what is left where other layers are no matter."""
        found = self.with_pinned(graph, operator)
        for number, each in enumerate(self.of[operator.name]):
            left = found[each.allowed(operator, found)]
            if not len(left):
                before = ", with the constraints before it" if number else ""
                raise _nothing_left(each, operator, found, before)
            found = left
        return found


def allowed(
    constraints: Constraints,
    graph: Graph,
    num_devices: int,
    every: Callable[[Graph, Operator], IndexArray] | None = None,
) -> Allowed:
    """Return what constraints leave of a graph's strategies.

    Args:
        constraints: what is to be kept to.
        graph: with its fan-outs.
        num_devices: p.
        every: the configurations that a layer has without constraints; by default all that there are.

    Raises:
        ConfigurationError: a constraint that no layer matches, or that makes no sense for one that does.
    """
    of: dict[str, list[Constraint]] = {name: [] for name in graph.index}
    ties: list[tuple[Tie, set[str]]] = []
    for each in constraints:
        if isinstance(each, OneMesh):
            _check_mesh(each, num_devices)
        if isinstance(each, Pin):
            _check_copies(each, num_devices)
        names = list(dict.fromkeys(name for layers in each.layers for name in _matching(layers, graph, each.where)))
        for name in names or graph.index:
            of[name].append(each)
        if isinstance(each, Forbid):
            _check_forbidden(each, [graph[name] for name in names])
        if isinstance(each, Tie):
            _check_tied(each, [graph[name] for name in names])
            # What has a layer in common with others is one group with them.
            near = [other for other in ties if not other[1].isdisjoint(names)]
            ties = [other for other in ties if other not in near] + [(each, set(names).union(*(o[1] for o in near)))]
        if isinstance(each, DevicesOf):
            _check_placed(each, num_devices)
    return Allowed(
        every=every or (lambda _, operator: enumerate_configurations(operator, num_devices)),
        of={name: tuple(found) for name, found in of.items()},
        ties=tuple((each, tuple(name for name in graph.index if name in group)) for each, group in ties),
        num_devices=num_devices,
    )


def mode_space(space: ModeSpace, constraints: Constraints, graph: Graph) -> ModeSpace:
    """Return what constraints leave of the modes to choose from; ConfigurationError where they leave a layer none.

    graph: with its fan-outs.
    """
    layers: dict[str, ModeSpace] = {}
    for each in constraints:
        kept, forbidden = space.states, tuple[str, ...]()
        match each:
            case Pin(state=str(state)):
                kept = (state,)
            case Forbid(modes=modes) if modes:
                forbidden = modes
            case _:
                continue
        for name in (name for layers_of in each.layers for name in _matching(layers_of, graph, each.where)):
            own = layers.get(name, space.of(name))
            states = tuple(state for state in own.states if state in kept and state not in forbidden)
            if not states:
                have = ", ".join(own.states)
                raise ConfigurationError(
                    f"{each.where}: that leaves layer {name!r} no state of its weights; it has {have} to choose from "
                    f"(--modes, of {', '.join(STATES[1:])})"
                )
            layers[name] = replace(own, states=states, recompute=own.recompute and RECOMPUTE not in forbidden)
    return replace(space, layers=FrozenDict({**space.layers, **layers}))


def devices_by_hand(constraints: Constraints, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return the devices of the parts of those layers that constraints place, by name."""
    placed = [each for each in constraints if isinstance(each, DevicesOf)]
    return {
        name: each.devices for each in placed for layers in each.layers for name in _matching(layers, graph, each.where)
    }


def with_ties(problem: Problem, ties: Iterable[Sequence[str]]) -> Problem:
    """Return a problem in which the layers of each group have the same configuration.

    In which modes they are is up to each. A tie is an edge of the tables, after all others, that costs nothing where
    both ends are split alike, and infinitely much elsewhere.
    """
    index, tables, layers = problem.graph.index, problem.tables, problem.choices.layers
    edges, edge_tables, edge_table = list(tables.edges), list(tables.edge_tables), list(tables.edge_table)
    for group in ties:
        numbers: dict[bytes, int] = {}
        known: dict[tuple[int, int], int] = {}
        for u, v in pairwise(index[name] for name in group):
            key = id(layers[u]), id(layers[v])
            if key not in known:
                known[key] = len(edge_tables)
                rows, cols = (_numbers_of_choices(problem, end, numbers) for end in (u, v))
                alike = np.where(np.eye(len(numbers), dtype=bool), 0.0, np.inf)
                edge_tables.append(restricted_edge(EdgeTable.from_dense(alike), rows, cols))
            edges.append((u, v))
            edge_table.append(known[key])
    hiding = tables.hiding
    more = (None,) * (len(edge_tables) - len(tables.edge_tables))
    tied = replace(
        tables,
        edges=tuple(edges),
        edge_tables=tuple(edge_tables),
        edge_table=tuple(edge_table),
        hiding=hiding and replace(hiding, edges=(*hiding.edges, *more)),
    )
    return replace(problem, tables=tied)


def _numbers_of_choices(problem: Problem, vertex: int, numbers: dict[bytes, int]) -> IndexArray:
    """Return [C] a number for the configuration of each choice of a vertex, the same as of others in `numbers`."""
    of_rows = [numbers.setdefault(row.tobytes(), len(numbers)) for row in problem.configurations[vertex]]
    return np.array(of_rows, dtype=np.int32)[problem.choices.layers[vertex].rows]


# -- errors


def _matching(pattern: str, graph: Graph, where: str) -> Iterator[str]:
    if pattern in graph.index:
        yield pattern
        return
    names = [name for name in graph.index if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name)]
    if not names:
        near = get_close_matches(pattern, graph.index, n=MOST_SHOWN, cutoff=0.4) or list(graph.index)[:MOST_SHOWN]
        raise ConfigurationError(f"{where}: no layer of {graph.name!r} is {pattern!r}; there are {', '.join(near)}, …")
    yield from names


def _check_dims(where: str, operator: Operator, dims: Iterable[str]) -> None:
    for dim in dims:
        if dim not in operator.extents:
            has = ", ".join(f"{name}={extent}" for name, extent in operator.extents.items())
            raise ConfigurationError(f"{where}: layer {operator.name!r} has no dim {dim!r}; it has {has}")


def _check_forbidden(each: Forbid, operators: Sequence[Operator]) -> None:
    for dim in each.dims:
        if not any(dim in operator.extents for operator in operators):
            dims = ", ".join(dict.fromkeys(name for operator in operators for name in operator.extents))
            raise ConfigurationError(f"{each.where}: no such layer has a dim {dim!r}; they have {dims}")


def _check_tied(each: Tie, operators: Sequence[Operator]) -> None:
    first = operators[0]
    if len(operators) == 1:
        raise ConfigurationError(f"{each.where}: {first.name!r} alone is such a layer; a tie needs two")
    for other in operators[1:]:
        if list(other.extents) != list(first.extents):
            raise ConfigurationError(
                f"{each.where}: layer {first.name!r} has the dims {', '.join(first.extents)}, {other.name!r} has "
                f"{', '.join(other.extents)}; layers that are tied have the same"
            )


def _check_mesh(each: OneMesh, num_devices: int) -> None:
    size = prod(each.axes.values())
    if num_devices % size:
        axes = ", ".join(f"{name}={size}" for name, size in each.axes.items())
        raise ConfigurationError(
            f"{each.where}: a mesh of {axes} has {size} devices; expected a number that divides {num_devices}"
        )


def _check_copies(each: Pin, num_devices: int) -> None:
    parts = prod(each.splits.values())
    if each.copies is not None and each.copies * parts != num_devices:
        raise ConfigurationError(
            f"{each.where}: {parts} parts ×{each.copies} are for {each.copies * parts} devices; there are "
            f"{num_devices}: leave ×{each.copies} out, which follows from the splits"
        )


def _check_placed(each: DevicesOf, num_devices: int) -> None:
    if sorted(each.devices) != list(range(num_devices)):
        raise ConfigurationError(f"{each.where}: expected each device 0 to {num_devices - 1} once")


def _nothing_left(each: Constraint, operator: Operator, found: IndexArray, more: str) -> ConfigurationError:
    def shown(rows: IndexArray) -> str:
        texts = [splits_text(dict(zip(operator.extents, row, strict=True))) for row in rows[:MOST_SHOWN].tolist()]
        return "; ".join([*texts, *(["…"] if len(rows) > MOST_SHOWN else [])])

    near = found
    if isinstance(each, Pin):
        columns = [i for i, dim in enumerate(operator.extents) if each.splits.get(dim, 1) > 1]
        wanted = np.array([each.splits[dim] for dim in operator.extents if each.splits.get(dim, 1) > 1])
        same = (found[:, columns] == wanted).sum(axis=1) if columns else np.zeros(len(found))
        near = found[np.argsort(-same, kind="stable")]
    return ConfigurationError(
        f"{each.where}: that leaves layer {operator.name!r} no configuration; it has {shown(near)}{more}"
    )
