"""`check_forward`: reject functions that train their parameters themselves, by their results and computation.

A training step returns the gradients of its parameters, or the updated parameters. Two properties identify it:

* a result has the paths and the shapes of the parameters' pytree, or of the greater part of a training state
(parameters,
  moments), or the results have all of their shapes in another order;
* the result depends on an equation of reverse-mode differentiation, which JAX names "transpose".

A step with hand-written gradients lacks the second: it is recognised if all matrices of such a pytree are computed from
the inputs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from pase.errors import ModelError
from pase.importers.jax.program import programs

_IS_DATA, _IS_REVERSED, _IS_MADE = 1, 2, 4
"""Dependencies of a value, as bits: an input, an equation of reverse-mode differentiation, any equation."""

_SHARE = 0.25
"""Of the parameters' values, at least, in a part of their pytree that counts as the parameters of a training state."""

_Path = tuple[str, ...]
_Shape = tuple[int, ...]


def check_forward(jax: Any, function: str, closed: Any, parameters: Any, num_held: int, result: Any) -> str:
    """Return a note where a function differentiates something within its computation, "" otherwise.

    Args:
        jax: The module.
        function: Its name.
        closed: Its program, whose first arguments are the parameters.
        parameters: The parameters.
        num_held: Number of the first arguments that are parameters or constants.
        result: Its result, a pytree of shapes.

    Raises:
        ModelError: It is a training step.
    """
    trained = _floats(jax, parameters)
    behind = _Behind().of(closed.jaxpr, _given(closed.jaxpr, num_held), is_reversed=False)
    paths = [_path(jax, path) for path, _ in jax.tree_util.tree_flatten_with_path(result)[0]]
    kinds = dict(zip(paths, behind, strict=True))
    found = _floats(jax, result)
    is_reversed = any(kind & _IS_REVERSED for kind in behind)
    names = _trained(trained, found, kinds, [variable.aval.shape for variable in closed.jaxpr.invars[num_held:]])
    if names:
        shown = ", ".join(".".join(path) or "the parameters" for path in names[:3]) + (", …" if len(names) > 3 else "")
        raise ModelError(
            f"function {function!r} is a training step already: it returns gradients of its parameters, or the "
            f"parameters that they have changed ({shown}); give the function that returns the loss (or the outputs) "
            "instead: PaSE differentiates it and updates the parameters itself"
        )
    if not is_reversed:
        return ""
    return (
        "the function takes gradients within what it computes (jax.grad or jax.vjp): they count as part of its forward "
        "pass, which is differentiated as a whole"
    )


def _trained(
    trained: dict[_Path, _Shape], found: dict[_Path, _Shape], kinds: dict[_Path, int], inputs: Sequence[_Shape]
) -> list[_Path]:
    """Return the parameters whose gradients, or whose next values, are among the results."""
    reversed_ = {path: shape for path, shape in found.items() if kinds[path] & _IS_REVERSED}
    if trained.keys() == {()}:
        # A single array cannot be recognised by its pytree: its shape must differ from an input, whose gradient it
        # could be.
        (shape,) = trained.values()
        return [()] if shape in reversed_.values() and shape not in inputs else []
    own = _parts(trained)
    least = _SHARE * sum(prod(shape) for shape in trained.values())
    for leaves, starts in _parts(found).items():
        size = sum(prod(shape) for _, shape in leaves)
        heads = own.get(leaves, [])
        if () in heads or (heads and len(leaves) > 1 and size >= least):
            results = [(*starts[0], *path) for path, _ in leaves]
            if any(path in reversed_ for path in results):
                return sorted((*heads[0], *path) for path, _ in leaves)
            matrices = [path for path in results if len(found[path]) > 1]
            by_hand = _IS_DATA | _IS_MADE
            if () in heads and len(matrices) > 1 and all(kinds[path] & by_hand == by_hand for path in matrices):
                return sorted(trained)
    wanted, given = Counter(trained.values()), Counter(reversed_.values())
    return sorted(trained) if len(trained) > 1 and wanted <= given else []


def _parts(leaves: dict[_Path, _Shape]) -> dict[frozenset[tuple[_Path, _Shape]], list[_Path]]:
    """Return where each part of a pytree stands, by the paths within it and their shapes."""
    below: dict[_Path, list[tuple[_Path, _Shape]]] = {}
    for path, shape in leaves.items():
        for depth in range(len(path) + 1):
            below.setdefault(path[:depth], []).append((path[depth:], shape))
    found: dict[frozenset[tuple[_Path, _Shape]], list[_Path]] = {}
    for start, part in below.items():
        found.setdefault(frozenset(part), []).append(start)
    return found


def _floats(jax: Any, tree: Any) -> dict[_Path, _Shape]:
    """Return the shapes of the float arrays in a pytree, by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        _path(jax, path): tuple(leaf.shape)
        for path, leaf in leaves
        if hasattr(leaf, "shape") and "float" in str(getattr(leaf, "dtype", ""))
    }


def _path(jax: Any, path: tuple[Any, ...]) -> _Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _given(jaxpr: Any, num_held: int) -> list[int]:
    return [0 if i < num_held else _IS_DATA for i in range(len(jaxpr.invars))]


class _Behind:
    """Dependencies of the results of programs, cached for repeated calls with equal dependencies."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, tuple[int, ...], bool], list[int]] = {}

    def of(self, jaxpr: Any, given: Sequence[int], *, is_reversed: bool) -> list[int]:
        """Return the dependencies of each result; given: those of each argument."""
        key = (id(jaxpr), tuple(given), is_reversed)
        if key not in self._read:
            kinds = dict.fromkeys(jaxpr.constvars, _IS_DATA) | dict(zip(jaxpr.invars, given, strict=True))
            for equation in jaxpr.eqns:
                reads = [0 if hasattr(v, "val") else kinds[v] for v in equation.invars]
                kinds.update(zip(equation.outvars, self._equation(equation, reads, is_reversed), strict=True))
            self._read[key] = [0 if hasattr(v, "val") else kinds[v] for v in jaxpr.outvars]
        return self._read[key]

    def _equation(self, equation: Any, reads: list[int], is_reversed: bool) -> list[int]:
        is_reversed = is_reversed or _is_transposed(equation)
        inner = programs(equation)
        name = equation.primitive.name
        if len(inner) == 1 and len(inner[0].invars) == len(reads) and name not in ("scan", "while"):
            return self.of(inner[0], reads, is_reversed=is_reversed)
        kind = _IS_MADE
        for read in reads:
            kind |= read
        if is_reversed or any(_is_transposed(each) for program in inner for each in _equations(program)):
            kind |= _IS_REVERSED
        return [kind] * len(equation.outvars)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in programs(equation):
            yield from _equations(inner)


def _is_transposed(equation: Any) -> bool:
    stack = getattr(equation.source_info.name_stack, "stack", ())
    return any(getattr(entry, "name", "") == "transpose" and type(entry).__name__ == "Transform" for entry in stack)
