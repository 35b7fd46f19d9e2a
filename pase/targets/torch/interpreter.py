"""`interpret`: runs a function of a program from its statements, without its text."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any

from pase.targets.emitter.statements import RETURN, Call, Function, Statement, Sum, Value
from pase.targets.emitter.text import Text
from pase.targets.torch import TORCH, layers

_NAMES: Mapping[str, Any] = MappingProxyType({name: getattr(layers, name) for name in TORCH.layers})


def interpret(function: Function, program: Any, *given: Any) -> Any:
    """Return the result of a function.

    Args:
        function: The function.
        program: The program on which it declares layers.
        given: Its further arguments.
    """
    names = {**_NAMES, "program": program, **dict(zip(function.parameters, given, strict=True))}
    for statement in function.body:
        if not isinstance(statement, Statement):
            continue
        target, value = statement.target, _computed(statement.value, names)
        if target == RETURN:
            return value
        if isinstance(target, tuple):
            names |= zip(target, value, strict=True)
        elif target is not None:
            names[target] = value
    raise AssertionError(f"{function.name} returns nothing")


def _computed(value: Value, names: Mapping[str, Any]) -> Any:
    match value:
        case Call():
            function = _computed(value.function, names)
            arguments = [_computed(x, names) for x in value.arguments]
            return function(*arguments, **{name: _computed(x, names) for name, x in value.keywords.items()})
        case Sum():
            return reduce(add, [_computed(term, names) for term in value.terms])
        case Text():
            # The emitter generates all names and attributes: text from a plan is always a literal.
            owner, _, attribute = value.partition(".")
            return getattr(names[owner], attribute) if attribute else names[owner]
        case list() | tuple():
            return type(value)(_computed(x, names) for x in value)
        case dict():
            return {name: _computed(x, names) for name, x in value.items()}
    return value
