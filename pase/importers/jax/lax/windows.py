"""Reductions over whole dims and over windows, running sums, sorting."""

from collections.abc import Sequence

from pase.importers.ir import Pool, Reduce, Reshape
from pase.importers.jax.lax.call import Call, Step, Translation, generic, reshaped, step

_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "all",
    "reduce_or": "any",
    "reduce_xor": "any",
    "argmax": "argmax",
    "argmin": "argmin",
}

_POOLS = {"reduce_window_sum": "mean", "reduce_window_max": "max", "reduce_window_min": "max", "reduce_window": "max"}
"""A sum over windows touches what their mean does; the division after it is part of the pooling."""


def reduction(call: Call) -> list[Step]:
    """Return a reduction over some dims."""
    over = tuple(int(axis) for axis in call.params["axes"])
    return step(call, Reduce(function=_REDUCTIONS[call.name], over=over), call.inputs[0])


def reduction_by(call: Call) -> list[Step]:
    """Return a reduction by a function of the user's."""
    if len(call.results) != 1:
        return generic(call, ())
    return step(call, Reduce(function="any", over=tuple(int(i) for i in call.params["dimensions"])), call.inputs[0])


def pooling(call: Call) -> list[Step]:
    """Return a maximum, minimum or sum over windows; over an input that is dilated only the shapes are known."""
    x = call.inputs[0]
    params = call.params
    kernel, stride, dilation = (
        tuple(int(n) for n in params[key]) for key in ("window_dimensions", "window_strides", "window_dilation")
    )
    pads = tuple((int(first), int(last)) for first, last in params["padding"])
    moved = [i for i, k in enumerate(kernel) if k != 1 or stride[i] != 1 or pads[i] != (0, 0)]
    if len(call.results) != 1 or any(d != 1 for d in params["base_dilation"]) or not 1 <= len(moved) <= 3:
        return _apart_from(call, moved)
    kept = _with_two_others(x.shape, moved)
    if kept is None:
        return _apart_from(call, moved)
    op = Pool(
        function=_POOLS[call.name],  # type: ignore[arg-type]
        spatial=tuple(kept.index(i) for i in moved),
        kernel=tuple(kernel[i] for i in moved),
        stride=tuple(stride[i] for i in moved),
        dilation=tuple(dilation[i] for i in moved),
        pads=tuple(pads[i] for i in moved),
        counts_padding=True,
    )
    if len(kept) == len(x.shape):
        return step(call, op, x)
    steps, seen = reshaped(call, x, [x.shape[i] for i in kept], "seen")
    pooled = call.inner("pooled", [call.results[0].shape[i] for i in kept])
    return [*steps, Step(op=op, inputs=(seen.name,), outputs=(pooled,)), *step(call, Reshape(), pooled)]


def _with_two_others(shape: Sequence[int], moved: Sequence[int]) -> list[int] | None:
    """Return the dims that are left without some of one element, so that two are no spatial ones: batch and channels.

    None where there are more, or fewer.
    """
    others = [i for i in range(len(shape)) if i not in moved]
    ones = [i for i in others if shape[i] == 1]
    gone = ones[max(0, len(ones) - (len(others) - 2)) :] if len(others) > 2 else []
    return [i for i in range(len(shape)) if i not in gone] if len(others) - len(gone) == 2 else None


def along(call: Call) -> list[Step]:
    """Return a running sum, or the like, along a dim: it can be split along the others."""
    return _apart_from(call, [int(call.params["axis"])])


def sort(call: Call) -> list[Step]:
    """Return what is sorted along a dim: it can be split along the others."""
    return _apart_from(call, [int(call.params["dimension"])])


def top_k(call: Call) -> list[Step]:
    """Return the largest elements and where they are: it can be split along the dims that they are not sought in."""
    rank = len(call.inputs[0].shape)
    return _apart_from(call, [int(call.params.get("axis", -1)) % rank])


def reverse(call: Call) -> list[Step]:
    """Return a tensor with some dims in the opposite order: it can be split along the others."""
    return _apart_from(call, [int(i) for i in call.params["dimensions"]])


def fourier(call: Call) -> list[Step]:
    """Return a Fourier transform of the last dims: it can be split along the others."""
    rank = len(call.inputs[0].shape)
    return _apart_from(call, list(range(rank - len(call.params["fft_lengths"]), rank)))


def matrices(call: Call) -> list[Step]:
    """Return a decomposition or a solution of matrices: it can be split along the dims before the last two."""
    rank = len(call.inputs[0].shape)
    return _apart_from(call, [rank - 2, rank - 1])


def _apart_from(call: Call, dims: list[int]) -> list[Step]:
    return generic(call, [(i, i) for i in range(len(call.inputs[0].shape)) if i not in dims])


WINDOWS: dict[str, Translation] = {
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(_POOLS, pooling),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), along),
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": top_k,
    "reduce": reduction_by,
    "fft": fourier,
    **dict.fromkeys(("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "triangular_solve"), matrices),
    **dict.fromkeys(("geqrf", "geqp3", "hessenberg", "householder_product", "tridiagonal_solve"), matrices),
    "rev": reverse,
}
