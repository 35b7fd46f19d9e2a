"""The error against time and against samples, as Fig. 6 and 8 of You, Buluç and Demmel (2017) have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from statistics import mean
from types import MappingProxyType

from pase.easgd.algorithms import ALGORITHMS
from scripts.benchmarks.charts import Axes, Curve, curve_panels

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "original-easgd": "#7f7f7f",
        "async-easgd": "#1f77b4",
        "async-measgd": "#d62728",
        "hogwild-easgd": "#2ca02c",
        "sync-easgd1": "#17becf",
        "sync-easgd2": "#8c564b",
        "sync-easgd3": "#9467bd",
        "async-sgd": "#8ab8dd",
        "async-msgd": "#f2a0a0",
        "hogwild-sgd": "#98d694",
        "sync-sgd": "#c8aee0",
    }
)
"""Of a method without elastic averaging: a lighter one, and the line dashed."""

PAIRS = (
    ("async-easgd", "async-sgd"),
    ("async-measgd", "async-msgd"),
    ("hogwild-easgd", "hogwild-sgd"),
    ("sync-easgd3", "original-easgd"),
    ("sync-easgd3", "sync-sgd"),
)
"""Those of the paper's Fig. 6, in its order, and Sync EASGD beside its own counterpart."""

_BOTTOM, _TOP = -2.0, 0.0
"""Of log10 of the error."""
_ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One test, the mean of the seeds."""

    num_samples: float
    time_s: float
    error: float


def log_error(error: float, num_examples: int) -> float:
    """Return log10 of an error; one that is zero counts as half an example."""
    return log10(max(error, 0.5 / num_examples))


def figures(points: Mapping[str, Sequence[Point]], *, target: float, num_examples: int) -> dict[str, str]:
    """Return the files by name: all methods together, and in pairs; points: by algorithm."""
    pairs = [
        panel for names in PAIRS for panel in _panels(points, names, " and ".join(map(_title, names)), num_examples)
    ]
    everything = _panels(points, tuple(ALGORITHMS), "all methods", num_examples)
    return {
        name: curve_panels(
            panels,
            y_label="log10 of the error on the test data, mean of the seeds",
            bottom=_BOTTOM,
            top=_TOP,
            level=log10(1 - target),
            level_name=f"{target:.0%} right",
        )
        for name, panels in (("all.svg", everything), ("pairs.svg", pairs))
    }


def _panels(
    points: Mapping[str, Sequence[Point]], names: Sequence[str], title: str, num_examples: int
) -> tuple[Axes, Axes]:
    """Return the panel against time and that against samples; of many methods, the slowest's time is cut off."""
    ends_s = sorted(points[name][-1].time_s for name in names)
    right_s = ends_s[-min(len(names) - 1, 2)]
    most = max(points[name][-1].num_samples for name in names)

    def lines(x_of: str) -> tuple[Curve, ...]:
        return tuple(
            Curve(
                name=_title(name),
                colour=COLOURS[name],
                points=tuple((getattr(p, x_of), log_error(p.error, num_examples)) for p in points[name]),
                dashed=not ALGORITHMS[name].counterpart,
            )
            for name in names
        )

    return (
        Axes(title=title, x_label="training time, s", lines=lines("time_s"), right=_rounded(right_s)),
        Axes(title=title, x_label="samples", lines=lines("num_samples"), right=_rounded(most)),
    )


def _title(name: str) -> str:
    return ALGORITHMS[name].title


def _rounded(value: float) -> float:
    scale = 10.0 ** int(f"{value:e}".partition("e")[2])
    return next(k * scale for k in _ROUND if k * scale >= value * (1 - 1e-9))


def averaged(runs: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """Return the means of the tests of several runs, each as far as all of them came."""
    return tuple(
        Point(
            num_samples=mean(each.num_samples for each in together),
            time_s=mean(each.time_s for each in together),
            error=mean(each.error for each in together),
        )
        for together in zip(*runs, strict=False)
    )
