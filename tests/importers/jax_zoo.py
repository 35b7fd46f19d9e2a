"""Networks as people write them in JAX: plain functions, flax and equinox modules; shapes alone, no weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
"""A pytree of arrays or of their shapes."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of floats."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of whole numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def num_parameters(tree: Tree) -> int:
    """Return how many values the arrays of a pytree have."""
    return sum(leaf.size for leaf in jax.tree_util.tree_leaves(tree) if hasattr(leaf, "size"))


def flop(function: Callable[..., Any], *arguments: Tree) -> int:
    """Return 2 FLOP for each multiplication of the products in a function, counted from their shapes alone."""
    from math import prod

    def of(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            inner = [p for p in equation.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
            if equation.primitive.name == "dot_general":
                (over, _), _ = equation.params["dimension_numbers"]
                left = equation.invars[0].aval.shape
                total += 2 * prod(equation.outvars[0].aval.shape) * prod(left[i] for i in over)
            elif equation.primitive.name == "conv_general_dilated":
                numbers = equation.params["dimension_numbers"]
                filters = equation.invars[1].aval.shape
                total += 2 * prod(equation.outvars[0].aval.shape) * prod(filters) // filters[numbers.rhs_spec[0]]
            times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
            total += times * sum(of(getattr(p, "jaxpr", p)) for p in inner)
        return total

    return of(jax.make_jaxpr(function)(*arguments).jaxpr)


# -- GPT-2, a plain function


def gpt2(
    *, layers: int = 2, width: int = 48, heads: int = 4, vocabulary: int = 96, positions: int = 64
) -> tuple[Callable[[Tree, Any], Any], Tree]:
    """Return GPT-2 with its layers written out, and the shapes of its weights."""

    def norm(p: Tree, x: Any) -> Any:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-5) * p["g"] + p["b"]

    def linear(p: Tree, x: Any) -> Any:
        return x @ p["w"] + p["b"]

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1.0 + jnp.tanh(jnp.sqrt(2.0 / jnp.pi) * (x + 0.044715 * x**3)))

    def softmax(x: Any) -> Any:
        exp = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return exp / jnp.sum(exp, axis=-1, keepdims=True)

    def attention(p: Tree, x: Any) -> Any:
        b, s, d = x.shape
        q, k, v = (
            part.reshape(b, s, heads, d // heads).transpose(0, 2, 1, 3)
            for part in jnp.split(linear(p["c_attn"], x), 3, axis=-1)
        )
        scores = jnp.einsum("bhsk,bhtk->bhst", q, k) / jnp.sqrt(d // heads)
        mask = jnp.tril(jnp.ones((s, s), dtype=bool))
        weights = softmax(jnp.where(mask, scores, -1e10))
        out = jnp.einsum("bhst,bhtk->bhsk", weights, v)
        return linear(p["c_proj"], out.transpose(0, 2, 1, 3).reshape(b, s, d))

    def mlp(p: Tree, x: Any) -> Any:
        return linear(p["c_proj"], gelu(linear(p["c_fc"], x)))

    def apply(params: Tree, ids: Any) -> Any:
        x = params["wte"][ids] + params["wpe"][jnp.arange(ids.shape[1])]
        for block in params["h"]:
            x = x + attention(block["attn"], norm(block["ln_1"], x))
            x = x + mlp(block["mlp"], norm(block["ln_2"], x))
        return jnp.einsum("bsd,vd->bsv", norm(params["ln_f"], x), params["wte"])

    normal = {"g": f32(width), "b": f32(width)}

    def linear_shapes(n: int, m: int) -> Tree:
        return {"w": f32(n, m), "b": f32(m)}

    block = {
        "ln_1": normal,
        "attn": {"c_attn": linear_shapes(width, 3 * width), "c_proj": linear_shapes(width, width)},
        "ln_2": normal,
        "mlp": {"c_fc": linear_shapes(width, 4 * width), "c_proj": linear_shapes(4 * width, width)},
    }
    ends = {"wte": f32(vocabulary, width), "wpe": f32(positions, width), "ln_f": normal}
    return apply, {**ends, "h": [block] * layers}


# -- Llama: rotary embeddings, grouped heads, layers stacked and scanned


def llama(
    *,
    layers: int = 3,
    width: int = 32,
    heads: int = 4,
    groups: int = 2,
    inner: int = 48,
    vocabulary: int = 64,
    is_recomputed: bool = False,
) -> tuple[Callable[[Tree, Any], Any], Tree]:
    """Return a Llama whose layers' weights are stacked, as `lax.scan` reads them, and their shapes.

    is_recomputed: whether the layers' results are in the backward pass.
    """
    size = width // heads

    def norm(scale: Any, x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale

    def rotary(x: Any) -> Any:
        half = size // 2
        angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(half) / half)
        cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
        x1, x2 = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)

    def attention(p: Tree, x: Any) -> Any:
        q = rotary(jnp.einsum("bsd,dhk->bshk", x, p["wq"]))
        k = rotary(jnp.einsum("bsd,dhk->bshk", x, p["wk"]))
        v = jnp.einsum("bsd,dhk->bshk", x, p["wv"])
        k, v = (jnp.repeat(t, heads // groups, axis=2) for t in (k, v))
        scores = jnp.einsum("bshk,bthk->bhst", q, k) * size**-0.5
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", weights, v), p["wo"])

    def layer(x: Any, p: Tree) -> tuple[Any, None]:
        x = x + attention(p, norm(p["attention_norm"], x))
        y = norm(p["ffn_norm"], x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def apply(params: Tree, ids: Any) -> Any:
        x, _ = jax.lax.scan(
            jax.checkpoint(layer) if is_recomputed else layer, params["embedding"][ids], params["layers"]
        )
        return norm(params["norm"], x) @ params["output"]

    shapes = {"wq": (width, heads, size), "wk": (width, groups, size), "wv": (width, groups, size)}
    shapes |= {"wo": (heads, size, width), "attention_norm": (width,), "ffn_norm": (width,)}
    shapes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    stacked = {name: f32(layers, *shape) for name, shape in shapes.items()}
    ends = {"embedding": f32(vocabulary, width), "norm": f32(width), "output": f32(width, vocabulary)}
    return apply, {"layers": stacked, **ends}


# -- a mixture of experts, dispatched by einsums (GShard)


def experts(
    *, width: int = 16, inner: int = 32, count: int = 4, capacity: int = 8
) -> tuple[Callable[[Tree, Any], Any], Tree]:
    """Return a layer that sends each token to the best of some experts, and the shapes of its weights."""

    def apply(p: Tree, x: Any) -> Any:
        gates = jax.nn.softmax(jnp.einsum("bsd,de->bse", x, p["router"]))
        best = jax.nn.one_hot(jnp.argmax(gates, axis=-1), count)
        place = (jnp.cumsum(best, axis=1) - 1) * best
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity) * best[..., None]
        combine = slot * jnp.sum(gates * best, axis=-1)[..., None, None]
        tokens_of = jnp.einsum("bsec,bsd->ebcd", slot, x)
        hidden = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", tokens_of, p["up"]))
        out = jnp.einsum("ebcf,efd->ebcd", hidden, p["down"])
        return x + jnp.einsum("bsec,ebcd->bsd", combine, out)

    return apply, {"router": f32(width, count), "up": f32(count, width, inner), "down": f32(count, inner, width)}


# -- an LSTM, by hand


def lstm(*, width: int = 12, units: int = 12, classes: int = 5) -> tuple[Callable[[Tree, Any], Any], Tree]:
    """Return an LSTM that is scanned over the steps of [b, s, d], then a projection; and the shapes of its weights."""

    def apply(params: Tree, x: Any) -> Any:
        def turn(carry: tuple[Any, Any], step: Any) -> tuple[tuple[Any, Any], Any]:
            h, c = carry
            gates = step @ params["w"] + h @ params["u"] + params["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], units))
        _, states = jax.lax.scan(turn, (start, start), x.swapaxes(0, 1))
        return states.swapaxes(0, 1) @ params["out"]

    params = {"w": f32(width, 4 * units), "u": f32(units, 4 * units), "b": f32(4 * units), "out": f32(units, classes)}
    return apply, params


# -- flax and equinox


def flax_resnet(*, depths: tuple[int, ...] = (1, 1), classes: int = 1000) -> Any:
    """Return a residual network of bottlenecks of flax's (channels last), which takes (x, train)."""
    from flax import linen as nn

    def norm(x: Any, train: bool) -> Any:
        return nn.BatchNorm(use_running_average=not train)(x)

    class Bottleneck(nn.Module):
        width: int
        stride: int

        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            y = nn.relu(norm(nn.Conv(self.width, (1, 1), use_bias=False)(x), train))
            y = nn.relu(norm(nn.Conv(self.width, (3, 3), self.stride, padding=1, use_bias=False)(y), train))
            y = norm(nn.Conv(4 * self.width, (1, 1), use_bias=False)(y), train)
            if self.stride > 1 or x.shape[-1] != 4 * self.width:
                x = norm(nn.Conv(4 * self.width, (1, 1), self.stride, use_bias=False)(x), train)
            return nn.relu(y + x)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = nn.relu(norm(nn.Conv(64, (7, 7), 2, padding=3, use_bias=False)(x), train))
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
            for stage, depth in enumerate(depths):
                for i in range(depth):
                    x = Bottleneck(64 << stage, 2 if stage and not i else 1)(x, train)
            return nn.Dense(classes)(jnp.mean(x, axis=(1, 2)))

    return ResNet()


def flax_transformer(*, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 50) -> Any:
    """Return a transformer's encoder of flax's own layers, with dropout that is off."""
    from flax import linen as nn

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            mask = nn.make_causal_mask(ids)
            x = nn.Embed(vocabulary, width)(ids)
            for _ in range(layers):
                y = nn.LayerNorm()(x)
                y = nn.MultiHeadDotProductAttention(heads, dropout_rate=0.1, deterministic=True)(y, mask=mask)
                x = x + nn.Dropout(0.1, deterministic=True)(y)
                y = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
                x = x + nn.Dense(width)(y)
            return nn.Dense(vocabulary)(nn.LayerNorm()(x))

    return Encoder()


def equinox_mlp() -> tuple[Any, Any]:
    """Return a perceptron of equinox's without values, as a model of a batch, and its input."""
    import equinox as eqx

    class Batched(eqx.Module):  # type: ignore[misc]
        net: Any

        def __call__(self, x: Any) -> Any:
            return jax.vmap(self.net)(x)

    def make(key: Any) -> Any:
        return Batched(eqx.nn.MLP(8, 4, 16, 2, key=key))

    return eqx.filter_eval_shape(make, jax.random.key(0)), f32(6, 8)


def equinox_attention() -> tuple[Any, Any]:
    """Return attention of equinox's with a layer norm, as a model of a batch, and its input."""
    import equinox as eqx

    class Block(eqx.Module):  # type: ignore[misc]
        norm: Any
        attention: Any

        def __init__(self, key: Any) -> None:
            self.norm = eqx.nn.LayerNorm(16)
            self.attention = eqx.nn.MultiheadAttention(4, 16, key=key)

        def __call__(self, x: Any) -> Any:
            def one(x: Any) -> Any:
                y = jax.vmap(self.norm)(x)
                return x + self.attention(y, y, y)

            return jax.vmap(one)(x)

    return eqx.filter_eval_shape(Block, jax.random.key(0)), f32(3, 10, 16)
