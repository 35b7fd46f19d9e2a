"""Transformer, encoder and decoder ("Attention is all you need", Vaswani et al. 2017), base and big."""

from dataclasses import dataclass

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import dense, embedding, softmax_loss
from pase.models.blocks import dropped
from pase.models.parameters import Depth, network
from pase.models.sublayers import DIMS, add_and_norm, feed_forward, multi_head_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    layers: int
    model_width: int
    hidden: int
    heads: int
    dropout: float


@network
def transformer(
    *,
    batch: int = 64,
    vocabulary: int = 50_000,
    steps: int = 256,
    layers: Depth = 6,
    model_width: int = 512,
    hidden: int = 2048,
    heads: int = 8,
    tied: bool = True,
    dropout: float = 0.0,
) -> Graph:
    """Return the base model (the paper's Table 3): 6 layers in the encoder and 6 in the decoder.

    steps: tokens in the source and in the target. tied: both embeddings and the projection to the vocabulary
    share one matrix (the paper's section 3.4). Projections of the attention have no bias, normalisation follows
    the residual, as in the paper; sinusoidal positions hold no parameters and are part of the embedding's vertex.
    dropout: rate after the embeddings and after each sub-layer (the paper's section 5.4: 0.1); 0 omits
    these layers. Dropout of attention weights is omitted.
    """
    sizes = _Sizes(layers=layers, model_width=model_width, hidden=hidden, heads=heads, dropout=dropout)
    return _build("transformer", (batch, steps), vocabulary, sizes, tied=tied)


@network
def transformer_big(
    *,
    batch: int = 64,
    vocabulary: int = 50_000,
    steps: int = 256,
    layers: Depth = 6,
    model_width: int = 1024,
    hidden: int = 4096,
    heads: int = 16,
    tied: bool = True,
    dropout: float = 0.0,
) -> Graph:
    """Return the big model (the paper's Table 3): twice the width, twice the heads; parameters as of `transformer`."""
    sizes = _Sizes(layers=layers, model_width=model_width, hidden=hidden, heads=heads, dropout=dropout)
    return _build("transformer_big", (batch, steps), vocabulary, sizes, tied=tied)


def _build(name: str, tokens: tuple[int, int], vocabulary: int, sizes: _Sizes, *, tied: bool) -> Graph:
    net = Builder(name)
    shared = "vocabulary" if tied else ""
    source, target = (
        net.add(
            embedding,
            f"{side}_embedding",
            net.input(tokens),
            vocabulary=vocabulary,
            size=sizes.model_width,
            shared=shared,
        )
        for side in ("source", "target")
    )
    memory, x = (
        dropped(net, f"{side}_embedding", y, sizes.dropout, dims=DIMS)
        for side, y in (("source", source), ("target", target))
    )
    for number in range(1, sizes.layers + 1):
        memory = _encoder_layer(net, f"encoder{number}", memory, sizes)
    for number in range(1, sizes.layers + 1):
        x = _decoder_layer(net, f"decoder{number}", x, memory, sizes)
    out = (("v", vocabulary),)
    x = net.add(dense, "fc", x, lead=("b", "s"), reduce=("d",), out=out, bias=False, shared=shared)
    net.add(softmax_loss, "softmax", x, dims=("b", "s", "v"))
    return net.build()


def _encoder_layer(net: Builder, name: str, x: Tensor, sizes: _Sizes) -> Tensor:
    y = multi_head_attention(net, f"{name}_self", x, heads=sizes.heads, bias=False)
    x = add_and_norm(net, f"{name}_self", x, y, dropout=sizes.dropout)
    y = feed_forward(net, f"{name}_ff", x, hidden=sizes.hidden, activation="relu")
    return add_and_norm(net, f"{name}_ff", x, y, dropout=sizes.dropout)


def _decoder_layer(net: Builder, name: str, x: Tensor, memory: Tensor, sizes: _Sizes) -> Tensor:
    y = multi_head_attention(net, f"{name}_self", x, heads=sizes.heads, bias=False, causal=True)
    x = add_and_norm(net, f"{name}_self", x, y, dropout=sizes.dropout)
    y = multi_head_attention(net, f"{name}_cross", x, memory=memory, heads=sizes.heads, bias=False)
    x = add_and_norm(net, f"{name}_cross", x, y, dropout=sizes.dropout)
    y = feed_forward(net, f"{name}_ff", x, hidden=sizes.hidden, activation="relu")
    return add_and_norm(net, f"{name}_ff", x, y, dropout=sizes.dropout)
