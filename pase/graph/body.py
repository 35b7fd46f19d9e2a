"""`Body`: the computation of an operator, as typed steps over the named dims of its iteration space.

Tensors have named dims, so a step does not depend on their memory order. A tensor that lacks a dim is broadcast along
it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TypeVar

from pase.common.structs import Positive, Whole
from pase.common.words import short
from pase.errors import GraphError, unknown_name
from pase.graph.functions import FUNCTIONS, POINTWISE, Option
from pase.graph.sources import source_call

Operand = str | float
"""A tensor, by name, or a number."""

OptionT = TypeVar("OptionT", str, int, float, bool, tuple[int, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One tensor and the function that computes it.

    `pase.graph.functions` lists all functions. The operands and options of those that need explanation:

    * Contractions and selections: "einsum" contracts tensors to `dims`. "causal" masks scores of later keys; its `dims`
    are
      the queries' and the keys'. "pick" takes elements of a tensor by index along the dim in `dims`. "softmax" and
      "log_softmax" are over `dims`.
    * "batch_norm" takes a tensor, a scale and a shift, as "normalise" does, and the running mean and variance that are
    used
      when the network is not training.
    * "convolve", "pool" and "embedding" are defined by the operator's accesses. An embedding may have a `frozen` row
    that is
      not trained.
    * "concat", "padded", "piece" and "copy" only move data.
    * "convolve_transposed" of a tensor and filters is the adjoint of a convolution with the given `strides`,
    `dilations`
      and `pads` (before), one for each spatial dim. Its `dims` are the positions read, then those written, then the
      window's. `backwards` means that the first point of the window has the filters' last point.

    Functions for which frameworks have kernels, defined in elementary steps by `elementary`:

    * "attention" takes queries, keys and values. Its `dims` are batch, heads, queries, keys and features.
    * "masked_attention" also takes masks of the scores after the values: first `truths` boolean masks of the scores to
    use,
      then additive ones. Its `dims` are those of batch and heads, some of which keys and values may lack (grouped
      queries), then queries, keys and the values' features.
    * "normalise" subtracts a tensor's mean and divides by its deviation, over `dims`, then multiplies with the second
      operand and adds the third (numbers where the source has none). Mean and variance may be named results of an
      earlier step.
    * "softmax_loss" takes logits and labels. Its `dims` are those of the points, then the classes.

    Other layers:

    * "dropout" numbers the points row-major over `dims`.
    * "lstm" is a stack of layers over a sequence, defined by the accesses of its input, its two weights and its bias.
    * "recurrent" is a stack of layers of one cell over a sequence. Its operands are the sequence; for each layer and
      direction the weights of the input and of the hidden state, optionally with a bias each; then, where given, the
      first `hidden` states and an LSTM's cell states (`kept`). Its `dims` are batch, steps, directions, gates and
      units. The operator's further results are the same states after the last step.
    * "fan_out" copies a tensor whose gradient arrives as partial sums over `dims`.

    Functions of the framework that the model is written in, which only that framework computes:

    * "source" is result `number` of the framework's `operator` with literal `arguments`; `layouts` gives the dims of
    each
      operand, and of the result, in the operator's order (see `SourceCall`).
    * "grouped" multiplies rows, each with the matrix of its group. Its `dims` are the groups, the rows of an equal
    group,
      the columns and the features. The third operand gives the end of each group as a global row number.
    * "routed" gathers rows of a table by indices that are replicated on all devices, and sends them to the devices that
    hold
      their places. The first `rows` of its `dims` make up the places, the others index the table's rows; the first dim
      of either is split in the same way.
    * "whole" replaces the first `replaced` of `dims` by the others, of which every device holds all. Without any, it is
    a
      tensor that the operator reads, with these dims of its own.

    "cast" converts to another number type, where the source computes in it; targets with one type omit it.

    Functions of unsplit dims (inner ones, and iteration dims that are not split):

    * "cut" takes each `step`-th point from `start` of the first of `dims`; the second is the result's.
    * "join" concatenates tensors along a dim of each; the last of `dims` is the result's.
    * "view" reshapes the first `replaced` of `dims`, row-major, to the others.
    * "rows" gathers from the first operand along the dim in `dims` by the indices in the second.
    * "repeat" broadcasts a tensor along those of `dims` that it lacks.
    * "keep" updates the first operand, a constant, towards the second with `momentum` once per training step, starting
      from `initial`.

    A dim that replaces an unsplit dim may be split: each device then keeps its part of it.
    """

    result: str
    function: str
    operands: tuple[Operand, ...] = ()
    dims: tuple[str, ...] = ()
    options: tuple[tuple[str, Option], ...] = ()

    def option(self, name: str, default: OptionT) -> OptionT:
        """Return an option, or the default if the step does not have it."""
        value = dict(self.options).get(name, default)
        assert isinstance(value, type(default)), f"option {name} of {self.result} is {value!r}"
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor that is not trained: statistics, positions, a mask."""

    name: str
    """Its name within the layer."""
    dims: tuple[str, ...]
    """[rank] Its dims, of the iteration space or inner."""
    is_given: bool = False
    """Whether it is computed from the model's inputs in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """An integer tensor that another layer computes and every device holds completely: the experts of each token.

    Its dims are the inner dims that refer to it.
    """

    name: str
    """Its name within the layer."""
    layer: str
    """The layer that writes it."""
    output: Whole
    """Position among the outputs of that layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerDim:
    """A dim of tensors within a body that is not in the iteration space, so that it cannot be split.

    Attributes:
        tensor, axis: The weight and its dim, if it is a dim of a weight that every device holds completely; "" and 0 if
            steps produce it.
    """

    name: str
    extent: int
    tensor: str = ""
    axis: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input of the model that a layer reads."""

    read: Whole
    """Position among the layer's reads, from 0."""
    name: str
    """Name of the input."""
    shape: tuple[Positive, ...]
    """Shape of the whole input in the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the model."""

    name: str
    """Name of the output."""
    dims: tuple[str, ...]
    """Dims whose row-major order gives the elements of the output."""
    shape: tuple[Positive, ...]
    """Shape of the output in the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The computation of an operator.

    Attributes:
        steps: Steps in order, each tensor computed once; the last one is the operator's output.
        others: Names of further results, in the order of the operator's writes; "" for one that is not expressed.
        constants, borrowed: Tensors that the steps read in addition to the operator's reads.
        inputs, outputs: Inputs and outputs of the model that the operator reads and computes.
        inner: Dims that steps use in addition to the iteration space.
        problem: Why the computation cannot be expressed as steps, "" if it can.
        untrained: Why the steps differ from those of training, "" if they do not.
        own: Body for the source's own framework, if other frameworks cannot compute all of it.
    """

    steps: tuple[Step, ...] = ()
    constants: tuple[Constant, ...] = ()
    inputs: tuple[ModelInput, ...] = ()
    outputs: tuple[ModelOutput, ...] = ()
    inner: tuple[InnerDim, ...] = ()
    problem: str = ""
    untrained: str = ""
    others: tuple[str, ...] = ()
    borrowed: tuple[Borrowed, ...] = ()
    own: "Body | None" = None


