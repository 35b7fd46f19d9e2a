"""JAX functions, traced by `jax.make_jaxpr` on shapes without values.

Every supported source is converted to a function of its parameters, constants and inputs. The first kind that fits is
used:

* a dict with "function", "inputs" and, if it has any, "parameters" (the function's first argument);
* (module, inputs…) or (module, variables, inputs…) with a flax module; without variables, their shapes are those of its
  initialisation. Variables other than "params" are constants;
* (module, inputs…) with a flax.nnx module, whose `Param` variables are the parameters;
* (model, inputs…) with a callable pytree, such as an equinox model: its float arrays are the parameters;
* (function, first, inputs…): the first argument is the parameters if it is a pytree with float arrays that is not an
  array itself. In flax's form {"params": …, "batch_stats": …}, only "params" are;
* (function, inputs…): there are no parameters, or the function closes over them.

The arguments may be given as one tuple: (function, (first, inputs…)).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pase.errors import ModelError, PaseError
from pase.graph import Scalar
from pase.importers.front_end import FrontEnd, first_line, framework
from pase.importers.ir.trace import Leaf, Names, Trace, Value, check_trace, dtype_name
from pase.importers.jax.call import shape_of
from pase.importers.jax.program import Read, read_program, values_of
from pase.importers.jax.training_steps import check_forward

Role = Literal["input", "parameter", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A function to trace.

    Attributes:
        function: Function of parameters, constants and inputs, all pytrees.
        entry: Name of the user's function.
        input_names: Names of the inputs, if they have any.
        has_statistics: Whether batch normalisation is recognisable by running means and variances among the constants.
    """

    function: Callable[..., Any]
    parameters: Any = ()
    constants: Any = ()
    inputs: tuple[Any, ...]
    name: str
    entry: str = ""
    input_names: tuple[str, ...] = ()
    has_statistics: bool = True


