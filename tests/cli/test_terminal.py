"""What a terminal shows: tables of its width, no escape sequence from a name, progress, and Ctrl-C."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import pase as library
from pase.cli import output, progress
from pase.cli.progress import bar_line
from pase.cli.run import _print_parameters as print_parameters
from pase.planning.plan_file import write_plan
from pase.sharding.traffic import held_weights
from tests.cli.conftest import Command, Shown, document_of
from tests.cli.processes import ENTRY, WITHOUT_PROGRESS, in_terminal, interrupted
from tests.hostile import HOSTILE_NAMES, hostile_plan

WITHOUT_COLOUR = ({"NO_COLOR": "1"}, {"TERM": "dumb"})


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with plans of AlexNet and of layers with hostile names."""
    folder = tmp_path_factory.mktemp("plans")
    write_plan(library.search(library.load("alexnet"), 8), folder / "alexnet.json")
    write_plan(hostile_plan(), folder / "hostile.json")
    return folder


def _unstyled(written: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", written)


# ------------------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(
    ("columns", "arguments"),
    [
        (80, ("models",)),
        (80, ("explain", "alexnet.json")),
        (80, ("explain", "hostile.json", "--no-why")),
        (80, ("search", "alexnet", "-p", "8", "--explain-ordering", "--memory-per-device", "machine")),
        (140, ("compare", "alexnet", "-p", "8", "--only", "owt", "--cost-model", "both")),
        (140, ("simulate", "hostile.json")),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(value[:2]),
)
def test_every_line_fits_and_no_name_steers_the_terminal(
    columns: int, arguments: tuple[str, ...], plans: Path, terminal: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plans)
    lines = _unstyled(terminal(*arguments, columns=columns)).splitlines()
    assert len(lines) > 8
    assert [line for line in lines if cell_len(line) > columns or not line.isprintable()] == []
    # It is the terminal's width that decides, and not 80.
    assert columns == 80 or max(map(cell_len, lines)) > 80


@pytest.mark.parametrize(("name", "columns"), [("alexnet", 80), ("transformer", 132)])
def test_tables_are_folded_between_words_and_nothing_is_lost(name: str, columns: int, terminal: Shown) -> None:
    written = terminal("search", name, "-p", "8", "--all-layers", columns=columns)
    assert "\x1b[1m" in written  # a header in bold
    lines = _unstyled(written).split("\n\n")[0].splitlines()
    assert all(cell_len(line) <= columns for line in lines)
    plan = library.search(library.load(name), 8)
    words = " ".join(lines).split()
    for layer in plan.layers:
        assert layer.name in words
        for dim, extent in layer.dims.items():
            assert f"{dim}={extent}" in words
        for dim, factor in layer.splits.items():
            assert factor == 1 or f"{dim}={factor}" in words
    assert sum("%" in line for line in lines) == len(plan.layers)


def test_a_terminal_that_is_far_too_narrow_loses_nothing() -> None:
    command = ("search", "lenet5", "--devices", "4", "--batch", "16")
    table = _unstyled(in_terminal(*command, columns=20, command=WITHOUT_PROGRESS)).split("\n\n")[0]
    for word in ("conv1", "b=16", "softmax", "configuration", "share"):
        assert word in table


def test_what_is_shortened_says_so_and_is_whole_elsewhere(
    plans: Path, pase: Command, terminal: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plans)
    long = HOSTILE_NAMES[-1]
    piped = pase("simulate", "hostile.json")
    assert piped.status == 0
    assert long in piped.out
    assert all(c.isprintable() or c == "\n" for c in piped.out + piped.err)
    names = [layer["name"] for layer in document_of(pase, "explain", "hostile.json", "--no-why")["layers"]]
    assert long in names
    shown = _unstyled(terminal("simulate", "hostile.json"))
    assert re.search(r"^long.*…", shown, re.MULTILINE)
    assert long.strip() not in shown


@pytest.mark.parametrize("environment", WITHOUT_COLOUR)
def test_colours_can_be_declined(environment: dict[str, str], plans: Path, terminal: Shown) -> None:
    written = terminal("explain", plans / "alexnet.json", "--no-why", **environment)
    assert "configuration" in written
    assert "\x1b" not in written


@given(
    st.lists(st.lists(st.text("ab 層", max_size=30), min_size=3, max_size=3), max_size=4),
    st.integers(40, 90),
)
def test_columns_of_names_and_text_fit_any_terminal(rows: list[list[str]], available: int) -> None:
    headers = ("name", "of what", "number")
    numbered = [[*row[:2], "12.3 GFLOP"] for row in rows]
    widths, gap = output._widths(headers, numbered, [True, True, False], available)
    assert sum(widths) + gap * 2 <= available
    assert widths[2] >= (len("12.3 GFLOP") if rows else len("number"))


def test_what_many_workers_hold_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    plan = library.search(library.load("alexnet"), 8)
    weights = held_weights(plan)
    print_parameters(weights)
    header, *rows = capsys.readouterr().out.splitlines()
    assert re.split("  +", header) == ["weight", "shape", "part", "of workers"]
    assert max(map(len, rows)) <= 80
    held = [row.rpartition("  ")[2] for row in rows]
    # Each worker holds one part of each weight.
    assert sorted(" ".join(held).split()) == sorted(list("01234567") * len(weights))
    assert len(rows) > len(weights)


def test_text_goes_on_below_where_it_began(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda _: True)
    monkeypatch.setattr(output, "_columns", lambda: 30)
    for text in ("  memory      1.2 GB, of which most is weights", "x" * 70, "  a b c d e f g h i j k l m n o p q r"):
        output.say(text)
    assert capsys.readouterr().out.splitlines() == [
        "  memory      1.2 GB, of which",
        "              most is weights",
        *("x" * 30, "x" * 30, "x" * 10),
        "  a b c d e f g h i j k l m n",
        "    o p q r",
    ]


# ---------------------------------------------------------------------------------------------------------- progress

WORK = (
    "import time; from pase.cli import progress\n"
    "progress.QUIET_S = 0.2\n"
    "with progress.progress() as show:\n"
    "    show('one \\x1b[31m', 0.0); time.sleep(0.5); show('two', 0.25); time.sleep(0.5)\n"
    "print('result')"
)


def test_a_terminal_sees_one_line_that_is_gone_at_the_end() -> None:
    written = in_terminal(command=[sys.executable, "-c", WORK])
    assert written.startswith("\r")
    assert written.endswith("\r\x1b[Kresult\n")
    drawn = written.removesuffix("\r\x1b[Kresult\n").split("\r")[1:]
    assert all(line.endswith("\x1b[K") for line in drawn)
    lines = [re.sub(r"\x1b\[[0-9;]*[mK]", "", line) for line in drawn]
    assert re.fullmatch(r"one \\x1b\[31m  0:0\d", lines[0])
    assert re.fullmatch(r"two  ━{10}─{30}   25%  0:0\d", lines[-1])


@pytest.mark.parametrize("environment", WITHOUT_COLOUR)
def test_progress_without_colour(environment: dict[str, str]) -> None:
    written = in_terminal(command=[sys.executable, "-c", WORK], environment=environment)
    assert "\x1b[3" not in written
    assert ("━" in written) == ("TERM" not in environment)
    assert written.endswith("result\n")


def test_elsewhere_each_thing_that_is_done_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    before = progress.QUIET_S
    try:
        exec(WORK, namespace)
    finally:
        progress.QUIET_S = before
    shown = capfd.readouterr()
    assert shown.out == "result\n"
    assert shown.err == "pase: one \\x1b[31m …\npase: two …\n"


def test_lines_are_few_however_often_work_tells_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress._Lines()
    for tenth in range(400):
        lines.draw(f"{'branching' if tenth % 3 else 'bounding'}: {tenth} left", 0.0, tenth / 10)
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["pase: bounding: 0 left …", "pase: branching: 1 left …"]
    assert len(told) == 4


def test_quick_work_shows_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.progress() as show:
        show("one", 0.0)
        time.sleep(0.2)
    assert capfd.readouterr() == ("", "")


@given(st.text(max_size=40), st.floats(-1, 2), st.floats(0, 1e6), st.integers(1, 120))
def test_a_line_of_progress_leaves_the_last_column_free(
    what: str, fraction: float, elapsed_s: float, columns: int
) -> None:
    line = re.sub(r"\x1b\[[0-9;]*m", "", bar_line(what, fraction, elapsed_s, columns))
    assert cell_len(line) < columns
    assert line.isprintable()


# ------------------------------------------------------------------------------------------------------------ Ctrl-C

SLOW_SEARCH = (
    "import sys, time\n"
    "import pase.cli.progress, pase.cli.search as command\n"
    "pase.cli.progress.QUIET_S = 0.05\n"
    "def slow(*_, on_progress, **__):\n"
    "    on_progress('searching', 0.5)\n"
    "    time.sleep(60)\n"
    "command.search = slow\n"
    "from pase.cli import main\n"
    "main()"
)
ANSWERING_SEARCH = (
    "import os, time\n"
    "import pase.cli.search as command\n"
    "whole = command.search\n"
    "def slow(*given, on_progress, **named):\n"
    "    try:\n"
    "        os.write(1, b'searching\\n')\n"
    "        time.sleep(60)\n"
    "    except KeyboardInterrupt:\n"
    "        return whole(*given, **named)\n"
    "command.search = slow\n"
    "from pase.cli import main\n"
    "main()"
)
SLOW_PROGRAM = (
    "import pase.cli.progress, pase.targets.programs\n"
    "pase.cli.progress.QUIET_S = 0.05\n"
    "pase.targets.programs.emit = lambda _, **__: 'import time; time.sleep(60)'\n"
    "from pase.cli import main\n"
    "main()"
)
MLP = ("mlp", "-p", "2")


@pytest.mark.parametrize(
    ("code", "arguments", "marker", "at_terminal", "times"),
    [
        (SLOW_SEARCH, ("search", *MLP, "-o", "plan.json"), "searching", True, 2),
        (SLOW_PROGRAM, ("run", *MLP), "building the program", True, 2),
        (SLOW_PROGRAM, ("run", *MLP), "building the program", False, 1),
    ],
    ids=["search-terminal", "run-terminal", "run-pipe"],
)
def test_ctrl_c_ends_with_130_and_one_line_and_leaves_nothing(
    code: str,
    arguments: tuple[str, ...],
    marker: str,
    at_terminal: bool,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    left = interrupted([sys.executable, "-c", code, *arguments], marker, times=times, at_terminal=at_terminal)
    assert (left.status, left.num_left) == (130, 0)
    assert list(tmp_path.iterdir()) == []
    if at_terminal:
        # The bar was taken away; what may follow is what the terminal itself shows of the second Ctrl-C.
        assert re.search(r"\r\x1b\[K\r\npase: interrupted\r\n(\^C)?$", left.written)
        assert "\x1b[?25l" not in left.written  # the cursor was never hidden
    else:
        assert re.fullmatch(rf"(pase: .* …\n)*pase: {marker} …\npase: interrupted\n", left.written)


def test_a_search_that_answers_to_ctrl_c_says_that_it_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", ANSWERING_SEARCH, "search", *MLP, "-o", "plan.json"]
    left = interrupted(command, "searching", times=1, at_terminal=False)
    assert (left.status, left.num_left) == (130, 0)
    assert "data parallelism" in left.written
    assert left.written.endswith("pase: interrupted: this is the best answer that was found until then\n")
    assert json.loads(Path("plan.json").read_text(encoding="utf-8"))["num_devices"] == 2


def test_nothing_new_begins_after_an_interrupt_that_was_answered() -> None:
    code = (
        "import os, time\n"
        "import pase.cli.options as command\n"
        "def slow(*_, on_progress, **__):\n"
        "    try:\n"
        "        os.write(1, b'searching\\n')\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        on_progress('the next thing', 0.0)\n"
        "command.search = slow\n"
        "from pase.cli import main\n"
        "main()"
    )
    left = interrupted([sys.executable, "-c", code, "run", *MLP], "searching", times=1, at_terminal=False)
    assert (left.status, left.written) == (130, "searching\npase: interrupted\n")


def test_ctrl_c_while_a_command_is_loaded_is_no_traceback() -> None:
    code = (
        "import builtins, os, time\n"
        "load = builtins.__import__\n"
        "def slow(name, *given):\n"
        "    if name.startswith('numpy'):\n"
        "        os.write(1, b'loading\\n')\n"
        "        time.sleep(60)\n"
        "    return load(name, *given)\n"
        "builtins.__import__ = slow\n"
        "from pase.cli import main\n"
        "main()"
    )
    left = interrupted([sys.executable, "-c", code, "search", *MLP], "loading", times=1, at_terminal=False)
    assert (left.status, left.written) == (130, "loading\npase: interrupted\n")


def test_a_job_in_the_background_does_not_hear_of_ctrl_c() -> None:
    script = "trap '' INT; exec \"$@\""
    told = in_terminal(command=["sh", "-c", f"{script} & kill -INT $!; wait $!", "sh", *ENTRY, "models", "--json"])
    assert len(json.loads(told)["models"]) > 8
