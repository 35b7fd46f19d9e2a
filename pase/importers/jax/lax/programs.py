"""`read_program`: a program of JAX's primitives as a trace; functions within it are read as if written out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pase.errors import ModelError
from pase.importers.ir import Leaf, Node, Op, Trace, Use, Value
from pase.importers.jax.lax.call import Call, Step
from pase.importers.jax.lax.constants import evaluate
from pase.importers.jax.lax.control import CONTROL
from pase.importers.jax.lax.means import name_means
from pase.importers.jax.lax.orders import order_products
from pase.importers.jax.lax.places import Places, inlined, scopes, where
from pase.importers.jax.lax.statistics import recover_batch_norm
from pase.importers.jax.lax.translations import translate


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """closed: a closed jaxpr. inputs: a leaf for each of its arguments; captured: for each of its constants.

    kept: positions of the results that the model returns. entry: name of the user's function. statistics: names of the
    constants that are kept from step to step (running means and variances).
    """

    name: str
    closed: Any
    inputs: tuple[Leaf, ...]
    captured: tuple[Leaf, ...]
    kept: tuple[int, ...]
    entry: str = ""
    notes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()


def read_program(program: Program) -> Trace:
    """Return the trace of a program; ModelError where it has control flow that depends on data."""
    walk = Walk(program)
    results = walk.run(
        program.closed.jaxpr,
        [leaf.value for leaf in program.captured],
        [leaf.value for leaf in program.inputs],
    )
    outputs = [results[i].name for i in program.kept]
    trace = Trace(
        name=program.name,
        leaves=tuple(walk.leaves),
        nodes=tuple(walk.nodes),
        outputs=tuple(dict.fromkeys(outputs)),
        notes=(*program.notes, *walk.notes),
        num_source_operators=walk.num_equations,
    )
    return recover_batch_norm(name_means(order_products(trace)), program.statistics)


class Walk:
    """The nodes while a program is read."""

    def __init__(self, program: Program) -> None:
        self.name = program.name
        self.nodes: list[Node] = []
        self.leaves: list[Leaf] = [*program.captured, *program.inputs]
        self.notes: dict[str, None] = {}
        self.num_equations = 0
        # The turn of a loop that is being written out, and how many loops there were.
        self.turn: tuple[int, int] | None = None
        self.num_loops = 0
        # Arrays, operators and weights (by path) behind values, by name.
        self.known: dict[str, Any] = {}
        self.makers: dict[str, Op] = {}
        self.joined: dict[str, tuple[tuple[Value, Any], ...]] = {}
        self.weights = {leaf.value.name: leaf.value.name for leaf in self.leaves if leaf.role == "parameter"}
        self._places = Places(program.entry)
        self._taken = {leaf.value.name for leaf in self.leaves}
        self._counts: dict[str, int] = {}

    def run(
        self, jaxpr: Any, constants: Sequence[Value], inputs: Sequence[Value], outer: tuple[str, ...] = ()
    ) -> list[Value]:
        """Add the nodes of a program; return its results."""
        found: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

        def read(variable: Any) -> Value:
            return self.literal(variable) if hasattr(variable, "val") else found[variable]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(variable) for variable in equation.invars], outer)
            found.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[Value], outer: tuple[str, ...]) -> list[Value]:
        """Add the nodes of one equation; return its results."""
        name = equation.primitive.name
        if name in _INLINED:
            inner = next((equation.params[key] for key in _INLINED[name] if key in equation.params), None)
            if inner is None:
                raise ModelError(f"operator {name}{where(equation)} calls a function that cannot be looked into")
            return self.inline(inner, inputs, (*outer, *scopes(equation), *inlined(equation)))
        self.num_equations += 1
        if name in CONTROL:
            return CONTROL[name](self, equation, inputs, outer)
        if name in _REFUSED:
            raise ModelError(f"operator {name}{where(equation)} {_REFUSED[name]}")
        results = tuple(self._result(name, variable.aval) for variable in equation.outvars)
        self.add(equation, name, equation.params, inputs, results, outer)
        return list(results)

    def inline(self, inner: Any, inputs: Sequence[Value], outer: tuple[str, ...]) -> list[Value]:
        """Add the nodes of a function that is called with some values; return its results."""
        closed = hasattr(inner, "consts")
        constants = [self.constant(array) for array in inner.consts] if closed else []
        return self.run(inner.jaxpr if closed else inner, constants, inputs, outer)

    def add(
        self,
        equation: Any,
        name: str,
        params: Any,
        inputs: Sequence[Value],
        results: tuple[Value, ...],
        outer: tuple[str, ...],
    ) -> None:
        """Add the nodes of a primitive with its results."""
        call = Call(
            name=name,
            params=params,
            inputs=tuple(inputs),
            results=results,
            known={value.name: self.known[value.name] for value in inputs if value.name in self.known},
            makers={value.name: self.makers[value.name] for value in inputs if value.name in self.makers},
            joined={value.name: self.joined[value.name] for value in inputs if value.name in self.joined},
        )
        if name == "concatenate" and not results[0].is_float:
            self.joined[results[0].name] = tuple((value, self.known.get(value.name)) for value in inputs)
        self._learn(call)
        self.steps(equation, name, translate(call), outer)

    def steps(self, equation: Any, name: str, steps: Sequence[Step], outer: tuple[str, ...]) -> None:
        """Add the nodes of some steps."""
        for step in steps:
            weight = next((self.weights[read] for read in step.inputs if read in self.weights), "")
            if len(step.inputs) == 1 and weight:
                # What is computed of one weight alone still tells where its reader is.
                self.weights.update((value.name, weight) for value in step.outputs)
                weight = ""
            self.nodes.append(
                Node(
                    name=step.outputs[0].name,
                    op=step.op,
                    inputs=tuple(Use(value=read) for read in step.inputs),
                    outputs=step.outputs,
                    origin=replace(self._places.origin(equation, name, outer, weight), turn=self.turn),
                )
            )
            self.makers.update((value.name, step.op) for value in step.outputs)

    def value(self, wish: str, shape: Sequence[int], dtype: str) -> Value:
        """Return a value whose name nothing else has."""
        return Value(name=self._name(wish), shape=tuple(shape), dtype=dtype)

    def literal(self, variable: Any) -> Value:
        """Return the value of a number in the program's text."""
        return self.constant(variable.val, variable.aval)

    def constant(self, array: Any, aval: Any = None) -> Value:
        """Return the value of an array that the program holds."""
        import numpy as np

        aval = aval or array
        value = self.value("number" if not aval.shape else "constant", aval.shape, dtype_name(aval.dtype))
        self.leaves.append(Leaf(value=value, role="constant"))
        is_small = not aval.shape or not value.is_float
        if is_small and int(np.prod(aval.shape)) <= _MAX_KNOWN and not dtype_name(aval.dtype).startswith("key"):
            self.known[value.name] = np.asarray(array)
        return value

    def _result(self, name: str, aval: Any) -> Value:
        return Value(name=self._name(name), shape=shape_of(aval, name), dtype=dtype_name(aval.dtype))

    def _name(self, wish: str) -> str:
        while True:
            self._counts[wish] = self._counts.get(wish, 0) + 1
            name = f"{wish}_{self._counts[wish]}"
            if name not in self._taken:
                self._taken.add(name)
                return name

    def _learn(self, call: Call) -> None:
        """Remember the whole numbers that a primitive computes of known ones."""
        if len(call.results) != 1 or len(call.known) < len({value.name for value in call.inputs}):
            return
        (result,) = call.results
        arrays = [call.known[value.name] for value in call.inputs]
        found = evaluate(call.name, call.params, arrays, result.shape, result.dtype)
        if found is not None:
            self.known[result.name] = found


