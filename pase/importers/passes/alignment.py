"""Where the dims of the tensors inside a region lie in the dims of what the region writes.

Every dim is told by atoms: stretches of the written dims. Steps that bring points together which are not alike (a
tensor added to its own transpose) have no such telling, and are left as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, Use
from pase.importers.ir.views import Factor, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """Positions ``index // inner % extent`` of a written dim; of: what the extent is a piece of, where it is cut."""

    dim: int
    inner: int
    extent: int
    of: int = 0


Label = tuple[Atom, ...]
"""A dim of a tensor, row-major; empty where it has one element, or the same ones along it."""


@dataclass(slots=True)
class Alignment:
    """What is found on the way. reduced: atoms that steps reduce over. mixed: written dims along which points meet."""

    shape: tuple[int, ...]
    labels: dict[str, tuple[Label, ...]] = field(default_factory=dict)
    reduced: set[Atom] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)


def aligned(trace: Trace, nodes: Sequence[Node], entry: Use) -> Alignment | None:
    """Return how nodes of a region, in order, lie in the shape that the last one writes; None where they cannot.

    entry: a read of the tensor that all of them come from, in that very shape.
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
    """Return the written dims that a tensor broadcast to a value has; None where it has less than whole ones."""
    labels = alignment.labels[value]
    own = [label for label, extent in zip(labels[len(labels) - len(shape) :], shape, strict=True) if extent > 1]
    atoms = [atom for label in own for atom in label]
    whole = all(atom.inner == 1 and not atom.of and atom.extent == alignment.shape[atom.dim] for atom in atoms)
    return tuple(atom.dim for atom in atoms) if whole and all(own) else None


def _plain(shape: tuple[int, ...]) -> tuple[Label, ...]:
    return tuple((Atom(dim=i, inner=1, extent=extent),) if extent > 1 else () for i, extent in enumerate(shape))


def _base_labels(trace: Trace, entry: Use) -> tuple[Label, ...] | None:
    """Return the labels of the tensor behind the entry."""
    base = trace.values[entry.value].shape
    view = entry.view or View.plain(base)
    atoms: dict[int, Atom] = {}
    for dim, factors in enumerate(view.dims):
        inner = 1
        for factor in reversed(factors):
            if factor.base is None:
                return None
            atoms[factor.base] = Atom(dim=dim, inner=inner, extent=factor.extent)
            inner *= factor.extent
    labels, position = [], 0
    for extent in base:
        label: list[Atom] = []
        while prod(atom.extent for atom in label) < extent:
            label.append(atoms[position])
            position += 1
        labels.append(tuple(label))
    return tuple(labels)


def _labels(trace: Trace, node: Node, found: Alignment) -> tuple[Label, ...] | None:
    """Return the labels of what a node writes."""
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
    """Return the labels of tensors that are broadcast to one; None where they are not alike."""
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
    position = 0
    for label, extent in zip(labels, view.base, strict=True):
        own: list[int] = []
        while prod(extents[i] for i in own) < extent:
            own.append(position)
            position += 1
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
    """Return the atoms of a dim in which each position is repeated for all that its group has; None for any other.

    A mean of each group of channels, repeated for every channel, lies along the channels.
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
    """Return atoms with neighbours of one dim put together."""
    found: list[Atom] = []
    for atom in atoms:
        last = found[-1] if found else None
        if last and last.dim == atom.dim and last.inner == atom.inner * atom.extent and not last.of and not atom.of:
            found[-1] = Atom(dim=atom.dim, inner=atom.inner, extent=last.extent * atom.extent)
        else:
            found.append(atom)
    return tuple(found)
