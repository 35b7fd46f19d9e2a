"""How `batch_norm` and `layer_norm` are written."""

from pase.emitter.kinds.kind import Block, Kind, activated, indexed
from pase.graph import Operator


def _formula(operator: Operator) -> str:
    x, scale, shift = (indexed(operator, access) for access in operator.reads)
    return f"{indexed(operator, operator.writes[0])} = {activated(operator, f'normal({x}) (1 + {scale}) + {shift}')}"


def _result(block: Block) -> str:
    call = f"{block.operator.kind}({', '.join(block.reads)})"
    return activated(block.operator, call)


BATCH_NORM = LAYER_NORM = Kind(formula=_formula, result=_result)
