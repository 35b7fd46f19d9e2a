"""The verbs and flags: what scripts of others rely on."""

import re
import shlex

import click
import pytest

from pase import __version__
from pase.cli.main import COMMANDS, cli
from tests.cli.conftest import Command

MODEL = ["model", "--devices -p !", "--batch -b", "--arg", "--machine", "--flops", "--bandwidth", "--precision"]
OF_MODEL = ["--devices -p", *MODEL[2:]]
"""Of commands that take a plan or a model."""
SOLVER = ["--ordering", "--time-limit", "--memory-limit"]

# To add a verb or a flag, add it here. To rename or remove one breaks what others have written.
SURFACE = {
    "search": [
        *(*MODEL, "--cost-model", *SOLVER, "--explain-ordering", "--keep-batch", "--strict"),
        *("--memory-per-device", "--optimizer"),
        *("--micro-batches", "--stages", "--schedule", "--modes", "--imbalance", "--attention", "--jobs", "--gap"),
        "--simplify",
        *("--pin", "--forbid", "--tie", "--mesh", "--devices-of", "--constraints"),
        "--constraints-schema",
        "--all-layers",
        *("--output -o", "--json"),
    ],
    "evaluate": [
        *("strategy", *("--devices -p" if flag == "--devices -p !" else flag for flag in MODEL)),
        *("--cost-model", "--optimizer", "--time-limit", "--output -o", "--json"),
    ],
    "diff": ["first", "second", "--model", *OF_MODEL, "--cost-model", "--json"],
    "compare": [
        *(*MODEL, "--cost-model", "--only", "--seed", "--steps", "--start", "--coldness"),
        *("--memory-per-device", "--optimizer"),
        *("--micro-batches", "--stages", "--schedule", "--modes", "--keep-batch"),
        *("--output -o", "--json"),
    ],
    "explain": [
        "plan",
        *OF_MODEL,
        "layer ?",
        "--why",
        "--sensitivity",
        "--schemes",
        "--all-layers",
        "--time-limit",
        "--json",
    ],
    "export": ["plan", *OF_MODEL, "--to !", "--output -o", "--fold", "--schema", "--json"],
    "report": [
        *("plans", *OF_MODEL, "--output -o", "--sweep", "--why", "--interactive"),
        *("--cost-model", "--micro-batches", "--stages", "--schedule", "--modes", "--time-limit", "--json"),
    ],
    "serve": [
        *("plan", *OF_MODEL),
        *("--cost-model", "--micro-batches", "--stages", "--schedule", "--modes", "--port", "--time-limit"),
    ],
    "simulate": ["plan", *OF_MODEL, "--collectives", "--no-overlap", "--trace", "--json"],
    "emit": ["plan", *OF_MODEL, "--output -o", "--target", "--json"],
    "weights": ["model", "--batch -b", "--arg", "--output -o !", "--json"],
    "run": [
        "plan_or_model",
        "--model",
        *("--devices -p" if flag == "--devices -p !" else flag for flag in MODEL[1:]),
        *(
            "--target",
            "--steps",
            "--dtype",
            "--seed",
            "--data",
            "--test-data",
            "--weights",
            "--test-every",
            "--measure",
        ),
        "--json",
        *("--optimizer", "--momentum", "--nesterov", "--weight-decay", "--beta1", "--beta2", "--epsilon"),
        *("--learning-rate", "--schedule", "--warmup-steps", "--schedule-steps", "--final-learning-rate"),
        *("--decay-every", "--decay-factor"),
        *("--device", "--virtual", "--gpu-memory"),
    ],
    "check": ["model_name", "plan ?", *OF_MODEL, "--seed", "--all", "--json"],
    "train": [
        *("source", "--algorithm", "--workers", "--steps", "--learning-rate", "--rho", "--momentum", "--average"),
        *("--arrivals", "--reduction", "--packed"),
        *("--data", "--data-split", "--test-data", "--test-every", "--until-accuracy", "--seed", "--dtype"),
        *("--checkpoint", "--save-every", "--keep", "--resume", "--metrics", "--trace", "--report-every", "--json"),
        *("--processes", "--timeout"),
        *("--devices -p" if flag == "--devices -p !" else flag for flag in MODEL[1:] if flag != "--precision"),
        *("--device", "--virtual", "--gpu-memory"),
    ],
    "solve": ["tables", *SOLVER, "--export", "--json"],
    "tables": [*MODEL, "--cost-model", "--keep-batch", "--output -o !", "--json"],
    "models": ["--json"],
    "inspect": ["model", "--batch -b", "--arg", "--strict", "--all", "--json"],
    "machines": ["--show", "--schema", "--json"],
    "calibrate": [
        *("--devices -p", "--device", "--virtual", "--gpu-memory", "--quick", "--kernels", "--machine", "--output -o"),
        "--json",
    ],
    "easgd-model": [
        *("--network", "--workers", "--machine", "--algorithm", "--packed", "--iteration-time", "--iterations"),
        *("--batch -b", "--arg", "--paper", "--json"),
    ],
    "integrated": [
        *("model", "--processes -p !", "--batch -b", "--arg", "--grid", "--convolutions", "--per-layer", "--memory"),
        *("--version", "--machine", "--convention", "--compute-time", "--overlap", "--samples", "--json"),
    ],
    "halo": ["--extent !", "--kernel !", "--stride", "--dilation", "--padding", "--workers !", "--json"],
    "doctor": ["--json"],
    "completion": ["shell"],
}


def _command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def _flag(parameter: click.Parameter) -> str:
    """Return an argument's name, with a mark where it may be left out, or an option's flags, where it must be given."""
    if isinstance(parameter, click.Argument):
        assert parameter.name
        return parameter.name if parameter.required else f"{parameter.name} ?"
    return " ".join([*parameter.opts, "!"] if parameter.required else parameter.opts)


def test_the_verbs_are_these() -> None:
    assert list(COMMANDS) == list(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_the_flags_are_these(name: str) -> None:
    assert sorted(map(_flag, _command(name).params)) == sorted(SURFACE[name])


@pytest.mark.parametrize("name", SURFACE)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_an_example_that_parses(name: str, flag: str, pase: Command) -> None:
    finished = pase(name, flag)
    assert (finished.status, finished.err) == (0, "")
    assert finished.out.startswith(f"Usage: pase {name} ")
    (example,) = re.findall(rf"^  Example: pase ({name} ?.*)$", finished.out, re.MULTILINE)
    verb, *arguments = shlex.split(example)
    with _command(verb).make_context(verb, arguments) as context:
        assert context.args == []
    assert max(map(len, finished.out.splitlines())) <= 80


@pytest.mark.parametrize("name", SURFACE)
def test_every_option_is_explained(name: str) -> None:
    """An option says what it is; one whose name, with its choices or its default, says it all need not."""
    for parameter in _command(name).params:
        if isinstance(parameter, click.Option):
            says_all = isinstance(parameter.type, click.Choice) or parameter.show_default
            assert parameter.help or says_all, parameter.name


def test_the_help_of_the_program_lists_every_verb(pase: Command) -> None:
    finished = pase("--help")
    assert finished.status == 0
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{text[:30]}", finished.out, re.MULTILINE)
    assert "pase search alexnet --devices 8" in finished.out


def test_without_a_verb_the_help_is_shown_as_wrong_usage(pase: Command) -> None:
    finished = pase()
    assert (finished.status, finished.out) == (2, "")
    assert finished.err.startswith("Usage: pase ")


def test_the_version_is_that_of_the_package(pase: Command) -> None:
    assert pase("--version").out == f"pase, version {__version__}\n"
