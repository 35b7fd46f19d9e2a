"""Version 1 of the paper (Gholami et al. 2017): its Eqs. 2 to 4.

The backward pass moves every layer's output d_i twice more, where version 2 has twice the d_(i-1) of all layers but the
first; there is no domain parallelism.
"""

from pase.studies.integrated.chain import Chain
from pase.studies.integrated.network import Grid, Network
from pase.studies.integrated.options import Options
from pase.studies.integrated.parts import batch_part, gather
from pase.studies.integrated.terms import Terms


def pure_model_1(chain: Chain, batch: int, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 2 of version 1: 3 Σ (α⌈log P⌉ + β B (P-1)/P d_i)."""
    return _outputs(chain, batch, Grid(num_processes, 1), network, options)


def pure_batch_1(chain: Chain, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 3 of version 1, which is Eq. 4 of version 2."""
    return batch_part(chain.layers, Grid(1, num_processes), network, options)


def integrated_1(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 4 of version 1: 3 Σ over all layers of what is gathered, and the weights' all-reduce."""
    return _outputs(chain, batch, grid, network, options) + batch_part(chain.layers, grid, network, options)


def _outputs(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    words = [layer.output_words for layer in chain.layers]
    if options.terms_from_zero:
        words.append(chain.layers[0].input_words)
    share = batch / grid.num_columns
    once = sum(gather(d * share, grid.num_rows, network, options) for d in words)
    return Terms(activation_all_gather=once, input_gradient_all_reduce=2 * once)
