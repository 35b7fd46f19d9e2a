"""Small networks for tests: the built-in ones at small extents, and one that holds every kind of layer."""

from dataclasses import replace

from pase.graph import Builder, Graph, Operator
from pase.graph.operators import (
    add_parameter,
    attention,
    batch_norm,
    concat,
    conv1d,
    conv2d,
    conv3d,
    dense,
    dropout,
    elementwise,
    embedding,
    gather,
    global_pool,
    layer_norm,
    lstm,
    padded,
    pointwise,
    pool1d,
    pool2d,
    pool3d,
    reduction,
    softmax,
    softmax_loss,
    transposed_convolution,
)
from pase.models import build


def small(name: str, **arguments: str | int | float | bool) -> Graph:
    """A built-in network whose extents have many divisors; arguments: in place of those that make it small."""
    batch, own = SMALL[name]
    return build(_NETWORKS.get(name, name), batch=batch, arguments=own | arguments)


def deep(name: str) -> Graph:
    """A built-in network as `small` returns it, but with all the modules that it has."""
    return small(name, **_ALL_MODULES[name])


_ALL_MODULES: dict[str, dict[str, str | int | float | bool]] = {"inception_v3": {"blocks": "3,4,2"}}


_NETWORKS = {"lstm_lm": "rnnlm"}
"""Networks that are here twice: without its LSTM layers, that one is quick."""


_LANGUAGE: dict[str, str | int | float | bool] = {
    "vocabulary": 24, "steps": 4, "layers": 1, "model_width": 8, "heads": 2,
}  # fmt: skip

SMALL: dict[str, tuple[int, dict[str, str | int | float | bool]]] = {
    "mlp": (24, {"inputs": 12, "hidden": 24, "layers": 3, "classes": 12}),
    "lenet5": (24, {"classes": 12}),
    "alexnet": (24, {"image": 127, "width": 16, "classes": 24}),
    "rnnlm": (24, {"vocabulary": 24, "units": 12, "steps": 4, "layers": 0}),
    "vgg16": (8, {"image": 32, "width": 16, "classes": 8}),
    "inception_v3": (8, {"image": 75, "width": 16, "classes": 8, "blocks": "1,1,1"}),
    "resnet101": (8, {"image": 32, "width": 16, "classes": 8, "blocks": "1,1,1,1"}),
    "densenet121": (8, {"image": 32, "growth": 4, "classes": 8, "blocks": "2,1,1,1"}),
    "lstm_lm": (4, {"vocabulary": 24, "units": 12, "steps": 4, "layers": 2}),
    "transformer": (4, {**_LANGUAGE, "hidden": 16}),
    "transformer_big": (4, {**_LANGUAGE, "hidden": 16, "tied": False}),
    "bert_large": (4, {**_LANGUAGE, "hidden": 16}),
    "gpt": (4, _LANGUAGE),
}


def batch_norms() -> Graph:
    """Batch normalisation with and without an activation, before and after a convolution."""
    net = Builder("batch_norms")
    x = net.add(batch_norm, "first", net.input((12, 6, 6, 4)))
    x = net.add(conv2d, "conv", x, out=12, kernel=3, padding=1, bias=False)
    x = net.add(batch_norm, "second", x, activation="sigmoid")
    x = net.add(dense, "fc", net.reshape(x, (12, 288)), out=(("n", 6),))
    net.add(softmax_loss, "loss", x)
    return net.build()


def layer_norms() -> Graph:
    """Layer normalisation of three dims and of two."""
    net = Builder("layer_norms")
    x = net.add(layer_norm, "first", net.input((12, 4, 6)))
    x = net.add(dense, "hidden", x, lead=("b", "s"), reduce=("d",), out=(("e", 12),), activation="gelu")
    x = net.add(layer_norm, "second", net.reshape(x, (12, 48)), dims=("b", "n"))
    x = net.add(dense, "fc", x, out=(("n", 6),))
    net.add(softmax_loss, "loss", x)
    return net.build()


