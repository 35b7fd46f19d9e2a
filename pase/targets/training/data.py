"""Training data of a program: arrays from files, synthetic ones, batches from a generator function, and test data."""

import importlib
import inspect
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pase.common.array_files import mapped_array, opened_archive, reading
from pase.common.documents import write_or_fail
from pase.common.words import listed, short
from pase.errors import EmitError, ProgramError
from pase.graph import Access, Graph, Operator, Role
from pase.graph.batch import given_spans
from pase.graph.functions import LOSSES
from pase.graph.operator import access_dims
from pase.targets.training.counted import generator

Array = np.ndarray[Any, Any]

_PIECE_ELEMENTS = 1 << 20
"""Elements checked at once: an array may be larger than the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInput:
    """One array of a batch.

    Attributes:
        shape: [batch, …].
        below: Upper bound (exclusive) of indices; 0 for floating-point values.
    """

    name: str
    shape: tuple[int, ...]
    below: int = 0


def data_inputs(graph: Graph, layers: Collection[str] | None = None) -> dict[tuple[str, int], DataInput]:
    """Return the reads that no edge feeds, by (layer, input).

    Inputs of an imported model keep their names and shapes. Otherwise the labels of a loss are named "labels", a single
    other input "inputs", and several ones after their layers (and tensors, where a layer has two).

    Args:
        graph: The graph.
        layers: Layers to consider; default: all.
    """
    wanted = [operator for operator in graph.operators if layers is None or operator.name in layers]
    told = [(o, item.read, item.name, item.shape) for o in wanted if o.body for item in o.body.inputs]
    if not graph.is_imported:
        told = [(o, i, name, o.reads[i].shape) for (o, i), name in _input_names(graph).items() if o in wanted]
    return {
        (operator.name, i): DataInput(
            name=name,
            shape=shape,
            below=index_bound(operator, operator.reads[i]) if operator.reads[i].role is Role.INDEX else 0,
        )
        for operator, i, name, shape in told
    }


def _input_names(graph: Graph) -> dict[tuple[Operator, int], str]:
    """Return the names of the inputs of a built-in network."""
    free = [
        (operator, i)
        for operator in graph.operators
        for i, read in enumerate(operator.reads)
        if read.role is not Role.PARAMETER and (operator.name, i) not in graph.incoming
    ]
    labels = [(o, i) for o, i in free if _is_label(o, i)]
    others = [pair for pair in free if pair not in labels]
    names: dict[tuple[Operator, int], str] = {}
    for group, single in ((labels, "labels"), (others, "inputs")):
        for operator, i in group:
            of_layer = [j for o, j in group if o is operator]
            own = operator.name if len(of_layer) == 1 else f"{operator.name}/{operator.reads[i].tensor}"
            names[operator, i] = single if len(group) == 1 else own
    return {pair: names[pair] for pair in free}


def _is_label(operator: Operator, read: int) -> bool:
    steps = operator.body.steps if operator.body else ()
    return any(step.function in LOSSES and operator.reads[read].tensor in step.operands[1:] for step in steps)


def index_bound(operator: Operator, read: Access) -> int:
    """Return the bound of an index: the extent of the dim that it looks up, which neither index nor result has."""
    written = frozenset[str]().union(*(access_dims(write) for write in operator.writes))
    others = [dim for dim in operator.dims if dim.name not in access_dims(read)]
    looked_up = [dim for dim in others if dim.name not in written] or others
    if len(looked_up) != 1:
        raise EmitError(
            f"indices {short(read.tensor)} of layer {short(operator.name)} ({operator.kind}) may look up any of its "
            f"dims ({listed([dim.name for dim in looked_up])}); expected one that the indices lack and no result has"
        )
    return looked_up[0].extent


class Batches:
    """Batches of every input, cycling through the data; the same for every strategy and for the reference.

    Without a file, numbers are drawn from the seed and the input's name: the same batch in every step, so that the loss
    decreases.

    Args:
        inputs: The inputs.
        seed: Seed of synthetic data.
        arrays: Arrays of a file, by name.
        called: What messages call the arrays.
    """

    def __init__(
        self,
        inputs: Iterable[DataInput],
        *,
        seed: int,
        arrays: Mapping[str, Array] | None = None,
        called: str = "the data",
    ) -> None:
        self._inputs = tuple(inputs)
        self._seed = seed
        self._arrays = arrays
        self._made_up: dict[str, Array] = {}
        if arrays is not None:
            for item in self._inputs:
                _check(item, arrays, called)
            _check_rows({item.name: len(arrays[item.name]) for item in self._inputs}, called)

    @property
    def num_batches(self) -> int:
        """Number of complete batches in the data."""
        if self._arrays is None:
            return 1
        return min((len(self._arrays[item.name]) // item.shape[0] for item in self._inputs), default=1)

    @property
    def num_examples(self) -> int:
        """Number of examples in the data."""
        return self.num_batches * (self._inputs[0].shape[0] if self._inputs else 1)

    @property
    def description(self) -> dict[str, Any]:
        """Fingerprint of the data, as JSON: a position in other data would be meaningless."""
        inputs = {item.name: list(item.shape) for item in self._inputs}
        if self._arrays is None:
            return {"source": "made up", "batch": inputs}
        rows = {item.name: len(self._arrays[item.name]) for item in self._inputs}
        return {"source": "arrays", "batch": inputs, "rows": rows}

    def batch(self, step: int) -> dict[str, Array]:
        """Return the arrays of a step, by name: floating point as float64 or as given, indices as int32."""
        return {item.name: self._one(item, step) for item in self._inputs}

    def _one(self, item: DataInput, step: int) -> Array:
        if self._arrays is None:
            if item.name not in self._made_up:
                self._made_up[item.name] = _made_up(item, self._seed)
            return self._made_up[item.name]
        array = self._arrays[item.name]
        num_batches = len(array) // item.shape[0]
        first = (step % num_batches) * item.shape[0]
        rows = array[first : first + item.shape[0]]
        return rows.astype(np.int32) if item.below else rows


def _made_up(item: DataInput, seed: int) -> Array:
    numbers = generator(f"data/{item.name}", seed)
    if item.below:
        return numbers.integers(item.below, size=item.shape, dtype=np.int32)
    return numbers.standard_normal(item.shape, np.float32)


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file, or of a directory of ``.npy`` files, which are memory-mapped.

    In a directory an array is named by its path: ``block/x.npy`` holds ``block/x``. Raises ProgramError where there are
    none. Nothing in the files is executed.
    """
    return _read_directory(path) if path.is_dir() else _read_archive(path)


