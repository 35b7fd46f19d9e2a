"""How `attention` is written."""

from pase.graph import Operator
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import Text, code


def _formula(operator: Operator) -> str:
    q, k, v = (indexed(operator, access) for access in operator.reads)
    causal = ", no later t" if operator.attribute("causal", False) else ""
    return f"{indexed(operator, operator.writes[0])} = softmax({q} {k} / sqrt k{causal}) {v}"


def _result(block: Block) -> Text:
    causal = [code("causal=True")] if block.operator.attribute("causal", False) else []
    return code("attention({})", [*block.reads, *causal])


ATTENTION = Kind(
    formula=_formula,
    result=_result,
    tensors=("q", "k", "v"),
    variables=(("q", "queries"), ("k", "keys"), ("v", "values")),
)
