"""JAX functions, as `jax.make_jaxpr` traces them on shapes without values."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from pase.errors import ModelError, PaseError
from pase.graph import Scalar
from pase.importers.front_end import framework
from pase.importers.ir import Leaf, Trace, Value, check_trace
from pase.importers.jax.lax import Program, read_program
from pase.importers.jax.lax.programs import dtype_name, shape_of
from pase.importers.jax.lax.sources import Source, is_source, source_of
from pase.importers.jax.training_steps import check_forward

Role = Literal["input", "parameter", "constant"]


class JaxFrontEnd:
    """Takes (function, parameters, inputs…), (module, inputs…) or a dict of function, parameters and inputs.

    Arrays may be `jax.ShapeDtypeStruct`, as `jax.eval_shape` gives them for a whole model without its weights; what
    `sources` says of each kind of model tells which are the parameters.
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
        return trace_source(jax, found if batch is None else _with_batch(jax, found, batch))

    def without_weights(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing: a factory says itself that it wants shapes alone, by `jax.eval_shape`.

        One that does allocates nothing, whatever the size of the model.
        """
        return nullcontext()


def trace_source(jax: Any, source: Source) -> Trace:
    """Return the trace of a function with its arguments; no array's value is read.

    Raises ModelError where it cannot be traced, or has control flow that depends on data.
    """
    flat = [*_arrays(jax, source.parameters, ""), *_arrays(jax, source.constants, "")]
    num_held = len(flat)
    num_parameters = sum(1 for _ in _arrays(jax, source.parameters, ""))
    for i, given in enumerate(source.inputs):
        flat += _arrays(jax, given, f"input_{i}")
    held = (source.parameters, source.constants, *source.inputs)
    leaves, tree = jax.tree_util.tree_flatten(held)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def called(arrays: Sequence[Any]) -> Any:
        full = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            full[place] = array
        parameters, constants, *inputs = jax.tree_util.tree_unflatten(tree, full)
        # What is no array, such as the functions within a model of equinox's, is nothing that a program returns.
        return jax.tree_util.tree_map(
            lambda leaf: leaf if _is_array(leaf) or isinstance(leaf, int | float | complex) else None,
            source.function(parameters, constants, *inputs),
        )

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for _, array in flat]
    try:
        closed, result = jax.make_jaxpr(called, return_shape=True)(shapes)
    except PaseError:
        raise
    except Exception as error:
        raise ModelError(_failure(error)) from error
    roles: list[Role] = ["parameter"] * num_parameters
    roles += ["constant"] * (num_held - num_parameters)
    roles += ["input"] * (len(flat) - num_held)
    inputs = _leaves(jax, flat, roles)
    captured, notes = _captured(jax, closed, has_parameters=num_parameters > 0)
    taken = check_forward(jax, source.entry or source.name, closed, source.parameters, num_held, result)
    notes += [taken] if taken else []
    kept = _kept(jax, result, source)
    if len(kept) < len(jax.tree_util.tree_leaves(result)):
        notes.append("the updated statistics that the function returns are not part of the graph")
    program = Program(
        name=source.name,
        closed=closed,
        inputs=inputs,
        captured=tuple(captured),
        kept=kept,
        entry=source.entry,
        notes=tuple(notes),
        statistics=tuple(leaf.value.name for leaf in inputs[num_parameters:num_held]),
    )
    return check_trace(read_program(program))


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _arrays(jax: Any, tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of the arrays in a pytree; numbers, functions and the like stay as they are."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if _is_array(leaf):
            own = jax.tree_util.keystr(path, simple=True, separator=".")
            yield ".".join(part for part in (prefix, own) if part) or "weight", leaf


def _unique(names: Sequence[str]) -> list[str]:
    taken: dict[str, int] = {}
    found = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        found.append(name if taken[name] == 1 else f"{name}~{taken[name]}")
    return found


def _leaves(jax: Any, arrays: Sequence[tuple[str, Any]], roles: Sequence[Role]) -> tuple[Leaf, ...]:
    """Return the leaves of (path, array): arrays that are one are one weight; of shapes, each is a weight."""
    same: dict[int, str] = {}
    found = []
    for name, role, (_, array) in zip(_unique([name for name, _ in arrays]), roles, arrays, strict=True):
        storage = name if isinstance(array, jax.ShapeDtypeStruct) else same.setdefault(id(array), name)
        found.append(_leaf(name, array, role, storage))
    return tuple(found)


def _leaf(name: str, array: Any, role: Role, storage: str) -> Leaf:
    value = Value(name=name, shape=shape_of(array, name), dtype=dtype_name(array.dtype))
    # Whole numbers among the parameters are not trained.
    return Leaf(value=value, role="constant" if role == "parameter" and not value.is_float else role, storage=storage)


def _captured(jax: Any, closed: Any, *, has_parameters: bool) -> tuple[list[Leaf], list[str]]:
    """Return the arrays that a function closes over: its parameters, where it is given none."""
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
    """Return the source with another leading dim of its inputs, where all of them have the same one."""
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
    first = next((text.strip() for text in str(error).splitlines() if text.strip()), "no message")
    advice = ""
    if "Tracer" in type(error).__name__ or "Concretization" in type(error).__name__:
        advice = (
            "; the function uses the values of its inputs for control flow: write that with jnp.where or jax.lax.scan"
        )
    return f"jax.make_jaxpr cannot trace the function: {type(error).__name__}: {first}{_raised_at(error)}{advice}"


def _raised_at(error: Exception) -> str:
    """Return where in the user's source an error was raised: the last frame outside of installed packages."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if "site-packages" not in file and "/pase/importers/" not in file and not file.startswith("<"):
            found = f" ({file.rpartition('/')[2]}:{frame.tb_lineno})"
        frame = frame.tb_next
    return found
