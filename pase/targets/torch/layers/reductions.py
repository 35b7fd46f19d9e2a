"""Functions over dims of a tensor, which may be split: sums, means, maxima, softmax, and later keys left out."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from pase.errors import ProgramError
from pase.sharding.traffic import Phase
from pase.targets.torch.collectives import Adder
from pase.targets.torch.layers.points import apply
from pase.targets.torch.tensor import Dim, Tensor, in_float32, local, resolved


def total(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the sum of a tensor over some of its dims."""
    return _total(in_float32(x), over)


def _total(x: Tensor, over: Sequence[Dim]) -> Tensor:
    if not over:
        # PyTorch would take none for all.
        return x
    kept, places = _reduced(x, over)
    return local(lambda shard: shard.sum(places), [x], kept, partial_over=[dim.name for dim in over], is_linear=True)


def mean(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the mean of a tensor over some of its dims."""
    if not over:
        return x
    if not x.mesh.split(dim.name for dim in over) and not x.partial:
        kept, places = _reduced(x, over)
        return local(lambda shard: shard.mean(places), [x], kept)
    return apply("multiply", _total(x, over), 1 / prod(dim.size for dim in over))


def greatest(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the maximum of a tensor over some of its dims; its gradient goes to all points that are as great."""
    if not over:
        return x
    kept, places = _reduced(x, over)
    if not x.mesh.split(dim.name for dim in over):
        return local(lambda shard: torch.amax(shard, places), [x], kept)
    module = SplitMaximum(places, x.mesh.program.adder(x.mesh, [dim.name for dim in over]))
    return Tensor(value=x.mesh.program.run(module, resolved(x).value, "maximum"), mesh=x.mesh, dims=tuple(kept))


class SplitMaximum(nn.Module):
    """The maximum over dims of which several ranks have parts. over: brings together what they found."""

    def __init__(self, places: Sequence[int], over: Adder) -> None:
        super().__init__()
        self.places, self.over = tuple(places), over

    def forward(self, x: Any) -> Any:
        """Return the maximum."""
        return _Maximum.apply(x, self)


class _Maximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: SplitMaximum) -> Any:
        top = module.over.greatest(x.amax(module.places, keepdim=True), Phase.FORWARD)
        ctx.module = module
        ctx.save_for_backward(x, top)
        return top.squeeze(module.places)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, top = ctx.saved_tensors
        module: SplitMaximum = ctx.module
        is_greatest = x == top
        # What a layer exchanges as it computes counts as forward, whatever pass it is of.
        count = module.over.summed(is_greatest.sum(module.places, keepdim=True).type_as(dy), Phase.FORWARD)
        return is_greatest * (dy.reshape(count.shape) / count), None


def least(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the minimum of a tensor over some of its dims."""
    return apply("negate", greatest(apply("negate", x), over))


def softmax(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return exponentials divided by their sum over some dims."""
    return _normalised(in_float32(x), over, torch.softmax, is_log=False)


def log_softmax(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the logarithm of the softmax over some dims."""
    return _normalised(in_float32(x), over, torch.log_softmax, is_log=True)


def _normalised(x: Tensor, over: Sequence[Dim], kernel: Any, *, is_log: bool) -> Tensor:
    _, places = _reduced(x, over)
    if len(places) == 1 and not x.mesh.split(dim.name for dim in over):
        return local(lambda shard: kernel(shard, dim=places[0]), [x], x.dims)
    module = SplitSoftmax(places, x.mesh.program.adder(x.mesh, [dim.name for dim in over]), is_log=is_log)
    return Tensor(value=x.mesh.program.run(module, resolved(x).value, "softmax"), mesh=x.mesh, dims=x.dims)


class SplitSoftmax(nn.Module):
    """The softmax, or its logarithm, over dims of which several ranks may have parts. over: brings these together."""

    def __init__(self, places: Sequence[int], over: Adder, *, is_log: bool) -> None:
        super().__init__()
        self.places, self.over, self.is_log = tuple(places), over, is_log

    def forward(self, x: Any) -> Any:
        """Return the softmax."""
        return _Softmax.apply(x, self)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: SplitSoftmax) -> Any:
        top = module.over.greatest(x.amax(module.places, keepdim=True), Phase.FORWARD)
        lower = x - top
        powers = lower.exp()
        sums = module.over.summed(powers.sum(module.places, keepdim=True), Phase.FORWARD)
        y = lower.sub_(sums.log()) if module.is_log else powers.div_(sums)
        ctx.module = module
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        """Return ``dy - softmax · Σ dy`` of a logarithm, else ``softmax · (dy - Σ dy · softmax)``."""
        (y,) = ctx.saved_tensors
        module: SplitSoftmax = ctx.module
        # What a layer exchanges as it computes counts as forward, whatever pass it is of.
        if module.is_log:
            sums = module.over.summed(dy.sum(module.places, keepdim=True), Phase.FORWARD)
            return y.exp().mul_(-sums).add_(dy), None
        weighted = dy * y
        sums = module.over.summed(weighted.sum(module.places, keepdim=True), Phase.FORWARD)
        return weighted.addcmul_(y, sums, value=-1), None


def without_later_keys(scores: Tensor, query: Dim, key: Dim) -> Tensor:
    """Return scores with -inf for keys later than the query, by their positions in the whole sequence."""
    names = scores.names
    places = [names.index(dim.name) - len(names) for dim in (query, key)]
    (first_query, queries), (first_key, keys) = (
        (scores.mesh.begin(dim), scores.mesh.part(dim)) for dim in (query, key)
    )

    def compute(shard: Any) -> Any:
        device = shard.device
        is_later = torch.arange(first_key, first_key + keys, device=device) > torch.arange(
            first_query, first_query + queries, device=device
        ).unsqueeze(-1)
        shape = [1] * len(names)
        shape[places[0]], shape[places[1]] = queries, keys
        is_later = is_later if places[0] < places[1] else is_later.t()
        return shard.masked_fill(is_later.reshape(shape), float("-inf"))

    return local(compute, [scores], scores.dims)


def _reduced(x: Tensor, over: Sequence[Dim]) -> tuple[list[Dim], list[int]]:
    names = {dim.name for dim in over}
    if not names <= set(x.names):
        raise ProgramError(
            f"layer {x.mesh.layer!r} reduces {list(x.names)} over {', '.join(sorted(names))}, which it has not"
        )
    kept = [dim for dim in x.dims if dim.name not in names]
    return kept, [i for i, dim in enumerate(x.dims) if dim.name in names]
