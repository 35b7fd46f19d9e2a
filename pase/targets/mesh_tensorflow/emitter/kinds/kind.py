"""`Kind`: how one kind of operator is written."""

from collections.abc import Callable
from dataclasses import dataclass

from pase.graph import Access, Operator
from pase.graph.names import listed
from pase.graph.operator import EPILOGUE
from pase.graph.operators.activations import ACTIVATIONS
from pase.sharding.layouts import PlainDim, tensor_dims
from pase.targets.mesh_tensorflow.emitter.text import Text, code, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The names that a layer's block uses.

    dims: variable of each iteration dim. reads: [reads] variable of each read, on the layer's mesh; of the tensor
    itself where the kind joins. windows: variables of the sliding windows, planes before rows before columns.
    """

    operator: Operator
    dims: dict[str, Text]
    reads: tuple[Text, ...]
    windows: tuple[Text, ...]

    def read(self, tensor: str) -> Text:
        """Return the variable of a read by the tensor's name, "" where the operator does not read that one."""
        names = [access.tensor for access in self.operator.reads]
        return self.reads[names.index(tensor)] if tensor in names else code("")

    def plain_dims(self, access: Access) -> Text:
        """Return a tensor's dims as a list of variables."""
        plain = [dim for dim in tensor_dims(self.operator, access) if isinstance(dim, PlainDim)]
        return code("[{}]", [self.dims[dim.name] for dim in plain])

    @property
    def result_dims(self) -> Text:
        """The dims of what the layer writes."""
        return self.plain_dims(self.operator.writes[0])


def _nothing(_: Operator) -> Text:
    return code("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """formula: what the layer computes, for its comment, any text. result: the expression of its output.

    fill: the value of a window's padding, "" for zero. problem: why an operator cannot be written, "" if it can.
    tensors: that every operator of the kind reads, by name, and after them perhaps those in `optional`; none where it
    reads any number of tensors. variables: names for reads where the tensor's own would mislead. joins: whether the
    expression takes its inputs from their own meshes. is_loss: whether the output is what is minimised. whole: the dim
    of a program that stands for a tensor dim which no iteration dim indexes, "" where there is none.
    """

    formula: Callable[[Operator], str]
    result: Callable[[Block], Text]
    fill: Callable[[Operator], Text] = _nothing
    problem: Callable[[Operator], str] = _nothing
    tensors: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    joins: bool = False
    is_loss: bool = False
    whole: Text = code("")  # noqa: RUF009

    def why_not(self, operator: Operator) -> str:
        """Return why an operator cannot be written, "" if it can."""
        epilogue = operator.attribute(EPILOGUE, "")
        if epilogue:
            return f"it applies {epilogue} to its result"
        found = tuple(access.tensor for access in operator.reads)
        if self.tensors and found not in (self.tensors, (*self.tensors, *self.optional)):
            return f"it reads {listed(found)}; expected {', '.join((*self.tensors, *self.optional))}"
        return self.problem(operator) if found else "it reads nothing"


def activated(operator: Operator, expression: Text) -> Text:
    """Return an expression inside the operator's activation."""
    activation = operator.attribute("activation", "")
    return code("{}({})", word(activation, ACTIVATIONS, "activation"), expression) if activation else expression


def with_activation(operator: Operator, formula: str) -> str:
    """Return a formula inside the operator's activation."""
    activation = operator.attribute("activation", "")
    return f"{activation}({formula})" if activation else formula


def plus_bias(block: Block, expression: Text) -> Text:
    """Return an expression and the operator's bias, where it has one."""
    bias = block.read("bias")
    return code("{} + {}", expression, bias) if bias else expression


def indexed(operator: Operator, access: Access, name: str = "") -> str:
    """Return a tensor in a formula, ``w[c,n]``."""
    dims = ",".join(dim.name for dim in tensor_dims(operator, access) if isinstance(dim, PlainDim))
    return f"{name or access.tensor}[{dims}]"
