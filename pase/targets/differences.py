"""`CheckResult`: what a module computes otherwise under a plan than by itself, in words and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the runs in which a module is compared with itself under a plan.

    Attributes:
        devices: Number of ranks; 1 for what was traced of the module without a split.
        dtype: The type of its weights, "float64" or the module's own.
        mode: "training" or "evaluation", what `module.train()` and `module.eval()` set.
    """

    devices: int
    dtype: str
    mode: str

    @property
    def text(self) -> str:
        """What messages call it."""
        return f"{self.mode} in {self.dtype} on {self.devices} device{'s' if self.devices > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor of which a module computes something else under a plan than by itself.

    Attributes:
        what: The tensor: "the loss", "output 0", "the gradient of 'fc.weight'".
        line: "file.py:12" of the user's source, where it is computed or first read; "" where that is not known.
        found: The element that differs most, under the plan.
        expected: The same element of the module itself.
        relative: Their difference, of the size of the tensor.
        explained: How much of that rounding explains.
        order: When a step computes the tensor, as numbers to compare.
        run: In which run; None where there is one alone.
        step: In which step of it, from 1; 0 for a forward pass without gradients.
        rank: On which rank.
    """

    what: str
    line: str
    found: float
    expected: float
    relative: float
    explained: float
    order: tuple[int, int]
    run: Run | None = None
    step: int = 0
    rank: int = 0

    @property
    def when(self) -> str:
        """In which step it was found, and on which rank."""
        assert self.run is not None
        step = f"step {self.step}" if self.step else "forward pass"
        return step if self.run.devices == 1 else f"{step}, rank {self.rank}"

    @property
    def text(self) -> str:
        """The difference in words."""
        at = f" ({self.line})" if self.line else ""
        return (
            f"{self.what}{at} is {self.found:.6g}, {self.expected:.6g} of the module itself: {self.relative:.1e} of "
            f"its size, of which rounding explains {self.explained:.1e}"
        )


@dataclass(slots=True, kw_only=True)
class RankCheck:
    """What a rank found.

    Attributes:
        differences: What rounding does not explain, in the order in which it was computed.
        refused: By run, what the plan does not run.
        not_compared: What was not compared, and why.
        notes: Of the module under the plan.
        compared: By run, how many tensors were compared.
        names: Of the module's parameters and buffers.
        held: Those of them that the rank has under the plan.
    """

    differences: list[Difference] = field(default_factory=list)
    refused: dict[Run, str] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: dict[Run, int] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    held: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What `pase.check` found.

    Attributes:
        differences: What rounding does not explain, most upstream first: of one device before several, in the order in
            which a step computes it.
        refused: Why a plan does not run the module, by run.
        not_compared: What was not compared, and why.
        notes: What the module under the plan does otherwise than the module, as `parallel.notes` has it.
        compared: By the runs in which it was compared, how many tensors were.
    """

    differences: tuple[Difference, ...]
    refused: Mapping[Run, str]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...]
    compared: Mapping[Run, int]

    @property
    def is_equal(self) -> bool:
        """Whether the module can be trained and evaluated under the plan, and nothing differs beyond rounding."""
        return not self.differences and not self.refused

    @property
    def summary(self) -> str:
        """What was found, in one line."""
        total = f"{sum(self.compared.values()):,} tensors of {len(self.compared)} runs"
        if self.differences:
            return f"{len(self.differences):,} of {total} differ by more than rounding explains"
        equal = f"{total} are equal up to rounding" if self.compared else "nothing was compared"
        return f"{equal}; {len(self.refused)} runs are refused" if self.refused else equal

    def differing(self) -> dict[Run, list[Difference]]:
        """Return what differs by run, first those of one device."""
        found: dict[Run, list[Difference]] = {}
        for difference in self.differences:
            assert difference.run is not None
            found.setdefault(difference.run, []).append(difference)
        return found

    def origins(self) -> list[Difference]:
        """Return the layers at which the first difference in evaluation begins, where these are known."""
        found = [each for each in self.differences if each.order[0] < 0]
        return [each for each in found if each.run == found[0].run]

    def refusals(self) -> list[str]:
        """Return what is refused in words, each reason once."""
        runs: dict[str, list[Run]] = {}
        for run, problem in self.refused.items():
            runs.setdefault(problem, []).append(run)
        return [f"{'; '.join(run.text for run in own)}: {problem}" for problem, own in runs.items()]

    def __str__(self) -> str:
        lines = [f"it begins here: {each.text}" for each in self.origins()]
        for run, own in self.differing().items():
            lines += [f"{run.text}: {len(own)} of {self.compared[run]} tensors differ"]
            lines += [f"  {each.when}: {each.text}" for each in own]
        lines += [f"refused: {text}" for text in self.refusals()]
        lines += [f"not compared: {text}" for text in self.not_compared]
        return "\n".join([*lines, self.summary])


def result_of(by_rank: Sequence[RankCheck]) -> CheckResult:
    """Return what all ranks of one plan found: of each tensor what differs most on any of them."""
    largest: dict[tuple[Run | None, int, str], Difference] = {}
    for own in by_rank:
        for each in own.differences:
            key = each.run, each.step, each.what
            if key not in largest or each.relative > largest[key].relative:
                largest[key] = each
    first = by_rank[0]
    runs = list(first.compared)
    not_compared = [text for own in by_rank for text in own.not_compared]
    held = set[str]().union(*(own.held for own in by_rank))
    not_compared += [f"{name!r}: no rank has it" for name in first.names if held and name not in held]
    return CheckResult(
        differences=tuple(sorted(largest.values(), key=lambda each: (_number(each, runs), each.step, each.order))),
        refused=dict(first.refused),
        not_compared=tuple(dict.fromkeys(not_compared)),
        notes=tuple(first.notes),
        compared=dict(first.compared),
    )


def _number(difference: Difference, runs: Sequence[Run]) -> int:
    """Return the number of the run that a difference was found in."""
    assert difference.run is not None
    return runs.index(difference.run)
