"""The pool of ranks that other tests run on."""

import os
import signal
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.targets.torch.ranks import Pool, RanksFailedError


def summed(rank: int, world: int, value: float) -> tuple[int, float]:
    total = torch.tensor([value * (rank + 1)], dtype=torch.float64)
    dist.all_reduce(total)
    return rank, total.item()


def process(rank: int, world: int) -> int:
    assert torch.get_num_threads() == 1
    return os.getpid()


def failing(rank: int, world: int, number: int) -> float:
    if rank == number:
        raise KeyError(f"of rank {rank}")
    return summed(rank, world, 1.0)[1]


def killed(rank: int, world: int, number: int) -> float:
    if rank == number:
        os.write(1, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return summed(rank, world, 1.0)[1]


def warning(rank: int, world: int) -> None:
    warnings.warn("a warning of the function", stacklevel=1)


def not_sendable(rank: int, world: int) -> object:
    return lambda: rank


def leaving(rank: int, world: int) -> None:
    """Begin a group that nobody else joins, which PyTorch counts on this rank alone."""
    if rank == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=1))


def sleeping(rank: int, world: int) -> None:
    time.sleep(60 * rank)


def test_ranks_compute_together_and_stay(ranks: Pool) -> None:
    assert ranks.run(summed, 2.0) == [(rank, 20.0) for rank in range(4)]
    first = ranks.run(process)
    assert len({*first, os.getpid()}) == 5
    assert ranks.run(process) == first
    assert ranks.run(process, world=2) == first[:2]
    assert ranks.run(summed, 2.0, world=2) == [(0, 6.0), (1, 6.0)]


def test_a_failure_comes_back_with_its_rank_and_traceback(ranks: Pool) -> None:
    with pytest.raises(
        RanksFailedError, match=r"(?s)-- rank 2 of 4: Traceback.*in failing.*KeyError: 'of rank 2'"
    ) as caught:
        ranks.run(failing, 2)
    assert caught.value.kinds[2] == "KeyError"
    with pytest.raises(RanksFailedError, match="KeyError: 'of rank 0'"):
        ranks.run(failing, 0, world=1)
    with pytest.raises(RanksFailedError, match="UserWarning: a warning of the function"):
        ranks.run(warning, world=2)
    with pytest.raises(RanksFailedError, match=r"(?i)can't pickle local object|can't get local object"):
        ranks.run(not_sendable, world=2)
    assert ranks.run(summed, 2.0) == [(rank, 20.0) for rank in range(4)]


def test_a_worker_whose_group_was_not_made_is_replaced(ranks: Pool) -> None:
    before = ranks.run(process, world=2)
    with pytest.raises(RanksFailedError, match=r"(?s)-- rank 1 of 2: Traceback.*in leaving"):
        ranks.run(leaving, world=2, grace_s=30.0)
    assert ranks.run(summed, 2.0, world=2, timeout_s=30.0) == [(0, 6.0), (1, 6.0)]
    assert before[1] not in ranks.run(process, world=2)


def test_a_worker_that_dies_or_hangs_is_replaced(ranks: Pool) -> None:
    before = ranks.run(process)
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 of 4: was ended by signal 9 \(SIGKILL\).*\nlast words"):
        ranks.run(killed, 1)
    after = ranks.run(process)
    assert before[1] not in after
    os.kill(after[0], signal.SIGKILL)
    while ranks.workers[0].process.poll() is None:
        time.sleep(0.05)
    assert ranks.run(summed, 2.0) == [(rank, 20.0) for rank in range(4)]
    with pytest.raises(RanksFailedError, match=r"rank 1 of 2: hung, in this run of 1 s at most") as caught:
        ranks.run(sleeping, world=2, timeout_s=1)
    assert 1 in caught.value.kinds
    assert ranks.run(summed, 2.0, world=2) == [(0, 6.0), (1, 6.0)]
