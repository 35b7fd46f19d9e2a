"""How `pool2d` and `global_pool` are written."""

from pase.emitter.kinds.kind import Block, Kind, indexed
from pase.graph import Operator


def _reduction(operator: Operator) -> str:
    return operator.attribute("reduction", "max")


def _formula(operator: Operator) -> str:
    rows, columns = (operator.extents[name] for name in ("r", "s"))
    return f"{indexed(operator, operator.writes[0])} = {_reduction(operator)} of {rows} x {columns} windows"


def _result(block: Block) -> str:
    rows, columns = block.windows
    arguments = [block.read("x"), rows, columns, block.result_dims]
    if _reduction(block.operator) == "mean" and block.operator.attribute("count_padding", False):
        arguments.append("count_padding=True")
    return f"{_reduction(block.operator)}_pool2d({', '.join(arguments)})"


def _fill(operator: Operator) -> str:
    return 'float("-inf")' if _reduction(operator) == "max" else ""


POOL2D = Kind(formula=_formula, result=_result, fill=_fill)

GLOBAL_POOL = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = mean of {indexed(operator, operator.reads[0])}"
    ),
    result=lambda block: f"global_pool({block.read('x')}, {block.result_dims})",
)
