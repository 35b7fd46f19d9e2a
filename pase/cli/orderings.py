"""What each ordering would take, known before anything is solved: `--explain-ordering`."""

from collections.abc import Sequence
from typing import Any

from pase.cli.output import print_table, quantity, say
from pase.solver.ordering import ORDERINGS, OrderingReport, report_ordering


def ordering_reports(neighbours: Sequence[frozenset[int]], domain_sizes: Sequence[int]) -> list[OrderingReport]:
    """Return a report for every ordering, for the problem as it is before any reduction."""
    return [report_ordering(name, neighbours, domain_sizes) for name in ORDERINGS]


def orderings_document(reports: Sequence[OrderingReport]) -> list[dict[str, Any]]:
    """Return the JSON form of the reports."""
    return [
        {
            "name": report.name,
            "largest_dependent_set": report.largest_dependent_set,
            "predicted_operations": report.operations,
            "predicted_bytes": report.table_bytes,
        }
        for report in reports
    ]


def print_orderings(reports: Sequence[OrderingReport]) -> None:
    """Print a table of the reports."""
    say("orderings, on the whole graph before any reduction:")
    print_table(
        [
            ("ordering", "left"),
            ("largest dependent set", "right"),
            ("predicted operations", "right"),
            ("predicted memory", "right"),
        ],
        [
            [
                report.name,
                str(report.largest_dependent_set),
                _large(report.operations),
                quantity(report.table_bytes, "B") if report.table_bytes < 1e21 else f"{_large(report.table_bytes)} B",
            ]
            for report in reports
        ],
    )


def _large(number: int) -> str:
    """Return a whole number of any size: 1,234 or 1.2e+34."""
    if number < 1_000_000:
        return f"{number:,}"
    digits = str(number)
    return f"{digits[0]}.{digits[1]}e+{len(digits) - 1}"
