"""Scaled dot-product attention: batch, heads, queries, keys and features may all be split.

Keys and values that are split as the queries are circulate in a ring of ranks, while each rank computes with those that
it has already received.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.nn import functional

from pase.graph.body import MASKED
from pase.targets.torch.collectives import passing
from pase.targets.torch.layers.points import apply, arrange
from pase.targets.torch.layers.reductions import product, softmax, without_later_keys
from pase.targets.torch.tensor import Along, Dim, LayerMesh, Tensor, in_order, local, shaped, widened


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
    """Return attention with masked scores, or with grouped queries.

    PyTorch's own kernel is used where a rank has all keys and features of its queries. It receives masks without
    expansion, with extent 1 for missing heads or batch.

    Args:
        queries: Dims of `out`, except the features.
        keys: These dims, except the queries; some of the heads or of the batch may be missing.
        values: Likewise.
        out: Dims of the result: batch and heads, queries, features of the values.
        key: Dim of the keys; that of the queries where keys are split as these are, and circulate in a ring.
        masks: 0 where a query does not attend to a key; a row of zeros gives the mean of its values.
        biases: Added to the scores.
        scale: Scale of the scores, before the biases.
        causal: Whether no query attends to a later key.
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
    """Return attention to keys and values that are split as the queries are, and circulate in a ring of ranks."""
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
    """Return an addend of scores, limited to the range of the products' type."""
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
    """Return the addend that masks later keys, for the scores of consecutive queries from `first` on."""
    own = torch.arange(first, first + num_queries, device=like.device).unsqueeze(-1)
    return torch.where(own >= torch.arange(num_keys, device=like.device), 0.0, float("-inf"))


# -- in a ring

# Partial results for each part of keys and values are combined by the log-sum-exp of their scores (Milakov and
# Gimelshein 2018; Dao et al. 2022), so that no rank has all keys, nor all scores of its queries.


MOST_SCORES = 1 << 26
"""Scores that are computed together; some 256 MB."""


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, ring: "Ring") -> Any:
        out, log_sums = ring.attended(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, Any, Any, None]:
        return *ctx.ring.gradients(*ctx.saved_tensors, dy), None