def _read_archive(path: Path) -> dict[str, Array]:
    expected = "expected an .npz file written by numpy.savez"
    with reading(ProgramError, f"cannot read data from {path}", expected), opened_archive(path) as archive:
        return {name: archive.array(name) for name in archive.names}


def _read_directory(path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for file in sorted(path.rglob("*.npy")):
        expected = "expected an .npy file written by numpy.save"
        with reading(ProgramError, f"cannot read data from {file}", expected):
            arrays[file.relative_to(path).with_suffix("").as_posix()] = mapped_array(file)
    if not arrays:
        raise ProgramError(f"directory {path} holds no .npy files; expected one for each input, such as inputs.npy")
    return arrays


def _check(item: DataInput, arrays: Mapping[str, Array], called: str) -> None:
    row = ", ".join(map(str, item.shape[1:]))
    if item.name not in arrays:
        raise ProgramError(
            f"{called} have no array {item.name!r}; the file holds {', '.join(sorted(arrays)) or 'none'}; "
            f"the program needs {item.name!r} of shape [N{', ' + row if row else ''}]"
        )
    array = arrays[item.name]
    where = f"array {item.name!r} of {called}"
    if array.shape[1:] != item.shape[1:] or array.ndim == 0 or len(array) < item.shape[0]:
        raise ProgramError(
            f"{where} has shape {list(array.shape)}; expected [N{', ' + row if row else ''}] with N at least "
            f"{item.shape[0]}, the batch"
        )
    num_rows = max(1, _PIECE_ELEMENTS // max(1, prod(item.shape[1:])))
    for first in range(0, len(array), num_rows):
        check_values(item, array[first : first + num_rows], where)


def _check_rows(num_rows: Mapping[str, int], called: str) -> None:
    if len(set(num_rows.values())) > 1:
        counts = ", ".join(f"{name!r} {rows}" for name, rows in num_rows.items())
        raise ProgramError(f"the arrays of {called} have different numbers of rows: {counts}; a row is an example")


def check_values(item: DataInput, array: Array, where: str) -> None:
    """Raise ProgramError where an array's values are invalid for an input; `where` is what messages call it."""
    if item.below:
        if array.dtype.kind not in "iu":
            raise ProgramError(f"{where} has type {array.dtype}; expected whole numbers from 0 to {item.below - 1}")
        if array.min() < 0 or array.max() >= item.below:
            wrong = array.min() if array.min() < 0 else array.max()
            raise ProgramError(f"{where} holds {wrong}; expected whole numbers from 0 to {item.below - 1}")
    else:
        if array.dtype.kind not in "fiu":
            raise ProgramError(f"{where} has type {array.dtype}; expected numbers")
        if not np.isfinite(array).all():
            raise ProgramError(f"{where} holds values that are not finite; clean the data first")


_EXPECTED = "expected package.module:function, a function that yields a dict of arrays for each step"


def load_function(name: str) -> Callable[..., Any]:
    """Import and return the function that ``package.module:function`` names; this executes the module.

    Raises ProgramError where the module or function does not exist.
    """
    module_name, _, attribute = name.partition(":")
    parts = [*module_name.split("."), attribute]
    if not all(part.isidentifier() for part in parts):
        raise ProgramError(f"{name!r} names no function; {_EXPECTED}")
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ProgramError(f"cannot import {module_name} for the data: {error}; is it on PYTHONPATH?") from error
    if not callable(function):
        raise ProgramError(f"module {module_name} has no function {attribute!r}; {_EXPECTED}")
    return function  # type: ignore[no-any-return]


class GeneratedBatches:
    """Batches from a generator function, one for each step, validated as they arrive.

    A function with a `start` parameter receives the first step; otherwise earlier batches are skipped. The first batch
    is generated and validated at once.

    Args:
        inputs: The inputs.
        function: The generator function.
        name: Its name, for messages.
        start: First step.
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
        """Fingerprint of the data, as JSON."""
        return {
            "source": "generator",
            "batch": {item.name: list(item.shape) for item in self._inputs},
            "function": self._name,
        }

    def batch(self, step: int) -> dict[str, Array]:
        """Return the arrays of a step, by name; steps are requested in order, the last one repeatedly if needed."""
        if step == self._step:
            self._next = self._checked(self._draw())
        assert step == self._step - 1, f"step {step} requested; {self._step - 1} is available"
        return self._next

    def _draw(self) -> Any:
        self._step += 1
        return self._guarded(lambda: next(self._source))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except StopIteration:
            raise ProgramError(
                f"data generator {self._name} ended before the batch of step {self._step}; train fewer steps, or make "
                "it begin anew"
            ) from None
        # User code may raise anything.
        except Exception as error:
            raise ProgramError(f"data generator {self._name} raised {type(error).__name__}: {error}") from error

    def _checked(self, drawn: Any) -> dict[str, Array]:
        where = f"the batch of step {self._step} of data generator {self._name}"
        if not isinstance(drawn, Mapping):
            raise ProgramError(f"{where} is of type {type(drawn).__name__}; {_EXPECTED}")
        batch = {}
        for item in self._inputs:
            if item.name not in drawn:
                names = ", ".join(sorted(map(str, drawn))) or "nothing"
                raise ProgramError(f"{where} has no array {item.name!r}; it holds {names}")
            own = f"array {item.name!r} of {where}"
            try:
                array = np.asarray(drawn[item.name])
            except ValueError as error:
                raise ProgramError(f"{own} is not an array: {error}") from None
            if array.shape != item.shape:
                raise ProgramError(f"{own} has shape {list(array.shape)}; expected {list(item.shape)}")
            check_values(item, array, own)
            batch[item.name] = array.astype(np.int32) if item.below else array
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        loss: Mean loss.
        accuracy: Fraction of points whose label has the largest logit; None if not available.
    """

    loss: float
    accuracy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvaluation:
    """Evaluation after a step, counted from 1, with the number of examples."""

    step: int
    loss: float
    accuracy: float | None
    num_examples: int


def held_out_batches(inputs: Iterable[DataInput], path: Path) -> Batches:
    """Return the batches of the data to test on; ProgramError where they do not fit the inputs."""
    return Batches(inputs, seed=0, arrays=read_arrays(path), called="the test data")


def evaluated(batches: Batches, evaluate: Callable[[Mapping[str, Array]], Evaluation], *, step: int) -> StepEvaluation:
    """Return the mean over all complete batches; remaining rows are ignored, since a program's batch size is fixed.

    Raises ProgramError where the loss is not finite.
    """
    results = [evaluate(batches.batch(number)) for number in range(batches.num_batches)]
    loss = float(np.mean([result.loss for result in results]))
    if not np.isfinite(loss):
        raise ProgramError(
            f"after step {step} the loss on the test data is {loss}; use a smaller learning rate, or look for it in "
            "the data"
        )
    accuracies = [result.accuracy for result in results if result.accuracy is not None]
    return StepEvaluation(
        step=step,
        loss=loss,
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        num_examples=batches.num_examples,
    )


# -- programs that compute outputs


def filled_batches(
    inputs: list[DataInput], data: Mapping[str, Array], batch: int
) -> tuple[int, list[Mapping[str, Array]]]:
    """Return the number of examples and the batches; the last one is filled up with its own first rows."""
    for item in inputs:
        if item.name not in data:
            held = ", ".join(sorted(data)) or "none"
            raise ProgramError(f"the data have no array {item.name!r}; the file holds {held}")
        row, shape = item.shape[1:], data[item.name].shape
        if len(shape) != len(item.shape) or shape[1:] != row:
            raise ProgramError(f"input {item.name!r} has shape {list(shape)}; expected [N, {', '.join(map(str, row))}]")
        check_values(item, data[item.name], f"input {item.name!r}")
    counts = {len(data[item.name]) for item in inputs}
    sizes = {item.shape[0] for item in inputs}
    if len(counts) > 1 and len(sizes) == 1:
        raise ProgramError(f"the inputs have {', '.join(map(str, sorted(counts)))} rows; expected as many in each")
    num_examples = max(counts, default=1)
    if num_examples == 0:
        raise ProgramError("the inputs have no rows; give one example or more")
    batches: list[Mapping[str, Array]] = []
    for first in range(0, num_examples, batch):
        rows = np.arange(first, first + batch)
        rows = np.where(rows < num_examples, rows, first)
        batches.append(
            {item.name: _cast(item, data[item.name] if len(sizes) > 1 else data[item.name][rows]) for item in inputs}
        )
    return num_examples, batches


def _cast(item: DataInput, array: Array) -> Array:
    return array.astype(np.int32) if item.below else array


def joined_rows(name: str, parts: list[Array], num_examples: int, batch: int) -> Array:
    """Concatenate the results of all batches, without those of the rows that filled up the last one."""
    if num_examples == batch:
        return parts[0]
    if parts[0].shape[:1] != (batch,):
        raise ProgramError(
            f"output {name!r} has shape {list(parts[0].shape)}, whose first dim is not the batch; give exactly {batch} "
            f"examples, found {num_examples}"
        )
    return np.concatenate(parts)[:num_examples]


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an .npz file; ProgramError where it cannot be written."""
    buffer = io.BytesIO()
    np.savez(buffer, **dict(arrays))  # type: ignore[arg-type]
    write_or_fail(path, buffer.getvalue(), ProgramError)


# -- micro-batches

# Example e of micro-batch i of m is example e · m + i of the step, so that a rank reads a contiguous part of a step.


def example_dims(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return the dim of the examples of each input of a graph's module, None where it has none."""
    told = dict(graph.arguments).get("batch")
    return [
        None if span is None else next(d for d, n in enumerate(s) if (prod(s[:d]), n) == (span.blocks, span.examples))
        for s, span in zip(shapes, given_spans(shapes, told if isinstance(told, int) else None), strict=True)
    ]


def micro_batch(x: Any, number: int, count: int, dim: int | None = 0) -> Any:
    """Return one micro-batch of a step's input; `dim` is that of the examples, None for none."""
    return x if dim is None or not x.ndim else x[(slice(None),) * dim + (slice(number, None, count),)]