def attentions() -> Graph:
    """Causal attention of a sequence to itself, all three inputs one tensor, then attention to a longer sequence."""
    net = Builder("attentions")
    heads = (("h", 4), ("k", 6))
    x = net.add(dense, "own", net.input((6, 8, 24)), lead=("b", "s"), reduce=("d",), out=heads, activation="tanh")
    x = net.add(attention, "causal", x, x, x, causal=True)
    q = net.add(dense, "queries", x, lead=("b", "s"), reduce=("h", "k"), out=(("g", 4), ("c", 6)))
    k = net.add(dense, "memory", net.input((6, 12, 4)), lead=("b", "s"), reduce=("d",), out=heads)
    x = net.add(attention, "cross", q, k, k)
    x = net.add(dense, "fc", x, lead=("b", "s"), reduce=("h", "k"), out=(("n", 6),))
    net.add(softmax_loss, "loss", x, dims=("b", "s", "n"))
    return net.build()


def lstms() -> Graph:
    """A stack of two LSTM layers, between layers that are trained."""
    net = Builder("lstms")
    x = net.add(dense, "widen", net.input((6, 4, 4)), lead=("b", "s"), reduce=("c",), out=(("d", 12),))
    x = net.add(lstm, "lstm", x, layers=2, units=12)
    x = net.add(dense, "fc", net.reshape(x, (6, 4, 12)), lead=("b", "s"), reduce=("d",), out=(("v", 6),))
    net.add(softmax_loss, "loss", x, dims=("b", "s", "v"))
    return net.build()


EXCHANGING = {"batch_norm": batch_norms, "layer_norm": layer_norms, "attention": attentions, "lstm": lstms}
"""A network for each kind that exchanges tensors within its layer."""


def mixed() -> Graph:
    """Groups, dilation, uneven padding, both means, branches, reshapes both ways, every elementwise function."""
    net = Builder("mixed")
    x = net.input((12, 4, 13, 11))
    stem = net.add(conv2d, "stem", x, out=4, kernel=1)
    a = net.add(conv2d, "a", stem, out=12, kernel=3, padding=1, activation="tanh", groups=2)
    b = net.add(conv2d, "b", stem, out=6, kernel=(3, 5), padding=(2, 2), dilation=(2, 1), bias=False)
    c = net.add(pool2d, "c", stem, kernel=3, stride=1, padding=1, reduction="mean")
    d = net.add(pool2d, "d", a, kernel=3, stride=1, padding=1, reduction="mean", count_padding=True)
    m = net.add(pool2d, "m", stem, kernel=3, stride=1, padding=1)
    joined = net.add(concat, "joined", a, b, c, m, d)
    e = net.add(conv2d, "e", joined, out=18, kernel=4, stride=3, padding=((1, 2), (0, 1)), groups=2, activation="gelu")
    bchw = ("b", "c", "h", "w")
    f = net.add(elementwise, "f", e, dims=bchw, function="tanh")
    g = net.add(elementwise, "g", e, f, e, dims=bchw, function="multiply", activation="relu")
    h = net.add(elementwise, "h", e, g, dims=bchw, function="add", activation="gelu")
    p = net.add(add_parameter, "p", h, dims=bchw, over=("c", "w"))
    pooled = net.add(global_pool, "pooled", p)
    flat = net.reshape(p, (12, 18 * p.shape[2] * p.shape[3]))
    heads = net.add(dense, "heads", flat, out=(("h", 3), ("k", 4)))
    back = net.add(dense, "back", net.reshape(heads, (12, 12)), out=(("n", 18),))
    total = net.add(elementwise, "total", pooled, back, dims=("b", "n"))
    spatial = net.add(conv2d, "spatial", net.reshape(total, (12, 2, 3, 3)), out=4, kernel=3, padding=1)
    logits = net.add(dense, "logits", net.reshape(spatial, (12, 36)), out=(("n", 6),), bias=False)
    net.add(softmax_loss, "loss", logits)
    return net.build()


