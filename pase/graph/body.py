"""`Body`: what an operator computes, as typed steps over the named dims of its iteration space.

Tensors have named dims, so that a step says nothing of their order in memory: what lacks a dim is the same for all of
its points.
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
"""A tensor by its name, or a number."""

OptionT = TypeVar("OptionT", str, int, float, bool, tuple[int, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One tensor that is computed.

    function: of `POINTWISE`; of `REDUCTIONS`, "softmax" or "log_softmax" over `dims`; "einsum" of tensors to `dims`;
    "causal": scores, of which `dims` are the queries' and the keys', without later keys; "pick": elements of a tensor
    at places, along the one of `dims`; "batch_norm" of a tensor, a scale and a shift, as "normalise", and of the kept
    mean and variance that stand for the tensor's own where the network is not trained; "convolve", "pool" and
    "embedding" as the accesses of the operator have them, an embedding perhaps with a row `frozen` that is not trained;
    "concat", "padded", "piece" and "copy": data that are moved alone. "convolve_transposed" of a tensor and filters:
    the adjoint of a convolution with these `strides`, `dilations` and `pads` (before), one for each spatial dim; its
    `dims` are the positions that are read, then those that are written, then the window's; `backwards`: its filters'
    last point is the first of the window.

    Functions that frameworks have kernels for, defined by `elementary`: "attention" of queries, keys and values, its
    `dims` the batch, the heads, the queries, the keys and the features; "masked_attention" likewise, with masks of the
    scores behind the values: first `truths` that say which scores count, then numbers that are added to them; its
    `dims` any of the batch and the heads, of which keys and values may lack some (several heads of queries read one of
    these), the queries, the keys and the features of the values; "normalise": a tensor without its mean, by its
    deviation, over `dims`, times the second operand, plus the third (numbers where the source has none), by a mean and
    a variance that an earlier step made of it where they are named; "softmax_loss" of logits and labels, its `dims`
    those of the points and then the classes. Others: "dropout", whose points are numbered row-major over `dims`;
    "lstm": a stack of layers over a sequence, as the accesses of its input, its two weights and its bias have them;
    "fan_out": a tensor whose gradient arrives in parts over `dims`; "recurrent": layers of one cell over a sequence,
    given it and, of each layer and direction, the weights of the input and of the hidden state and perhaps a bias of
    each, at last the first `hidden` states and those that an LSTM has `kept`, where they are told; its `dims` the
    batch, the steps, the directions, the gates and the units. What its operator writes besides are the same states
    after the last step.

    Of a source's own framework, which alone computes them: "source" is the `number`-th result of its own `operator`
    with literal `arguments`; `layouts` has the dims of each operand in the operator's order, and those of the result
    (see `SourceCall`). "grouped": rows, each times the matrix of its own group; its `dims` the groups, the rows of a
    group if all had as many, the columns and the features; the third operand says before which row, counted over all,
    each group ends. "routed": rows of a table, by whole numbers of which every device has all, that go to the devices
    that hold their places; its `dims` are first those that the places make up, `rows` in number, then those of the
    table's rows, and the first of either are split alike. "whole": the first `replaced` of `dims` as the others, of
    which every device holds all; of none, a tensor that the operator reads, with these dims from where it is.

    "cast": a tensor in another type of numbers, where the source computes in it; a target of one type leaves it out.

    Of dims that are whole on every device (inner ones, and iteration dims that are not split): "cut": each `step`-th
    point from `start` of the first of `dims`, as the second; "join": tensors end to end along a dim of each, as the
    last of `dims`; "view": the first `replaced` of `dims`, row-major, as the others; "rows": of the first operand along
    the one of `dims`, by the numbers in the second; "repeat": a tensor for every point of those of `dims` it lacks.
    "keep": the first operand, a constant, becomes the second by `momentum` once in a step of training, from `initial`.
    What takes the place of a whole dim may be split: each device keeps its part of it.
    """

    result: str
    function: str
    operands: tuple[Operand, ...] = ()
    dims: tuple[str, ...] = ()
    options: tuple[tuple[str, Option], ...] = ()

    def option(self, name: str, default: OptionT) -> OptionT:
        """Return an option, or the default where the step does not have it."""
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
    """Whether it is computed of inputs of the model in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """Whole numbers that another layer computes, of which every device takes all: the experts that tokens go to.

    Its dims are the inner ones that name it.
    """

    name: str
    """Its name within the layer."""
    layer: str
    """The layer that writes it."""
    output: Whole
    """Position among what that layer writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerDim:
    """A dim of tensors of a body that is none of the iteration space: no split reaches it.

    tensor, axis: whose dim it is where every device holds all of a weight; "" and 0 where steps make it.
    """

    name: str
    extent: int
    tensor: str = ""
    axis: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input of the model that a layer reads."""

    read: Whole
    """Position among the reads, from 0."""
    name: str
    """Name of the input."""
    shape: tuple[Positive, ...]
    """Shape of the whole input as the model has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the model."""

    name: str
    """Name of the output."""
    dims: tuple[str, ...]
    """Order in which the points of the result are its elements."""
    shape: tuple[Positive, ...]
    """Shape of the output as the model has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What an operator computes.

    steps: in order, each tensor computed once; the last one is what the operator writes. others: results that it writes
    besides, in the order of its writes, "" for one that is not told. constants, borrowed: that they read besides what
    the operator reads. inputs, outputs: of the model, that the operator reads and computes. inner: dims that steps name
    besides the iteration space's. problem: why it cannot be told as steps, "" if it can. untrained: why the steps are
    not those of a network that is trained, "" if they are. own: what the source's own framework computes, where that
    cannot be told to others, or not all of it.
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
    """Return a body with elementary steps in place of those that are defined by such.

    Args:
        body: of any operator.
        trains: whether normalisations are by the moments of the batch, not by those that were kept, and points are
            dropped.
        kernels: functions that are left as they are; with those of the source's own framework among them, what that
            alone computes comes in place of what others do.
    """
    if "source" in kernels and body.own is not None:
        body = body.own
    written = _Elementary(taken={step.result for step in body.steps}, trains=trains, kernels=kernels)
    for step in body.steps:
        written.write(step)
    return replace(body, steps=tuple(written.steps))


