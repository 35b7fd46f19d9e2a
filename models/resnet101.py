"""ResNet-101 (He, Zhang, Ren and Sun 2015), a stack of bottlenecks with residual connections."""

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import elementwise, pool2d
from pase.models.blocks import conv_norm, pooled_classifier
from pase.models.parameters import Depths, divided, network

_STEM = 64
_EXPANSION = 4


@network
def resnet101(
    *, batch: int = 128, image: int = 224, classes: int = 1000, width: int = 1, blocks: Depths = (3, 4, 23, 3)
) -> Graph:
    """Return ResNet-101 on images of `image` x `image` x 3.

    The stride of a stage is in the 3x3 convolution of its first bottleneck, as torchvision has it (the paper:
    in the first 1x1). Convolutions have no bias; each is followed by a batch normalisation, and each residual sum
    is a vertex; ReLUs are folded in. width divides the number of every layer's channels; blocks: bottlenecks
    in each stage (3,4,6,3 gives ResNet-50).
    """
    net = Builder("resnet101")
    stem = divided(_STEM, width)
    x = conv_norm(net, "stem", net.input((batch, 3, image, image)), stem, 7, stride=2, padding=3)
    x = net.add(pool2d, "stem_pool", x, kernel=3, stride=2, padding=1)
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(net, f"stage{stage + 1}_{block + 1}", x, stem * 2**stage, stride)
    pooled_classifier(net, x, classes)
    return net.build()


def _bottleneck(net: Builder, name: str, x: Tensor, channels: int, stride: int) -> Tensor:
    out = channels * _EXPANSION
    y = conv_norm(net, f"{name}_1", x, channels, 1)
    y = conv_norm(net, f"{name}_2", y, channels, 3, stride=stride, padding=1)
    y = conv_norm(net, f"{name}_3", y, out, 1, activation="")
    if x.shape != y.shape:
        x = conv_norm(net, f"{name}_shortcut", x, out, 1, stride=stride, activation="")
    return net.add(elementwise, f"{name}_add", x, y, dims=("b", "c", "h", "w"), activation="relu")
