"""How `lstm` is written."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import Text, code


def _formula(operator: Operator) -> str:
    layers = operator.extents["l"]
    return f"{indexed(operator, operator.writes[0])} = {layers} LSTM layers of {indexed(operator, operator.reads[0])}"


def _result(block: Block) -> Text:
    return code("lstm({}, {})", block.reads, block.result_dims)


def _problem(operator: Operator) -> str:
    return "" if "l" in operator.extents else "it has no dim l of its layers"


LSTM = Kind(formula=_formula, result=_result, problem=_problem, tensors=("x", "w", "u", "bias"), whole=code("GATES"))
