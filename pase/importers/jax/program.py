"""`read_program`: convert a program of JAX primitives to a trace.

Inner functions are inlined. Loops of known length are unrolled if their iterations have weights of their own; other
loops are one vertex. Branches are followed if their predicate is known; other control flow depends on data and is
rejected.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pase.errors import ModelError
from pase.importers.ir import ops
from pase.importers.ir.call import Translation, floats_first
from pase.importers.ir.trace import Leaf, Node, Trace, Use, Value, recurrent_flop
from pase.importers.jax.call import JaxCall, Place, Site, Writer, inlined, scopes, where
from pase.importers.jax.operators import ELEMENTWISE, MOVEMENT, PRODUCTS, STATED
from pase.importers.passes.views import without_dead_nodes

TRANSLATIONS: dict[str, Translation] = {**ELEMENTWISE, **PRODUCTS, **MOVEMENT, **STATED}
"""By the primitive's name; of one that is not here, the shapes are known."""

MAX_EQUATIONS = 60_000
"""Of a loop over layers that is written out."""

MAX_EQUATIONS_WITHOUT_WEIGHTS = 2_000
"""Of any other loop: a longer one is one vertex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A program that was read.

    Attributes:
        trace: Its trace.
        sites: Its equations by place, inner ones before those that contain them.
        makers_at: Place of the equation of each value that a node of the trace writes, by name.
        returned: Names of the values that it returns.
    """

    trace: Trace
    sites: Mapping[Place, Site]
    makers_at: Mapping[str, Place]
    returned: tuple[str, ...]


def read_program(
    name: str, closed: Any, *, leaves: Sequence[Leaf], kept: Sequence[int], entry: str, statistics: Sequence[str]
) -> Read:
    """Convert a program to a trace; ModelError where it has control flow that depends on data.

    Args:
        name: Name of the model.
        closed: The program, a closed jaxpr.
        leaves: Leaves for its constants, then its arguments.
        kept: Positions of the results that the model returns.
        entry: Name of the user's function.
        statistics: Names of constants that persist between steps (running means and variances).
    """
    walk = _Walk(leaves, entry)
    results = walk.run(closed.jaxpr, [leaf.value for leaf in leaves], ())
    trace = Trace(
        name=name,
        leaves=tuple(walk.leaves),
        nodes=tuple(walk.nodes),
        outputs=tuple(dict.fromkeys(results[i].name for i in kept)),
        num_source_operators=walk.num_equations,
    )
    return Read(
        trace=recognise(trace, statistics),
        sites=walk.sites,
        makers_at=walk.makers_at,
        returned=tuple(value.name for value in results),
    )


