"""`read_program`: convert an exported program's graph to a trace."""

import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from math import prod
from pathlib import PurePath
from types import FrameType
from typing import Any, Literal, NamedTuple

from pase.errors import ModelError
from pase.importers.ir import ops
from pase.importers.ir.call import Call, values_of
from pase.importers.ir.trace import Leaf, Node, Origin, Trace, Use, Value, dtype_name, frozen_notes
from pase.importers.torch.operators import TRANSLATIONS
from pase.importers.torch.sources import source_of

_MARK = "own"
"""Key of `node.meta["custom"]`."""

_MAX_SHOWN = 3
"""Names in a note."""

_MAX_NUMBERS = 1 << 17
"""Maximum number of indices whose values are read."""

_BY_NUMBERS = frozenset({"embedding", "index", "index_select"})
"""Operators that are translated more precisely if their integers are known."""

_VIEWS = frozenset(
    {"alias", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze"}
)
"""Operators that allocate nothing, regardless of the strides of their operands."""

_WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8"})

_CONTROL_FLOW = frozenset(
    {"cond", "while_loop", "scan", "map", "map_impl", "associative_scan", "while_loop_stack_output"}
)

_OWN = PurePath(__file__).parents[1]
"""The folder of the front ends."""


def read_program(torch: Any, module: Any, program: Any, name: str, notes: tuple[str, ...] = ()) -> Trace:
    """Return the trace of an exported program; ModelError for control flow and for sizes that depend on values."""
    return trace_of(Reader(torch, module, program), module, name, notes)


def trace_of(reader: "Reader", module: Any, name: str, notes: tuple[str, ...] = ()) -> Trace:
    """Return the trace of a reader's program."""
    reader.read()
    return Trace(
        name=name,
        leaves=tuple(reader.leaves),
        nodes=tuple(reader.nodes),
        outputs=tuple(dict.fromkeys(reader.outputs)),
        notes=(*notes, *_notes(module, reader.unused), *dropped_in_attention(module, reader.attentions)),
        num_source_operators=reader.count,
        has_calls=True,
    )


def _notes(module: Any, unused: list[str]) -> Iterator[str]:
    types = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()} - {"float32"})
    if types:
        yield f"weights are {', '.join(types)}; costs are of float32 unless --precision names other types"
    yield from frozen_notes((p.numel(), p.requires_grad) for p in module.parameters())
    if unused:
        shown = ", ".join(unused[:_MAX_SHOWN]) + (", …" if len(unused) > _MAX_SHOWN else "")
        found = "1 weight takes" if len(unused) == 1 else f"{len(unused)} weights take"
        yield f"{found} no part in what the module returns: {shown}"


def dropped_in_attention(module: Any, paths: Iterable[str]) -> Iterator[str]:
    """Yield notes on modules that would drop attention weights where this is not visible here.

    They are traced in evaluation mode, where attention receives no rate; modules of PyTorch and transformers store it
    as a number with a recognisable name. paths: of the modules that compute attention.
    """
    rates: dict[str, list[str]] = {}
    for path in paths:
        for name, rate in vars(module.get_submodule(path)).items():
            if "drop" in name and isinstance(rate, float) and 0 < rate < 1:
                rates.setdefault(f"{name}={rate:g}", []).append(path)
    for rate, found in rates.items():
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield (
            f"attention of {found[0] or 'the model'!r}{others} has {rate}: in training its weights are not dropped, "
            "since attention is traced outside training"
        )


# -- values that depend on no input


