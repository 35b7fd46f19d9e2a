"""LeNet-5 on the digits trained by the pure rules, event by event: samples until an accuracy is reached.

Nothing runs at the same time here, so that the same arguments give the same figures. Workers of asynchronous methods
arrive in an order that is drawn: each gradient takes a random time.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType

import numpy as np

from pase.datasets.registry import digits
from pase.easgd.actors import Evaluator, Objective
from pase.easgd.algorithms import Algorithm, Array, Exchange, Rates, Sends, WorkerState, changed
from pase.easgd.network import Network, Replica, batches_of_workers, build_of_plan
from pase.easgd.synchronous import tree_sum
from pase.importers import load
from pase.planning.planner import search

NUM_WORKERS = 4
BATCH = 32
TARGET = 0.97
TEST_EVERY = 2
"""Rounds of all workers between two tests."""

_SPREAD = 0.4
"""Of the logarithm of the time that a gradient takes: the staleness is then spread as it is in threads on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The network and its data. network: of a worker's batch. evaluator: of all 357 test examples at once."""

    network: Network
    evaluator: Evaluator
    train: Mapping[str, Array]

    def objectives(self, seed: int) -> list[Replica]:
        """Return the workers' objectives; what they see when is a function of the seed."""
        workers = range(NUM_WORKERS)
        batches = batches_of_workers(
            self.train, self.network.inputs, workers=workers, num_workers=NUM_WORKERS, seed=seed
        )
        return [self.network.replica(batches[worker], seed=seed, worker=worker) for worker in workers]


def load_bench(batch: int = BATCH) -> Bench:
    """Return LeNet-5 and the digits."""
    data = digits()
    held_out = data["test"]
    networks = [
        Network.load(build_of_plan(search(load("lenet5", batch=size), devices=1)).build, num_devices=1)
        for size in (batch, len(held_out["labels"]))
    ]
    return Bench(network=networks[0], evaluator=networks[1].evaluator(held_out), train=data["train"])


# -- training, one event after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """After an event. num_gradients: of all workers so far."""

    num_gradients: int
    centre: Array
    workers: Sequence[WorkerState]


def moments(
    algorithm: Algorithm, rates: Rates, objectives: Sequence[Objective], weights: Array, *, seed: int
) -> Iterator[Moment]:
    """Yield every moment of a training that never ends."""
    turns = _together if algorithm.is_synchronous else _one_by_one
    yield from turns(algorithm, rates, objectives, weights, seed)


def _one_by_one(
    algorithm: Algorithm, rates: Rates, objectives: Sequence[Objective], weights: Array, seed: int
) -> Iterator[Moment]:
    elastic = algorithm.sends is Sends.WEIGHTS
    workers = [algorithm.worker_state(weights)] * len(objectives)
    steps = [0] * len(objectives)
    master = algorithm.master_state(weights)
    for i in _ARRIVALS[algorithm.exchange](len(objectives), seed):
        gradient = objectives[i].gradient(workers[i].weights, steps[i]).vector
        after = changed(master, algorithm.master(rates, master, workers[i].weights if elastic else gradient, 1))
        workers[i] = algorithm.worker(rates, workers[i], gradient, master.centre if elastic else after.centre)
        master = after
        steps[i] += 1
        yield Moment(num_gradients=sum(steps), centre=master.centre, workers=workers)


def _together(
    algorithm: Algorithm, rates: Rates, objectives: Sequence[Objective], weights: Array, _seed: int
) -> Iterator[Moment]:
    elastic = algorithm.sends is Sends.WEIGHTS
    workers = [algorithm.worker_state(weights)] * len(objectives)
    master = algorithm.master_state(weights)
    step = 0
    while True:
        found = [each.gradient(own.weights, step).vector for each, own in zip(objectives, workers, strict=True)]
        total = tree_sum([own.weights for own in workers] if elastic else found)
        after = changed(master, algorithm.master(rates, master, total, len(workers)))
        centre = master.centre if elastic else after.centre
        workers = [algorithm.worker(rates, own, one, centre) for own, one in zip(workers, found, strict=True)]
        master = after
        step += 1
        yield Moment(num_gradients=step * len(workers), centre=master.centre, workers=workers)


def _in_turn(num_workers: int, _seed: int) -> Iterator[int]:
    return cycle(range(num_workers))


def _as_they_come(num_workers: int, seed: int) -> Iterator[int]:
    """Yield who is served next, where every gradient takes a random time."""
    numbers = np.random.default_rng([seed, 2])
    ready = [(numbers.lognormal(0, _SPREAD), worker) for worker in range(num_workers)]
    heapq.heapify(ready)
    while True:
        time, worker = ready[0]
        yield worker
        heapq.heapreplace(ready, (time + numbers.lognormal(0, _SPREAD), worker))


_ARRIVALS: Mapping[Exchange, Callable[[int, int], Iterator[int]]] = MappingProxyType(
    {Exchange.ROUND_ROBIN: _in_turn, Exchange.FIRST_COME: _as_they_come, Exchange.LOCK_FREE: _as_they_come}
)
"""In which order workers are served, by who is served when."""


# -- how far it came

Whose = Callable[[Moment], Array]
"""Which weights are tested."""


def centre(moment: Moment) -> Array:
    """Return the centre."""
    return moment.centre


def mean_of_workers(moment: Moment) -> Array:
    """Return the mean of the workers' own weights."""
    mean: Array = tree_sum([each.weights for each in moment.workers]) / len(moment.workers)
    return mean


def first_worker(moment: Moment) -> Array:
    """Return the weights of worker 0."""
    return moment.workers[0].weights


def samples_until(
    bench: Bench,
    algorithm: Algorithm,
    rates: Rates,
    *,
    seed: int,
    most: int,
    whose: Sequence[Whose] = (centre,),
    target: float = TARGET,
    test_every: int = TEST_EVERY,
) -> tuple[int | None, ...]:
    """Return for each of some weights the samples until they first reach the target on the test data; None: not yet.

    most: samples at which the training ends. test_every: rounds of all workers.
    """
    batch = bench.network.batch_size
    reached: dict[Whose, int] = {}
    for moment in moments(algorithm, rates, bench.objectives(seed), bench.network.initial(seed), seed=seed):
        num_samples = moment.num_gradients * batch
        if moment.num_gradients % (test_every * NUM_WORKERS) == 0:
            for each in whose:
                if each not in reached and (bench.evaluator.evaluate(each(moment))[1] or 0) >= target:
                    reached[each] = num_samples
        if num_samples >= most or len(reached) == len(whose):
            break
    return tuple(reached.get(each) for each in whose)
