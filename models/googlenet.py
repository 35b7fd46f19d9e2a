"""GoogLeNet (Szegedy et al. 2015, "Going deeper with convolutions", table 1): 22 layers with weights on any path."""

from dataclasses import dataclass

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import concat, conv2d, pool2d
from pase.models.blocks import pooled_classifier
from pase.models.parameters import divided, network


@dataclass(frozen=True, slots=True)
class _Writer:
    """Appends "same" convolutions with a bias and a ReLU, and 3x3 maximum poolings."""

    net: Builder
    width: int

    def conv(self, name: str, x: Tensor, out: int, kernel: int, *, stride: int = 1) -> Tensor:
        padding = kernel // 2
        out = divided(out, self.width)
        return self.net.add(conv2d, name, x, out=out, kernel=kernel, stride=stride, padding=padding, activation="relu")

    def halved(self, name: str, x: Tensor) -> Tensor:
        """Append a pooling whose last window may extend past the image, as in Caffe: 112, 56, 28, 14, 7."""
        return self.net.add(pool2d, name, x, kernel=3, stride=2, padding="same")


@network
def googlenet(
    *, batch: int = 128, image: int = 224, classes: int = 1000, width: int = 1, dropout: float = 0.0
) -> Graph:
    """Return GoogLeNet on images of `image` x `image` x 3, without the two auxiliary classifiers.

    Vertices: 57 convolutions with their ReLU folded in, 4 maximum poolings that halve the image and 9 that keep its
    size, 9 concatenations, the global pooling, the fully connected layer: 81, and the softmax. Local response
    normalisation, which holds no parameters, is omitted. width, 1, 2, 4 or 8, divides the number of every channel.
    dropout: rate before the fully connected layer, 0.4 in the paper; 0 omits it.
    """
    net = Builder("googlenet")
    writer = _Writer(net, width)
    x = writer.conv("conv1", net.input((batch, 3, image, image)), 64, 7, stride=2)
    x = writer.halved("pool1", x)
    x = writer.conv("conv2_reduce", x, 64, 1)
    x = writer.conv("conv2", x, 192, 3)
    x = writer.halved("pool2", x)
    for name, sizes in _MODULES:
        x = _module(writer, f"inception_{name}", x, sizes) if sizes else writer.halved(name, x)
    pooled_classifier(net, x, classes, rate=dropout)
    return net.build()


def _module(writer: _Writer, name: str, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Append figure 2(b)'s module: 1x1, 3x3, 5x5 and a pooling side by side, the last three with a 1x1 each."""
    one, three_reduce, three, five_reduce, five, projected = sizes
    branches = (
        writer.conv(f"{name}_1x1", x, one, 1),
        writer.conv(f"{name}_3x3", writer.conv(f"{name}_3x3_reduce", x, three_reduce, 1), three, 3),
        writer.conv(f"{name}_5x5", writer.conv(f"{name}_5x5_reduce", x, five_reduce, 1), five, 5),
        writer.conv(f"{name}_proj", _kept(writer.net, f"{name}_pool", x), projected, 1),
    )
    return writer.net.add(concat, f"{name}_concat", *branches)


def _kept(net: Builder, name: str, x: Tensor) -> Tensor:
    """Append a 3x3 maximum that keeps the image's size."""
    return net.add(pool2d, name, x, kernel=3, stride=1, padding="same")


_MODULES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("3a", (64, 96, 128, 16, 32, 32)),
    ("3b", (128, 128, 192, 32, 96, 64)),
    ("pool3", ()),
    ("4a", (192, 96, 208, 16, 48, 64)),
    ("4b", (160, 112, 224, 24, 64, 64)),
    ("4c", (128, 128, 256, 24, 64, 64)),
    ("4d", (112, 144, 288, 32, 64, 64)),
    ("4e", (256, 160, 320, 32, 128, 128)),
    ("pool4", ()),
    ("5a", (256, 160, 320, 32, 128, 128)),
    ("5b", (384, 192, 384, 48, 128, 128)),
)
"""Table 1: #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj; none for a pooling that halves the image."""
