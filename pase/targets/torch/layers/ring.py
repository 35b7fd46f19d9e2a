"""Attention whose keys and values go round from rank to rank, while each computes with those that it has by then.

What a rank makes of each part is put together by the logarithms of the sums of exponentials of its scores (Milakov and
Gimelshein 2018; Dao et al. 2022), so that no rank has all keys, nor all scores of its queries.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from pase.targets.torch.collectives import passing
from pase.targets.torch.tensor import Along, Dim, LayerMesh, widened

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
    """Attention of this rank's queries [n, groups, s, k] to keys and values [n, t, k] that go round along a dim.

    The groups of queries share keys. scale: of the scores. is_causal: whether no query attends to a later key. low: the
    type of products, "" for that of the queries.
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
        """Return what the queries make of all values, and the logarithms of sums of exponentials of their scores."""
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

        Those of keys and values go round with these, from the rank behind their own to their own.
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

    # -- what goes round

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

    # -- what is made of one part

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
        """Return what the queries make of one part, as if there were no other, and the logarithms of sums."""
        outs, log_sums = [], []
        for rows in self._chunks(q, k):
            scores = self._scores(q, k, rows, is_diagonal)
            log_sums.append(scores.logsumexp(-1))
            outs.append(widened((scores - log_sums[-1].unsqueeze(-1)).exp().to(v.dtype) @ v.unsqueeze(1)))
        return torch.cat(outs, 2), torch.cat(log_sums, 2)

    def _gradients_of(self, given: Sequence[Any], k: Any, v: Any, *, is_diagonal: bool = False) -> tuple[Any, Any, Any]:
        """Return what one part adds to the gradient of the queries, and that of its keys and values.

        given: the queries, the gradient of the result, the logarithms of sums, the sums of that gradient's products
        with the result.
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
