"""A multilayer perceptron."""

from pase.graph import Builder, Graph
from pase.models.blocks import classifier
from pase.models.parameters import Depth, network


@network
def mlp(*, batch: int = 128, inputs: int = 784, hidden: int = 1024, layers: Depth = 3, classes: int = 10) -> Graph:
    """Return `layers` fully connected layers: all but the last of `hidden` units with a ReLU, the last of `classes`."""
    net = Builder("mlp")
    classifier(net, net.input((batch, inputs)), (hidden,) * (layers - 1) + (classes,))
    return net.build()
