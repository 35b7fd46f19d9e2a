"""The grid of processes and what joins them: α and β."""

import re
from dataclasses import dataclass
from math import ceil, log2

from pase.errors import IntegratedError
from pase.machine import Machine
from pase.sharding.configurations import divisors

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
        """P = P_r · P_c."""
        return self.num_rows * self.num_columns

    def __str__(self) -> str:
        """Return PrxPc."""
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


def tree_depth(num_processes: int, *, rounded: bool) -> float:
    """Return ceil(log2 P), or log2 P where it is not rounded."""
    return ceil(log2(num_processes)) if rounded else log2(num_processes)
