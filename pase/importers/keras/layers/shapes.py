"""Layers that move data alone: reshapes, crops, padding, repetition, resampling."""

from collections.abc import Sequence
from typing import Any

from pase.importers.ir import Broadcast, Generic, Identity, Pad, Reshape, Slice, Transpose, Value
from pase.importers.keras.layers.call import Call, Translation, each
from pase.importers.keras.layers.convolutions import places


def reshape(call: Call) -> None:
    """Write the same elements in another shape."""
    call.emit(Reshape(), call.x)


def flatten(call: Call) -> None:
    """Write one dim after the batch; channels come last in it whatever the layout."""
    x, rank = call.x, len(call.x.shape)
    if call.operation.data_format == "channels_first" and rank > 2:
        x = call.transposed(x, (0, *range(2, rank), 1))
    call.emit(Reshape(), x)


def permute(call: Call) -> None:
    """Write the dims after the batch in another order."""
    call.emit(Transpose(order=(0, *call.operation.dims)), call.x)


def repeat_vector(call: Call) -> None:
    """Write [b, d] again and again, as [b, n, d]."""
    seen = call.reshaped(call.x, (call.x.shape[0], 1, call.x.shape[1]))
    call.emit(Broadcast(places=(0, 1, 2)), seen)


def crop(call: Call) -> None:
    """Write a box of the spatial dims."""
    _cut(call, [first for first, _ in _pairs(call.operation.cropping)])


def center_crop(call: Call) -> None:
    """Write the box in the middle; a tensor that is smaller is resized."""
    _, spatial = places(call.operation.data_format, 2)
    spare = [call.x.shape[i] - call.result.shape[i] for i in spatial] if len(call.x.shape) == 4 else [-1]
    if min(spare) < 0:
        resample(call)
    else:
        _cut(call, [extent // 2 for extent in spare])


def pad(call: Call) -> None:
    """Write zeros around the spatial dims."""
    before = [0] * len(call.x.shape)
    for place, (first, _) in zip(_spatial(call), _pairs(call.operation.padding), strict=True):
        before[place] = first
    call.emit(Pad(before=tuple(before)), call.x)


def upsample(call: Call) -> None:
    """Write each point again and again; points in between that are interpolated are resampled."""
    if getattr(call.operation, "interpolation", "nearest") != "nearest":
        resample(call)
        return
    spatial = _spatial(call)
    repeat_each(call, dict(zip(spatial, each(call.operation.size, len(spatial)), strict=True)))


def resample(call: Call) -> None:
    """Write a tensor of another size whose points are weighted sums of four others; channels and batch pass through."""
    x, out = call.x.shape, call.result.shape
    passes = tuple((i, i) for i in range(len(x)) if x[i] == out[i])
    call.emit(Generic(passes=passes, flop_per_point=7.0), call.x, part="resample")


def repeat_each(call: Call, times: dict[int, int]) -> None:
    """Write each element of some dims, by position, so many times in a row."""
    apart: list[int] = []
    wide: list[int] = []
    for place, extent in enumerate(call.x.shape):
        apart += [extent, 1] if place in times else [extent]
        wide += [extent, times[place]] if place in times else [extent]
    seen = call.reshaped(call.x, apart)
    repeated = call.then(Broadcast(places=tuple(range(len(apart)))), seen, shape=wide)
    call.emit(Reshape(), repeated)


def sliced(call: Call, value: Value, dim: int, start: int, size: int, step: int = 1) -> Value:
    """Return a piece of a tensor along one dim."""
    shape = [size if i == dim else extent for i, extent in enumerate(value.shape)]
    starts = tuple(start if i == dim else 0 for i in range(len(shape)))
    steps = tuple(step if i == dim else 1 for i in range(len(shape)))
    return call.then(Slice(starts=starts, steps=steps), value, shape=shape)


def _cut(call: Call, starts: Sequence[int]) -> None:
    value = call.x
    for place, start in zip(_spatial(call), starts, strict=True):
        if call.result.shape[place] != value.shape[place]:
            value = sliced(call, value, place, start, call.result.shape[place])
    call.emit(Identity(), value)


def _spatial(call: Call) -> tuple[int, ...]:
    if len(call.x.shape) == 3:
        # Layers of one spatial dim have steps before features, save padding that is told otherwise.
        return (2,) if getattr(call.operation, "data_format", None) == "channels_first" else (1,)
    return places(call.operation.data_format, len(call.x.shape) - 2)[1]


def _pairs(amounts: Any) -> list[tuple[int, int]]:
    """Return (before, after) for each dim; a single pair is that of the only one."""
    pairs = [amounts] if isinstance(amounts[0], int) else amounts
    return [(int(first), int(last)) for first, last in pairs]


def _all(translation: Translation, name: str) -> dict[str, Translation]:
    return {f"{name}{rank}D": translation for rank in (1, 2, 3)}


SHAPES: dict[str, Translation] = (
    {
        "CenterCrop": center_crop,
        "Flatten": flatten,
        "Permute": permute,
        "RepeatVector": repeat_vector,
        "Reshape": reshape,
        "Resizing": resample,
    }
    | _all(crop, "Cropping")
    | _all(pad, "ZeroPadding")
    | _all(upsample, "UpSampling")
)
"""Layers."""
