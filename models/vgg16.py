"""VGG-16 (Simonyan and Zisserman 2014, configuration D)."""

from pase.graph import Builder, Graph
from pase.models.blocks import vgg
from pase.models.parameters import network

_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@network
def vgg16(*, batch: int = 128, image: int = 224, classes: int = 1000, width: int = 1, dropout: float = 0.0) -> Graph:
    """Return VGG-16 on images of `image` x `image` x 3, at least 32; width divides every layer's channels.

    dropout: its rate after the first two fully connected layers, 0.5 in the paper; no such layers by default.
    """
    net = Builder("vgg16")
    vgg(net, net.input((batch, 3, image, image)), _BLOCKS, classes=classes, width=width, rate=dropout)
    return net.build()
