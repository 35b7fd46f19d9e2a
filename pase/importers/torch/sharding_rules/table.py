"""`sharding_rule`, and the table of the rules of all operators."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pase.importers.front_end import framework
from pase.importers.torch.sharding_rules import along, layers, points, products, views
from pase.importers.torch.sharding_rules.rule import Call, Rule, Shape, ShardingRule, unknown

RULES: Mapping[str, Rule] = {**points.RULES, **views.RULES, **products.RULES, **along.RULES, **layers.RULES}
"""By the operator's name, without namespace and overload."""

_NAMESPACES = ("aten", "prims")


def sharding_rule(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: object = None) -> ShardingRule:
    """Return how the dims of one call's operands and results correspond.

    Args:
        target: The `OpOverload` that is called.
        args: Its positional arguments. Every object with a shape is a tensor: a real one, a fake one, one on the meta
            device. No value of a tensor is read.
        kwargs: Its arguments by name.
        results: Result of the call, tensors of the same shapes, such as ``node.meta["val"]``. By default the call is
            made on fake tensors; where that is impossible, the rule is unknown.
    """
    try:
        outputs = list(_tensors(results if results is not None else _called(target, args, kwargs)))
    except RuntimeError:
        return unknown(_call(target, args, kwargs, []))
    call = _call(target, args, kwargs, outputs)
    if not all(_is_strided(tensor) for tensor in _tensors([*args, *kwargs.values(), *outputs])):
        return unknown(call)
    try:
        return _function(target)(call)
    except (ValueError, LookupError, ArithmeticError):
        # A form of the call that its family does not expect: shapes that the names of dims do not fit, no such dim.
        return unknown(call)


def _function(target: Any) -> Rule:
    torch = framework("torch", "torch")
    namespace, _, name = target._schema.name.partition("::")
    if namespace in _NAMESPACES and name in RULES:
        return RULES[name]
    if torch.Tag.nondeterministic_seeded in target.tags:
        return points.whole_points
    if torch.Tag.pointwise in target.tags:
        return points.pointwise
    return unknown


def _call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]) -> Call:
    """Return a call without its tensors' values."""
    schema = target._schema
    names = [argument.name for argument in schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    defaults = {arg.name: arg.default_value for arg in schema.arguments if arg.has_default_value()}
    numbers: dict[str, tuple[int, ...]] = {}
    operands: list[Any] = []
    for name, value in arguments.items():
        tensors = list(_tensors(value))
        if tensors:
            numbers[name] = tuple(range(len(operands), len(operands) + len(tensors)))
            operands += tensors
    return Call(
        name=schema.name.partition("::")[2],
        arguments=defaults | arguments,
        numbers=numbers,
        operands=tuple(_shape(tensor) for tensor in operands),
        results=tuple(_shape(tensor) for tensor in results),
        are_floating=tuple(_is_floating(tensor) for tensor in operands),
        results_are_floating=tuple(_is_floating(tensor) for tensor in results),
    )


def _is_strided(tensor: Any) -> bool:
    """Return whether a tensor is neither sparse nor nested."""
    return str(tensor.layout) == "torch.strided"


def _shape(tensor: Any) -> Shape:
    """Return extents; one that is only known when it runs counts as 0, of which no factor is made that may be split."""
    extents = []
    for extent in tensor.shape:
        try:
            extents.append(int(extent))
        except RuntimeError:
            extents.append(0)
    return tuple(extents)


def _is_floating(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _tensors(value: object) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "shape"):
        yield value


def _called(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Return the result of the call for tensors without values."""
    torch = framework("torch", "torch")
    fake = torch._subclasses.FakeTensor
    modes = [tensor.fake_mode for tensor in _tensors([*args, *kwargs.values()]) if isinstance(tensor, fake)]
    mode = modes[0] if modes else torch._subclasses.FakeTensorMode()

    def without_values(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [without_values(item) for item in value]
        if hasattr(value, "shape") and not isinstance(value, fake):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return value

    with mode, torch.no_grad():
        return target(*map(without_values, args), **{name: without_values(value) for name, value in kwargs.items()})
