"""Find the sharding constraints of a traced JAX program: where the tensors of a plan's layers occur in it.

The importer records which equations of the program (jaxpr) belong to a layer. The result of the last of them is the
layer's output and gets the sharding that the plan gives it. Values that a layer reads from other layers get the
sharding in which this layer reads them. XLA redistributes a tensor between the two constraints.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from pase.graph import Graph, Role
from pase.importers.frameworks import ImportedModel
from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Use, piece_shape
from pase.importers.ir.views import Factor, View
from pase.importers.jax.call import Place, Site
from pase.importers.jax.function import Traced
from pase.importers.passes.views import composed, seen_by
from pase.targets.named_mesh import NamedMesh, NamedTensor

Entry = tuple[str, ...] | None
"""The axes that split a dim, coarsest first; None where the sharding is left open."""

Spec = tuple[Entry, ...]

LOOKED_INTO = frozenset(
    {"jit", "pjit", "closed_call", "core_closed_call", "core_call", "remat", "remat2", "checkpoint", "scan"}
)
"""Primitives whose inner programs receive constraints; others have custom gradients, or choose a branch."""

_CUTS = frozenset({"slice", "split", "dynamic_slice"})
"""Primitives that slice their operand."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Sharding constraints of a program's values.

    Attributes:
        reads: Constraints on inputs of equations, by (place, number of the input), applied one after the other.
        writes: Constraints on outputs of equations, by (place, number of the output).
        given: Constraints on the program's inputs, by name.
        missing: Layers whose results are not values of the program that can be constrained.
    """

    reads: Mapping[tuple[Place, int], tuple[Spec, ...]]
    writes: Mapping[tuple[Place, int], Spec]
    given: Mapping[str, Spec]
    missing: tuple[str, ...]

    @cached_property
    def inner(self) -> frozenset[Place]:
        """Places of equations whose inner programs contain constraints."""
        own = {place for place, _ in (*self.reads, *self.writes)}
        return frozenset(place[:end] for place in own for end in range(1, len(place)))


def constraints_of(traced: Traced, model: ImportedModel, graph: Graph, mesh: NamedMesh) -> Constraints:
    """Return the sharding constraints of a function's program.

    Args:
        traced: The function's program.
        model: The imported model of the same trace.
        graph: The plan's graph: that of the model, with fan-outs.
        mesh: The plan on a named mesh.
    """
    return _Finder(traced, model, graph, mesh).found()


class _Finder:
    def __init__(self, traced: Traced, model: ImportedModel, graph: Graph, mesh: NamedMesh) -> None:
        self._traced = traced
        self._sites = traced.read.sites
        self._lowered = model.lowered
        self._graph = graph
        self._source, self._trace = model.traces[0], model.traces[-1]
        self._sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
        self._layers = {layer.name: layer for layer in mesh.layers}
        self._nodes = {node.name: node for node in self._trace.nodes}
        self._visible = {place: self._ancestor(place) for place in self._sites}
        self._definers: dict[str, tuple[Place, int]] = {}
        for place, site in self._sites.items():
            if self._visible[place] == place:
                for number, name in enumerate(site.outputs):
                    self._definers.setdefault(name, (place, number))
        # For each value of the program, the value of the lowered trace that it is a view of.
        self._held = dict(self._holders())
        self._owners = self._owned()

    def found(self) -> Constraints:
        written = list(self._writes())
        told = {layer for layer, *_ in written}
        specs = {name: spec for _, name, spec in written}
        return Constraints(
            reads=dict(self._reads(specs)),
            writes={self._definers[name]: spec for name, spec in specs.items()},
            given=dict(self._given()),
            missing=tuple(layer for layer in self._lowered.nodes if layer not in told),
        )

    def _ancestor(self, place: Place) -> Place:
        """Return the outermost opaque equation that contains a place, otherwise the place itself."""
        for end in range(1, len(place)):
            site = self._sites.get(place[:end])
            if site is not None and site.primitive not in LOOKED_INTO:
                return place[:end]
        return place

    # -- values of layers

    def _holders(self) -> Iterator[tuple[str, Use]]:
        """Yield (name of a value of the program, its relation to an output of a layer, as a use)."""
        stored_views = {
            own.outputs[0].name: own.inputs[0]
            for node in self._trace.nodes
            for own in node.computes
            if _is_lying(own) and own.inputs[0].piece is None
        }
        for (layer, output), use in self._lowered.written.items():
            node = self._nodes.get(self._lowered.nodes.get(layer, ""))
            if node is None or use.piece is not None:
                continue
            if output or use.value != node.outputs[0].name:
                yield from self._program_values(use.value, use)
                continue
            last = node.elementary[-1]
            name, shape = last.outputs[0].name, node.outputs[0].shape
            view: View | None
            if _is_lying(last):
                name = last.inputs[0].value
                seen = last.inputs[0].view
                view = View.plain(shape) if seen is None else inverse(seen)
            elif name in stored_views and stored_views[name].value == use.value:
                view = stored_views[name].view or View.plain(shape)
            else:
                view = View.plain(shape)
            # Lowering passes split dims that the source has merged.
            own = self._source.values[name].shape if name in self._source.values else last.outputs[0].shape
            if view is not None and view.shape != own:
                view = view.reshaped(own) if prod(view.shape) == prod(own) else None
            if view is not None:
                yield from self._program_values(name, Use(value=use.value, view=None if view.is_plain else view))

    def _program_values(self, name: str, use: Use) -> Iterator[tuple[str, Use]]:
        """Yield a value of the program, or the first views of it that are values of the program."""
        if name in self._definers:
            yield name, use
            return
        for node in self._source.users.get(name, ()):
            seen = seen_by(self._source, node) if node.inputs[0].value == name else None
            behind = None if seen is None else composed(seen, use, self._shape(use.value))
            if behind is not None:
                yield from self._program_values(node.outputs[0].name, behind)

    def _shape(self, name: str) -> tuple[int, ...]:
        values = self._trace.values
        return values[name].shape if name in values else self._source.values[name].shape

    def _writes(self) -> Iterator[tuple[str, str, Spec]]:
        """Yield (layer, name of a value, its sharding)."""
        told = {(use.value, use.piece): made for made, use in self._lowered.written.items()}
        for name, use in self._held.items():
            layer, output = told[use.value, None]
            spec = self._of_tensor(self._layers[layer].outputs[output], use)
            if spec is not None:
                yield layer, name, spec

    def _of_tensor(self, tensor: NamedTensor, use: Use) -> Spec | None:
        """Return the sharding of a use of a tensor's elements; None if it is unknown."""
        shape = piece_shape(self._shape(use.value), use.piece)
        spec = spec_of(tensor)
        if use.view is not None and not any(entry is None or entry for entry in spec):
            return ((),) * len(use.view.dims)
        told = spec_reshaped(spec, tensor.shape, shape, self._sizes)
        return told if told is None or use.view is None else spec_through(told, use.view, self._sizes)

    # -- inputs of layers

    def _owned(self) -> dict[Place, frozenset[str]]:
        """Return the layers that each equation belongs to."""
        owners: dict[Place, frozenset[str]] = {}
        for layer, name in self._lowered.nodes.items():
            for own in self._nodes[name].elementary:
                if _is_lying(own):
                    continue
                for value in own.outputs:
                    place = self._traced.read.makers_at.get(value.name)
                    if place is not None:
                        place = self._visible[place]
                        owners[place] = owners.get(place, frozenset()) | {layer}
        # A computation that only one layer uses belongs to that layer.
        readers: dict[str, set[frozenset[str]]] = {name: {frozenset()} for name in self._traced.read.returned}
        units = [(place, site) for place, site in self._sites.items() if self._is_unit(place)]
        for place, site in reversed(units):
            found = {owner for name in site.outputs for owner in readers.get(name, ())}
            if place not in owners and len(found) == 1 and not self._is_piece(site, *found):
                (owners[place],) = found
            for name in site.inputs:
                readers.setdefault(name, set()).add(owners.get(place, frozenset()))
        return owners

    def _is_piece(self, site: Site, owners: frozenset[str]) -> bool:
        """Return whether an equation slices a value of which a layer reads only this slice."""
        if site.primitive not in _CUTS or len(owners) != 1:
            return False
        (layer,) = owners
        uses = [self._behind(name) for name in site.outputs]
        pieces = {(read.value, read.piece) for read in self._lowered.reads[layer]}
        return any(use.piece is not None and (use.value, use.piece) in pieces for use in uses)

    def _is_unit(self, place: Place) -> bool:
        is_container = self._sites[place].primitive in LOOKED_INTO and place in self._containers
        return self._visible[place] == place and not is_container

    @cached_property
    def _containers(self) -> frozenset[Place]:
        return frozenset(place[:end] for place in self._sites for end in range(1, len(place)))

    def _reads(self, own_specs: Mapping[str, Spec]) -> Iterator[tuple[tuple[Place, int], tuple[Spec, ...]]]:
        made: dict[str, set[str]] = {}
        for place, owners in self._owners.items():
            for layer in owners:
                made.setdefault(layer, set()).update(self._sites[place].outputs)
        for place, owners in self._owners.items():
            if len(owners) != 1 or not self._is_unit(place):
                continue
            (layer,) = owners
            for number, name in enumerate(self._sites[place].inputs):
                if name in made[layer]:
                    continue
                specs = self._of_read(layer, self._behind(name), self._source.values[name].shape)
                if specs and specs != (own_specs.get(name),):
                    yield (place, number), specs

    def _behind(self, name: str) -> Use:
        """Return a value of the program as a use of a layer's output or of a model input, as far as it is one."""
        use = Use(value=name)
        while use.value not in self._held and use.value not in self._read_names:
            node = self._source.producer.get(use.value)
            if node is None:
                return use
            is_same = isinstance(node.op, ops.Identity) or _is_nothing(node)
            step = node.inputs[0] if is_same else seen_by(self._source, node)
            behind = None if step is None else composed(use, step, self._source.values[step.value].shape)
            if behind is None:
                return use
            use = behind
        if use.value in self._held:
            held = self._held[use.value]
            return composed(use, held, self._shape(held.value)) or use
        return use

    @cached_property
    def _read_names(self) -> frozenset[str]:
        """Names of values that layers read but do not write, and of values computed from weights."""
        written = {use.value for use in self._lowered.written.values()}
        uses = [use for reads in self._lowered.reads.values() for use in reads]
        names = {use.value for use in uses if use.value not in written}
        return frozenset(names | {use.of for use in uses if use.of})

    def _of_read(self, layer: str, use: Use, shape: tuple[int, ...]) -> tuple[Spec, ...]:
        """Return the successive shardings in which a layer reads a value; none if it does not read such a value."""
        best: tuple[Spec, ...] = ()
        for number, (tensor, read) in enumerate(zip(self._tensors(layer), self._lowered.reads[layer], strict=True)):
            producer, handed = self._feeding(layer, number)
            if producer not in self._lowered.nodes and producer and read.piece is None:
                # Another layer arranges this value's layout.
                if replace(use, of="") == replace(self._lowered.reads[producer][0], of=""):
                    before = [self._of_tensor(each, use) for each in self._feeding(producer, 0)[1]]
                    laid = (self._layers[producer].outputs[0], *handed, tensor)
                    after = [spec_reshaped(spec_of(each), each.shape, shape, self._sizes) for each in laid]
                    return tuple(spec for spec in (*before, *after) if spec is not None)
                continue
            if use.value in (read.of, self._computed_of(read.value)):
                spec = spec_reshaped(spec_of(tensor), tensor.shape, shape, self._sizes)
            elif (use.value, use.piece) == (read.value, read.piece) or (use.value == read.value and read.seen_as):
                spec = self._of_tensor(tensor, use)
            elif use == Use(value=read.value) and read.piece is not None:
                spec = self._of_piece(tensor, read, shape)
            else:
                continue
            if spec is None or len(spec) != len(shape):
                continue
            before = [self._of_tensor(each, use) for each in handed]
            specs = (*(each for each in before if each is not None), spec)
            if read.view == use.view:
                return specs
            best = best or specs
        return best

    def _feeding(self, layer: str, read: int) -> tuple[str, list[NamedTensor]]:
        """Return the producer of a layer's read ("" for none), and the tensors of fan-outs in between."""
        handed: list[NamedTensor] = []
        edge = self._graph.incoming.get((layer, read))
        while edge is not None and self._graph[edge.producer].is_fan_out:
            handed.insert(0, self._layers[edge.producer].outputs[0])
            edge = self._graph.incoming.get((edge.producer, 0))
        return ("" if edge is None else edge.producer), handed

    def _computed_of(self, name: str) -> str:
        """Return the model input from which a leaf was computed; "" for none."""
        leaf = self._trace.leaf.get(name)
        return "" if leaf is None or leaf.computed_of is None else leaf.computed_of[0]

    def _of_piece(self, tensor: NamedTensor, read: Use, shape: Sequence[int]) -> Spec | None:
        """Return the sharding of a tensor of which a slice is read, unsplit along the sliced dim."""
        spec = spec_reshaped(spec_of(tensor), tensor.shape, piece_shape(shape, read.piece), self._sizes)
        cut = None if read.piece is None else read.piece.dim
        return None if spec is None else tuple(() if dim == cut else entry for dim, entry in enumerate(spec))

    def _tensors(self, layer: str) -> list[NamedTensor]:
        inputs, parameters = iter(self._layers[layer].inputs), iter(self._layers[layer].parameters)
        return [next(parameters if read.role is Role.PARAMETER else inputs) for read in self._graph[layer].reads]

    # -- inputs of the program

    def _given(self) -> Iterator[tuple[str, Spec]]:
        reads = [
            (tensor, read)
            for layer in self._graph.index
            if layer in self._lowered.reads
            for tensor, read in zip(self._tensors(layer), self._lowered.reads[layer], strict=True)
        ]
        # A layer that reads the whole input gives more information than one that reads a slice.
        reads.sort(key=lambda pair: pair[1].piece is not None)
        for name in self._traced.given:
            shape = self._source.values[name].shape
            yield name, next(self._of_given(name, shape, reads), ((),) * len(shape))

    def _of_given(self, name: str, shape: Sequence[int], reads: Sequence[tuple[NamedTensor, Use]]) -> Iterator[Spec]:
        for tensor, read in reads:
            if name not in (read.value, self._computed_of(read.value)):
                continue
            is_cut = read.piece is not None and read.value == name
            spec = (
                self._of_piece(tensor, read, shape)
                if is_cut
                else spec_reshaped(spec_of(tensor), tensor.shape, shape, self._sizes)
            )
            if spec is not None and len(spec) == len(shape):
                yield tuple(entry or () for entry in spec)