def values_of(
    closed: Any, names: Iterable[str], *, leaves: Sequence[Leaf], entry: str, arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values of a program that follow from arrays that it holds or is given.

    Args:
        closed: The program.
        names: Of the values, as its trace has them.
        leaves: As for `read_program`.
        entry: As for `read_program`.
        arrays: Those that are given, by the names of leaves.
    """
    walk = _Walk(leaves, entry)
    walk.run(closed.jaxpr, [leaf.value for leaf in leaves], ())
    found: dict[str, Any] = {**walk.arrays, **arrays}

    def value(name: str) -> Any:
        if name not in found and name in walk.computed:
            equation, inputs, place = walk.computed[name]
            given = [value(each) for each in inputs]
            if all(each is not None for each in given):
                results = equation.primitive.bind(*given, **equation.params)
                found[name] = results[place] if equation.primitive.multiple_results else results
        return found.setdefault(name, None)

    return {name: value(name) for name in names if value(name) is not None}


class _Walk(Writer):
    """Reads programs and their inner programs, equation by equation.

    Attributes:
        sites: The equations by place.
        num_equations: Number of equations read.
        computed: For each value, by name, the equation that computes it, its inputs, and the number of the result.
    """

    def __init__(self, leaves: Sequence[Leaf], entry: str) -> None:
        super().__init__(leaves, entry)
        self.num_equations = 0
        self.computed: dict[str, tuple[Any, list[str], int]] = {}
        self.sites: dict[Place, Site] = {}
        self._num_loops = 0

    def run(self, jaxpr: Any, inputs: Sequence[Value], outer: tuple[str, ...]) -> list[Value]:
        """Add the nodes of a program and return its results; inputs: its constants, then its arguments."""
        found: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(variable: Any) -> Value:
            return self.constant(variable.val, variable.aval) if hasattr(variable, "val") else found[variable]

        within = self.place
        for number, equation in enumerate(jaxpr.eqns):
            self.place = place = (*within, number)
            given = [read(variable) for variable in equation.invars]
            results = self._equation(equation, given, outer)
            self.sites[place] = Site(
                primitive=equation.primitive.name,
                inputs=tuple(value.name for value in given),
                outputs=tuple(value.name for value in results),
            )
            found.update(zip(equation.outvars, results, strict=True))
        self.place = within
        return [read(variable) for variable in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Value], outer: tuple[str, ...]) -> Sequence[Value]:
        """Add the nodes of one equation; return its results."""
        name = equation.primitive.name
        if name in _INLINED:
            inner = next((equation.params[key] for key in _INLINED[name] if key in equation.params), None)
            if inner is None:
                raise ModelError(f"operator {name}{where(equation)} calls a function that cannot be looked into")
            return self._inline(inner, inputs, (*outer, *scopes(equation), *inlined(equation)))
        self.num_equations += 1
        if name == "scan":
            return self._scan(equation, inputs, outer)
        if name == "cond":
            return self._branch(equation, inputs, outer)
        if name in _REFUSED:
            raise ModelError(f"operator {name}{_REFUSED[name].format(where(equation))}")
        call = self.call(equation, inputs, outer)
        self.learn(call)
        self.computed |= {x.name: (equation, [i.name for i in inputs], k) for k, x in enumerate(call.results)}
        TRANSLATIONS.get(name, JaxCall.opaque)(call)
        return call.results

    def _inline(self, inner: Any, inputs: Sequence[Value], outer: tuple[str, ...]) -> list[Value]:
        """Add the nodes of a function that is called with some values; return its results."""
        if not hasattr(inner, "consts"):
            return self.run(inner, inputs, outer)
        return self.run(inner.jaxpr, [*map(self.constant, inner.consts), *inputs], outer)

    def _branch(self, equation: Any, inputs: list[Value], outer: tuple[str, ...]) -> list[Value]:
        """Take the branch that a known predicate chooses."""
        which, *given = inputs
        branches = equation.params["branches"]
        known = self.known.get(which.name)
        if known is None:
            raise ModelError(
                f"operator cond is control flow{where(equation)}: it chooses between branches by data; write it with "
                "jnp.where, or import a branch"
            )
        chosen = branches[min(max(int(known), 0), len(branches) - 1)]
        return self._inline(chosen, given, (*outer, *scopes(equation)))

    def _scan(self, equation: Any, inputs: list[Value], outer: tuple[str, ...]) -> Sequence[Value]:
        """Unroll a loop whose iterations have weights of their own (stacked layers), or that is short.

        A loop whose iterations share their weights (a recurrent cell over steps), or that is too long, is one vertex.
        """
        params = equation.params
        length, body = int(params["length"]), params["jaxpr"].jaxpr
        first, last = int(params["num_consts"]), int(params["num_consts"]) + int(params["num_carry"])
        constants, carry, stacked = inputs[:first], inputs[first:last], inputs[last:]
        outer = (*outer, *scopes(equation))
        has_own = any(value.name in self.weights for value in stacked)
        has_shared = any(value.name in self.weights for value in (*constants, *carry))
        size = length * _num_equations(body)
        is_short = size <= (MAX_EQUATIONS if has_own else MAX_EQUATIONS_WITHOUT_WEIGHTS)
        if length == 1 or (is_short and (has_own or not has_shared)):
            return self._unrolled(self.call(equation, inputs, outer), constants, carry, stacked)
        call = self.call(equation, inputs, outer)
        flop = length * _product_flop(body)
        cell = _cell_of(stacked, carry, flop)
        if cell is not None and len(equation.outvars) <= len(carry) + 1:
            # The sequence comes first, then the last states.
            outputs = [*call.results[len(carry) :], *(call.results[i] for i in _read(equation) if i < len(carry))]
            if outputs:
                reads = [value for value in (stacked[0], *constants, *carry) if value.is_float]
                call.write(cell, reads, outputs)
        else:
            _write_loop(call, constants, carry, stacked, flop)
        return call.results

    def _unrolled(self, call: JaxCall, constants: list[Value], carry: list[Value], stacked: list[Value]) -> list[Value]:
        """Add the nodes of every iteration; return the last states, and the stacked rows of the iterations."""
        params = call.arguments
        num_carry, turns = len(carry), range(int(params["length"]))
        rows: list[list[Value]] = [[] for _ in call.results[num_carry:]]
        outside, place = self.turn, self.place
        self._num_loops += len(turns) > 1
        loop = self._num_loops
        for turn in reversed(turns) if params["reverse"] else turns:
            given = [self._row(call, value, turn) for value in stacked]
            self.turn, self.place = (loop, turn) if len(turns) > 1 else outside, (*place, turn)
            results = self._inline(params["jaxpr"], [*constants, *carry, *given], (*call.outer, f"#{turn}"))
            self.turn, self.place = outside, place
            carry = results[:num_carry]
            for row, value in zip(rows, results[num_carry:], strict=True):
                row.append(value)
        for i, row in enumerate(rows, num_carry):
            if i in _read(call.equation) and row:
                parts = [call.reshape(value, (1, *value.shape)) for value in row]
                call.concat(parts[::-1] if params["reverse"] else parts, 0, out=call.results[i])
        return [*carry, *call.results[num_carry:]]

    def _row(self, call: JaxCall, value: Value, turn: int) -> Value:
        """Return the slice of a stacked value that an iteration reads."""
        row = call.reshape(call.cut(value, 0, turn), value.shape[1:])
        weight = self.weights.get(value.name)
        if weight is not None:
            head, _, last = weight.rpartition(".")
            self.weights[row.name] = f"{head}.{turn}.{last}" if head else f"{turn}.{last}"
        if value.name in self.known:
            self.known[row.name] = self.known[value.name][turn]
        return row


def _write_loop(call: JaxCall, constants: list[Value], carry: list[Value], stacked: list[Value], flop: float) -> None:
    """Append one vertex for all iterations, which can be split along a batch dim that states and steps share."""
    num_carry, length = len(carry), int(call.arguments["length"])
    wanted = _read(call.equation)
    batch = _batch([*carry, *(call.results[i] for i in wanted if i < num_carry)], [*stacked, *call.results[num_carry:]])
    # Stacked inputs have their batch after the steps; in the outputs it comes first, as in the states.
    is_turned = batch is not None and num_carry > 0
    own = []
    for i in wanted:
        result = call.results[i]
        is_own = is_turned and i >= num_carry
        own.append(
            call.between((result.shape[1], result.shape[0], *result.shape[2:]), result.dtype) if is_own else result
        )
    if not own:
        return
    reads = floats_first((*stacked, *carry, *constants))
    place = int(reads[0].is_float and reads[0] in stacked)
    points = sum(
        prod(variable.aval.shape) for inner in call.arguments["jaxpr"].jaxpr.eqns for variable in inner.outvars
    )
    size = prod(next((value.shape for value in own if value.is_float), (1,)))
    op = ops.Generic(
        # Iterations without carried state are independent, like examples.
        passes=((0, 0),) if not num_carry and place else () if batch is None else ((place, 0),),
        flop_per_point=float(length * points) / max(1, size),
        is_index=not any(value.is_float for value in own),
        product_flop=flop,
    )
    call.write(op, reads, own)
    for i, value in zip(wanted, own, strict=True):
        if value is not call.results[i]:
            call.transpose(value, (1, 0, *range(2, len(value.shape))), out=call.results[i])


def _batch(states: Sequence[Value], stacked: Sequence[Value]) -> int | None:
    """Return the extent that all states begin with, and all that is stacked after its steps; None for none."""
    leading = {value.shape[:1] for value in states if value.is_float}
    leading |= {value.shape[1:2] for value in stacked if value.is_float}
    (extent, *others) = leading or {()}
    return extent[0] if extent and not others and extent[0] > 1 else None


def _cell_of(stacked: Sequence[Value], carry: Sequence[Value], flop: float) -> ops.Recurrent | None:
    """Return the recurrent cell that a loop represents; None for other loops.

    Args:
        stacked: Inputs of which each iteration reads a slice, [s, b, d].
        carry: Carried states, [b, units].
        flop: FLOP of the products of all iterations; for a cell, those of its gates with an input and a state.
    """
    if len(stacked) != 1 or len(stacked[0].shape) != 3 or not all(v.is_float for v in (*stacked, *carry)):
        return None
    shapes = {value.shape for value in carry}
    (x,), shape = stacked, next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 2 or shape[0] != x.shape[1]:
        return None
    cells = [ops.Recurrent(cell=cell, units=shape[1], is_batch_first=False) for cell in _CELLS.get(len(carry), ())]  # type: ignore[arg-type]
    return next((op for op in cells if recurrent_flop(op, x.shape) == flop), None)


_CELLS: dict[int, tuple[str, ...]] = {1: ("gru", "rnn"), 2: ("lstm",)}
"""By the number of states."""


def _product_flop(jaxpr: Any) -> float:
    """Return the FLOP of all products and convolutions in a program, 2 for each multiplication."""
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [_product_flop(program) for program in programs(equation)]
        # Of several branches, one is taken.
        own = max(inner, default=0.0) if name == "cond" else sum(inner)
        total += own * (int(params["length"]) if name == "scan" else 1)
        if name == "dot_general":
            left = equation.invars[0].aval.shape
            over = params["dimension_numbers"][0][0]
            total += 2.0 * prod(equation.outvars[0].aval.shape) * prod(left[int(i)] for i in over)
        elif name == "conv_general_dilated":
            filters = equation.invars[1].aval.shape
            channels = filters[params["dimension_numbers"].rhs_spec[0]]
            spread = prod(params["lhs_dilation"])
            total += 2.0 * prod(equation.outvars[0].aval.shape) * prod(filters) / channels / spread
    return total


def _num_equations(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        times = int(equation.params["length"]) if equation.primitive.name == "scan" else 1
        total += 1 + times * sum(_num_equations(program) for program in programs(equation))
    return total


def programs(equation: Any) -> list[Any]:
    """Return the programs that an equation runs."""
    found: list[Any] = []
    for parameter in equation.params.values():
        each = parameter if isinstance(parameter, tuple | list) else (parameter,)
        own = [getattr(one, "jaxpr", one) for one in each]
        found += [one for one in own if hasattr(one, "eqns")]
    return found


def _read(equation: Any) -> list[int]:
    """Return the positions of an equation's results that something reads."""
    return [i for i, variable in enumerate(equation.outvars) if type(variable).__name__ != "DropVar"]


_INLINED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint", "composite"), ("jaxpr",)),
    **dict.fromkeys(
        ("closed_call", "core_closed_call", "core_call", "xla_call", "custom_lin", "call"), ("call_jaxpr",)
    ),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), ("call_jaxpr", "fun_jaxpr")),
    "remat": ("jaxpr", "call_jaxpr"),
    "custom_dce_call": ("fun_jaxpr", "call_jaxpr"),
    "custom_jvp_call_jaxpr": ("fun_jaxpr", "jaxpr"),
    "custom_vmap_call": ("call",),
    "remat_opt": ("fwd_jaxpr",),
}
"""Primitives that call a function, and the parameters that may hold it."""

