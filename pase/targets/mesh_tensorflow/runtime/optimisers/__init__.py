"""Update rules of our own, by name; `pase.targets.mesh_tensorflow.runtime.updates` applies them shard by shard."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any

from pase.errors import RuntimeFailure, unknown_name
from pase.targets.mesh_tensorflow.runtime.optimisers.adafactor import Adafactor
from pase.targets.mesh_tensorflow.runtime.optimisers.adam import Adam, AdamW
from pase.targets.mesh_tensorflow.runtime.optimisers.rule import Maths, Rule
from pase.targets.mesh_tensorflow.runtime.optimisers.sgd import Momentum, Sgd

OPTIMISERS: Mapping[str, Any] = MappingProxyType(
    {"sgd": Sgd, "momentum": Momentum, "adam": Adam, "adamw": AdamW, "adafactor": Adafactor}
)

__all__ = ["OPTIMISERS", "Maths", "Rule", "make_rule", "name_of", "options_of"]


def make_rule(name: str, options: Mapping[str, float | bool | None]) -> Rule:
    """Return an update rule; options that are None keep their defaults.

    Raises RuntimeFailure for an unknown name, an option that the rule has not, a value out of range.
    """
    if name not in OPTIMISERS:
        raise RuntimeFailure(unknown_name("optimiser", name, OPTIMISERS))
    known = [field.name for field in fields(OPTIMISERS[name])]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in known:
            takers = [other for other, rule in OPTIMISERS.items() if option in {field.name for field in fields(rule)}]
            raise RuntimeFailure(
                f"optimiser {name} has no {option.replace('_', ' ')}; it has {', '.join(known).replace('_', ' ')}"
                + (f"; {' and '.join(takers)} would" if takers else "")
            )
    rule: Rule = OPTIMISERS[name](**given)
    return rule


def name_of(rule: Rule) -> str:
    """Return the name of a rule."""
    return next(name for name, kind in OPTIMISERS.items() if type(rule) is kind)


def options_of(rule: Rule) -> dict[str, float | bool]:
    """Return the options of a rule, for a record."""
    return asdict(rule)  # type: ignore[call-overload,no-any-return]
