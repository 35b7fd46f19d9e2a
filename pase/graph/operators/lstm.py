"""`lstm`: a stack of LSTM layers over a whole sequence as one vertex (PaSE section IV-A)."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, Role, SliceOf
from pase.graph.body import Body, Step
from pase.graph.operator import AllReduce, Handoff, Intermediate, Operator, Pipeline, Relayout
from pase.graph.work import Work

_GATES = 4
_CELL_FLOP = 9
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
    hidden = (layers, batch, steps, units)
    along_d, along_e = ("l", "b", "s", "d"), ("l", "b", "s", "e")
    every = (0, 1, 2, 3)

    def product(stage: str | SliceOf, inputs: tuple[int | tuple[int, ...], ...]) -> Work:
        return Work(dims=(stage, "b", "s", "d", "e"), flop_per_point=2 * _GATES, inputs=inputs, contraction=True)

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
            Access(
                tensor="w", shape=(layers, units, _GATES, units), index_map=("l", "d", None, "e"), role=Role.PARAMETER
            ),
            Access(
                tensor="u", shape=(layers, units, _GATES, units), index_map=("l", "d", None, "e"), role=Role.PARAMETER
            ),
            # The gates are whole by the time that the bias is added: a split of d leaves its gradient alone.
            Access(
                tensor="bias",
                shape=(layers, _GATES, units),
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
            Work(dims=("l", "b", "s", "e"), flop_per_point=_CELL_FLOP, inputs=(every,)),
        ),
        exchanges=(
            AllReduce(
                tensor="gates",
                shape=(layers, batch, steps, _GATES, units),
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
            Intermediate(tensor="gates_and_cells", shape=hidden, index_map=along_e, kept=_GATES + 2),
            # Each layer's input of all steps, and the hidden state that each step reads.
            Intermediate(tensor="inputs", shape=hidden, index_map=along_d, kept=2),
            # Of one layer: what the input adds to the gates, step by step; backward their gradients, step by step and
            # as one tensor.
            Intermediate(
                tensor="gate_sums", shape=(batch, steps, _GATES, units), index_map=("b", "s", None, "e"), working=3
            ),
        ),
        body=Body(steps=(Step(result="states", function="lstm", operands=("x", "w", "u", "bias")),)),
        attributes=(("layers", layers), ("units", units)),
    )
