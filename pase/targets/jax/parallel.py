"""`parallelize`: a JAX function that computes under a plan."""

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pase.common.words import listed, short
from pase.errors import ProgramError
from pase.importers.frameworks import difference, imported
from pase.importers.front_end import framework
from pase.importers.jax.call import Place
from pase.importers.jax.function import Traced, arrays_of, source_of, traced
from pase.planning.plan import Plan, check_even, check_plain
from pase.targets.jax.constraints import LOOKED_INTO, Constraints, Spec, constraints_of
from pase.targets.named_mesh import NamedMesh, named_mesh, notes, without_miscomputed


def parallelize(source: Any, plan: Plan, *, devices: Sequence[Any] | None = None) -> "Parallel":
    """Return a function that computes as a JAX function does, with every layer where a plan has it.

    Args:
        source: A function, a module of flax's or a model that can be called, as it was searched; or a tuple of one with
            its arguments (arrays, or their shapes), which are traced at once. Without them, the first call tells them.
        plan: Of the function.
        devices: Of JAX, in the order in which the plan numbers them; all of `jax.devices()` where they are not given.

    Raises:
        ProgramError: There are not as many devices, or the function with these arguments is not the plan's.
    """
    jax = framework("jax", "jax")
    function, *arguments = source if isinstance(source, tuple) and source else (source,)
    if len(arguments) == 1 and type(arguments[0]) is tuple:
        arguments = list(arguments[0])
    if not callable(function):
        raise ProgramError(
            f"a {type(function).__name__} cannot be made parallel; give the function, or the module, that was searched"
        )
    parallel = Parallel(function, plan, _mesh(jax, plan, devices))
    if arguments:
        parallel.trace(*_as_called(jax, function, arguments))
    return parallel


def _as_called(jax: Any, function: Any, arguments: list[Any]) -> Sequence[Any]:
    """Return the arguments of a call of what was searched with some: a model itself, or a module's variables, first."""
    if not _is_module(function):
        return arguments
    if not _is_linen(function):
        return (function, *arguments)
    if _are_variables(arguments[0]):
        return arguments
    found = source_of(jax, (function, *arguments))
    return ({"params": found.parameters, **found.constants}, *arguments)


@dataclass(frozen=True, kw_only=True)
class _Program:
    """A function for arguments of some shapes: as it is run on their arrays, and how these lie."""

    run: Callable[..., Any]
    result: Any
    shardings: Any
    notes: tuple[str, ...]