def _is_lying(node: Node) -> bool:
    """Return whether a node among those merged into another describes how a value is stored."""
    return isinstance(node.op, ops.Identity) and node.name.endswith(":held")


def _is_nothing(node: Node) -> bool:
    return isinstance(node.op, ops.Pointwise) and not node.op.functions


# -- shardings of tensors and of their views


def spec_of(tensor: NamedTensor) -> Spec:
    """Return the sharding of a layer's tensor; unknown dims of a tensor that a layer computes are left open."""
    return tuple(None if dim.is_open and tensor.is_made else dim.axes for dim in tensor.dims)


def spec_through(spec: Spec, view: View, sizes: Mapping[str, int]) -> Spec:
    """Return the sharding of a view, given that of its base; dims whose parts are unknown are left open.

    Args:
        spec: Sharding of the view's base.
        view: The view.
        sizes: Sizes of the mesh's axes.
    """
    found = _of_factors(spec, view, sizes)
    return tuple(_of_dim(factors, found, sizes) for factors in view.dims)


def spec_reshaped(spec: Spec, shape: Sequence[int], new: Sequence[int], sizes: Mapping[str, int]) -> Spec | None:
    """Return the sharding of a reshaped tensor; None where the dims of the two shapes do not align."""
    if tuple(shape) == tuple(new):
        return spec
    if not any(entry is None or entry for entry in spec):
        return ((),) * len(new)
    view = View.plain(shape).reshaped(new) if prod(shape) == prod(new) else None
    return None if view is None else spec_through(spec, view, sizes)


