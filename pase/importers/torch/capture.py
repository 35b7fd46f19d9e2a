"""`captured`: a module's own graph of ATen calls, as the module computes in training or in evaluation.

`torch.export` traces the module with gradients, and `run_decompositions` makes the result functional. What would be
lost on the way is put into the graph first: regions under `torch.no_grad()` read detached values, and the backward
pass of a `torch.autograd.Function` stays its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any

from pase.errors import ModelError
from pase.importers.torch.export import Loss, ready_to_trace, traced, unwrapped
from pase.importers.torch.program import flat_items, function_of, here, sized, where
from pase.importers.torch.training import restored

_OWN = "own"
"""Key of a node's `meta["custom"]`: the traced node that it comes from."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A module's own graph: ATen calls without side effects, which autograd differentiates as it does the module.

    Attributes:
        graph: A `torch.fx.GraphModule`. It takes parameters, buffers, constants and inputs by position, in the order
            of its placeholders, and returns the module's tensors, then the values in `written`.
        inputs: Names of the module's inputs, by placeholder.
        parameters: Names of the parameters, by placeholder; a tied weight has the first of its names.
        buffers: Names of the buffers, by placeholder.
        constants: Tensors that the source contains, or that are attributes without being buffers, by placeholder.
        outputs: Nodes of the tensors that the module returns, in order.
        written: Nodes of what buffers (and parameters that the module itself changes) hold after a call, by name. They
            may carry gradients, which end there.
        origins: By node, the traced node that it comes from: `exported` has the same names for what it returns.
        trains: Whether it is the graph of training.
        notes: What was assumed, in words.
    """

    graph: Any
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Any]
    outputs: tuple[str, ...]
    written: Mapping[str, str]
    origins: Mapping[str, str]
    trains: bool
    notes: tuple[str, ...]


def captured(
    torch: Any,
    module: Any,
    positional: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss: Loss | None = None,
    *,
    trains: bool,
    on_output: Callable[[Any], object] = lambda _: None,
) -> Captured:
    """Return the graph of a module.

    Args:
        torch: PyTorch.
        module: The module; it is left as it was. No value of a parameter is read.
        positional, keywords: Its example inputs, whose values are ignored.
        loss: Of what it returns and of targets, which are the last of the inputs then.
        trains: Whether it is traced as it is set (after `train()` if it is in evaluation as a whole), or in evaluation.
        on_output: Called with what the module returns, with tensors without values, whenever it is called.

    Raises:
        ModelError: The module cannot be traced: control flow or sizes that depend on values, or a step that no graph
            can contain.
    """
    module = unwrapped(torch, module)
    notes: list[str] = []
    functions = _Functions(torch)
    with ExitStack() as stack:
        stack.enter_context(restored(torch, module))
        given = stack.enter_context(ready_to_trace(torch, module, positional, keywords, loss, notes, on_output))
        if not trains:
            module.eval()
        elif not module.training:
            module.train()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_followed(torch))
        stack.enter_context(functions.as_operators())
        program = traced(torch, module, *given)
        _mark(program)
        _keep_cuts(torch, program)
        functional = program.run_decompositions(_decompositions(torch))
        return _finished(torch, module, functional, functions, trains=trains, notes=notes)


# -- while the module is traced


@contextmanager
def _followed(torch: Any) -> Iterator[None]:
    """Have what hides from tracing do the same by steps that it follows: `tensor.data` and `torch.inference_mode()`."""
    data, inference = torch.Tensor.data, torch.inference_mode

    class Data(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if function == data.__get__:
                return args[0].detach()
            if function == data.__set__:
                old, new = args
                if old.shape != new.shape or old.dtype != new.dtype:
                    raise ModelError(f"a tensor's .data becomes one of another shape or type{here()}: use a new tensor")
                return old.detach().copy_(new.detach())
            return function(*args, **(kwargs or {}))

    def enter(self: Any) -> None:
        # Its results differ from those of `no_grad` in what may be done with them alone.
        self._instead = torch.no_grad() if self.mode else torch.enable_grad()
        self._instead.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self._instead.__exit__(*error)

    methods = inference.__enter__, inference.__exit__
    inference.__enter__, inference.__exit__ = enter, leave
    try:
        with Data():
            yield
    finally:
        inference.__enter__, inference.__exit__ = methods


class _Functions:
    """The calls of `torch.autograd.Function`s that a module makes, each of them one operator while it is traced.

    Attributes:
        calls: By number: the class, its arguments with places of tensors in them, and what it returns, likewise.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # `Function.apply`, which users have bound to names of their own, calls that of this class.
        self._base = torch.autograd.function._SingleLevelFunction
        self.calls: list[tuple[Any, Any, Any]] = []

    @contextmanager
    def as_operators(self) -> Iterator[None]:
        """Have each call of a function be a call of `pase::function`, with its tensors as operands."""
        torch = self._torch
        library = torch.library.Library("pase", "FRAGMENT")
        library.define("function(Tensor[] tensors, int number) -> Tensor[]")
        torch.library.register_fake("pase::function", self._without_values, lib=library)
        functions = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return functions._called(cls, args, kwargs)

        self._base.apply = classmethod(apply)
        try:
            yield
        finally:
            del self._base.apply
            library._destroy()

    def target(self, number: int) -> Callable[..., Any]:
        """Return what a call computes, as a function of a list of its tensors: the class's own `apply`."""
        torch, (cls, arguments, _) = self._torch, self.calls[number]

        def run(tensors: Sequence[Any]) -> list[Any]:
            args, kwargs = _with_tensors(torch, arguments, tensors)
            return _tensors(torch, cls.apply(*args, **kwargs))

        run.__name__ = run.__qualname__ = cls.__name__
        return run

    def _called(self, cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        torch = self._torch
        if cls.__module__ == "torch.utils.checkpoint" and cls.__name__ == "CheckpointFunction":
            # The graph contains what is computed, not what is recomputed.
            return args[0](*args[2:])
        if cls.__module__.startswith("torch.") and not cls.__module__.startswith("torch.nn."):
            return self._applied(cls, args, kwargs)
        arguments, tensors = _with_places(torch, (args, dict(kwargs)))
        for item in torch.utils._pytree.tree_leaves(arguments):
            if isinstance(item, torch.nn.Module):
                raise ModelError(
                    f"torch.autograd.Function {cls.__name__!r} is given a module: gradients of its weights cannot be "
                    "followed; give it the weights as arguments"
                )
        number = len(self.calls)
        self.calls.append((cls, arguments, None))
        outputs = torch.ops.pase.function(tensors, number)
        return _with_tensors(torch, self.calls[number][2], outputs)

    def _applied(self, cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        base: Any = super(self._base, cls)
        return base.apply(*args, **kwargs)

    def _without_values(self, tensors: Sequence[Any], number: int) -> list[Any]:
        """Return tensors without values of the shapes of what a call returns."""
        torch, (cls, arguments, _) = self._torch, self.calls[number]
        versions = [tensor._version for tensor in tensors]
        args, kwargs = _with_tensors(torch, arguments, tensors)
        returned = self._applied(cls, args, kwargs)
        if versions != [tensor._version for tensor in tensors]:
            raise ModelError(f"torch.autograd.Function {cls.__name__!r} writes into its inputs: return new tensors")
        returned, outputs = _with_places(torch, returned)
        self.calls[number] = cls, arguments, returned
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in outputs]


@dataclass(frozen=True)
class _Place:
    """The place of a tensor among arguments or results: its number."""

    number: int


def _with_places(torch: Any, items: Any) -> tuple[Any, list[Any]]:
    """Return nested items with places for tensors, and the tensors."""
    tensors: list[Any] = []

    def place(tensor: Any) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return torch.utils._pytree.tree_map_only(torch.Tensor, place, items), tensors


def _with_tensors(torch: Any, items: Any, tensors: Sequence[Any]) -> Any:
    """Return nested items with tensors in their places."""
    return torch.utils._pytree.tree_map_only(_Place, lambda place: tensors[place.number], items)


def _tensors(torch: Any, items: Any) -> list[Any]:
    return [item for item in torch.utils._pytree.tree_leaves(items) if isinstance(item, torch.Tensor)]


# -- what making the graph functional would lose


def _mark(program: Any) -> None:
    """Name each traced node in what is made of it."""
    for prefix, graph in _graphs(program):
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["custom"] = {**node.meta.get("custom", {}), _OWN: f"{prefix}{node.name}"}


def _graphs(program: Any) -> Iterator[tuple[str, Any]]:
    """Yield the graphs of a program, with those of the regions in it; each with the beginning of its nodes' names."""
    for name, part in program.graph_module.named_modules():
        if hasattr(part, "graph"):
            yield f"{name}." if name else "", part.graph


def _keep_cuts(torch: Any, program: Any) -> None:
    """Write into the traced program where gradients end: operators under `no_grad` read detached tensors."""
    module = program.graph_module
    carrying = {node for node in module.graph.nodes if node.op == "placeholder" and _needs_gradient(node)}
    _Cuts(torch, module, carrying, is_enabled=True).keep()


class _Cuts:
    """Writes the ends of gradients into one graph, and those of the regions that it runs.

    Args:
        torch: PyTorch.
        module: Whose graph it is.
        carrying: Its placeholders that a gradient flows through; `keep` adds the nodes that are found.
        is_enabled: Whether gradients are enabled where the graph begins.
    """

    def __init__(self, torch: Any, module: Any, carrying: set[Any], *, is_enabled: bool) -> None:
        self._torch, self._module, self._graph = torch, module, module.graph
        self.carrying, self._is_enabled = carrying, is_enabled
        self._detached: dict[Any, Any] = {}

    def keep(self) -> None:
        """Rewrite the graph."""
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            if _is_region(node):
                self._region(node)
            elif node.target is not getitem:
                self._call(node)
        self._graph.lint()
        self._module.recompile()

    def _call(self, node: Any) -> None:
        aten = self._torch.ops.aten
        if node.target is aten.detach_.default:
            self._replace_behind(node, node.args[0])
            node.target = aten.detach.default
        is_mutable = _is_mutable(self._torch, node.target)
        reads = [source for source in node.all_input_nodes if source in self.carrying]
        if reads and not self._is_enabled:
            for source in reads:
                node.replace_input_with(source, self._detach(source))
        if is_mutable:
            base = self._cut_base(node.args[0])
            if base is not None:
                # Autograd does not see the write: the gradient of what was there before goes on.
                with self._graph.inserting_before(node):
                    zero = self._new(aten.sub.Tensor, (base, self._new(aten.detach.default, (base,), base)), base)
                with self._graph.inserting_after(node):
                    self._new(aten.add_.Tensor, (base, zero), base)
        if not reads or not self._is_enabled or node.target is aten.detach.default:
            return
        self.carrying.add(node)
        if is_mutable:
            self.carrying |= set(_aliases(node.args[0]))

    def _replace_behind(self, node: Any, source: Any) -> None:
        """Have what comes after a node read that in place of another one."""
        later = node.next
        while later.op != "root":
            later.replace_input_with(source, node)
            later = later.next

    def _detach(self, source: Any) -> Any:
        if source not in self._detached:
            last = [n for n in self._graph.nodes if n.op == "placeholder"][-1] if source.op == "placeholder" else source
            with self._graph.inserting_after(last):
                self._detached[source] = self._new(self._torch.ops.aten.detach.default, (source,), source)
        return self._detached[source]

    def _new(self, target: Any, args: tuple[Any, ...], like: Any) -> Any:
        node = self._graph.call_function(target, args)
        node.meta = {key: value for key, value in like.meta.items() if key != "custom"}
        return node

    def _cut_base(self, written: Any) -> Any:
        """Return the tensor that gradients flow through which a detached one is the memory of; None for none."""
        aten = self._torch.ops.aten
        behind = [
            n.args[0] for n in _aliases(written) if n.target is aten.detach.default and n.args[0] in self.carrying
        ]
        return behind[-1] if behind else None

    def _region(self, node: Any) -> None:
        place = next(i for i, item in enumerate(node.args) if getattr(item, "op", "") == "get_attr")
        inner, operands = self._module.get_submodule(node.args[place].target), node.args[place + 1 :]
        places = [item for item in inner.graph.nodes if item.op == "placeholder"]
        pairs = list(zip(places, operands, strict=True))
        is_enabled = self._is_enabled
        if "set_grad_enabled" in node.target.__name__:
            is_enabled = bool(node.args[0])
        cuts = _Cuts(self._torch, inner, {own for own, outer in pairs if outer in self.carrying}, is_enabled=is_enabled)
        cuts.keep()
        outer_of = dict(pairs)
        self.carrying |= {outer for own, outer in pairs if own in cuts.carrying}
        (returned,) = inner.graph.find_nodes(op="output")
        results = list(returned.args[0])
        for item in list(node.users):
            if item.target is not getitem:
                continue
            result = results[item.args[1]]
            if result in cuts.carrying:
                self.carrying.add(item)
            chain = list(_aliases(result))
            if chain[-1] in outer_of and outer_of[chain[-1]] in self.carrying and self._is_in_place(chain):
                # What is written in place is the tensor itself, whose gradient does not end.
                item.replace_all_uses_with(outer_of[chain[-1]])

    def _is_in_place(self, chain: Sequence[Any]) -> bool:
        detach = self._torch.ops.aten.detach.default
        inside = chain[:-1]
        is_same = all(_is_mutable(self._torch, item.target) or item.target is detach for item in inside)
        return is_same and any(_is_mutable(self._torch, item.target) for item in inside)


def _needs_gradient(node: Any) -> bool:
    return bool(getattr(node.meta.get("val"), "requires_grad", False))


def _is_region(node: Any) -> bool:
    return str(getattr(node.target, "__name__", "")).startswith("wrap_with")


def _is_mutable(torch: Any, target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def _aliases(node: Any) -> Iterator[Any]:
    """Yield a node and, one after the other, what it is a view of, or the same tensor as."""
    yield node
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if node.target is not getitem and not (schema and schema.arguments and schema.arguments[0].alias_info):
            return
        node = node.args[0]
        yield node


# -- what was made functional


def _decompositions(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Return what operators consist of that write into buffers without their schemas saying so."""
    aten = torch.ops.aten

    def instance_norm(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, by_batch: bool, momentum: float, eps: float, cudnn: bool
    ) -> Any:
        n, c = x.shape[:2]
        means, variances = (None if held is None else held.repeat(n) for held in (mean, var))
        scale, shift = (None if held is None else held.repeat(n) for held in (weight, bias))
        flat = x.reshape(1, n * c, *x.shape[2:])
        out = aten.batch_norm(flat, scale, shift, means, variances, by_batch, momentum, eps, cudnn)
        for held, new in ((mean, means), (var, variances)):
            if by_batch and held is not None and new is not None:
                held.copy_(new.reshape(n, c).mean(0))
        return out.reshape(x.shape)

    return {aten.instance_norm.default: instance_norm}


_ASSERTIONS = ("_assert", "sym_constrain", "_functional_assert", "_functional_sym_constrain")


def _finished(
    torch: Any, module: Any, program: Any, functions: _Functions, *, trains: bool, notes: Sequence[str]
) -> Captured:
    """Return a functional program as a graph whose operators autograd differentiates."""
    graph, signature = program.graph_module.graph, program.graph_signature
    for node in list(graph.nodes):
        if node.op == "call_function":
            _rewrite(torch, graph, node, functions)
    outputs: list[Any] = []
    written: dict[str, Any] = {}
    names = _canonical(module)
    (returned,) = graph.find_nodes(op="output")
    notes = list(notes)
    for spec, node in zip(signature.output_specs, returned.args[0], strict=True):
        kind = spec.kind.name
        if kind == "USER_OUTPUT":
            outputs.append(node)
        elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            written[names.get(spec.target, spec.target)] = node
        else:
            notes.append(
                f"input {spec.target!r} is changed by the forward pass{where(node)}: what is given stays as it is"
            )
    returned.args = ((*outputs, *written.values()),)
    graph.eliminate_dead_code()
    held = _placeholders(torch, graph, program, names)
    program.graph_module.recompile()
    for node in graph.nodes:
        _check(node)
    return Captured(
        graph=program.graph_module,
        **held,
        outputs=tuple(node.name for node in outputs),
        written={name: node.name for name, node in written.items()},
        origins={n.name: origin for n in graph.nodes if (origin := (n.meta.get("custom") or {}).get(_OWN))},
        trains=trains,
        notes=tuple(notes),
    )


def _canonical(module: Any) -> dict[str, str]:
    """Return the first name of each parameter and buffer, by any of its names."""
    first: dict[int, str] = {}
    held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in held}


def _placeholders(torch: Any, graph: Any, program: Any, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what the placeholders are; those that nothing reads are gone, but for inputs."""
    inputs, parameters, buffers, constants = dict[str, str](), dict[str, str](), dict[str, str](), dict[str, Any]()
    first: dict[str, Any] = {}
    for spec, node in zip(program.graph_signature.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        kind, name = spec.kind.name, names.get(spec.target, spec.target)
        if kind in ("PARAMETER", "BUFFER") and node is not first.setdefault(name, node):
            node.replace_all_uses_with(first[name])
        example = node.meta.get("val")
        if not isinstance(example, torch.Tensor) or (kind != "USER_INPUT" and not node.users):
            if node.users:
                node.replace_all_uses_with(example)
            graph.erase_node(node)
            first.pop(name, None)
        elif kind == "USER_INPUT":
            inputs[node.name] = spec.arg.name
        elif kind == "PARAMETER":
            parameters[node.name] = name
        elif kind == "BUFFER":
            buffers[node.name] = name
        else:
            constants[node.name] = _constant(program, spec.target)
    return {"inputs": inputs, "parameters": parameters, "buffers": buffers, "constants": constants}


def _constant(program: Any, name: str) -> Any:
    found = program.constants[name]
    if found.is_meta or hasattr(found, "fake_mode"):
        raise ModelError(
            f"tensor {name!r} of the module was made without values (on the device 'meta'); make it a buffer that is "
            "not, or compute it in the forward pass"
        )
    return found.detach()


def _rewrite(torch: Any, graph: Any, node: Any, functions: _Functions) -> None:
    """Put an operator that autograd differentiates in place of one that it does not; leave out assertions."""
    aten = torch.ops.aten
    name = str(getattr(node.target, "_schema", node.target) and getattr(node.target, "__name__", ""))
    if name.startswith(_ASSERTIONS):
        graph.erase_node(node)
        return
    target, example = node.target, node.meta.get("val")
    if target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default
    elif target is aten.detach_copy.default:
        node.target = aten.detach.default
    elif target is aten.lift_fresh_copy.default:
        node.target = aten.clone.default
    elif target is aten.copy.default:
        new = node.args[1]
        with graph.inserting_before(node):
            made = _inserted(graph, node, aten.expand.default, (new, list(example.shape)))
            if new.meta["val"].dtype != example.dtype:
                made = _inserted(graph, node, aten._to_copy.default, (made,), dtype=example.dtype)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    elif target is aten.native_dropout.default and node.args[2]:
        _as_dropout(torch, graph, node)
    elif torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and name.partition(".")[0] in _DRAWN:
        with graph.inserting_before(node):
            source = node.args[0]
            node.args = (_inserted(graph, node, aten.detach.default, (source,)), *node.args[1:])
    elif str(target) == "pase.function.default":
        node.target, node.args = functions.target(node.args[1]), node.args[:1]


_DRAWN = frozenset(
    {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal_functional", "random", "uniform"}
)
"""Operators that draw in place of what a tensor holds: no gradient flows to that."""


def _inserted(graph: Any, like: Any, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Any:
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    source = args[0].meta["val"]
    match target.__name__.partition(".")[0]:
        case "detach":
            node.meta["val"] = source.detach()
        case "expand":
            node.meta["val"] = source.expand(args[1])
    return node


def _as_dropout(torch: Any, graph: Any, node: Any) -> None:
    """Put `dropout` in place of a `native_dropout` whose mask nothing reads."""
    if any(user.args[1] == 1 and user.users for user in node.users):
        return
    x, rate, _ = node.args
    for user in list(node.users):
        if user.args[1] == 0:
            with graph.inserting_before(node):
                made = _inserted(graph, user, torch.ops.aten.dropout.default, (x, rate, True))
                made.meta = dict(user.meta)
                made.meta["custom"] = node.meta.get("custom")
            user.replace_all_uses_with(made)
        graph.erase_node(user)
    graph.erase_node(node)


def _check(node: Any) -> None:
    """Raise ModelError for control flow, and for sizes that depend on values."""
    if node.op == "call_function" and any(getattr(item, "op", "") == "get_attr" for item in node.args):
        function_of(node)
    for example in flat_items([node.meta.get("val")]):
        if hasattr(example, "shape"):
            sized(example, node)
