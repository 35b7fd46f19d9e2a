"""`check`: compare a PyTorch module under a plan with the unmodified module, on one device and on local ranks."""

from collections.abc import Sequence
from typing import Any

from pase.errors import ProgramError
from pase.importers import load
from pase.planning.plan import Plan, on_one_device
from pase.planning.planner import search
from pase.targets.differences import CheckResult, result_of
from pase.targets.factories import Factory, Progress
from pase.targets.torch import TORCH

DEFAULT_DEVICES = 2
"""Number of ranks where neither a plan nor a number is given."""


def check(
    module: Any,
    inputs: Any,
    plan: Plan | None = None,
    *,
    loss: Any = None,
    devices: int | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> CheckResult:
    """Compare a PyTorch module under a plan with the module itself, and return all differences.

    The comparison is in float64 and in the module's own types, on one device in this process and on the plan's number
    of local ranks, which are CPU processes; in training and in evaluation. It covers the forward pass, the gradient of
    every parameter, buffers, and the changes made by two optimizer steps. Dropout keeps every point, with its usual
    scale. The module is restored afterwards.

    Args:
        module: The `torch.nn.Module`, with its weights. Ranks import its class, so for more than one device the class
            must be in an importable module, not in the main program.
        inputs: Inputs of one micro-batch: a tensor, a tuple of them, or a dict by name.
        plan: Plan of the module; default: the result of `pase.search` for `devices`.
        loss: Function of the module's result and the targets, which are then the last of the inputs.
        devices: Number of ranks if no plan is given; default: 2.
        seed: Seed of inputs without values.
        on_progress: Called with the current activity, the number of completed parts of the check, and their total.

    Raises:
        ProgramError: The module itself fails, or ranks cannot import it, or this process is one of several ranks.
        PaseError: No plan for the module exists, or the plan is for another number of devices.
    """
    if not hasattr(module, "named_parameters"):
        raise ProgramError(f"a {type(module).__name__} cannot be checked; give a torch.nn.Module, with its inputs")
    source = (module, inputs) if loss is None else (module, inputs, loss)
    if plan is None:
        plan = search(load(source), DEFAULT_DEVICES if devices is None else devices)
    elif devices not in (None, plan.num_devices):
        raise ProgramError(f"the plan is for {plan.num_devices} devices, and devices={devices}; leave that out")
    if plan.num_devices > 1:
        _check_importable(module, loss)
    return _checked(source, plan, seed, on_progress)


def check_factory(factory: Factory, plan: Plan, *, seed: int = 0, on_progress: Progress | None = None) -> CheckResult:
    """Return the result of `check` for the module that a factory makes, package.module:function."""
    return _checked((factory.name, factory.batch, dict(factory.arguments)), plan, seed, on_progress)


def _checked(source: Sequence[Any], plan: Plan, seed: int, on_progress: Progress | None) -> CheckResult:
    TORCH.check()
    from pase.targets.torch.check import check_alone, check_on_rank
    from pase.targets.torch.launch import call

    num_parts = 1 + (plan.num_devices > 1)
    report = on_progress or _silent
    report("comparing on one device", 0, num_parts)
    found = [result_of([check_alone(source, on_one_device(plan), seed)])]
    if plan.num_devices > 1:
        report(f"comparing on {plan.num_devices} local processes", 1, num_parts)
        by_rank = call(check_on_rank, source, plan, seed, ranks=plan.num_devices, device="cpu")
        found.append(result_of(by_rank))
    not_compared = [text for own in found for text in own.not_compared]
    if plan.num_devices > plan.num_groups and not any(
        parts > 1 for layer in plan.layers for parts in layer.splits.values()
    ):
        not_compared.append(f"splits: the plan for {plan.num_devices} devices has every layer whole on each of them")
    return CheckResult(
        differences=tuple(difference for own in found for difference in own.differences),
        refused={run: problem for own in found for run, problem in own.refused.items()},
        not_compared=tuple(dict.fromkeys(not_compared)),
        notes=tuple(dict.fromkeys(note for own in found for note in own.notes)),
        compared={run: count for own in found for run, count in own.compared.items()},
    )


def _check_importable(module: Any, loss: Any) -> None:
    """Raise ProgramError where other processes cannot import a module's classes."""
    for part in (*module.modules(), *([] if loss is None else [loss])):
        kind = part if hasattr(part, "__qualname__") else type(part)
        if kind.__module__ == "__main__":
            raise ProgramError(
                f"{kind.__qualname__!r} is in the main program, which other processes cannot import: put it into a "
                "module of its own, or check it on one device (devices=1)"
            )


def _silent(_what: str, _done: int, _total: int) -> None:
    """Report nothing."""
