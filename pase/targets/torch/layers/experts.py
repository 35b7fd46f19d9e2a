"""Rows that are routed by data: tokens to the matrices of their experts, and the results back.

Every rank has all routing indices, so that it knows what the others send. The host needs the number of rows between
ranks, and synchronises with the device once for each layer that sends some; products in bfloat16 read the ends of their
groups on the device.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional

from pase.targets.torch.collectives import exchanged
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.tensor import Along, Dim, LayerMesh, Tensor, local, resolved


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, router: "Router", sent: list[int], received: list[int]) -> Any:
        ctx.way = router, sent, received
        return router.carried(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, None, None, None]:
        router, sent, received = ctx.way
        return router.carried(dy, received, sent), None, None, None


class Router(Along):
    """What sends rows between the ranks that differ along a dim."""

    def rerouted(self, rows: Any, sent: list[int], received: list[int]) -> Any:
        """Return the rows that this rank is sent; sent, received: how many of each other one, along the dim."""
        return rows if len(self.parts) == 1 else _Routed.apply(rows, self, sent, received)

    def carried(self, rows: Any, sent: list[int], received: list[int]) -> Any:
        width = prod(rows.shape[1:])
        pieces = rows.reshape(-1, width).split(sent)
        for number, piece in enumerate(pieces):
            if number != self.place:
                self.count(piece)
        buffer = torch.cat([pieces[number] for number in self.order]).flatten()
        into, out = ([num[number] * width for number in self.order] for num in (received, sent))
        arrived = exchanged(buffer, into, out, self.group).split(into)
        found = torch.cat([arrived[self.order.index(number)] for number in range(len(self.parts))])
        return found.reshape(-1, *rows.shape[1:])


def _counts(numbers: Sequence[Any], bounds: Any) -> list[list[int]]:
    """Return the number of ascending integers between consecutive bounds."""
    rows = [torch.searchsorted(own.contiguous(), bounds).diff() for own in numbers]
    found: list[list[int]] = torch.stack(rows).tolist()
    return found


# -- rows to the places that need them


def routed(table: Tensor, numbers: Tensor, places: Sequence[Dim], rows: Sequence[Dim]) -> Tensor:
    """Return rows of a table by their numbers, which each rank has completely: dims of the places, then the other ones.

    The first of either dims is split in the same way. A rank receives a row once even if several of its places need it.

    Args:
        table: Dims of the rows, then others.
        numbers: Row number of each place, row-major over the places.
        places: Dims of the places.
        rows: Dims of the table's rows.
    """
    mesh, rest = table.mesh, [dim for dim in table.dims if dim not in rows]
    table = arrange(table, [*rows, *rest])
    router = Rows(mesh, rows[0], *(prod(dim.size for dim in dims[1:]) for dims in (rows, places)))
    shape = [*map(mesh.part, places), *map(mesh.part, rest)]
    width = prod(map(mesh.part, rest))

    def compute(own: Any, numbers: Any) -> Any:
        found = mesh.program.run(router, own.reshape((-1, width)), "routed", numbers)
        return found.reshape(shape)

    return local(compute, [table, numbers], [*places, *rest])


class Rows(Router):
    """Routes rows of a table to places; both have a fixed number for each point of the split dim."""

    def __init__(self, mesh: LayerMesh, dim: Dim, num_rows: int, num_places: int) -> None:
        super().__init__(mesh, dim)
        self.first = self.parts[self.place][0] * num_rows
        self.bounds = [num_rows * low for low, _ in self.parts] + [num_rows * dim.size]
        self.asked = [slice(num_places * low, num_places * high) for low, high in self.parts]

    @torch._disable_dynamo
    def forward(self, table: Any, numbers: Any) -> Any:
        numbers = numbers.flatten().long()
        if len(self.parts) == 1:
            return functional.embedding(numbers, table)
        every = [numbers[asked].unique() for asked in self.asked]
        counts = _counts(every, torch.tensor(self.bounds, device=numbers.device))
        sent, received = [own[self.place] for own in counts], counts[self.place]
        starts = [sum(own[: self.place]) for own in counts]
        asked = [own[start : start + count] for own, start, count in zip(every, starts, sent, strict=True)]
        arrived = self.rerouted(functional.embedding(torch.cat(asked) - self.first, table), sent, received)
        at = torch.searchsorted(every[self.place], numbers[self.asked[self.place]])
        return functional.embedding(at, arrived)


# -- sorted rows to the matrices of their groups


def grouped(x: Tensor, weights: Tensor, ends: Tensor, dims: Sequence[Dim]) -> Tensor:
    """Return rows, each multiplied with the matrix of its group.

    Where groups are split, ranks send each other the rows whose group is on another rank, where group sizes differ, and
    send the results back.

    Args:
        x: The rows, sorted by group, with dims for groups of equal size.
        weights: A matrix for each group.
        ends: End of each group as a global row number.
        dims: The groups, the rows of a group, the columns and the features.
    """
    group, row, column, feature = dims
    mesh = x.mesh
    x = arrange(resolved(x), [group, row, feature])
    weights = arrange(weights, [group, column, feature])
    router = Grouped(mesh, group, row)

    def compute(rows: Any, weights: Any, ends: Any) -> Any:
        # It goes by values, which are not there while a program is traced.
        return mesh.program.run(router, rows, "grouped", weights, ends)

    return local(compute, [x, weights, ends], [group, row, column], partial_over=[feature.name])


class Grouped(Router):
    """Rows of groups, sorted, that are multiplied by their group's matrix.

    Each group has as many places for rows, `size`, of which this rank has those from `first` to `last`.
    """

    def __init__(self, mesh: LayerMesh, group: Dim, row: Dim) -> None:
        super().__init__(mesh, group)
        self.size, self.first = row.size, mesh.begin(row)
        self.last = self.first + mesh.part(row)

    @torch._disable_dynamo
    def forward(self, x: Any, weights: Any, ends: Any) -> Any:
        """Return [g, m, n] of rows x [g, m, k], each times one of the weights [g, n, k].

        ends: Before which row, counted over all, each group ends.
        """
        groups, count, _ = x.shape
        places = torch.arange(self.first, self.last, device=x.device)
        numbers = [
            (torch.arange(low, high, device=x.device)[:, None] * self.size + places).flatten()
            for low, high in self.parts
        ]
        ends = torch.cat([ends.new_zeros(1), ends.flatten()]).long()
        low, high = self.parts[self.place]
        before = torch.stack([torch.searchsorted(own, ends[low : high + 1]) for own in numbers])
        own_ends = (before[:, 1:] - before[:, :1]).sum(0)
        if len(self.parts) == 1:
            return rows_of_groups(x.reshape(groups * count, -1), weights, own_ends).reshape(groups, count, -1)
        # Rows behind the last group's are the last rank's.
        starts = [*ends[[low for low, _ in self.parts]].unbind(), ends.new_full((), (len(ends) - 1) * self.size)]
        counts = _counts(numbers, torch.stack(starts))
        sent, received = counts[self.place], [own[self.place] for own in counts]
        rows = self.rerouted(x.reshape(groups * count, -1), sent, received)
        made = self.rerouted(rows_of_groups(rows, weights, own_ends), received, sent)
        return made.reshape(groups, count, -1)


_ALIGNMENT_BYTES = 16
"""Alignment of rows and columns that PyTorch's grouped product requires."""