def shape_of(aval: Any, name: str) -> tuple[int, ...]:
    """Return the shape of an abstract value; ModelError where it has none, or a dim of unknown size."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        raise ModelError(f"operator {name} gives a {type(aval).__name__}, which is no array; it cannot be imported")
    for extent in shape:
        if not isinstance(extent, int):
            raise ModelError(
                f"operator {name} gives a dim of unknown size, {extent}; trace the function with shapes that are whole "
                "numbers"
            )
    return tuple(int(extent) for extent in shape)


def dtype_name(dtype: Any) -> str:
    """Return a type as the intermediate form has it; a complex number, which has a gradient too, counts as a float."""
    name = str(dtype)
    return "float8" if name.startswith("float8") else "float64" if name.startswith("complex") else name


_MAX_KNOWN = 1 << 16

_INLINED: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "xla_call": ("call_jaxpr",),
    "remat": ("jaxpr", "call_jaxpr"),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("call_jaxpr", "fun_jaxpr"),
    "custom_lin": ("call_jaxpr",),
    "custom_dce_call": ("fun_jaxpr", "call_jaxpr"),
    "custom_jvp_call_jaxpr": ("fun_jaxpr", "jaxpr"),
    "custom_vmap_call": ("call",),
    "call": ("call_jaxpr",),
    "remat_opt": ("fwd_jaxpr",),
    "composite": ("jaxpr",),
}
"""Primitives that call a function, and the parameters that may hold it."""

_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("shard_map", "xla_pmap", "pmap"),
        "splits the model over devices by hand, which is what PaSE decides; import the function without it",
    ),
    **dict.fromkeys(
        ("pure_callback", "io_callback", "debug_callback", "ffi_call", "python_callback"),
        "runs code outside of the program, which cannot be looked into; import the function without it",
    ),
}
