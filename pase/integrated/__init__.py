"""The communication of integrated model, batch and domain parallelism (Gholami et al. 2018; version 1: 2017)."""

from pase.integrated.chain import CONVOLUTIONS, DENSE, Chain, WeightedLayer, chain_of
from pase.integrated.equations import (
    Role,
    crossover_batch,
    dense_only,
    equal_volume_batch,
    integrated,
    largest_model_batch,
    model_and_batch,
    own_grids,
    pure_batch,
    pure_domain,
    pure_model,
    redistribution,
)
from pase.integrated.memory import Words, held, held_2d, moved, moved_stationary_a
from pase.integrated.network import Grid, Network, all_grids, check_batch, network_of, parse_grid
from pase.integrated.options import CONVENTIONS, Options, with_conventions
from pase.integrated.steps import ComputeTimes, num_iterations, step_time
from pase.integrated.study import OWN_GRIDS, Candidate, Study, study
from pase.integrated.terms import Terms
from pase.integrated.version_1 import integrated_1, pure_batch_1, pure_model_1
from pase.integrated.versions import SAME_GRID, VERSIONS, Version

__all__ = [
    "CONVENTIONS",
    "CONVOLUTIONS",
    "DENSE",
    "OWN_GRIDS",
    "SAME_GRID",
    "VERSIONS",
    "Candidate",
    "Chain",
    "ComputeTimes",
    "Grid",
    "Network",
    "Options",
    "Role",
    "Study",
    "Terms",
    "Version",
    "WeightedLayer",
    "Words",
    "all_grids",
    "chain_of",
    "check_batch",
    "crossover_batch",
    "dense_only",
    "equal_volume_batch",
    "held",
    "held_2d",
    "integrated",
    "integrated_1",
    "largest_model_batch",
    "model_and_batch",
    "moved",
    "moved_stationary_a",
    "network_of",
    "num_iterations",
    "own_grids",
    "parse_grid",
    "pure_batch",
    "pure_batch_1",
    "pure_domain",
    "pure_model",
    "pure_model_1",
    "redistribution",
    "step_time",
    "study",
    "with_conventions",
]
