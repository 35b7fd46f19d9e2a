"""Control flow: loops of a known length, branches whose predicate is known; all else depends on data."""

from collections.abc import Callable
from typing import Any

from pase.errors import ModelError
from pase.importers.ir import Value
from pase.importers.jax.lax.loops import Walk, scan
from pase.importers.jax.lax.places import scopes, where

Control = Callable[[Walk, Any, list[Value], tuple[str, ...]], list[Value]]


def cond(walk: Walk, equation: Any, inputs: list[Value], outer: tuple[str, ...]) -> list[Value]:
    """Take the branch that a known predicate chooses; ModelError where it depends on data."""
    which, *given = inputs
    branches = equation.params["branches"]
    known = walk.known.get(which.name)
    if known is None:
        raise _refused(
            "cond", equation, "chooses between branches by data; write it with jnp.where, or import a branch"
        )
    chosen = branches[min(max(int(known), 0), len(branches) - 1)]
    return walk.inline(chosen, given, (*outer, *scopes(equation)))


def while_loop(walk: Walk, equation: Any, inputs: list[Value], outer: tuple[str, ...]) -> list[Value]:
    """Raise: how often the loop is run depends on data, or is not told."""
    raise _refused(
        "while",
        equation,
        "runs as often as its data says; write it as jax.lax.scan or fori_loop, with a known number of turns",
    )


def _refused(name: str, equation: Any, why: str) -> ModelError:
    return ModelError(f"operator {name} is control flow{where(equation)}: it {why}")


CONTROL: dict[str, Control] = {"scan": scan, "while": while_loop, "cond": cond}
"""Primitives that run programs of their own, perhaps as their data tells."""
