"""Tensor parallelism within a node, data parallelism for the rest (Shoeybi et al. 2019; Narayanan et al. 2021).

Of each pair of products the first is split by columns, the second by rows: the projections to queries, keys and values
by heads, the one behind the attention by the same; the first feed-forward layer by hidden units, the second too. The
embedding and the head are split by vocabulary; normalisations and residuals are repeated on all t devices.
"""

from pase.analysis.baselines.layout import cheapest
from pase.analysis.baselines.mesh_tensorflow import meshes
from pase.analysis.baselines.transformer_dims import TransformerDims, transformer_dims
from pase.costs import Problem
from pase.costs.configurations import divisors
from pase.graph import Graph
from pase.machine import Machine


def choose(problem: Problem, machine: Machine) -> tuple[int, ...] | None:
    """Return the cheapest t by d of all with t · d = p that Megatron-LM allows; None for a network without attention.

    t is at most the devices of a node, and divides all heads and hidden units.
    """
    dims = transformer_dims(problem.graph)
    if dims is None:
        return None
    node = machine.levels[0].num_devices or problem.num_devices
    ways = [t for t in divisors(problem.num_devices) if t <= node and _divides(problem.graph, dims, t)]
    return cheapest(problem, meshes(problem, dims, ways))


def _divides(graph: Graph, dims: TransformerDims, ways: int) -> bool:
    """Return whether heads and hidden units of every layer can be split so many ways."""
    split = dims.heads | dims.hidden
    return all(graph[name].extents[dim] % ways == 0 for (name, dim), number in dims.classes.items() if number in split)
