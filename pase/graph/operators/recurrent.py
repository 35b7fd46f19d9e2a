"""Recurrent layers as one vertex: `lstm`, equal layers that can be a pipeline, and `recurrent`, cells of any widths."""

from collections.abc import Sequence
from math import prod

from pase.errors import GraphError
from pase.graph.body import Body, Step
from pase.graph.operator import (
    Access,
    AllReduce,
    Dim,
    DimIndex,
    Handoff,
    Intermediate,
    Operator,
    Pipeline,
    Relayout,
    Role,
    SliceOf,
    Work,
)

_LSTM_GATES = 4
_LSTM_CELL_FLOP = 9
"""Three sigmoids, two hyperbolic tangents, three products and a sum for each unit."""


def lstm(name: str, x: tuple[int, ...], *, layers: int, units: int) -> Operator:
    """Return `layers` LSTM layers of `units` units over x, shape [b, s, d], d = units.

    Iteration space: l (layer), b, s (step), d (input and previous hidden state), e (hidden unit). Every point
    multiplies an input and a recurrent weight into four gates. Splits of l and s run as a wavefront.
    Splitting d leaves partial gates; the hidden state, written along e, is read back along d.
    Raises GraphError where d is not `units`: the dims of a stack must agree to be one iteration space.
    """
    if len(x) != 3 or x[2] != units:
        raise GraphError(
            f"layer {name!r} reads shape {x}; expected [batch, steps, {units}]: inputs as wide as the layers"
        )
    batch, steps, _ = x
    hidden, weight = (layers, batch, steps, units), (layers, units, _LSTM_GATES, units)
    along_d, along_e = ("l", "b", "s", "d"), ("l", "b", "s", "e")
    every = (0, 1, 2, 3)

    def product(stage: str | SliceOf, inputs: tuple[int | tuple[int, ...], ...]) -> Work:
        return Work(dims=(stage, "b", "s", "d", "e"), flop_per_point=2 * _LSTM_GATES, inputs=inputs, contraction=True)

    return Operator(
        name=name,
        kind="lstm",
        dims=(Dim("l", layers), Dim("b", batch), Dim("s", steps), Dim("d", units), Dim("e", units)),
        reads=(
            # The first layer alone reads the input; the others get it from the layer below (a hand-off).
            Access(
                tensor="x",
                shape=(1, *x),
                index_map=(SliceOf(dim="l", offset=0, extent=1), "b", "s", "d"),
                partial_over=("e",),
            ),
            *(Access(tensor=name, shape=weight, index_map=("l", "d", None, "e"), role=Role.PARAMETER) for name in "wu"),
            # The gates are whole by the time that the bias is added: a split of d leaves its gradient alone.
            Access(
                tensor="bias",
                shape=(layers, _LSTM_GATES, units),
                index_map=("l", None, "e"),
                role=Role.PARAMETER,
                partial_over=("b", "s"),
            ),
        ),
        writes=(
            # The last layer alone writes the output; its gates are summed over d before that.
            Access(
                tensor="y",
                shape=(1, *x),
                index_map=(SliceOf(dim="l", offset=layers - 1, extent=1), "b", "s", "e"),
                partial_over=(),
            ),
        ),
        work=(
            # The first layer's product with x, the others' with the layer below, all layers' with the step before.
            product(SliceOf(dim="l", offset=0, extent=1), (0, 1)),
            *([product(SliceOf(dim="l", offset=1, extent=layers - 1), (every, 1))] if layers > 1 else []),
            product("l", (every, 2)),
            Work(dims=("l", "b", "s", "e"), flop_per_point=_LSTM_CELL_FLOP, inputs=(every,)),
        ),
        exchanges=(
            AllReduce(
                tensor="gates",
                shape=(layers, batch, steps, _LSTM_GATES, units),
                index_map=("l", "b", "s", None, "e"),
                over=("d",),
                times=1,
            ),
            # Backward, the gradient of the previous hidden state is summed over the units that it fed.
            AllReduce(tensor="hidden_gradient", shape=hidden, index_map=("l", "b", "s", "d"), over=("e",), times=1),
            Relayout(tensor="hidden", shape=hidden, index_map=along_e, read=along_d, times=1),
            Relayout(tensor="hidden_gradient", shape=hidden, index_map=along_d, read=along_e, times=1),
            # What goes on is read along d already; what comes back joins the sum over e there.
            Handoff(tensor="hidden", shape=hidden[1:], index_map=along_d[1:], across="l", times=1),
            Handoff(tensor="hidden_gradient", shape=hidden[1:], index_map=along_d[1:], across="l", times=1),
            Handoff(tensor="state", shape=(layers, batch, units), index_map=("l", "b", "d"), across="s", times=2),
            Handoff(tensor="cell", shape=(layers, batch, units), index_map=("l", "b", "e"), across="s", times=2),
        ),
        pipeline=Pipeline(stage="l", sequence="s"),
        intermediates=(
            # The gates and the candidate, the cell before the step and the hyperbolic tangent of the one after it.
            Intermediate(tensor="gates_and_cells", shape=hidden, index_map=along_e, kept=_LSTM_GATES + 2),
            # Each layer's input of all steps, and the hidden state that each step reads.
            Intermediate(tensor="inputs", shape=hidden, index_map=along_d, kept=2),
            # Of one layer: what the input adds to the gates, step by step; backward their gradients, step by step and
            # as one tensor.
            Intermediate(
                tensor="gate_sums", shape=(batch, steps, _LSTM_GATES, units), index_map=("b", "s", None, "e"), working=3
            ),
        ),
        body=Body(steps=(Step(result="states", function="lstm", operands=("x", "w", "u", "bias")),)),
        attributes=(("layers", layers), ("units", units)),
    )


