"""How `concat` is written: the inputs are joined on their way to the layer's mesh."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import Text, code


def _formula(operator: Operator) -> str:
    along = operator.attribute("along", "c")
    return f"{indexed(operator, operator.writes[0])} = {len(operator.reads)} tensors end to end along {along}"


def _result(block: Block) -> Text:
    along = block.dims[block.operator.attribute("along", "c")]
    return code("concat([{}], mesh, {}, along={})", block.reads, block.result_dims, along)


def _problem(operator: Operator) -> str:
    along = operator.attribute("along", "c")
    return "" if along in operator.extents else f"it joins tensors along {along!r}, which is none of its dims"


CONCAT = Kind(formula=_formula, result=_result, problem=_problem, joins=True)
