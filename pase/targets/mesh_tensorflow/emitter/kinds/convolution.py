"""How `conv1d`, `conv2d` and `conv3d` are written."""

from pase.graph import Operator, Window
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, activated, indexed, plus_bias, with_activation
from pase.targets.mesh_tensorflow.emitter.text import Text, code, word


def _formula(operator: Operator) -> str:
    x, w, *bias = operator.reads
    positions = [_position(axis) for axis in x.axes if isinstance(axis, Window)]
    plain = indexed(operator, x)[2:-1].split(",")
    product = f"x[{','.join([*plain, *positions])}] {indexed(operator, w)}"
    added = f" + {indexed(operator, bias[0])}" if bias else ""
    return f"{indexed(operator, operator.writes[0])} = {with_activation(operator, product + added)}"


def _position(axis: Window) -> str:
    stride = "" if axis.stride == 1 else str(axis.stride)
    dilation = "" if axis.dilation == 1 else str(axis.dilation)
    pad = f"-{axis.pad}" if axis.pad else ""
    return f"{stride}{axis.out}+{dilation}{axis.kernel}{pad}"


def _result(block: Block) -> Text:
    arguments = [block.read("x"), block.read("w"), *block.windows, block.result_dims]
    product = code("{}({})", word(block.operator.kind, ("conv1d", "conv2d", "conv3d"), "convolution"), arguments)
    return activated(block.operator, plus_bias(block, product))


CONVOLUTION = Kind(
    formula=_formula, result=_result, tensors=("x", "w"), optional=("bias",), variables=(("w", "filters"),)
)
