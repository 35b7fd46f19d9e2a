"""LeNet-5 (LeCun, Bottou, Bengio and Haffner 1998), as it is trained today."""

from pase.graph import Builder, Graph
from pase.graph.operators import conv2d, pool2d
from pase.models.blocks import classifier, flattened
from pase.models.parameters import network


@network
def lenet5(*, batch: int = 128, image: int = 28, classes: int = 10) -> Graph:
    """Return LeNet-5 on images of `image` x `image` x 1.

    Every feature map of the second convolution sees all of the first's, the poolings are plain maxima without
    coefficients and the output layer is a softmax, where the paper has a table of connections, trained
    sub-sampling and radial basis functions.
    """
    net = Builder("lenet5")
    x = net.input((batch, 1, image, image))
    x = net.add(conv2d, "conv1", x, out=6, kernel=5, padding=2, activation="relu")
    x = net.add(pool2d, "pool1", x, kernel=2, stride=2)
    x = net.add(conv2d, "conv2", x, out=16, kernel=5, activation="relu")
    x = net.add(pool2d, "pool2", x, kernel=2, stride=2)
    classifier(net, flattened(net, x), (120, 84, classes))
    return net.build()
