"""DenseNet-121 (Huang, Liu, van der Maaten and Weinberger 2016): each layer of a block reads all earlier ones."""

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import batch_norm, concat, conv2d, pool2d
from pase.models.blocks import conv_norm, pooled_classifier
from pase.models.parameters import Depths, network

_BOTTLENECK = 4


@network
def densenet121(
    *,
    batch: int = 128,
    image: int = 224,
    classes: int = 1000,
    growth: int = 32,
    blocks: Depths = (6, 12, 24, 16),
    chained: bool = False,
) -> Graph:
    """Return DenseNet-121 on images of `image` x `image` x 3, at least 29.

    growth: channels that each layer adds. blocks: layers in each dense block. chained: whether to concatenate a layer's
    output with the previous concatenation, two tensors at a time, as Keras does, instead of concatenating all earlier
    outputs anew for each layer, as in the paper. The values are equal; the graph is sparse instead of dense.
    Normalisation and ReLU, one vertex, precede each convolution.
    """
    net = Builder("densenet121")
    x = conv_norm(net, "stem", net.input((batch, 3, image, image)), 2 * growth, 7, stride=2, padding=3)
    x = net.add(pool2d, "stem_pool", x, kernel=3, stride=2, padding=1)
    for number, layers in enumerate(blocks, 1):
        x = _dense_block(net, f"block{number}", x, layers, growth, chained=chained)
        if number < len(blocks):
            x = _transition(net, f"transition{number}", x)
    x = net.add(batch_norm, "final_norm", x, activation="relu")
    pooled_classifier(net, x, classes)
    return net.build()


def _dense_block(net: Builder, name: str, x: Tensor, layers: int, growth: int, *, chained: bool) -> Tensor:
    parts: tuple[Tensor, ...] = (x,)
    for number in range(1, layers + 1):
        layer = f"{name}_{number}"
        y = net.add(batch_norm, f"{layer}_norm1", x, activation="relu")
        y = net.add(conv2d, f"{layer}_conv1", y, out=_BOTTLENECK * growth, kernel=1, bias=False)
        y = net.add(batch_norm, f"{layer}_norm2", y, activation="relu")
        y = net.add(conv2d, f"{layer}_conv2", y, out=growth, kernel=3, padding=1, bias=False)
        parts = (x, y) if chained else (*parts, y)
        x = net.add(concat, f"{layer}_concat", *parts)
    return x


def _transition(net: Builder, name: str, x: Tensor) -> Tensor:
    y = net.add(batch_norm, f"{name}_norm", x, activation="relu")
    y = net.add(conv2d, f"{name}_conv", y, out=x.shape[1] // 2, kernel=1, bias=False)
    return net.add(pool2d, f"{name}_pool", y, kernel=2, stride=2, reduction="mean")
