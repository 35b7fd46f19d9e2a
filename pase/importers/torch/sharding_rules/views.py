"""Operators that move points: reshapes, permutations of dims, slices, repetitions."""

from collections.abc import Iterable, Sequence
from math import gcd, prod

from pase.importers.ir.call import table
from pase.importers.torch.sharding_rules.rule import (
    Call,
    Factor,
    Labels,
    Rule,
    Shape,
    ShardingRule,
    positions,
    relate,
)


def refinement(
    before: Shape, after: Shape
) -> tuple[list[list[Factor]], list[list[Factor]], dict[Factor, int], set[Factor]]:
    """Return the common factors of the dims of two shapes with points in the same order.

    Dims are read from the outermost. A dim that is a multiple of the other shape's next one has that as its outer
    factor. Where neither is a multiple, their greatest common divisor is the factor, and the rest of both, up to where
    the products agree again, is unsplit.

    Returns:
        Factors of each dim before and after, their extents, and those that are unsplit.
    """
    extents: dict[Factor, int] = {}
    whole: set[Factor] = set()
    sides = (_Side(before), _Side(after))

    def factor(extent: int, *, is_whole: bool = False) -> Factor:
        name = f"f{len(extents)}"
        extents[name] = extent
        if is_whole:
            whole.add(name)
        return name

    while not (sides[0].is_done() or sides[1].is_done()):
        extents_left = [side.remaining for side in sides]
        common = gcd(*extents_left)
        if common > 1:
            name = factor(common)
            for side in sides:
                side.take(name, common)
        if common in extents_left:
            continue
        # What remains of both is mixed: take dims of the side with fewer points until both have given as many.
        taken = [1, 1]
        while taken[0] != taken[1] or taken[0] == 1:
            side, i = (sides[0], 0) if taken[0] <= taken[1] else (sides[1], 1)
            taken[i] *= side.remaining
            side.take(factor(side.remaining, is_whole=True), side.remaining)
    return sides[0].dims, sides[1].dims, extents, whole


