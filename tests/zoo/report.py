"""What the zoo's runs come to: a table by family, and the page of the documentation."""

from collections import Counter
from collections.abc import Sequence

from tests.zoo.runner import CRASHED, EQUAL, REFUSED, WRONG, Report

PAGE = "docs/zoo.md"
_KINDS = (EQUAL, REFUSED, WRONG, CRASHED)

_HEAD = """# Models that are trained beside the unmodified module

`python -m tests.zoo --write` trains each model of `tests/zoo` for three steps of AdamW in float64 and compares losses,
gradients of the first step and all parameters and buffers after the last one with the unmodified module, to 1e-11 of
each tensor's largest value, or to ten times what the last bit of each weight changes of what the module itself trains
(batch normalisations of few examples amplify rounding). It does so on one device, and under four plans each on WORLDS
processes: the searched one, a tensor-parallel one and two random ones. Models that draw random numbers are compared
with the module in the first step on one device, with equal numbers, and every plan with that device.

The last column counts plans under which ranks sent, movement by movement or in all, what the plan predicts, of those of
which it predicts all: not of rows that the data route, nor of weights that ranks hold otherwise than the plan says,
which a note tells. Others are of layers that are computed whole where their splits are not carried through (a note
tells these, too), of reductions that the graph takes for one sum (`logsumexp`, norms), of gradients that end at
`detach`, which the graph does not know, and of convolutions, whose padding is predicted with what they read.

"""


def _table(reports: Sequence[Report]) -> str:
    families = list(dict.fromkeys(report.family for report in reports))
    lines = [
        "| family | models | equal | refused | wrong | crashed | CPU s | bytes as predicted |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for family in [*families, "all"]:
        own = [report for report in reports if family in (report.family, "all")]
        counts = Counter(report.kind for report in own)
        cells = [family, len(own), *(counts[kind] for kind in _KINDS), round(sum(report.cpu_s for report in own))]
        on_several = [x for report in own for (world, _), x in report.outcomes.items() if world > 1 and x.kind == EQUAL]
        told = [outcome for outcome in on_several if outcome.predicted is not None]
        cells.append(f"{sum(not x.bytes for x in told)}, in all {sum(not x.surplus for x in told)}, of {len(told)}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def summary(reports: Sequence[Report]) -> str:
    return _table(reports)


def written(reports: Sequence[Report]) -> str:
    """Return the page: the table, what is not equal, and the names of what is."""
    worlds = sorted({world for report in reports for world, _ in report.outcomes if world > 1})
    page = f"{_HEAD.replace('WORLDS', ' and '.join(map(str, worlds)))}{_table(reports)}\n"
    for kind, title in ((WRONG, "Wrong"), (CRASHED, "Crashed"), (REFUSED, "Refused")):
        own = [report for report in reports if report.kind == kind]
        if not own:
            continue
        page += f"\n## {title}\n\n| model | under | message |\n|---|---|---|\n"
        for report in own:
            under = dict[str, list[str]]()
            for (world, plan), outcome in report.outcomes.items():
                if outcome.kind != EQUAL:
                    under.setdefault(outcome.message, []).append(f"{plan} on {world}")
            for message, where in under.items():
                page += f"| {report.name} | {', '.join(where)} | {_cell(message)} |\n"
    page += "\n## Equal\n\n"
    for family in dict.fromkeys(report.family for report in reports):
        names = [report.name for report in reports if report.family == family and report.kind == EQUAL]
        page += f"* {family}: {', '.join(names)}\n"
    return page


def _cell(text: str) -> str:
    """Return a message as code: it quotes source lines, which are no Markdown."""
    fence = "``" if "`" in text else "`"
    return fence + text.replace("|", "\\|") + fence
