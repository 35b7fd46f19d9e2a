"""Replace regions of elementwise and reduction operators with one entry and one exit by one operator."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from pase.importers.ir import ops
from pase.importers.ir.trace import Folded, Node, Trace, Use, computed_together
from pase.importers.ir.views import Factor, View
from pase.importers.passes.views import seen_through, without_dead_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """Positions ``index // inner % extent`` of a dim of the output; of: the larger extent, where it is divided."""

    dim: int
    inner: int
    extent: int
    of: int = 0


Label = tuple[Atom, ...]
"""A dim of a tensor, row-major; empty where it has one element, or is constant along it."""


@dataclass(slots=True)
class Alignment:
    """Result of aligning a region.

    Attributes:
        reduced: Atoms that steps reduce over.
        mixed: Dims of the output along which points depend on each other.
    """

    shape: tuple[int, ...]
    labels: dict[str, tuple[Label, ...]] = field(default_factory=dict)
    reduced: set[Atom] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)


def aligned(trace: Trace, nodes: Sequence[Node], entry: Use) -> Alignment | None:
    """Return how the nodes of a region, in order, align with the shape of its output; None where they do not.

    entry: a read of the tensor that all of them depend on, in that shape.
    """
    shape = nodes[-1].outputs[0].shape
    base = _base_labels(trace, entry)
    if base is None:
        return None
    found = Alignment(shape, {entry.value: base})
    for node in nodes:
        labels = _labels(trace, node, found)
        if labels is None:
            return None
        found.labels[node.outputs[0].name] = labels
    return found if found.labels[nodes[-1].outputs[0].name] == _plain(shape) else None