class _Side:
    """One of two shapes that are read together.

    Attributes:
        shape: Extents.
        dims: Factors of each dim, as far as it was read.
        remaining: Points of the dim at hand that have no factor yet; 1 when all dims were read.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.dims: list[list[Factor]] = [[] for _ in shape]
        self._dim = -1
        self.remaining = 1
        self._advance()

    def is_done(self) -> bool:
        """Return whether all dims were read."""
        return self._dim >= len(self.shape)

    def take(self, factor: Factor, extent: int) -> None:
        """Give the dim at hand a factor, inside of those that it has."""
        self.dims[self._dim].append(factor)
        self.remaining //= extent
        self._advance()

    def _advance(self) -> None:
        while self.remaining == 1 and self._dim < len(self.shape):
            self._dim += 1
            self.remaining = self.shape[self._dim] if self._dim < len(self.shape) else 1


def view(call: Call, size: str = "") -> ShardingRule:
    """Relate two shapes of the same points in the same order; size: the argument with the extents of the result."""
    before, after = call.operands[0], call.results[0]
    if not prod(before) or len(call.results) > 1:
        return relate(call)
    first, second, extents, whole = refinement(before, after)
    sizes = {size: second} if size else {}
    example = [second] if "other" in call.numbers else []
    return relate(call, [first, *example], [second], extents=extents, whole=whole, linear=[0], sizes=sizes)


def _sized(size: str) -> Rule:
    return lambda call: view(call, size)


def unflatten(call: Call) -> ShardingRule:
    """Relate a dim and the dims into which it is divided."""
    rule = view(call)
    dim = call.dim()
    count = len(call.get("sizes"))
    labels = rule.results[0][dim : dim + count]
    return relate(
        call, rule.operands, rule.results, extents=rule.extents, whole=rule.whole, linear=[0], sizes={"sizes": labels}
    )


def squeeze(call: Call) -> ShardingRule:
    """Relate a tensor and itself without dims of extent 1; a listed dim whose shards may have extent 1 is unsplit."""
    shape = call.operands[0]
    listed = call.dims()
    names = [None if i in listed else name for i, name in enumerate(positions(len(shape)))]
    outputs = [name for i, name in enumerate(names) if i not in listed or shape[i] != 1]
    return relate(call, [names], [outputs], linear=[0])


def expand(call: Call) -> ShardingRule:
    """Relate a tensor that is broadcast to other extents."""
    outputs = positions(len(call.results[0]))
    return relate(call, [positions(len(call.operands[0]))], [outputs], linear=[0], sizes={"size": outputs})


def permute(call: Call) -> ShardingRule:
    """Relate a tensor and itself with its dims in another order."""
    rank = len(call.operands[0])
    inputs = positions(rank)
    return relate(call, [inputs], [[inputs[dim] for dim in _order(call, rank)]], linear=[0])


def _order(call: Call, rank: int) -> list[int]:
    order = list(range(rank))
    if rank == 0:
        return order
    match call.name:
        case "permute" | "permute_copy":
            return [dim % rank for dim in call.get("dims")]
        case "movedim" | "moveaxis":
            source, destination = call.dims("source"), call.dims("destination")
            rest = iter(dim for dim in order if dim not in source)
            at = dict(zip(destination, source, strict=True))
            return [at[dim] if dim in at else next(rest) for dim in order]
        case "numpy_T":
            return order[::-1]
        case "t" | "t_copy" | "mT" | "mH" | "matrix_H" | "adjoint":
            a, b = (-2, -1) if rank > 1 else (0, 0)
        case _:
            word = "dim" if "dim0" in call.arguments else "axis"
            a, b = call.dim(f"{word}0"), call.dim(f"{word}1")
    order[a], order[b] = order[b], order[a]
    return order


def piece(call: Call) -> ShardingRule:
    """Relate a tensor and slices of it along one dim, which is unsplit unless it is unchanged."""
    shape, dim = call.operands[0], call.dim()
    inputs = positions(len(shape))
    by_letter = {"hsplit": min(1, len(shape) - 1), "vsplit": 0, "dsplit": 2}
    dim = by_letter.get(call.name, dim)
    keeps_dim = all(len(outputs) == len(shape) for outputs in call.results)
    # A slice may end after a shard does; the other operators may not.
    is_same = call.name.startswith("slice") and call.results[0] == shape and call.get("step", 1) == 1
    if is_same:
        return relate(call, [inputs], [inputs], linear=[0])
    cut = _replaced(inputs, dim, None) if keeps_dim else [*inputs[:dim], *inputs[dim + 1 :]]
    return relate(call, [_replaced(inputs, dim, None)], [cut] * len(call.results), linear=[0])


def _replaced(labels: Sequence[Factor | None], dim: int, label: Factor | None) -> list[Factor | None]:
    return [label if i == dim else old for i, old in enumerate(labels)]


def concatenate(call: Call) -> ShardingRule:
    """Relate tensors that are concatenated along a dim."""
    rank = len(call.results[0])
    dim = call.dim("dim", rank)
    labels = _replaced(positions(rank), dim, None)
    inputs = [labels if len(shape) == rank else None for shape in call.operands]
    every = range(len(call.operands))
    return relate(call, inputs, [labels], linear=every, added=every)


def concatenate_promoted(call: Call) -> ShardingRule:
    """Relate tensors that are extended by dims of extent 1 as needed, and concatenated along one."""
    name = call.name
    rank = len(call.results[0])
    dim = {"vstack": 0, "dstack": 2, "column_stack": 1}.get(name, min(1, rank - 1))
    labels = _replaced(positions(rank), dim, None)
    inputs: list[Labels] = []
    for shape in call.operands:
        if not shape:
            inputs.append([])
        elif name == "column_stack" or (name == "dstack" and len(shape) > 1):
            inputs.append(labels[: len(shape)])
        elif name == "dstack":
            inputs.append(labels[1:2])
        else:
            inputs.append(labels[rank - len(shape) :])
    every = range(len(call.operands))
    return relate(call, inputs, [labels], linear=every, added=every)


def grids(call: Call) -> ShardingRule:
    """Relate vectors and tensors of all of their dims, each constant along all but one."""
    names = [f"v{i}" for i in range(len(call.operands))]
    outputs = [names[1], names[0], *names[2:]] if call.get("indexing") == "xy" and len(names) > 1 else names
    inputs = [[name][: len(shape)] for name, shape in zip(names, call.operands, strict=True)]
    return relate(call, inputs, [outputs] * len(call.results))


def combined(call: Call) -> ShardingRule:
    """Relate vectors and all tuples of their points."""
    if len(call.operands) == 1:
        return relate(call, [["v0"]], [["v0"]])
    names = [f"v{i}" for i in range(len(call.operands))]
    extents = {name: shape[0] for name, shape in zip(names, call.operands, strict=True)}
    return relate(call, [[[name]] for name in names], [[names, None]], extents=extents)


def summed_to(call: Call) -> ShardingRule:
    """Relate a tensor and its sum over dims that a smaller shape does not have."""
    shape, result = call.operands[0], call.results[0]
    names = [f"d{i}" for i in range(len(shape))]
    kept = [n if extent != 1 else None for n, extent in zip(names[len(shape) - len(result) :], result, strict=True)]
    sums = [name for name in names if name not in kept]
    return relate(call, [names], [kept], sums=sums, linear=[0], sizes={"size": kept})


def mixed(call: Call) -> ShardingRule:
    """Relate tensors that must not be split."""
    return relate(call)


def stack(call: Call) -> ShardingRule:
    """Relate tensors that are stacked along a new dim."""
    rank = len(call.results[0])
    dim = call.dim("dim", rank)
    outputs = _replaced(positions(rank), dim, None)
    inputs = [label for i, label in enumerate(outputs) if i != dim]
    every = range(len(call.operands))
    return relate(call, [inputs] * len(call.operands), [outputs], linear=every, added=every)


def repeat(call: Call) -> ShardingRule:
    """Relate a tensor and a tiling of it: the number of repetitions is an outer factor."""
    argument = "repeats" if "repeats" in call.arguments else "dims"
    times = list(call.get(argument))
    rank = len(call.results[0])
    old = (1,) * (rank - len(call.operands[0])) + call.operands[0]
    times = [1] * (rank - len(times)) + times
    if not prod(call.results[0]):
        return relate(call)
    extents = {f"r{i}": count for i, count in enumerate(times)} | {f"d{i}": extent for i, extent in enumerate(old)}
    inputs = [[f"d{i}"] for i in range(rank)][rank - len(call.operands[0]) :]
    outputs = [[f"r{i}", f"d{i}"] for i in range(rank)]
    sizes = {argument: [[f"r{i}"] for i in range(rank)][rank - len(call.get(argument)) :]}
    return relate(call, [inputs], [outputs], extents=extents, linear=[0], sizes=sizes)


def repeat_each(call: Call) -> ShardingRule:
    """Relate a tensor and itself with each point of a dim repeated: the number of repetitions is the inner factor."""
    times, dim = call.get("repeats"), call.get("dim")
    if not isinstance(times, int) or not prod(call.results[0]):
        return relate(call)
    shape = call.operands[0]
    rank = len(shape)
    extents = {"r": times} | {f"d{i}": extent for i, extent in enumerate(shape)}
    inputs = [[f"d{i}"] for i in range(rank)]
    if dim is None:
        outputs = [[f"d{i}" for i in range(rank)] + ["r"]]
    else:
        outputs = [[*labels, "r"] if i == dim % rank else labels for i, labels in enumerate(inputs)]
    sizes: dict[str, Labels] = {"repeats": [["r"]]}
    if call.get("output_size") is not None:
        sizes["output_size"] = [outputs[0 if dim is None else dim % rank]]
    return relate(call, [inputs], [outputs], extents=extents, linear=[0], sizes=sizes)


def along(call: Call, dims: Iterable[int], *, is_linear: bool = False) -> ShardingRule:
    """Relate tensors of equal dims, some of which are unsplit."""
    dims = set(dims)
    labels = [None if i in dims else name for i, name in enumerate(positions(len(call.operands[0])))]
    rank = len(labels)
    inputs = [labels if len(shape) == rank else None for shape in call.operands]
    outputs = [labels if len(shape) == rank else None for shape in call.results]
    return relate(call, inputs, outputs, linear=[0] if is_linear else [])


def moved_along(call: Call) -> ShardingRule:
    """Relate a tensor and itself with points of some dims in another order."""
    rank = len(call.operands[0])
    match call.name:
        case "fliplr":
            dims: tuple[int, ...] = (1,)
        case "flipud":
            dims = (0,)
        case "rot90":
            dims = call.dims()
        case _:
            dims = call.dims("dims")
            dims = dims if call.get("dims") or call.name == "roll" else ()
    return along(call, [dim % rank for dim in dims] if rank else (), is_linear=True)


def pad(call: Call) -> ShardingRule:
    """Relate a tensor and itself with points put around it, or cut off, in some dims."""
    pads = list(call.get("pad", call.get("padding", [])))
    rank = len(call.operands[0])
    changed = {rank - 1 - i // 2 for i, count in enumerate(pads) if count}
    is_linear = call.get("mode", "constant") != "constant" or not call.get("value", 0)
    return along(call, changed, is_linear=is_linear)


def diagonal(call: Call) -> ShardingRule:
    """Relate a tensor and a diagonal of it, whose dim is the last."""
    rank = len(call.operands[0])
    a, b = call.get("dim1", 0) % rank, call.get("dim2", 1) % rank
    labels = positions(rank)
    inputs = [None if i in (a, b) else label for i, label in enumerate(labels)]
    return relate(call, [inputs], [[*(f for i, f in enumerate(labels) if i not in (a, b)), None]], linear=[0])


def diag_embed(call: Call) -> ShardingRule:
    """Relate a tensor and matrices that have its last dim as a diagonal."""
    rank = len(call.results[0])
    a, b = call.get("dim1", -2) % rank, call.get("dim2", -1) % rank
    lead = iter(positions(rank - 2, "b"))
    inputs = [*positions(rank - 2, "b"), None]
    return relate(call, [inputs], [[None if i in (a, b) else next(lead) for i in range(rank)]], linear=[0])


def scatter_piece(call: Call) -> ShardingRule:
    """Relate a tensor, what replaces a piece of it, and the result."""
    rank = len(call.operands[0])
    if call.name == "diagonal_scatter":
        a, b = call.get("dim1", 0) % rank, call.get("dim2", 1) % rank
        inputs = [None if i in (a, b) else label for i, label in enumerate(positions(rank))]
        piece_labels: list[Factor | None] = [*(f for i, f in enumerate(inputs) if i not in (a, b)), None]
    else:
        inputs = _replaced(positions(rank), call.dim(), None)
        piece_labels = list(inputs)
        if call.name == "select_scatter":
            del piece_labels[call.dim()]
    every = ["self", "src"]
    return relate(call, {"self": inputs, "src": piece_labels}, [inputs], linear=every, added=every)


def windows(call: Call) -> ShardingRule:
    """Relate a tensor and windows along one dim, whose elements come last."""
    rank = len(call.operands[0])
    if not rank:
        return relate(call)
    labels = _replaced(positions(rank), call.dim("dimension"), None)
    return relate(call, [labels], [[*labels, None]], linear=[0])


def complex_pairs(call: Call) -> ShardingRule:
    """Relate complex numbers and pairs in a last dim."""
    shape = min(call.operands[0], call.results[0], key=len)
    labels = positions(len(shape))
    if len(call.operands[0]) > len(shape):
        return relate(call, [[*labels, None]], [labels], linear=[0])
    return relate(call, [labels], [[*labels, None]], linear=[0])


def rearrange(call: Call) -> ShardingRule:
    """Relate channels and pixels that are written as each other; channels that are left in number pass."""
    name = call.name
    if name in ("channel_shuffle", "native_channel_shuffle"):
        return along(call, [1], is_linear=True)
    spatial = 2
    shape, out = call.operands[0], call.results[0]
    lead = positions(len(shape) - 3, "b")
    fewer = min(shape[-3], out[-3])
    r2 = max(shape[-3], out[-3]) // fewer if fewer else 0
    few: list[Factor | list[Factor] | None] = [*lead, ["c"], *[None] * spatial]
    many: list[Factor | list[Factor] | None] = [*lead, ["c", "r"], *[None] * spatial]
    extents = {"c": fewer, "r": r2}
    first, second = (many, few) if name == "pixel_shuffle" else (few, many)
    return relate(call, [first], [second], extents=extents, whole={"r"}, linear=[0])


def triangle(call: Call) -> ShardingRule:
    """Relate matrices and their upper or lower triangles."""
    rank = len(call.operands[0])
    return along(call, [rank - 2, rank - 1], is_linear=True)


RULES: dict[str, Rule] = table(
    (squeeze, "squeeze squeeze_copy"),
    (view, "flatten ravel unsqueeze unsqueeze_copy view_as reshape_as"),
    (view, "atleast_1d atleast_2d atleast_3d"),
    (_sized("size"), "view view_copy _unsafe_view _reshape_copy"),
    (_sized("shape"), "reshape"),
    (unflatten, "unflatten"),
    (expand, "expand expand_copy broadcast_to"),
    (permute, "permute permute_copy movedim moveaxis numpy_T t t_copy mT mH matrix_H adjoint"),
    (permute, "transpose transpose_copy swapaxes swapdims"),
    (piece, "select select_copy slice slice_copy narrow narrow_copy unbind unbind_copy"),
    (piece, "split split_copy split_with_sizes split_with_sizes_copy unsafe_split unsafe_split_with_sizes"),
    (piece, "chunk unsafe_chunk tensor_split hsplit vsplit dsplit"),
    (concatenate, "cat concat concatenate"),
    (concatenate_promoted, "hstack vstack dstack column_stack row_stack"),
    (stack, "stack"),
    (grids, "meshgrid"),
    (combined, "cartesian_prod"),
    (summed_to, "sum_to_size"),
    (repeat, "repeat tile"),
    (repeat_each, "repeat_interleave"),
    (moved_along, "flip roll fliplr flipud rot90"),
    (pad, "pad constant_pad_nd reflection_pad*d replication_pad*d _pad_circular _pad_enum"),
    (diagonal, "diagonal diagonal_copy linalg_diagonal"),
    (diag_embed, "diag_embed"),
    (scatter_piece, "select_scatter slice_scatter diagonal_scatter"),
    (windows, "unfold unfold_copy"),
    (complex_pairs, "view_as_complex view_as_real view_as_complex_copy view_as_real_copy"),
    (rearrange, "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"),
    (triangle, "tril triu"),
    (mixed, "arange as_strided as_strided_copy as_strided_scatter bartlett_window blackman_window block_diag"),
    (mixed, "combinations corrcoef cov _ctc_loss diag diagflat dist empty_permuted empty_strided eye"),
    (mixed, "hamming_window hann_window histc kaiser_window linalg_tensorinv linalg_tensorsolve linspace logspace"),
    (
        mixed,
        "masked_scatter new_empty_strided pdist _pdist_forward put scalar_tensor segment_reduce trace",
    ),
    (mixed, "_reshape_alias tril_indices triu_indices _native_multi_head_attention _transformer_encoder_layer_fwd"),
    (
        mixed,
        "vander _unsafe_masked_index_put_accumulate",
    ),
)
