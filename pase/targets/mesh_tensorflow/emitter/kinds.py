"""How each kind of operator is written: a declaration for each, and a line in `KINDS`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pase.graph import Access, Operator, Window
from pase.graph.names import listed
from pase.graph.operator import EPILOGUE
from pase.graph.operators.activations import ACTIVATIONS
from pase.graph.operators.elementwise import FUNCTIONS
from pase.graph.operators.pooling import REDUCTIONS
from pase.sharding.layouts import PlainDim, tensor_dims
from pase.targets.mesh_tensorflow.emitter.text import Text, code, joined, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The names that a layer's block uses.

    dims: variable of each iteration dim. reads: [reads] variable of each read, on the layer's mesh; of the tensor
    itself where the kind joins. windows: variables of the sliding windows, planes before rows before columns.
    """

    operator: Operator
    dims: dict[str, Text]
    reads: tuple[Text, ...]
    windows: tuple[Text, ...]

    def read(self, tensor: str) -> Text:
        """Return the variable of a read by the tensor's name, "" where the operator does not read that one."""
        names = [access.tensor for access in self.operator.reads]
        return self.reads[names.index(tensor)] if tensor in names else code("")

    def plain_dims(self, access: Access) -> Text:
        """Return a tensor's dims as a list of variables."""
        plain = [dim for dim in tensor_dims(self.operator, access) if isinstance(dim, PlainDim)]
        return code("[{}]", [self.dims[dim.name] for dim in plain])

    @property
    def result_dims(self) -> Text:
        """The dims of what the layer writes."""
        return self.plain_dims(self.operator.writes[0])


def _nothing(_: Operator) -> Text:
    return code("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """formula: what the layer computes, for its comment, any text. result: the expression of its output.

    fill: the value of a window's padding, "" for zero. problem: why an operator cannot be written, "" if it can.
    tensors: that every operator of the kind reads, by name, and after them perhaps those in `optional`; none where it
    reads any number of tensors. variables: names for reads where the tensor's own would mislead. joins: whether the
    expression takes its inputs from their own meshes. is_loss: whether the output is what is minimised. whole: the dim
    of a program that stands for a tensor dim which no iteration dim indexes, "" where there is none.
    """

    formula: Callable[[Operator], str]
    result: Callable[[Block], Text]
    fill: Callable[[Operator], Text] = _nothing
    problem: Callable[[Operator], str] = _nothing
    tensors: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    joins: bool = False
    is_loss: bool = False
    whole: Text = code("")  # noqa: RUF009

    def why_not(self, operator: Operator) -> str:
        """Return why an operator cannot be written, "" if it can."""
        epilogue = operator.attribute(EPILOGUE, "")
        if epilogue:
            return f"it applies {epilogue} to its result"
        found = tuple(access.tensor for access in operator.reads)
        if self.tensors and found not in (self.tensors, (*self.tensors, *self.optional)):
            return f"it reads {listed(found)}; expected {', '.join((*self.tensors, *self.optional))}"
        return self.problem(operator) if found else "it reads nothing"


def activated(operator: Operator, expression: Text) -> Text:
    """Return an expression inside the operator's activation."""
    activation = operator.attribute("activation", "")
    return code("{}({})", word(activation, ACTIVATIONS, "activation"), expression) if activation else expression


def with_activation(operator: Operator, formula: str) -> str:
    """Return a formula inside the operator's activation."""
    activation = operator.attribute("activation", "")
    return f"{activation}({formula})" if activation else formula


def plus_bias(block: Block, expression: Text) -> Text:
    """Return an expression and the operator's bias, where it has one."""
    bias = block.read("bias")
    return code("{} + {}", expression, bias) if bias else expression


def indexed(operator: Operator, access: Access, name: str = "") -> str:
    """Return a tensor in a formula, ``w[c,n]``."""
    dims = ",".join(dim.name for dim in tensor_dims(operator, access) if isinstance(dim, PlainDim))
    return f"{name or access.tensor}[{dims}]"


def _dense_formula(operator: Operator) -> str:
    x, w, *bias = operator.reads
    product = f"{indexed(operator, x)} {indexed(operator, w)}"
    added = f" + {indexed(operator, bias[0])}" if bias else ""
    return f"{indexed(operator, operator.writes[0])} = {with_activation(operator, product + added)}"


def _dense_result(block: Block) -> Text:
    product = code("mtf.einsum([{}, {}], {})", block.read("x"), block.read("w"), block.result_dims)
    return activated(block.operator, plus_bias(block, product))


DENSE = Kind(
    formula=_dense_formula, result=_dense_result, tensors=("x", "w"), optional=("bias",), variables=(("w", "weights"),)
)


def _convolution_formula(operator: Operator) -> str:
    x, w, *bias = operator.reads
    positions = [_position(axis) for axis in x.index_map if isinstance(axis, Window)]
    plain = indexed(operator, x)[2:-1].split(",")
    product = f"x[{','.join([*plain, *positions])}] {indexed(operator, w)}"
    added = f" + {indexed(operator, bias[0])}" if bias else ""
    return f"{indexed(operator, operator.writes[0])} = {with_activation(operator, product + added)}"


def _position(axis: Window) -> str:
    stride = "" if axis.stride == 1 else str(axis.stride)
    dilation = "" if axis.dilation == 1 else str(axis.dilation)
    pad = f"-{axis.pad}" if axis.pad else ""
    return f"{stride}{axis.out}+{dilation}{axis.kernel}{pad}"


def _convolution_result(block: Block) -> Text:
    arguments = [block.read("x"), block.read("w"), *block.windows, block.result_dims]
    product = code("{}({})", word(block.operator.kind, ("conv1d", "conv2d", "conv3d"), "convolution"), arguments)
    return activated(block.operator, plus_bias(block, product))


CONVOLUTION = Kind(
    formula=_convolution_formula,
    result=_convolution_result,
    tensors=("x", "w"),
    optional=("bias",),
    variables=(("w", "filters"),),
)


_FUNCTIONS = tuple(f"{reduction}_pool{rank}d" for reduction in REDUCTIONS for rank in (1, 2, 3))


def _reduction(operator: Operator) -> str:
    return operator.attribute("reduction", "max")


def _pooling_formula(operator: Operator) -> str:
    kernels = [axis.kernel for axis in operator.reads[0].index_map if isinstance(axis, Window)]
    sizes = " x ".join(str(operator.extents[name]) for name in kernels)
    return f"{indexed(operator, operator.writes[0])} = {_reduction(operator)} of {sizes} windows"


def _pooling_result(block: Block) -> Text:
    arguments = [block.read("x"), *block.windows, block.result_dims]
    if _reduction(block.operator) == "mean" and block.operator.attribute("count_padding", False):
        arguments.append(code("count_padding=True"))
    return code("{}({})", word(f"{_reduction(block.operator)}_{block.operator.kind}", _FUNCTIONS, "pooling"), arguments)


def _fill(operator: Operator) -> Text:
    return code("{}", float("-inf")) if _reduction(operator) == "max" else code("")


POOLING = Kind(formula=_pooling_formula, result=_pooling_result, fill=_fill, tensors=("x",))

GLOBAL_POOL = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = mean of {indexed(operator, operator.reads[0])}"
    ),
    result=lambda block: code("global_pool({}, {})", block.read("x"), block.result_dims),
    tensors=("x",),
)