def constant_values(torch: Any, module: Any, program: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return tensors, by their names in the trace, that the program computes from only weights and constants.

    Tensors that depend on inputs, random numbers, or weights without values are omitted.
    """
    reader = Reader(torch, module, program)
    reader.read()
    wanted = set(names)
    places = {
        value.name: (node, i)
        for node in program.graph.nodes
        for i, value in enumerate(flat_items([reader.made.get(node.name)]))
        if isinstance(value, Value) and value.name in wanted
    }
    known = _evaluated(torch, program, [node for node, _ in places.values()])
    found = {name: flat_items([known.get(node)])[i:] for name, (node, i) in places.items()}
    return {name: items[0] for name, items in found.items() if items and isinstance(items[0], torch.Tensor)}


def _evaluated(
    torch: Any, program: Any, nodes: Iterable[Any], *, most_points: int | None = None, of_held: bool = True
) -> dict[Any, Any]:
    """Return what nodes of a program give, and those that they read, as far as no input is needed for it.

    Args:
        torch: The imported package.
        program: An exported program.
        nodes: Those whose values are wanted.
        most_points: Of a tensor on the way, not counting those that repeat others along a dim; None for no limit.
        of_held: Whether weights, buffers and literals may be on the way.

    Returns:
        The values by node. With `most_points`, a dim along which all elements are equal has a stride of 0.
    """
    known: dict[Any, Any] = {}
    with torch.no_grad():
        for node in behind(program, nodes):
            if node.op != "call_function":
                held = _held(program, node) if of_held else None
                known |= {} if held is None else {node: held}
                continue
            is_function = _is_function(torch, node, is_own=not of_held)
            if not is_function or any(source not in known for source in node.all_input_nodes):
                continue
            arguments, keywords = torch.fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            if keywords.get("device") is not None:
                keywords = {**keywords, "device": torch.device("cpu")}
            if most_points is None:
                known[node] = node.target(*arguments, **keywords)
                continue
            value = _value_once(torch, node, arguments, keywords, most_points)
            known |= {} if value is None else {node: value}
    return known


def _value_once(torch: Any, node: Any, arguments: Any, keywords: Any, most_points: int) -> Any:
    """Return the value of a node, computed once for elements that are equal along a dim; None if it is too large.

    A mask of equal examples is then as large as that of one, however many there are.
    """
    example, target = node.meta.get("val"), node.target
    if str(target).removeprefix("aten.").partition(".")[0] in _VIEWS:
        return target(*arguments, **keywords)
    tensors = [item for item in flat_items([arguments, list(keywords.values())]) if isinstance(item, torch.Tensor)]
    if torch.Tag.pointwise not in getattr(target, "tags", ()) or not isinstance(example, torch.Tensor):
        if max([_stored_points(node), *(tensor.numel() for tensor in tensors)]) > most_points:
            return None
        stored = torch.fx.node.map_aggregate(
            (arguments, keywords), lambda item: item.contiguous() if isinstance(item, torch.Tensor) else item
        )
        return _with_repeats(torch, target(*stored[0], **stored[1]))
    shape = tuple(example.shape)
    repeated = [dim for dim in range(-len(shape), 0) if all(_repeats(tensor, dim) for tensor in tensors)]
    if prod(extent for dim, extent in enumerate(shape, -len(shape)) if dim not in repeated) > most_points:
        return None

    def narrowed(item: Any) -> Any:
        for dim in repeated if isinstance(item, torch.Tensor) else ():
            item = item if item.ndim < -dim else item.narrow(dim, 0, 1)
        return item

    value = target(*map(narrowed, arguments), **{name: narrowed(item) for name, item in keywords.items()})
    return _with_repeats(torch, value).expand(shape)


def _repeats(tensor: Any, dim: int) -> bool:
    """Return whether all elements along a dim, counted from the last, are one that is stored once."""
    return bool(tensor.ndim < -dim or tensor.shape[dim] == 1 or tensor.stride(dim) == 0)


def _with_repeats(torch: Any, value: Any) -> Any:
    """Return a tensor with a stride of 0 along each dim along which all of its elements are equal."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = value.shape
    for dim, extent in enumerate(shape):
        first = value.narrow(dim, 0, min(extent, 1))
        if extent > 1 and (value.stride(dim) == 0 or bool((value == first).all())):
            value = first
    return value.expand(shape)


def behind(program: Any, nodes: Iterable[Any]) -> list[Any]:
    """Return nodes of a program, and all that they are computed of, in order."""
    needed, frontier = set[Any](), list(nodes)
    while frontier:
        node = frontier.pop()
        if node not in needed:
            needed.add(node)
            frontier += node.all_input_nodes
    return [node for node in program.graph.nodes if node in needed]


def _held(program: Any, node: Any) -> Any:
    """Return the weight, buffer or literal that a node represents; None for others, or where it has no values."""
    signature = program.graph_signature
    target = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.get(node.name)
    lifted = signature.inputs_to_lifted_tensor_constants.get(node.name)
    found = program.constants.get(lifted) if target is None else program.state_dict.get(target)
    found = program.constants.get(target) if found is None else found
    is_known = found is not None and not found.is_meta and not hasattr(found, "fake_mode")
    return found.detach().cpu() if is_known else None


def _is_function(torch: Any, node: Any, *, is_own: bool) -> bool:
    """Return whether a node's result depends only on its arguments; is_own: and is computed by PyTorch's own code."""
    target = node.target
    is_pure = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    is_pure = is_pure and not (is_own and target.namespace != "aten")
    return (is_pure or _is_getitem(node)) and torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ())