_REFUSED: dict[str, str] = {
    "while": " is control flow{}: it runs as often as its data says; write it as jax.lax.scan or fori_loop, with a "
    "known number of turns",
    **dict.fromkeys(
        ("shard_map", "xla_pmap", "pmap"),
        "{} splits the model over devices by hand, which is what PaSE decides; import the function without it",
    ),
    **dict.fromkeys(
        ("pure_callback", "io_callback", "debug_callback", "ffi_call", "python_callback"),
        "{} runs code outside of the program, which cannot be looked into; import the function without it",
    ),
}
"""Primitives that cannot be imported, and the reasons; {}: their position."""


# -- what JAX writes as several primitives, and is one operator: means, products, batch normalisation


def recognise(trace: Trace, statistics: Iterable[str]) -> Trace:
    """Return the trace with compound operators recognised.

    Args:
        trace: Trace with a node for each primitive.
        statistics: Names of the constants that are running means and variances.
    """
    return recover_batch_norm(name_means(order_products(trace)), statistics)


def order_products(trace: Trace) -> Trace:
    """Return the trace with a transposition merged into a product if nothing else reads the product.

    JAX fixes the order of a product's dims and transposes it afterwards, where a function is mapped over a batch or an
    einsum has another order.
    """
    nodes: dict[str, Node] = {}
    merged: dict[str, str] = {}
    for node in trace.nodes:
        maker = _only_read_by(trace, node) if isinstance(node.op, ops.Transpose) else None
        maker = nodes.get(merged.get(maker.name, maker.name)) if maker is not None else None
        if maker is None or not isinstance(node.op, ops.Transpose) or not isinstance(maker.op, ops.Contract):
            nodes[node.name] = node
            continue
        output = "".join(maker.op.output[i] for i in node.op.order)
        merged[node.name] = maker.name
        nodes[maker.name] = replace(maker, op=replace(maker.op, output=output), outputs=node.outputs)
    return replace(trace, nodes=tuple(nodes.values())) if merged else trace