def elementary(body: Body, *, trains: bool, kernels: Collection[str] = ()) -> Body:
    """Return a body in which functions that are defined by elementary steps are replaced by those steps.

    Args:
        body: Body of any operator.
        trains: Whether normalisations use the batch's statistics instead of the running ones, and dropout is active.
        kernels: Functions to leave as they are. If functions of the source's own framework are among them, its own body
            is used.
    """
    if "source" in kernels and body.own is not None:
        body = body.own
    written = _Elementary(taken={step.result for step in body.steps}, trains=trains, kernels=kernels)
    for step in body.steps:
        written.write(step)
    return replace(body, steps=tuple(written.steps))


def without_casts(body: Body) -> Body:
    """Return a body without casts, which computes in one number type."""
    behind: dict[Operand, Operand] = {}
    steps = []
    for step in body.steps:
        operands = tuple(behind.get(operand, operand) for operand in step.operands)
        if step.function == "cast":
            behind[step.result] = operands[0]
        else:
            steps.append(replace(step, operands=operands))
    return replace(body, steps=tuple(steps), own=body.own and without_casts(body.own))


@dataclass(slots=True)
class _Elementary:
    """Builder of elementary steps; `taken` are names that must not be used for new results."""

    taken: set[str]
    trains: bool
    kernels: Collection[str]
    steps: list[Step] = field(default_factory=list)

    def write(self, step: Step) -> None:
        """Append the definition of a step, or the step itself if it is to be left as it is."""
        # Kernels only take tensors, except for those with another definition when the network is not training.
        takes_it = step.function == "batch_norm" or all(isinstance(operand, str) for operand in step.operands)
        is_kernel = step.function in self.kernels and takes_it
        define = None if is_kernel else _DEFINITIONS.get(step.function)
        if define is None:
            self.steps.append(step)
        else:
            define(self, step)

    def add(
        self,
        of: Step,
        function: str,
        *operands: Operand,
        dims: tuple[str, ...] = (),
        options: tuple[tuple[str, Option], ...] = (),
        is_result: bool = False,
    ) -> str:
        """Append a step that replaces another one; return its result's name: that of the other if `is_result`."""
        letters = (f"{of.result}_{number}" for number in count(1))
        result = of.result if is_result else next(letter for letter in letters if letter not in self.taken)
        self.taken.add(result)
        self.steps.append(Step(result=result, function=function, operands=operands, dims=dims, options=options))
        return result


