"""How `elementwise` and `add_parameter` are written."""

from pase.graph import Operator
from pase.graph.operators.elementwise import FUNCTIONS
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind, activated, indexed, with_activation
from pase.targets.mesh_tensorflow.emitter.text import Text, code, joined, word

_INFIX = {"add": code(" + "), "multiply": code(" * ")}


def _function(operator: Operator) -> str:
    return operator.attribute("function", "add")


def _formula(operator: Operator) -> str:
    terms = [indexed(operator, access) for access in operator.reads]
    function = _function(operator)
    applied = _INFIX[function].join(terms) if function in _INFIX else f"{function}({terms[0]})"
    return f"{indexed(operator, operator.writes[0])} = {with_activation(operator, applied)}"


def _result(block: Block) -> Text:
    function = _function(block.operator)
    if function in _INFIX:
        return activated(block.operator, joined(block.reads, _INFIX[function]))
    return activated(block.operator, code("{}({})", word(function, FUNCTIONS, "function"), block.reads[0]))


def _problem(operator: Operator) -> str:
    function = _function(operator)
    if function not in _INFIX and len(operator.reads) != 1:
        return f"it applies {function!r} to {len(operator.reads)} tensors; expected one"
    return ""


ELEMENTWISE = Kind(formula=_formula, result=_result, problem=_problem)

ADD_PARAMETER = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = {' + '.join(indexed(operator, read) for read in operator.reads)}"
    ),
    result=lambda block: joined(block.reads, _INFIX["add"]),
    tensors=("x", "p"),
    variables=(("p", "parameter"),),
)