def _only_read_by(trace: Trace, node: Node) -> Node | None:
    """Return the node that computes a node's first input, if nothing else reads that."""
    value = node.inputs[0].value
    return None if len(trace.users[value]) != 1 or value in trace.outputs else trace.producer.get(value)


def name_means(trace: Trace) -> Trace:
    """Return the trace with sums that are divided by how many elements were added up as means."""
    made: dict[str, Node] = {}
    for node in trace.nodes:
        is_quotient = isinstance(node.op, ops.Pointwise) and node.op.functions == ("divide",) and len(node.inputs) == 1
        maker = _only_read_by(trace, node) if is_quotient else None
        while maker is not None and isinstance(maker.op, ops.Reshape):  # dims of one element that are put back
            maker = _only_read_by(trace, maker)
        if maker is None or not isinstance(maker.op, ops.Reduce) or maker.op.function != "sum":
            continue
        assert isinstance(node.op, ops.Pointwise)
        shape = trace.shape(maker.inputs[0])
        if not node.op.constant_first and node.op.constant == prod(shape[i] for i in maker.op.over):
            made[maker.name] = replace(maker, op=replace(maker.op, function="mean"))
            made[node.name] = replace(node, op=ops.Identity())
    return replace(trace, nodes=tuple(made.get(node.name, node) for node in trace.nodes)) if made else trace


