"""VGG-16 (Simonyan and Zisserman 2014, configuration D)."""

from pase.graph import Builder, Graph
from pase.graph.operators import conv2d, pool2d
from pase.models.blocks import classifier, flattened
from pase.models.parameters import divided, network

_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_HIDDEN = 4096


@network
def vgg16(*, batch: int = 128, image: int = 224, classes: int = 1000, width: int = 1, dropout: float = 0.0) -> Graph:
    """Return VGG-16 on images of `image` x `image` x 3, at least 32; width divides every layer's channels.

    dropout: its rate after the first two fully connected layers, 0.5 in the paper; no such layers by default.
    """
    net = Builder("vgg16")
    x = net.input((batch, 3, image, image))
    for block, channels in enumerate(_BLOCKS, 1):
        for number, out in enumerate(channels, 1):
            name = f"conv{block}_{number}"
            x = net.add(conv2d, name, x, out=divided(out, width), kernel=3, padding=1, activation="relu")
        x = net.add(pool2d, f"pool{block}", x, kernel=2, stride=2)
    hidden = divided(_HIDDEN, width)
    classifier(net, flattened(net, x), (hidden, hidden, classes), rate=dropout)
    return net.build()
