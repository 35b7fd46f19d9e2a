"""Operations of nodes: a small vocabulary into which every front end translates its operators.

Positions of dims are counted from 0 and never negative. Everything outside this vocabulary is `Generic`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The first input unchanged: a cast, a copy, dropout outside training, an assertion.

    rate: rate of dropout during training.
    """

    rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """The same elements in row-major order in the output's shape; also squeeze, unsqueeze and flatten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transpose:
    """order: for each dim of the output, the dim of the input."""

    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """The input repeated to the output's shape. places: for each dim of the input, the dim of the output."""

    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A box of the input; a split into n pieces is n nodes. starts, steps: [rank]; sizes are those of the output."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat:
    """The inputs end to end along a dim."""

    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """Values around the input. before: [rank] how many come first; how many come last follows from the shapes."""

    before: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """An elementwise function; inputs are broadcast as in NumPy.

    Attributes:
        functions: Names in lower case, in order of application ("add", "multiply", "exp", "relu", "gelu", "silu",
            "sigmoid", "tanh", "where", …).
        flop_per_point: FLOP per element; one per function is accurate enough.
        constant: Number that a function of a single tensor takes as its second operand (x · 0.5, x ** 2), if any.
        constant_first: Whether it is the left operand (1 - x), or the first of the two of "where".
        numbers: Further numbers of a single function, in their usual order: (lowest, highest) of "clip", the slope of
            "leaky_relu", (alpha,) of "elu", (slope, offset) of "hard_sigmoid", both of "where".
        mixes: Dims along which points do depend on each other (the two halves of a rotary embedding; a roll).
    """

    functions: tuple[str, ...]
    flop_per_point: int = 1
    constant: float | None = None
    constant_first: bool = False
    numbers: tuple[float, ...] = ()
    mixes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """The input reduced over some dims. function: "sum", "mean", "max", "min", "prod", "any", "all", "argmax", …."""

    function: str
    over: tuple[int, ...]
    keeps_dims: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A sum of products: einsum over letters, one for each dim.

    Attributes:
        operands: Letters of each of two inputs.
        output: Letters of the result; others are summed over.
        has_bias: Whether a third input is added, with the shape of the output's last dims.
        share: Fraction of the products that are computed: 1/8 where each token is sent to one of eight experts,
            "tk,ekn->tn". Inputs after these are integers.
        has_ends: Whether the third input gives the end of each group's rows, "gmk,gkn->gmn", for groups of varying
            size.
    """

    operands: tuple[str, str]
    output: str
    has_bias: bool = False
    share: float = 1.0
    has_ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolve:
    """A convolution over one to three spatial dims; inputs: the tensor, the filters, then a bias [out-channels] if any.

    Attributes:
        batch, channels, spatial: Positions of the tensor's dims, and of the output's.
        filters: Positions of (out-channels, in-channels of one group, spatial dims…) in the second input.
        stride, dilation: [spatial].
        pads: [spatial] pairs (before, after).
        groups: Number of channel groups.
        is_transposed: Whether it is the gradient of a convolution: `filters` are then (in-channels, out-channels of one
            group, spatial dims…).
        is_reversed: Whether its filters are in the order of a convolution of the zero-stuffed input: the last point of
            the window first.
    """

    channels: int
    spatial: tuple[int, ...]
    filters: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    groups: int = 1
    is_transposed: bool = False
    is_reversed: bool = False
    has_bias: bool = False
    batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Maximum or mean over windows. spatial: positions of dims, also of the output; pads: [spatial] (before, after)."""

    function: Literal["max", "mean"]
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    counts_padding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalise:
    """Statistics over some dims, optionally a scale and a shift; inputs: the tensor, scale, shift, then the rest.

    Attributes:
        kind: "batch" (statistics over all dims but the channels), "layer", "rms", "group", "instance", "response" (of
            neighbouring channels) or "statistics" (any other function of a tensor and its reductions).
        over: Dims of the statistics.
        channels: Dims of scale and shift.
        mixes: Further dims along which points depend on each other.
        groups: Number of channel groups with separate statistics (group normalisation: channels are then in `over`).
        num_statistics: Inputs after scale and shift that are running statistics (mean and variance), not parameters.
        momentum: Weight of a batch's moments in the running statistics during training, 0 if there are none.
        is_unbiased: Whether the running variance is divided by one point less.
        response: "response" divides each point by (bias + alpha · mean of their squares) ** beta of its neighbours:
            (number of neighbours with itself, alpha, beta, bias).
    """

    kind: Literal["batch", "layer", "rms", "group", "instance", "response", "statistics"]
    over: tuple[int, ...]
    channels: tuple[int, ...]
    has_scale: bool = True
    has_shift: bool = True
    num_statistics: int = 0
    momentum: float = 0.0
    is_unbiased: bool = False
    groups: int = 1
    epsilon: float = 1e-5
    response: tuple[int, float, float, float] | None = None
    mixes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """Exponentials divided by their sum over one dim. is_log: the logarithm of that."""

    dim: int
    is_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """softmax(q · kᵀ · scale) · v; inputs q [b, h, s, k], k [b, g, t, k], v [b, g, t, e], then masks of the scores.

    Attributes:
        is_fused: Whether it is one operator of its source, which does not save scores.
        needs_keys: Whether each query needs all keys and features in one place, for example because it may have no
            keys.

    h is a multiple of g: h / g query heads share each key and value head.
    """

    is_causal: bool = False
    is_fused: bool = False
    needs_keys: bool = False
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Rows of a table by index; inputs: table [v, d…], indices [n…]; output [n…, d…].

    frozen: index of the row that is not trained, -1 for none.
    """

    frozen: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Elements of a tensor at indices along one dim, which differ for each point of the other dims.

    inputs: the tensor, integers of the same rank; output: [as the integers]. The other dims of both have equal extents.
    """

    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A recurrent layer over a sequence; inputs: the tensor [b, s, d] (or [s, b, d]), then weights, then states.

    Attributes:
        cell: "lstm", "gru" or "rnn". The first output is the sequence.
        equations: PyTorch's name of the computation, with weights in PyTorch's form (for each layer and direction the
            input's [gates · units, d], the hidden state's, optionally a bias of each); "" where it is unknown.
        rate: Rate of dropout between layers during training.
        gates: Order of these equations' gates in the weights; () for the same order.
    """

    cell: Literal["lstm", "gru", "rnn"]
    units: int
    layers: int = 1
    is_bidirectional: bool = False
    is_batch_first: bool = True
    equations: Literal["", "lstm", "gru", "rnn_tanh", "rnn_relu"] = ""
    rate: float = 0.0
    gates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generic:
    """An operator of which nothing more is known.

    Attributes:
        passes: Pairs (dim of the first float input, dim of every output) along which each point depends on that point
            only, so that they can be split; other dims cannot.
        flop_per_point: FLOP for each element of the first output.
        is_index: Whether no float flows through it (sorting indices, a mask), so that the graph can omit it.
        product_flop: FLOP of products in its forward pass, if known.
    """

    passes: tuple[tuple[int, int], ...] = ()
    flop_per_point: float = 1.0
    is_index: bool = False
    product_flop: float = 0.0


Op = (
    Identity
    | Reshape
    | Transpose
    | Broadcast
    | Slice
    | Concat
    | Pad
    | Pointwise
    | Reduce
    | Contract
    | Convolve
    | Pool
    | Normalise
    | Softmax
    | Attention
    | Lookup
    | Gather
    | Recurrent
    | Generic
)
