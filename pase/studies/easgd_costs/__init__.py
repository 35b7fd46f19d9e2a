"""Cost and scaling of the EASGD family under the α-β model (You et al. 2017)."""

from pase.studies.easgd_costs.algorithms import ALGORITHMS, Algorithm, Overlap, algorithm_named
from pase.studies.easgd_costs.iteration import Breakdown, Iteration, iteration, num_stages
from pase.studies.easgd_costs.platform import (
    Computation,
    Platform,
    Weights,
    computation_of,
    platform_of,
    step_flop,
    weights_of,
)
from pase.studies.easgd_costs.scaling import ScalingRow, bandwidth_for, check_workers, weak_scaling

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Breakdown",
    "Computation",
    "Iteration",
    "Overlap",
    "Platform",
    "ScalingRow",
    "Weights",
    "algorithm_named",
    "bandwidth_for",
    "check_workers",
    "computation_of",
    "iteration",
    "num_stages",
    "platform_of",
    "step_flop",
    "weak_scaling",
    "weights_of",
]
