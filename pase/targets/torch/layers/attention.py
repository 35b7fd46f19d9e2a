"""`attention`: scaled dot-product attention; batch, heads, queries, keys and features may all be split."""

from typing import Any

import torch
from torch.nn import functional

from pase.targets.torch.layers.contraction import product
from pase.targets.torch.layers.points import apply
from pase.targets.torch.layers.reductions import softmax, without_later_keys
from pase.targets.torch.tensor import Tensor, local


def attention(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool = False) -> Tensor:
    """Return ``y[b,s,h,k] = Σ_t softmax_t(q[b,s,h,·] · k[b,t,h,·] scale) v[b,t,h,k]`` (Vaswani et al. 2017).

    Dims in that order: queries [b, s, h, k], keys and values [b, t, h, k]. causal: no query attends to a later key.
    PyTorch's own kernel, where a rank has all keys and features of its queries.
    """
    batch, query, heads, feature = queries.dims
    key = keys.dims[1]
    mesh = queries.mesh
    if mesh.split((key.name, feature.name)):
        scores = apply("multiply", product(queries, keys, [batch, heads, query, key]), scale)
        scores = without_later_keys(scores, query, key) if causal else scores
        return product(softmax(scores, [key]), values, list(queries.dims))
    is_split = bool(mesh.split((query.name,)))
    first, num_queries = mesh.begin(query), mesh.part(query)

    def compute(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None
        if causal and is_split:
            own = torch.arange(first, first + num_queries, device=q.device).unsqueeze(-1)
            mask = own >= torch.arange(key.size, device=q.device)
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and not is_split, scale=scale
        )
        return y.transpose(1, 2)

    return local(compute, [queries, keys, values], queries.dims)
