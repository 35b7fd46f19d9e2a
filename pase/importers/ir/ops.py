"""What a node computes: a small vocabulary that every front end translates its own operators into.

Positions of dims are counted from 0 and never negative. Everything that is not in this vocabulary is `Generic`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The first input as it is: a cast, a copy, dropout outside training, an assertion.

    rate: of the points that are dropped while the network is trained.
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
    """A function of the elements at one point; inputs are broadcast as NumPy does.

    functions: names in lower case, in the order in which they are applied ("add", "multiply", "exp", "relu", "gelu",
    "silu", "sigmoid", "tanh", "where", …). flop_per_point: a guess of one per function is good enough.
    constant: number that the one function of a single input takes besides it (x · 0.5, x ** 2), where there is one;
    constant_first: it is the left operand (1 - x), the first of the two of "where". numbers: others that the one
    function takes, in their usual order: (lowest, highest) of "clip", the slope of "leaky_relu", (alpha,) of "elu",
    (slope, offset) of "hard_sigmoid", both of "where".
    mixes: dims along which points do read each other after all (the two halves that a rotary embedding turns; a roll).
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

    operands: letters of each of two inputs; output: of the result; letters that it lacks are summed over.
    has_bias: a third input is added, of the shape of the output's last dims. share: of the products that are computed
    at all: 1/8 where each token goes to one of eight experts, "tk,ekn->tn". Inputs after these are whole numbers.
    has_ends: the third one says where the rows of each group end, "gmk,gkn->gmn", where not all are of one size.
    """

    operands: tuple[str, str]
    output: str
    has_bias: bool = False
    share: float = 1.0
    has_ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolve:
    """A convolution over one to three spatial dims; inputs: the tensor, the filters, then a bias [out-channels] if any.

    batch, channels, spatial: positions of the tensor's dims; those of the output are alike. filters: positions of
    (out-channels, in-channels of one group, spatial dims…) in the second input. stride, dilation: [spatial].
    pads: [spatial] of (before, after). groups: of channels. is_transposed: the gradient of a convolution: `filters`
    then names (in-channels, out-channels of one group, spatial dims…). is_reversed: its filters stand in the order of
    a convolution of the input with zeros between its points, the last point of the window first.
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
    """Statistics over some dims, then perhaps a scale and a shift; inputs: the tensor, scale, shift, then the rest.

    kind: "batch" (statistics over all dims but the channels), "layer", "rms", "group", "instance", "response"
    (of neighbouring channels) or "statistics" (any other function of a tensor and what is reduced of it). over: dims of
    the statistics. channels: dims that scale and shift have. mixes: dims along which points read each other besides.
    groups: of the channels, whose statistics are apart (group normalisation: channels are in `over` then).
    num_statistics: inputs after scale and shift that are no parameters but kept (running mean and variance).
    momentum: the weight of a batch's moments in those that are kept while the network is trained, 0 where none are.
    is_unbiased: whether the variance that is kept is by one point less. response: by which "response" divides each
    point: (how many neighbours with itself, alpha, beta, bias) of (bias + alpha · mean of their squares) ** beta.
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

    h is a multiple of g: that many queries' heads share one of keys and values. is_fused: one operator of its source,
    which keeps no scores. needs_keys: whether each query needs all keys and features in one place, as where no key may
    be left to it.
    """

    is_causal: bool = False
    is_fused: bool = False
    needs_keys: bool = False
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Rows of a table by whole numbers; inputs: table [v, d…], indices [n…]; output [n…, d…].

    frozen: the row that is not trained, -1 for none.
    """

    frozen: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Elements of a tensor at places along one dim, which differ from point to point of the others.

    inputs: the tensor, whole numbers of the same rank; output [as these]. The other dims of both are of one extent.
    """

    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A recurrent cell over a sequence; inputs: the tensor [b, s, d] (or [s, b, d]), then weights, then states.

    cell: "lstm", "gru" or "rnn". outputs: the sequence first.
    equations: PyTorch's name of what is computed, with weights as it has them (of each layer and direction the input's
    [gates · units, d], the hidden state's, perhaps a bias of each); "" where that is not told.
    rate: at which points are dropped between layers while the network is trained. gates: where the gates of these
    equations stand among the weights' own; () where that is where they are.
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
    """An operator that nothing more is known of.

    passes: pairs (dim of the first float input, dim of every output) along which each point depends on that point
    alone, so that they can be split; the rest cannot. flop_per_point: for each element of the first output.
    is_index: no float flows through it (a sort of indices, a mask), so that a graph without it loses nothing.
    product_flop: of products in it, in the forward pass, where that is known.
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
