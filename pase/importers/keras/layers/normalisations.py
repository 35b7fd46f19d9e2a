"""Normalisations."""

from dataclasses import replace
from typing import Any

from pase.importers.ir import Identity, Normalise
from pase.importers.keras.layers.call import Call, Translation, axes_of


def batch(call: Call) -> None:
    """Write batch normalisation; the moving statistics are no parameters."""
    layer = call.operation
    rank = len(call.x.shape)
    channels = axes_of(layer.axis, rank)
    op = Normalise(
        kind="batch",
        over=tuple(i for i in range(rank) if i not in channels),
        channels=channels,
        has_scale=layer.gamma is not None,
        has_shift=layer.beta is not None,
        num_statistics=2,
        epsilon=float(layer.epsilon),
    )
    statistics = [call.statistic(layer.moving_mean), call.statistic(layer.moving_variance)]
    call.emit(op, call.x, *call.parameters(layer.gamma, layer.beta), *statistics)


def layer(call: Call) -> None:
    """Write layer normalisation."""
    owner = call.operation
    over = axes_of(owner.axis, len(call.x.shape))
    kind: Any = "rms" if getattr(owner, "rms_scaling", False) else "layer"
    gamma, beta = getattr(owner, "gamma", None), getattr(owner, "beta", None)
    op = Normalise(kind=kind, over=over, channels=over, epsilon=float(owner.epsilon))
    op = replace(op, has_scale=gamma is not None, has_shift=beta is not None)
    call.emit(op, call.x, *call.parameters(gamma, beta))


def rms(call: Call) -> None:
    """Write normalisation by the root of the mean square."""
    owner = call.operation
    over = axes_of(owner.axis, len(call.x.shape))
    op = Normalise(kind="rms", over=over, channels=over, has_shift=False, epsilon=float(owner.epsilon or 1e-6))
    call.emit(op, call.x, call.parameter(owner.scale))


def group(call: Call) -> None:
    """Write normalisation over groups of channels; one for each channel is instance normalisation."""
    owner = call.operation
    rank = len(call.x.shape)
    (channel,) = axes_of(owner.axis, rank)
    spatial = tuple(i for i in range(1, rank) if i != channel)
    is_instance = owner.groups in (-1, call.x.shape[channel])
    op = Normalise(
        kind="instance" if is_instance else "group",
        over=spatial if is_instance else tuple(sorted((channel, *spatial))),
        channels=(channel,),
        groups=1 if is_instance else owner.groups,
        has_scale=owner.gamma is not None,
        has_shift=owner.beta is not None,
        epsilon=float(owner.epsilon),
    )
    call.emit(op, call.x, *call.parameters(owner.gamma, owner.beta))


def unit(call: Call) -> None:
    """Write division by the length along some dims."""
    over = axes_of(call.operation.axis, len(call.x.shape))
    call.emit(Normalise(kind="rms", over=over, channels=over, has_scale=False, has_shift=False), call.x)


def spectral(call: Call) -> None:
    """Write the layer that is wrapped: its kernel is divided by one number that is computed of itself."""
    owner = call.operation
    found = call.reader.apply(owner.layer, (call.x,), {}, f"{call.scope}/{owner.layer.name}")
    call.emit(Identity(), found)


def operation(call: Call) -> None:
    """Write a normalisation that is called as an operation: the tensor, then scale and shift where there are any."""
    owner = call.operation
    over = axes_of(getattr(owner, "axis", -1), len(call.x.shape))
    is_rms = call.kind in ("RMSNorm", "Normalize") or bool(getattr(owner, "rms_scaling", False))
    affine = call.tensors[1:3]
    op = Normalise(
        kind="rms" if is_rms else "layer",
        over=over,
        channels=over,
        has_scale=len(affine) > 0,
        has_shift=len(affine) > 1,
    )
    call.emit(op, call.x, *affine)


NORMALISATIONS: dict[str, Translation] = {
    "BatchNormalization": batch,
    "GroupNormalization": group,
    "LayerNormalization": layer,
    "RMSNormalization": rms,
    "SpectralNormalization": spectral,
    "UnitNormalization": unit,
}
"""Layers."""
