"""How `fan_out` is written."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import Text, code


def _formula(operator: Operator) -> str:
    (x,), (y,) = operator.reads, operator.writes
    return f"{indexed(operator, y)} = {indexed(operator, x)} for several layers"


def _result(block: Block) -> Text:
    over = [block.dims[dim] for dim in block.operator.reads[0].partial_over or ()]
    return code("fan_out({}, [{}])", block.read("x"), over)


FAN_OUT = Kind(formula=_formula, result=_result)
