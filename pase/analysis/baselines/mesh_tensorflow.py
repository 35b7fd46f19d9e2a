"""The experts' strategy for Transformers of Mesh-TensorFlow (Shazeer et al. 2018; PaSE section IV-D).

The batch of every layer is split n ways; the model's dims, the vocabulary, the hidden units of feed-forward layers and
the attention heads, are split m ways; m · n = p.
"""

from collections.abc import Sequence

from pase.analysis.baselines.layout import cheapest, choice_of, largest_splits
from pase.analysis.baselines.transformer_dims import TransformerDims, transformer_dims
from pase.costs import Problem
from pase.costs.configurations import divisors
from pase.machine import Machine


def choose(problem: Problem, _machine: Machine) -> tuple[int, ...] | None:
    """Return the cheapest n by m of all with n · m = p; None for a network without attention."""
    dims = transformer_dims(problem.graph)
    return None if dims is None else cheapest(problem, meshes(problem, dims, divisors(problem.num_devices)))


def meshes(problem: Problem, dims: TransformerDims, model_ways: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the strategy of each number of ways to split the model, the batch split by the rest of the devices.

    A dim that a number does not divide is split by the largest of its divisors that does.
    """
    model = dims.vocabulary | dims.hidden | dims.heads
    found = []
    for m in model_ways:
        rule = [(dims.batch, problem.num_devices // m), (model, m)]
        found.append(choice_of(problem, [largest_splits(o, dims.classes, rule) for o in problem.graph.operators]))
    return found