def inverse(view: View) -> View | None:
    """Return the base of a view as a view of that view; None where elements are repeated."""
    flat = [factor for dim in view.dims for factor in dim]
    places = {factor.base: place for place, factor in enumerate(flat)}
    if None in places:
        return None
    extents, position = view.factors, 0
    dims: list[tuple[Factor, ...]] = []
    for extent in view.base:
        own, size = [], 1
        while size < extent:
            own.append(Factor(extents[position], places[position]))
            size *= extents[position]
            position += 1
        dims.append(tuple(own))
    return View(base=view.shape, dims=tuple(dims)).simplified()


def _of_factors(spec: Spec, view: View, sizes: Mapping[str, int]) -> list[Entry]:
    """Return the axes that split each factor of a view's base."""
    extents = view.factors
    found: list[Entry] = [()] * len(extents)
    position = 0
    for extent, entry in zip(view.base, spec, strict=True):
        size, left = 1, list(entry or ())
        is_told = entry is not None
        while size < extent:
            room, own = extents[position], list[str]()
            while left and room % sizes[left[0]] == 0:
                room //= sizes[left[0]]
                own.append(left.pop(0))
            # An axis that splits this factor partially, and also the next one, gives no information about either.
            is_told = is_told and (not left or room == 1)
            found[position] = tuple(own) if is_told else None
            size *= extents[position]
            position += 1
    return found


def _of_dim(factors: Sequence[Factor], found: Sequence[Entry], sizes: Mapping[str, int]) -> Entry:
    axes: tuple[str, ...] = ()
    is_contiguous = True
    for factor in factors:
        own = () if factor.base is None else found[factor.base]
        if own is None or (own and not is_contiguous):
            return None
        axes += own
        is_contiguous = is_contiguous and prod(sizes[axis] for axis in own) == factor.extent
    return axes
