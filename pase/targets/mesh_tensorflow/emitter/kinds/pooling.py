"""How `pool1d`, `pool2d`, `pool3d` and `global_pool` are written."""

from pase.graph import Operator, Window
from pase.graph.operators.pooling import REDUCTIONS
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import Text, code, word

_FUNCTIONS = tuple(f"{reduction}_pool{rank}d" for reduction in REDUCTIONS for rank in (1, 2, 3))


def _reduction(operator: Operator) -> str:
    return operator.attribute("reduction", "max")


def _formula(operator: Operator) -> str:
    kernels = [axis.kernel for axis in operator.reads[0].axes if isinstance(axis, Window)]
    sizes = " x ".join(str(operator.extents[name]) for name in kernels)
    return f"{indexed(operator, operator.writes[0])} = {_reduction(operator)} of {sizes} windows"


def _result(block: Block) -> Text:
    arguments = [block.read("x"), *block.windows, block.result_dims]
    if _reduction(block.operator) == "mean" and block.operator.attribute("count_padding", False):
        arguments.append(code("count_padding=True"))
    return code("{}({})", word(f"{_reduction(block.operator)}_{block.operator.kind}", _FUNCTIONS, "pooling"), arguments)


def _fill(operator: Operator) -> Text:
    return code("{}", float("-inf")) if _reduction(operator) == "max" else code("")


POOLING = Kind(formula=_formula, result=_result, fill=_fill, tensors=("x",))

GLOBAL_POOL = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = mean of {indexed(operator, operator.reads[0])}"
    ),
    result=lambda block: code("global_pool({}, {})", block.read("x"), block.result_dims),
    tensors=("x",),
)
