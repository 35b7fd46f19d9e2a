"""Bad input: one clear message on standard error, status 1 or 2, nothing on standard output, nothing half-written."""

import json
import re
from pathlib import Path

import pytest

from pase.cli.main import run
from pase.cli.options import byte_size
from pase.planning.plan import SCHEMA_VERSION
from pase.planning.plan_file import write_plan
from tests.cli.conftest import Command, Finished
from tests.networks import small_plan, tiny_plan

SEARCH = ("search", "mlp", "-p", "4")


def _assert_refused(finished: Finished, status: int, message: str) -> None:
    assert finished.status == status
    assert finished.out == ""
    assert "Traceback" not in finished.err
    lines = finished.err.splitlines()
    if status == 1:
        assert len(lines) == 1
        assert re.search(rf"^pase: {message}", lines[0])
    else:
        assert lines[0].startswith("Usage: pase ")
        assert re.search(r"^Try 'pase .*--help' for help\.$", lines[1])
        assert re.search(rf"^Error: {message}", lines[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "alexnett", "-p", "8"], r"unknown model 'alexnett': did you mean 'alexnet'"),
        (["search", "INCEPTION", "-p", "8"], r"unknown model 'INCEPTION': .*known models are .*inception_v3"),
        (["search", "net.onnx", "-p", "8"], r"'net.onnx' cannot be read: No such file or directory"),
        (["search", "", "-p", "8"], r"unknown model ''"),
        (["search", "alexnet", "-p", "1000003"], r"no layer of 'alexnet' can be split over 1000003 .* such as 524288"),
        (["search", "alexnet", "-p", "1048577"], r"1048577 devices were asked for; at most 1048576"),
        (["search", "alexnet", "-p", "9" * 900], r"9+…9+ devices were asked for; at most 1048576"),
        ([*SEARCH, "-b", "7"], r"a batch of 7 cannot be split over 4 devices: .*such as 8.*--keep-batch"),
        ([*SEARCH, "-b", "9" * 30], r"model 'mlp': batch=9+ is not usable; expected a whole number from 1 to"),
        ([*SEARCH, "-b", "8", "--arg", "batch=8"], r"the batch of model 'mlp' is given twice"),
        ([*SEARCH, "--arg", "layer=3"], r"model 'mlp' has no parameter 'layer': did you mean 'layers'"),
        ([*SEARCH, "--arg", "layers=0"], r"model 'mlp': layers=0 is not usable; expected a whole number from 1"),
        ([*SEARCH, "--arg", "layers="], r"model 'mlp': layers='' is not usable"),
        (["search", "alexnet", "-p", "4", "--arg", "image=6"], r"layer 'conv1': a window of 11 does not fit"),
        ([*SEARCH, "--machine", "1080tii"], r"unknown machine '1080tii': did you mean '1080ti'"),
        ([*SEARCH, "--machine", "none.toml"], r"machine file none.toml cannot be read"),
        ([*SEARCH, "--flops", "0"], r"FLOP/s of 0 is not possible; expected a number above 0"),
        ([*SEARCH, "--flops", "-1"], r"FLOP/s of -1 is not possible"),
        ([*SEARCH, "--flops", "nan"], r"FLOP/s of nan is not possible"),
        ([*SEARCH, "--bandwidth", "inf"], r"bandwidth of inf is not possible"),
        ([*SEARCH, "--flops", "1e308", "--bandwidth", "1e-300"], r"layer costs .* hold NaN; every cost must be"),
        ([*SEARCH, "--time-limit", "nan"], r"the time limit is nan s; give a positive number"),
        ([*SEARCH, "-o", "missing/plan.json"], r"missing/plan.json cannot be written: folder missing does not exist"),
        ([*SEARCH, "-o", "."], r"\. is a folder; name a file to write to"),
        ([*SEARCH, "-o", "file/plan.json"], r"file/plan.json cannot be written: folder file does not exist"),
        ([*SEARCH, "-o", "x" * 300], r"x+ cannot be used: File name too long"),
        (["run", "x" * 300, "-p", "4"], r"unknown model 'x+"),
        (["emit", "x" * 300], r"there is no plan file 'x+…', and no built-in network of that name either"),
        (["tables", "mlp", "-p", "4", "-o", "missing/t.npz"], r"missing/t.npz cannot be written: folder missing does"),
        (["tables", "mlpp", "-p", "4", "-o", "t.npz"], r"unknown model 'mlpp': did you mean 'mlp'"),
        (["tables", "mlp", "-p", "1000003", "-o", "t.npz"], r"no layer of 'mlp' can be split over 1000003 devices"),
        (["solve", "none.npz"], r"none.npz: cannot be read: No such file or directory"),
        (["solve", "."], r"\.: cannot be read: Is a directory"),
        (["solve", "file"], r"file: cannot be read: File is not a zip file; expected a complete \.npz file"),
        (["emit", "none.json"], r"plan file none.json cannot be read: No such file or directory"),
        (["emit", "file"], r"file is no plan: it is not JSON; a plan is what 'pase search MODEL"),
        (["emit", "none.json", "-o", "missing/train.py"], r"missing/train.py cannot be written: folder missing does"),
        (["run", "none.json"], r"plan file none.json cannot be read: No such file or directory"),
        (["run", "mlpp", "-p", "4"], r"unknown model 'mlpp': did you mean 'mlp'"),
        (["run", "file"], r"file is no plan: it is not JSON; a plan is what 'pase search MODEL"),
        (["machines", "--show", "3080ti"], r"unknown machine '3080ti': did you mean"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_an_input_at_fault_has_status_1(
    arguments: list[str], message: str, pase: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("what is this?", encoding="utf-8")
    _assert_refused(pase(*arguments), 1, message)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sarch"], r"unknown command 'sarch': did you mean 'search'.*known commands are .*emit"),
        (["\x1b[31mx"], r"unknown command '.x1b\[31mx'"),
        (["search"], r"Missing argument 'MODEL'"),
        (["search", "mlp"], r"Missing option '--devices' / '-p'"),
        (["search", "mlp", "-p", "0"], r"Invalid value for '--devices' / '-p': 0 is not in the range x>=1"),
        (["search", "mlp", "-p", "-3"], r"Invalid value for '--devices' / '-p': -3 is not in the range x>=1"),
        (
            ["search", "mlp", "-p", "7.5"],
            r"Invalid value for '--devices' .*'7.5' is not .*; expected a whole number of 1",
        ),
        (["search", "mlp", "-p", "1e3"], r"Invalid value for '--devices' .*'1e3' is not .*; expected a whole number"),
        (
            ["search", "mlp", "-p", "eight"],
            r"Invalid value for '--devices' .*'eight' is not .*; expected a whole number",
        ),
        (["search", "mlp", "-p", "٣"], r"Invalid value for '--devices' .*; expected a whole number"),
        (["search", "mlp", "-p", "9" * 5000], r"Invalid value for '--devices' .*; expected a whole number"),
        (["search", "mlp", "-p", ""], r"Invalid value for '--devices' .*'' is not usable; expected a whole number"),
        ([*SEARCH, "-b", "0"], r"Invalid value for '--batch' / '-b': 0 is not in the range x>=1"),
        ([*SEARCH, "-b", "1.5"], r"Invalid value for '--batch' .*'1.5' is not usable; expected a whole number of 1"),
        ([*SEARCH, "--arg", "layers"], r"Invalid value for '--arg': 'layers' is not of the form KEY=VALUE"),
        ([*SEARCH, "--arg", "=3"], r"Invalid value for '--arg': '=3' is not of the form KEY=VALUE"),
        ([*SEARCH, "--arg", "a=1", "--arg", "a=2"], r"Invalid value for '--arg': 'a' is given twice"),
        ([*SEARCH, "--cost-model", "x"], r"Invalid value for '--cost-model': 'x' is not "),
        ([*SEARCH, "--ordering", "genseq"], r"Invalid value for '--ordering': 'genseq' is not one of .*'generate_seq'"),
        ([*SEARCH, "--time-limit", "0"], r"Invalid value for '--time-limit': 0.0 is not in the range x>0"),
        ([*SEARCH, "--memory-limit", "0"], r"Invalid value for '--memory-limit': '0' is not a size; .* 800MB or 2GiB"),
        ([*SEARCH, "--memory-limit", "-1GB"], r"Invalid value for '--memory-limit': '-1GB' is not a size"),
        ([*SEARCH, "--memory-limit", "2 hogs"], r"Invalid value for '--memory-limit': '2 hogs' is not a size"),
        ([*SEARCH, "--memory-limit", "0.1B"], r"Invalid value for '--memory-limit': '0.1B' is not a size"),
        ([*SEARCH, "--memory-limit", "9" * 400], r"Invalid value for '--memory-limit': '9+' is not a size"),
        ([*SEARCH, "--flops", "fast"], r"Invalid value for '--flops': 'fast' is not a valid float"),
        ([*SEARCH, "--jsn"], r"No such option '--jsn'"),
        ([*SEARCH, "--\x1b[31m\n"], r"No such option '--.x1b\[31m"),
        ([*SEARCH, "extra"], r"Got unexpected extra argument \(extra\)"),
        (["tables", "mlp", "-p", "4"], r"Missing option '--output' / '-o'"),
        (["tables", "mlp", "-p", "4", "-o", "t.json"], r"-o t.json: the file's ending must be .npz or .cfn"),
        (["solve"], r"Missing argument 'TABLES'"),
        (["emit"], r"Missing argument 'PLAN\|MODEL'"),
        (["run"], r"Missing argument 'PLAN\|MODEL'"),
        (["run", "mlp"], r"--devices is needed to search a strategy for model 'mlp'"),
        (["run", "mlp", "-p", "4", "--steps", "0"], r"Invalid value for '--steps': 0 is not in the range x>=1"),
    ],
    ids=lambda value: " ".join(value)[:50].encode("unicode_escape").decode() if isinstance(value, list) else "",
)
def test_wrong_usage_has_status_2(
    arguments: list[str], message: str, pase: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _assert_refused(pase(*arguments), 2, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("800MB", 8 * 10**8), ("2GiB", 2**31), ("1.5 kb", 1500), ("3tib", 3 * 2**40)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert byte_size(text) == size


def test_plans_that_are_cut_off_or_newer_are_refused(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(tiny_plan(), path)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    _assert_refused(pase("emit", path), 1, r"plan file .*plan.json is not complete JSON .*; it may be truncated")
    document = json.loads(whole) | {"schema_version": SCHEMA_VERSION + 1}
    path.write_text(json.dumps(document), encoding="utf-8")
    newer = rf"plan file .*: schema_version is {SCHEMA_VERSION + 1}; this version of PaSE reads {SCHEMA_VERSION}: "
    _assert_refused(pase("emit", path), 1, newer)
    _assert_refused(pase("run", path), 1, newer)


def test_what_a_plan_says_cannot_break_the_message(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(tiny_plan(), path)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["cost_model"] = "\x1b[2J\n\r\u202e\ud800[red]"
    path.write_text(json.dumps(document), encoding="utf-8")
    finished = pase("emit", path)
    _assert_refused(finished, 1, r"plan file .*: cost_model cannot be used: unknown cost model")
    assert finished.err.rstrip("\n").isprintable()
    assert "[red]" in finished.err


def test_a_failed_search_leaves_the_old_plan(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(small_plan("mlp", 4), path)
    before = path.read_bytes()
    for arguments in (["alexnett", "-p", "4"], ["mlp", "-p", "1000003"], ["mlp", "-p", "4", "-b", "7"]):
        assert pase("search", *arguments, "-o", path).status == 1
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_an_unwritable_place_is_found_before_the_search(
    pase: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("searched all the same")

    monkeypatch.setattr("pase.cli.search.search", never)
    _assert_refused(pase(*SEARCH, "-o", tmp_path / "missing" / "plan.json"), 1, r".*folder .*missing does not exist")
    monkeypatch.setattr("os.access", lambda *_: False)
    _assert_refused(pase(*SEARCH, "-o", tmp_path / "plan.json"), 1, r".*cannot be written: you may not write to")


def test_too_little_memory_is_said(pase: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("pase.cli.search.search", too_much)
    _assert_refused(pase(*SEARCH), 1, r"there is not enough memory for this; use fewer devices")


def test_an_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no fault of the input is a traceback that can be reported, not a message that blames the user."""

    def wrong(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("pase.cli.search.search", wrong)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(list(SEARCH))
