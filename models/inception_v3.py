"""InceptionV3 (Szegedy et al. 2015), in the form that Keras and torchvision train: stem, modules A to E, classifier."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import concat, pool2d
from pase.graph.operators.windows import Pair
from pase.models.blocks import conv_norm, pooled_classifier
from pase.models.parameters import Depths, divided, network


@dataclass(frozen=True, slots=True)
class _Writer:
    """Appends convolutions, each a vertex for the convolution and one for its batch normalisation with ReLU."""

    net: Builder
    width: int

    def conv(self, name: str, x: Tensor, out: int, kernel: int | Pair, *, stride: int = 1, same: bool = True) -> Tensor:
        out = divided(out, self.width)
        return conv_norm(self.net, name, x, out, kernel, stride=stride, padding="same" if same else 0)

    def chain(self, name: str, x: Tensor, *layers: tuple[int, int | Pair]) -> Tensor:
        """Append a branch of "same" convolutions, (out-channels, kernel) each, numbered from 1."""
        for number, (out, kernel) in enumerate(layers, 1):
            x = self.conv(f"{name}_{number}", x, out, kernel)
        return x

    def pool(self, name: str, x: Tensor, *, reduction: str = "max") -> Tensor:
        """Append a 3x3 maximum that halves the image, or a 3x3 mean that keeps its size."""
        if reduction == "max":
            return self.net.add(pool2d, name, x, kernel=3, stride=2)
        return self.net.add(pool2d, name, x, kernel=3, stride=1, padding="same", reduction=reduction)

    def pool_branch(self, name: str, x: Tensor, out: int) -> Tensor:
        return self.conv(f"{name}_proj", self.pool(f"{name}_pool", x, reduction="mean"), out, 1)


@network
def inception_v3(
    *, batch: int = 128, image: int = 299, classes: int = 1000, width: int = 1, blocks: Depths = (3, 4, 2)
) -> Graph:
    """Return InceptionV3 on images of `image` x `image` x 3, at least 75, without the auxiliary head.

    Vertices: 94 convolutions without bias, 94 batch normalisations with their ReLU folded in, 4 maximum and 9
    mean poolings, 15 concatenations, the global pooling, the fully connected layer: 218, and the softmax. Branches
    have no vertex of their own: each reads the module's input. width divides the number of every channel; blocks:
    numbers of modules A, C and E, with images of 35 x 35, 17 x 17 and 8 x 8; one module B and one D are between them.
    """
    net = Builder("inception_v3")
    writer = _Writer(net, width)
    x = _stem(writer, net.input((batch, 3, image, image)))
    for name, module, size in _modules(blocks):
        x = module(writer, name, x, size)
    pooled_classifier(net, x, classes)
    return net.build()


def _stem(writer: _Writer, x: Tensor) -> Tensor:
    x = writer.conv("stem_1", x, 32, 3, stride=2, same=False)
    x = writer.conv("stem_2", x, 32, 3, same=False)
    x = writer.conv("stem_3", x, 64, 3)
    x = writer.pool("stem_pool1", x)
    x = writer.conv("stem_4", x, 80, 1, same=False)
    x = writer.conv("stem_5", x, 192, 3, same=False)
    return writer.pool("stem_pool2", x)


def _module_a(writer: _Writer, name: str, x: Tensor, pool_channels: int) -> Tensor:
    """Append figure 5's module: 1x1, 5x5, two 3x3 and a pooling side by side, 35 x 35."""
    one = writer.conv(f"{name}_1x1", x, 64, 1)
    five = writer.chain(f"{name}_5x5", x, (48, 1), (64, 5))
    three = writer.chain(f"{name}_3x3", x, (64, 1), (96, 3), (96, 3))
    pool = writer.pool_branch(name, x, pool_channels)
    return writer.net.add(concat, f"{name}_concat", one, five, three, pool)


def _module_b(writer: _Writer, name: str, x: Tensor, channels: int) -> Tensor:
    """Append figure 10's module, which halves the image: 35 x 35 to 17 x 17."""
    three = writer.conv(f"{name}_3x3", x, channels, 3, stride=2, same=False)
    double = writer.chain(f"{name}_double", x, (64, 1), (96, 3))
    double = writer.conv(f"{name}_double_3", double, 96, 3, stride=2, same=False)
    return writer.net.add(concat, f"{name}_concat", three, double, writer.pool(f"{name}_pool", x))


def _module_c(writer: _Writer, name: str, x: Tensor, n: int) -> Tensor:
    """Append figure 6's module, 7x7 as 1x7 and 7x1 with n channels between them, 17 x 17."""
    one = writer.conv(f"{name}_1x1", x, 192, 1)
    seven = writer.chain(f"{name}_7x7", x, (n, 1), (n, (1, 7)), (192, (7, 1)))
    double = writer.chain(f"{name}_double", x, (n, 1), (n, (7, 1)), (n, (1, 7)), (n, (7, 1)), (192, (1, 7)))
    pool = writer.pool_branch(name, x, 192)
    return writer.net.add(concat, f"{name}_concat", one, seven, double, pool)


def _module_d(writer: _Writer, name: str, x: Tensor, channels: int) -> Tensor:
    """Append the module that halves the image: 17 x 17 to 8 x 8."""
    three = writer.conv(f"{name}_3x3_1", x, channels, 1)
    three = writer.conv(f"{name}_3x3_2", three, 320, 3, stride=2, same=False)
    seven = writer.chain(f"{name}_7x7", x, (channels, 1), (channels, (1, 7)), (channels, (7, 1)))
    seven = writer.conv(f"{name}_7x7_4", seven, channels, 3, stride=2, same=False)
    return writer.net.add(concat, f"{name}_concat", three, seven, writer.pool(f"{name}_pool", x))


def _module_e(writer: _Writer, name: str, x: Tensor, channels: int) -> Tensor:
    """Append figure 7's module, whose 3x3 branches fork into 1x3 and 3x1, 8 x 8."""
    one = writer.conv(f"{name}_1x1", x, 320, 1)
    three = _forked(writer, f"{name}_3x3", writer.conv(f"{name}_3x3_1", x, channels, 1), channels)
    double = writer.chain(f"{name}_double", x, (448, 1), (channels, 3))
    double = _forked(writer, f"{name}_double", double, channels)
    pool = writer.pool_branch(name, x, 192)
    return writer.net.add(concat, f"{name}_concat", one, three, double, pool)


def _forked(writer: _Writer, name: str, x: Tensor, channels: int) -> Tensor:
    row = writer.conv(f"{name}_row", x, channels, (1, 3))
    col = writer.conv(f"{name}_col", x, channels, (3, 1))
    return writer.net.add(concat, f"{name}_concat", row, col)


def _modules(blocks: tuple[int, ...]) -> Iterator[tuple[str, Callable[[_Writer, str, Tensor, int], Tensor], int]]:
    """Yield the modules between stem and classifier: name, kind, and the one width in which those of a kind differ."""
    at_35, at_17, at_8 = blocks
    for number in range(1, at_35 + 1):
        yield f"a{number}", _module_a, 32 if number == 1 else 64
    yield "b", _module_b, 384
    for number in range(1, at_17 + 1):
        yield f"c{number}", _module_c, 128 if number == 1 else 192 if number == at_17 else 160
    yield "d", _module_d, 192
    for number in range(1, at_8 + 1):
        yield f"e{number}", _module_e, 384
