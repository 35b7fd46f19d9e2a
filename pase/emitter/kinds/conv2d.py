"""How `conv2d` is written."""

from pase.emitter.kinds.kind import Block, Kind, activated, indexed, plus_bias
from pase.graph import Operator, Window


def _formula(operator: Operator) -> str:
    x, w, *bias = operator.reads
    positions = [_position(axis) for axis in x.axes if isinstance(axis, Window)]
    plain = indexed(operator, x)[2:-1].split(",")
    product = f"x[{','.join([*plain, *positions])}] {indexed(operator, w)}"
    added = f" + {indexed(operator, bias[0])}" if bias else ""
    return f"{indexed(operator, operator.writes[0])} = {activated(operator, product + added)}"


def _position(axis: Window) -> str:
    stride = "" if axis.stride == 1 else str(axis.stride)
    dilation = "" if axis.dilation == 1 else str(axis.dilation)
    pad = f"-{axis.pad}" if axis.pad else ""
    return f"{stride}{axis.out}+{dilation}{axis.kernel}{pad}"


def _result(block: Block) -> str:
    rows, columns = block.windows
    arguments = [block.read("x"), block.read("w"), rows, columns, block.result_dims]
    return activated(block.operator, plus_bias(block, f"conv2d({', '.join(arguments)})"))


CONV2D = Kind(formula=_formula, result=_result, variables=(("w", "filters"),))
