"""What the tests of `pase.targets.torch.launch` run on ranks of their own."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pase.targets.torch.failures import naming_lost_ranks, tell_failure
from pase.targets.torch.launch import join

NAMES = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"),
)


def sum_of_ranks(scale: float) -> tuple[int, int, float, str, int]:
    total = torch.tensor([scale * dist.get_rank()], dtype=torch.float64)
    dist.all_reduce(total)
    # What PyTorch makes of it is up to MKL, too, which may take fewer on a busy machine.
    threads = int(os.environ["OMP_NUM_THREADS"])
    return dist.get_rank(), dist.get_world_size(), total.item(), dist.get_backend(), threads


def fail(rank: int, folder: str) -> None:
    """Have one rank fail, and its process go on, while the others wait for it; each writes its process id."""
    (Path(folder) / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == rank:
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("the third batch\nis empty")
    dist.all_reduce(torch.zeros(4))


def wait_for(folder: str) -> float:
    """Write the process id, wait until there is a file `go`, and return the sum over ranks of 1."""
    (Path(folder) / str(dist.get_rank())).write_text(str(os.getpid()))
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def lost(rank: int, _world: int, victim: int, how: str) -> None:
    """On the session's ranks: wait for one that is killed, perhaps when it has told why."""
    if rank == victim:
        if how == "failed":
            tell_failure(ValueError("the third batch is empty"))
        os.kill(os.getpid(), signal.SIGKILL)
    with naming_lost_ranks():
        dist.all_reduce(torch.zeros(4))


def joining(_rank: int, _world: int, environment: dict[str, str], timeout_s: float) -> tuple[int, int, str, str]:
    """On the session's ranks: join another process group, as a process with this environment does."""
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for name in (*NAMES, "MASTER_PORT"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        ranks = join(timeout_s=timeout_s)
        assert join() == ranks
        return ranks.rank, ranks.world_size, str(ranks.device), dist.get_backend()


def main() -> None:
    """Be a program of a user: join, and perhaps fail."""
    rank = join(timeout_s=60.0).rank
    if sys.argv[1:] == [str(rank)]:
        raise ValueError("the third batch is empty")
    with naming_lost_ranks():
        dist.all_reduce(torch.zeros(4))


if __name__ == "__main__":
    main()
