"""How `batch_norm` and `layer_norm` are written."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, activated, indexed, with_activation
from pase.targets.mesh_tensorflow.emitter.text import Text, code, word


def _formula(operator: Operator) -> str:
    x, scale, shift = (indexed(operator, access) for access in operator.reads)
    normal = with_activation(operator, f"normal({x}) (1 + {scale}) + {shift}")
    return f"{indexed(operator, operator.writes[0])} = {normal}"


def _result(block: Block) -> Text:
    function = word(block.operator.kind, ("batch_norm", "layer_norm"), "normalisation")
    return activated(block.operator, code("{}({})", function, block.reads))


BATCH_NORM = LAYER_NORM = Kind(formula=_formula, result=_result, tensors=("x", "scale", "shift"))
