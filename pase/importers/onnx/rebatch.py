"""`Rebatching`: operators of a model as they are with another batch than the exported one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pase.importers.ir import Value
from pase.importers.onnx.batch import (
    RESHAPES,
    Baked,
    grown,
    must_be_repeated,
    outside_after,
    target_position,
    unbaked,
)
from pase.importers.onnx.tensors import Rebatch, Tensors

Add = Callable[[str, str, list[str], Value], None]
"""Adds a call: operator, name, inputs, result."""


class Rebatching:
    """Changes operators while they are walked. changes: what was changed, in words."""

    def __init__(self, tensors: Tensors, rebatch: Rebatch, add: Add) -> None:
        self._tensors = tensors
        self._rebatch = rebatch
        self._add = add
        # What comes before the batch in the dim of a tensor that has it, where that is more than one element.
        self._outside: dict[str, int] = {}
        self.changes: list[str] = []

    def inputs(
        self, operator: str, name: str, inputs: list[str], output: str, attributes: Mapping[str, Any]
    ) -> list[str]:
        """Return an operator's inputs where the exported batch is not written into them."""
        if not inputs or not inputs[0] or not output:
            return inputs
        if operator == "Concat":
            return self._concatenated(name, inputs, output, attributes)
        position = target_position(operator, len(inputs))
        reference = self._rebatch.reference
        target = self._tensors.constants.get(inputs[position]) if position is not None else None
        before, result = (reference.values.get(key) for key in (inputs[0], output))
        if position is None or target is None or before is None or result is None:
            return inputs
        stored = tuple(int(extent) for extent in target.ravel())
        old_target = reference.constants.get(inputs[position])
        if old_target is None or tuple(int(extent) for extent in old_target.ravel()) != stored:
            # The model computes it from the batch already.
            return inputs
        baked = Baked(
            shape=self._tensors.values[inputs[0]].shape,
            before=before.shape,
            result=result.shape,
            target=stored,
            old=self._rebatch.old,
            new=self._rebatch.new,
            outside=self._outside.get(inputs[0], 1),
        )
        changed = unbaked(operator, baked)
        if changed is None:
            return inputs
        self.changes.append(f"{operator} {name!r} to {list(changed)} instead of {list(stored)}")
        target_name = self._tensors.know_shape(f"{output}:target", changed)
        return [*inputs[:position], target_name, *inputs[position + 1 :]]

    def _concatenated(self, name: str, inputs: list[str], output: str, attributes: Mapping[str, Any]) -> list[str]:
        """Return a concatenation's inputs, those of one example repeated to the batch of the others."""
        references = self._rebatch.reference.values
        known = {i: key for i, key in enumerate(inputs) if key in references and references[key].shape}
        first = self._tensors.values[inputs[0]].shape
        axis = attributes.get("axis", 1)
        lacking = must_be_repeated(
            {i: self._tensors.values[key].shape for i, key in known.items()},
            {i: references[key].shape for i, key in known.items()},
            axis % len(first) if first and isinstance(axis, int) else 0,
            self._rebatch.new,
        )
        found = list(inputs)
        for i in lacking:
            value = self._tensors.values[inputs[i]]
            shape = (self._rebatch.new, *value.shape[1:])
            wide = Value(name=f"{output}:repeated{i}", shape=shape, dtype=value.dtype)
            self._tensors.define(wide)
            target = self._tensors.know_shape(f"{output}:batch{i}", shape)
            self._add("Expand", wide.name, [inputs[i], target], wide)
            self.changes.append(f"{inputs[i]!r} is repeated {self._rebatch.new} times for Concat {name!r}")
            found[i] = wide.name
        return found

    def follow(self, operator: str, inputs: list[str], results: Iterable[Value | None]) -> None:
        """Note what comes before the batch in the dim that has it, where a reshape has put the two together."""
        rebatch = self._rebatch
        known = rebatch.reference.values
        for value in results:
            then = known.get(value.name) if value is not None else None
            if value is None or then is None:
                continue
            outside = 1
            if operator in RESHAPES and inputs[0] in known:
                baked = Baked(
                    shape=self._tensors.values[inputs[0]].shape,
                    before=known[inputs[0]].shape,
                    result=then.shape,
                    target=(),
                    old=rebatch.old,
                    new=rebatch.new,
                    outside=self._outside.get(inputs[0], 1),
                )
                outside = outside_after(baked, value.shape)
            else:
                place = grown(value.shape, then.shape, rebatch.old, rebatch.new)
                for i in inputs:
                    if place is not None and i in self._outside and then.shape[place] in known[i].shape:
                        outside = self._outside[i]
            if outside > 1:
                self._outside[value.name] = outside
