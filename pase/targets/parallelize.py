"""`parallelize`: run a model of a framework under a plan."""

import sys
from importlib import import_module
from typing import Any

from pase.errors import ProgramError
from pase.planning.plan import Plan


def parallelize(model: Any, plan: Plan, **options: Any) -> Any:
    """Return a model that computes the same as the given one, with every layer distributed as in a plan.

    Args:
        model: A `torch.nn.Module`; the result is then a module, this process's part of it. Or a JAX function, a flax
            module or an equinox model; the result is then a function for `jax.jit`, `jax.grad` and so on. JAX models
            may
            be given with their arguments, or the shapes of these, as a tuple: (function, parameters, inputs…).
        plan: Plan of the model.
        options: Options of `pase.targets.torch.parallel.parallelize` or `pase.targets.jax.parallel.parallelize`.

    Raises:
        PaseError: The model is of another kind, or the plan is for another model or number of devices.
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
    """Return the framework of a model; "" if none can run it."""
    first = model[0] if isinstance(model, tuple) and model else model
    packages = {cls.__module__.partition(".")[0] for cls in type(first).__mro__}
    if "torch" in packages:
        return "torch"
    is_function = callable(first) and not isinstance(first, type) and packages.isdisjoint({"keras", "tensorflow"})
    return "jax" if is_function and "jax" in sys.modules else ""
