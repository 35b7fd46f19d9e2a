"""Trace constructs of a module's forward pass that tracing would otherwise lose or misinterpret.

All replacements are active while a module's own graph is captured, and are undone afterwards.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from pase.errors import ModelError
from pase.importers.torch.program import here


@contextmanager
def followed(torch: Any, module: Any) -> Iterator["Checkpoints"]:
    """Trace a module's regions without gradients, its checkpoints, and its assignments to buffers correctly.

    Args:
        torch: PyTorch.
        module: The module to trace.

    Yields:
        The object that runs checkpoints.

    Raises:
        ModelError: The forward pass changes state that a graph cannot represent.
    """
    checkpoints = Checkpoints(torch, module)
    with ExitStack() as stack:
        stack.enter_context(_inference_as_no_grad(torch))
        stack.enter_context(checkpoints.run_in_line())
        stack.enter_context(_assigned_buffers(torch, module))
        stack.enter_context(_calls(torch))
        yield checkpoints


def _calls(torch: Any) -> Any:
    """Return a mode in which `tensor.data` detaches, and functions that return their argument leave it unchanged."""
    from torch.fx.experimental import proxy_tensor

    data = torch.Tensor.data

    class Calls(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = kwargs or {}
            if function == data.__get__:
                return args[0].detach()
            if function == data.__set__:
                old, new = args
                if old.shape != new.shape or old.dtype != new.dtype:
                    raise ModelError(f"a tensor's .data becomes one of another shape or type{here()}: use a new tensor")
                return old.detach().copy_(new.detach())
            if torch.is_grad_enabled():
                return function(*args, **given)
            return self._without_gradients(function, args, given)

        def _without_gradients(self, function: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
            """Call a function so that its arguments remain nodes through which gradients flow.

            `weight.flatten(1)` of a matrix is the weight itself, which tracing would take for the result of the call.
            """
            mode = proxy_tensor.get_proxy_mode()
            if mode is None:
                return function(*args, **given)
            read = [x for x in torch.utils._pytree.tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
            before = [(x, x._version, proxy_tensor.get_proxy_slot(x, mode.tracer, None)) for x in read]
            made = function(*args, **given)
            for tensor, version, slot in before:
                if slot is not None and tensor._version == version:
                    proxy_tensor.set_proxy_slot(tensor, mode.tracer, slot)
            return made

    return Calls()


@contextmanager
def _inference_as_no_grad(torch: Any) -> Iterator[None]:
    """Replace `torch.inference_mode()` by `torch.no_grad()`: they only differ in how results may be used."""
    inference = torch.inference_mode
    methods = inference.__enter__, inference.__exit__

    def enter(self: Any) -> None:
        self._instead = torch.no_grad() if self.mode else torch.enable_grad()
        self._instead.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self._instead.__exit__(*error)

    inference.__enter__, inference.__exit__ = enter, leave
    try:
        yield
    finally:
        inference.__enter__, inference.__exit__ = methods


@contextmanager
def _assigned_buffers(torch: Any, module: Any) -> Iterator[None]:
    """Have `self.buffer = new` write into the buffer at the end of the forward pass: exports lose assignments."""
    before: dict[str, Any] = {}

    def begin(*_: Any) -> None:
        before.update(module.named_buffers(remove_duplicate=False))

    def end(_module: Any, _given: Any, output: Any) -> Any:
        now: dict[str, Any] = dict(module.named_buffers(remove_duplicate=False))
        changed = {name: now.get(name) for name, old in before.items() if now.get(name) is not old}
        values: dict[str, Any] = {}
        for name, new in changed.items():
            old = before[name]
            if any(other is old for other in now.values()):
                raise ModelError(
                    f"buffer {name!r}, which the forward pass assigns, is another one as well: write into it with "
                    ".copy_(), or make them two"
                )
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise ModelError(
                    f"buffer {name!r} becomes one of another shape or type in the forward pass: give it those that it "
                    "keeps, or make it an input"
                )
            values[name] = new.detach().clone()
        if not values:
            return output
        storages = {before[name].untyped_storage()._cdata for name in values}
        # The previous value may be returned, or assigned to another buffer.
        output = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: x.clone() if x.untyped_storage()._cdata in storages else x, output
        )
        for name, value in values.items():
            before[name].copy_(value)
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._buffers[last] = before[name]
        return output

    hooks = module.register_forward_pre_hook(begin), module.register_forward_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Checkpoints:
    """Runs checkpointed functions inline: a graph contains each computation once.

    A recomputation writes into buffers again. This is reproduced for batch normalisation, except in nested checkpoints,
    whose recomputation may stop before it; writes to other buffers are rejected.

    Args:
        torch: PyTorch.
        module: The module.
    """

    def __init__(self, torch: Any, module: Any) -> None:
        self._torch, self._module = torch, module
        self._depth = 0

    @contextmanager
    def run_in_line(self) -> Iterator[None]:
        """Make `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)` only call its function."""
        from torch.utils import checkpoint

        name = "_checkpoint_without_reentrant_generator"
        original = getattr(checkpoint, name)

        def plain(*_: Any, **__: Any) -> Iterator[None]:
            with self._recomputed():
                yield

        setattr(checkpoint, name, plain)
        hook = self._torch.nn.modules.module.register_module_forward_hook(self._normalised)
        try:
            yield
        finally:
            setattr(checkpoint, name, original)
            hook.remove()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return what `checkpoint(function, *args, use_reentrant=True)` does."""
        torch = self._torch
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            # Its results then have no gradient, regardless of their operands.
            with torch.no_grad():
                return function(*args)
        with self._recomputed():
            return function(*args)

    @contextmanager
    def _recomputed(self) -> Iterator[None]:
        if not self._torch.is_grad_enabled():
            yield
            return
        before: dict[str, Any] = dict(self._module.named_buffers(remove_duplicate=False))
        versions = {name: buffer._version for name, buffer in before.items()}
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        now = dict(self._module.named_buffers(remove_duplicate=False))
        for name, buffer in before.items():
            is_written = buffer._version != versions[name] or now.get(name) is not buffer
            owner = self._module.get_submodule(name.rpartition(".")[0])
            if is_written and not (self._is_norm(owner) and self._depth == 0):
                raise ModelError(
                    f"buffer {name!r} is written within a checkpoint{here()}, whose recomputation writes it once more: "
                    "write it outside of what is recomputed"
                )

    def _is_norm(self, part: Any) -> bool:
        return isinstance(part, self._torch.nn.modules.batchnorm._BatchNorm)

    def _normalised(self, part: Any, given: tuple[Any, ...], _: Any) -> None:
        """Update running statistics a second time, as the recomputation will."""
        if self._depth == 1 and self._is_norm(part) and part.training and part.track_running_stats:
            with self._torch.no_grad():
                part.forward(given[0].detach())
