"""Translations of PyTorch operators: data movement, elementwise functions, functions along dims, losses, products."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from typing import Literal

from pase.importers.ir import ops
from pase.importers.ir.call import (
    Call,
    Shape,
    Translation,
    as_list,
    broadcast_shape,
    each,
    floats_first,
    letters,
    place,
    places,
    table,
    with_extent,
)
from pase.importers.ir.shared import (
    FUNCTIONS,
    adaptive_pool,
    class_dim,
    concatenate,
    glu,
    loss_of_classes,
    moved,
    reduction,
    repeat_each,
    run,
    summed_over_classes,
    swapped,
    tensordot,
    window_pads,
)
from pase.importers.ir.shared import pool as pool_windows
from pase.importers.ir.trace import Value

# -- views


def transpose(call: Call) -> None:
    """Write the dims in another order."""
    x, rank = call.x, len(call.x.shape)
    match call.name:
        case "permute" | "permute_copy":
            order = tuple(dim % rank for dim in call.get("dims"))
        case "movedim" | "moveaxis":
            order = moved(rank, as_list(call.get("source")), as_list(call.get("destination")))
        case "numpy_T":
            order = tuple(reversed(range(rank)))
        case "t" | "t_copy" | "mT" | "mH" | "adjoint":
            order = swapped(rank, -2, -1) if rank > 1 else tuple(range(rank))
        case _:
            word = "dim" if "dim0" in call.arguments else "axis"
            order = swapped(rank, call.dim(name=f"{word}0"), call.dim(name=f"{word}1")) if rank else ()
    call.transpose(x, order, out=call.result)


def repeat(call: Call) -> None:
    """Write a tensor laid end to end with itself."""
    out = call.result.shape
    shape = (1,) * (len(out) - len(call.x.shape)) + call.x.shape
    call.repeat(call.x, [new // old if old else new for old, new in zip(shape, out, strict=True)], out=call.result)


def repeat_interleave(call: Call) -> None:
    """Append the repetition of every element of a dim; for a dim [n] that is [n, r] merged."""
    x, times, dim = call.x, call.get("repeats"), call.get("dim")
    if not isinstance(times, int) or len(call.tensors) != 1:
        return call.opaque(over=range(0 if dim is None else dim % len(x.shape), len(x.shape)))
    repeat_each(
        call, call.reshape(x, (prod(x.shape),)) if dim is None else x, {0 if dim is None else call.dim(): times}
    )
    return None


def windows(call: Call) -> None:
    """Write windows along one dim, which becomes their number; their elements come last."""
    x, dim = call.x, call.dim(name="dimension")
    size, stride = call.get("size"), call.get("step")
    if size != stride or not x.shape or x.shape[dim] % size:
        return call.opaque(over=[dim], flop_per_point=0.0)
    apart = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    order = [i for i in range(len(apart)) if i != dim + 1]
    call.transpose(call.reshape(x, apart), [*order, dim + 1], out=call.result)
    return None


def as_complex(call: Call) -> None:
    """Write pairs in the last dim as complex numbers: it is gone then."""
    x, last = call.x, len(call.x.shape) - 1
    call.point("complex", *(call.reshape(call.cut(x, last, i), x.shape[:-1]) for i in (0, 1)), out=call.result)


def as_pairs(call: Call) -> None:
    """Write complex numbers as pairs in a new last dim."""
    x, dtype = call.x, call.result.dtype
    parts = [call.reshape(call.point(name, x, dtype=dtype), (*x.shape, 1)) for name in ("real", "imag")]
    call.concat(parts, len(x.shape), out=call.result)


def rearrange(call: Call) -> None:
    """Append pixel shuffling or its inverse, or channel shuffling."""
    match call.name:
        case "pixel_shuffle":
            (*lead, c, h, w), r = call.x.shape, call.get("upscale_factor")
            apart, order = (*lead, c // r**2, r, r, h, w), (0, 3, 1, 4, 2)
        case "pixel_unshuffle":
            (*lead, c, h, w), r = call.x.shape, call.get("downscale_factor")
            apart, order = (*lead, c, h // r, r, w // r, r), (0, 2, 4, 1, 3)
        case _:
            (b, c, *rest), groups = call.x.shape, call.get("groups")
            lead, apart = [b], (b, groups, c // groups, *rest)
            order = (1, 0, *range(2, 2 + len(rest)))
    n = len(lead)
    call.rearrange(call.x, apart, (*range(n), *(n + i for i in order)), out=call.result)


# -- pieces


def _start(call: Call) -> tuple[int, int]:
    dim, start = call.dim(), call.get("start", 0)
    extent = call.x.shape[dim]
    return dim, max(0, start + extent) if start < 0 else min(start, extent)


def select(call: Call) -> None:
    """Write one element along a dim, without that dim."""
    dim, at = call.dim(), call.get("index", 0)
    if not isinstance(at, int):
        return call.opaque()
    call.reshape(call.cut(call.x, dim, at % max(1, call.x.shape[dim])), out=call.result)
    return None


def replace_piece(call: Call) -> None:
    """Write a tensor with a piece, or one element, along a dim replaced: before it, the piece, after it."""
    x, piece = call.tensors[:2]
    if call.name == "select_scatter":
        dim = call.dim()
        start = call.get("index", 0) % max(1, x.shape[dim])
        piece = call.reshape(piece, with_extent(x.shape, dim, 1))
    else:
        dim, start = _start(call)
        if call.get("step", 1) != 1:
            return call.opaque(over=[dim])
    end = start + piece.shape[dim]
    before = [call.cut(x, dim, 0, start)] if start else []
    after = [call.cut(x, dim, end, x.shape[dim] - end)] if end < x.shape[dim] else []
    call.concat([*before, piece, *after], dim, out=call.result)
    return None


def pad(call: Call) -> None:
    """Write a tensor with values around it, or cut."""
    x, rank = call.x, len(call.x.shape)
    pads = list(call.get("pad", call.get("padding", [])))
    before = [0] * (rank - len(pads) // 2) + pads[::2][::-1]
    after = [0] * (rank - len(pads) // 2) + pads[1::2][::-1]
    is_of_zeros = call.get("mode", "constant") == "constant" and not call.get("value", 0)
    if min([*before, *after], default=0) < 0 and is_of_zeros and call.name in ("pad", "constant_pad_nd"):
        for dim, (first, last) in enumerate(zip(before, after, strict=True)):
            if min(first, last) < 0:
                x = call.cut(x, dim, max(0, -first), x.shape[dim] + min(0, first) + min(0, last))
        before = [max(0, first) for first in before]
    call.add(ops.Pad(before=tuple(before)), x, out=call.result)


# -- look-ups


def index_select(call: Call) -> None:
    """Append a look-up of rows along the first dim; along another one the other dims pass through."""
    (x, indices), dim = call.tensors, call.dim()
    if dim == 0 and len(indices.shape) == 1:
        _rows(call, x, indices)
    elif not _piece(call, x, indices, dim):
        call.opaque(over=[dim])


def _rows(call: Call, x: Value, indices: Value, frozen: int = -1) -> None:
    if not _piece(call, x, indices):
        call.add(ops.Lookup(frozen=frozen), x, indices, out=call.result)


def _piece(call: Call, x: Value, indices: Value, dim: int = 0) -> bool:
    """Append the slice that known consecutive indices read; False where they are unknown, or not consecutive."""
    run = _run(call, indices, x.shape[dim])
    if run is None or (dim and len(indices.shape) != 1):
        return False
    call.reshape(call.cut(x, dim, *run), out=call.result)
    return True


def _run(call: Call, indices: Value, extent: int) -> tuple[int, int] | None:
    """Return (first, number) of known places in a dim that go up by one, all in the last dim; None for any other."""
    return run(call.known.get(indices.name), extent) if prod(indices.shape[:-1]) == 1 else None


def embedding_bag(call: Call) -> None:
    """Append sums or means of rows of a table; bags are assumed to be of equal size where possible."""
    rows, indices, out = call.value("weight"), call.value("indices"), call.result
    bags = out.shape[0]
    if not bags or len(indices.shape) != 1 or indices.shape[0] % bags or call.maybe("per_sample_weights"):
        call.add(ops.Generic(), *floats_first(call.tensors), out=out)
    else:
        bagged = call.reshape(indices, (bags, indices.shape[0] // bags), name="bags")
        found = call.add(ops.Lookup(), rows, bagged, shape=(*bagged.shape, rows.shape[1]))
        call.reduce(("sum", "mean", "max")[int(call.get("mode", 0))], found, (1,), out=out)
    call.unread(call.results[1:])


def gather(call: Call) -> None:
    """Append elements at indices along one dim; the tensor is cropped first to the indices' other dims."""
    x, places = call.tensors[:2]
    if not isinstance(call.get("dim", -1), int) or len(x.shape) != len(places.shape) or not x.shape:
        return call.opaque()
    dim = call.dim(-1)
    box = with_extent(places.shape, dim, x.shape[dim])
    if any(new > old for new, old in zip(box, x.shape, strict=True)):
        return call.opaque(over=[dim])
    if box != x.shape:
        x = call.add(ops.Slice(starts=(0,) * len(box), steps=(1,) * len(box)), x, shape=box)
    call.gather(x, places, dim, out=call.result)
    return None


