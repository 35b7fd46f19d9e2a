"""AlexNet (Krizhevsky, Sutskever and Hinton 2012; the one-tower version: Krizhevsky 2014)."""

from pase.graph import Builder, Graph
from pase.graph.operators import conv2d, pool2d
from pase.models.blocks import classifier, flattened
from pase.models.parameters import Zeros, divided, network

_ONE_TOWER = (64, 192, 384, 256, 256)
_TWO_TOWERS = (96, 256, 384, 384, 256)
_HIDDEN = 4096


@network
def alexnet(
    *,
    batch: int = 128,
    image: int = 224,
    classes: int = 1000,
    padding: Zeros = 2,
    width: int = 1,
    grouped: bool = False,
    dropout: float = 0.0,
) -> Graph:
    """Return AlexNet on images of `image` x `image` x 3.

    padding: zeros around the image; images of 227 need none. grouped: whether to build the two towers of 2012, with
    convolutions 2, 4 and 5 in two groups, instead of one tower. width divides the number of every layer's channels.
    dropout: rate after the first two fully connected layers, 0.5 in the paper; 0 omits these layers. ReLUs are fused
    into their layers; local response normalisation, which has no parameters, is omitted, as in the version of 2014.
    """
    net = Builder("alexnet")
    n1, n2, n3, n4, n5 = (divided(n, width) for n in (_TWO_TOWERS if grouped else _ONE_TOWER))
    groups = 2 if grouped else 1
    x = net.input((batch, 3, image, image))
    x = net.add(conv2d, "conv1", x, out=n1, kernel=11, stride=4, padding=padding, activation="relu")
    x = net.add(pool2d, "pool1", x, kernel=3, stride=2)
    x = net.add(conv2d, "conv2", x, out=n2, kernel=5, padding=2, groups=groups, activation="relu")
    x = net.add(pool2d, "pool2", x, kernel=3, stride=2)
    x = net.add(conv2d, "conv3", x, out=n3, kernel=3, padding=1, activation="relu")
    x = net.add(conv2d, "conv4", x, out=n4, kernel=3, padding=1, groups=groups, activation="relu")
    x = net.add(conv2d, "conv5", x, out=n5, kernel=3, padding=1, groups=groups, activation="relu")
    x = net.add(pool2d, "pool5", x, kernel=3, stride=2)
    hidden = divided(_HIDDEN, width)
    classifier(net, flattened(net, x), (hidden, hidden, classes), rate=dropout)
    return net.build()