class Parallel:
    """A function that computes as the user's own does, with every layer where a plan has it.

    It is called as the function is, a module of flax's with its variables first, any other model with the model itself
    first; `jax.jit`, `jax.grad` and all else take it as they take the function.

    Attributes:
        plan: The plan.
        mesh: Its devices, a `jax.sharding.Mesh`.
    """

    def __init__(self, function: Callable[..., Any], plan: Plan, mesh: Any) -> None:
        self._is_module = _is_module(function)
        if not self._is_module:
            functools.update_wrapper(self, function)
        self.plan = plan
        self.mesh = mesh
        self._function = function
        check_even(plan, "JAX")
        check_plain(plan, "JAX")
        self._named = without_miscomputed(plan, named_mesh(plan))
        self._programs: dict[Hashable, _Program] = {}

    def __repr__(self) -> str:
        return f"<{short(self.plan.graph.name)} on {self.plan.num_devices} devices>"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        jax = framework("jax", "jax")
        given = self._in_order(arguments, named)
        program = self._program(given)
        results = program.run(*arrays_of(jax, self._source(given)))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(program.result), results)

    def trace(self, *arguments: Any) -> "Parallel":
        self._program(arguments)
        return self

    @property
    def shardings(self) -> tuple[Any, ...]:
        """How each argument lies: pytrees of `NamedSharding`, for `jax.device_put`; None for what is no array."""
        shardings: tuple[Any, ...] = self._last.shardings
        return shardings

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the plan JAX is not told, and why."""
        return self._last.notes

    @property
    def _last(self) -> _Program:
        if not self._programs:
            raise ProgramError(
                "how the arguments lie is known once they are: call the function first, or give their shapes: "
                "pase.parallelize((function, parameters, inputs), plan)"
            )
        return list(self._programs.values())[-1]

    def _in_order(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        if not named:
            return arguments
        try:
            bound = inspect.signature(self._function).bind(*arguments, **named)
        except (TypeError, ValueError) as error:
            raise ProgramError(f"{_called(self._function)} cannot be called so: {error}") from None
        if bound.kwargs or self._is_module:
            name = next(iter(bound.kwargs or named))
            raise ProgramError(
                f"argument {name!r} can be given by name alone; a plan is of arguments by position: bind it with "
                "functools.partial before the search"
            )
        return bound.args

    def _source(self, arguments: Sequence[Any]) -> Any:
        """Return the function with its arguments as the importer takes it."""
        jax = framework("jax", "jax")
        if not self._is_module:
            return source_of(jax, (self._function, *arguments))
        if _is_linen(self._function):
            if not arguments or not _are_variables(arguments[0]):
                raise ProgramError("a module of flax's is called with its variables first, {'params': …}")
            return source_of(jax, (self._function, *arguments))
        if not arguments or type(arguments[0]) is not type(self._function):
            raise ProgramError(f"the model comes first, a {type(self._function).__name__}, then its inputs")
        return source_of(jax, tuple(arguments))

    def _program(self, arguments: Sequence[Any]) -> _Program:
        jax = framework("jax", "jax")
        key = _key(jax, arguments)
        if key not in self._programs:
            self._programs[key] = self._made(jax, arguments)
        return self._programs[key]

    def _made(self, jax: Any, arguments: Sequence[Any]) -> _Program:
        found = traced(self._source(arguments))
        model = imported(found.trace, arguments=dict(self.plan.graph.arguments))
        unlike = difference(self.plan.graph, model.graph)
        if unlike:
            raise ProgramError(f"the plan is of another function, or of other arguments: {unlike}")
        constraints = constraints_of(found, model, self.plan.graph, self._named)
        sharding = functools.partial(_sharding, jax, self.mesh)

        def constrain(array: Any, spec: Spec) -> Any:
            return jax.lax.with_sharding_constraint(array, sharding(spec))

        def run(*arrays: Any) -> list[Any]:
            return evaluate(jax, found.closed, constraints, constrain, arrays)

        run.__name__ = str(getattr(self._function, "__name__", type(self._function).__name__))
        return _Program(
            run=jax.jit(run),
            result=found.result,
            shardings=_of_arguments(jax, arguments, self._source, found, constraints, sharding),
            notes=(*notes(self._named), *_missing(constraints)),
        )


def _missing(constraints: Constraints) -> tuple[str, ...]:
    if not constraints.missing:
        return ()
    return (f"left to XLA, as results within a function that has a gradient of its own: {listed(constraints.missing)}",)


def _mesh(jax: Any, plan: Plan, devices: Sequence[Any] | None) -> Any:
    found = list(jax.devices() if devices is None else devices)
    if len(found) != plan.num_devices:
        advice = (
            f"give as many of them: devices=jax.devices()[:{plan.num_devices}]"
            if len(found) > plan.num_devices
            else f"search for that many, or, to try the plan on CPUs, set JAX_PLATFORMS=cpu and "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={plan.num_devices} before JAX starts"
        )
        raise ProgramError(f"the plan is for {plan.num_devices} devices, and there are {len(found)}; {advice}")
    named: NamedMesh = named_mesh(plan)
    ordered = np.empty(len(found), dtype=object)
    ordered[:] = [found[number] for number in named.devices]
    return jax.sharding.Mesh(ordered.reshape(named.sizes), named.names)


def _sharding(jax: Any, mesh: Any, spec: Spec) -> Any:
    spec_of = jax.sharding.PartitionSpec
    entries = [spec_of.UNCONSTRAINED if entry is None else entry or None for entry in spec]
    return jax.sharding.NamedSharding(mesh, spec_of(*entries))


def _of_arguments(
    jax: Any,
    arguments: Sequence[Any],
    source: Callable[[Sequence[Any]], Any],
    found: Traced,
    constraints: Constraints,
    sharding: Callable[[Spec], Any],
) -> Any:
    """Return the arguments with how each array lies in its place, and None for all else."""
    leaves, structure = jax.tree_util.tree_flatten(tuple(arguments))
    # Each array is known by where it is, which the source only puts in another order.
    marks = [_Mark(i, leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf for i, leaf in enumerate(leaves)]
    order = [mark.place for mark in arrays_of(jax, source(jax.tree_util.tree_unflatten(structure, marks)))]
    names = found.given[len(found.given) - len(order) :]
    told: dict[int, Any] = {place: sharding(constraints.given[name]) for place, name in zip(order, names, strict=True)}
    return jax.tree_util.tree_unflatten(structure, [told.get(i) for i in range(len(leaves))])


@dataclass(frozen=True, slots=True)
class _Mark:
    """Stands for an array of the arguments, the one at this place."""

    place: int
    shape: tuple[int, ...]
    dtype: Any


def _key(jax: Any, arguments: Sequence[Any]) -> Hashable:
    leaves, structure = jax.tree_util.tree_flatten(tuple(arguments))
    told = tuple(
        (tuple(leaf.shape), str(leaf.dtype)) if hasattr(leaf, "dtype") else (type(leaf), leaf) for leaf in leaves
    )
    return structure, told, bool(jax.config.jax_enable_x64)


def _is_module(function: Any) -> bool:
    """Whether a source is a module or a model, and no function."""
    jax, nnx = sys.modules["jax"], sys.modules.get("flax.nnx")
    if _is_linen(function) or (nnx is not None and isinstance(function, nnx.Module)):
        return True
    leaves = jax.tree_util.tree_leaves(function)
    return not (len(leaves) == 1 and leaves[0] is function)


def _is_linen(function: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(function, linen.Module)


def _are_variables(argument: Any) -> bool:
    return isinstance(argument, Mapping) and "params" in argument


def _called(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


# -- a program, run with constraints


Constrain = Callable[[Any, Spec], Any]
"""Returns an array that lies as it is told."""


def evaluate(jax: Any, closed: Any, constraints: Constraints, constrain: Constrain, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of a program.

    Functions within it that have gradients of their own are run as they are. Those that are recomputed
    (`jax.checkpoint`) and loops stay what they are, with constraints within; a loop whose turns lie differently is
    written out.
    """
    return _Run(jax, constraints, constrain).program(closed.jaxpr, closed.consts, arrays, ())


