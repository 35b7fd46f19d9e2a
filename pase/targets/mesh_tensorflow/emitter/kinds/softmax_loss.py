"""How `softmax_loss`, the end of a training graph, is written."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import Text, code


def _formula(operator: Operator) -> str:
    logits, labels = operator.reads
    return f"loss = mean of -log softmax({indexed(operator, logits)}) at {indexed(operator, labels)}"


def _result(block: Block) -> Text:
    logits, labels = block.reads
    return code("softmax_loss({}, {}, {})", logits, labels, block.dims[block.operator.dims[-1].name])


SOFTMAX_LOSS = Kind(
    formula=_formula, result=_result, tensors=("x", "labels"), variables=(("labels", "targets"),), is_loss=True
)
