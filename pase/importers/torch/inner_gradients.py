"""Gradients that a forward pass computes (of a penalty, an energy or an equation), traced like all other calls.

The backward pass runs while the forward pass is traced, so that the graph has its operators. It reads the saved tensors
of the forward pass, which must be results of nodes: composite functions are decomposed for that.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from pase.errors import ModelError
from pase.importers.torch.program import here

Program = TypeVar("Program")


class _InnerGradientsError(ModelError):
    """The forward pass computes gradients, and is not traced so that these can be followed."""


def with_inner_gradients(torch: Any, trace: Callable[[bool], Program]) -> Program:
    """Trace a module, and trace it again if its forward pass computes gradients.

    Args:
        torch: PyTorch.
        trace: Traces it; receives whether gradients are computed, for which gradients have to be enabled.

    Raises:
        ModelError: The module computes gradients in an unsupported way.
    """
    try:
        with _followed(torch, is_followed=False):
            return trace(False)
    except _InnerGradientsError:
        with _followed(torch, is_followed=True):
            return trace(True)


@contextmanager
def _followed(torch: Any, *, is_followed: bool) -> Iterator[None]:
    """Have tracing follow `torch.autograd.grad` and `torch.func.grad`, or stop where a module calls them."""
    with ExitStack() as stack:
        if is_followed:
            stack.enter_context(_taken_apart())
            stack.enter_context(_saved_as_made(torch))
        stack.enter_context(_functional(torch))
        stack.enter_context(_gradients(torch, is_followed=is_followed))
        yield


def _gradients(torch: Any, *, is_followed: bool) -> Any:
    """Return a mode in which gradients are computed so that they can be differentiated."""
    grad = torch.autograd.grad
    others = torch.autograd.backward, torch.Tensor.backward

    class Gradients(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if function in others:
                raise ModelError(
                    f"the forward pass calls backward(){here()}, which a graph cannot contain: use torch.autograd.grad("
                    "…, create_graph=True) there"
                )
            if function is not grad:
                return function(*args, **given)
            if not is_followed:
                raise _InnerGradientsError(f"the forward pass computes gradients{here()}")
            keeps_graph = bool(given.get("create_graph")) or (len(args) > 4 and bool(args[4]))
            args = args[:3]
            made = function(*args, **{**given, "create_graph": True, "retain_graph": True})
            return made if keeps_graph else tuple(None if x is None else x.detach() for x in made)

    return Gradients()


@contextmanager
def _functional(torch: Any) -> Iterator[None]:
    """Have `torch.func.grad` be `torch.autograd.grad`, and the other transforms refused by name."""
    from torch._functorch import eager_transforms

    def refused(*_: Any, **__: Any) -> Any:
        raise ModelError(
            f"the forward pass computes gradients by a transform of torch.func{here()}, which a graph cannot contain: "
            "use torch.func.grad or torch.autograd.grad(…, create_graph=True) on the whole batch, without vmap"
        )

    def grad_and_value(
        function: Callable[..., Any],
        argnums: Any,
        has_aux: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refused()
        is_enabled = torch.is_grad_enabled()
        numbers = argnums if isinstance(argnums, tuple) else (argnums,)
        tree = torch.utils._pytree

        def of_its_own(x: Any) -> Any:
            return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()

        with torch.enable_grad():
            given = list(args)
            for number in numbers:
                given[number] = tree.tree_map_only(torch.Tensor, of_its_own, given[number])
            result = function(*given, **kwargs)
            value = result[0] if has_aux else result
            wanted = given[argnums] if isinstance(argnums, int) else tuple(given[number] for number in numbers)
            leaves, spec = tree.tree_flatten(wanted)
            found = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
        gradients = tree.tree_unflatten(list(found), spec)
        if not is_enabled:
            gradients, result = tree.tree_map_only(torch.Tensor, lambda x: x.detach(), (gradients, result))
        return gradients, result

    names = {
        "grad_and_value_impl": grad_and_value,
        "grad_increment_nesting": refused,
        "jvp_increment_nesting": refused,
    }
    before = {name: getattr(eager_transforms, name) for name in names}
    for name, instead in names.items():
        setattr(eager_transforms, name, instead)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(eager_transforms, name, original)


@contextmanager
def _taken_apart() -> Iterator[None]:
    """Trace composite functions as their parts, whose tensors autograd saves."""
    from torch.fx.experimental import proxy_tensor

    original = proxy_tensor.maybe_handle_decomp

    def instead(mode: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = original(mode, operator, args, kwargs)
        name = operator._schema.name
        if made is not NotImplemented or name in _OF_SHAPES or not operator._can_decompose():
            return made
        with mode:
            return operator.decompose(*args, **kwargs)

    proxy_tensor.maybe_handle_decomp = instead
    try:
        yield
    finally:
        proxy_tensor.maybe_handle_decomp = original


_OF_SHAPES = frozenset({"aten::size", "aten::stride", "aten::storage_offset", "aten::is_nonzero", "aten::item"})


@contextmanager
def _saved_as_made(torch: Any) -> Iterator[None]:
    """Have tensors that autograd saved be the nodes that gave them: it has others of the same memory."""
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    original = PythonKeyTracer.create_arg

    def create(tracer: Any, item: Any) -> Any:
        if isinstance(item, torch.Tensor) and not isinstance(item, torch.nn.Parameter) and hasattr(item, "fake_mode"):
            node = _node_of(torch, tracer.graph, item)
            if node is not None:
                return node
        return original(tracer, item)

    PythonKeyTracer.create_arg = create
    try:
        yield
    finally:
        PythonKeyTracer.create_arg = original


def _node_of(torch: Any, graph: Any, tensor: Any) -> Any:
    """Return the last node that gives a tensor of the same memory, shape and strides; None for none."""

    def place(x: Any) -> Any:
        return x.untyped_storage()._cdata, x.shape, x.stride(), x.storage_offset(), x.dtype

    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and place(value) == place(tensor):
            return node
    return None