def _batch_norm(written: _Elementary, step: Step) -> None:
    x, scale, shift, mean, variance = step.operands
    momentum = float(step.option("momentum", 0.0))
    moments: tuple[Operand, ...] = () if written.trains else (mean, variance)
    if written.trains and momentum:
        found = written.add(step, "mean", x, dims=step.dims)
        squares = written.add(step, "square", written.add(step, "subtract", x, found))
        spread = written.add(step, "mean", squares, dims=step.dims)
        unbiased = written.add(step, "multiply", spread, float(step.option("factor", 1.0)))
        for kept, new, initial in ((mean, found, 0.0), (variance, unbiased, 1.0)):
            written.add(step, "keep", kept, new, options=(("momentum", momentum), ("initial", initial)))
        moments = found, spread
    options = (("epsilon", float(step.option("epsilon", 0.0))),)
    normal = replace(step, function="normalise", operands=(x, scale, shift, *moments), options=options)
    # The kernel's gradient includes that of the batch's statistics.
    (written.write if written.trains else partial(_normalise, written))(normal)


def _normalise(written: _Elementary, step: Step) -> None:
    x, scale, shift, *moments = step.operands
    mean = moments[0] if moments else written.add(step, "mean", x, dims=step.dims)
    found = written.add(step, "subtract", x, mean)
    variance = moments[1] if moments else written.add(step, "mean", written.add(step, "square", found), dims=step.dims)
    inverse = written.add(step, "rsqrt", written.add(step, "add", variance, float(step.option("epsilon", 0.0))))
    found = written.add(step, "multiply", found, inverse, is_result=(scale, shift) == (1.0, 0.0))
    if scale != 1.0:
        found = written.add(step, "multiply", found, scale, is_result=shift == 0.0)
    if shift != 0.0:
        written.add(step, "add", found, shift, is_result=True)


MASKED = -1e30
"""Added to masked scores, which makes their softmax 0; a row in which all are masked gets the mean of the values."""


def _attention(written: _Elementary, step: Step) -> None:
    queries, keys, values, *masks = step.operands
    *over, query, key, feature = step.dims
    scores = written.add(step, "einsum", queries, keys, dims=(*over, query, key))
    scores = written.add(step, "multiply", scores, float(step.option("scale", 1.0)))
    truths = step.option("truths", 0)
    masks[:truths] = (written.add(step, "where", mask, 0.0, MASKED) for mask in masks[:truths])
    for mask in masks:
        scores = written.add(step, "add", scores, mask)
    if step.option("causal", False):
        scores = written.add(step, "causal", scores, dims=(query, key))
    softmax = written.add(step, "softmax", scores, dims=(key,))
    # Without masks, the queries' dim is before the heads'.
    batch, heads = (over[:1], over[1:]) if step.function == "attention" else (over, [])
    written.add(step, "einsum", softmax, values, dims=(*batch, query, *heads, feature), is_result=True)


def _softmax_loss(written: _Elementary, step: Step) -> None:
    logits, labels = step.operands
    *points, classes = step.dims
    found = written.add(step, "log_softmax", logits, dims=(classes,))
    found = written.add(step, "pick", found, labels, dims=(classes,))
    written.add(step, "negate", written.add(step, "mean", found, dims=tuple(points)), is_result=True)


def _cast(written: _Elementary, step: Step) -> None:
    written.add(step, "identity", *step.operands, is_result=True)


def _dropout(written: _Elementary, step: Step) -> None:
    if written.trains:
        written.steps.append(step)
    else:
        written.add(step, "identity", *step.operands, is_result=True)


_DEFINITIONS: Mapping[str, Callable[[_Elementary, Step], None]] = MappingProxyType(
    {
        "attention": _attention,
        "batch_norm": _batch_norm,
        "cast": _cast,
        "dropout": _dropout,
        "masked_attention": _attention,
        "normalise": _normalise,
        "softmax_loss": _softmax_loss,
    }
)
"""Definitions of functions by elementary steps; functions that drop points in training are only defined here."""


