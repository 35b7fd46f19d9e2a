"""`parallelize`: run a JAX function under a plan."""

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
    """Return a function that computes the same as a JAX function, with every layer sharded as in a plan.

    Args:
        source: The function, flax module or callable model that was searched; or a tuple of it and its arguments
            (arrays, or their shapes), which is traced immediately. Otherwise it is traced at the first call.
        plan: Plan of the function.
        devices: JAX devices, in the order in which the plan numbers them; default: `jax.devices()`.

    Raises:
        ProgramError: The number of devices differs, or the function with these arguments is not the plan's.
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
    """Return the arguments of the searched callable, starting with the model itself or a module's variables."""
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
    """A function traced for some argument shapes: its executable form, and the arguments' shardings."""

    run: Callable[..., Any]
    result: Any
    shardings: Any
    notes: tuple[str, ...]


class Parallel:
    """A function that computes the same as the user's, with every layer sharded as in a plan.

    It is called like the original: a flax module with its variables first, any other model with the model itself first.
    `jax.jit`, `jax.grad` and other transformations apply as usual.

    Attributes:
        plan: The plan.
        mesh: Its devices, as a `jax.sharding.Mesh`.
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
        """Shardings of the arguments: pytrees of `NamedSharding`, for `jax.device_put`; None for other leaves."""
        shardings: tuple[Any, ...] = self._last.shardings
        return shardings

    @property
    def notes(self) -> tuple[str, ...]:
        """Parts of the plan that cannot be expressed to JAX, and why."""
        return self._last.notes

    @property
    def _last(self) -> _Program:
        if not self._programs:
            raise ProgramError(
                "shardings of the arguments are known after tracing: call the function first, or give their shapes: "
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
                f"argument {name!r} can only be given by name; a plan is of arguments by position: bind it with "
                "functools.partial before the search"
            )
        return bound.args

    def _source(self, arguments: Sequence[Any]) -> Any:
        """Return the function with its arguments in the form that the importer takes."""
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
    """Return the pytree of arguments with the sharding of each array in its place, and None for other leaves."""
    leaves, structure = jax.tree_util.tree_flatten(tuple(arguments))
    # Arrays are identified by their position, since the source only permutes them.
    marks = [_Mark(i, leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf for i, leaf in enumerate(leaves)]
    order = [mark.place for mark in arrays_of(jax, source(jax.tree_util.tree_unflatten(structure, marks)))]
    names = found.given[len(found.given) - len(order) :]
    told: dict[int, Any] = {place: sharding(constraints.given[name]) for place, name in zip(order, names, strict=True)}
    return jax.tree_util.tree_unflatten(structure, [told.get(i) for i in range(len(leaves))])


@dataclass(frozen=True, slots=True)
class _Mark:
    """Placeholder for the array of the arguments at this position."""

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
    """Return whether a source is a module or a model, not a function."""
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


# -- executing a program with constraints


Constrain = Callable[[Any, Spec], Any]
"""Returns an array with a given sharding."""


def evaluate(jax: Any, closed: Any, constraints: Constraints, constrain: Constrain, arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a program and return its results.

    Inner functions with custom gradients are run unchanged. Rematerialised functions (`jax.checkpoint`) and loops are
    preserved, with constraints inside; a loop whose iterations have different shardings is unrolled.
    """
    return _Run(jax, constraints, constrain).program(closed.jaxpr, closed.consts, arrays, ())


class _Run:
    def __init__(self, jax: Any, constraints: Constraints, constrain: Constrain) -> None:
        self._jax = jax
        self._constraints = constraints
        self._constrain = constrain

    def program(self, jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], place: Place) -> list[Any]:
        found: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))
        # A value that several equations read with the same sharding is constrained once: its gradient is summed first.
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

        # Keep the source lines and scopes of the user's code for inspection of the compiled program.
        scopes = source_info_util.current_name_stack() + equation.source_info.name_stack
        with source_info_util.user_context(equation.source_info.traceback, name_stack=scopes), equation.ctx.manager:
            params = equation.params
            if equation.primitive.name in LOOKED_INTO and place in self._constraints.inner:
                if equation.primitive.name == "scan":
                    turns = self._iterations(int(params["length"]), place)
                    if any(turn != turns[0] for turn in turns):
                        return self._unrolled(params, given, place)
                    place = (*place, 0)
                params = self._with_constraints(params, place)
            results = equation.primitive.bind(*given, **equation.primitive.get_bind_params(params))
            return results if equation.primitive.multiple_results else [results]

    def _with_constraints(self, params: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        """Return the parameters of an equation with constraints inserted into its inner program."""
        (key,) = [key for key in ("jaxpr", "call_jaxpr") if key in params]
        old = params[key]
        is_closed = hasattr(old, "consts")
        jaxpr, consts = (old.jaxpr, old.consts) if is_closed else (old, ())
        shapes = [self._jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in jaxpr.invars]
        new = self._jax.make_jaxpr(lambda *arrays: self.program(jaxpr, consts, arrays, place))(*shapes)
        assert is_closed or not new.consts, "constraints must not capture arrays"
        return {**params, key: new if is_closed else new.jaxpr}

    def _iterations(self, length: int, place: Place) -> Sequence[Mapping[Any, Any]]:
        """Return the constraints of each iteration of a loop, by their places in its body."""
        start = len(place) + 1
        found: list[dict[Any, Any]] = [{} for _ in range(length)]
        for kind in (self._constraints.reads, self._constraints.writes):
            for (own, number), specs in kind.items():
                if own[: len(place)] == place and len(own) > start:
                    found[own[len(place)]][kind is self._constraints.reads, own[start:], number] = specs
        return found

    def _unrolled(self, params: Mapping[str, Any], given: Sequence[Any], place: Place) -> list[Any]:
        lax, length, body = self._jax.lax, int(params["length"]), params["jaxpr"]
        first, last = int(params["num_consts"]), int(params["num_consts"]) + int(params["num_carry"])
        carry = list(given[first:last])
        # Unstack at once, so that the gradients of the rows are also stacked at once.
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
