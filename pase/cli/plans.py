"""What several commands say of plans; tables with a row for each layer, in which a block that repeats stands once."""

from collections.abc import Hashable, Sequence

from pase.cli.options import flag
from pase.cli.output import print_table, say
from pase.common.quantities import quantity
from pase.graph import Graph
from pase.machine import Machine
from pase.planning.plan import Plan
from pase.views.drawing.plans import repeated_blocks

all_layers_option = flag(
    "--all-layers", "shows_all", help="Print every layer, where a block that repeats is printed once."
)


def headline(plan: Plan, machine: Machine | None = None) -> str:
    """Return what is planned on which devices; machine: another than the plan's."""
    machine = machine or plan.machine
    return f"{plan.graph.name} on {plan.num_devices} × {machine.device.name} ({machine.name})"


def hidden_text(plan: Plan) -> str:
    """Return what of a plan's communication is hidden, "" for nothing: "8.20 ms of 8.21 ms that can hide"."""
    hidden, hideable = (quantity(cost, plan.cost_unit) for cost in (plan.hidden_cost, plan.hideable_cost))
    return f"{hidden} of {hideable} that can hide" if plan.hidden_cost else ""


def step_text(plan: Plan) -> str:
    """Return how a step is made up."""
    micro_batches = f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}"
    if plan.num_groups == 1:
        return micro_batches
    group = plan.num_devices // plan.num_groups
    if plan.num_stages > plan.num_groups:
        each = plan.num_stages // plan.num_groups
        devices = f"{plan.num_groups} groups of {group} devices with {each} stages each"
        return f"{micro_batches} through {devices} ({plan.schedule})"
    return f"{micro_batches} through {plan.num_groups} stages of {group} devices ({plan.schedule})"


def total_cost_text(plan: Plan) -> str:
    """Return what a plan costs and, where that is in FLOP, the seconds that these take at the peak of its machine."""
    cost = quantity(plan.total_cost, plan.cost_unit)
    if plan.cost_unit != "FLOP":
        return cost
    return f"{cost}, {quantity(plan.total_cost / plan.machine.peak_flop_per_s(), 's')} at a device's peak"


def times_text(count: int) -> str:
    """Return how often something comes, as a table has it."""
    return f"× {count}"


def print_layers(
    graph: Graph,
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
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
    shown: list[Sequence[object]] = []
    at = 0
    for block in blocks:
        shown += [*rows[at : block.first], [times_text(block.count), *[""] * (len(headers) - 1)]]
        shown += [[f"  {name}", *others] for name, *others in rows[block.first : block.first + block.period]]
        at = block.end
    print_table(headers, [*shown, *rows[at:]])
    if blocks:
        say()
        say(
            "× n: the block of layers below it comes n times in a row, with what one of them costs; "
            f"{flag} prints each."
        )
