"""Data from a function of the user's own: the one source of data that executes code."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.data import Array, DataInput, check_values

_EXPECTED = "expected package.module:function, a function that yields a dict of arrays for each step"


def load_function(name: str) -> Callable[..., Any]:
    """Import and return the function that ``package.module:function`` names; this executes the module.

    Raises RuntimeFailure where there is no such module or function.
    """
    module_name, _, attribute = name.partition(":")
    parts = [*module_name.split("."), attribute]
    if not all(part.isidentifier() for part in parts):
        raise RuntimeFailure(f"{name!r} names no function; {_EXPECTED}")
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise RuntimeFailure(f"cannot import {module_name} for the data: {error}; is it on PYTHONPATH?") from error
    if not callable(function):
        raise RuntimeFailure(f"module {module_name} has no function {attribute!r}; {_EXPECTED}")
    return function  # type: ignore[no-any-return]


class GeneratedBatches:
    """Batches that a generator yields, one for each step, checked as they come.

    start: the step to begin with. A function that takes a `start` is told it; of another one's batches the earlier
    ones are passed over. The first batch is made, and checked, at once.
    """

    def __init__(self, inputs: Iterable[DataInput], function: Callable[..., Any], *, name: str, start: int = 0) -> None:
        self._inputs = tuple(inputs)
        self._name = name
        self._step = 0
        takes_start = self._guarded(lambda: "start" in inspect.signature(function).parameters)
        self._source = self._guarded(lambda: iter(function(start=start) if takes_start else function()))
        self._step = start if takes_start else 0
        while self._step < start:
            self._draw()
        self._next = self._checked(self._draw())

    @property
    def description(self) -> dict[str, Any]:
        """What tells these data from others, as JSON has it."""
        return {
            "source": "generator",
            "batch": {item.name: list(item.shape) for item in self._inputs},
            "function": self._name,
        }

    def batch(self, step: int) -> dict[str, Array]:
        """Return the arrays of a step, by name; steps are asked for in their order, the last one again if need be."""
        if step == self._step:
            self._next = self._checked(self._draw())
        assert step == self._step - 1, f"step {step} asked for; {self._step - 1} is at hand"
        return self._next

    def _draw(self) -> Any:
        self._step += 1
        return self._guarded(lambda: next(self._source))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except StopIteration:
            raise RuntimeFailure(
                f"data generator {self._name} ended before the batch of step {self._step}; train fewer steps, or make "
                "it begin anew"
            ) from None
        # The code is not ours: it may raise anything.
        except Exception as error:
            raise RuntimeFailure(f"data generator {self._name} raised {type(error).__name__}: {error}") from error

    def _checked(self, drawn: Any) -> dict[str, Array]:
        where = f"the batch of step {self._step} of data generator {self._name}"
        if not isinstance(drawn, Mapping):
            raise RuntimeFailure(f"{where} is of type {type(drawn).__name__}; {_EXPECTED}")
        batch = {}
        for item in self._inputs:
            if item.name not in drawn:
                names = ", ".join(sorted(map(str, drawn))) or "nothing"
                raise RuntimeFailure(f"{where} has no array {item.name!r}; it holds {names}")
            own = f"array {item.name!r} of {where}"
            try:
                array = np.asarray(drawn[item.name])
            except ValueError as error:
                raise RuntimeFailure(f"{own} is no array: {error}") from None
            if array.shape != item.shape:
                raise RuntimeFailure(f"{own} has shape {list(array.shape)}; expected {list(item.shape)}")
            check_values(item, array, own)
            batch[item.name] = array.astype(np.int32) if item.below else array
        return batch
