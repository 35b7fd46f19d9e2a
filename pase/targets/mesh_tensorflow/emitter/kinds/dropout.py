"""How `dropout` is written: the layer's name and the step's key say what is dropped."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import Text, code


def _rate(operator: Operator) -> float:
    return operator.attribute("rate", 0.0)


def _formula(operator: Operator) -> str:
    x, y = indexed(operator, operator.reads[0]), indexed(operator, operator.writes[0])
    return f"{y} = {x} / {1 - _rate(operator):g} or 0"


def _result(block: Block) -> Text:
    return code("dropout({}, program.mask_key, rate={})", block.read("x"), _rate(block.operator))


def _problem(operator: Operator) -> str:
    rate = _rate(operator)
    return "" if 0 <= rate < 1 else f"it drops a fraction of {rate}; expected a rate from 0 to below 1"


DROPOUT = Kind(formula=_formula, result=_result, problem=_problem, tensors=("x",))
