"""Which examples of a batch a rank reads, and a sampler that yields them; the micro-batches of a step.

Example e of micro-batch i of m is example e · m + i of the step: so what a rank reads of a step lies together, too.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from math import prod
from typing import Any

import torch
from torch.utils.data import Sampler

from pase.errors import ProgramError
from pase.graph import Graph
from pase.graph.batch import given_spans
from pase.sharding.boxes import Box, Range
from pase.sharding.layouts import Layout


def rows_read(shape: Sequence[int], layouts: Iterable[Layout], rank: int) -> Range:
    """Return which rows of an input a rank reads, from the first to the last; all where that cannot be told.

    layouts: in which layers read the input, perhaps in another shape; windows may stick out of it.
    """
    boxes = []
    for layout in layouts:
        if layout.shape[:1] != tuple(shape)[:1]:
            return (0, shape[0])
        boxes.append(layout.by_device[rank][0])
    return (max(0, min(low for low, _ in boxes)), min(shape[0], max(high for _, high in boxes))) if boxes else (0, 0)


def in_place(part: Any, shape: tuple[int, ...], box: Box) -> Any:
    """Return a rank's part of an input where it is in the whole of it; nobody reads the zeros around it."""
    if tuple(part.shape) == shape:
        return part
    found = part.new_zeros(shape)
    found[tuple(slice(low, high) for low, high in box)] = part
    return found


def example_dims(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return along which dim examples are of each input of the module that a graph is of, None where it has none."""
    told = dict(graph.arguments).get("batch")
    return [
        None if span is None else next(d for d, n in enumerate(s) if (prod(s[:d]), n) == (span.blocks, span.examples))
        for s, span in zip(shapes, given_spans(shapes, told if isinstance(told, int) else None), strict=True)
    ]


def micro_batch(x: Any, number: int, count: int, dim: int | None = 0) -> Any:
    """Return what one of the micro-batches of a step has of an input; dim: of the examples, None for none."""
    return x if dim is None or not x.ndim else x[(slice(None),) * dim + (slice(number, None, count),)]


class RankSampler(Sampler[list[int]]):
    """Yields, batch by batch, the numbers of the examples that a rank reads: a `batch_sampler` of `DataLoader`.

    All ranks go through the examples in one order. Examples that do not fill a batch are left out.

    Args:
        examples: the data set, or how many examples there are.
        batch: examples in a batch of all ranks together.
        rows: which of a batch this rank reads.
        shuffle: whether each epoch has another order, by the seed and `set_epoch`.
        seed: the same on all ranks.

    Raises:
        ProgramError: there are fewer examples than a batch has.
    """

    def __init__(self, examples: Sized | int, *, batch: int, rows: Range, shuffle: bool = True, seed: int = 0) -> None:
        self._count = examples if isinstance(examples, int) else len(examples)
        self._batch, self._rows, self._shuffle, self._seed, self._epoch = batch, rows, shuffle, seed, 0
        if self._count < batch:
            raise ProgramError(f"there are {self._count} examples, and a batch has {batch}; search for a smaller batch")

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._count)
        if self._shuffle:
            order = torch.randperm(self._count, generator=torch.Generator().manual_seed(self._seed + self._epoch))
        low, high = self._rows
        for begin in range(0, len(self) * self._batch, self._batch):
            yield order[begin + low : begin + high].tolist()

    def __len__(self) -> int:
        return self._count // self._batch
