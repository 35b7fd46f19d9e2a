"""Equations 3 to 9 of Gholami et al. 2018: one function each.

Times are in seconds, for one training step of a batch on all processes. Logarithms are those of a tree's depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import ceil, floor, log2
from operator import attrgetter

from pase.errors import IntegratedError
from pase.machine import Machine
from pase.sharding.shards import divisors
from pase.studies.integrated.chain import Chain, Options, WeightedLayer

MAX_PROCESSES = 1 << 20


MAX_BATCH = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Every process reaches every other one. latency_s: α, of a message. s_per_byte: β, inverse of the bandwidth."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """P_r x P_c processes: num_rows share a layer's weights or its images' rows, num_columns the batch."""

    num_rows: int
    num_columns: int

    @property
    def num_processes(self) -> int:
        return self.num_rows * self.num_columns

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.num_columns}"


def network_of(machine: Machine, num_processes: int) -> Network:
    """Return the slowest of the levels that so many devices span; the papers know no levels."""
    levels = machine.levels_spanned(num_processes)
    return Network(
        latency_s=max(level.latency_s for level in levels),
        s_per_byte=1 / min(level.bandwidth_bytes_per_s for level in levels),
    )


def all_grids(num_processes: int) -> tuple[Grid, ...]:
    """Return every P_r x P_c of so many processes, pure batch parallelism first."""
    check_processes(num_processes)
    return tuple(Grid(rows, num_processes // rows) for rows in divisors(num_processes))


def parse_grid(text: str, num_processes: int) -> Grid:
    """Return the grid that "PrxPc" names; IntegratedError where it has another number of processes."""
    check_processes(num_processes)
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*[x×]\s*([0-9]{1,9})\s*", text, re.ASCII)
    if found is None:
        grids = all_grids(num_processes)
        raise IntegratedError(f"{text!r} is no grid of processes; expected PrxPc, such as {grids[len(grids) // 2]}")
    grid = Grid(int(found[1]), int(found[2]))
    if grid.num_processes != num_processes:
        raise IntegratedError(
            f"a grid of {grid} has {grid.num_processes} processes, not {num_processes}; "
            f"possible are {', '.join(map(str, all_grids(num_processes)))}"
        )
    return grid


def check_processes(num_processes: int) -> None:
    """Raise IntegratedError unless there are 1 to MAX_PROCESSES processes."""
    if not 1 <= num_processes <= MAX_PROCESSES:
        raise IntegratedError(
            f"{num_processes} processes were asked for; expected a whole number of 1 or more, up to {MAX_PROCESSES}"
        )


def check_batch(batch: int, grid: Grid) -> None:
    """Raise IntegratedError where there are fewer samples than columns: each holds one at least (section 2.4)."""
    if not 1 <= batch <= MAX_BATCH:
        raise IntegratedError(
            f"a batch of {batch} was asked for; expected a whole number of 1 or more, up to {MAX_BATCH}"
        )
    if batch < grid.num_columns:
        raise IntegratedError(
            f"a batch of {batch} cannot be shared by the {grid.num_columns} columns of a grid of {grid}; "
            f"use a batch of {grid.num_columns} or more, or a grid with fewer columns"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of communication in one training step.

    activation_all_gather: Y_i, forward. input_gradient_all_reduce: of ΔX_i. weight_gradient_all_reduce: of ΔW_i.
    halo_forward, halo_backward: rows at the border of a process's part of an image, of values and of gradients.
    redistribution: of what a layer reads, between grids (Eq. 6).
    """

    activation_all_gather: float = 0.0
    input_gradient_all_reduce: float = 0.0
    weight_gradient_all_reduce: float = 0.0
    halo_forward: float = 0.0
    halo_backward: float = 0.0
    redistribution: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        return total((self, other))

    @property
    def time_s(self) -> float:
        return float(sum(_seconds(self)))

    def as_dict(self) -> dict[str, float]:
        return dict(zip(_TERMS, _seconds(self), strict=True))


_TERMS = tuple(term.name for term in fields(Terms))
_seconds = attrgetter(*_TERMS)


def total(terms: Iterable[Terms]) -> Terms:
    """Return the sum of any number of terms."""
    columns = list(zip(*map(_seconds, terms), strict=True))
    return Terms(**dict(zip(_TERMS, map(sum, columns), strict=True))) if columns else Terms()


