"""`parallelize`: a model of a framework's own, made to compute under a plan."""

import sys
from importlib import import_module
from typing import Any

from pase.errors import ProgramError
from pase.planning.plan import Plan


def parallelize(model: Any, plan: Plan, **options: Any) -> Any:
    """Return a model that computes as the given one does, with every layer where a plan has it.

    Args:
        model: A `torch.nn.Module`: what is returned is one too, this process's part of it. Or a JAX function, a module
            of flax's or a model of equinox's: what is returned is a function for `jax.jit`, `jax.grad` and the like.
            JAX's may come with its arguments, or their shapes, as a tuple: (function, parameters, inputs…).
        plan: Of the model.
        options: Of `pase.targets.torch.parallel.parallelize` or `pase.targets.jax.parallel.parallelize`.

    Raises:
        PaseError: It is neither, or the plan is of another model, or for another number of devices.
    """
    kind = _framework(model)
    if not kind:
        raise ProgramError(
            f"a {type(model).__name__} cannot be made parallel; give what was searched: a torch.nn.Module, or a JAX "
            "function (a module of flax's, a model of equinox's)"
        )
    found = import_module(f"pase.targets.{kind}.parallel").parallelize
    return found(model, plan, **options)


def _framework(model: Any) -> str:
    """Return the framework that a model is of; "" for none that can run it."""
    first = model[0] if isinstance(model, tuple) and model else model
    packages = {cls.__module__.partition(".")[0] for cls in type(first).__mro__}
    if "torch" in packages:
        return "torch"
    is_function = callable(first) and not isinstance(first, type) and packages.isdisjoint({"keras", "tensorflow"})
    return "jax" if is_function and "jax" in sys.modules else ""
