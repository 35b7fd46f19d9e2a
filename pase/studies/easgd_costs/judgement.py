"""A statement of the paper beside what follows, and the words in which they are compared."""

from dataclasses import dataclass

from pase.studies.easgd_costs.paper import Printed

CLOSE = 0.1
"""A prediction as near as this to the printed figure, relatively, is called close."""

YES, CLOSE_WORD, NO, UNTOLD = "yes", "close", "**no**", "cannot be told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """where: in the paper. what: it states. paper: the figure. ours: what follows. verdict: in words."""

    where: str
    what: str
    paper: str
    ours: str
    verdict: str


def judged(ours: float, printed: Printed) -> str:
    """Return the verdict on a prediction of a printed figure."""
    if printed.holds(ours):
        return f"{YES}, within rounding"
    difference = ours / printed.value - 1
    text = f"{difference:+.0%}" if abs(difference) < 1 else f"{ours / printed.value:.1f}×"
    return f"{CLOSE_WORD}, {text}" if abs(difference) <= CLOSE else f"{NO}, {text}"