class JaxFrontEnd(FrontEnd):
    """Accepts (function, parameters, inputs…), (module, inputs…) or a dict of function, parameters and inputs.

    Arrays may be `jax.ShapeDtypeStruct`, as returned by `jax.eval_shape`, so that no weights are allocated. The
    module's docstring says which arrays are the parameters of each kind of model.
    """

    package = "jax"
    extra = "jax"

    def takes(self, source: object) -> bool:
        """Return whether a source is a function or module with arguments, and JAX is what made it."""
        return "jax" in sys.modules and is_source(source)

    def trace(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Trace:
        """Return the trace of a function."""
        jax = framework("jax", "jax")
        if arguments:
            raise ModelError(f"a JAX function takes no argument {next(iter(arguments))!r}: bind it in the function")
        found = source_of(jax, source)
        return traced(found if batch is None else _with_batch(jax, found, batch)).trace


def read_weights(source: object, names: Iterable[str], *, batch: int | None) -> dict[str, Any]:
    """Return values of a function's trace that follow from the arrays passed to it, or those it closes over.

    names: of the values. Values that depend on an array with only a shape are omitted.
    """
    jax = framework("jax", "jax")
    found = source_of(jax, source)
    return weights_of(jax, found if batch is None else _with_batch(jax, found, batch), names)


def weights_of(jax: Any, found: Source, names: Iterable[str]) -> dict[str, Any]:
    """Return values of a function's trace, as `read_weights`."""
    flat, closed, _ = _program(jax, found)
    leaves = _leaves(jax, flat)
    captured, _ = _captured(jax, closed, has_parameters=any(role == "parameter" for _, role, _ in flat))
    given = {leaf.value.name: array for leaf, array in zip(captured, closed.consts, strict=True)}
    given |= {
        leaf.value.name: array
        for leaf, (_, role, array) in zip(leaves, flat, strict=True)
        if role != "input" and not isinstance(array, jax.ShapeDtypeStruct)
    }
    return values_of(closed, names, leaves=(*captured, *leaves), entry=found.entry, arrays=given)


def arrays_of(jax: Any, source: Source) -> list[Any]:
    """Return the arrays that a function is given, in the order in which its program takes them."""
    return [array for *_, array in _given(jax, source)]


def _given(jax: Any, source: Source) -> list[tuple[str, Role, Any]]:
    """Return the arrays that a function is given: (path, role, array)."""
    held: list[tuple[Role, Any, str]] = [("parameter", source.parameters, ""), ("constant", source.constants, "")]
    names = source.input_names or tuple(f"input_{i}" for i in range(len(source.inputs)))
    held += [("input", given, name) for name, given in zip(names, source.inputs, strict=True)]
    return [(name, role, array) for role, tree, prefix in held for name, array in _arrays(jax, tree, prefix)]


def _program(jax: Any, source: Source) -> tuple[list[tuple[str, Role, Any]], Any, Any]:
    """Return the arrays that a function is given, (path, role, array), its program and its results' shapes."""
    flat = _given(jax, source)
    _, put = _apart(jax, (source.parameters, source.constants, *source.inputs))

    def called(arrays: Sequence[Any]) -> Any:
        parameters, constants, *inputs = put(arrays)
        # Leaves that are not arrays, such as the functions in an equinox model, are not results of a program.
        return jax.tree_util.tree_map(
            lambda leaf: leaf if _is_array(leaf) or isinstance(leaf, int | float | complex) else None,
            source.function(parameters, constants, *inputs),
        )

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for *_, array in flat]
    try:
        closed, result = jax.make_jaxpr(called, return_shape=True)(shapes)
    except PaseError:
        raise
    except Exception as error:
        raise ModelError(_failure(error)) from error
    return flat, closed, result


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A function with its arguments as a JAX program, and the imported trace.

    Attributes:
        arrays: Arguments of the program: the arrays of the source's parameters, constants and inputs.
        closed: The program, a closed jaxpr.
        result: Result of the function, a pytree of shapes.
        read: The program as it was read.
        given: Names of the program's constants, then of its arguments.
    """

    arrays: tuple[Any, ...]
    closed: Any
    result: Any
    read: Read
    given: tuple[str, ...]

    @property
    def trace(self) -> Trace:
        """The trace of the program."""
        return self.read.trace


def traced(source: Source) -> Traced:
    """Trace a function with its arguments as a JAX program, without reading values of arrays.

    Raises ModelError where it cannot be traced, or has control flow that depends on data.
    """
    jax = framework("jax", "jax")
    flat, closed, result = _program(jax, source)
    count = Counter(role for _, role, _ in flat)
    leaves = _leaves(jax, flat)
    captured, notes = _captured(jax, closed, has_parameters=count["parameter"] > 0)
    num_held = count["parameter"] + count["constant"]
    taken = check_forward(jax, source.entry or source.name, closed, source.parameters, num_held, result)
    notes += [taken] if taken else []
    kept = _kept(jax, result, source)
    if len(kept) < len(jax.tree_util.tree_leaves(result)):
        notes.append("the updated statistics that the function returns are not part of the graph")
    read = read_program(
        source.name,
        closed,
        leaves=(*captured, *leaves),
        kept=kept,
        entry=source.entry,
        statistics=[leaf.value.name for leaf in leaves[count["parameter"] : num_held * source.has_statistics]],
    )
    return Traced(
        arrays=tuple(array for *_, array in flat),
        closed=closed,
        result=result,
        read=replace(read, trace=check_trace(replace(read.trace, notes=tuple(notes)))),
        given=tuple(leaf.value.name for leaf in (*captured, *leaves)),
    )


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _apart(jax: Any, tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays in a pytree, and a function that replaces them; other leaves are unchanged."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def put(arrays: Sequence[Any]) -> Any:
        full = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            full[place] = array
        return jax.tree_util.tree_unflatten(structure, full)

    return [leaves[i] for i in places], put


def _arrays(jax: Any, tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of the arrays in a pytree; numbers, functions and other leaves are skipped."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if _is_array(leaf):
            own = jax.tree_util.keystr(path, simple=True, separator=".")
            yield ".".join(part for part in (prefix, own) if part) or "weight", leaf


def _leaves(jax: Any, arrays: Sequence[tuple[str, Role, Any]]) -> list[Leaf]:
    """Return the leaves of (path, role, array): arrays that are one are one weight; of shapes, each is a weight."""
    same: dict[int, str] = {}
    found, names = [], Names("~")
    for path, role, array in arrays:
        name = names.new(path)
        storage = name if isinstance(array, jax.ShapeDtypeStruct) else same.setdefault(id(array), name)
        found.append(_leaf(name, array, role, storage))
    return found


def _leaf(name: str, array: Any, role: Role, storage: str) -> Leaf:
    value = Value(name=name, shape=shape_of(array, name), dtype=dtype_name(array.dtype))
    # Integers among the parameters are not trained.
    return Leaf(value=value, role="constant" if role == "parameter" and not value.is_float else role, storage=storage)


def _captured(jax: Any, closed: Any, *, has_parameters: bool) -> tuple[list[Leaf], list[str]]:
    """Return the arrays that a function closes over; they are its parameters if none are passed."""
    leaves, count = [], 0
    for i, array in enumerate(closed.consts):
        is_weight = not has_parameters and isinstance(array, jax.Array) and array.size > 1
        leaf = _leaf(f"captured_{i}", array, "parameter" if is_weight else "constant", f"captured_{i}")
        count += leaf.role == "parameter"
        leaves.append(leaf)
    if not count:
        return leaves, []
    return leaves, [f"arrays that the function closes over are taken as its parameters: {count}"]


def _kept(jax: Any, result: Any, source: Source) -> tuple[int, ...]:
    """Return which results belong to the graph: all but statistics that are returned as they were given."""
    held = jax.tree_util.tree_structure(source.constants)
    parts = list(result) if isinstance(result, tuple | list) else [result]
    kept: list[int] = []
    count = 0
    for i, part in enumerate(parts):
        structure = jax.tree_util.tree_structure(part)
        size = structure.num_leaves
        if not (i and size and structure == held):
            kept += range(count, count + size)
        count += size
    return tuple(kept)


def _with_batch(jax: Any, source: Source, batch: int) -> Source:
    """Return the source with another leading dim of its inputs, if all of them have the same one."""
    arrays = [array for given in source.inputs for _, array in _arrays(jax, given, "") if array.shape]
    leading = {int(array.shape[0]) for array in arrays if _is_data(jax, array)}
    if len(leading) != 1:
        raise ModelError(
            f"the inputs have leading dims {', '.join(map(str, sorted(leading))) or 'of no array'}; --batch needs one "
            "that all share: make the inputs of that batch instead"
        )

    def changed(leaf: Any) -> Any:
        if not _is_array(leaf) or not leaf.shape or not _is_data(jax, leaf):
            return leaf
        return jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype)

    return replace(source, inputs=tuple(jax.tree_util.tree_map(changed, given) for given in source.inputs))


def _is_data(jax: Any, array: Any) -> bool:
    """Whether an input holds examples: a random key does not."""
    return not str(array.dtype).startswith("key") and not (str(array.dtype) == "uint32" and array.shape == (2,))


def _failure(error: Exception) -> str:
    advice = ""
    if "Tracer" in type(error).__name__ or "Concretization" in type(error).__name__:
        advice = (
            "; the function uses the values of its inputs for control flow: write that with jnp.where or jax.lax.scan"
        )
    return f"jax.make_jaxpr cannot trace the function: {first_line(error)}{_raised_at(error)}{advice}"


def _raised_at(error: Exception) -> str:
    """Return where in the user's source an error was raised: the last frame outside of installed packages."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if "site-packages" not in file and "/pase/importers/" not in file and not file.startswith("<"):
            found = f" ({file.rpartition('/')[2]}:{frame.tb_lineno})"
        frame = frame.tb_next
    return found


