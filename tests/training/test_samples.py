"""Which examples a worker sees: each its own part, all of it in every epoch, in an order of seed and worker alone."""

from collections import Counter

import numpy as np
import pytest

from pase.easgd.job import DataSplit
from pase.easgd.network import Sampler, batches_of_workers, part_of, worker_seed
from pase.errors import ProgramError, TrainingError
from pase.targets.training.data import DataInput

INPUTS = (DataInput(name="inputs", shape=(4, 2)), DataInput(name="labels", shape=(4,), below=1000))
NUM_ROWS = 46


def rows(num_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    labels = np.arange(num_rows)
    return {"inputs": np.stack([labels, -labels], axis=1).astype(np.float32), "labels": labels}


def sampler(worker: int, num_workers: int = 3, seed: int = 5, num_rows: int = NUM_ROWS) -> Sampler:
    return batches_of_workers(rows(num_rows), INPUTS, workers=(worker,), num_workers=num_workers, seed=seed)[worker]


def labels(batches: Sampler, num_steps: int) -> list[int]:
    return [label for step in range(num_steps) for label in batches(step)["labels"].tolist()]


def test_parts_are_a_partition_of_nearly_equal_sizes() -> None:
    parts = [part_of(NUM_ROWS, worker=worker, num_workers=3, seed=5).tolist() for worker in range(3)]
    assert sorted(row for part in parts for row in part) == list(range(NUM_ROWS))
    assert sorted(map(len, parts)) == [15, 15, 16]
    # Shuffled over the parts: data that are sorted by class do not give each worker other classes.
    assert all(part != sorted(part) for part in parts)
    assert all(min(part) < 10 and max(part) > 36 for part in parts)


def test_every_epoch_goes_once_through_the_part_in_another_order() -> None:
    part = part_of(NUM_ROWS, worker=1, num_workers=3, seed=5).tolist()
    seen = labels(sampler(1), 60)
    epochs = [seen[k * len(part) : (k + 1) * len(part)] for k in range(len(seen) // len(part))]
    assert len(epochs) == 240 // len(part)
    assert all(sorted(epoch) == sorted(part) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_rows_of_different_inputs_stay_together() -> None:
    for step in range(9):
        batch = sampler(2)(step)
        assert batch["inputs"].shape == (4, 2)
        assert batch["labels"].dtype == np.int32
        assert batch["inputs"][:, 0].tolist() == batch["labels"].tolist()


def test_a_batch_depends_on_seed_worker_and_step_alone() -> None:
    forward, backward = sampler(0), sampler(0)
    steps = list(range(40))
    first = {step: forward(step)["labels"].tolist() for step in steps}
    assert {step: backward(step)["labels"].tolist() for step in reversed(steps)} == first
    assert labels(sampler(0, seed=6), 40) != labels(sampler(0), 40)
    assert not set(labels(sampler(1), 40)) & set(labels(sampler(0), 40))


def test_one_worker_has_all_the_data() -> None:
    assert Counter(labels(sampler(0, num_workers=1, num_rows=40), 20)) == Counter(dict.fromkeys(range(40), 2))


def test_a_part_smaller_than_a_batch_is_gone_through_several_times_in_a_step() -> None:
    counts = Counter(sampler(2, num_workers=3, num_rows=5)(0)["labels"].tolist())
    assert sum(counts.values()) == 4
    assert len(counts) == 2


def test_made_up_data_are_each_workers_own() -> None:
    first, second = batches_of_workers(None, INPUTS, workers=range(2), num_workers=2, seed=0).values()
    assert np.array_equal(first(0)["inputs"], first(7)["inputs"])
    assert not np.array_equal(first(0)["inputs"], second(0)["inputs"])


def test_seeds_of_workers_differ_and_the_first_has_the_seed_itself() -> None:
    assert worker_seed(9, 0) == 9
    assert len({worker_seed(seed, worker) for seed in range(20) for worker in range(20)}) == 400


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(TrainingError, match=r"have 5 examples for 6 workers; .* use fewer workers"):
        sampler(0, num_workers=6, num_rows=5)
    with pytest.raises(ProgramError, match="no array 'labels'"):
        batches_of_workers({"inputs": rows()["inputs"]}, INPUTS, workers=(0,), num_workers=2, seed=0)


def test_replicated_data_are_gone_through_whole_by_every_worker_in_its_own_order() -> None:
    """Algorithms 1 to 4: each worker picks its samples from all of them."""
    found = batches_of_workers(rows(), INPUTS, workers=range(3), num_workers=3, seed=5, split=DataSplit.REPLICATE)
    # 23 batches of 4 are two epochs.
    seen = {worker: labels(batches, 23) for worker, batches in found.items()}
    for worker in range(3):
        assert Counter(seen[worker]) == Counter(2 * list(range(NUM_ROWS)))
    assert len({tuple(order) for order in seen.values()}) == 3
    # With one worker there is nothing to divide: both are the same.
    alone = batches_of_workers(rows(), INPUTS, workers=[0], num_workers=1, seed=5, split=DataSplit.REPLICATE)[0]
    assert labels(alone, 23) == labels(sampler(0, num_workers=1), 23) == seen[0]


def test_replicated_data_may_have_fewer_rows_than_workers() -> None:
    found = batches_of_workers(rows(5), INPUTS, workers=[6], num_workers=7, seed=5, split=DataSplit.REPLICATE)
    assert sorted(labels(found[6], 5)) == sorted(4 * list(range(5)))