def _stored_points(node: Any) -> int:
    """Return how many points the tensor of a node has that no other one repeats."""
    example = node.meta.get("val")
    pairs = zip(example.shape, example.stride(), strict=True) if hasattr(example, "stride") else ()
    return prod(extent for extent, stride in pairs if stride)


# -- attention masks that do not depend on the data: a kernel with a "causal" flag needs no mask

MOST_POINTS = 2**26
"""Masks that involve a tensor of more points than this are left unchanged."""


def without_known_masks(torch: Any, program: Any) -> Any:
    """Return an exported program without attention masks that are full or causal for all inputs.

    Libraries of models construct masks from the lengths of their inputs.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    masked: dict[Any, tuple[dict[str, Any], Any]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is attention and len(node.args) <= 5:
            args = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), node.args, strict=False))
            mask = args.pop("attn_mask", None) or node.kwargs.get("attn_mask")
            if mask is not None:
                masked[node] = args, mask
    masks = [mask for _, mask in masked.values()]
    values = _evaluated(torch, program, masks, most_points=MOST_POINTS, of_held=False)
    is_changed = False
    for node, (args, mask) in masked.items():
        value = values.get(mask)
        if value is None or value.dtype != torch.bool or value.ndim < 2:
            continue
        # Expanded tensors are evaluated once.
        for dim, stride in enumerate(value.stride()[:-2]):
            value = value.narrow(dim, 0, 1) if stride == 0 else value
        is_whole = bool(value.all())
        extents = tuple(args[name].meta["val"].shape[-2] for name in ("query", "key"))
        is_causal = not is_whole and tuple(value.shape[-2:]) == extents
        is_causal = is_causal and bool((value == torch.ones(extents, dtype=torch.bool).tril()).all())
        if is_whole or is_causal:
            others = {name: item for name, item in node.kwargs.items() if name not in ("attn_mask", "is_causal")}
            node.args = (args.pop("query"), args.pop("key"), args.pop("value"))
            node.kwargs = {**args, **others, "is_causal": is_causal}
            is_changed = True
    if is_changed:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


# -- weights that are one and the same


def tied_weights(module: Any) -> dict[str, tuple[str, int | None]]:
    """Return for each weight, by its name, the weight with the same values, by storage.

    Returns:
        (name of the weight that holds the values, None); for rows of a larger one, (its name, the first row).
    """
    # Tensors without values have distinguishable storages, too.
    from torch.multiprocessing.reductions import StorageWeakRef

    by_storage: dict[int, list[tuple[str, Any]]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        by_storage.setdefault(int(StorageWeakRef(weight.untyped_storage()).cdata), []).append((name, weight))
    found: dict[str, tuple[str, int | None]] = {}
    for group in by_storage.values():
        holder, first = max(group, key=lambda item: item[1].numel())
        for name, weight in group:
            found[name] = _tied(name, weight, holder, first)
    return found


def _tied(name: str, weight: Any, holder: str, first: Any) -> tuple[str, int | None]:
    offset = weight.storage_offset() - first.storage_offset()
    has_strides = weight.stride() == first.stride()
    if weight is first or (weight.shape == first.shape and has_strides and not offset):
        return holder, None
    row = first.stride(0) if first.dim() else 0
    is_rows = (
        weight.dim() == first.dim() > 0
        and weight.shape[1:] == first.shape[1:]
        and has_strides
        and row > 0
        and offset >= 0
        and offset % row == 0
        and offset // row + weight.shape[0] <= first.shape[0]
    )
    return (holder, offset // row) if is_rows else (name, None)


# -- nodes


class Reader:
    """Converts nodes one after the other.

    Attributes:
        made: Values of the trace, by the program's names.
        attentions: Paths of the modules that call attention.
    """

    def __init__(self, torch: Any, module: Any, program: Any) -> None:
        self.leaves: list[Leaf] = []
        self.nodes: list[Node] = []
        self.outputs: list[str] = []
        self.unused: list[str] = []
        self.count = 0
        self.made: dict[str, Any] = {}
        self.attentions: dict[str, None] = {}
        self._torch, self._program, self._tied = torch, program, tied_weights(module)
        self._parts = dict(module.named_modules())
        self._taken: set[str] = set()

    def read(self) -> None:
        """Read all of the program."""
        self._read_leaves()
        for node in self._program.graph.nodes:
            if node.op == "call_function":
                self.count += 1
                self._call(node)
        returned = (self.made.get(name) for name in self._program.graph_signature.user_outputs)
        self.outputs = [value.name for value in returned if isinstance(value, Value)]

    def _read_leaves(self) -> None:
        signature = self._program.graph_signature
        weights = dict(signature.inputs_to_parameters)
        buffers = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        used: set[str] = set()
        for node in self._program.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            example = node.meta.get("val")
            if not hasattr(example, "shape"):
                self.made[node.name] = example
                continue
            source = weights.get(node.name) or buffers.get(node.name)
            role: Literal["input", "parameter", "constant"] = (
                "parameter" if node.name in weights else "constant" if source or node.op == "get_attr" else "input"
            )
            value = self._value(source or node.name, example, node)
            self.made[node.name] = value
            self._add_leaf(value, role, is_trained=role != "parameter" or example.requires_grad)
            if role == "parameter" and node.users:
                used.add(self._holder(value.name)[0])
        # A tied weight may occur under any of its names.
        self.unused = [name for name in weights.values() if self._holder(name) == (name, None) and name not in used]

    def _holder(self, name: str) -> tuple[str, int | None]:
        """Return what holds a weight's values."""
        return self._tied.get(name, (name, None))

    def _add_leaf(self, value: Value, role: Literal["input", "parameter", "constant"], *, is_trained: bool) -> None:
        storage, row = self._holder(value.name) if role == "parameter" else (value.name, None)
        if row is None:
            self.leaves.append(Leaf(value=value, role=role, storage=storage, is_trained=is_trained))
            return
        # Rows of another weight: that one is the parameter.
        rank = len(value.shape)
        op = ops.Slice(starts=(row, *(0,) * (rank - 1)), steps=(1,) * rank)
        origin = Origin(operator="view of a weight", scope=value.name)
        self.nodes.append(
            Node(name=f"{value.name}:rows", op=op, inputs=(Use(value=storage),), outputs=(value,), origin=origin)
        )

    def _value(self, name: str, example: Any, node: Any) -> Value:
        shape = sized(example, node)
        while name in self._taken:
            name = f"{name}'"
        self._taken.add(name)
        return Value(name=name, shape=shape, dtype=dtype_name(example.dtype))

    def _call(self, node: Any) -> None:
        if _is_getitem(node):
            source, at = node.args
            found = self.made.get(source.name)
            self.made[node.name] = found[at] if isinstance(found, list | tuple) and at < len(found) else None
            return
        function = function_of(node)
        example = node.meta.get("val")
        is_one = not isinstance(example, list | tuple)
        results = [
            self._value(node.name if is_one else f"{node.name}:{i}", item, node) if hasattr(item, "shape") else None
            for i, item in enumerate(flat_items([example]))
        ]
        self.made[node.name] = results[0] if is_one and results else results
        if not any(results):
            return
        scope = _scope(node)
        # PyTorch's own module uses products and a softmax instead if the weights are requested.
        is_own = function == "softmax" and isinstance(self._parts.get(scope), self._torch.nn.MultiheadAttention)
        if "scaled_dot_product" in function or is_own:
            self.attentions[scope] = None
        numbers = self._numbers(node) if function in _BY_NUMBERS else {}
        rate = (node.meta.get("custom") or {}).get("rate")
        arguments = dict(self._arguments(node)) | ({"rate": rate} if rate else {})
        # The suffix of an in-place operator adds no information.
        name = function if function.startswith("__") else function.rstrip("_")
        call = Call(
            name=name,
            arguments=arguments,
            inputs=tuple(values_of(arguments)),
            outputs=tuple(results),
            known=numbers,
        )
        # An unknown operator passes the leading dim through, if any.
        TRANSLATIONS.get(name, Call.opaque)(call)
        line, _ = location(node.meta.get("stack_trace") or "")
        origin = Origin(operator=str(node.target), scope=_scope(node), line=line)
        for i, step in enumerate(call.steps):
            name = node.name if i == len(call.steps) - 1 else f"{node.name}:{i}"
            source = source_of(self._torch, node, call, step, self.made) if len(call.steps) == 1 else None
            self.nodes.append(
                Node(name=name, op=step.op, inputs=step.inputs, outputs=step.outputs, origin=origin, source=source)
            )

    def _numbers(self, node: Any) -> dict[str, Any]:
        """Return the integers that a node reads and that depend on no input, by their values' names."""
        read = {
            source: value for source in node.all_input_nodes if isinstance(value := self.made.get(source.name), Value)
        }
        asked = [s for s, v in read.items() if v.dtype in _WHOLE and prod(v.shape) <= _MAX_NUMBERS]
        known = _evaluated(self._torch, self._program, asked)
        return {read[s].name: known[s].numpy() for s in asked if s in known}

    def _arguments(self, node: Any) -> dict[str, Any]:
        """Return the arguments by the names of the operator's schema; by number where it has none."""
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema else [str(i) for i in range(len(node.args))]
        found = {key: self._argument(value) for key, value in zip(names, node.args, strict=False)}
        found |= {key: self._argument(value) for key, value in node.kwargs.items()}
        return {"input" if key == "self" else key: value for key, value in found.items()}

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [self._argument(item) for item in argument]
        if isinstance(argument, dict):
            return [self._argument(item) for item in argument.values()]
        if hasattr(argument, "op") and hasattr(argument, "name"):
            return self.made.get(argument.name)
        return argument


