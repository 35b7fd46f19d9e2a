"""GPT (Radford et al. 2019; Brown et al. 2020): a decoder with normalisation before each sub-layer, of any depth."""

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import add_parameter, dense, embedding, softmax_loss
from pase.models.blocks import dropped
from pase.models.parameters import Depth, network
from pase.models.sublayers import DIMS, added, feed_forward, multi_head_attention, normalised

_EXPANSION = 4


@network
def gpt(
    *,
    batch: int = 64,
    vocabulary: int = 50_257,
    steps: int = 1024,
    layers: Depth = 12,
    model_width: int = 768,
    heads: int = 12,
    dropout: float = 0.0,
) -> Graph:
    """Return a GPT; the defaults are GPT-2 small, layers=96 model_width=12288 heads=96 steps=2048 is GPT-3.

    The feed-forward layers are four times as wide as the model. The projection to the vocabulary is the token
    embedding's matrix. steps: tokens in a sample, and rows of the position embedding.
    dropout: rate after the embeddings and after each sub-layer; 0 omits these layers.
    """
    net = Builder("gpt")
    x = net.add(
        embedding, "tokens", net.input((batch, steps)), vocabulary=vocabulary, size=model_width, shared="tokens"
    )
    x = net.add(add_parameter, "positions", x, dims=DIMS, over=("s", "d"))
    x = dropped(net, "embedding", x, dropout, dims=DIMS)
    for number in range(1, layers + 1):
        x = _layer(net, f"layer{number}", x, heads, dropout)
    x = normalised(net, "final", x)
    x = net.add(dense, "fc", x, lead=("b", "s"), reduce=("d",), out=(("v", vocabulary),), bias=False, shared="tokens")
    net.add(softmax_loss, "softmax", x, dims=("b", "s", "v"))
    return net.build()


def _layer(net: Builder, name: str, x: Tensor, heads: int, dropout: float) -> Tensor:
    y = normalised(net, f"{name}_self", x)
    y = multi_head_attention(net, f"{name}_self", y, heads=heads, bias=True, causal=True)
    x = added(net, f"{name}_self", x, y, dropout=dropout)
    y = normalised(net, f"{name}_ff", x)
    y = feed_forward(net, f"{name}_ff", y, hidden=_EXPANSION * x.shape[-1], activation="gelu")
    return added(net, f"{name}_ff", x, y, dropout=dropout)
