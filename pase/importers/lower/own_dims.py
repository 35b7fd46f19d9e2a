"""`with_own_dims`: a body whose dims of the source that always go together are the operator's own, of which each device
keeps its part: nothing is gathered to be taken apart, and put together again."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count

from pase.graph.body import REDUCTIONS, Body, Option, Step

Dims = tuple[str, ...]

_OF_ANY_DIMS = frozenset({"einsum", "log_softmax", "normalise", "repeat", "softmax", *REDUCTIONS})
"""Functions over as many dims as there are."""

_LISTED = frozenset({"einsum", "repeat"})
"""Functions whose results have the dims that they list, no others."""


_ATTENTION = "masked_attention"
"""The function whose last dims are told apart by their places: the queries, the keys and the features."""


class _TakenApartError(Exception):
    """What stands for some dims of the operator is used in part, or beside what stands for them, too."""

    def __init__(self, own: Dims) -> None:
        super().__init__()
        self.own = own


def with_own_dims(body: Body, dims: Sequence[str], reads: Mapping[str, Set[str]]) -> Body:
    """Return a body without what gathers dims of an operator and takes them apart, as far as they stay together.

    dims: of the operator's iteration space. reads: of what it reads, its dims by name.
    """
    left = frozenset(dims)
    while left:
        try:
            return _Rewriting(body=body, own=left, dims=dict(reads)).rewritten()
        except _TakenApartError as error:
            left -= {*error.own}
    return body


@dataclass(slots=True)
class _Rewriting:
    """own: the dims that take the places of others. dims: of each tensor, those of the source. groups: dims of the
    source, end to end, and what they are. renamed: dims of the source by others that are the same. names: of tensors
    that are others now."""

    body: Body
    own: frozenset[str]
    dims: dict[str, Set[str]]
    groups: dict[Dims, Dims] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def rewritten(self) -> Body:
        """Return the body; _TakenApartError where some of the dims cannot take the places of others."""
        self._find_groups()
        if not self.groups:
            return self.body
        self.dims |= {item.name: {*item.dims} for item in self.body.constants}
        inner = {dim.name for dim in self.body.inner if dim.tensor}
        self._check_none([*inner, *(dim for output in self.body.outputs for dim in output.dims)])
        steps = self._of_constants()
        for step in self.body.steps:
            self._check_apart(step)
            steps += self._step(step)
        last = self.body.steps[-1].result
        if not steps or steps[-1].result != self.names.get(last, last):
            return self.body
        others = tuple(self.names.get(name, name) for name in self.body.others)
        named = {name for step in steps for name in step.dims}
        named |= {name for item in self.body.constants for name in item.dims}
        gone = {name for group in self.groups for name in group} - named
        kept = tuple(dim for dim in self.body.inner if dim.name not in gone | {*self.renamed} - named)
        return replace(self.body, steps=tuple(steps), inner=kept, others=others)

    def _find_groups(self) -> None:
        inner = {dim.name for dim in self.body.inner if not dim.tensor}
        for step in self.body.steps:
            if step.function not in ("view", "whole"):
                continue
            before, after = self._sides(step)
            if step.function == "whole":
                if len(before) == len(after) and self.own.issuperset(before):
                    self.groups |= {(other,): (dim,) for dim, other in zip(before, after, strict=True)}
                continue
            own = self._known(before)
            if own == after or before == after:
                continue
            if own is not None:
                if not self.own.isdisjoint(after) or self.groups.setdefault(after, own) != own:
                    raise _TakenApartError(own)
            elif len(before) == len(after) == 1 and inner.issuperset((*before, *after)):
                within = {name for group in self.groups for name in group}
                if before[0] in within and after[0] not in within:
                    self.renamed[after[0]] = before[0]
                elif before[0] in within:
                    # Both are of groups: the same place of what is the same.
                    one, other = (next(g for g in self.groups if name in g) for name in (before[0], after[0]))
                    is_same = one != other and self.groups[one] == self.groups[other]
                    if is_same and one.index(before[0]) == other.index(after[0]):
                        self._unite(one, other)

    def _unite(self, one: Dims, other: Dims) -> None:
        self.renamed |= dict(zip(other, one, strict=True))
        del self.groups[other]

    def _first(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def _sides(self, step: Step) -> tuple[Dims, Dims]:
        """Return the dims that a step replaces, and those that it has instead."""
        number = step.option("replaced", 0)
        dims = tuple(map(self._first, step.dims))
        return dims[:number], dims[number:]

    def _known(self, dims: Dims) -> Dims | None:
        """Return what dims stand for; None where they are no groups, end to end."""
        found: list[str] = []
        while dims:
            group = next((dims[:i] for i in range(1, len(dims) + 1) if dims[:i] in self.groups), None)
            if group is None:
                return None
            found += self.groups[group]
            dims = dims[len(group) :]
        return tuple(found)

    def _named(self, dims: Dims) -> Dims:
        """Return dims, the groups among them by what they are."""
        found: list[str] = []
        while dims:
            group = next((dims[:i] for i in range(len(dims), 0, -1) if dims[:i] in self.groups), None)
            if group is None:
                self._check_none(dims[:1])
            found += self.groups[group] if group else dims[:1]
            dims = dims[len(group or dims[:1]) :]
        return tuple(found)

    def _check_none(self, dims: Sequence[str]) -> None:
        for group, own in self.groups.items():
            if not {*group}.isdisjoint(map(self._first, dims)):
                raise _TakenApartError(own)

    def _check_apart(self, step: Step) -> None:
        """Raise _TakenApartError where a step has two dims that stand for the same one; note the dims of its result."""
        listed = {*step.dims}
        present = {name for operand in step.operands for name in self.dims.get(str(operand), ())}
        if step.function in ("view", "whole"):
            number = step.option("replaced", 0)
            present = made = (present - {*step.dims[:number]}) | {*step.dims[number:]}
        else:
            present = present | listed
            made = listed if step.function in _LISTED else present - (listed if step.function in REDUCTIONS else set())
            made = listed - {step.dims[-2]} if step.function == _ATTENTION else made
        self.dims[step.result] = made
        found = Counter(present & self.own)
        for group, own in self.groups.items():
            names = [name for name in present if self._first(name) in group]
            # Another name of a dim is another dim here.
            if len({*map(self._first, names)}) < len(names):
                raise _TakenApartError(own)
            found.update(own if names else ())
        twice = tuple(name for name, times in found.items() if times > 1)
        if twice:
            raise _TakenApartError(twice)

    def _of_constants(self) -> list[Step]:
        """Return the steps by which devices have their parts of constants, of which each one holds all."""
        steps: list[Step] = []
        taken = {*self.dims, *(step.result for step in self.body.steps)}
        for item in self.body.constants:
            given = {self._first(dim): dim for dim in item.dims}
            own = [
                (tuple(given.get(dim, dim) for dim in group), dims)
                for group, dims in self.groups.items()
                if not given.keys().isdisjoint(group)
            ]
            name = item.name
            lacking = tuple(dim for group, _ in own for dim in group if dim not in item.dims)
            made = [Step(result="", function="repeat", dims=(*lacking, *item.dims))] if lacking else []
            made += [
                Step(result="", function="view", dims=(*group, *dims), options=(("replaced", len(group)),))
                for group, dims in own
            ]
            for step in made:
                result = next(found for i in count(1) if (found := f"{item.name}_{i}") not in taken)
                taken.add(result)
                steps.append(replace(step, result=result, operands=(name,)))
                name = result
            self.names[item.name] = name
        return steps

    def _step(self, step: Step) -> list[Step]:
        """Return a step in the operator's dims; nothing where it is no step any more."""
        operands = tuple(self.names.get(own, own) if isinstance(own, str) else own for own in step.operands)
        if step.function in ("view", "whole"):
            before, after = self._sides(step)
            own = before if step.function == "whole" or before == after else self._named(before)
            made = after if before == after else self._named(after)
            if own == made:
                self.names[step.result] = str(operands[0])
                return []
            options: tuple[tuple[str, Option], ...] = (("replaced", len(own)),)
            return [replace(step, operands=operands, dims=(*own, *made), options=options)]
        if step.function in _OF_ANY_DIMS:
            return [replace(step, operands=operands, dims=self._named(tuple(map(self._first, step.dims))))]
        if step.function == _ATTENTION:
            dims = tuple(map(self._first, step.dims))
            last = [self._named((dim,)) for dim in dims[-3:]]
            if all(len(own) == 1 for own in last):
                return [replace(step, operands=operands, dims=(*self._named(dims[:-3]), *(own for (own,) in last)))]
        layouts = step.option("layouts", "")
        named = [dim.name for dim in self.body.inner if f'"{dim.name}"' in layouts]
        self._check_none([*step.dims, *named])
        return [replace(step, operands=operands)]