def rows_of_groups(rows: Any, weights: Any, ends: Any) -> Any:
    """Return rows, each multiplied with the matrix of its group.

    Args:
        rows: [r, k], sorted by group.
        weights: [g, n, k], a matrix for each group.
        ends: [g], end of each group, on the device of the rows.

    Returns:
        [r, n], zeros for rows after the last group.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        # PyTorch's autocast only covers plain products.
        rows, weights = (x.to(torch.get_autocast_dtype(device)) for x in (rows, weights))
    grouped_mm = getattr(functional, "grouped_mm", None)
    widths_bytes = [extent * rows.element_size() for extent in weights.shape[1:]]
    is_aligned = not any(width % _ALIGNMENT_BYTES for width in widths_bytes)
    # Other types are unsupported, or synchronise with the host.
    if grouped_mm is None or rows.dtype != torch.bfloat16 or not is_aligned:
        return _one_by_one(rows, weights, ends.tolist())
    # Rows after the last group are assigned to it: the kernel leaves results and gradients of others undefined.
    offsets = torch.cat([ends[:-1], ends.new_full((1,), len(rows))]).to(torch.int32)
    made = grouped_mm(rows, weights.transpose(-2, -1), offs=offsets)
    is_inside = torch.arange(len(rows), device=rows.device) < ends[-1]
    return torch.where(is_inside[:, None], made, 0)


def _one_by_one(rows: Any, weights: Any, ends: Sequence[int]) -> Any:
    made = [rows[low:high] @ matrix.t() for low, high, matrix in zip([0, *ends[:-1]], ends, weights, strict=True)]
    return torch.cat([*made, rows.new_zeros(len(rows) - ends[-1], weights.shape[1])])
