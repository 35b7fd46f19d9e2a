"""All grids of a number of processes, beside pure model and pure batch parallelism."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from types import MappingProxyType

from pase.errors import IntegratedError
from pase.studies.integrated import equations
from pase.studies.integrated.chain import Chain, Options, WeightedLayer
from pase.studies.integrated.equations import (
    Grid,
    Network,
    Role,
    Terms,
    all_grids,
    check_batch,
    check_processes,
    integrated_1,
    pure_model_1,
)

Roles = Mapping[str, Role]
"""What the rows of a grid share of each layer, by its name; a layer that is not there is in batch parallelism alone."""


Assessed = tuple[Terms, Roles]


Variant = Callable[[Chain, int, Grid, Network, Options], Assessed | None]
"""Returns the communication and the roles of a batch on a grid; None where the network cannot be laid out so."""


SAME_GRID = "same_grid"


OWN_GRIDS = "own_grids"
"""The variant in which convolutions have a grid of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One grid, used in one way. terms: its communication. roles: what the rows share of each layer.

    convolutions: the grid that these are on where they have one of their own.
    """

    variant: str
    grid: Grid
    terms: Terms
    roles: Roles
    convolutions: Grid | None = None

    @property
    def time_s(self) -> float:
        return self.terms.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What a number of processes need for a batch, by each way to divide the work.

    pure_domain: of the convolutions alone, None where there are none or fewer rows than processes. candidates: by
    variant, in the order of the grids; a variant may lack grids on which the network cannot be laid out.
    """

    chain: Chain
    batch: int
    num_processes: int
    version: int
    pure_model: Terms
    pure_batch: Terms
    pure_domain: Terms | None
    candidates: Mapping[str, tuple[Candidate, ...]]

    @property
    def is_pure_batch_possible(self) -> bool:
        """Whether every process has one sample at least."""
        return self.batch >= self.num_processes

    def speedup(self, time_s: float) -> float:
        """Return how many times shorter a time is than pure batch parallelism's; 1 where neither communicates."""
        pure_s = self.pure_batch.time_s
        return pure_s / time_s if time_s else (1.0 if not pure_s else float("inf"))

    def best(self, variant: str | None = None) -> Candidate | None:
        """Return the candidate that communicates least, of one variant or of all; None where there is none."""
        return min(self._of(variant), key=lambda candidate: candidate.time_s, default=None)

    def _of(self, variant: str | None) -> Iterator[Candidate]:
        for name, candidates in self.candidates.items():
            if variant in (None, name):
                yield from candidates


def study(
    chain: Chain,
    num_processes: int,
    batch: int,
    network: Network,
    *,
    version: int = 2,
    grids: Sequence[Grid] | None = None,
    convolutions: Grid | None = None,
    options: Options | None = None,
) -> Study:
    """Return the communication of a batch on every grid of so many processes, or on the given ones.

    version: 1 or 2 of the paper. Without grids, those with more columns than the batch has samples are left out; a
    given one of that kind raises IntegratedError, as do less than one process or sample and an unknown version.
    convolutions: a grid of their own, for the variant `own_grids`; by default there is one beyond the batch (Fig. 10),
    so that each column has one sample.
    """
    options = options or Options()
    check_processes(num_processes)
    if version not in VERSIONS:
        raise IntegratedError(f"there is no version {version} of the paper; expected 1 (2017) or 2 (2018)")
    check_batch(batch, Grid(num_processes, 1))
    if grids is None:
        grids = [grid for grid in all_grids(num_processes) if grid.num_columns <= batch]
    for grid in grids:
        check_batch(batch, grid)
    formulas = VERSIONS[version]
    candidates: dict[str, tuple[Candidate, ...]] = {}
    for name, variant in formulas.variants.items():
        assessed = [(grid, variant(chain, batch, grid, network, options)) for grid in grids]
        candidates[name] = tuple(
            Candidate(variant=name, grid=grid, terms=found[0], roles=found[1]) for grid, found in assessed if found
        )
    own = convolutions or _beyond_batch(chain, num_processes, batch, options)
    if own is not None and version > 1:
        check_batch(batch, own)
        roles = {layer.name: Role.DOMAIN if layer.is_convolution else Role.MODEL for layer in chain.layers}
        candidates[OWN_GRIDS] = tuple(
            Candidate(
                variant=OWN_GRIDS,
                grid=grid,
                terms=equations.own_grids(chain, batch, own, grid, network, options),
                roles=roles,
                convolutions=own,
            )
            for grid in grids
        )
    rows = [layer.num_rows for layer in chain.layers if layer.is_convolution]
    has_domain = version > 1 and rows and (min(rows) >= num_processes or not options.rows_bound_domain)
    return Study(
        chain=chain,
        batch=batch,
        num_processes=num_processes,
        version=version,
        pure_model=formulas.pure_model(chain, batch, num_processes, network, options),
        pure_batch=formulas.pure_batch(chain, num_processes, network, options),
        pure_domain=equations.pure_domain(chain, batch, num_processes, network, options) if has_domain else None,
        candidates=candidates,
    )