def without_casts(body: Body) -> Body:
    """Return a body that computes in one type of numbers."""
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
    """Elementary steps as they are written. taken: names of results that are not to be given again."""

    taken: set[str]
    trains: bool
    kernels: Collection[str]
    steps: list[Step] = field(default_factory=list)

    def write(self, step: Step) -> None:
        """Write what defines a step, or the step where it is left as it is."""
        # Kernels take tensors alone, but for one that is another function where the network is not trained.
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
        """Write a step in place of another one; return its result's name, that of the other where it is its result."""
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
    # A kernel's gradient is that of moments of the tensor itself.
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
"""What is added to a score of which a softmax is to make nothing; where it is to all of a row, their mean is taken."""


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
    # Without masks, queries stand before their heads.
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
"""How functions are told by elementary ones; what a network drops while it is trained is told by no other one."""


def is_before_layout(steps: Sequence[Step], tensor: str) -> bool:
    """Return whether steps compute functions of points of one tensor and of numbers alone, one after the other.

    They can be applied before the tensor is laid out, so that padding comes after them.
    """
    known = {tensor}
    for step in steps:
        if step.function not in POINTWISE or any(isinstance(o, str) and o not in known for o in step.operands):
            return False
        known.add(step.result)
    return True


def verify_body(body: Body, *, layer: str, reads: Sequence[str], dims: Sequence[str]) -> None:
    """Raise GraphError where a body names what its operator does not have, or a function that is not known.

    Args:
        body: what the operator computes.
        layer: the operator's name, for messages.
        reads: the tensors that it reads.
        dims: the names of its iteration dims.
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
                raise GraphError(f"{where}: a step of its body reads {short(operand)!r}, which nothing makes")
        if step.result in known:
            raise GraphError(f"{where}: two steps of its body make {short(step.result)!r}; expected a name for each")
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
        raise GraphError(f"{where}: its body writes {[short(name) for name in body.others]}, which no step makes")
    unknown = sorted(named - set(dims))
    if unknown or any(not 0 <= item.read < len(reads) for item in body.inputs):
        raise GraphError(f"{where}: its body names dims or inputs that it has not: {[short(dim) for dim in unknown]}")


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
            # As many as the step has triples of dims.
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
