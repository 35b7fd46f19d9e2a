"""How `embedding` is written."""

from pase.targets.mesh_tensorflow.emitter.kinds.kind import Kind, indexed
from pase.targets.mesh_tensorflow.emitter.text import code

EMBEDDING = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = table[{indexed(operator, operator.reads[0])},"
        f"{operator.dims[-2].name}]"
    ),
    result=lambda block: code("embedding({}, {}, {})", block.read("table"), block.read("x"), block.result_dims),
    problem=lambda operator: "" if len(operator.dims) > 1 else "it has no dim of its rows besides their width",
    tensors=("x", "table"),
)
