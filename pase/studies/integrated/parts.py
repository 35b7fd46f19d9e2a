"""The sums of which the equations are made (Gholami et al. 2018, Eqs. 3 to 9), each for one layer or for some."""

from collections.abc import Sequence

from pase.studies.integrated.chain import WeightedLayer
from pase.studies.integrated.network import Grid, Network, tree_depth
from pase.studies.integrated.options import Options
from pase.studies.integrated.terms import Terms


def model_part(
    layer: WeightedLayer,
    batch: int,
    grid: Grid,
    network: Network,
    options: Options,
    *,
    propagates: bool = True,
    reaches_data: bool = False,
) -> Terms:
    """Return α⌈log P_r⌉ + β (B/P_c) (P_r-1)/P_r d_i, and twice the same of d_(i-1) where ΔX_i is needed.

    A recurrent layer sends at every step, and needs the gradient of its own state in any case.
    """
    share = batch / grid.num_columns
    gathered = gather(layer.output_words * share, grid.num_rows, network, options, times=layer.num_steps)
    words = layer.inner_words
    words += layer.input_words if propagates and (bool(layer.source) or reaches_data) else 0
    reduced = 0.0
    if words and options.input_gradient:
        reduced = 2 * gather(words * share, grid.num_rows, network, options, times=layer.num_steps)
    return Terms(activation_all_gather=gathered, input_gradient_all_reduce=reduced)


def batch_part(
    layers: Sequence[WeightedLayer],
    grid: Grid,
    network: Network,
    options: Options,
    *,
    has_zeroth: bool = True,
) -> Terms:
    """Return 2 Σ (α⌈log P_c⌉ + β (P_c-1)/P_c |W_i|/P_r)."""
    time_s = sum(weight_reduction(layer, grid, network, options) for layer in layers)
    if has_zeroth and options.terms_from_zero:
        time_s += 2 * gather(0, grid.num_columns, network, options)
    return Terms(weight_gradient_all_reduce=time_s)


def weight_reduction(layer: WeightedLayer, grid: Grid, network: Network, options: Options) -> float:
    """Return 2 (α⌈log P_c⌉ + β (P_c-1)/P_c |W_i|/P_r)."""
    return 2 * gather(layer.num_weights / grid.num_rows, grid.num_columns, network, options)


def whole_weights(
    layers: Sequence[WeightedLayer], grid: Grid, network: Network, options: Options, *, has_zeroth: bool = True
) -> Terms:
    """Return 2 Σ (α⌈log P⌉ + β (P-1)/P |W_i|)."""
    return batch_part(layers, Grid(1, grid.num_processes), network, options, has_zeroth=has_zeroth)


def halos(layer: WeightedLayer, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return α + β (B/P_c) X_W X_C ⌊k_h/2⌋ and α + β (B/P_c) Y_W Y_C ⌊k_w/2⌋."""
    share = batch / grid.num_columns
    forward = message(share * layer.input_row_words * (layer.kernel[0] // 2), network, options)
    backward = message(share * layer.output_row_words * (layer.kernel[-1] // 2), network, options)
    return Terms(halo_forward=forward, halo_backward=backward)


def zeroth_halos(network: Network, options: Options) -> Terms:
    """Return what a term for i = 0 adds to Eq. 7's first two sums."""
    if not options.terms_from_zero:
        return Terms()
    return Terms(halo_forward=network.latency_s, halo_backward=network.latency_s)


def message(words: float, network: Network, options: Options) -> float:
    """Return α + β · words, for one message."""
    if not words and not options.pointwise_halo:
        return 0.0
    return network.latency_s + network.s_per_byte * words * options.word_bytes


def gather(words: float, num_processes: int, network: Network, options: Options, *, times: int = 1) -> float:
    """Return α⌈log P⌉ + β (P-1)/P · words: Bruck's all-gather, and half of a ring's all-reduce.

    times: in how many pieces, one after the other, the words go.
    """
    moved = words * (num_processes - 1) / num_processes * options.word_bytes
    depth = tree_depth(num_processes, rounded=options.rounded_log)
    return times * network.latency_s * depth + network.s_per_byte * moved