def sized(example: Any, node: Any) -> tuple[int, ...]:
    """Return the shape of a node's result; ModelError where it depends on values."""
    if any(not isinstance(extent, int) for extent in example.shape):
        shape = ", ".join(map(str, example.shape))
        raise ModelError(
            f"a tensor's size depends on values{where(node)}: operator {node.target} gives [{shape}]; sizes have "
            "to be fixed: use a mask, or torch.where, instead of nonzero and of masks as indices"
        )
    return tuple(example.shape)


def _is_getitem(node: Any) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def function_of(node: Any) -> str:
    """Return the name of the function that a node calls; ModelError for control flow."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    name = str(getattr(node.target, "__name__", node.target))
    has_programs = any(getattr(argument, "op", "") == "get_attr" for argument in node.args)
    if name in _CONTROL_FLOW or (has_programs and name not in TRANSLATIONS):
        raise ModelError(
            f"the module has control flow{where(node)}: operator torch.{name} runs a program of its own; which part "
            "runs, and how often, is not known without values: give the module without it, or one branch of it"
        )
    return name


def flat_items(items: Any) -> list[Any]:
    """Return the items in lists within a list, in order."""
    return [one for item in items for one in (flat_items(item) if isinstance(item, list | tuple) else [item])]


# -- where a node comes from


class Traced(NamedTuple):
    """A node of a `torch.export` trace.

    Attributes:
        name: Name of the node.
        scope: Path of the module that calls it.
        operator: Operator that is called.
        line: Line of the user's code.
        shapes: Shapes of its tensors.
    """

    name: str
    scope: str
    operator: str
    line: str
    shapes: tuple[tuple[int, ...], ...]


def mark_origins(program: Any) -> None:
    """Mark each node of a traced program with its origin, which derived nodes inherit."""
    for node in program.graph.nodes:
        if node.op == "call_function":
            line, _ = location(node.meta.get("stack_trace") or "")
            origin = Traced(node.name, _scope(node), str(node.target), line, shapes_of(node))
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _MARK: origin}


def origin_of(node: Any) -> Traced | None:
    """Return the traced node that a node comes from, None for none."""
    found = (node.meta.get("custom") or {}).get(_MARK)
    return found if isinstance(found, Traced) else None


def shapes_of(node: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors that a node gives."""
    return tuple(tuple(item.shape) for item in flat_items([node.meta.get("val")]) if hasattr(item, "shape"))


