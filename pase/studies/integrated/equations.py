"""Equations 3 to 9 of Gholami et al. 2018: one function each.

Times are in seconds, for one training step of a batch on all processes. Logarithms are those of a tree's depth.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from math import ceil, floor

from pase.studies.integrated.chain import Chain, WeightedLayer
from pase.studies.integrated.network import Grid, Network
from pase.studies.integrated.options import Options
from pase.studies.integrated.parts import (
    batch_part,
    gather,
    halos,
    model_part,
    weight_reduction,
    whole_weights,
    zeroth_halos,
)
from pase.studies.integrated.terms import Terms, total


class Role(StrEnum):
    """What the P_r processes of a column share of a layer: its weights (L_M of Eq. 9) or an image's rows (L_D)."""

    MODEL = "model"
    DOMAIN = "domain"


def pure_model(chain: Chain, batch: int, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 3: weights are split P ways, every process holds the whole batch."""
    return total(model_part(layer, batch, Grid(num_processes, 1), network, options) for layer in chain.layers)


def pure_batch(chain: Chain, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 4: the batch is split P ways, every process holds all weights."""
    return batch_part(chain.layers, Grid(1, num_processes), network, options)


def crossover_batch(layer: WeightedLayer, options: Options) -> float:
    """Return the batch of Eq. 5, above which the paper has batch parallelism move less: 2|W_i| / (3 d_i).

    For a convolution 2 k_h k_w X_C / (3 Y_H Y_W), for a dense layer 2 d_(i-1) / 3. It takes d_i for d_(i-1), which is
    twice in Eq. 3: where they differ, a layer moves the same under Eqs. 3 and 4 at `equal_volume_batch` instead.
    """
    grouped = options.grouped and not options.crossover_per_group
    return 2 * layer.num_weights * (layer.num_groups if grouped else 1) / (3 * layer.output_words)


def equal_volume_batch(layer: WeightedLayer, options: Options) -> float:
    """Return the batch at which a layer moves as many words under Eq. 3 as under Eq. 4: 2|W_i| / (d_i + 2 d_(i-1)).

    A layer that reads the data has no input gradient: 2|W_i| / d_i.
    """
    words = layer.output_words
    if options.input_gradient:
        words += 2 * (layer.inner_words + (layer.input_words if layer.source else 0))
    return 2 * layer.num_weights / words


def largest_model_batch(layer: WeightedLayer, options: Options) -> int:
    """Return the largest whole batch for which pure model parallelism moves less than pure batch (Eq. 5); 0: none."""
    crossover = crossover_batch(layer, options)
    return max(0, ceil(crossover) - 1) if options.strict_crossover else floor(crossover)


def redistribution(words: int, batch: int, num_processes: int, network: Network, options: Options) -> float:
    """Return Eq. 6: an all-gather of so many words of each sample, from batch to model parallelism."""
    return gather(words * batch, num_processes, network, options)


def pure_domain(chain: Chain, batch: int, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 7, of the convolutions alone: every image is split P ways, every process holds all weights."""
    grid = Grid(num_processes, 1)
    convolutions = [layer for layer in chain.layers if layer.is_convolution]
    exchanged = (halos(layer, batch, grid, network, options) for layer in convolutions)
    return total(exchanged) + zeroth_halos(network, options) + whole_weights(convolutions, grid, network, options)


def model_and_batch(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 8: the 1.5D algorithm, every layer's weights split P_r ways and the batch P_c ways."""
    rows = total(model_part(layer, batch, grid, network, options) for layer in chain.layers)
    return rows + batch_part(chain.layers, grid, network, options)


def dense_only(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 4 of the convolutions, over all processes, with Eq. 8 of the dense layers (section 3, Fig. 7)."""
    dense = [layer for layer in chain.layers if not layer.is_convolution]
    convolutions = [layer for layer in chain.layers if layer.is_convolution]
    whole = Grid(1, grid.num_processes)
    terms = batch_part(convolutions, whole, network, options)
    # The sum printed from i = 0 has its term once, in the half that holds the first layer.
    terms += batch_part(dense, grid, network, options, has_zeroth=not convolutions)
    for layer in dense:
        is_first = convolutions and layer is dense[0]
        propagates = options.first_dense_gradient or not is_first
        terms += model_part(layer, batch, grid, network, options, propagates=propagates)
        if is_first and options.redistribution:
            share = batch / grid.num_columns
            terms += Terms(redistribution=gather(layer.input_words * share, grid.num_rows, network, options))
    return terms


def own_grids(chain: Chain, batch: int, convolutions: Grid, dense: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 9 with a grid for the convolutions, whose rows share images, and another for all else (Fig. 10).

    Where no rows share an image there is no halo. Changing grids costs Eq. 6 for what the first other layer reads, or
    nothing, as the options have it.
    """
    there = options if convolutions.num_rows > 1 else replace(options, halo_at_one=False)
    terms = Terms()
    is_changed = False
    for layer in chain.layers:
        if layer.is_convolution:
            terms += layer_terms(layer, Role.DOMAIN, batch, convolutions, network, there)
            continue
        terms += layer_terms(layer, Role.MODEL, batch, dense, network, options)
        if layer.source and options.redistribution and not is_changed and convolutions != dense:
            share = batch / dense.num_columns
            terms += Terms(redistribution=gather(layer.input_words * share, dense.num_rows, network, options))
            is_changed = True
    return terms


def integrated(
    chain: Chain, roles: Mapping[str, Role], batch: int, grid: Grid, network: Network, options: Options
) -> Terms:
    """Return Eq. 9; roles: of each layer, by name, what its P_r processes share."""
    return total(layer_terms(layer, roles[layer.name], batch, grid, network, options) for layer in chain.layers)


def layer_terms(layer: WeightedLayer, role: Role, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return one layer's part of Eq. 9."""
    if role is Role.MODEL:
        model = model_part(layer, batch, grid, network, options, reaches_data=options.first_gradient)
        return model + Terms(weight_gradient_all_reduce=weight_reduction(layer, grid, network, options))
    exchanged = halos(layer, batch, grid, network, options)
    if grid.num_rows == 1 and not options.halo_at_one:
        exchanged = Terms()
    return exchanged + whole_weights([layer], grid, network, options, has_zeroth=False)
