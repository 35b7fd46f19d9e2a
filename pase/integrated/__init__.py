"""The communication of integrated model, batch and domain parallelism (Gholami et al. 2018; version 1: 2017)."""

from pase.integrated.chain import Chain, WeightedLayer, chain_of
from pase.integrated.equations import (
    Role,
    crossover_batch,
    dense_only,
    integrated,
    largest_model_batch,
    model_and_batch,
    pure_batch,
    pure_domain,
    pure_model,
    redistribution,
)
from pase.integrated.network import Grid, Network, all_grids, check_batch, network_of, parse_grid
from pase.integrated.options import CONVENTIONS, Options, with_conventions
from pase.integrated.steps import num_iterations, step_time
from pase.integrated.study import Candidate, Study, study
from pase.integrated.terms import Terms
from pase.integrated.version_1 import integrated_1, pure_batch_1, pure_model_1
from pase.integrated.versions import SAME_GRID, VERSIONS, Version

__all__ = [
    "CONVENTIONS",
    "SAME_GRID",
    "VERSIONS",
    "Candidate",
    "Chain",
    "Grid",
    "Network",
    "Options",
    "Role",
    "Study",
    "Terms",
    "Version",
    "WeightedLayer",
    "all_grids",
    "chain_of",
    "check_batch",
    "crossover_batch",
    "dense_only",
    "integrated",
    "integrated_1",
    "largest_model_batch",
    "model_and_batch",
    "network_of",
    "num_iterations",
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
