"""Small networks for tests: the built-in ones at small extents, and one that holds every kind of layer."""

from pase.graph import Builder, Graph
from pase.graph.operators import (
    add_parameter,
    concat,
    conv2d,
    dense,
    elementwise,
    embedding,
    global_pool,
    pool2d,
    softmax_loss,
)
from pase.models import build


def small(name: str) -> Graph:
    """A built-in network whose extents have many divisors."""
    batch, arguments = _SMALL[name]
    return build(name, batch=batch, arguments=arguments)


_SMALL: dict[str, tuple[int, dict[str, str | int | float | bool]]] = {
    "mlp": (24, {"inputs": 12, "hidden": 24, "layers": 3, "classes": 12}),
    "lenet5": (24, {"classes": 12}),
    "alexnet": (24, {"image": 127, "width": 16, "classes": 24}),
    "rnnlm": (24, {"vocabulary": 24, "units": 12, "steps": 4, "layers": 0}),
}


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


def tied() -> Graph:
    """An embedding whose table another one and, transposed, a projection share."""
    net = Builder("tied")
    first = net.add(embedding, "first", net.input((4, 6)), vocabulary=12, size=8, shared="table")
    second = net.add(embedding, "second", net.input((4, 6)), vocabulary=12, size=8, shared="table")
    x = net.add(elementwise, "sum", first, second, dims=("b", "s", "d"))
    x = net.add(dense, "fc", x, lead=("b", "s"), out=(("v", 12),), reduce=("d",), shared="table")
    net.add(softmax_loss, "loss", x, dims=("b", "s", "v"))
    return net.build()
