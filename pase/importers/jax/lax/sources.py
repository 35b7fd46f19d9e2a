"""`source_of`: what users have of a model in JAX, as one function of its parameters, its constants and its inputs.

The kinds, the first that fits:

* a dict with "function", "inputs" and, where it has any, "parameters" (the function's first argument);
* (module, inputs…) or (module, variables, inputs…), module being one of flax's; without variables, their shapes are
  those that its initialisation would give. Variables other than "params" are constants;
* (module, inputs…), module being one of flax.nnx, whose `Param` variables are the parameters;
* (model, inputs…), model being a pytree that can be called, as equinox's are: its float arrays are the parameters;
* (function, first, inputs…): the first argument is the parameters where it is a pytree with float arrays that is no
  array itself. Where it is {"params": …, "batch_stats": …}, as flax has it, "params" alone are;
* (function, inputs…): there are no parameters, or they are arrays that the function closes over.

A last tuple of arguments may stand for them: (function, (first, inputs…)).
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pase.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """function: of parameters, constants and inputs, pytrees all. entry: name of the user's function."""

    function: Callable[..., Any]
    parameters: Any
    constants: Any
    inputs: tuple[Any, ...]
    name: str
    entry: str = ""


def is_source(source: object) -> bool:
    """Return whether a source is one of the kinds, or all but: a function that lacks its arguments."""
    if isinstance(source, Mapping):
        return callable(source.get("function"))
    if isinstance(source, tuple):
        return len(source) > 0 and callable(source[0]) and not _is_foreign(source[0])
    return callable(source) and not isinstance(source, type) and not _is_foreign(source)


def source_of(jax: Any, source: object) -> Source:
    """Return the function behind a source, and its arguments; ModelError where it has none."""
    if isinstance(source, Mapping):
        return _explicit(source)
    if not isinstance(source, tuple) or len(source) < 2:
        raise ModelError(
            "a JAX function needs its arguments: give (function, parameters, inputs…), or a dict of 'function', "
            "'parameters' and 'inputs'; jax.ShapeDtypeStruct or jax.eval_shape gives shapes without values"
        )
    first, *arguments = source
    if len(arguments) == 1 and isinstance(arguments[0], tuple) and type(arguments[0]) is tuple:
        arguments = list(arguments[0])
    for is_kind, made in (
        (_is_linen, _linen),
        (_is_nnx, _nnx),
        (_is_callable_tree, _callable_tree),
    ):
        if is_kind(jax, first):
            return made(jax, first, arguments)
    return _plain(jax, first, arguments)


def _explicit(source: Mapping[Any, Any]) -> Source:
    known = {"function", "parameters", "inputs", "name"}
    unknown = [str(key) for key in source if key not in known]
    if unknown or "inputs" not in source:
        found = f"an entry {unknown[0]!r}" if unknown else "no 'inputs'"
        raise ModelError(f"a JAX function given as a dict has {found}; it has 'function', 'inputs' and 'parameters'")
    function, inputs = source["function"], source["inputs"]
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    name = str(source.get("name") or _name(function))
    if "parameters" not in source:
        return _without_parameters(function, given, name)
    return _split_variables(function, source["parameters"], given, name)


def _plain(jax: Any, function: Callable[..., Any], arguments: list[Any]) -> Source:
    first, *inputs = arguments
    if _is_parameters(jax, first):
        return _split_variables(function, first, tuple(inputs), _name(function))
    return _without_parameters(function, tuple(arguments), _name(function))


def _without_parameters(function: Callable[..., Any], inputs: tuple[Any, ...], name: str) -> Source:
    return Source(
        function=lambda _p, _c, *x: function(*x),
        parameters=(),
        constants=(),
        inputs=inputs,
        name=name,
        entry=_name(function),
    )


def _split_variables(function: Callable[..., Any], first: Any, inputs: tuple[Any, ...], name: str) -> Source:
    """Return a function of its first argument; of flax's variables, "params" are the parameters."""
    if isinstance(first, Mapping) and "params" in first:
        rest = {key: value for key, value in first.items() if key != "params"}
        return Source(
            function=lambda p, c, *x: function({"params": p, **c}, *x),
            parameters=first["params"],
            constants=rest,
            inputs=inputs,
            name=name,
            entry=_name(function),
        )
    return Source(
        function=lambda p, _c, *x: function(p, *x),
        parameters=first,
        constants=(),
        inputs=inputs,
        name=name,
        entry=_name(function),
    )


def _is_parameters(jax: Any, first: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(first)
    if len(leaves) == 1 and leaves[0] is first:
        return False
    return any(_is_float(leaf) for leaf in leaves)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and "float" in str(getattr(leaf, "dtype", ""))


# -- kinds of modules


def _is_linen(jax: Any, first: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(first, linen.Module)


def _linen(jax: Any, module: Any, arguments: list[Any]) -> Source:
    variables, *inputs = arguments
    if not (isinstance(variables, Mapping) and "params" in variables):
        inputs = arguments
        variables = _initialised(jax, module, inputs)
    return _split_variables(module.apply, variables, tuple(inputs), type(module).__name__)


def _initialised(jax: Any, module: Any, inputs: list[Any]) -> Any:
    """Return the shapes of a module's variables."""
    leaves, tree = jax.tree_util.tree_flatten(inputs)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def init(arrays: list[Any]) -> Any:
        full = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            full[place] = array
        key = jax.random.key(0)
        return module.init({"params": key, "dropout": key}, *jax.tree_util.tree_unflatten(tree, full))

    try:
        return jax.eval_shape(init, [leaves[i] for i in places])
    except Exception as error:
        first = next((text.strip() for text in str(error).splitlines() if text.strip()), "no message")
        raise ModelError(
            f"flax cannot initialise {type(module).__name__} with these inputs: {type(error).__name__}: {first}"
        ) from error


def _is_nnx(jax: Any, first: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(first, nnx.Module)


def _nnx(jax: Any, module: Any, arguments: list[Any]) -> Source:
    nnx = sys.modules["flax.nnx"]
    definition, parameters, rest = nnx.split(module, nnx.Param, ...)

    def function(p: Any, c: Any, *inputs: Any) -> Any:
        return nnx.merge(definition, p, c)(*inputs)

    return Source(
        function=function,
        parameters=parameters,
        constants=rest,
        inputs=tuple(arguments),
        name=type(module).__name__,
    )


def _is_callable_tree(jax: Any, first: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(first)
    return not (len(leaves) == 1 and leaves[0] is first)


def _callable_tree(jax: Any, model: Any, arguments: list[Any]) -> Source:
    return Source(
        function=lambda p, _c, *x: p(*x),
        parameters=model,
        constants=(),
        inputs=tuple(arguments),
        name=type(model).__name__,
    )


def _is_foreign(value: Any) -> bool:
    """Whether a callable belongs to another framework."""
    modules = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return not modules.isdisjoint({"torch", "keras", "tensorflow"})


def _name(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name.startswith("<") else str(name)
