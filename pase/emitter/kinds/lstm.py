"""How `lstm` is written."""

from pase.emitter.kinds.kind import Block, Kind, indexed
from pase.emitter.text import Text, code
from pase.graph import Operator


def _formula(operator: Operator) -> str:
    layers = operator.extents["l"]
    return f"{indexed(operator, operator.writes[0])} = {layers} LSTM layers of {indexed(operator, operator.reads[0])}"


def _result(block: Block) -> Text:
    return code("lstm({}, {})", block.reads, block.result_dims)


LSTM = Kind(formula=_formula, result=_result, whole=code("GATES"))
