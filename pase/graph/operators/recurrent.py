"""Recurrent layers as one vertex: `lstm`, equal layers that can be pipelined, and `recurrent`, cells of any width."""

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
    multiplies an input and a recurrent weight into four gates. Splits of l and s run as a wavefront. A split of d
    leaves partial gates; the hidden state, written along e, is read along d.

    Raises GraphError where d is not `units`: the layers of a stack share one iteration space.
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
            # Only the first layer reads the input; the others receive it from the layer below (a hand-off).
            Access(
                tensor="x",
                shape=(1, *x),
                index_map=(SliceOf(dim="l", offset=0, extent=1), "b", "s", "d"),
                partial_over=("e",),
            ),
            *(Access(tensor=name, shape=weight, index_map=("l", "d", None, "e"), role=Role.PARAMETER) for name in "wu"),
            # The gates are reduced when the bias is added: a split of d does not affect its gradient.
            Access(
                tensor="bias",
                shape=(layers, _LSTM_GATES, units),
                index_map=("l", None, "e"),
                role=Role.PARAMETER,
                partial_over=("b", "s"),
            ),
        ),
        writes=(
            # Only the last layer writes the output; its gates are reduced over d before that.
            Access(
                tensor="y",
                shape=(1, *x),
                index_map=(SliceOf(dim="l", offset=layers - 1, extent=1), "b", "s", "e"),
                partial_over=(),
            ),
        ),
        work=(
            # The products of the first layer with x, of the others with the layer below, of all with the previous step.
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
            # Values sent onward are already read along d; gradients sent back are reduced over e together with others.
            Handoff(tensor="hidden", shape=hidden[1:], index_map=along_d[1:], across="l", times=1),
            Handoff(tensor="hidden_gradient", shape=hidden[1:], index_map=along_d[1:], across="l", times=1),
            Handoff(tensor="state", shape=(layers, batch, units), index_map=("l", "b", "d"), across="s", times=2),
            Handoff(tensor="cell", shape=(layers, batch, units), index_map=("l", "b", "e"), across="s", times=2),
        ),
        pipeline=Pipeline(stage="l", sequence="s"),
        intermediates=(
            # The gates and the candidate, the cell state before the step, and the hyperbolic tangent of the one after
            # it.
            Intermediate(tensor="gates_and_cells", shape=hidden, index_map=along_e, kept=_LSTM_GATES + 2),
            # Inputs of each layer for all steps, and the hidden state that each step reads.
            Intermediate(tensor="inputs", shape=hidden, index_map=along_d, kept=2),
            # For one layer: the input's contribution to the gates, step by step; backward, the gates' gradients, step
            # by step and as one tensor.
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

    Iteration space: b, s (step), r (direction), g (gate), e (unit of a layer). A split of e gives each device some
    units of every layer and step; their hidden states are all-gathered at each step. Steps, directions and gates are
    not split.

    Args:
        name: Name of the operator.
        x: Shape of the sequence.
        weights: Shapes of the weights, in any layout; a dim of gates · units is split along e.
        states: Shapes of the initial states, if given; the first is the hidden state if `has_hidden`.
        has_hidden: Whether an initial hidden state is given.
        outputs: Shapes of the outputs.
        units: Units of a layer.
        gates: Gates of the cell.
        layers: Number of layers.
        directions: Number of directions.
        product_flop: FLOP of the products of the whole forward pass.
        is_batch_first: Whether x is [b, s, d].
        cell: Name of the cell, "" if unknown.

    Raises:
        GraphError: x is not a sequence.
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
            # The products of the first layer with x, of the others with the layer below, and of all with the previous
            # step.
            Work(dims=dims, flop_per_point=first, inputs=(0, trained), contraction=True),
            Work(dims=dims, flop_per_point=product_flop / points - first, inputs=(every, trained), contraction=True),
            Work(dims=dims, flop_per_point=float(_CELL_FLOP_PER_GATE * layers), inputs=(every,)),
        ),
        # Every step reads all units of the previous step; in the backward pass the partial gradients of these units are
        # reduce-scattered, the adjoint of the all-gather, with as many bytes.
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
        # For every step: its gates, its cell state and its hidden state.
        intermediates=(Intermediate(tensor="states", shape=hidden, index_map=written, kept=gates + 2, working=gates),),
        unsplittable=("s", "r", "g"),
        attributes=(("cell", cell), ("layers", layers), ("units", units), ("directions", directions)),
    )


def _weight_axes(shape: tuple[int, ...], gates: int, units: int) -> tuple[DimIndex, ...]:
    place = next((i for i, extent in enumerate(shape) if extent == gates * units), None)
    if place is None and shape[-1:] == (units,):
        # One weight for each gate.
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
