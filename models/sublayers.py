"""Parts that the attention networks share.

Dims are named as in PaSE's Table II: b batch, s sequence, d model, e hidden, h heads, c query channels, k key and
value channels; t is the sequence of the keys.
"""

from pase.graph import Builder, Tensor
from pase.graph.operators import attention, dense, elementwise, layer_norm
from pase.models.blocks import dropped
from pase.models.parameters import head_size

DIMS = ("b", "s", "d")


def multi_head_attention(
    net: Builder,
    name: str,
    x: Tensor,
    *,
    memory: Tensor | None = None,
    heads: int,
    bias: bool,
    causal: bool = False,
) -> Tensor:
    """Append `name`_q, _k, _v, _attention and _o; queries are computed from x, [b, s, d].

    memory: source of keys and values, [b, t, d]; default: x (self-attention). bias: whether the four projections have a
    bias.
    """
    model_width = x.shape[-1]
    size = head_size(model_width, heads)
    source = x if memory is None else memory
    q = net.add(dense, f"{name}_q", x, lead=("b", "s"), reduce=("d",), out=(("h", heads), ("c", size)), bias=bias)
    k, v = (
        net.add(
            dense, f"{name}_{part}", source, lead=("b", "s"), reduce=("d",), out=(("h", heads), ("k", size)), bias=bias
        )
        for part in ("k", "v")
    )
    y = net.add(attention, f"{name}_attention", q, k, v, causal=causal)
    return net.add(dense, f"{name}_o", y, lead=("b", "s"), reduce=("h", "k"), out=(("d", model_width),), bias=bias)


def feed_forward(net: Builder, name: str, x: Tensor, *, hidden: int, activation: str) -> Tensor:
    """Append `name`_1, to `hidden` units with an activation, and `name`_2, back to the width of x: [b, s, d]."""
    y = net.add(dense, f"{name}_1", x, lead=("b", "s"), reduce=("d",), out=(("e", hidden),), activation=activation)
    return net.add(dense, f"{name}_2", y, lead=("b", "s"), reduce=("e",), out=(("d", x.shape[-1]),))


def added(net: Builder, name: str, x: Tensor, y: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Append `name`_add, the sum of two tensors [b, s, d]: a residual connection, after `name`_dropout of y."""
    y = dropped(net, name, y, dropout, dims=DIMS)
    return net.add(elementwise, f"{name}_add", x, y, dims=DIMS)


def normalised(net: Builder, name: str, x: Tensor) -> Tensor:
    """Append `name`_norm, layer normalisation of x: [b, s, d]."""
    return net.add(layer_norm, f"{name}_norm", x)


def add_and_norm(net: Builder, name: str, x: Tensor, y: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Append `name`_add and `name`_norm: normalisation after the residual connection; dropout as in `added`."""
    return normalised(net, name, added(net, name, x, y, dropout=dropout))
