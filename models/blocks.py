"""Parts that several image networks share."""

from pase.graph import Builder, Tensor
from pase.graph.operators import batch_norm, conv2d, dense, dropout, global_pool, softmax_loss
from pase.graph.operators.windows import Padding, Pair


def flattened(net: Builder, x: Tensor) -> Tensor:
    """Return x, shape [b, c, h, w], reshaped to [b, c·h·w], row-major."""
    batch, channels, height, width = x.shape
    return net.reshape(x, (batch, channels * height * width))


def fully_connected(net: Builder, name: str, x: Tensor, out: int, *, activation: str = "") -> Tensor:
    """Append ``y[b, n] = activation(x[b, c] w[c, n] + bias[n])``; x: shape [b, c]."""
    return net.add(dense, name, x, out=(("n", out),), activation=activation)


def classifier(net: Builder, x: Tensor, widths: tuple[int, ...], *, rate: float = 0.0) -> None:
    """Append fully connected layers fc1, fc2, … of these widths, all but the last with a ReLU, and the softmax loss.

    rate: dropout rate after each layer but the last (fc1_dropout, …); 0 omits these layers.
    """
    *hidden, classes = widths
    for number, width in enumerate(hidden, 1):
        x = fully_connected(net, f"fc{number}", x, width, activation="relu")
        x = dropped(net, f"fc{number}", x, rate, dims=("b", "n"))
    x = fully_connected(net, f"fc{len(widths)}", x, classes)
    net.add(softmax_loss, "softmax", x)


def dropped(net: Builder, name: str, x: Tensor, rate: float, *, dims: tuple[str, ...]) -> Tensor:
    """Append `name`_dropout, which sets points of x to zero; x itself, without a layer, where the rate is 0."""
    return net.add(dropout, f"{name}_dropout", x, dims=dims, rate=rate) if rate else x


def pooled_classifier(net: Builder, x: Tensor, classes: int, *, rate: float = 0.0) -> None:
    """Append the mean over all positions of x, shape [b, c, h, w], one fully connected layer and the softmax loss.

    rate: dropout rate before the fully connected layer (fc_dropout); 0 omits it.
    """
    x = net.add(global_pool, "global_pool", x)
    x = dropped(net, "fc", x, rate, dims=("b", "n"))
    x = fully_connected(net, "fc", x, classes)
    net.add(softmax_loss, "softmax", x)


def conv_norm(
    net: Builder,
    name: str,
    x: Tensor,
    out: int,
    kernel: int | Pair,
    *,
    stride: int = 1,
    padding: Padding = 0,
    activation: str = "relu",
) -> Tensor:
    """Append `name`_conv, a convolution without bias, and `name`_norm, batch normalisation and the activation."""
    x = net.add(conv2d, f"{name}_conv", x, out=out, kernel=kernel, stride=stride, padding=padding, bias=False)
    return net.add(batch_norm, f"{name}_norm", x, activation=activation)