def index(call: Call) -> None:
    """Append x[indices]: rows of a table where only the first dim is indexed; other dims pass through."""
    x = call.x
    indices = {i: item for i, item in enumerate(call.get("indices", [])) if isinstance(item, Value)}
    given, values = list(indices), list(indices.values())
    if any(value.dtype in ("bool", "uint8") for value in values):
        return call.opaque()
    if given == [0]:
        return _rows(call, x, values[0])
    if len(given) == 1 and _piece(call, x, values[0], given[0]):
        return None
    is_every = given == [0, 1] and values[0].shape == values[1].shape == x.shape[:1]
    if is_every and _run(call, values[0], x.shape[0]) == (0, x.shape[0]):
        # x[range(n), places]: one element, or row, of each row.
        box = with_extent(x.shape, 1, 1)
        at = call.reshape(values[1], (*values[1].shape, *(1,) * (len(box) - 1)), name="at")
        wide = call.add(ops.Broadcast(places=tuple(range(len(box)))), at, shape=box, name="wide")
        call.reshape(call.gather(x, wide, 1), out=call.result)
        return None
    rank = max((len(value.shape) for value in values), default=0)
    is_together = given == list(range(given[0], given[-1] + 1)) if given else True
    start = given[0] if given and is_together else 0
    rest = [i for i in range(len(x.shape)) if i not in indices]
    passes = [(i, at + rank * (at >= start)) for at, i in enumerate(rest)]
    return call.opaque(*floats_first((x, *values)), passes=passes)