class _Run:
    def __init__(self, jax: Any, constraints: Constraints, constrain: Constrain) -> None:
        self._jax = jax
        self._constraints = constraints
        self._constrain = constrain

    def program(self, jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], place: Place) -> list[Any]:
        found: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))
        # What several read alike is brought there once, so that its gradient is added up before it is.
        brought: dict[tuple[Any, Spec], Any] = {}

        def value(variable: Any) -> Any:
            return variable.val if hasattr(variable, "val") else found[variable]

        def read(variable: Any, specs: Sequence[Spec]) -> Any:
            array = value(variable)
            if hasattr(variable, "val"):
                return array
            for end in range(1, len(specs) + 1):
                key = (variable, *specs[:end])
                if key not in brought:
                    brought[key] = self._constrain(array, specs[end - 1])
                array = brought[key]
            return array

        reads, writes = self._constraints.reads, self._constraints.writes
        for number, equation in enumerate(jaxpr.eqns):
            own = (*place, number)
            given = [read(variable, reads.get((own, i), ())) for i, variable in enumerate(equation.invars)]
            results = self._equation(equation, given, own)
            for i, (variable, result) in enumerate(zip(equation.outvars, results, strict=True)):
                spec = writes.get((own, i))
                found[variable] = result if spec is None else self._constrain(result, spec)
        return [value(variable) for variable in jaxpr.outvars]

    def _equation(self, equation: Any, given: Sequence[Any], place: Place) -> Sequence[Any]:
        from jax._src import source_info_util

        # Lines and scopes of the user's own, for who looks at what is compiled.
        scopes = source_info_util.current_name_stack() + equation.source_info.name_stack
        with source_info_util.user_context(equation.source_info.traceback, name_stack=scopes), equation.ctx.manager:
            params = equation.params
            if equation.primitive.name in LOOKED_INTO and place in self._constraints.inner:
                if equation.primitive.name == "scan":
                    turns = self._turns(int(params["length"]), place)
                    if any(turn != turns[0] for turn in turns):
                        return self._written_out(params, given, place)
                    place = (*place, 0)
                params = self._with_constraints(params, place)
            results = equation.primitive.bind(*given, **equation.primitive.get_bind_params(params))
            return results if equation.primitive.multiple_results else [results]

    def _with_constraints(self, params: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        """Return the parameters of an equation with the constraints in the program that it runs."""
        (key,) = [key for key in ("jaxpr", "call_jaxpr") if key in params]
        old = params[key]
        is_closed = hasattr(old, "consts")
        jaxpr, consts = (old.jaxpr, old.consts) if is_closed else (old, ())
        shapes = [self._jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in jaxpr.invars]
        new = self._jax.make_jaxpr(lambda *arrays: self.program(jaxpr, consts, arrays, place))(*shapes)
        assert is_closed or not new.consts, "constraints hold no arrays"
        return {**params, key: new if is_closed else new.jaxpr}

    def _turns(self, length: int, place: Place) -> Sequence[Mapping[Any, Any]]:
        """Return the constraints of each turn of a loop, by their places in its body."""
        start = len(place) + 1
        found: list[dict[Any, Any]] = [{} for _ in range(length)]
        for kind in (self._constraints.reads, self._constraints.writes):
            for (own, number), specs in kind.items():
                if own[: len(place)] == place and len(own) > start:
                    found[own[len(place)]][kind is self._constraints.reads, own[start:], number] = specs
        return found

    def _written_out(self, params: Mapping[str, Any], given: Sequence[Any], place: Place) -> list[Any]:
        lax, length, body = self._jax.lax, int(params["length"]), params["jaxpr"]
        first, last = int(params["num_consts"]), int(params["num_consts"]) + int(params["num_carry"])
        carry = list(given[first:last])
        # Taken apart at once: the gradients of the rows are then put together at once, too.
        rows = [lax.split(stacked, (1,) * length, axis=0) for stacked in given[last:]]
        made: list[list[Any]] = [[] for _ in range(length)]
        for turn in reversed(range(length)) if params["reverse"] else range(length):
            own = [lax.squeeze(row[turn], (0,)) for row in rows]
            results = self.program(body.jaxpr, body.consts, (*given[:first], *carry, *own), (*place, turn))
            carry, made[turn] = results[: len(carry)], results[len(carry) :]
        stacked = [
            lax.concatenate([lax.expand_dims(row, (0,)) for row in parts], 0) for parts in zip(*made, strict=True)
        ]
        return [*carry, *stacked]
