"""Which examples a worker sees when: of its part of the data, or of all of them, in a random order for each epoch."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

import numpy as np

from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.runtime.data import Array, Batches, DataInput


class DataSplit(StrEnum):
    """Whether each worker has a part of the data of its own (Section 2.3), or all of them (Algorithms 1 to 4)."""

    PARTITION = "partition"
    REPLICATE = "replicate"


Sampler = Callable[[int], dict[str, Array]]
"""Returns the batch of a step, counted from 0."""


def worker_seed(seed: int, worker: int) -> int:
    """Return a seed of a worker's own; the first worker's is the seed itself, as in a training without workers."""
    if worker == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"worker {worker} of seed {seed}".encode(), digest_size=4).digest(), "little")


def part_of(num_rows: int, *, worker: int, num_workers: int, seed: int) -> Array:
    """Return the rows of a worker's part, shuffled over the parts; parts differ by one row at most (Section 2.3)."""
    order = np.random.default_rng([seed, 0]).permutation(num_rows)
    return order[num_rows * worker // num_workers : num_rows * (worker + 1) // num_workers]


def worker_batches(
    arrays: Mapping[str, Array] | None, inputs: Iterable[DataInput], *, worker: int, num_workers: int, seed: int
) -> Sampler:
    """Return the batches of a worker, a function of seed, worker and step alone; as `batches_of_workers` has them."""
    return batches_of_workers(arrays, inputs, workers=(worker,), num_workers=num_workers, seed=seed)[worker]


def batches_of_workers(
    arrays: Mapping[str, Array] | None,
    inputs: Iterable[DataInput],
    *,
    workers: Iterable[int],
    num_workers: int,
    seed: int,
    split: DataSplit = DataSplit.PARTITION,
) -> dict[int, Sampler]:
    """Return the batches of some workers, each a function of seed, worker and step alone.

    A part (or all rows, where these are not partitioned) is gone through again and again, each time in another random
    order; a batch may end one and begin the next.
    Without arrays: made-up numbers, one batch for all steps of a worker. Raises RuntimeFailure where arrays do not fit
    the inputs, TrainingError where there are fewer rows than workers.
    """
    items = tuple(inputs)
    if arrays is None or not items:
        return {worker: Batches(items, seed=worker_seed(seed, worker), arrays=arrays).batch for worker in workers}
    # It checks the arrays: once, whoever reads them.
    Batches(items, seed=seed, arrays=arrays)
    num_rows = min(len(arrays[item.name]) for item in items)
    if split is DataSplit.REPLICATE:
        # Each in an order of its own: one worker's is that of a training without workers, whatever the split.
        every = part_of(num_rows, worker=0, num_workers=1, seed=seed)
        return {worker: _Shuffled(arrays, items, every, worker_seed(seed, worker)) for worker in workers}
    if num_rows < num_workers:
        raise TrainingError(
            f"the data have {num_rows} examples for {num_workers} workers; each needs one of its own, use fewer workers"
        )
    return {
        worker: _Shuffled(
            arrays,
            items,
            part_of(num_rows, worker=worker, num_workers=num_workers, seed=seed),
            worker_seed(seed, worker),
        )
        for worker in workers
    }


class _Shuffled:
    """The batches of a part. The orders of the last epochs are kept, as they are the next step's too."""

    def __init__(self, arrays: Mapping[str, Array], inputs: tuple[DataInput, ...], part: Array, seed: int) -> None:
        self._arrays = arrays
        self._inputs = inputs
        self._part = part
        self._seed = seed
        self._orders: dict[int, Array] = {}

    def __call__(self, step: int) -> dict[str, Array]:
        """Return the arrays of a step, by name: floating point as given, indices as int32."""
        rows: dict[int, Array] = {}
        batch = {}
        for item in self._inputs:
            size = item.shape[0]
            if size not in rows:
                rows[size] = self._rows(step * size, size)
            array = self._arrays[item.name][rows[size]]
            batch[item.name] = array.astype(np.int32) if item.below else array
        return batch

    def _rows(self, begin: int, count: int) -> Array:
        position = np.arange(begin, begin + count)
        epochs, offsets = np.divmod(position, len(self._part))
        return np.concatenate([self._order(epoch)[offsets[epochs == epoch]] for epoch in np.unique(epochs).tolist()])

    def _order(self, epoch: int) -> Array:
        if epoch not in self._orders:
            kept = {number: order for number, order in self._orders.items() if number >= epoch - 1}
            order = self._part[np.random.default_rng([self._seed, 1, epoch]).permutation(len(self._part))]
            self._orders = kept | {epoch: order}
        return self._orders[epoch]
