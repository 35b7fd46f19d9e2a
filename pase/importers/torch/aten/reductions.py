"""Reductions, normalisations, softmax, distances."""

from dataclasses import replace

from pase.importers.ir import Generic, Normalise, Pointwise, Reduce, Softmax, Step, Value
from pase.importers.torch.aten.call import Call, generic_along, inner, step, step_to, table
from pase.importers.torch.aten.points import pointwise

_NAMES = {
    "amax": "max",
    "amin": "min",
    "var": "variance",
    "std": "deviation",
    "nansum": "sum",
    "nanmean": "mean",
    "linalg_vector_norm": "norm",
}


def reduce(call: Call) -> list[Step]:
    """Return a reduction over some dims, or all; where a maximum is from is not told."""
    if len(call.tensors) > 1:
        return pointwise(Call(name=f"{call.function}imum", arguments=call.arguments, outputs=call.outputs))
    over = _over(call)
    keeps = bool(call.get("keepdim", False))
    name = _NAMES.get(call.function, call.function)
    steps = [step_to(Reduce(function=name, over=over, keeps_dims=keeps), call.result, call.tensors[0])]
    return steps + [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]


def moments(call: Call) -> list[Step]:
    """Return the variance and the mean, or the smallest and the largest."""
    names = {"aminmax": ("min", "max")}.get(call.function, ("variance", "mean"))
    over, keeps = _over(call), bool(call.get("keepdim", False))
    return [
        step_to(Reduce(function=name, over=over, keeps_dims=keeps), value, call.tensors[0])
        for name, value in zip(names, call.results, strict=True)
    ]


def _over(call: Call) -> tuple[int, ...]:
    rank = len(call.tensors[0].shape)
    dims = call.get("dim")
    if dims is None or dims == []:
        dims = list(range(rank))
    return tuple(sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)})) if rank else ()


def normalisation(call: Call) -> list[Step]:
    """Return a normalisation; the statistics that it may tell besides are not."""
    x = call.tensors[0]
    rank = len(x.shape)
    scale, shift = call.maybe("weight"), call.maybe("bias")
    last = tuple(range(rank - len(call.get("normalized_shape", [])), rank))
    spatial = tuple(range(2, rank))
    kind, over, channels, groups = {
        "layer": ("layer", last, last, 1),
        "rms": ("rms", last, last, 1),
        "group": ("group", (1, *spatial), (1,), int(call.get("num_groups", call.get("group", 1)))),
        "instance": ("instance", spatial, (1,), 1),
        "batch": ("batch", (0, *spatial), (1,), 1),
    }[_KINDS[call.function]]
    op = Normalise(
        kind=kind,  # type: ignore[arg-type]
        over=over,
        channels=channels,
        groups=groups,
        has_scale=bool(scale),
        has_shift=bool(shift),
        epsilon=float(call.get("eps", 1e-5) or 1e-5),
    )
    kept = [*call.maybe("running_mean"), *call.maybe("running_var")] if op.kind == "batch" else []
    if len(kept) == 2 and not call.get("training", call.get("train", False)):
        op = replace(op, num_statistics=2)
    else:
        kept = []
    statistics = [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]
    return [step_to(op, call.result, x, *scale, *shift, *kept), *statistics]


_KINDS = {
    "layer_norm": "layer",
    "native_layer_norm": "layer",
    "rms_norm": "rms",
    "_fused_rms_norm": "rms",
    "group_norm": "group",
    "native_group_norm": "group",
    "instance_norm": "instance",
    "batch_norm": "batch",
    "native_batch_norm": "batch",
    "_native_batch_norm_legit": "batch",
    "_native_batch_norm_legit_no_training": "batch",
    "_native_batch_norm_legit_functional": "batch",
    "_batch_norm_no_update": "batch",
    "_batch_norm_with_update": "batch",
    "_batch_norm_with_update_functional": "batch",
    "cudnn_batch_norm": "batch",
    "miopen_batch_norm": "batch",
}


def softmax(call: Call) -> list[Step]:
    """Return a softmax or its logarithm."""
    x = call.tensors[0]
    return step(call, Softmax(dim=call.get("dim", 0) % max(1, len(x.shape)), is_log="log" in call.name), x)


def cosine_similarity(call: Call) -> list[Step]:
    """Return the cosines of angles between vectors along a dim."""
    return _distance(call, *call.tensors[:2], dim=call.get("dim", 1), function="multiply")


def pairwise_distance(call: Call) -> list[Step]:
    """Return the lengths of differences of vectors in the last dim."""
    return _distance(call, *call.tensors[:2], dim=-1, function="subtract")


def _distance(call: Call, x: Value, y: Value, *, dim: int, function: str) -> list[Step]:
    rank = max(len(x.shape), len(y.shape))
    wide = tuple(
        max(a, b)
        for a, b in zip((1,) * (rank - len(x.shape)) + x.shape, (1,) * (rank - len(y.shape)) + y.shape, strict=True)
    )
    made = inner(call, "pairs", wide)
    keeps = len(call.result.shape) == rank
    return [
        step_to(Pointwise(functions=(function,), flop_per_point=3), made, x, y),
        *step(call, Reduce(function="sum", over=(dim % rank,), keeps_dims=keeps), made),
    ]


def transformed(call: Call) -> list[Step]:
    """Return a Fourier transform, along the dims that it names, by default the last one."""
    x = call.tensors[0]
    dims = call.get("dim", [-1])
    dims = [dims] if isinstance(dims, int) else list(dims) or list(range(len(x.shape)))
    extent = 1
    for dim in dims:
        extent *= x.shape[dim]
    # 5 n log2 n of the usual algorithm.
    return generic_along(call, dims, flop_per_point=5.0 * max(1, extent.bit_length() - 1))


_FOURIER = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
    fft_hfft fft_ihfft _fft_r2c _fft_c2c _fft_c2r
"""

TRANSLATIONS = table(
    (reduce, "sum mean max min amax amin var std prod any all argmax argmin logsumexp norm linalg_vector_norm"),
    (reduce, "nansum nanmean count_nonzero"),
    (moments, "var_mean std_mean aminmax"),
    (normalisation, " ".join(_KINDS)),
    (softmax, "softmax log_softmax _softmax _log_softmax _safe_softmax special_log_softmax special_softmax"),
    (cosine_similarity, "cosine_similarity"),
    (pairwise_distance, "pairwise_distance"),
    (transformed, _FOURIER),
)
"""Of reductions, by the operator's name."""