def recover_batch_norm(trace: Trace, statistics: Iterable[str]) -> Trace:
    """Return the trace with ``(x - mean) / √(variance + ε) · scale + shift`` as one operator.

    statistics: names of the constants that the mean and the variance are. Training uses that operator, which computes
    them from the batch.
    """
    kept = frozenset(statistics)
    if not kept:
        return trace
    sources = _sources(trace)
    made = {}
    for node in trace.nodes:
        if isinstance(node.op, ops.Pointwise) and node.op.functions == ("subtract",) and len(node.inputs) == 2:
            found = _normalisation(trace, node, sources, kept)
            if found is not None:
                made[found.name] = found
    nodes = tuple(made.get(node.name, node) for node in trace.nodes)
    return without_dead_nodes(replace(trace, nodes=nodes)) if made else trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """What a value depends on: leaves, and the functions in between."""

    leaves: frozenset[str]
    functions: frozenset[str]


def _sources(trace: Trace) -> Mapping[str, _Sources]:
    """Return the sources of every value that depends on no input."""
    found = {
        leaf.value.name: _Sources(leaves=frozenset([leaf.value.name]), functions=frozenset())
        for leaf in trace.leaves
        if leaf.role != "input"
    }
    for node in trace.nodes:
        parts = [found.get(use.value) for use in node.inputs]
        if any(part is None for part in parts):
            continue
        told = [part for part in parts if part is not None]
        own = node.op.functions if isinstance(node.op, ops.Pointwise) else ()
        both = _Sources(
            leaves=frozenset().union(*(part.leaves for part in told)),
            functions=frozenset(own).union(*(part.functions for part in told)),
        )
        found.update((value.name, both) for value in node.outputs)
    return found


