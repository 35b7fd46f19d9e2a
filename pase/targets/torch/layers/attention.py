"""Scaled dot-product attention: batch, heads, queries, keys and features may all be split."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.nn import functional

from pase.graph.body import MASKED
from pase.targets.torch.layers.contraction import product
from pase.targets.torch.layers.points import apply, arrange
from pase.targets.torch.layers.reductions import softmax, without_later_keys
from pase.targets.torch.layers.ring import Ring
from pase.targets.torch.tensor import Dim, Tensor, in_order, local, shaped


def attention(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool = False) -> Tensor:
    """Return ``y[b,s,h,k] = Σ_t softmax_t(q[b,s,h,·] · k[b,t,h,·] scale) v[b,t,h,k]`` (Vaswani et al. 2017).

    Dims in that order: queries [b, s, h, k], keys and values [b, t, h, k]. causal: no query attends to a later key.
    PyTorch's own kernel, where a rank has all keys and features of its queries.
    """
    batch, query, heads, feature = queries.dims
    out = [batch, heads, query, feature]
    return arrange(masked_attention(queries, keys, values, out, keys.dims[1], scale=scale, causal=causal), queries.dims)


def masked_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Sequence[Dim],
    key: Dim,
    *,
    masks: Sequence[Tensor] = (),
    biases: Sequence[Tensor] = (),
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Return attention whose scores are masked, or of several heads of queries to one of keys and values.

    PyTorch's own kernel, where a rank has all keys and features of its queries: it gets masks with the dims that they
    have, one point for the heads or the batch that they lack.

    Args:
        queries: of the dims of `out`, but for the features.
        keys: of these dims, but for the queries; they may lack some of the heads or of the batch.
        values: likewise.
        out: the dims of the result: the batch and the heads, the queries, the features of the values.
        key: the dim of the keys; that of the queries where keys are split as they are, and go round in a ring.
        masks: 0 where a query attends to no key; a row of these alone takes the mean of its values.
        biases: added to the scores.
        scale: of the scores, before the biases.
        causal: whether no query attends to a later key.
    """
    *over, query, feature = out
    mesh = queries.mesh
    if key.name == query.name:
        if mesh.split([key.name]):
            return _in_a_ring(queries, keys, values, out, scale=scale, causal=causal)
        # No rank has less than all of either: they are two dims.
        key = Dim(f"{key.name} of keys", key.size)
        keys, values = (replace(x, dims=tuple(key if d == query else d for d in x.dims)) for x in (keys, values))
    features = [dim.name for dim in queries.dims if dim not in over and dim != query]
    added = [*(_addend(mask, is_truth=True) for mask in masks), *(_addend(bias) for bias in biases)]
    if mesh.split((key.name, *features)):
        scores = apply("multiply", product(queries, keys, [*over, query, key]), scale)
        for addend in added:
            scores = arrange(scores + addend, scores.dims)
        scores = without_later_keys(scores, query, key) if causal else scores
        return product(softmax(scores, [key]), values, list(out))
    batch, heads, groups = _parted(over, keys, values, added)
    before = (batch, (*heads, *groups))
    is_grouped = bool(groups) and not added
    size = mesh.part
    summed = [dim for dim in queries.dims if dim.name in features]

    def four(shard: Any, x: Tensor, *last: Sequence[Dim], is_shared: bool = False) -> Any:
        """Return a shard as [batch, heads, …], with one head for each group where they share them."""
        dims = (batch, heads if is_shared else before[1], *last)
        flat = [dim for part in dims for dim in part]
        shard = in_order(shard, x, flat, keeps_rank=True)
        own = [size(dim) if dim in x.dims else 1 for dim in flat]
        # What has one of several dims that are one for the kernel has all of these.
        wanted = [size(dim) if set(part) & set(x.dims) else 1 for part in dims for dim in part]
        shard = shard if own == wanted else shard.expand(wanted)
        ends = [prod(size(dim) for dim in part) if set(part) & set(x.dims) else 1 for part in dims]
        return shaped(shard, wanted, ends)

    def compute(q: Any, k: Any, v: Any, *shards: Any) -> Any:
        mask = _causal(q, mesh.begin(query), size(query), key.size) if causal and is_masked else None
        for shard, x in zip(shards, added, strict=True):
            own = four(shard, x, [query], [key])
            mask = own if mask is None else mask + own
        q = four(q, queries, [query], summed)
        k, v = (
            four(k, keys, [key], summed, is_shared=is_grouped),
            four(v, values, [key], [feature], is_shared=is_grouped),
        )
        y = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask.type_as(q),
            is_causal=causal and not is_masked,
            scale=scale,
            enable_gqa=is_grouped,
        )
        return y.reshape([size(dim) for part in before for dim in part] + [size(query), size(feature)])

    is_masked = bool(added or mesh.split((query.name,)))
    found = local(compute, [queries, keys, values, *added], [*before[0], *before[1], query, feature])
    return arrange(found, out)


