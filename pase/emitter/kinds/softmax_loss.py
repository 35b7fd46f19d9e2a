"""How `softmax_loss`, the end of a training graph, is written."""

from pase.emitter.kinds.kind import Block, Kind, indexed
from pase.graph import Operator


def _formula(operator: Operator) -> str:
    logits, labels = operator.reads
    return f"loss = mean of -log softmax({indexed(operator, logits)}) at {indexed(operator, labels)}"


def _result(block: Block) -> str:
    classes = block.operator.dims[-1].name
    return f"softmax_loss({block.reads[0]}, {block.reads[1]}, {block.dims[classes]})"


SOFTMAX_LOSS = Kind(formula=_formula, result=_result, variables=(("labels", "targets"),), is_loss=True)