def dims_along(alignment: Alignment, value: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dims of the output that a tensor broadcast to a value has; None for partial dims."""
    labels = alignment.labels[value]
    own = [label for label, extent in zip(labels[len(labels) - len(shape) :], shape, strict=True) if extent > 1]
    atoms = [atom for label in own for atom in label]
    whole = all(atom.inner == 1 and not atom.of and atom.extent == alignment.shape[atom.dim] for atom in atoms)
    return tuple(atom.dim for atom in atoms) if whole and all(own) else None


def _plain(shape: tuple[int, ...]) -> tuple[Label, ...]:
    return tuple((Atom(dim=i, inner=1, extent=extent),) if extent > 1 else () for i, extent in enumerate(shape))


def _base_labels(trace: Trace, entry: Use) -> tuple[Label, ...] | None:
    """Return the labels of the tensor behind the entry."""
    view = entry.view or View.plain(trace.values[entry.value].shape)
    atoms: dict[int, Atom] = {}
    for dim, factors in enumerate(view.dims):
        inner = 1
        for factor in reversed(factors):
            if factor.base is None:
                return None
            atoms[factor.base] = Atom(dim=dim, inner=inner, extent=factor.extent)
            inner *= factor.extent
    return tuple(tuple(atoms[i] for i in own) for own in view.homes)


def _labels(trace: Trace, node: Node, found: Alignment) -> tuple[Label, ...] | None:
    """Return the labels of a node's output."""
    reads: list[tuple[Label, ...]] = []
    for use in node.inputs:
        if use.value in found.labels:
            seen = _seen(found, use)
            if seen is None:
                return None
            reads.append(seen)
    output = node.outputs[0].shape
    match node.op:
        case ops.Pointwise(mixes=mixes):
            labels = _together(reads, len(output))
            if labels is not None:
                found.mixed |= {atom.dim for i in mixes for atom in labels[i]}
            return labels
        case ops.Reduce(over=over, keeps_dims=keeps):
            (read,) = reads
            found.reduced |= {atom for i in over for atom in read[i]}
            if any(atom.of for atom in found.reduced):
                return None
            return tuple(() if i in over else label for i, label in enumerate(read) if keeps or i not in over)
        case ops.Slice(starts=_, steps=steps):
            (read,) = reads
            before = trace.shape(node.inputs[0])
            cut = [i for i, (a, b) in enumerate(zip(before, output, strict=True)) if a != b or steps[i] != 1]
            return _cut(found, read, {i: output[i] for i in cut})
        case ops.Concat(dim=dim):
            return _joined(found, reads, dim, output[dim]) if len(reads) == len(node.inputs) else None
        case _:
            return None


def _together(reads: Sequence[tuple[Label, ...]], rank: int) -> tuple[Label, ...] | None:
    """Return the common labels of tensors that are broadcast together; None where they conflict."""
    result: list[Label] = [()] * rank
    for labels in reads:
        if len(labels) > rank:
            return None
        for i, label in enumerate(labels, start=rank - len(labels)):
            if label and result[i] and label != result[i]:
                return None
            result[i] = label or result[i]
    return tuple(result)


def _seen(found: Alignment, use: Use) -> tuple[Label, ...] | None:
    """Return the labels of a tensor as it is read."""
    labels: tuple[Label, ...] | None = found.labels[use.value]
    if use.seen_as is not None:
        return None
    if use.piece is not None and labels is not None:
        labels = _cut(found, labels, {use.piece.dim: use.piece.size})
    if labels is None or use.view is None:
        return labels
    return _viewed(labels, use.view)


def _cut(found: Alignment, labels: tuple[Label, ...], sizes: dict[int, int]) -> tuple[Label, ...] | None:
    """Return labels of a piece of a tensor; sizes: of the dims that are cut."""
    result = list(labels)
    for i, size in sizes.items():
        label = labels[i]
        if not label:
            continue
        first, *rest = label
        inner = prod(atom.extent for atom in rest)
        if size % inner:
            return None
        found.mixed |= {first.dim}
        own = replace(first, extent=size // inner, of=first.of or first.extent)
        result[i] = (*((own,) if own.extent > 1 else ()), *rest)
    return tuple(result)


def _joined(found: Alignment, reads: Sequence[tuple[Label, ...]], dim: int, extent: int) -> tuple[Label, ...] | None:
    """Return the labels of tensors end to end."""
    others = _together([(*labels[:dim], (), *labels[dim + 1 :]) for labels in reads], len(reads[0]))
    first = {
        (label[0].dim, label[0].inner, label[0].of or label[0].extent) for labels in reads if (label := labels[dim])
    }
    rest = {label[1:] for labels in reads if (label := labels[dim])}
    if others is None or len(first) != 1 or len(rest) != 1:
        return None
    ((own, inner, of),) = first
    (tail,) = rest
    found.mixed |= {own}
    size, left = divmod(extent, prod(atom.extent for atom in tail))
    if left:
        return None
    atom = Atom(dim=own, inner=inner, extent=size, of=0 if size == of else of)
    return (*others[:dim], (atom, *tail), *others[dim + 1 :])


def _viewed(labels: tuple[Label, ...], view: View) -> tuple[Label, ...] | None:
    """Return the labels of a view: those of the base, cut where its factors are."""
    extents = view.factors
    parts: dict[int, Label] = {}
    for label, own in zip(labels, view.homes, strict=True):
        if not label:
            parts |= dict.fromkeys(own, ())
            continue
        split = _split(label, [extents[i] for i in own])
        if split is None:
            return None
        parts |= dict(zip(own, split, strict=True))
    found: list[Label] = []
    for dim in view.dims:
        known = [parts[factor.base] if factor.base is not None else () for factor in dim]
        atoms = _repeated(dim, known) if any(known) and not all(known) else [atom for label in known for atom in label]
        if atoms is None:
            return None
        found.append(_merged(atoms))
    return tuple(found)


def _repeated(factors: Sequence[Factor], known: Sequence[Label]) -> list[Atom] | None:
    """Return the atoms of a dim in which each position is repeated for all of its group; None for any other dim.

    A mean over each group of channels, repeated for every channel, is aligned with the channels.
    """
    found: list[Atom] = []
    for factor, label in zip(factors, known, strict=True):
        last = found[-1] if found else None
        if label:
            found += label
        elif factor.base is None and last is not None and not last.of and last.inner % factor.extent == 0:
            found[-1] = replace(last, inner=last.inner // factor.extent, extent=last.extent * factor.extent)
        else:
            return None
    return found


def _split(label: Label, extents: Sequence[int]) -> list[Label] | None:
    """Return the atoms of each factor of a dim; None where a factor ends within a cut one, or across two."""
    left = list(label)
    found: list[Label] = []
    for extent in extents:
        own: list[Atom] = []
        while extent > 1:
            if not left:
                return None
            atom = left.pop(0)
            if extent % atom.extent == 0:
                own.append(atom)
                extent //= atom.extent
            elif atom.extent % extent == 0 and not atom.of:
                inner = atom.extent // extent
                own.append(Atom(dim=atom.dim, inner=atom.inner * inner, extent=extent))
                left.insert(0, Atom(dim=atom.dim, inner=atom.inner, extent=inner))
                extent = 1
            else:
                return None
        found.append(tuple(own))
    return found


def _merged(atoms: Iterable[Atom]) -> Label:
    """Return atoms with neighbours of one dim merged."""
    found: list[Atom] = []
    for atom in atoms:
        last = found[-1] if found else None
        if last and last.dim == atom.dim and last.inner == atom.inner * atom.extent and not last.of and not atom.of:
            found[-1] = Atom(dim=atom.dim, inner=atom.inner, extent=last.extent * atom.extent)
        else:
            found.append(atom)
    return tuple(found)


_SIMPLE = frozenset({"add", "subtract", "multiply", "divide", "power"})


def named_function(functions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name of a well-known function that is a composition of these steps; the steps where there is none."""
    count = Counter(functions)
    others = {name for name in functions if name not in _SIMPLE}
    match sorted(others):
        case ["erf"] | ["erfc"] if count["multiply"] >= 2:
            return ("gelu",)
        case ["tanh"] if count["multiply"] >= 3 and count["add"] >= 2:
            return ("gelu_tanh",)
        case ["sigmoid"] if functions[-1] == "multiply" and len(functions) <= 3:
            return ("silu",)
        case ["softplus", "tanh"] if functions[-1] == "multiply":
            return ("mish",)
        case ["relu6"] if {"add", "multiply"} <= set(functions):
            return ("hard_swish",)
        case ["clip"] if {"add", "multiply"} <= set(functions):
            return ("hard_swish",)
        case _:
            return functions


_INSIDE = ops.Pointwise | ops.Reduce | ops.Slice | ops.Concat
_MAX_NODES = 400
"""Maximum number of nodes of a region; larger ones are not single operators."""

_ROOTS = frozenset({"rsqrt", "sqrt"})
_STATISTICS_FLOP = 2
"""FLOP for each point, as the vertex counts them; the rest is recorded separately."""

_STEPS = frozenset(
    {"add", "subtract", "multiply", "divide", "power", "square", "sqrt", "rsqrt", "exp", "log", "negate", "reciprocal"}
)
"""Functions that compose a normalisation or a softmax, whose FLOP do not depend on how it is composed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """A region; nodes: in topological order, the exit last; entry: their common input, in the exit's shape."""

    nodes: tuple[Node, ...]
    entry: Use

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(f for node in self.nodes if isinstance(node.op, ops.Pointwise) for f in node.op.functions)

    @property
    def reductions(self) -> frozenset[str]:
        return frozenset(node.op.function for node in self.nodes if isinstance(node.op, ops.Reduce))

    @property
    def num_reductions(self) -> int:
        return sum(isinstance(node.op, ops.Reduce) for node in self.nodes)

    @property
    def num_normalising(self) -> int:
        """How many normalisations or softmaxes it is."""
        return sum(function in _ROOTS or function == "exp" for function in self.functions) if self.reductions else 0


def collapse_regions(trace: Trace) -> Trace:
    """Return the trace with every largest region of one entry and one exit as one operator."""
    place = {node.name: i for i, node in enumerate(trace.nodes)}
    gone: set[str] = set()
    made: dict[str, Node] = {}
    for node in reversed(trace.nodes):
        if node.name in gone or not isinstance(node.op, _INSIDE):
            continue
        for region in _preferred(list(_regions(trace, node, place, gone))):
            found = _collapsed(trace, region)
            if found is not None:
                gone.update(inner.name for inner in region.nodes)
                made[node.name] = found
                break
    nodes = [made.get(node.name, node) for node in trace.nodes if node.name not in gone or node.name in made]
    return without_dead_nodes(replace(trace, nodes=tuple(nodes)))


def _preferred(regions: list[_Region]) -> list[_Region]:
    """Return nested regions in the order in which to try them: the largest first.

    Of several consecutive normalisations only the last one: the others are operators of their own.
    """
    if not regions or regions[-1].num_normalising <= 1:
        return regions[::-1]
    single = [region for region in regions if region.num_normalising == 1]
    most = max((region.num_reductions for region in single), default=0)
    return [region for region in single if region.num_reductions == most] + regions[::-1]


def _regions(trace: Trace, last: Node, place: Mapping[str, int], gone: set[str]) -> Iterator[_Region]:
    """Yield the nested regions that end with a node, by adding predecessors, last first."""
    inside = {last.name: last}
    entries: dict[str, list[Use]] = {}
    returned = set(trace.outputs)

    def add(node: Node) -> None:
        inside[node.name] = node
        for value in node.outputs:
            entries.pop(value.name, None)
        for use in node.inputs:
            if trace.is_activation(use):
                entries.setdefault(use.value, []).append(use)

    def may_join(node: Node | None) -> bool:
        return (
            node is not None
            and isinstance(node.op, _INSIDE)
            and node.name not in gone
            and all(
                value.name not in returned and all(user.name in inside for user in trace.users.get(value.name, ()))
                for value in node.outputs
            )
        )

    add(last)
    while len(inside) <= _MAX_NODES:
        if len(entries) == 1 and len(inside) > 1:
            (uses,) = entries.values()
            shape = last.outputs[0].shape
            whole = _whole(trace, uses, shape)
            if whole is None and any(use.piece for use in uses) and trace.values[uses[0].value].shape == shape:
                # Read in slices only: the halves of a rotary embedding.
                whole = Use(value=uses[0].value)
            if whole is not None:
                yield _Region(
                    nodes=tuple(sorted(inside.values(), key=lambda node: place[node.name])),
                    entry=whole,
                )
        producers = [trace.producer.get(value) for value in entries]
        grown = [node for node in producers if node is not None and may_join(node)]
        if not grown:
            return
        add(max(grown, key=lambda node: place[node.name]))


def _whole(trace: Trace, uses: Sequence[Use], shape: tuple[int, ...]) -> Use | None:
    """Return a use of the whole tensor in a shape; None where none of these uses can be reshaped to it."""
    for use in sorted(uses, key=lambda use: trace.shape(use) != shape):
        if use.piece is not None or use.seen_as is not None or prod(trace.shape(use)) != prod(shape):
            continue
        view = View.plain(trace.shape(use)).reshaped(shape)
        if view is not None:
            return seen_through(trace, use, view)
    return None


def _collapsed(trace: Trace, region: _Region) -> Node | None:
    """Return a region as one node; None where its points do not align with one shape."""
    found = aligned(trace, region.nodes, region.entry)
    if found is None:
        return None
    weights = _weights(trace, region)
    flop = sum(_flop(trace, node) for node in region.nodes)
    points = max(1, prod(found.shape))
    op: ops.Op
    inputs, more = [region.entry], 0.0
    if not found.reduced:
        functions = region.functions or tuple(sorted(region.reductions)) or ("copy",)
        names = ("rotary",) if len(found.mixed) == 1 else named_function(functions)
        op = ops.Pointwise(
            functions=names, flop_per_point=max(1, round(flop / points)), mixes=tuple(sorted(found.mixed))
        )
        inputs += [use for use, _ in weights]
    else:
        op = _reducing(region, found)
        others = [node for node in region.nodes if not _is_step(node) and prod(node.outputs[0].shape) >= points]
        more = sum(_flop(trace, node) for node in others)
        if isinstance(op, ops.Normalise) and op.kind == "statistics":
            more = max(0.0, flop - _STATISTICS_FLOP * points)
        if isinstance(op, ops.Normalise):
            scales, shifts = _affine(trace, weights, found)
            channels = _channels(trace, [*scales, *shifts], found) or op.channels
            op = replace(op, has_scale=bool(scales), has_shift=bool(shifts), channels=channels)
            first = [*scales[:1], *shifts[:1]]
            weights = [*first, *(pair for pair in weights if pair not in first)]
        inputs += [use for use, _ in weights]
    last = region.nodes[-1]
    folded = (Folded(flop=more, backward_flop=more),) if more else ()
    together = computed_together(*(node.elementary for node in region.nodes))
    return replace(last, op=op, inputs=tuple(inputs), folded=folded, computes=together)


def _weights(trace: Trace, region: _Region) -> list[tuple[Use, Node]]:
    """Return the weights that a region reads, and by which node; each once."""
    inner = {value.name for node in region.nodes for value in node.outputs}
    found: dict[str, tuple[Use, Node]] = {}
    for node in region.nodes:
        for use in node.inputs:
            if use.value not in inner and trace.is_parameter(use):
                found.setdefault(use.value, (use, node))
    return list(found.values())


def _affine(
    trace: Trace, weights: list[tuple[Use, Node]], found: Alignment
) -> tuple[list[tuple[Use, Node]], list[tuple[Use, Node]]]:
    """Return the weights that scale and those that shift, among those aligned with complete dims."""
    along = [pair for pair in weights if _channels(trace, [pair], found)]
    scales = [(use, node) for use, node in along if _applies(node, "multiply")]
    shifts = [(use, node) for use, node in along if _applies(node, "add") or _applies(node, "subtract")]
    if scales and shifts and _channels(trace, scales[:1], found) != _channels(trace, shifts[:1], found):
        shifts = []
    return scales, [pair for pair in shifts if pair not in scales]


def _channels(trace: Trace, pairs: list[tuple[Use, Node]], found: Alignment) -> tuple[int, ...]:
    """Return the dims of the output with which the first weight is aligned."""
    for use, node in pairs[:1]:
        shape = trace.shape(use)
        for value in _followed(trace, node):
            dims = dims_along(found, value, shape) if value in found.labels else None
            if dims:
                return dims
    return ()


def _followed(trace: Trace, node: Node) -> Iterator[str]:
    """Yield a node's output, and the results of its only consumers with the same shape.

    A weight that scales a statistic is aligned with dims that only the tensor has, with which it is combined later.
    """
    value = node.outputs[0]
    yield value.name
    while len(users := trace.users.get(value.name, ())) == 1 and users[0].outputs[0].shape == value.shape:
        value = users[0].outputs[0]
        yield value.name


def _applies(node: Node, function: str) -> bool:
    return isinstance(node.op, ops.Pointwise) and function in node.op.functions


def _reducing(region: _Region, found: Alignment) -> ops.Softmax | ops.Normalise:
    """Return the operation of a region with reductions."""
    shape, functions, names = found.shape, region.functions, region.reductions
    kept: dict[int, int] = {}
    for dim in {atom.dim for atom in found.reduced}:
        extents = {(atom.inner, atom.extent) for atom in found.reduced if atom.dim == dim}
        kept[dim] = max(1, shape[dim] // max(1, prod(extent for _, extent in extents)))
    over = tuple(sorted(kept))
    groups = prod(kept.values())
    mixes = tuple(sorted(found.mixed))
    if "exp" in functions and "sum" in names and len(over) == 1 and groups == 1 and not mixes:
        return ops.Softmax(dim=over[0], is_log="log" in functions)
    is_normal = names <= {"mean", "sum", "variance"} and bool({*_ROOTS, "power"} & set(functions))
    if not is_normal:
        return ops.Normalise(kind="statistics", over=over, channels=over, groups=groups, mixes=mixes)
    rest = tuple(i for i in range(len(shape)) if i not in over)
    if groups > 1:
        partial = tuple(dim for dim in over if kept[dim] > 1)
        return ops.Normalise(kind="group", over=over, channels=partial[:1], groups=groups, mixes=mixes)
    if 0 in over and len(rest) == 1:
        return ops.Normalise(kind="batch", over=over, channels=rest, mixes=mixes)
    kind = "layer" if region.num_reductions > 1 or "variance" in names else "rms"
    return ops.Normalise(kind=kind, over=over, channels=over, mixes=mixes)  # type: ignore[arg-type]


def _is_step(node: Node) -> bool:
    return not isinstance(node.op, ops.Pointwise) or _STEPS.issuperset(node.op.functions)


def _flop(trace: Trace, node: Node) -> float:
    match node.op:
        case ops.Pointwise(flop_per_point=flop):
            return float(flop * prod(node.outputs[0].shape))
        case ops.Reduce():
            return float(prod(trace.shape(node.inputs[0])))
        case _:
            return 0.0
