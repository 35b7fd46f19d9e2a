"""`pase check`: compare a PyTorch module under a plan with the module itself."""

from dataclasses import asdict, replace
from math import isfinite

import click

from pase.cli.main import EXIT_INPUT
from pase.cli.options import (
    ModelArguments,
    checked_factory,
    chosen_plan,
    complete_models,
    flag,
    given_plan,
    json_option,
    model_options,
)
from pase.cli.output import print_json, print_table, say, warn
from pase.cli.progress import progress
from pase.common.options import WholeNumber, option
from pase.targets.check import DEFAULT_DEVICES, check_factory
from pase.targets.differences import CheckResult, Difference
from pase.targets.factories import Factory, factory_of

_FEW_ROWS = 20
"""Number of differences to print, of the first run; tensors computed from a wrong tensor are wrong, too."""

_HEADERS = ("<what differs", "<source", "<when", "under the plan", "module", "difference", "rounding")


@click.command("check", epilog="Example: pase check my_models:make --devices 4")
@click.argument("model_name", metavar="MODEL", shell_complete=complete_models)
@click.argument("plan", metavar="PLAN", required=False, type=click.Path())
@model_options()
@option("--seed", type=WholeNumber(min=0), default=0, help="Of weights, and of inputs of one value throughout.")
@flag("--all", "shows_all", help=f"Print all differences, not the first {_FEW_ROWS} of the first run.")
@json_option
def check_command(
    model_name: str, plan: str | None, model: ModelArguments, seed: int, shows_all: bool, as_json: bool
) -> int:
    """Compare MODEL, package.module:factory of a PyTorch module, under PLAN with the module itself.

    Without PLAN, a file, it is the best one for --devices [2]. What is compared: the forward pass, all gradients,
    buffers and two steps of an optimizer; in training and in evaluation; in float64 and in the module's own types; on
    one device and on that many local processes. What differs by more than rounding is printed, most upstream first,
    and the exit status is 1. Dropout keeps every point for it.
    """
    checked_factory(model_name)
    with progress() as on_progress:
        if plan is None:
            devices = DEFAULT_DEVICES if model.num_devices is None else model.num_devices
            chosen = chosen_plan(model_name, replace(model, num_devices=devices), on_progress)
            factory = Factory(name=model_name, batch=model.batch, arguments=model.arguments)
        else:
            chosen = given_plan(plan, model)
            factory = factory_of(chosen, model_name)

        def report(what: str, done: int, total: int) -> None:
            on_progress(what, done / total)

        result = check_factory(factory, chosen, seed=seed, on_progress=report)
    if as_json:
        print_json(_document(result))
    else:
        _print_result(result, shows_all=shows_all)
    if result.is_equal:
        return 0
    warn(result.summary)
    return EXIT_INPUT


def _document(result: CheckResult) -> dict[str, object]:
    differences = []
    for each in result.differences:
        numbers = {name: getattr(each, name) for name in ("found", "expected", "relative", "explained")}
        # JSON has no others.
        finite = {name: number if isfinite(number) else None for name, number in numbers.items()}
        differences.append({**asdict(each), **finite})
    runs = [{**asdict(run), "compared": count} for run, count in result.compared.items()]
    return {
        "is_equal": result.is_equal,
        "differences": differences,
        "refused": [{**asdict(run), "problem": problem} for run, problem in result.refused.items()],
        "not_compared": result.not_compared,
        "notes": result.notes,
        "runs": runs,
    }


def _print_result(result: CheckResult, *, shows_all: bool) -> None:
    for origin in result.origins():
        say(f"it begins here: {origin.text}")
    differing = result.differing()
    for number, (run, own) in enumerate(differing.items()):
        say(f"{run.text}: {len(own):,} of {result.compared[run]:,} tensors differ")
        if number and not shows_all:
            continue
        shown = own if shows_all else own[:_FEW_ROWS]
        rows = [
            (each.what, each.line, each.when, *(f"{x:.6g}" for x in (each.found, each.expected)), *_shares(each))
            for each in shown
        ]
        print_table(_HEADERS, rows)
        say()
    if len(result.differences) > _FEW_ROWS and not shows_all:
        say("The first one is the nearest to the cause; --all prints every one.")
    for title, texts in (("refused", result.refusals()), ("not compared", result.not_compared), ("note", result.notes)):
        for text in texts:
            say(f"{title}: {text}")
    if result.is_equal:
        say(result.summary)


def _shares(difference: Difference) -> tuple[str, str]:
    return f"{difference.relative:.1e}", f"{difference.explained:.1e}"
