"""Bad input: one clear message on standard error, status 1 or 2, nothing on standard output, nothing half-written."""

import json
import re
import shlex
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
        # A message may go on in further lines, with what can be chosen.
        assert re.search(rf"^Error: {message}", "\n".join(lines[3:]), re.MULTILINE)


def _words(command: str) -> list[str]:
    """Return the words of a command; {30 nines} is a number of so many digits, {65 numbers} a list of so many."""
    command = re.sub(r"\{(\d+) nines\}", lambda found: "9" * int(found[1]), command)
    command = re.sub(r"\{(\d+) numbers\}", lambda found: ",".join(map(str, range(int(found[1])))), command)
    return [word.encode().decode("unicode_escape") if "\\" in word else word for word in shlex.split(command)]


def _rows(text: str) -> list[tuple[str, str]]:
    return [
        (command.strip(), message) for line in text.splitlines() if line for command, message in [line.split(" | ")]
    ]


AT_FAULT = _rows(r"""
search alexnett -p 8 | unknown model 'alexnett': did you mean 'alexnet'
search INCEPTION -p 8 | unknown model 'INCEPTION': .*known models are .*inception_v3
search net.onnx -p 8 | 'net.onnx' cannot be read: No such file or directory
search '' -p 8 | unknown model ''
search alexnet -p 1000003 | no layer of 'alexnet' can be split over 1000003 .* use a number of devices that 2 divides
search alexnet -p 1048577 | 1048577 devices were asked for; at most 1048576
search alexnet -p {900 nines} | 9+…9+ devices were asked for; at most 1048576
search mlp -p 4 -b 7 | a batch of 7 cannot be split over 4 devices: .*such as 8.*--keep-batch
search mlp -p 4 -b {30 nines} | model 'mlp': batch=9+ is not usable; expected a whole number from 1 to
search mlp -p 4 -b 8 --arg batch=8 | the batch of model 'mlp' is given twice
search mlp -p 4 --arg layer=3 | model 'mlp' has no parameter 'layer': did you mean 'layers'
search mlp -p 4 --arg layers=0 | model 'mlp': layers=0 is not usable; expected a whole number from 1
search mlp -p 4 --arg layers= | model 'mlp': layers='' is not usable
search alexnet -p 4 --arg image=6 | layer 'conv1': a window of 11 does not fit
search mlp -p 4 --machine 1080tii | unknown machine '1080tii': did you mean '1080ti'
search mlp -p 4 --machine none.toml | machine file none.toml cannot be read
search mlp -p 4 --flops 0 | FLOP/s of 0 is not possible; expected a number above 0
search mlp -p 4 --flops nan | FLOP/s of nan is not possible
search mlp -p 4 --bandwidth inf | bandwidth of inf is not possible
search mlp -p 4 --flops 1e308 --bandwidth 1e-300 | layer costs .* hold NaN; every cost must be
search mlp -p 4 --time-limit nan | the time limit is nan s; give a positive number
search mlp -p 4 -o missing/plan.json | missing/plan.json cannot be written: folder missing does not exist
search mlp -p 4 -o . | \. is a folder; name a file to write to
search mlp -p 4 -o file/plan.json | file/plan.json cannot be written: folder file does not exist
search mlp -p 4 -o {300 nines} | 9+ cannot be used: File name too long
run {300 nines} -p 4 | unknown model '9+
run none.json | plan file none.json cannot be read: No such file or directory
run mlpp -p 4 | unknown model 'mlpp': did you mean 'mlp'
run file | file is no plan: it is not JSON; a plan is what 'pase search MODEL
run lenet5 -p 2 --data mnist | data 'mnist': mnist needs a path; expected mnist:FOLDER
run lenet5 -p 2 --data mnist:none | .*none does not exist; expected the folder of the MNIST files
run mlp -p 4 -b 8 --virtual | --virtual is for GPUs, and CPU devices are virtual as they are; leave it out
emit {300 nines} | there is no plan file '9+…', and no built-in network of that name either
emit none.json | plan file none.json cannot be read: No such file or directory
emit file | file is no plan: it is not JSON; a plan is what 'pase search MODEL
emit none.json -o missing/train.py | missing/train.py cannot be written: folder missing does
tables mlp -p 4 -o missing/t.npz | missing/t.npz cannot be written: folder missing does
tables mlpp -p 4 -o t.npz | unknown model 'mlpp': did you mean 'mlp'
tables mlp -p 1000003 -o t.npz | no layer of 'mlp' can be split over 1000003 devices
solve none.npz | none.npz: cannot be read: No such file or directory
solve . | \.: cannot be read: Is a directory
solve file | file: cannot be read: File is not a zip file; expected a complete \.npz file
machines --show 3080ti | unknown machine '3080ti': did you mean
evaluate alexnet owtt -p 8 | unknown scheme 'owtt': did you mean 'owt'\?
evaluate alexnet missing.toml -p 8 | strategy file missing.toml cannot be read
compare alexnet -p 8 --only megatrom | unknown baseline 'megatrom': did you mean 'megatron'
compare alexnet -p 8 --coldness -1 | coldness -1.0 is not usable; expected a number of 0 or more
compare alexnet -p 8 --coldness nan | coldness nan is not usable
compare alexnet -p 8 -b 7 | a batch of 7 cannot be split over 8 devices
compare alexnet -p 8 --machine abacus | unknown machine 'abacus'
compare alexnet -p 8 -o missing/plans | folder missing/plans cannot be made: No such file
compare alexnet -p 8 -o file | folder file cannot be made: File exists
export missing.json --to csv | plan file missing.json cannot be read: No such file or directory$
export plan.json --to csv -o no/x.csv | no/x.csv cannot be written: folder no does not exist
export plan.json --to csv -o . | . is a folder
explain plan.json fc9 | unknown layer 'fc9': did you mean 'fc
report missing.json | plan file missing.json cannot be read: No such file or directory
report plan.json -o nowhere/page.html | nowhere/page.html cannot be written: folder nowhere does not exist
report plan.json -o . | \. is a folder; name a file to write to
report plan.json --sweep many | 'many' says no numbers of devices; expected 1..64
simulate plan.json --machine 1080 | unknown machine '1080': did you mean '1080ti'
simulate plan.json --trace missing/step.json | missing/step.json cannot be written: folder missing does not exist
simulate none.json | plan file none.json cannot be read
calibrate --virtual | --virtual is for GPUs, and CPU devices are virtual as they are
calibrate -o nowhere/machine.toml | nowhere/machine.toml cannot be written: folder nowhere does not exist; make it first
calibrate --machine v100 | --machine is for --kernels, which keeps a machine's links; without, links are measured
train mlp --algorithm easgd | unknown algorithm 'easgd': did you mean 'sync-easgd3' or
train mlp --momentum 0.5 | sync-easgd3 takes no --momentum; async-measgd and async-msgd do: leave it out
train mlp --average | sync-easgd3 takes no --average; sync-sgd does: leave it out
train mlp --algorithm async-sgd --rho 1 | async-sgd takes no --rho; original-easgd,
train mlp --algorithm async-sgd --reduction tree | async-sgd takes no --reduction; sync-easgd1,
train mlp --workers 2 --algorithm async-sgd --arrivals 0,2 | arrivals name worker 2; expected 0 to 1, the first
train mlp --seed -1 | the seed is -1; expected 0 to
train mlp --data nowhere.npz | there are no data 'nowhere.npz'; expected digits, mnist:FOLDER, cifar10:PATH,
train mlp --test-every 2 | --test-every needs data to test on: --test-data PATH, or --data that have a test
train mlp --until-accuracy 0.5 | --until-accuracy needs --test-every K, how often to look, and data to test on
train mlp --resume | --resume and --save-every need --checkpoint DIR, the folder of the checkpoints
train mlp --save-every 3 | --resume and --save-every need --checkpoint DIR, the folder of the checkpoints
train mlp --checkpoint kept --save-every 0 | save-every is 0; expected 1 or more
train mlp --checkpoint . --resume nowhere | cannot read checkpoint nowhere
train mlp --virtual | --virtual is for GPUs, and CPU devices are virtual as they are
train mlp --machine nothing | unknown machine 'nothing'
train mlp --workers 2 --processes 0 | 0 processes were asked for, for 2 workers; expected 1 to 2
train mlp --trace trace.npz --processes 2 | --trace is of a training in one process: leave out --processes$
easgd-model --network googlnet | unknown model 'googlnet': did you mean 'googlenet'
easgd-model --workers 0 | 0 workers were asked for; expected a whole number from 1 to 1048576
easgd-model --machine cori-knl --workers 10000 | machine cori-knl: levels\[0\]\.devices
integrated alexnet -p 8 --grid 2x3 | a grid of 2x3 has 6 processes, not 8; possible are 1x8
integrated alexnet -p 8 -b 4 --grid 1x8 | a batch of 4 cannot be shared by the 8
integrated alexnet -p 8 -b {400 nines} | a batch of 9+…9+ was asked for; .* up to 1099511627776
integrated alexnet -p 8 --convention group=no | unknown convention 'group': did you mean
integrated alexnet -p 8 --convolutions 2x2 | a grid of 2x2 has 4 processes, not 8
halo --extent 4 --kernel 5 --workers 3 | a kernel that reaches over 5 points .* use a smaller one
halo --extent 4 --kernel 2 --dilation 4 --workers 3 | .* reaches over 5 points \(kernel 2, dilation 4\)
halo --extent 4 --kernel 1 --workers 9999999 | 9999999 workers were asked for; expected 1 to 1048576
halo --extent 4 --kernel {30 nines} --workers 3 | 9{30} points are too many
""")
"""What is typed where `file` is a text and `plan.json` a plan, and what is said of it."""

