"""Strategies to compare with: other people's choices, completed and costed in the same space."""

from pase.analysis.baselines.compare import Comparison, Contender, compare
from pase.analysis.baselines.mcmc import Sampled, Sampling, sample
from pase.analysis.baselines.registry import BASELINES, Baseline, chosen
from pase.analysis.baselines.rules import complete, restrict

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
