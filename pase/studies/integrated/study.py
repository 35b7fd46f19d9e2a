"""All grids of a number of processes, beside pure model and pure batch parallelism."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pase.errors import IntegratedError
from pase.studies.integrated import equations
from pase.studies.integrated.chain import Chain
from pase.studies.integrated.network import Grid, Network, all_grids, check_batch, check_processes
from pase.studies.integrated.options import Options
from pase.studies.integrated.terms import Terms
from pase.studies.integrated.versions import VERSIONS, Roles

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
        """Communication of a step, in seconds."""
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
        candidates[OWN_GRIDS] = tuple(_on_own_grids(chain, batch, own, grid, network, options) for grid in grids)
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


def _on_own_grids(
    chain: Chain, batch: int, convolutions: Grid, grid: Grid, network: Network, options: Options
) -> Candidate:
    roles = {
        layer.name: equations.Role.DOMAIN if layer.is_convolution else equations.Role.MODEL for layer in chain.layers
    }
    terms = equations.own_grids(chain, batch, convolutions, grid, network, options)
    return Candidate(variant=OWN_GRIDS, grid=grid, terms=terms, roles=roles, convolutions=convolutions)
