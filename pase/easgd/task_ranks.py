"""Which task of a cluster has which ranks; knows of no framework."""

from itertools import pairwise

from pase.easgd.algorithms import Place
from pase.easgd.job import Job
from pase.errors import TrainingError


def count_tasks(job: Job, num_processes: int) -> int:
    """Return how many tasks a job has on processes for its workers: one more where the centre is a master's.

    Raises TrainingError where there are fewer workers than processes.
    """
    if not 1 <= num_processes <= job.num_workers:
        raise TrainingError(
            f"{num_processes} processes were asked for, for {job.num_workers} workers; expected 1 to {job.num_workers}"
        )
    return num_processes + _num_apart(job)


def task_ranks(job: Job, num_tasks: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each task: workers in contiguous blocks, as equal as can be, and the coordinator on task 0.

    A master is with the coordinator, on a task of its own. Raises TrainingError for too few or too many tasks.
    """
    apart = _num_apart(job)
    num_processes = num_tasks - apart
    if not 1 <= num_processes <= job.num_workers:
        raise TrainingError(
            f"{job.algorithm.name} with {job.num_workers} workers runs in {1 + apart} to {job.num_workers + apart} "
            f"tasks{', the first of them the master' if apart else ''}; found {num_tasks}"
        )
    each, more = divmod(job.num_workers, num_processes)
    bounds = [number * each + min(number, more) for number in range(num_processes + 1)]
    blocks = [tuple(range(begin, end)) for begin, end in pairwise(bounds)]
    first = (job.master, job.coordinator)
    return (first, *blocks) if apart else ((*blocks[0], *first), *blocks[1:])


def _num_apart(job: Job) -> int:
    """Return how many tasks have no worker."""
    return 1 if job.algorithm.place is Place.MASTER else 0