def _beyond_batch(chain: Chain, num_processes: int, batch: int, options: Options) -> Grid | None:
    """Return the grid on which each sample's rows are shared by as many processes as there are for it, if it is one."""
    rows = [layer.num_rows for layer in chain.layers if layer.is_convolution]
    num_rows, rest = divmod(num_processes, batch)
    if not rows or rest or num_rows < 2 or (options.rows_bound_domain and num_rows > min(rows)):
        return None
    return Grid(num_rows, batch)


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
    step = equations.Step(batch, grid, network, options)

    def role(layer: WeightedLayer) -> Role:
        if not layer.is_convolution or not _has_rows(layer, grid, options):
            return Role.MODEL
        return min(Role, key=lambda r: step.layer(layer, r).time_s)

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
            pure_batch=equations.pure_batch,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What each process holds. weights: of W_i, as many again hold ΔW_i. data: of X_i and Y_i of all layers."""

    weights: float
    data: float

    @property
    def total(self) -> float:
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


BACKWARD_SHARE = 2 / 3
"""Of a step's three matrix products two are the backward pass's; the paper says so of the communication as well."""


def step_time(communication_s: float, compute_s: float, *, overlap: bool = False) -> float:
    """Return the time of a training step (section 3, Fig. 8).

    overlap: perfect, of two thirds of the communication with the backward pass, two thirds of the computation.
    """
    hidden_s = BACKWARD_SHARE * min(communication_s, compute_s) if overlap else 0.0
    return compute_s + communication_s - hidden_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """How long one process computes a step, by its batch (Fig. 4): pairs of samples and seconds, ascending.

    Between them time is a power of the batch; beyond the last it grows with the samples, and a batch smaller than the
    first takes as long as that: matrices that are too thin leave a processor idle.
    """

    points: tuple[tuple[float, float], ...]

    def of_batch(self, batch: float) -> float:
        """Return the seconds of a step of so many samples; of a part of one sample, that part of one's time."""
        if batch < 1:
            return batch * self.of_batch(1)
        batches, times = zip(*self.points, strict=True)
        if batch >= batches[-1]:
            return float(times[-1] * batch / batches[-1])
        after = bisect_right(batches, batch)
        if not after:
            return float(times[0])
        low, high = self.points[after - 1 : after + 1]
        share = log(batch / low[0]) / log(high[0] / low[0])
        return float(low[1] * (high[1] / low[1]) ** share)

    def on_grid(self, chain: Chain, batch: int, grid: Grid, roles: Mapping[str, Role]) -> float:
        """Return the seconds that every process of a grid computes; roles: what its rows share of each layer.

        Rows that share a layer's weights multiply a part of them by all samples of their column: the time of the
        column's batch, over the rows (version 1, section 3: fatter matrices than with a part of the batch). Rows that
        share images, and layers in batch parallelism alone, have their part of the samples. Layers take the time by
        their FLOP.
        """
        whole = sum(layer.work_per_sample for layer in chain.layers)
        weights_s = self.of_batch(batch / grid.num_columns) / grid.num_rows
        samples_s = self.of_batch(batch / grid.num_processes)
        return sum(
            layer.work_per_sample / whole * (weights_s if roles.get(layer.name) is Role.MODEL else samples_s)
            for layer in chain.layers
        )


def num_iterations(num_samples: int, batch: int, options: Options) -> float:
    """Return the steps of an epoch, N/B."""
    return ceil(num_samples / batch) if options.whole_iterations else num_samples / batch