AT_FAULT_IN_A_PROGRAM = _rows(r"""
run lenet5 -p 2 --data cifar11:x | .*expected an .npz file written by numpy.savez
""")
"""What the program says, which is a process with TensorFlow: test_run_emit.py has one that is refused for its GPUs."""


@pytest.mark.parametrize(
    ("command", "message"),
    [*AT_FAULT, *(pytest.param(*row, marks=pytest.mark.full) for row in AT_FAULT_IN_A_PROGRAM)],
)
def test_an_input_at_fault_has_status_1(
    command: str, message: str, pase: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("what is this?", encoding="utf-8")
    write_plan(tiny_plan(), tmp_path / "plan.json")
    _assert_refused(pase(*_words(command)), 1, message)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "plan.json"]


WRONG_USAGE = _rows(r"""
sarch | unknown command 'sarch': did you mean 'search'.*known commands are .*emit
'\x1b[31mx' | unknown command '.x1b\[31mx'
search | Missing argument 'MODEL'
search mlp | Missing option '--devices' / '-p'
search mlp -p 0 | Invalid value for '--devices' / '-p': 0 is not in the range x>=1
search mlp -p -3 | Invalid value for '--devices' / '-p': -3 is not in the range x>=1
search mlp -p 7.5 | Invalid value for '--devices' .*'7.5' is not .*; expected a whole number of 1
search mlp -p 1e3 | Invalid value for '--devices' .*'1e3' is not .*; expected a whole number
search mlp -p eight | Invalid value for '--devices' .*'eight' is not .*; expected a whole number
search mlp -p ٣ | Invalid value for '--devices' .*; expected a whole number
search mlp -p {5000 nines} | Invalid value for '--devices' .*; expected a whole number
search mlp -p '' | Invalid value for '--devices' .*'' is not usable; expected a whole number
search mlp -p 4 -b 0 | Invalid value for '--batch' / '-b': 0 is not in the range x>=1
search mlp -p 4 --arg layers | Invalid value for '--arg': 'layers' is not of the form KEY=VALUE
search mlp -p 4 --arg =3 | Invalid value for '--arg': '=3' is not of the form KEY=VALUE
search mlp -p 4 --arg a=1 --arg a=2 | Invalid value for '--arg': 'a' is given twice
search mlp -p 4 --cost-model x | Invalid value for '--cost-model': 'x' is not
search mlp -p 4 --ordering genseq | Invalid value for '--ordering': 'genseq' is not one of .*'generate_seq'
search mlp -p 4 --time-limit 0 | Invalid value for '--time-limit': 0.0 is not in the range x>0
search mlp -p 4 --memory-limit 0 | Invalid value for '--memory-limit': '0' is not a size; .* 800MB or 2GiB
search mlp -p 4 --memory-limit -1GB | Invalid value for '--memory-limit': '-1GB' is not a size
search mlp -p 4 --memory-limit '2 hogs' | Invalid value for '--memory-limit': '2 hogs' is not a size
search mlp -p 4 --memory-limit 0.1B | Invalid value for '--memory-limit': '0.1B' is not a size
search mlp -p 4 --memory-limit {400 nines} | Invalid value for '--memory-limit': '9+' is not a size
search mlp -p 4 --memory-per-device '' | .* is not a size; expected a number of bytes or one with a unit
search mlp -p 4 --memory-per-device machines | .* is not a size; expected a number of bytes or one with a unit
search mlp -p 4 --flops fast | Invalid value for '--flops': 'fast' is not a valid float
search mlp -p 4 --jsn | No such option '--jsn'
search mlp -p 4 '--\x1b[31m\n' | No such option '--.x1b\[31m
search mlp -p 4 extra | Got unexpected extra argument \(extra\)
tables mlp -p 4 | Missing option '--output' / '-o'
tables mlp -p 4 -o t.json | -o t.json: the file's ending must be .npz or .cfn
solve | Missing argument 'TABLES'
emit | Missing argument 'PLAN\|MODEL'
report | Missing argument
run | Missing argument 'PLAN\|MODEL'
run mlp | --devices is needed to search a strategy for model 'mlp'
run mlp -p 4 --steps 0 | Invalid value for '--steps': 0 is not in the range x>=1
run mlp -p 4 --device TPU | Invalid value for '--device'
run mlp -p 4 --device GPU --gpu-memory 0 | Invalid value for '--gpu-memory'
export | Missing argument 'PLAN\|MODEL'
export plan.json --to cvs | .*'cvs' is not one of 'csv', 'dot',
simulate plan.json --collectives rings | .*'rings' is not one of
evaluate alexnet owt | --devices is needed: strategy 'owt' does not say how many there are
diff owt optimal | --model is needed: neither of the two is a plan
diff owt optimal --model alexnet | --devices is needed
compare alexnet -p 8 --steps -1 | .*--steps
compare alexnet -p 8 --seed many | .*--seed
calibrate --devices 1 | .*1 is not in the range x>=2
calibrate --devices two | .*'two' is not usable; expected a whole number of 2 or more
calibrate --device TPU | .*'TPU' is not one of 'CPU', 'GPU'
completion tcsh | .*'bash', 'zsh', 'fish'
train | Missing argument 'MODEL\|PLAN\|train.py'
train mlp --arrivals 0,x | .*'0,x' is not a list of numbers; expected one such as 1,2,4,8
train mlp --arrivals {5000 nines} | .*is not a list of numbers; expected one such as 1,2,4,8
train mlp --reduction ring | Invalid value for '--reduction'
easgd-model --workers {65 numbers} | .*there are 65 numbers; expected 64 at most
easgd-model --workers '' | .*'' is not a list of numbers
easgd-model --algorithm easgd | .*'easgd' is not one of 'original-easgd-star', 'original-easgd'
easgd-model --iteration-time 0 | .*0\.0 is not possible; expected a number of seconds above 0
easgd-model --iteration-time nan | .*nan is not possible
easgd-model --iterations 0 | .*0 is not in the range
integrated alexnet | Missing option '--processes'
integrated alexnet -p 8 --version 3 | .*'3' is not one of '1', '2'
integrated alexnet -p 8 --convention grouped | .*'grouped' is not of the form NAME=yes or NAME=no
integrated alexnet -p 8 --overlap | .*--overlap needs --compute-time
integrated alexnet -p 8 --compute-time -1 | .*-1.0 is not in the range x>=0
integrated alexnet -p 8 --compute-time 32=1,8=2 | .*expected each batch once, in ascending order
integrated alexnet -p 8 --compute-time 8=0 | .*0.0 is not in the range x>0
halo --extent 4 --kernel 0 --workers 3 | Invalid value for '--kernel': 0 is not in the range x>=1
halo --extent 4 --kernel 1 --workers two | .*'--workers': 'two' is not usable; expected a whole number of 1
halo --extent 4 --kernel 1 --workers 2 --padding -1 | .*'--padding': -1 is not in the range x>=0
halo --extent 4 --kernel 1 | Missing option '--workers'
""")


@pytest.mark.parametrize(("command", "message"), WRONG_USAGE)
def test_wrong_usage_has_status_2(
    command: str, message: str, pase: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _assert_refused(pase(*_words(command)), 2, message)
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
