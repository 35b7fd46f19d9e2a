"""Masks of attention that say nothing of the data: those that leave all keys in, or all that are not later.

Libraries of models make masks from the lengths of their inputs alone. A kernel that is told "causal" reads no mask.
"""

from typing import Any

MOST_POINTS = 2**26
"""A mask with a tensor of more points than this on its way is left as it is."""


def without_known_masks(torch: Any, program: Any) -> Any:
    """Return an exported program whose attention reads no mask that is whole or causal whatever the inputs."""
    values: dict[Any, Any] = {}
    attention = torch.ops.aten.scaled_dot_product_attention.default
    is_changed = False
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is not attention or len(node.args) > 5:
            continue
        args = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), node.args, strict=False))
        mask = args.pop("attn_mask", None) or node.kwargs.get("attn_mask")
        value = None if mask is None else _value(torch, mask, values)
        if value is None or value.dtype != torch.bool or value.ndim < 2:
            continue
        # What is expanded is looked at once.
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


def _value(torch: Any, root: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a node of a graph, None where it depends on inputs or weights, or would be too large."""
    pending = [root]
    while pending:
        node = pending[-1]
        left = [other for other in node.all_input_nodes if other not in values]
        if node in values or not left:
            pending.pop()
            if node not in values:
                values[node] = _computed(torch, node, values)
        else:
            pending += left
    return values[root]


def _computed(torch: Any, node: Any, values: dict[Any, Any]) -> Any:
    target, example = node.target, node.meta.get("val")
    is_plain = node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    if not is_plain or target._schema.is_mutable or any(values[other] is None for other in node.all_input_nodes):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(example, torch.Tensor):
        return None
    if _stored_points(example) > MOST_POINTS:
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    kwargs = {name: torch.device("cpu") if name == "device" else item for name, item in kwargs.items()}
    with torch.no_grad():
        return target(*args, **kwargs)


def _stored_points(example: Any) -> int:
    """Return how many points a tensor has that no other one repeats."""
    points = 1
    for extent, stride in zip(example.shape, example.stride(), strict=True):
        points *= extent if stride else 1
    return points
