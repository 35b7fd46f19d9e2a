"""Parameters of a network's builder: read from its signature, converted from text, checked, recorded in the graph."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Annotated, ParamSpec, get_args, get_origin, get_type_hints

from pase.errors import GraphError, ModelError
from pase.graph import Graph
from pase.graph.operator import Scalar

P = ParamSpec("P")

IMAGE = "image"
"""Parameter for the side length of images, in points."""

LARGEST_TRIED = 512
"""Image sizes up to this are tried, to report which ones a network accepts."""

LARGEST_EXTENT = 2**31 - 1
LARGEST_DEPTH = 10_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Range of an integer parameter, both ends included."""

    least: int = 1
    most: int = LARGEST_EXTENT


Depth = Annotated[int, Bounds(1, LARGEST_DEPTH)]
"""Number of repetitions of a block; bounded, so that a typing error does not exhaust the memory."""

DepthOrNone = Annotated[int, Bounds(0, LARGEST_DEPTH)]
"""As `Depth`, where the block may be omitted."""

Zeros = Annotated[int, Bounds(0, LARGEST_DEPTH)]
"""Width of the zero padding of an image."""

Depths = Annotated[tuple[int, ...], Bounds(1, LARGEST_DEPTH)]
"""Numbers of repetitions of each stage's block, written ``3,4,23,3``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a builder; kind: int, bool, float (a rate) or tuple (of whole numbers). default: as written."""

    name: str
    kind: type
    default: Scalar
    bounds: Bounds = Bounds()


def network(build: Callable[P, Graph]) -> Callable[P, Graph]:
    """Decorate a builder: every argument is converted and validated by its annotation, and recorded in the graph.

    Text is parsed as on a command line: ``96``, ``true``, ``3,4,23,3``. The builder raises ModelError for an argument
    of another type, or out of range.
    """

    @wraps(build)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Graph:
        bound = inspect.signature(build).bind(*args, **kwargs)
        bound.apply_defaults()
        for parameter in parameters_of(build):
            given = bound.arguments[parameter.name]
            bound.arguments[parameter.name] = _CONVERTERS[parameter.kind](parameter, given, build.__name__)
        try:
            graph = build(*bound.args, **bound.kwargs)
        except GraphError as error:
            if IMAGE not in bound.arguments:
                raise
            raise GraphError(f"{error}; {_other_images(build, bound)}") from None
        return replace(graph, arguments=tuple((name, as_scalar(value)) for name, value in bound.arguments.items()))

    return checked


def _other_images(build: Callable[P, Graph], bound: inspect.BoundArguments) -> str:
    """Describe which image sizes near the given one a network accepts."""
    given = bound.arguments[IMAGE]

    def works(size: int) -> bool:
        bound.arguments[IMAGE] = size
        try:
            build(*bound.args, **bound.kwargs)
        except GraphError:
            return False
        return True

    larger = next(filter(works, range(given + 1, max(given, LARGEST_TRIED) + 1)), None)
    if larger is None:
        return f"no image of up to {LARGEST_TRIED} points a side works with these arguments"
    return f"images of {given} points a side are too small for it, those of {larger} are not: --arg {IMAGE}={larger}"


def parameters_of(builder: Callable[..., Graph]) -> tuple[Parameter, ...]:
    """Return the parameters of a builder, batch first, in the order of its signature."""
    hints = get_type_hints(builder, include_extras=True)
    found = []
    for name, parameter in inspect.signature(builder).parameters.items():
        hint, bounds = hints[name], Bounds()
        if get_origin(hint) is Annotated:
            hint, bounds = get_args(hint)
        kind = get_origin(hint) or hint
        assert kind in _CONVERTERS, f"parameter {name} of {builder.__name__} is annotated {hint}"
        found.append(Parameter(name=name, kind=kind, default=as_scalar(parameter.default), bounds=bounds))
    return tuple(found)


def check_names(builder: Callable[..., Graph], model: str, names: Iterable[str]) -> None:
    """Raise ModelError for a name that is not a parameter of the builder; lists the nearest and all valid ones."""
    parameters = {parameter.name: parameter for parameter in parameters_of(builder)}
    for name in names:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            valid = ", ".join(f"{parameter.name}={written(parameter.default)}" for parameter in parameters.values())
            raise ModelError(
                f"model {model!r} has no parameter {name!r}: {hint}its parameters and their defaults are {valid}"
            )


def as_scalar(value: object) -> Scalar:
    """Return a value as it is recorded: a tuple as text ``3,4,23,3``, anything else unchanged."""
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    assert isinstance(value, Scalar)
    return value


def divided(count: int, divisor: int) -> int:
    """Return count / divisor, for a network made narrower; ModelError where it does not divide."""
    if count % divisor:
        raise ModelError(f"width={divisor} does not divide {count} channels; use a power of two that does")
    return count // divisor


def head_size(model_width: int, heads: int) -> int:
    """Return the channels of one attention head; ModelError where the heads do not divide the model's width."""
    if model_width % heads:
        raise ModelError(f"heads={heads} does not divide model_width={model_width}; every head needs as many channels")
    return model_width // heads


def written(value: Scalar) -> str:
    """Return a value as a user writes it on the command line: true rather than True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refused(parameter: Parameter, value: object, model: str, expected: str) -> ModelError:
    return ModelError(
        f"model {model!r}: {parameter.name}={value} is not usable; expected {expected} "
        f"(the default is {written(parameter.default)})"
    )


def _whole_number(parameter: Parameter, value: object, model: str) -> int:
    bounds = parameter.bounds
    expected = f"a whole number from {bounds.least} to {bounds.most}"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _refused(parameter, value, model, expected)
    try:
        number = int(value)
    except ValueError:
        raise _refused(parameter, repr(value), model, expected) from None
    if not bounds.least <= number <= bounds.most:
        raise _refused(parameter, number, model, expected)
    return number


def _truth(parameter: Parameter, value: object, model: str) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "false": False}
    word = value.lower() if isinstance(value, str) else ""
    if word not in words:
        raise _refused(parameter, repr(value), model, "true or false")
    return words[word]


def _rate(parameter: Parameter, value: object, model: str) -> float:
    expected = "a number from 0 to below 1"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refused(parameter, value, model, expected)
    try:
        number = float(value)
    except ValueError:
        raise _refused(parameter, repr(value), model, expected) from None
    if not 0 <= number < 1:
        raise _refused(parameter, number, model, expected)
    return number


def _whole_numbers(parameter: Parameter, value: object, model: str) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) else tuple(str(value).split(","))
    default = parameter.default
    assert isinstance(default, str)
    count = default.count(",") + 1
    if len(items) != count:
        expected = f"{count} whole numbers with commas between them, such as {default}"
        raise _refused(parameter, as_scalar(items), model, expected)
    return tuple(_whole_number(parameter, item, model) for item in items)


_CONVERTERS: Mapping[type, Callable[[Parameter, object, str], int | bool | float | tuple[int, ...]]] = {
    int: _whole_number,
    bool: _truth,
    float: _rate,
    tuple: _whole_numbers,
}
