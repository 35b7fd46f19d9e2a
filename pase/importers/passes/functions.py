"""Names of what several pointwise functions are together."""

from collections import Counter

_SIMPLE = frozenset({"add", "subtract", "multiply", "divide", "power"})


def named_function(functions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name of a well-known function that these single steps spell out; the steps where it is none."""
    count = Counter(functions)
    others = {name for name in functions if name not in _SIMPLE}
    match sorted(others):
        case ["erf"] | ["erfc"] if count["multiply"] >= 2:
            return ("gelu",)
        case ["tanh"] if count["multiply"] >= 3 and count["add"] >= 2:
            return ("gelu_tanh",)
        case ["sigmoid"] if functions[-1] == "multiply" and len(functions) <= 3:
            return ("silu",)
        case ["softplus", "tanh"] if functions[-1] == "multiply":
            return ("mish",)
        case ["relu6"] if {"add", "multiply"} <= set(functions):
            return ("hard_swish",)
        case ["clip"] if {"add", "multiply"} <= set(functions):
            return ("hard_swish",)
        case _:
            return functions
