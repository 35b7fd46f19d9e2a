"""Pooling over windows, over everything, and to a given size."""

from typing import Any

from pase.importers.ir import Identity, Pool, Reduce
from pase.importers.keras.layers.call import Call, Translation, each
from pase.importers.keras.layers.convolutions import pads, places


def pool(call: Call) -> None:
    """Write maximum or mean over windows; what lies outside does not count."""
    owner = call.operation
    rank = len(call.x.shape) - 2
    _, spatial = places(owner.data_format, rank)
    kernel = each(owner.pool_size, rank)
    stride = each(owner.strides if owner.strides is not None else kernel, rank)
    op = Pool(
        function="max" if "Max" in call.kind else "mean",
        spatial=spatial,
        kernel=kernel,
        stride=stride,
        dilation=(1,) * rank,
        pads=pads(owner.padding, [call.x.shape[i] for i in spatial], kernel, stride, (1,) * rank),
    )
    call.emit(op, call.x)


def global_pool(call: Call) -> None:
    """Write maximum or mean over all spatial dims."""
    layer = call.operation
    _, spatial = places(layer.data_format, len(call.x.shape) - 2)
    function = "max" if "Max" in call.kind else "mean"
    call.emit(Reduce(function=function, over=spatial, keeps_dims=bool(layer.keepdims)), call.x)


def adaptive_pool(call: Call) -> None:
    """Write pooling to a given size: nothing where it is that already, a reduction to one point, windows else."""
    owner: Any = call.operation
    rank = len(call.x.shape) - 2
    _, spatial = places(owner.data_format, rank)
    before, after = ([value.shape[i] for i in spatial] for value in (call.x, call.result))
    function = "max" if "Max" in call.kind else "mean"
    if before == after:
        call.emit(Identity(), call.x)
    elif all(extent == 1 for extent in after):
        call.emit(Reduce(function=function, over=spatial, keeps_dims=True), call.x)
    else:
        stride = tuple(max(1, b // a) for b, a in zip(before, after, strict=True))
        kernel = tuple(b - (a - 1) * s for b, a, s in zip(before, after, stride, strict=True))
        call.emit(
            Pool(
                function="max" if function == "max" else "mean",
                spatial=spatial,
                kernel=kernel,
                stride=stride,
                dilation=(1,) * rank,
                pads=((0, 0),) * rank,
            ),
            call.x,
        )


def _all(translation: Translation, *names: str) -> dict[str, Translation]:
    return {f"{name}{rank}D": translation for name in names for rank in (1, 2, 3)}


POOLING: dict[str, Translation] = (
    _all(pool, "MaxPooling", "AveragePooling")
    | _all(global_pool, "GlobalMaxPooling", "GlobalAveragePooling")
    | _all(adaptive_pool, "AdaptiveMaxPooling", "AdaptiveAveragePooling")
)
"""Layers."""