def index_put(call: Call) -> None:
    """Write x with elements at places replaced; dims without an index pass through."""
    given = [i for i, item in enumerate(call.get("indices", [])) if isinstance(item, Value)]
    call.opaque(over=given or range(len(call.x.shape)))


_SAME_ELEMENTS = """
    view reshape _unsafe_view unsqueeze squeeze flatten unflatten view_as reshape_as ravel view_copy unsqueeze_copy
    squeeze_copy _reshape_alias reshape_copy _reshape_copy atleast_1d atleast_2d atleast_3d
"""

_MOVES: dict[str, Translation] = table(
    (lambda call: call.reshape(call.x, out=call.result), _SAME_ELEMENTS),
    (transpose, "transpose transpose_copy swapaxes swapdims numpy_T mT mH t t_copy adjoint permute permute_copy"),
    (transpose, "movedim moveaxis"),
    (lambda call: call.broadcast(call.x, out=call.result), "expand expand_as expand_copy broadcast_to"),
    (repeat, "repeat tile"),
    (repeat_interleave, "repeat_interleave"),
    (windows, "unfold unfold_copy"),
    (Call.opaque, "diagonal diag diag_embed diagonal_copy as_strided as_strided_copy block_diag"),
    (as_complex, "view_as_complex"),
    (as_pairs, "view_as_real"),
    (rearrange, "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"),
    (
        lambda call: call.cut(call.x, *_start(call), stride=call.get("step", 1), out=call.result),
        "slice slice_copy narrow narrow_copy",
    ),
    (select, "select select_copy"),
    (
        lambda call: call.split(call.x, call.dim()),
        """
        split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes split_copy
        split_with_sizes_copy hsplit vsplit dsplit unbind unbind_copy
        """,
    ),
    (lambda call: concatenate(call, call.dim(rank=len(call.result.shape))), "cat concat concatenate _cat"),
    (lambda call: call.stack(call.tensors, call.dim(rank=len(call.result.shape)), out=call.result), "stack"),
    (replace_piece, "slice_scatter select_scatter"),
    (pad, "pad constant_pad_nd reflection_pad*d replication_pad*d _pad_circular"),
    (
        lambda call: _rows(call, call.value("weight"), call.value("indices"), int(call.get("padding_idx", -1))),
        "embedding",
    ),
    (embedding_bag, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
    (index_select, "index_select"),
    (gather, "gather take_along_dim"),
    (index, "index _unsafe_index"),
    (index_put, "index_put _unsafe_index_put _index_put_impl"),
)


def pointwise(call: Call) -> None:
    """Write a function of all tensors, point by point."""
    if not call.tensors:
        return constant(call)
    order = -1 if call.name == "rsub" else 1
    tensors = call.tensors[::order]
    if call.name.startswith("logical_"):
        tensors = tuple(
            x if x.dtype == "bool" else call.point("not_equal", x, constant=0.0, dtype="bool") for x in tensors
        )
    call.add(_details(call), *tensors, out=call.result)
    return None


def _truth(call: Call, x: Value) -> Value:
    return x if x.dtype == "bool" else call.point("not_equal", x, constant=0.0, dtype="bool")


def softplus(call: Call) -> None:
    """Append log(1 + exp(beta · x)) / beta, and x itself where beta · x is above the threshold.

    Above 20, the default threshold, they only differ by rounding.
    """
    x, beta, threshold = call.x, float(call.get("beta", 1)), float(call.get("threshold", 20))
    if threshold >= 20:
        call.point("softplus", x, constant=beta, out=call.result)
        return
    is_above = call.point("greater", call.point("multiply", x, constant=beta), constant=threshold, dtype="bool")
    call.point("where", is_above, x, call.point("softplus", x, constant=beta), out=call.result)


def prelu(call: Call) -> None:
    """Append x where it is positive, else x times a slope, which may differ by channel."""
    x, slope = call.x, call.value("weight")
    if len(slope.shape) == 1 and slope.shape[0] > 1:
        slope = call.reshape(slope, (slope.shape[0], *(1,) * (len(x.shape) - 2)))
    call.point("prelu", x, slope, out=call.result)


def constant(call: Call) -> None:
    """Write values that no tensor's values reach: zeros of another's shape, a range, noise."""
    call.give(ops.Generic(is_index=not call.result.is_float))


def _details(call: Call) -> ops.Pointwise:
    """Return a function with its scalar operands, such as the number of 2 ** x, which comes first."""
    arguments, function = list(call.arguments.values()), call.name
    numbers = [a for a in arguments if isinstance(a, int | float) and not isinstance(a, bool)]
    number = float(numbers[0]) if len(call.tensors) == 1 and numbers else None
    is_first = number is not None and (function == "rsub" or not isinstance(arguments[0], Value))
    found = ops.Pointwise(functions=(FUNCTIONS[function],), constant=number, constant_first=is_first)
    match function:
        case "where":
            # One of the two that are chosen from may be a number, or both.
            return _chosen(found, call.get("self", call.get("input")), call.get("other"))
        case "add" if call.result.dtype == "bool":
            return replace(found, functions=("or",))
        case "add" | "sub" | "rsub" if call.get("alpha", 1) != 1:
            # The factor of the second operand.
            return replace(found, functions=(f"{found.functions[0]}_of_multiple",))
        case "gelu":
            return ops.Pointwise(functions=("gelu_tanh" if call.get("approximate") == "tanh" else "gelu",))
        case "div" if call.get("rounding_mode") == "floor":
            return replace(found, functions=("floor_divide",))
        case "hardsigmoid":
            return replace(found, numbers=(1 / 6, 0.5))
        case "hardtanh":
            bounds = float(call.get("min_val", -1.0)), float(call.get("max_val", 1.0))
            return replace(found, constant=None, constant_first=False, numbers=bounds)
        case "clamp" | "clamp_min" | "clamp_max":
            low, high = call.get("min", -inf), call.get("max", inf)
            is_of_numbers = not isinstance(low, Value) and not isinstance(high, Value)
            return ops.Pointwise(functions=("clip",), numbers=(float(low), float(high)) if is_of_numbers else ())
    return found


def _chosen(op: ops.Pointwise, *either: object) -> ops.Pointwise:
    numbers = [float(item) for item in either if isinstance(item, int | float)]
    if len(numbers) == 2:
        return replace(op, constant=None, constant_first=False, numbers=tuple(numbers))
    number = numbers[0] if numbers else None
    return replace(op, constant=number, constant_first=number is not None and not isinstance(either[0], Value))


def moved_along(call: Call) -> None:
    """Write the same elements in another order along some dims (a roll, a flip)."""
    rank = len(call.x.shape)
    dims = as_list(call.get("dims", call.get("dim", [])))
    call.point(call.name, call.x, mixes=tuple(sorted({d % rank for d in dims} or range(rank))), out=call.result)


def copy(call: Call) -> None:
    """Append the value that overwrites a tensor, in its shape."""
    source = call.tensors[-1]
    if source.shape == call.result.shape:
        call.identity(source, out=call.result)
    else:
        call.broadcast(source, out=call.result)


# -- over dims


def reduce(call: Call) -> None:
    """Append a reduction over some dims, or all; indices of maxima are opaque."""
    if len(call.tensors) > 1:
        call.point(f"{call.name}imum", *call.tensors, out=call.result)
    else:
        _reduced(call, reduction(call.name), call.result)
        call.unread(call.results[1:])


def moments(call: Call) -> None:
    """Write the variance and the mean, or the smallest and the largest."""
    names = ("min", "max") if call.name == "aminmax" else ("variance", "mean")
    for name, value in zip(names, call.results, strict=True):
        _reduced(call, name, value)


def _reduced(call: Call, function: str, out: Value) -> None:
    over = places(call.get("dim") if call.get("dim") != [] else None, len(call.x.shape))
    call.reduce(function, call.x, over, keeps_dims=bool(call.get("keepdim", False)), out=out)


_KINDS: dict[str, str] = {
    name: kind
    for kind, names in (
        ("layer", "layer_norm native_layer_norm"),
        ("rms", "rms_norm _fused_rms_norm"),
        ("group", "group_norm native_group_norm"),
        ("instance", "instance_norm"),
        ("batch", "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"),
        ("batch", "_native_batch_norm_legit_functional _batch_norm_no_update _batch_norm_with_update"),
        ("batch", "_batch_norm_with_update_functional cudnn_batch_norm miopen_batch_norm"),
    )
    for name in names.split()
}
"""Normalisations by the operator's name."""


_SMALLEST_STEP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Machine epsilon of each type: the default of `rms_norm`."""


def normalisation(call: Call) -> None:
    """Append a normalisation; the statistics that it may also return are opaque."""
    rank = len(call.x.shape)
    last = tuple(range(rank - len(call.get("normalized_shape", [])), rank))
    spatial = tuple(range(2, rank))
    kind = _KINDS[call.name]
    over = {"group": (1, *spatial), "instance": spatial, "batch": (0, *spatial)}.get(kind, last)
    kept = call.maybe("running_mean", "running_var") if kind == "batch" else ()
    kept = kept if len(kept) == 2 and not call.get("training", call.get("train", False)) else ()
    call.normalise(
        kind,
        call.x,
        over,
        last if kind in ("layer", "rms") else (1,),
        scale=call.maybe("weight"),
        shift=call.maybe("bias"),
        statistics=kept,
        groups=int(call.get("num_groups", call.get("group", 1))) if kind == "group" else 1,
        epsilon=float(call.get("eps", _SMALLEST_STEP.get(call.x.dtype, 1e-5) if kind == "rms" else 1e-5)),
        momentum=float(call.get("momentum", 0.0) or 0.0) if kept else 0.0,
        is_unbiased=bool(kept),
    )
    call.unread(call.results[1:])


_LEAST_NORM = 1e-6
"""The largest ε of `cosine_similarity` that is written as steps: shorter vectors are treated as zero."""


def cosine_similarity(call: Call) -> None:
    """Append x · y of vectors along a dim, each divided by its norm, which is at least ε.

    PyTorch's gradient of a vector shorter than ε is that of its norm, which steps cannot express: with a larger ε it
    remains one operator.
    """
    x, y = call.tensors[:2]
    shape, epsilon = broadcast_shape((x, y)), float(call.get("eps", 1e-8))
    dim = place(call.get("dim", 1), len(shape))
    if not 0 < epsilon <= _LEAST_NORM:
        return call.opaque(over=[dim], flop_per_point=3.0)
    directions = []
    for vector in (x, y):
        own = vector if vector.shape == shape else call.broadcast(vector, shape)
        squares = call.reduce("sum", call.point("square", own), (dim,), keeps_dims=True)
        norm = call.point("sqrt", call.point("maximum", squares, constant=epsilon**2))
        directions.append(call.point("divide", own, norm))
    call.reduce("sum", call.point("multiply", *directions), (dim,), out=call.result)
    return None


def pairwise_distance(call: Call) -> None:
    """Append the norms of x - y + ε along the last dim; without ε, or for unusual norms, it remains one operator."""
    x, y = call.tensors[:2]
    last, p, epsilon = len(broadcast_shape((x, y))) - 1, float(call.get("p", 2)), float(call.get("eps", 1e-6))
    keeps_dims = bool(call.get("keepdim", False))
    if not epsilon or p not in (1.0, 2.0, inf):
        return call.opaque(over=[last], flop_per_point=3.0)
    difference = call.point("add", call.point("subtract", x, y), constant=epsilon)
    if p == 2:
        squares = call.reduce("sum", call.point("square", difference), (last,), keeps_dims=keeps_dims)
        call.point("sqrt", squares, out=call.result)
    else:
        lengths = call.point("abs", difference)
        call.reduce("sum" if p == 1 else "max", lengths, (last,), keeps_dims=keeps_dims, out=call.result)
    return None


def transformed(call: Call) -> None:
    """Write a Fourier transform, along the dims that it names, by default the last one."""
    dims = as_list(call.get("dim", [-1])) or list(range(len(call.x.shape)))
    extent = prod(call.x.shape[dim] for dim in dims)
    # 5 n log2 n of the usual algorithm.
    call.opaque(over=dims, flop_per_point=5.0 * max(1, extent.bit_length() - 1))


_AS_IT_IS = """
    to _to_copy contiguous clone detach detach_copy alias alias_copy lift lift_fresh_copy lift_fresh dropout
    feature_dropout alpha_dropout feature_alpha_dropout type_as cpu float half bfloat16 double conj resolve_conj
    resolve_neg stop_gradient requires_grad data _conj _conj_physical conj_physical positive native_dropout rename
    view_dtype
"""
_CONSTANT = """
    zeros ones full empty arange linspace logspace eye zeros_like ones_like full_like empty_like new_zeros new_ones
    new_full new_empty new_empty_strided empty_strided empty_permuted rand randn randint randperm rand_like randn_like
    randint_like bernoulli normal uniform exponential scalar_tensor tril_indices triu_indices zero hann_window
    hamming_window kaiser_window bartlett_window blackman_window random normal_functional
"""
_FOURIER = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
    fft_hfft fft_ihfft _fft_r2c _fft_c2c _fft_c2r
"""
_ALONG_ONE = """
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk msort kthvalue median mode scatter scatter_add
    scatter_reduce index_add index_copy index_fill diff renorm bucketize
"""
_ALONG_ALL = "index_reduce masked_scatter multinomial nonzero_static searchsorted unique_consecutive histc"
"""Functions of which any point may depend on any other in one dim, by default the last; in all by default."""

_SOFTMAX = "softmax log_softmax _softmax _log_softmax _safe_softmax special_log_softmax special_softmax"

# -- decomposed losses: the target's column, masks, sums, a mean; masks and counts of targets give no vertices


_NONE, _MEAN = 0, 1
_REDUCTIONS = ("none", "mean", "sum")
"""Ways of reduction, as operators number them."""

_IGNORED = -100
"""Default target to ignore."""


def cross_entropy(call: Call) -> None:
    """Write the cross-entropy of a softmax with targets, which are classes or their probabilities."""
    x, target = call.tensors[:2]
    log = call.softmax(x, class_dim(x), is_log=True)
    (_of_probabilities if target.is_float else _of_classes)(call, log, smoothing=float(call.get("label_smoothing", 0)))


def _of_classes(call: Call, log: Value, *, smoothing: float = 0.0) -> None:
    """Write the loss of classes."""
    loss_of_classes(
        call,
        log,
        call.value("target"),
        weight=call.maybe("weight"),
        ignored=float(call.get("ignore_index", _IGNORED)),
        reduction=_REDUCTIONS[call.get("reduction", _MEAN)],
        smoothing=smoothing,
        count=call.results[1] if len(call.results) > 1 else None,
    )


def _of_probabilities(call: Call, log: Value, *, smoothing: float) -> None:
    """Write the loss of probabilities of all classes."""
    target = call.value("target")
    if smoothing:
        less = call.point("multiply", target, constant=1.0 - smoothing)
        target = call.point("add", less, constant=smoothing / log.shape[class_dim(log)])
    rows = summed_over_classes(call, call.point("multiply", log, target), call.maybe("weight"))
    reduction = call.get("reduction", _MEAN)
    if reduction == _NONE:
        call.point("negate", rows, out=call.result)
        return
    negative = call.point("negate", rows)
    if reduction == _MEAN:
        call.point("divide", call.total(negative), constant=float(max(1, prod(rows.shape))), out=call.result)
    else:
        call.total(negative, out=call.result)


def multilabel_margin(call: Call) -> None:
    """Write the sum, over pairs of a target's class and another one, of by how much it is not one larger."""
    x, target = call.tensors[:2]
    lead, classes = x.shape[:-1], x.shape[-1]
    pairs = (*lead, target.shape[-1], classes)
    # Classes up to the first that is negative, with those that are not among them.
    counted = call.add(ops.Generic(is_index=True), shape=pairs, dtype="bool", name="counted")
    own = call.reshape(call.gather(x, target, len(lead)), (*lead, target.shape[-1], 1))
    difference = call.point("subtract", call.reshape(x, (*lead, 1, classes)), own)
    short = call.point("relu", call.point("add", difference, constant=1.0))
    masked = call.point("where", counted, short, constant=0.0)
    reduction = call.get("reduction", _MEAN)
    scaled = call.point("divide", masked, constant=float(classes * (prod(lead) if reduction == _MEAN else 1)))
    over = range(len(pairs))[-2 if reduction == _NONE else 0 :]
    call.reduce("sum", scaled, over, out=call.result)
    call.unread(call.results[1:])


def ctc(call: Call) -> None:
    """Append the losses of examples with unaligned targets (CTC), as an operator with known cost.

    At each step each of the targets, and the blanks around them, sums three states of the previous step.
    """
    (steps, examples, _), targets = call.x.shape, call.value("targets").shape
    states = 2 * (targets[1] if len(targets) == 2 else targets[0] // max(1, examples)) + 1
    call.opaque(passes=[(1, 0)], flop_per_point=10.0 * steps * states)


_POINTS = dict.fromkeys(FUNCTIONS, pointwise) | table(
    (lambda call: call.give(ops.Identity(rate=float(call.get("rate", 0.0))), *call.tensors[:1]), _AS_IT_IS),
    (softplus, "softplus"),
    (prelu, "prelu"),
    (constant, _CONSTANT),
    (copy, "copy"),
    (lambda call: (copy if len(call.tensors) > 1 else constant)(call), "fill"),
    (lambda call: glu(call, call.dim(-1)), "glu"),
    (moved_along, "roll flip fliplr flipud"),
    (lambda call: call.opaque(over=as_list(call.get("dim", -1))), _ALONG_ONE),
    (lambda call: call.opaque(over=as_list(call.get("dim", list(range(len(call.x.shape)))))), _ALONG_ALL),
    (reduce, "sum mean max min amax amin var std prod any all argmax argmin logsumexp norm linalg_vector_norm"),
    (reduce, "nansum nanmean count_nonzero"),
    (moments, "var_mean std_mean aminmax"),
    (normalisation, " ".join(_KINDS)),
    (lambda call: call.softmax(call.x, call.dim(), is_log="log" in call.name, out=call.result), _SOFTMAX),
    (cosine_similarity, "cosine_similarity"),
    (pairwise_distance, "pairwise_distance"),
    (transformed, _FOURIER),
    (
        lambda call: _of_classes(call, call.x),
        "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward",
    ),
    (cross_entropy, "cross_entropy_loss"),
    (multilabel_margin, "multilabel_margin_loss multilabel_margin_loss_forward"),
    (ctc, "ctc_loss"),
)


# -- products


def linear(call: Call) -> None:
    """Write x · wᵀ + bias."""
    x, w = call.value("input"), call.value("weight")
    lead, n = letters(len(x.shape) - 1, without="kn"), "n" if len(w.shape) > 1 else ""
    call.contract(x, w, (f"{lead}k", f"{n}k"), lead + n, *call.maybe("bias")[: len(n)], out=call.result)


def matmul(call: Call) -> None:
    """Write a product as NumPy's matmul has it; with a vector it is a pass over a tensor, and no matrix product."""
    x, y = call.tensors[:2]
    if len(y.shape) == 1:
        _weighted_sum(call, x, y, call.result)
    else:
        call.matmul(x, y, out=call.result)


def _weighted_sum(call: Call, x: Value, vector: Value, out: Value | None = None) -> Value:
    return call.reduce("sum", call.point("multiply", x, vector), (len(x.shape) - 1,), out=out)


def addmm(call: Call) -> None:
    """Write input + mat1 · mat2."""
    bias, x, w = call.value("input"), call.value("mat1"), call.value("mat2")
    is_plain = call.get("alpha", 1) == call.get("beta", 1) == 1
    if is_plain and len(bias.shape) == 1 and bias.shape[0] == w.shape[1]:
        call.contract(x, w, ("mk", "kn"), "mn", bias, out=call.result)
    else:
        _added(call, call.contract(x, w, ("mk", "kn"), "mn"))


def _added(call: Call, product: Value) -> None:
    """Write beta · input + alpha · product."""
    alpha, beta = (call.get(name, 1) for name in ("alpha", "beta"))
    product = product if alpha == 1 else call.point("multiply", product, constant=float(alpha))
    if beta == 0:
        call.identity(product, out=call.result)
        return
    given = call.value("input")
    given = given if beta == 1 else call.point("multiply", given, constant=float(beta))
    call.point("add", product, given, out=call.result)


def baddbmm(call: Call) -> None:
    """Write beta · input + alpha · batch1 · batch2."""
    _added(call, call.contract(call.value("batch1"), call.value("batch2"), ("amk", "akn"), "amn"))


def addmv(call: Call) -> None:
    """Write beta · input + alpha · matrix · vector."""
    _added(call, _weighted_sum(call, *call.tensors[1:]))


def bilinear(call: Call) -> None:
    """Write x₁ · w · x₂ + bias as two products."""
    x, y, w = call.value("input1"), call.value("input2"), call.value("weight")
    lead = letters(len(x.shape) - 1, without="nxy")
    first = call.contract(x, w, (f"{lead}x", "nxy"), f"{lead}ny")
    call.contract(first, y, (f"{lead}ny", f"{lead}y"), f"{lead}n", *call.maybe("bias"), out=call.result)


def einsum(call: Call) -> None:
    """Write a sum of products of tensors, two at a time from the left."""
    if not call.einsum(str(call.get("equation", "")), call.tensors, out=call.result):
        call.opaque()


def grouped_mm(call: Call) -> None:
    """Append rows, each multiplied by the matrix of its group: inputs [m, k], [groups, k, n], ends of the groups.

    All groups are assumed to have equally many rows; the number of rows is rounded up to a multiple of theirs.
    """
    x, w = call.tensors[:2]
    if len(x.shape) != 2 or len(w.shape) != 3:
        return call.opaque()
    (rows, width), (groups, _, columns) = x.shape, w.shape
    size = -(-rows // groups)
    if size * groups != rows:
        x = call.add(ops.Pad(before=(0, 0)), x, shape=(size * groups, width))
    ends = call.maybe("offs")
    by_group = call.reshape(x, (groups, size, width))
    op = ops.Contract(operands=("gmk", "gkn"), output="gmn", has_ends=bool(ends))
    made = call.add(op, by_group, w, *ends, shape=(groups, size, columns))
    if size * groups == rows:
        call.reshape(made, out=call.result)
    else:
        call.cut(call.reshape(made, (size * groups, columns)), 0, 0, out=call.result)
    return None


# -- windows


def convolution(call: Call) -> None:
    """Write a convolution over the last dims; one example without a batch is a batch of one."""
    x, w, bias = call.value("input"), call.value("weight"), call.maybe("bias")
    rank = len(w.shape) - 2
    dilation = each(call.get("dilation", 1), rank)
    op = ops.Convolve(
        channels=1,
        spatial=tuple(range(2, 2 + rank)),
        filters=tuple(range(2 + rank)),
        stride=each(call.get("stride", 1), rank),
        dilation=dilation,
        pads=_pads(call, x.shape[-rank:], w.shape[2:], dilation),
        groups=call.get("groups", 1),
        is_transposed=bool(call.get("transposed", False)) or "transpose" in call.name,
        has_bias=bool(bias),
    )
    if len(x.shape) == rank + 2:
        call.add(op, x, w, *bias, out=call.result)
    else:
        batched = call.reshape(x, (1, *x.shape))
        call.reshape(call.add(op, batched, w, *bias, shape=(1, *call.result.shape)), out=call.result)


def _pads(call: Call, extents: Shape, kernel: Shape, dilation: Shape) -> tuple[tuple[int, int], ...]:
    padding = call.get("padding", 0)
    if isinstance(padding, str):
        return window_pads(padding, extents, kernel, (1,) * len(kernel), dilation)
    return tuple((p, p) for p in each(padding, len(kernel)))


def pool(call: Call) -> None:
    """Append pooling over the last dims; indices of maxima are opaque."""
    rank = _spatial_rank(call)
    kernel = each(call.get("kernel_size"), rank)
    pool_windows(
        call,
        _last(call, rank),
        kernel,
        stride=each(call.get("stride") or kernel, rank),
        dilation=each(call.get("dilation", 1), rank),
        pads=[(p, p) for p in each(call.get("padding", 0), rank)],
        counts_padding=bool(call.get("count_include_pad", True)) and "avg" in call.name,
    )


def _last(call: Call, rank: int) -> range:
    return range(len(call.x.shape) - rank, len(call.x.shape))


def _spatial_rank(call: Call) -> int:
    """Return the number of spatial dims in an operator's name ("max_pool2d")."""
    return int(next(c for c in call.name if c.isdigit()))


def upsample(call: Call) -> None:
    """Write images in another resolution: repeated pixels where that is a multiple, a function of rows and columns."""
    x, rank = call.x, len(call.x.shape)
    before, after = x.shape[2:], call.result.shape[2:]
    if "nearest" in call.name and all(b % a == 0 for a, b in zip(before, after, strict=True)):
        repeat_each(call, x, {i: b // a for i, (a, b) in enumerate(zip(before, after, strict=True), start=2)})
    else:
        taps = 2 ** (rank - 2) if "linear" in call.name else 16 if "cubic" in call.name else 1
        call.opaque(over=range(2, rank), flop_per_point=2.0 * taps)


# -- sequences


def attention(call: Call) -> None:
    """Append scaled dot-product attention; queries may have more heads than keys and values.

    Tensors of three dims, or more than four, have their leading dims merged.
    """
    given = [call.value(name) for name in ("query", "key", "value")]
    masks = call.maybe("attn_mask", "attn_bias")
    op = ops.Attention(
        is_causal=bool(call.get("is_causal", False)),
        is_fused=True,
        # PyTorch gives zeros where a mask leaves no key, which parts of the keys cannot know.
        needs_keys=call.get("attn_mask") is not None,
        scale=call.get("scale"),
    )
    if all(len(value.shape) == 4 for value in given):
        call.add(op, *given, *masks, out=call.result)
    else:
        flat = [call.reshape(value, _of_four(value.shape)) for value in given]
        made = call.add(op, *flat, *masks, shape=(*flat[0].shape[:3], given[2].shape[-1]))
        call.reshape(made, out=call.result)
    call.unread(call.results[1:])


def _of_four(shape: Sequence[int]) -> Shape:
    lead = shape[:-2]
    return (prod(lead[:-1]), lead[-1] if lead else 1, *shape[-2:])


def flexible_attention(call: Call) -> None:
    """Append attention whose scores pass through a user function, which is assumed to cost nothing."""
    if len(call.tensors) < 3 or any(len(value.shape) != 4 for value in call.tensors[:3]):
        return call.opaque()
    call.add(ops.Attention(is_fused=True), *call.tensors[:3], out=call.result)
    return call.unread(call.results[1:])


_CELLS: dict[str, Literal["lstm", "gru", "rnn"]] = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}


def recurrent(call: Call) -> None:
    """Write a recurrent network over a sequence: inputs are the tensor, the weights, then the first states."""
    x = call.value("input")
    if len(x.shape) != 3:
        return call.opaque()
    directions = 2 if call.get("bidirectional") else 1
    op = ops.Recurrent(
        cell=_CELLS[call.name],
        units=call.result.shape[-1] // directions,
        layers=int(call.get("num_layers", 1)),
        is_bidirectional=directions == 2,
        is_batch_first=bool(call.get("batch_first", False)),
        equations=call.name,  # type: ignore[arg-type]
        rate=float(call.get("dropout", 0.0)),
    )
    states = call.get("hx", [])
    given = [*call.get("params", []), *(states if isinstance(states, list) else [states])]
    return call.give(op, x, *(value for value in given if isinstance(value, Value)))


_PRODUCTS: dict[str, Translation] = table(
    (linear, "linear"),
    (matmul, "matmul mm bmm mv dot vdot __matmul__ linalg_matmul"),
    (addmm, "addmm"),
    (baddbmm, "baddbmm"),
    (addmv, "addmv"),
    (
        lambda call: call.point("multiply", call.reshape(call.x, (*call.x.shape, 1)), call.tensors[1], out=call.result),
        "outer ger",
    ),
    (bilinear, "bilinear"),
    (einsum, "einsum"),
    (lambda call: tensordot(call, call.get("dims_self", []), call.get("dims_other", [])), "tensordot"),
    (lambda call: tensordot(call, [-1], [-1]), "inner"),
    (grouped_mm, "_grouped_mm grouped_mm grouped_mm_fallback"),
    (convolution, "convolution _convolution conv*d conv_transpose*d"),
    (pool, "max_pool*d avg_pool*d max_pool*d_with_indices"),
    (
        lambda call: adaptive_pool(call, _last(call, _spatial_rank(call))),
        "adaptive_avg_pool*d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool*d",
    ),
    (upsample, "upsample_nearest*d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"),
    (upsample, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact*d"),
    # Of windows side by side the batch passes; of values between pixels the channels too.
    (lambda call: call.opaque(over=range(1, len(call.x.shape)), flop_per_point=0.0), "im2col col2im"),
    (
        lambda call: call.opaque(over=range(2, len(call.x.shape)), flop_per_point=8.0),
        "grid_sampler grid_sampler_2d grid_sampler_3d",
    ),
    (attention, "scaled_dot_product_attention _scaled_dot_product_flash_attention"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"),
    (attention, "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"),
    (attention, "_scaled_dot_product_attention_math_for_mps"),
    (flexible_attention, "flex_attention"),
    # Of a whole attention layer in one operator only the batch passes through.
    (
        lambda call: call.give(ops.Generic(passes=((0, 0),)), *call.tensors),
        "_native_multi_head_attention _transformer_encoder_layer_fwd",
    ),
    (recurrent, " ".join(_CELLS)),
)

TRANSLATIONS: dict[str, Translation] = _POINTS | _MOVES | _PRODUCTS
"""By the operator's name, without its overload and the mark of one that writes into its input."""
