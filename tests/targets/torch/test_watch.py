"""Ranks that go different ways: what all are told, at start and in the midst of training, and how soon."""

import random
import re
import socket
from pathlib import Path

import pytest

from pase.errors import ProgramError
from pase.targets.torch.watch import Passes, first_difference, missing_after_s
from tests.targets.torch import watched
from tests.targets.torch.ranks import Pool, RanksFailedError
from tests.targets.torch.watched import LIMIT_S

WORLD = 3

TOLD_WITHIN_S = 10.0
"""From when ranks differ until each of them says who."""
BUSY_S = 5.0
"""Added in training: a rank has to be missing for 4.5 s first, and threads of a busy machine sleep longer."""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("how", "limit_s", "said"),
    [
        ("stopped", LIMIT_S, "it has not been heard of for 4.5 s: it is stopped, or its host is gone"),
        ("thrown", 300.0, "ValueError: the third batch is empty"),
        pytest.param(
            *("held", 300.0, "pass 6 of its training is a backward pass under no_sync(), and that of rank"),
            marks=pytest.mark.full,
        ),
        ("missing", 300.0, "pass 6 of its training is a forward pass, and that of rank"),
        pytest.param(
            *("sleeping", LIMIT_S, "it began no pass for 4.5 s, while ranks 0, 2 waited within one"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_ranks_end_when_one_does_otherwise(ranks: Pool, how: str, limit_s: float, said: str, tmp_path: Path) -> None:
    differs = tmp_path / "differs"
    given = 1, how, limit_s, str(differs)
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(watched.training, free_port(), *given, world=WORLD, grace_s=6.0, timeout_s=120.0)
    differs_s = float(differs.read_text())
    for rank in (0, 2):
        _, _, text = str(caught.value).partition(f"-- rank {rank} of {WORLD}: ")
        own, _, _ = text.partition("\n-- rank")
        line = rf"\[([\d.]+)\] .*rank {rank} of {WORLD} ended because rank 1 failed: {re.escape(said)}"
        told = re.search(line, own)
        assert told is not None, own
        assert float(told[1]) - differs_s < TOLD_WITHIN_S + BUSY_S


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", r"rank 2 differs in the seed \(7, not 5\); start all 3 ranks with the same"),
        pytest.param(
            "model", r"rank 2 differs in the model, the parameters of the module; start all", marks=pytest.mark.full
        ),
        pytest.param("splits", r"rank 2 differs in the splits; start all", marks=pytest.mark.full),
        pytest.param("order", r"rank 2 differs in the order of devices; start all", marks=pytest.mark.full),
        ("failing", r"rank 2 of 3 failed: the plan is of another model"),
    ],
)
def test_ranks_that_begin_differently_are_named_on_all(ranks: Pool, what: str, said: str) -> None:
    with pytest.raises(RanksFailedError, match=said) as caught:
        ranks.run(watched.differing, free_port(), what, world=WORLD, grace_s=20.0, timeout_s=120.0)
    # None of them waited until its time was over.
    own = "ProgramError" if what == "failing" else "RankError"
    assert caught.value.kinds == {0: "RankError", 1: "RankError", 2: own}
    times_s = re.findall(r"compared at ([\d.]+) s, told at ([\d.]+) s", str(caught.value))
    assert len(times_s) == WORLD
    differ_s = max(float(compared) for compared, _ in times_s)
    assert max(float(told) for _, told in times_s) - differ_s < TOLD_WITHIN_S


def test_the_first_pass_that_differs_is_found() -> None:
    """Against the whole texts, for ranks that are anywhere in them when they are compared."""
    draw = random.Random(0)
    found = 0
    for _ in range(100):
        length, size = draw.randrange(1, 9000), draw.choice([2, 3])
        text = "".join(draw.choices("FBH", k=length))
        begun = [text[: max(0, length - draw.randrange(1500))] for _ in range(size)]
        other = list(begun[-1])
        if draw.random() < 0.7 and other:
            place = draw.randrange(max(0, len(other) - 3000), len(other))
            other[place] = "P"
            begun[-1] = "".join(other)
        passes = []
        for letters in begun:
            passes.append(Passes())
            for letter in letters:
                passes[-1].begin(letter)
        common = min(map(len, begun))
        expected = next((i for i in range(common) if len({own[i] for own in begun}) > 1), None)
        answer = first_difference([own.window() for own in passes])
        if expected is None:
            longest = max(map(len, begun))
            later = {i for i in range(longest) if len({own[i] for own in begun if i < len(own)}) > 1}
            assert answer is None or answer[0] in later
        else:
            assert answer is not None
            # Of what is older than the last ones it is known that it differs.
            start = max(own.window()[0] for own in passes)
            assert answer[0] == max(expected, start) if expected >= start else answer[0] == start
            found += 1
    assert found > 33


def test_a_time_out_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_after_s(3.0) == 3.0
    monkeypatch.setenv("PASE_TIMEOUT_S", "45")
    assert missing_after_s() == 45.0
    for text in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("PASE_TIMEOUT_S", text)
        with pytest.raises(ProgramError, match=rf"PASE_TIMEOUT_S is '{text}'; expected a number of seconds above 0"):
            missing_after_s()
    monkeypatch.delenv("PASE_TIMEOUT_S")
    assert missing_after_s() == 600.0
