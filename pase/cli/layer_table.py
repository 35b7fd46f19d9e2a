"""Tables with a row for each layer of a network, in which a block of layers that repeats stands once."""

from collections.abc import Hashable, Sequence

import click

from pase.cli.output import print_table, say
from pase.graph import Graph
from pase.views.drawing.plans import repeated_blocks

all_layers_option = click.option(
    "--all-layers", "shows_all", is_flag=True, help="Print every layer, where a block that repeats is printed once."
)


def times_text(count: int) -> str:
    """Return how often something comes, as a table has it."""
    return f"× {count}"


def print_layers(
    graph: Graph,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    alike: Sequence[Hashable],
    *,
    shows_all: bool,
    flag: str = "--all-layers",
) -> None:
    """Print a table with a row for each layer of a graph, its name first.

    Of blocks that come several times in a row the first is printed, indented below their number, where all cells but
    the names are equal and so is what is `alike`, [layers]. shows_all: print every row, as `flag` does.
    """
    signatures = [(sign, *row[1:]) for sign, row in zip(alike, rows, strict=True)]
    blocks = () if shows_all else repeated_blocks(graph, signatures)
    if not blocks:
        print_table(headers, rows)
        return
    shown, at = [], 0
    for block in blocks:
        first = range(block.first, block.first + block.period)
        shown += [*rows[at : block.first], [times_text(block.count), *[""] * (len(headers) - 1)]]
        shown += [[f"  {rows[v][0]}", *rows[v][1:]] for v in first]
        at = block.end
    print_table(headers, [*shown, *rows[at:]])
    say()
    say(f"× n: the block of layers below it comes n times in a row, with what one of them costs; {flag} prints each.")
