"""The two versions of the paper, and the ways to use a grid that each one knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pase.studies.integrated import equations
from pase.studies.integrated.chain import Chain, WeightedLayer
from pase.studies.integrated.equations import Role
from pase.studies.integrated.network import Grid, Network
from pase.studies.integrated.options import Options
from pase.studies.integrated.terms import Terms
from pase.studies.integrated.version_1 import integrated_1, pure_batch_1, pure_model_1

Roles = Mapping[str, Role]
"""What the rows of a grid share of each layer, by its name; a layer that is not there is in batch parallelism alone."""

Assessed = tuple[Terms, Roles]
Variant = Callable[[Chain, int, Grid, Network, Options], Assessed | None]
"""Returns the communication and the roles of a batch on a grid; None where the network cannot be laid out so."""

SAME_GRID = "same_grid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """pure_model, pure_batch: the extremes. variants: ways to use a grid, by name; the first is the 1.5D algorithm."""

    pure_model: Callable[[Chain, int, int, Network, Options], Terms]
    pure_batch: Callable[[Chain, int, Network, Options], Terms]
    variants: Mapping[str, Variant]


def _same_grid(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Assessed:
    roles = {layer.name: Role.MODEL for layer in chain.layers}
    return equations.model_and_batch(chain, batch, grid, network, options), roles


def _dense_only(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Assessed | None:
    if batch < grid.num_processes and any(layer.is_convolution for layer in chain.layers):
        return None  # the convolutions are in pure batch parallelism, one sample for each process at least
    roles = {layer.name: Role.MODEL for layer in chain.layers if not layer.is_convolution}
    return equations.dense_only(chain, batch, grid, network, options), roles


def _domain(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Assessed | None:
    roles = {layer.name: Role.DOMAIN if layer.is_convolution else Role.MODEL for layer in chain.layers}
    if not all(_has_rows(layer, grid, options) for layer in chain.layers if layer.is_convolution):
        return None
    return equations.integrated(chain, roles, batch, grid, network, options), roles


def _per_layer(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Assessed:
    """Choose for each convolution what communicates less, as the paper suggests after Eq. 9."""

    def role(layer: WeightedLayer) -> Role:
        if not layer.is_convolution or not _has_rows(layer, grid, options):
            return Role.MODEL
        return min(Role, key=lambda r: equations.layer_terms(layer, r, batch, grid, network, options).time_s)

    roles = {layer.name: role(layer) for layer in chain.layers}
    return equations.integrated(chain, roles, batch, grid, network, options), roles


def _has_rows(layer: WeightedLayer, grid: Grid, options: Options) -> bool:
    return layer.num_rows >= grid.num_rows or not options.rows_bound_domain


def _same_grid_1(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Assessed:
    return integrated_1(chain, batch, grid, network, options), {layer.name: Role.MODEL for layer in chain.layers}


VERSIONS: Mapping[int, Version] = MappingProxyType(
    {
        1: Version(
            pure_model=pure_model_1,
            pure_batch=pure_batch_1,
            variants=MappingProxyType({SAME_GRID: _same_grid_1}),
        ),
        2: Version(
            pure_model=equations.pure_model,
            pure_batch=equations.pure_batch,
            variants=MappingProxyType(
                {SAME_GRID: _same_grid, "dense_only": _dense_only, "domain": _domain, "per_layer": _per_layer}
            ),
        ),
    }
)
"""Version 1 is the preprint of 2017 (Eqs. 2 to 4 there), version 2 the paper of 2018."""
