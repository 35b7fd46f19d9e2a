"""How `dense` is written: an einsum, so that any split of the reduced dims is summed when it is needed."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, activated, indexed, plus_bias, with_activation
from pase.targets.mesh_tensorflow.emitter.text import Text, code


def _formula(operator: Operator) -> str:
    x, w, *bias = operator.reads
    product = f"{indexed(operator, x)} {indexed(operator, w)}"
    added = f" + {indexed(operator, bias[0])}" if bias else ""
    return f"{indexed(operator, operator.writes[0])} = {with_activation(operator, product + added)}"


def _result(block: Block) -> Text:
    product = code("mtf.einsum([{}, {}], {})", block.read("x"), block.read("w"), block.result_dims)
    return activated(block.operator, plus_bias(block, product))


DENSE = Kind(formula=_formula, result=_result, tensors=("x", "w"), optional=("bias",), variables=(("w", "weights"),))