def _normalise_formula(operator: Operator) -> str:
    x, scale, shift = (indexed(operator, access) for access in operator.reads)
    normal = with_activation(operator, f"normal({x}) (1 + {scale}) + {shift}")
    return f"{indexed(operator, operator.writes[0])} = {normal}"


def _normalise_result(block: Block) -> Text:
    function = word(block.operator.kind, ("batch_norm", "layer_norm"), "normalisation")
    return activated(block.operator, code("{}({})", function, block.reads))


BATCH_NORM = LAYER_NORM = Kind(formula=_normalise_formula, result=_normalise_result, tensors=("x", "scale", "shift"))


def _attention_formula(operator: Operator) -> str:
    q, k, v = (indexed(operator, access) for access in operator.reads)
    causal = ", no later t" if operator.attribute("causal", False) else ""
    return f"{indexed(operator, operator.writes[0])} = softmax({q} {k} / sqrt k{causal}) {v}"


def _attention_result(block: Block) -> Text:
    causal = [code("causal=True")] if block.operator.attribute("causal", False) else []
    return code("attention({})", [*block.reads, *causal])


ATTENTION = Kind(
    formula=_attention_formula,
    result=_attention_result,
    tensors=("q", "k", "v"),
    variables=(("q", "queries"), ("k", "keys"), ("v", "values")),
)


def _lstm_formula(operator: Operator) -> str:
    layers = operator.extents["l"]
    return f"{indexed(operator, operator.writes[0])} = {layers} LSTM layers of {indexed(operator, operator.reads[0])}"


def _lstm_result(block: Block) -> Text:
    return code("lstm({}, {})", block.reads, block.result_dims)


def _lstm_problem(operator: Operator) -> str:
    return "" if "l" in operator.extents else "it has no dim l of its layers"


LSTM = Kind(
    formula=_lstm_formula,
    result=_lstm_result,
    problem=_lstm_problem,
    tensors=("x", "w", "u", "bias"),
    whole=code("GATES"),
)


EMBEDDING = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = table[{indexed(operator, operator.reads[0])},"
        f"{operator.dims[-2].name}]"
    ),
    result=lambda block: code("embedding({}, {}, {})", block.read("table"), block.read("x"), block.result_dims),
    problem=lambda operator: "" if len(operator.dims) > 1 else "it has no dim of its rows besides their width",
    tensors=("x", "table"),
)