def _in_a_ring(
    queries: Tensor, keys: Tensor, values: Tensor, out: Sequence[Dim], *, scale: float, causal: bool
) -> Tensor:
    """Return attention to keys and values that are split as the queries are, and go round from rank to rank."""
    *over, query, feature = out
    mesh = queries.mesh
    own, groups = ([dim for dim in over if (dim in keys.dims) == shared] for shared in (True, False))
    summed = [dim for dim in queries.dims if dim not in over and dim != query]
    ring = Ring(mesh, query, scale=scale, is_causal=causal, low=mesh.program.low)

    def points(dims: Sequence[Dim]) -> int:
        return prod(map(mesh.part, dims))

    def compute(q: Any, k: Any, v: Any) -> Any:
        q = in_order(q, queries, [*own, *groups, query, *summed], keeps_rank=True)
        k = in_order(k, keys, [*own, query, *summed], keeps_rank=True)
        v = in_order(v, values, [*own, query, feature], keeps_rank=True)
        q = q.reshape((points(own), points(groups), points([query]), points(summed)))
        k, v = (x.reshape((points(own), points([query]), points(last))) for x, last in ((k, summed), (v, [feature])))
        found = mesh.program.run(ring, q, "ring", k, v)
        return found.reshape([mesh.part(dim) for dim in (*own, *groups, query, feature)])

    return arrange(local(compute, [queries, keys, values], [*own, *groups, query, feature]), out)


def _addend(mask: Tensor, *, is_truth: bool = False) -> Tensor:
    """Return what is added to scores: no less than what the type of products has."""
    low = mask.mesh.program.low
    lowest = max(MASKED, torch.finfo(getattr(torch, low)).min) if low else MASKED
    if is_truth:
        return local(lambda shard: torch.where(shard != 0, 0.0, lowest), [mask], mask.dims)
    return local(lambda shard: shard.clamp(min=lowest), [mask], mask.dims) if low else mask


def _parted(
    over: Sequence[Dim], keys: Tensor, values: Tensor, masks: Sequence[Tensor]
) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """Return the dims of batch and heads: those that are a batch to the kernel, heads, and groups that share a head."""
    groups = [dim for dim in over if dim not in keys.dims and dim not in values.dims]
    own = [dim for dim in over if dim not in groups]
    first = max(len(own) - 1, 0)
    # Masks that lack heads have one point for all of them.
    while first > 1 and not any(dim in mask.dims for mask in masks for dim in own[first - 1 :]):
        first -= 1
    return own[:first], own[first:], groups


def _causal(like: Any, first: int, num_queries: int, num_keys: int) -> Any:
    """Return what is added to the scores of so many queries, from the first one on, so that none takes a later key."""
    own = torch.arange(first, first + num_queries, device=like.device).unsqueeze(-1)
    return torch.where(own >= torch.arange(num_keys, device=like.device), 0.0, float("-inf"))