# -- of any widths

_CELL_FLOP_PER_GATE = 3
"""A sum, a function, a product."""


def recurrent(
    name: str,
    x: tuple[int, ...],
    *,
    weights: Sequence[tuple[int, ...]],
    states: Sequence[tuple[int, ...]] = (),
    has_hidden: bool = False,
    outputs: Sequence[tuple[int, ...]],
    units: int,
    gates: int,
    layers: int = 1,
    directions: int = 1,
    product_flop: float,
    is_batch_first: bool = True,
    cell: str = "",
) -> Operator:
    """Return recurrent layers over a sequence x, shape [b, s, d] or [s, b, d].

    Iteration space: b, s (step), r (direction), g (gate), e (unit of a layer). A split of e leaves each device its
    units of every layer and step; their hidden states are gathered in each. Steps, directions and gates are not split.
    weights: of any layout; what has gates · units of something is split along e. states: first ones that are given, of
    which the first is the hidden state where it `has_hidden`. product_flop: of the whole forward pass. Raises
    GraphError where x is no sequence.
    """
    if len(x) != 3:
        raise GraphError(f"layer {name!r} reads shape {x}; expected a sequence: [batch, steps, width]")
    lead = ("b", "s") if is_batch_first else ("s", "b")
    extents = {**dict(zip(lead, x[:2], strict=True)), "r": directions, "g": gates, "e": units}
    dims = ("b", "s", "r", "g", "e")
    points = prod(extents[dim] for dim in dims)
    hidden = (layers, *x[:2], directions, units)
    written: tuple[DimIndex, ...] = (None, *lead, "r", "e")
    reads = [Access(tensor="x", shape=x, index_map=(*lead, None))]
    reads += [
        Access(
            tensor=f"w{i}",
            shape=shape,
            index_map=_weight_axes(shape, gates, units),
            role=Role.PARAMETER,
            partial_over=("b", "s"),
        )
        for i, shape in enumerate(weights)
    ]
    reads += [
        Access(tensor=f"h{i}", shape=shape, index_map=_state_axes(shape, extents)) for i, shape in enumerate(states)
    ]
    given = reads[1 + len(weights) :][: int(has_hidden)]
    every, trained = tuple(range(len(reads))), tuple(range(1, 1 + len(weights)))
    first = 2.0 * x[2]
    return Operator(
        name=name,
        kind="recurrent",
        dims=tuple(Dim(dim, extents[dim]) for dim in dims),
        reads=tuple(reads),
        writes=tuple(
            Access(tensor=f"y{i}", shape=shape, index_map=_output_axes(shape, x, lead, extents), partial_over=())
            for i, shape in enumerate(outputs)
        ),
        work=(
            # The first layer's product with x; the others' with the layer below, and all layers' with the step before.
            Work(dims=dims, flop_per_point=first, inputs=(0, trained), contraction=True),
            Work(dims=dims, flop_per_point=product_flop / points - first, inputs=(every, trained), contraction=True),
            Work(dims=dims, flop_per_point=float(_CELL_FLOP_PER_GATE * layers), inputs=(every,)),
        ),
        # Every step reads all units of the step before; backward the parts of these units' gradients are sent back and
        # added, the adjoint of the gathering and as many bytes.
        exchanges=tuple(
            Relayout(
                tensor=tensor,
                shape=shape,
                index_map=index_map,
                read=tuple(None if axis == "e" else axis for axis in index_map),
                times=2,
                backward_times=1,
                gradient_of=every,
            )
            for tensor, shape, index_map in [
                ("hidden", hidden, written),
                *(("first_hidden", state.shape, state.index_map) for state in given),
            ]
        ),
        # Of every step: its gates, its cell and its hidden state.
        intermediates=(Intermediate(tensor="states", shape=hidden, index_map=written, kept=gates + 2, working=gates),),
        unsplittable=("s", "r", "g"),
        attributes=(("cell", cell), ("layers", layers), ("units", units), ("directions", directions)),
    )


def _weight_axes(shape: tuple[int, ...], gates: int, units: int) -> tuple[DimIndex, ...]:
    place = next((i for i, extent in enumerate(shape) if extent == gates * units), None)
    if place is None and shape[-1:] == (units,):
        # A weight for each gate.
        return (*(None for _ in shape[:-1]), "e")
    return tuple(("g", "e") if i == place else None for i in range(len(shape)))


def _state_axes(shape: tuple[int, ...], extents: dict[str, int]) -> tuple[DimIndex, ...]:
    """Return the axes of [b, e] or [layers · directions, b, e]."""
    last: tuple[DimIndex, ...] = tuple(
        dim if extent == extents[dim] else None for dim, extent in zip("be", shape[-2:], strict=False)
    )
    return (*(None for _ in shape[:-2]), *last)


def _output_axes(
    shape: tuple[int, ...], x: tuple[int, ...], lead: tuple[str, str], extents: dict[str, int]
) -> tuple[DimIndex, ...]:
    """Return the axes of the sequence [b, s, r · e], of its last step [b, r · e], or of states."""
    is_wide = shape[-1:] == (extents["r"] * extents["e"],)
    if shape[:2] == x[:2] and len(shape) == 3 and is_wide:
        return (*lead, ("r", "e"))
    if len(shape) == 2 and shape[0] == extents["b"] and is_wide:
        return ("b", ("r", "e"))
    return _state_axes(shape, extents)
