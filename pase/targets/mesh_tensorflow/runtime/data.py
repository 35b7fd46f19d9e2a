"""Training data: what a network reads besides its weights, made up from a seed or taken from files of arrays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pase.common.array_files import mapped_array, opened_archive, reading
from pase.errors import EmitError, RuntimeFailure
from pase.graph import Access, Graph, Operator, Role
from pase.graph.access import access_dims
from pase.graph.names import listed, short
from pase.targets.mesh_tensorflow.runtime.initial import generator

Array = np.ndarray[Any, Any]

_PIECE_ELEMENTS = 1 << 20
"""Of an array whose values are checked: it may be larger than the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInput:
    """One array of a batch. shape: [batch, …]. below: indices are less than this; 0 for floating-point values."""

    name: str
    shape: tuple[int, ...]
    below: int = 0


def data_inputs(graph: Graph) -> dict[tuple[str, int], DataInput]:
    """Return what no edge feeds, by (layer, input).

    Of an imported model: its inputs, by their names and in their shapes. Otherwise names are "labels" for the labels of
    a loss, "inputs" where there is a single other one, the layer's name (and the tensor's, where a layer has two)
    otherwise.
    """
    named: dict[tuple[str, int], DataInput] = {}
    for operator in graph.operators:
        for item in operator.body.inputs if operator.body else ():
            read = operator.reads[item.read]
            below = index_bound(operator, read) if read.role is Role.INDEX else 0
            named[operator.name, item.read] = DataInput(name=item.name, shape=item.shape, below=below)
    if named:
        return named
    free = [
        (operator, i)
        for operator in graph.operators
        for i, read in enumerate(operator.reads)
        if read.role is not Role.PARAMETER and (operator.name, i) not in graph.incoming
    ]
    labels = [(o, i) for o, i in free if o.kind == "softmax_loss" and o.reads[i].role is Role.INDEX]
    others = [pair for pair in free if pair not in labels]
    names: dict[tuple[str, int], str] = {}
    for group, single in ((labels, "labels"), (others, "inputs")):
        for operator, i in group:
            of_layer = [j for o, j in group if o is operator]
            own = operator.name if len(of_layer) == 1 else f"{operator.name}/{operator.reads[i].tensor}"
            names[operator.name, i] = single if len(group) == 1 else own
    result = {}
    for operator, i in free:
        read = operator.reads[i]
        below = 0
        if read.role is Role.INDEX:
            below = index_bound(operator, read)
        result[operator.name, i] = DataInput(name=names[operator.name, i], shape=read.shape, below=below)
    return result


def index_bound(operator: Operator, read: Access) -> int:
    """Return the extent of the dim that an index runs over: one that the index lacks, looked up rather than written."""
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
    """Batches of every input, in a cycle; the same for every strategy and for the reference.

    Without a file: numbers drawn from the seed and the input's name, one batch for all steps, so that the loss falls.
    called: what messages call the arrays.
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
        """How many whole batches there are before they begin anew."""
        if self._arrays is None:
            return 1
        return min((len(self._arrays[item.name]) // item.shape[0] for item in self._inputs), default=1)

    @property
    def num_examples(self) -> int:
        """How many examples they hold."""
        return self.num_batches * (self._inputs[0].shape[0] if self._inputs else 1)

    @property
    def description(self) -> dict[str, Any]:
        """What tells these data from others, as JSON has it: a position in the ones means nothing in the others."""
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
    """Return the arrays of an ``.npz`` file, or of a directory of ``.npy`` files, which are left on disk.

    In a directory an array has its file's name, with that of folders within it: ``block/x.npy`` holds ``block/x``.
    Raises RuntimeFailure where there are none. Nothing in the files is executed.
    """
    return _read_directory(path) if path.is_dir() else _read_archive(path)


def _read_archive(path: Path) -> dict[str, Array]:
    expected = "expected an .npz file written by numpy.savez"
    with reading(RuntimeFailure, f"cannot read data from {path}", expected), opened_archive(path) as archive:
        return {name: archive.array(name) for name in archive.names}


def _read_directory(path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for file in sorted(path.rglob("*.npy")):
        expected = "expected an .npy file written by numpy.save"
        with reading(RuntimeFailure, f"cannot read data from {file}", expected):
            arrays[file.relative_to(path).with_suffix("").as_posix()] = mapped_array(file)
    if not arrays:
        raise RuntimeFailure(f"directory {path} holds no .npy files; expected one for each input, such as inputs.npy")
    return arrays


def _check(item: DataInput, arrays: Mapping[str, Array], called: str) -> None:
    row = ", ".join(map(str, item.shape[1:]))
    if item.name not in arrays:
        raise RuntimeFailure(
            f"{called} have no array {item.name!r}; the file holds {', '.join(sorted(arrays)) or 'none'}; "
            f"the program needs {item.name!r} of shape [N{', ' + row if row else ''}]"
        )
    array = arrays[item.name]
    where = f"array {item.name!r} of {called}"
    if array.shape[1:] != item.shape[1:] or array.ndim == 0 or len(array) < item.shape[0]:
        raise RuntimeFailure(
            f"{where} has shape {list(array.shape)}; expected [N{', ' + row if row else ''}] with N at least "
            f"{item.shape[0]}, the batch"
        )
    num_rows = max(1, _PIECE_ELEMENTS // max(1, prod(item.shape[1:])))
    for first in range(0, len(array), num_rows):
        check_values(item, array[first : first + num_rows], where)


def _check_rows(num_rows: Mapping[str, int], called: str) -> None:
    if len(set(num_rows.values())) > 1:
        counts = ", ".join(f"{name!r} {rows}" for name, rows in num_rows.items())
        raise RuntimeFailure(f"the arrays of {called} have different numbers of rows: {counts}; a row is an example")


def check_values(item: DataInput, array: Array, where: str) -> None:
    """Raise RuntimeFailure where the numbers of an array are not what an input takes. where: what messages call it."""
    if item.below:
        if array.dtype.kind not in "iu":
            raise RuntimeFailure(f"{where} has type {array.dtype}; expected whole numbers from 0 to {item.below - 1}")
        if array.min() < 0 or array.max() >= item.below:
            wrong = array.min() if array.min() < 0 else array.max()
            raise RuntimeFailure(f"{where} holds {wrong}; expected whole numbers from 0 to {item.below - 1}")
    else:
        if array.dtype.kind not in "fiu":
            raise RuntimeFailure(f"{where} has type {array.dtype}; expected numbers")
        if not np.isfinite(array).all():
            raise RuntimeFailure(f"{where} holds values that are not finite; clean the data first")
