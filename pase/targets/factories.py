"""`Factory`: names the function that makes a PyTorch module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pase.graph import Scalar
from pase.planning.plan import Plan

Progress = Callable[[str, int, int], None]
"""Called with the current activity, the number of completed steps, and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """A function that makes a PyTorch module and its inputs, package.module:function, and its arguments."""

    name: str
    batch: int | None = None
    arguments: Mapping[str, Scalar] = field(default_factory=dict)


def factory_of(plan: Plan, name: str) -> Factory:
    """Return the factory of this name, package.module:function, with the arguments that a plan's model was made with.

    The user names the function: a plan, which may come from a stranger, only gives the arguments, never code.
    """
    arguments = dict(plan.graph.arguments)
    batch = arguments.pop("batch", None)
    return Factory(name=name, batch=batch if isinstance(batch, int) else None, arguments=arguments)