def _scope(node: Any) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = [str(entry[0]) for entry in stack.values()]
    return path[-1] if path else ""


def is_transform(target: Any) -> bool:
    """Return whether the target of a node begins or ends a region of `torch.func.vmap`."""
    return str(getattr(target, "__module__", "")) == "torch._functorch.predispatch"


def where(node: Any) -> str:
    """Return " at file:line (source)" of a node's user code, "" where it is unknown."""
    line, source = location(node.meta.get("stack_trace") or "")
    return (f" at {line}" + (f" ({source})" if source else "")) if line else ""


def here() -> str:
    """Return " at file:line (source)" of the user's code that is running, "" where none is."""
    line, source = user_line(sys._getframe(1))
    return (f" at {line}" + (f" ({source})" if source else "")) if line else ""


def user_line(frame: FrameType | None) -> tuple[str, str]:
    """Return ("file.py:12", that line) of the innermost frame, from one on, outside of frameworks."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_framework(file):
            return f"{PurePath(file).name}:{frame.f_lineno}", linecache.getline(file, frame.f_lineno).strip()
        frame = frame.f_back
    return "", ""


def location(stack_trace: str) -> tuple[str, str]:
    """Return ("file.py:12", that line) of the innermost frame of a printed stack outside of frameworks."""
    frames: list[tuple[str, str, str]] = []
    lines = stack_trace.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        text = line.strip()
        if text.startswith('File "'):
            file, _, rest = text.removeprefix('File "').partition('", line ')
            frames.append((file, rest.partition(",")[0], following.strip()))
    for file, number, source in reversed(frames):
        if not is_framework(file):
            return f"{PurePath(file).name}:{number}", source
    return "", ""


@cache
def is_framework(file: str) -> bool:
    """Return whether a file is part of torch, of this package, of Python's library or of no file at all."""
    parts = PurePath(file).parts
    if PurePath(file).is_relative_to(_OWN):
        return True
    if "site-packages" not in parts:
        is_library = PurePath(file).is_relative_to(sysconfig.get_paths()["stdlib"])
        return is_library or file.startswith("<")
    inside = parts[len(parts) - parts[::-1].index("site-packages") :]
    return inside[:1] == ("torch",)