class Role(StrEnum):
    """What the P_r processes of a column share of a layer: its weights (L_M of Eq. 9) or an image's rows (L_D)."""

    MODEL = "model"
    DOMAIN = "domain"


@dataclass(frozen=True, slots=True)
class Step:
    """A training step of a batch on a grid: what its messages take."""

    batch: float
    grid: Grid
    network: Network
    options: Options

    @property
    def share(self) -> float:
        """Samples of a column."""
        return self.batch / self.grid.num_columns

    def on(self, grid: Grid) -> Step:
        return replace(self, grid=grid)

    def message(self, words: float) -> float:
        """Return α + β · words, for one message."""
        if not words and not self.options.pointwise_halo:
            return 0.0
        return self.network.latency_s + self.network.s_per_byte * words * self.options.itemsize

    def gather(self, words: float, num_processes: int, *, times: int = 1) -> float:
        """Return α⌈log P⌉ + β (P-1)/P · words: Bruck's all-gather, and half of a ring's all-reduce.

        times: in how many pieces, one after the other, the words go.
        """
        moved = words * (num_processes - 1) / num_processes * self.options.itemsize
        depth = ceil(log2(num_processes)) if self.options.rounded_log else log2(num_processes)
        return times * self.network.latency_s * depth + self.network.s_per_byte * moved

    def model_part(self, layer: WeightedLayer, *, propagates: bool = True, reaches_data: bool = False) -> Terms:
        """Return α⌈log P_r⌉ + β (B/P_c) (P_r-1)/P_r d_i, and twice the same of d_(i-1) where ΔX_i is needed.

        A recurrent layer sends at every step, and needs the gradient of its own state in any case.
        """
        rows, times = self.grid.num_rows, layer.num_steps
        words = layer.inner_words
        words += layer.input_words if propagates and (bool(layer.source) or reaches_data) else 0
        is_reduced = words and self.options.input_gradient
        return Terms(
            activation_all_gather=self.gather(layer.output_words * self.share, rows, times=times),
            input_gradient_all_reduce=2 * self.gather(words * self.share, rows, times=times) if is_reduced else 0.0,
        )

    def weight_reduction(self, layer: WeightedLayer) -> float:
        """Return 2 (α⌈log P_c⌉ + β (P_c-1)/P_c |W_i|/P_r)."""
        return 2 * self.gather(layer.num_weights / self.grid.num_rows, self.grid.num_columns)

    def batch_part(self, layers: Iterable[WeightedLayer], *, has_zeroth: bool = True) -> Terms:
        """Return 2 Σ (α⌈log P_c⌉ + β (P_c-1)/P_c |W_i|/P_r)."""
        time_s = sum(map(self.weight_reduction, layers))
        if has_zeroth and self.options.terms_from_zero:
            time_s += 2 * self.gather(0, self.grid.num_columns)
        return Terms(weight_gradient_all_reduce=time_s)

    def whole_weights(self, layers: Iterable[WeightedLayer], *, has_zeroth: bool = True) -> Terms:
        """Return 2 Σ (α⌈log P⌉ + β (P-1)/P |W_i|)."""
        return self.on(Grid(1, self.grid.num_processes)).batch_part(layers, has_zeroth=has_zeroth)

    def halos(self, layer: WeightedLayer) -> Terms:
        """Return α + β (B/P_c) X_W X_C ⌊k_h/2⌋ and α + β (B/P_c) Y_W Y_C ⌊k_w/2⌋."""
        return Terms(
            halo_forward=self.message(self.share * layer.input_row_words * (layer.kernel[0] // 2)),
            halo_backward=self.message(self.share * layer.output_row_words * (layer.kernel[-1] // 2)),
        )

    def redistribution(self, layer: WeightedLayer) -> Terms:
        """Return Eq. 6 of what a layer reads, between the rows of a column."""
        return Terms(redistribution=self.gather(layer.input_words * self.share, self.grid.num_rows))

    def layer(self, layer: WeightedLayer, role: Role) -> Terms:
        """Return one layer's part of Eq. 9."""
        if role is Role.MODEL:
            model = self.model_part(layer, reaches_data=self.options.first_gradient)
            return model + Terms(weight_gradient_all_reduce=self.weight_reduction(layer))
        has_halo = self.grid.num_rows > 1 or self.options.halo_at_one
        return (self.halos(layer) if has_halo else Terms()) + self.whole_weights([layer], has_zeroth=False)

    def outputs(self, chain: Chain) -> Terms:
        """Return 3 Σ over all layers of what is gathered, in version 1."""
        words = [layer.output_words for layer in chain.layers]
        if self.options.terms_from_zero:
            words.append(chain.layers[0].input_words)
        once = sum(self.gather(d * self.share, self.grid.num_rows) for d in words)
        return Terms(activation_all_gather=once, input_gradient_all_reduce=2 * once)


def pure_model(chain: Chain, batch: int, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 3: weights are split P ways, every process holds the whole batch."""
    return total(map(Step(batch, Grid(num_processes, 1), network, options).model_part, chain.layers))


def pure_batch(chain: Chain, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 4: the batch is split P ways, every process holds all weights."""
    return Step(1, Grid(1, num_processes), network, options).batch_part(chain.layers)


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
    return Step(batch, Grid(num_processes, 1), network, options).gather(words * batch, num_processes)


def pure_domain(chain: Chain, batch: int, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 7, of the convolutions alone: every image is split P ways, every process holds all weights."""
    step = Step(batch, Grid(num_processes, 1), network, options)
    convolutions = [layer for layer in chain.layers if layer.is_convolution]
    # What a term for i = 0 adds to the first two sums.
    zeroth_s = network.latency_s if options.terms_from_zero else 0.0
    zeroth = Terms(halo_forward=zeroth_s, halo_backward=zeroth_s)
    return total(map(step.halos, convolutions)) + zeroth + step.whole_weights(convolutions)


def model_and_batch(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 8: the 1.5D algorithm, every layer's weights split P_r ways and the batch P_c ways."""
    step = Step(batch, grid, network, options)
    return total(map(step.model_part, chain.layers)) + step.batch_part(chain.layers)


def dense_only(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 4 of the convolutions, over all processes, with Eq. 8 of the dense layers (section 3, Fig. 7)."""
    step = Step(batch, grid, network, options)
    dense = [layer for layer in chain.layers if not layer.is_convolution]
    convolutions = [layer for layer in chain.layers if layer.is_convolution]
    terms = step.whole_weights(convolutions)
    # The sum printed from i = 0 has its term once, in the half that holds the first layer.
    terms += step.batch_part(dense, has_zeroth=not convolutions)
    for layer in dense:
        is_first = convolutions and layer is dense[0]
        terms += step.model_part(layer, propagates=options.first_dense_gradient or not is_first)
        if is_first and options.redistribution:
            terms += step.redistribution(layer)
    return terms


def own_grids(chain: Chain, batch: int, convolutions: Grid, dense: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 9 with a grid for the convolutions, whose rows share images, and another for all else (Fig. 10).

    Where no rows share an image there is no halo. Changing grids costs Eq. 6 for what the first other layer reads, or
    nothing, as the options have it.
    """
    here = Step(batch, dense, network, options)
    there = Step(batch, convolutions, network, replace(options, halo_at_one=False))
    terms = Terms()
    is_changed = False
    for layer in chain.layers:
        if layer.is_convolution:
            terms += there.layer(layer, Role.DOMAIN)
            continue
        terms += here.layer(layer, Role.MODEL)
        if layer.source and options.redistribution and not is_changed and convolutions != dense:
            terms += here.redistribution(layer)
            is_changed = True
    return terms


def integrated(
    chain: Chain, roles: Mapping[str, Role], batch: int, grid: Grid, network: Network, options: Options
) -> Terms:
    """Return Eq. 9; roles: of each layer, by name, what its P_r processes share."""
    step = Step(batch, grid, network, options)
    return total(step.layer(layer, roles[layer.name]) for layer in chain.layers)


def pure_model_1(chain: Chain, batch: int, num_processes: int, network: Network, options: Options) -> Terms:
    """Return Eq. 2 of version 1: 3 Σ (α⌈log P⌉ + β B (P-1)/P d_i)."""
    return Step(batch, Grid(num_processes, 1), network, options).outputs(chain)


def integrated_1(chain: Chain, batch: int, grid: Grid, network: Network, options: Options) -> Terms:
    """Return Eq. 4 of version 1: 3 Σ over all layers of what is gathered, and the weights' all-reduce."""
    step = Step(batch, grid, network, options)
    return step.outputs(chain) + step.batch_part(chain.layers)
