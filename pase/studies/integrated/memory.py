"""What each process holds, and what a 2D algorithm would move instead (Gholami et al. 2018, sections 2.3 and 4)."""

from collections.abc import Mapping
from dataclasses import dataclass

from pase.studies.integrated.chain import Chain, WeightedLayer
from pase.studies.integrated.equations import Role
from pase.studies.integrated.network import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What each process holds. weights: of W_i, as many again hold ΔW_i. data: of X_i and Y_i of all layers."""

    weights: float
    data: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.weights + self.data


def held(chain: Chain, batch: int, grid: Grid, roles: Mapping[str, Role]) -> Words:
    """Return what the 1.5D algorithm holds: weights P_c times in all, X_i and Y_i P_r times; a sum of the extremes.

    roles: what the rows share. Rows that share images, and layers in batch parallelism alone, hold all weights and a
    P-th of the data.
    """
    weights = data = 0.0
    for layer in chain.layers:
        shares_weights = roles.get(layer.name) is Role.MODEL
        weights += layer.num_weights / (grid.num_rows if shares_weights else 1)
        columns = grid.num_columns if shares_weights else grid.num_processes
        data += (layer.input_words + layer.inner_words + layer.output_words) * batch / columns
    return Words(weights=weights, data=data)


def held_2d(chain: Chain, batch: int, num_processes: int) -> Words:
    """Return what a 2D algorithm holds: a P-th of everything, nothing twice."""
    return Words(
        weights=chain.num_weights / num_processes,
        data=sum(x.input_words + x.inner_words + x.output_words for x in chain.layers) * batch / num_processes,
    )


def moved(layer: WeightedLayer, batch: int, grid: Grid) -> float:
    """Return the words that Y = W X moves to each process in the 1.5D algorithm, large grids taken: B d_i / P_c."""
    return batch * layer.output_words / grid.num_columns


def moved_stationary_a(layer: WeightedLayer, batch: int, grid: Grid) -> float | None:
    """Return the same of stationary-A SUMMA, the best of the 2D algorithms: 2 B d_i / P_r + B d_i / P_c.

    The paper takes d_i for d_(i-1). None where |W_i| is not above B d_i: all 2D algorithms move two matrices then, and
    the paper has no formula.
    """
    words = batch * layer.output_words
    if layer.num_weights <= words:
        return None
    return 2 * words / grid.num_rows + words / grid.num_columns
