"""What an iteration runs on, and what it moves: links, times of computation, and the arrays of weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pase.costs.build import traffic_of
from pase.errors import TrainingError
from pase.graph import Graph, Operator
from pase.machine import Machine
from pase.studies.integrated.network import Network, network_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """|W|: num_bytes, of all parameters. num_arrays: those that need a message of their own when nothing is packed."""

    num_bytes: float
    num_arrays: int

    def num_messages(self, *, packed: bool) -> int:
        """Return the messages by which all weights go from one to another: one, or one for each array (section 5.2)."""
        return 1 if packed else self.num_arrays

    def message_s(self, link: Network, *, packed: bool) -> float:
        """Return the time of that: α for each message, and |W|β."""
        return self.num_messages(packed=packed) * link.latency_s + self.num_bytes * link.s_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """P equal workers and a master.

    worker_link: between two workers. host_link: between a worker and the master; both carry each direction by itself.
    data_s: to bring one batch to one worker. compute_s: forward and backward propagation of one batch. worker_pass_s,
    host_pass_s: to read or write an array of the weights' size once, at a worker and at the master.
    """

    worker_link: Network
    host_link: Network
    compute_s: float
    data_s: float = 0.0
    worker_pass_s: float = 0.0
    host_pass_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """One iteration of one worker alone. has_update: whether time_s holds the worker's own update too."""

    time_s: float
    source: str
    has_update: bool


def weights_of(graph: Graph) -> Weights:
    """Return the weights of a network: one array for each matrix or kernel, with its bias inside.

    A layer whose parameters are all vectors (a normalisation's scale and shift) counts as one array. What several
    layers share counts once. Raises TrainingError where there are none.
    """
    num_arrays = sum(_num_arrays(operator, graph.owners) for operator in graph.operators)
    if not num_arrays:
        raise TrainingError(
            f"model {graph.name!r} has no weights, so there is nothing to exchange; use one that trains"
        )
    return Weights(num_bytes=graph.num_parameters * graph.word_bytes, num_arrays=num_arrays)


def _num_arrays(operator: Operator, owners: Mapping[str, str]) -> int:
    owned = [a for a in operator.parameters if owners.get(a.shared, operator.name) == operator.name]
    return sum(len(access.shape) > 1 for access in owned) or min(len(owned), 1)


def step_flop(graph: Graph) -> float:
    """Return the FLOP of forward and backward propagation of one batch on one device."""
    whole = ((op, np.ones((1, len(op.dims)), dtype=np.int32)) for op in graph.operators)
    return sum((float(traffic_of(graph, op, splits).flop[0]) for op, splits in whole), 0.0)


def computation_of(graph: Graph, machine: Machine) -> Computation:
    """Return what an iteration takes at the machine's peak; no network reaches it."""
    return Computation(
        time_s=step_flop(graph) / machine.peak_flop_per_s(),
        source=f"FLOP of a step ÷ peak of {machine.device.name}: no real program is as fast",
        has_update=False,
    )


def platform_of(machine: Machine, num_workers: int, weights: Weights, computation: Computation) -> Platform:
    """Return workers and master on equal devices of a machine, joined by the slowest level that they span.

    Every worker has its data in its own memory (Algorithm 4, line 9). Updates go at the speed of the memory, and take
    no time where the machine does not give it. Raises MachineError for more workers than the machine has devices.
    """
    network = network_of(machine, max(num_workers, 2))
    bandwidth = machine.device.memory_bandwidth_bytes_per_s
    pass_s = weights.num_bytes / bandwidth if bandwidth else 0.0
    return Platform(
        worker_link=network,
        host_link=network,
        compute_s=computation.time_s,
        worker_pass_s=0.0 if computation.has_update else pass_s,
        host_pass_s=pass_s,
    )
