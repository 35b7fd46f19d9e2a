"""Strategies to compare with: other people's choices, completed and costed in the same space."""

from pase.baselines.baseline import Baseline
from pase.baselines.compare import Comparison, Contender, compare
from pase.baselines.mcmc import Sampled, Sampling, sample
from pase.baselines.partial import complete, restrict
from pase.baselines.registry import BASELINES, chosen

__all__ = [
    "BASELINES",
    "Baseline",
    "Comparison",
    "Contender",
    "Sampled",
    "Sampling",
    "chosen",
    "compare",
    "complete",
    "restrict",
    "sample",
]
