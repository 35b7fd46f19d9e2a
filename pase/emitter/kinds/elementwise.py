"""How `elementwise` and `add_parameter` are written."""

from pase.emitter.kinds.kind import Block, Kind, activated, indexed
from pase.graph import Operator

_INFIX = {"add": " + ", "multiply": " * "}


def _applied(operator: Operator, terms: list[str]) -> str:
    function = operator.attribute("function", "add")
    if function in _INFIX:
        return activated(operator, _INFIX[function].join(terms))
    return activated(operator, f"{function}({terms[0]})")


def _formula(operator: Operator) -> str:
    terms = [indexed(operator, access) for access in operator.reads]
    return f"{indexed(operator, operator.writes[0])} = {_applied(operator, terms)}"


def _result(block: Block) -> str:
    return _applied(block.operator, list(block.reads))


def _problem(operator: Operator) -> str:
    function = operator.attribute("function", "add")
    if function not in _INFIX and len(operator.reads) != 1:
        return f"it applies {function!r} to {len(operator.reads)} tensors; expected one"
    return ""


ELEMENTWISE = Kind(formula=_formula, result=_result, problem=_problem)

ADD_PARAMETER = Kind(
    formula=lambda operator: (
        f"{indexed(operator, operator.writes[0])} = {' + '.join(indexed(operator, read) for read in operator.reads)}"
    ),
    result=lambda block: " + ".join(block.reads),
    variables=(("p", "parameter"),),
)