def is_before_layout(steps: Sequence[Step], tensor: str) -> bool:
    """Return whether steps are a chain of pointwise functions of one tensor and of numbers.

    They can be applied before the tensor is placed into a larger one, so that padding comes after them.
    """
    known = {tensor}
    for step in steps:
        if step.function not in POINTWISE or any(isinstance(o, str) and o not in known for o in step.operands):
            return False
        known.add(step.result)
    return True


def verify_body(body: Body, *, layer: str, reads: Sequence[str], dims: Sequence[str]) -> None:
    """Raise GraphError where a body refers to tensors or dims that its operator lacks, or to an unknown function.

    Args:
        body: Body of the operator.
        layer: Name of the operator, for messages.
        reads: Names of the tensors that it reads.
        dims: Names of its iteration dims.
    """
    where = f"layer {short(layer)!r}"
    if body.own is not None:
        if body.own.own is not None:
            raise GraphError(f"{where}: its own framework's body has another one in it; expected one")
        verify_body(body.own, layer=layer, reads=reads, dims=dims)
    inner = [dim.name for dim in body.inner]
    held = {"", *reads, *(item.name for item in body.borrowed)}
    if len({*inner, *dims}) != len(inner) + len(dims) or any(dim.tensor not in held for dim in body.inner):
        raise GraphError(f"{where}: inner dims of its body have names or tensors that it cannot have: {inner}")
    dims = (*dims, *inner)
    known = {*reads, *(constant.name for constant in body.constants), *(item.name for item in body.borrowed)}
    named = {dim for constant in body.constants for dim in constant.dims}
    named |= {dim for output in body.outputs for dim in output.dims}
    for step in body.steps:
        _verify_step(step, dims, f"{where}: a step of its body")
        for operand in step.operands:
            if isinstance(operand, str) and operand not in known:
                raise GraphError(f"{where}: a step of its body reads {short(operand)!r}, which no step computes")
        if step.result in known:
            raise GraphError(f"{where}: two steps of its body compute {short(step.result)!r}; expected a name for each")
        known.add(step.result)
        named.update(step.dims)
        if step.function == "source":
            named |= {
                dim
                for layout in source_call(dict(step.options), step.operands, where).layouts
                for axis in layout
                for dim in axis
            }
    made = {step.result for step in body.steps}
    if not made.issuperset(filter(None, body.others)):
        raise GraphError(f"{where}: its body writes {[short(name) for name in body.others]}, which no step computes")
    unknown = sorted(named - set(dims))
    if unknown or any(not 0 <= item.read < len(reads) for item in body.inputs):
        raise GraphError(f"{where}: its body names dims or inputs that it lacks: {[short(dim) for dim in unknown]}")


def _verify_step(step: Step, dims: Sequence[str], where: str) -> None:
    if step.function not in FUNCTIONS:
        near = unknown_name("function", short(step.function), FUNCTIONS)
        raise GraphError(f"{where} is not known: {near}; search the model again")
    function = FUNCTIONS[step.function]
    fewest, most = function.operands
    if not fewest <= len(step.operands) <= most:
        raise GraphError(f"{where}, {step.function!r}, has {len(step.operands)} operands; expected {fewest} to {most}")
    fewest, most = function.dims or (0, len(dims))
    if not fewest <= len(step.dims) <= most:
        raise GraphError(f"{where}, {step.function!r}, has {len(step.dims)} dims; expected {fewest} to {most}")
    known = function.options
    for name, value in step.options:
        expected = known.get(name, ())
        fits = type(value) is expected if isinstance(expected, type) else value in expected
        if name == "along":
            fits = fits and value in dims
        elif step.function == "convolve_transposed" and expected is tuple:
            # As many entries as the step has triples of dims.
            numbers = value if isinstance(value, tuple) and fits else ()
            fits = len(numbers) == len(step.dims) // 3
            fits = fits and all(type(number) is int and number >= (name != "pads") for number in numbers)
        elif name == "rate":
            fits = isinstance(value, float) and 0 <= value < 1
        if not fits:
            shown = f"{short(name)} = {short(repr(value))}"
            raise GraphError(f"{where}, {step.function!r}, has option {shown}; it has {', '.join(known) or 'none'}")
    lists = [name for name, kind in known.items() if kind is tuple]
    if lists and (len(step.dims) % 3 or not {*lists} <= {name for name, _ in step.options}):
        raise GraphError(
            f"{where}, {step.function!r}, has {len(step.dims)} dims and {len(step.options)} options; expected three "
            f"dims, and one number of each of {', '.join(lists)}, for each spatial dim"
        )
