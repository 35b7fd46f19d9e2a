"""BERT-large (Devlin, Chang, Lee and Toutanova 2018) with the head that predicts masked tokens."""

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import add_parameter, dense, embedding, softmax_loss
from pase.models.blocks import dropped
from pase.models.parameters import Depth, network
from pase.models.sublayers import DIMS, add_and_norm, added, feed_forward, multi_head_attention, normalised

_SEGMENTS = 2


@network
def bert_large(
    *,
    batch: int = 64,
    vocabulary: int = 30_522,
    steps: int = 512,
    layers: Depth = 24,
    model_width: int = 1024,
    hidden: int = 4096,
    heads: int = 16,
    dropout: float = 0.0,
) -> Graph:
    """Return BERT-large: token, segment and position embeddings, the encoder, and the masked-language-model head.

    The head is a dense layer with GELU, a normalisation, and the projection with the token embedding's matrix and a
    separate bias; logits are computed at every position. The pooler and the next-sentence head, which are trained with
    another loss, are omitted. steps: tokens in a sample, and rows of the position embedding. dropout: rate after the
    embeddings and each sub-layer (the paper: 0.1); 0 omits these layers.
    """
    net = Builder("bert_large")
    tokens = net.add(
        embedding, "tokens", net.input((batch, steps)), vocabulary=vocabulary, size=model_width, shared="tokens"
    )
    segments = net.add(embedding, "segments", net.input((batch, steps)), vocabulary=_SEGMENTS, size=model_width)
    x = added(net, "embedding", tokens, segments)
    x = net.add(add_parameter, "positions", x, dims=DIMS, over=("s", "d"))
    x = dropped(net, "embedding", normalised(net, "embedding", x), dropout, dims=DIMS)
    for number in range(1, layers + 1):
        x = _layer(net, f"layer{number}", x, hidden, heads, dropout)
    x = net.add(dense, "head_dense", x, lead=("b", "s"), reduce=("d",), out=(("e", model_width),), activation="gelu")
    x = normalised(net, "head", x)
    x = net.add(dense, "fc", x, lead=("b", "s"), reduce=("d",), out=(("v", vocabulary),), shared="tokens")
    net.add(softmax_loss, "softmax", x, dims=("b", "s", "v"))
    return net.build()


def _layer(net: Builder, name: str, x: Tensor, hidden: int, heads: int, dropout: float) -> Tensor:
    y = multi_head_attention(net, f"{name}_self", x, heads=heads, bias=True)
    x = add_and_norm(net, f"{name}_self", x, y, dropout=dropout)
    y = feed_forward(net, f"{name}_ff", x, hidden=hidden, activation="gelu")
    return add_and_norm(net, f"{name}_ff", x, y, dropout=dropout)