# -- what users have of a model


def is_source(source: object) -> bool:
    """Return whether a source is one of the kinds, or all but: a function that lacks its arguments."""
    if isinstance(source, Mapping):
        return callable(source.get("function"))
    if isinstance(source, tuple):
        return len(source) > 0 and callable(source[0]) and not _is_foreign(source[0])
    return callable(source) and not isinstance(source, type) and not _is_foreign(source)


def source_of(jax: Any, source: object) -> Source:
    """Return the function of a source and its arguments; ModelError for unsupported sources."""
    if isinstance(source, Mapping):
        return _explicit(source)
    if not isinstance(source, tuple) or len(source) < 2:
        raise ModelError(
            "a JAX function needs its arguments: give (function, parameters, inputs…), or a dict of 'function', "
            "'parameters' and 'inputs'; jax.ShapeDtypeStruct or jax.eval_shape gives shapes without values"
        )
    first, *arguments = source
    if len(arguments) == 1 and type(arguments[0]) is tuple:
        arguments = list(arguments[0])
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(first, linen.Module):
        return _linen(jax, first, arguments)
    if nnx is not None and isinstance(first, nnx.Module):
        return _nnx(nnx, first, arguments)
    if _is_tree(jax, first):
        name = type(first).__name__
        return Source(function=lambda p, _c, *x: p(*x), parameters=first, inputs=tuple(arguments), name=name)
    name = _name(first)
    if _is_tree(jax, arguments[0]) and any(_is_float(leaf) for leaf in jax.tree_util.tree_leaves(arguments[0])):
        return _of_variables(first, arguments[0], tuple(arguments[1:]), name)
    return _without_parameters(first, tuple(arguments), name)


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
    return _of_variables(function, source["parameters"], given, name)


