"""The communication of integrated model, batch and domain parallelism (Gholami et al. 2018; version 1: 2017)."""

from pase.studies.integrated.chain import CONVOLUTIONS, DENSE, Chain, WeightedLayer, chain_of
from pase.studies.integrated.equations import (
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
from pase.studies.integrated.memory import Words, held, held_2d, moved, moved_stationary_a
from pase.studies.integrated.network import Grid, Network, all_grids, check_batch, network_of, parse_grid
from pase.studies.integrated.options import CONVENTIONS, Options, with_conventions
from pase.studies.integrated.steps import ComputeTimes, num_iterations, step_time
from pase.studies.integrated.study import OWN_GRIDS, Candidate, Study, study
from pase.studies.integrated.terms import Terms
from pase.studies.integrated.version_1 import integrated_1, pure_batch_1, pure_model_1
from pase.studies.integrated.versions import SAME_GRID, VERSIONS, Version

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