_INFIX = {"add": code(" + "), "multiply": code(" * ")}


def _function(operator: Operator) -> str:
    return operator.attribute("function", "add")


def _elementwise_formula(operator: Operator) -> str:
    terms = [indexed(operator, access) for access in operator.reads]
    function = _function(operator)
    applied = _INFIX[function].join(terms) if function in _INFIX else f"{function}({terms[0]})"
    return f"{indexed(operator, operator.writes[0])} = {with_activation(operator, applied)}"


def _elementwise_result(block: Block) -> Text:
    function = _function(block.operator)
    if function in _INFIX:
        return activated(block.operator, joined(block.reads, _INFIX[function]))
    return activated(block.operator, code("{}({})", word(function, FUNCTIONS, "function"), block.reads[0]))


def _elementwise_problem(operator: Operator) -> str:
    function = _function(operator)
    if function not in _INFIX and len(operator.reads) != 1:
        return f"it applies {function!r} to {len(operator.reads)} tensors; expected one"
    return ""


ELEMENTWISE = Kind(formula=_elementwise_formula, result=_elementwise_result, problem=_elementwise_problem)

ADD_PARAMETER = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = {' + '.join(indexed(operator, read) for read in operator.reads)}"
    ),
    result=lambda block: joined(block.reads, _INFIX["add"]),
    tensors=("x", "p"),
    variables=(("p", "parameter"),),
)


def _rate(operator: Operator) -> float:
    return operator.attribute("rate", 0.0)


def _dropout_formula(operator: Operator) -> str:
    x, y = indexed(operator, operator.reads[0]), indexed(operator, operator.writes[0])
    return f"{y} = {x} / {1 - _rate(operator):g} or 0"


def _dropout_result(block: Block) -> Text:
    return code("dropout({}, program.mask_key, rate={})", block.read("x"), _rate(block.operator))


def _dropout_problem(operator: Operator) -> str:
    rate = _rate(operator)
    return "" if 0 <= rate < 1 else f"it drops a fraction of {rate}; expected a rate from 0 to below 1"


DROPOUT = Kind(formula=_dropout_formula, result=_dropout_result, problem=_dropout_problem, tensors=("x",))


def _concat_formula(operator: Operator) -> str:
    along = operator.attribute("along", "c")
    return f"{indexed(operator, operator.writes[0])} = {len(operator.reads)} tensors end to end along {along}"


def _concat_result(block: Block) -> Text:
    along = block.dims[block.operator.attribute("along", "c")]
    return code("concat([{}], mesh, {}, along={})", block.reads, block.result_dims, along)


def _concat_problem(operator: Operator) -> str:
    along = operator.attribute("along", "c")
    return "" if along in operator.extents else f"it joins tensors along {along!r}, which is none of its dims"


CONCAT = Kind(formula=_concat_formula, result=_concat_result, problem=_concat_problem, joins=True)


def _fan_out_formula(operator: Operator) -> str:
    (x,), (y,) = operator.reads, operator.writes
    return f"{indexed(operator, y)} = {indexed(operator, x)} for several layers"


def _fan_out_result(block: Block) -> Text:
    over = [block.dims[dim] for dim in block.operator.reads[0].partial_over or ()]
    return code("fan_out({}, [{}])", block.read("x"), over)


FAN_OUT = Kind(formula=_fan_out_formula, result=_fan_out_result)


def _softmax_loss_formula(operator: Operator) -> str:
    logits, labels = operator.reads
    return f"loss = mean of -log softmax({indexed(operator, logits)}) at {indexed(operator, labels)}"


def _softmax_loss_result(block: Block) -> Text:
    logits, labels = block.reads
    return code("softmax_loss({}, {}, {})", logits, labels, block.dims[block.operator.dims[-1].name])


SOFTMAX_LOSS = Kind(
    formula=_softmax_loss_formula,
    result=_softmax_loss_result,
    tensors=("x", "labels"),
    variables=(("labels", "targets"),),
    is_loss=True,
)


KINDS: Mapping[str, Kind] = {
    "add_parameter": ADD_PARAMETER,
    "attention": ATTENTION,
    "batch_norm": BATCH_NORM,
    "concat": CONCAT,
    "conv1d": CONVOLUTION,
    "conv2d": CONVOLUTION,
    "conv3d": CONVOLUTION,
    "dense": DENSE,
    "dropout": DROPOUT,
    "elementwise": ELEMENTWISE,
    "embedding": EMBEDDING,
    "fan_out": FAN_OUT,
    "global_pool": GLOBAL_POOL,
    "layer_norm": LAYER_NORM,
    "lstm": LSTM,
    "pool1d": POOLING,
    "pool2d": POOLING,
    "pool3d": POOLING,
    "softmax_loss": SOFTMAX_LOSS,
}
