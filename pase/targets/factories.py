"""`Factory`: what makes a PyTorch module, as whoever runs it names it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pase.graph import Scalar
from pase.planning.plan import Plan

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how many steps are done and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """What makes a PyTorch module and its inputs: package.module:function, and what it is given."""

    name: str
    batch: int | None = None
    arguments: Mapping[str, Scalar] = field(default_factory=dict)


def factory_of(plan: Plan, name: str) -> Factory:
    """Return a factory, package.module:function, with what the model of a plan was made with.

    Whoever runs it names it: a plan, which may be a stranger's file, says which arguments it was given, and no code.
    """
    arguments = dict(plan.graph.arguments)
    batch = arguments.pop("batch", None)
    return Factory(name=name, batch=batch if isinstance(batch, int) else None, arguments=arguments)
