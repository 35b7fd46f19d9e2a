"""VGG-16 and VGG-19 (Simonyan and Zisserman 2014, configurations D and E)."""

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import conv2d, pool2d
from pase.models.blocks import classifier, flattened
from pase.models.parameters import divided, network

_HIDDEN = 4096
_BLOCKS_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_BLOCKS_19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)


@network
def vgg16(*, batch: int = 128, image: int = 224, classes: int = 1000, width: int = 1, dropout: float = 0.0) -> Graph:
    """Return VGG-16 on images of `image` x `image` x 3, at least 32; width divides every layer's channels.

    dropout: rate after the first two fully connected layers, 0.5 in the paper; 0 omits these layers.
    """
    net = Builder("vgg16")
    _vgg(net, net.input((batch, 3, image, image)), _BLOCKS_16, classes=classes, width=width, rate=dropout)
    return net.build()


@network
def vgg19(*, batch: int = 128, image: int = 224, classes: int = 1000, width: int = 1, dropout: float = 0.0) -> Graph:
    """Return VGG-19 on images of `image` x `image` x 3, at least 32; width divides every layer's channels.

    dropout: rate after the first two fully connected layers, 0.5 in the paper; 0 omits these layers.
    """
    net = Builder("vgg19")
    _vgg(net, net.input((batch, 3, image, image)), _BLOCKS_19, classes=classes, width=width, rate=dropout)
    return net.build()


def _vgg(
    net: Builder, x: Tensor, blocks: tuple[tuple[int, ...], ...], *, classes: int, width: int, rate: float
) -> None:
    """Append blocks of 3x3 convolutions with these channels, each followed by a halving pooling, and a classifier.

    width: divides the number of every channel. rate: dropout rate after the first two fully connected layers.
    """
    for block, channels in enumerate(blocks, 1):
        for number, out in enumerate(channels, 1):
            name = f"conv{block}_{number}"
            x = net.add(conv2d, name, x, out=divided(out, width), kernel=3, padding=1, activation="relu")
        x = net.add(pool2d, f"pool{block}", x, kernel=2, stride=2)
    hidden = divided(_HIDDEN, width)
    classifier(net, flattened(net, x), (hidden, hidden, classes), rate=rate)
