"""A program of JAX's, run with constraints on how its values lie."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pase.importers.jax.call import Place
from pase.targets.jax.constraints import LOOKED_INTO, Constraints
from pase.targets.jax.specs import Spec

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