class Ring(Along):
    """Attention of this rank's queries [n, groups, s, k] to keys and values [n, t, k] that circulate along a dim.

    The groups of queries share keys.

    Attributes:
        scale: Scale of the scores.
        is_causal: Whether no query attends to a later key.
        low: Type of products, "" for that of the queries.
    """

    def __init__(self, mesh: LayerMesh, dim: Dim, *, scale: float, is_causal: bool, low: str) -> None:
        super().__init__(mesh, dim)
        self.scale, self.is_causal, self.low = scale, is_causal, low

    @torch._disable_dynamo
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        if self.low:
            q, k, v = (x.to(getattr(torch, self.low)) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            return _Ring.apply(q, k, v, self)

    def attended(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the attention of the queries to all values, and the log-sum-exp of their scores."""
        out, log_sums = self._attended_to(q, k, v, is_diagonal=True)
        for number, part in self._coming(k, v):
            if not self._is_later(number):
                found, own = self._attended_to(q, *part)
                both = torch.logaddexp(log_sums, own)
                out = out * (log_sums - both).exp().unsqueeze(-1) + found * (own - both).exp().unsqueeze(-1)
                log_sums = both
        return out.to(q.dtype), log_sums

    def gradients(self, q: Any, k: Any, v: Any, out: Any, log_sums: Any, dy: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of queries, keys and values.

        Those of keys and values circulate with these, starting at the rank behind their own and ending at their own.
        """
        weights = (dy * out).sum(-1, dtype=log_sums.dtype)
        given = q, dy, log_sums, weights
        dq, *own = self._gradients_of(given, k, v, is_diagonal=True)
        waited: Callable[[], list[Any]] | None = None
        for number, part in self._coming(k, v):
            found = [torch.zeros_like(x) for x in part]
            if not self._is_later(number):
                more, *found = self._gradients_of(given, *part)
                dq = dq + more
            if waited is not None:
                found = [x + y for x, y in zip(found, waited(), strict=True)]
            waited = self._passed(number - 1, *found)
        if waited is not None:
            own = [x + y for x, y in zip(own, waited(), strict=True)]
        return dq.to(q.dtype), own[0], own[1]

    # -- the ring

    def _coming(self, k: Any, v: Any) -> Iterator[tuple[int, list[Any]]]:
        """Yield the parts of the other ranks as they come, with their numbers; each is passed on meanwhile."""
        passed, count = [k, v], len(self.parts)
        waited = self._passed(self.place - 1, *passed) if count > 1 else None
        for step in range(1, count):
            assert waited is not None
            passed = waited()
            number = (self.place - step) % count
            waited = self._passed(number - 1, *passed) if step < count - 1 else None
            yield number, passed

    def _passed(self, number: int, *tensors: Any) -> Callable[[], list[Any]]:
        """Begin to pass tensors [n, t, k] on to the next rank, and return what waits for those of part `number`."""
        count = len(self.parts)
        low, high = self.parts[number % count]
        shapes = [(len(x), high - low, x.shape[-1]) for x in tensors]
        sizes = [prod(shape) for shape in shapes]
        buffer = torch.cat([x.flatten() for x in tensors])
        self.count(buffer)
        sent = [len(buffer) * (place == (self.place + 1) % count) for place in self.order]
        received = [sum(sizes) * (place == (self.place - 1) % count) for place in self.order]
        waited = passing(buffer, received, sent, self.group)
        return lambda: [x.view(shape) for x, shape in zip(waited().split(sizes), shapes, strict=True)]

    # -- one part

    def _is_later(self, number: int) -> bool:
        return self.is_causal and number > self.place

    def _chunks(self, q: Any, k: Any) -> list[slice]:
        size = max(1, MOST_SCORES // (prod(q.shape[:2]) * k.shape[1]))
        return [slice(low, low + size) for low in range(0, q.shape[2], size)]

    def _scores(self, q: Any, k: Any, rows: slice, is_diagonal: bool) -> Any:
        scores = widened(q[:, :, rows] @ k.unsqueeze(1).mT) * self.scale
        if is_diagonal and self.is_causal:
            numbers = torch.arange(k.shape[1], device=k.device)
            scores = scores.masked_fill(numbers > numbers[rows].unsqueeze(-1), float("-inf"))
        return scores

    def _attended_to(self, q: Any, k: Any, v: Any, *, is_diagonal: bool = False) -> tuple[Any, Any]:
        """Return the attention of the queries to one part, as if there were no other, and the log-sum-exp."""
        outs, log_sums = [], []
        for rows in self._chunks(q, k):
            scores = self._scores(q, k, rows, is_diagonal)
            log_sums.append(scores.logsumexp(-1))
            outs.append(widened((scores - log_sums[-1].unsqueeze(-1)).exp().to(v.dtype) @ v.unsqueeze(1)))
        return torch.cat(outs, 2), torch.cat(log_sums, 2)

    def _gradients_of(self, given: Sequence[Any], k: Any, v: Any, *, is_diagonal: bool = False) -> tuple[Any, Any, Any]:
        """Return the contribution of one part to the gradient of the queries, and that of its keys and values.

        given: queries, gradient of the result, log-sum-exp, and the sums of that gradient's products with the result.
        """
        q, dy, log_sums, weights = given
        dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for rows in self._chunks(q, k):
            scores = self._scores(q, k, rows, is_diagonal)
            shares = (scores - log_sums[:, :, rows].unsqueeze(-1)).exp()
            dv += torch.einsum("ngst,ngse->nte", shares.to(v.dtype), dy[:, :, rows].to(v.dtype))
            dshares = widened(dy[:, :, rows].to(v.dtype) @ v.unsqueeze(1).mT)
            dscores = (shares * (dshares - weights[:, :, rows].unsqueeze(-1)) * self.scale).to(k.dtype)
            dq.append(widened(dscores @ k.unsqueeze(1)))
            dk += torch.einsum("ngst,ngsk->ntk", dscores, q[:, :, rows])
        return torch.cat(dq, 2), dk, dv