def functions() -> Graph:
    """Functions of points, of which one is broadcast, a softmax and a maximum between layers that are trained."""
    net = Builder("functions")
    left, right = (net.add(dense, name, net.input((4, 6)), out=(("n", 8),)) for name in ("left", "right"))
    x = net.add(pointwise, "both", left, right, dims=("b", "n"), out=(4, 8), function="multiply,tanh")
    shares = net.add(softmax, "shares", x, dims=("b", "n"), over="n")
    greatest = net.add(reduction, "greatest", shares, dims=("b", "n"), over=("n",), function="max")
    x = net.add(pointwise, "x", shares, net.reshape(greatest, (4, 1)), dims=("b", "n"), out=(4, 8), function="divide")
    net.add(softmax_loss, "loss", x)
    return net.build()


def rearranged() -> Graph:
    """Points that are spread over windows, elements of rows that are taken out, zeros around them."""
    net = Builder("rearranged")
    x = net.add(dense, "first", net.input((4, 6)), out=(("n", 8), ("w", 4)))
    x = net.add(transposed_convolution, "spread", x, out=4, kernel=3, stride=2, padding=1, groups=2)
    x = net.add(gather, "taken", x, dims=("b", "c", "w"), along="w", count=4)
    one = net.add(gather, "one", x, dims=("b", "c", "w"), along="c")
    x = net.add(concat, "joined", x, one, dims=("b", "c", "w"))
    x = net.add(padded, "padded", x, dims=("b", "c", "w"), before=(0, 1, 0), out=(4, 8, 4))
    net.add(softmax_loss, "loss", net.add(dense, "last", x, reduce=("c", "w"), out=(("n", 4),)))
    return net.build()


def lines() -> Graph:
    """Strides, padding of each side, groups, dilation, both means, the maximum of windows that overlap."""
    net = Builder("lines")
    x = net.add(conv1d, "a", net.input((8, 4, 23)), out=8, kernel=5, stride=2, padding=((2, 3),), groups=2)
    x = net.add(pool1d, "b", x, kernel=3, stride=1, padding=1)
    x = net.add(conv1d, "c", x, out=12, kernel=3, padding="same", dilation=2, activation="tanh", bias=False)
    x = net.add(pool1d, "d", x, kernel=4, stride=2, padding=1, reduction="mean")
    x = net.add(batch_norm, "e", x)
    x = net.add(pool1d, "f", x, kernel=3, stride=1, padding=1, reduction="mean", count_padding=True)
    net.add(softmax_loss, "loss", net.add(dense, "fc", net.add(global_pool, "g", x), out=(("n", 6),)))
    return net.build()


def volumes() -> Graph:
    """As `lines`, with other options for each dim."""
    net = Builder("volumes")
    x = net.input((4, 2, 6, 9, 8))
    x = net.add(conv3d, "a", x, out=4, kernel=(3, 3, 2), stride=(1, 2, 1), padding=((1, 1), (1, 0), (0, 1)), groups=2)
    x = net.add(pool3d, "b", x, kernel=(2, 3, 3), stride=(1, 1, 2), padding=((1, 0), 1, 1))
    x = net.add(conv3d, "c", x, out=8, kernel=(2, 2, 3), padding="same", dilation=(2, 1, 1), activation="tanh")
    x = net.add(pool3d, "d", x, kernel=(3, 2, 2), stride=(2, 1, 2), padding=(1, 0, 0), reduction="mean")
    x = net.add(batch_norm, "e", x)
    x = net.add(pool3d, "f", x, kernel=3, stride=1, padding=1, reduction="mean", count_padding=True)
    net.add(softmax_loss, "loss", net.add(dense, "fc", net.add(global_pool, "g", x), out=(("n", 6),)))
    return net.build()


def dropping(rate: float = 0.4) -> Graph:
    """Dropout of three dims and of two, between layers that are trained."""
    net = Builder("dropping")
    x = net.add(dense, "first", net.input((8, 4, 6)), lead=("b", "s"), reduce=("c",), out=(("d", 12),))
    x = net.add(dropout, "drop1", x, dims=("b", "s", "d"), rate=rate)
    x = net.add(dense, "second", net.reshape(x, (8, 48)), out=(("n", 24),), activation="tanh")
    x = net.add(dropout, "drop2", x, dims=("b", "n"), rate=rate / 2)
    net.add(softmax_loss, "loss", net.add(dense, "fc", x, out=(("n", 6),)))
    return net.build()