def _without_parameters(function: Callable[..., Any], inputs: tuple[Any, ...], name: str) -> Source:
    return Source(function=lambda _p, _c, *x: function(*x), inputs=inputs, name=name, entry=_name(function))


def _of_variables(function: Callable[..., Any], first: Any, inputs: tuple[Any, ...], name: str) -> Source:
    """Return a function of its first argument; of flax variables, "params" are the parameters."""
    entry = _name(function)
    if not (isinstance(first, Mapping) and "params" in first):
        return Source(
            function=lambda p, _c, *x: function(p, *x), parameters=first, inputs=inputs, name=name, entry=entry
        )
    return Source(
        function=lambda p, c, *x: function({"params": p, **c}, *x),
        parameters=first["params"],
        constants={key: value for key, value in first.items() if key != "params"},
        inputs=inputs,
        name=name,
        entry=entry,
    )


def _is_tree(jax: Any, thing: Any) -> bool:
    """Whether something is a pytree, and no leaf of one."""
    leaves = jax.tree_util.tree_leaves(thing)
    return not (len(leaves) == 1 and leaves[0] is thing)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and "float" in str(getattr(leaf, "dtype", ""))


def _linen(jax: Any, module: Any, arguments: list[Any]) -> Source:
    variables, *inputs = arguments
    if not (isinstance(variables, Mapping) and "params" in variables):
        inputs = arguments
        variables = _initialised(jax, module, inputs)
    return _of_variables(module.apply, variables, tuple(inputs), type(module).__name__)


def _initialised(jax: Any, module: Any, inputs: list[Any]) -> Any:
    """Return the shapes of a module's variables."""
    arrays, put = _apart(jax, inputs)

    def init(arrays: list[Any]) -> Any:
        key = jax.random.key(0)
        return module.init({"params": key, "dropout": key}, *put(arrays))

    try:
        return jax.eval_shape(init, arrays)
    except Exception as error:
        raise ModelError(
            f"flax cannot initialise {type(module).__name__} with these inputs: {first_line(error)}"
        ) from error


def _nnx(nnx: Any, module: Any, arguments: list[Any]) -> Source:
    definition, parameters, rest = nnx.split(module, nnx.Param, ...)
    return Source(
        function=lambda p, c, *inputs: nnx.merge(definition, p, c)(*inputs),
        parameters=parameters,
        constants=rest,
        inputs=tuple(arguments),
        name=type(module).__name__,
    )


def _is_foreign(value: Any) -> bool:
    """Whether a callable belongs to another framework."""
    modules = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return not modules.isdisjoint({"torch", "keras", "tensorflow"})


def _name(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name.startswith("<") else str(name)
