"""Which colour stands for what is split: colours that people with any colour vision tell apart, each with a label.

The light ones are Paul Tol's qualitative "light" scheme (SRON/EPS/TN/09-002), made for dark text on them; the dark
ones have the same hues, for light text.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class SplitLayer(Protocol):
    """A layer of a plan, as far as colours need it; splits: the factor of each iteration dim."""

    @property
    def splits(self) -> Mapping[str, int]: ...


PALETTE = (
    ("#77aadd", "#2c63d3"),
    ("#ee8866", "#7b2e06"),
    ("#eedd88", "#76720d"),
    ("#44bb99", "#237153"),
    ("#ffaabb", "#b0063f"),
    ("#bbcc33", "#353c20"),
    ("#99ddff", "#274968"),
)
"""Fill in light and in dark surroundings."""

UNSPLIT = ("#eceff1", "#626a77")
"""Of layers that are not split."""

FILLS = tuple(colour for pair in (*PALETTE, UNSPLIT) for colour in pair)
"""All of these."""

PATTERNS = ("plain", "stripes", "dots", "grid", "waves")
"""What is drawn over a colour that stands for a second, third, … class."""

NOT_SPLIT = "not split"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitClass:
    """Layers in which the same dims are split; light, dark: fill as #rrggbb."""

    dims: tuple[str, ...]
    label: str
    num_layers: int
    light: str
    dark: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitClasses:
    """Classes in order of how many layers they have, and [V] the class of each layer."""

    classes: tuple[SplitClass, ...]
    of_layer: tuple[int, ...]


def split_classes(layers: Sequence[SplitLayer]) -> SplitClasses:
    """Return the layers' classes by the names of the dims that are split.

    The class without any is grey. With more classes than colours, colours come again under another pattern.
    """
    dims = [tuple(sorted(name for name, factor in layer.splits.items() if factor > 1)) for layer in layers]
    counts = Counter(dims)
    found = sorted(counts, key=lambda of: (-counts[of], of))
    looks = iter(range(len(found)))
    classes = []
    for of in found:
        number = next(looks) if of else None
        light, dark = UNSPLIT if number is None else PALETTE[number % len(PALETTE)]
        pattern = 0 if number is None else min(number // len(PALETTE), len(PATTERNS) - 1)
        classes.append(
            SplitClass(
                dims=of,
                label=" ".join(of) or NOT_SPLIT,
                num_layers=counts[of],
                light=light,
                dark=dark,
                pattern=PATTERNS[pattern],
            )
        )
    return SplitClasses(classes=tuple(classes), of_layer=tuple(found.index(of) for of in dims))
