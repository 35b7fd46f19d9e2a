"""`CheckResult`: the differences between a module under a plan and the module itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run in which a module under a plan is compared with the module itself.

    Attributes:
        devices: Number of ranks; 1 for the traced module without splits.
        dtype: Type of its weights, "float64" or the module's own.
        mode: "training" or "evaluation", as set by `module.train()` and `module.eval()`.
    """

    devices: int
    dtype: str
    mode: str

    @property
    def text(self) -> str:
        """Name of the run in messages."""
        return f"{self.mode} in {self.dtype} on {self.devices} device{'s' if self.devices > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor whose value under a plan differs from that of the module itself.

    Attributes:
        what: The tensor: "the loss", "output 0", "the gradient of 'fc.weight'".
        line: "file.py:12" of the user's source, where it is computed or first read; "" if unknown.
        found: The element with the largest difference, under the plan.
        expected: The same element of the module itself.
        relative: Their difference, relative to the magnitude of the tensor.
        explained: The part of that which rounding explains.
        order: Position in the order of computation, as numbers to compare.
        run: Run in which it was found; None where there is only one.
        step: Step of that run, from 1; 0 for a forward pass without gradients.
        rank: Rank on which it was found.
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
        """Step in which it was found, and rank."""
        assert self.run is not None
        step = f"step {self.step}" if self.step else "forward pass"
        return step if self.run.devices == 1 else f"{step}, rank {self.rank}"

    @property
    def text(self) -> str:
        """Description of the difference."""
        at = f" ({self.line})" if self.line else ""
        return (
            f"{self.what}{at} is {self.found:.6g}, {self.expected:.6g} of the module itself: {self.relative:.1e} of "
            f"its size, of which rounding explains {self.explained:.1e}"
        )


@dataclass(slots=True, kw_only=True)
class RankCheck:
    """Result of the check on one rank.

    Attributes:
        differences: Differences that rounding does not explain, in the order of computation.
        refused: By run, why the plan does not support it.
        not_compared: What was not compared, and why.
        notes: Notes on the module under the plan.
        compared: By run, the number of tensors compared.
        names: Names of the module's parameters and buffers.
        held: Those of them that the rank holds under the plan.
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
    """Result of `pase.check`.

    Attributes:
        differences: Differences that rounding does not explain, most upstream first: one device before several, then in
            the order of computation.
        refused: Why the plan does not run the module, by run.
        not_compared: What was not compared, and why.
        notes: Intended deviations of the module under the plan, as in `parallel.notes`.
        compared: By run, the number of tensors compared.
    """

    differences: tuple[Difference, ...]
    refused: Mapping[Run, str]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...]
    compared: Mapping[Run, int]

    @property
    def is_equal(self) -> bool:
        """Whether the module can be trained and evaluated under the plan without differences except rounding."""
        return not self.differences and not self.refused

    @property
    def summary(self) -> str:
        """Result in one line."""
        total = f"{sum(self.compared.values()):,} tensors of {len(self.compared)} runs"
        if self.differences:
            return f"{len(self.differences):,} of {total} differ by more than rounding explains"
        equal = f"{total} are equal up to rounding" if self.compared else "nothing was compared"
        return f"{equal}; {len(self.refused)} runs are refused" if self.refused else equal

    def differing(self) -> dict[Run, list[Difference]]:
        """Return the differences by run, those of one device first."""
        found: dict[Run, list[Difference]] = {}
        for difference in self.differences:
            assert difference.run is not None
            found.setdefault(difference.run, []).append(difference)
        return found

    def origins(self) -> list[Difference]:
        """Return the layers at which the first difference in evaluation starts, if known."""
        found = [each for each in self.differences if each.order[0] < 0]
        return [each for each in found if each.run == found[0].run]

    def refusals(self) -> list[str]:
        """Return the reasons why runs are refused, each once."""
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
    """Combine the results of all ranks of one plan: for each tensor, the largest difference on any rank."""
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
    """Return the number of the run in which a difference was found."""
    assert difference.run is not None
    return runs.index(difference.run)