def _normalisation(
    trace: Trace, node: Node, sources: Mapping[str, _Sources], statistics: frozenset[str]
) -> Node | None:
    """Return the normalisation that begins with the subtraction of a mean, as the node that ends it."""
    x, mean = node.inputs
    if x.value in sources or mean.value not in sources or not sources[mean.value].leaves & statistics:
        return None
    shape = trace.values[x.value].shape
    own = trace.values[mean.value].shape
    channels = [len(shape) - len(own) + i for i, extent in enumerate(own) if extent > 1]
    if len(channels) != 1 or len(shape) < 2:
        return None
    (channel,) = channels
    roles: dict[str, list[str]] = {"scale": [], "shift": []}
    is_scaled, current = False, node
    last: Node | None = None
    while True:
        users = trace.users.get(current.outputs[0].name, ())
        if len(users) != 1 or current.outputs[0].name in trace.outputs:
            break
        (current,) = users
        if isinstance(current.op, ops.Identity):
            continue
        others = [sources[use.value] for use in current.inputs if use.value in sources]
        functions = current.op.functions if isinstance(current.op, ops.Pointwise) else ()
        role = _ROLES.get(functions[0]) if len(functions) == 1 else None
        if role is None or len(current.inputs) != 2 or len(others) != 1:
            break
        roles[role] += [leaf for leaf in others[0].leaves if trace.leaf[leaf].role == "parameter"]
        is_scaled |= bool(others[0].leaves & statistics) and not others[0].functions.isdisjoint(_ROOTS)
        last = current
        if role == "shift":
            break
    weights = [*roles["scale"], *roles["shift"]]
    extent = (shape[channel],)
    if last is None or not is_scaled or any(trace.values[name].shape != extent for name in weights):
        return None
    if any(len(names) > 1 for names in roles.values()):
        return None
    op = ops.Normalise(
        kind="batch",
        over=tuple(i for i in range(len(shape)) if i != channel),
        channels=(channel,),
        has_scale=bool(roles["scale"]),
        has_shift=bool(roles["shift"]),
    )
    return replace(last, op=op, inputs=(x, *(Use(value=name) for name in weights)))


_ROLES = {"multiply": "scale", "divide": "scale", "add": "shift"}
_ROOTS = frozenset({"rsqrt", "sqrt"})