def zeros() -> Graph:
    """Windows that lie in the padding alone."""
    net = Builder("zeros")
    x = net.add(conv2d, "first", net.input((6, 3, 4, 4)), out=4, kernel=1)
    x = net.add(conv2d, "wide", x, out=4, kernel=1, padding=1, activation="tanh")
    x = net.add(conv2d, "wider", x, out=4, kernel=2, padding=3, stride=2, activation="tanh")
    x = net.add(conv2d, "after", x, out=2, kernel=1, padding=((0, 3), (2, 0)), stride=2, activation="tanh")
    x = net.add(dense, "fc", x, lead=("b",), reduce=("c", "h", "w"), out=(("n", 6),))
    net.add(softmax_loss, "loss", x)
    return net.build()


def weightless() -> Graph:
    """A network whose first layers hold no weights: nothing flows back to them."""
    net = Builder("weightless")
    x = net.add(pool2d, "pool", net.input((12, 2, 6, 6)), kernel=2, stride=2)
    x = net.add(elementwise, "square", x, x, dims=("b", "c", "h", "w"), function="multiply")
    net.add(softmax_loss, "loss", net.add(dense, "fc", net.reshape(x, (12, 18)), out=(("n", 6),)))
    return net.build()


def inception() -> Graph:
    """A module of an Inception network: convolutions of several kernels and a pooling read one tensor."""
    net = Builder("inception")
    x = net.add(conv2d, "stem", net.input((8, 2, 8, 8)), out=8, kernel=1)
    branches = [
        net.add(conv2d, "one", x, out=4, kernel=1),
        net.add(conv2d, "three", x, out=8, kernel=3, padding=1, activation="relu"),
        net.add(conv2d, "five", x, out=4, kernel=(5, 3), padding=(2, 1), bias=False),
        net.add(pool2d, "pooled", x, kernel=3, stride=1, padding=1),
    ]
    y = net.add(concat, "join", *branches)
    halves = [net.add(conv2d, n, y, out=8, kernel=2, stride=2, bias=False) for n in ("down", "shortcut")]
    y = net.add(elementwise, "add", *halves, dims=("b", "c", "h", "w"), activation="tanh")
    y = net.add(dense, "fc", net.add(global_pool, "mean", y), out=(("n", 4),))
    net.add(softmax_loss, "loss", y)
    return net.build()


def dense_block() -> Graph:
    """Layers each of which reads the outputs of all before it, as they are: dense ones, and a sum of all."""
    net = Builder("dense_block")
    x = net.add(dense, "first", net.input((8, 4)), out=(("n", 16),))
    read = [x]
    for number in range(3):
        parts = [net.add(dense, f"d{number}_{i}", y, out=(("n", 16),)) for i, y in enumerate(read)]
        read.append(net.add(elementwise, f"s{number}", *parts, dims=("b", "n"), activation="tanh"))
    y = net.add(concat, "join", *read, dims=("b", "n"), along="n")
    net.add(softmax_loss, "loss", net.add(dense, "fc", y, reduce=("n",), out=(("v", 8),)), dims=("b", "v"))
    return net.build()


def tied() -> Graph:
    """An embedding whose table another one and, transposed, a projection share."""
    net = Builder("tied")
    first = net.add(embedding, "first", net.input((4, 6)), vocabulary=12, size=8, shared="table")
    second = net.add(embedding, "second", net.input((4, 6)), vocabulary=12, size=8, shared="table")
    x = net.add(elementwise, "sum", first, second, dims=("b", "s", "d"))
    x = net.add(dense, "fc", x, lead=("b", "s"), out=(("v", 12),), reduce=("d",), shared="table")
    net.add(softmax_loss, "loss", x, dims=("b", "s", "v"))
    return net.build()


def sorting(name: str, x: tuple[int, ...]) -> Operator:
    """An operator of a kind that nothing computes; x: [b, n]."""
    return replace(elementwise(name, x, dims=("b", "n")), kind="sorting", body=None)


MADE = {
    **EXCHANGING,
    **{made.__name__: made for made in (dense_block, dropping, functions, inception, lines, mixed)},
    **{made.__name__: made for made in (rearranged, tied, volumes, weightless, zeros)},
}
"""Every network made here, by name."""
