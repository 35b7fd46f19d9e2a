"""Models in JAX: vertices, parameters and FLOP of a zoo, and the same networks as other front ends see them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pase.graph import Graph
from pase.importers.frameworks import ImportedModel, import_model

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from tests.importers import jax_zoo as zoo  # noqa: E402
from tests.importers.agreement import check_same  # noqa: E402


def kinds(graph: Graph) -> Counter[str]:
    return Counter(operator.kind for operator in graph.operators)


def check(model: ImportedModel, parameters: Any, flop: int) -> Graph:
    """Parameters and products are counted as JAX counts them; nothing is treated generically."""
    graph = model.graph
    assert graph.num_parameters == model.traces[0].num_parameters == zoo.num_parameters(parameters)
    assert graph.forward_flop(contractions_only=True) == flop
    assert not list(model.generic)
    return graph


# -- GPT-2


def test_gpt2_is_read_off_its_single_steps() -> None:
    apply, params = zoo.gpt2(layers=2)
    ids = zoo.tokens(2, 16)
    model = import_model((apply, params, ids))
    graph = check(model, params, zoo.flop(apply, params, ids))
    # Each layer: two norms, four products, attention and two sums; the embedding, the last norm, the logits.
    assert kinds(graph) == {"dense": 9, "layer_norm": 5, "attention": 2, "pointwise": 4, "embedding": 1}
    assert [operator.name for operator in graph.operators][:10] == [
        "wte",
        *(f"h.0.{name}" for name in ("ln_1", "attn.c_attn", "attn.attention", "attn.c_proj", "attn.add")),
        *(f"h.0.{name}" for name in ("ln_2", "mlp.c_fc", "mlp.c_proj", "mlp.add")),
    ]
    # The embedding and the logits share their weight.
    assert [access.shared for access in graph["wte_2"].reads if access.shared] == ["wte"]


# -- convolutions


@pytest.mark.parametrize("train", [False, True])
def test_a_resnet_of_flax_is_that_of_torch(train: bool) -> None:
    """Channels last or first, with running statistics or those of the batch: the costs are the same."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("flax")
    from tests.importers import torch_zoo

    module, x = zoo.flax_resnet(depths=(1, 1)), zoo.f32(4, 32, 32, 3)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)

    def apply(variables: Any, x: Any) -> Any:
        return module.apply(variables, x, train, mutable=["batch_stats"])

    model = import_model((apply, variables, x))
    here = check(model, variables["params"], zoo.flop(apply, variables, x))
    assert kinds(here) == {"conv2d": 9, "batch_norm": 9, "pool2d": 1, "pointwise": 2, "reduction": 1, "dense": 1}
    with torch.device("meta"):
        there = import_model(torch_zoo.resnet((1, 1), 4, 32)).graph
    check_same(here, there)


# -- others


def test_a_llama_of_stacked_layers_has_thirteen_vertices_in_each() -> None:
    apply, params = zoo.llama(layers=3)
    ids = zoo.tokens(2, 16)
    graph = check(import_model((apply, params, ids)), params, zoo.flop(apply, params, ids))
    assert kinds(graph) == {"dense": 22, "rms_norm": 7, "attention": 3, "pointwise": 9, "embedding": 1}
    # The rotary embeddings of queries and keys are part of attention; each layer has its own slice of the weights.
    assert {f"layers.{i}.{name}" for i in range(3) for name in ("wq", "gate", "down")} <= {
        operator.name for operator in graph.operators
    }


def test_a_mixture_of_experts_is_its_products() -> None:
    apply, params = zoo.experts()
    x = zoo.f32(2, 16, 16)
    graph = check(import_model((apply, params, x)), params, zoo.flop(apply, params, x))
    found = kinds(graph)
    assert (found["dense"], found["contract"], found["softmax"]) == (3, 2, 1)


@pytest.mark.parametrize("make", [zoo.equinox_mlp, zoo.equinox_attention])
def test_models_of_equinox_are_functions_of_their_arrays(make: Callable[[], tuple[Any, Any]]) -> None:
    equinox = pytest.importorskip("equinox")
    model, x = make()
    arrays, rest = equinox.partition(model, lambda leaf: hasattr(leaf, "shape"))
    flop = zoo.flop(lambda arrays, x: equinox.combine(arrays, rest)(x), arrays, x)
    graph = check(import_model((model, x)), arrays, flop)
    expected = {
        zoo.equinox_mlp: {"dense": 3},
        zoo.equinox_attention: {"dense": 4, "layer_norm": 1, "attention": 1, "pointwise": 1},
    }
    assert kinds(graph) == expected[make]


def test_a_transformer_of_flax() -> None:
    pytest.importorskip("flax")
    module, ids = zoo.flax_transformer(layers=2), zoo.tokens(2, 12)
    variables = jax.eval_shape(module.init, jax.random.key(0), ids)
    graph = check(import_model((module, ids)), variables, zoo.flop(module.apply, variables, ids))
    assert kinds(graph) == {"dense": 13, "layer_norm": 5, "attention": 2, "pointwise": 4, "embedding": 1}
    assert graph["Encoder.MultiHeadDotProductAttention_0"].kind == "attention"


def test_an_lstm_that_is_scanned_is_a_recurrent_layer() -> None:
    apply, params = zoo.lstm(width=10, units=12)
    x = zoo.f32(4, 6, 10)
    graph = check(import_model((apply, params, x)), params, zoo.flop(apply, params, x))
    assert [operator.kind for operator in graph.operators] == ["recurrent", "dense"]
    assert (graph.operators[0].attribute("cell", ""), graph.operators[0].attribute("units", 0)) == ("lstm", 12)


@pytest.mark.parametrize(("cell", "kind"), [("LSTMCell", "lstm"), ("OptimizedLSTMCell", "lstm"), ("GRUCell", "gru")])
def test_recurrent_layers_of_flax(cell: str, kind: str) -> None:
    linen = pytest.importorskip("flax.linen")
    module, x = linen.RNN(getattr(linen, cell)(12)), zoo.f32(4, 6, 10)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    graph = check(import_model((module, x)), variables, zoo.flop(module.apply, variables, x))
    assert [operator.attribute("cell", "") for operator in graph.operators] == [kind]
    # A split of its units splits every weight, also where each gate has its own.
    assert all("e" in str(access.index_map) for access in graph.operators[0].parameters)


def test_any_other_loop_over_steps_is_one_vertex_with_all_of_its_products() -> None:
    def apply(params: Any, x: Any) -> Any:
        def turn(h: Any, step: Any) -> tuple[Any, Any]:
            h = jnp.tanh(step @ params["w"] + (h @ params["u"]) @ params["v"])
            return h, h

        start = jnp.zeros((x.shape[0], 12))
        return jax.lax.scan(turn, start, x.swapaxes(0, 1))[1].swapaxes(0, 1) @ params["out"]

    params = {"w": zoo.f32(12, 12), "u": zoo.f32(12, 3), "v": zoo.f32(3, 12), "out": zoo.f32(12, 5)}
    x = zoo.f32(4, 6, 12)
    model = import_model((apply, params, x))
    graph = model.graph
    assert [operator.kind for operator in graph.operators] == ["opaque", "dense"]
    assert graph.num_parameters == zoo.num_parameters(params)
    assert graph.forward_flop(contractions_only=True) == zoo.flop(apply, params, x)
    assert [operator for _, operator in model.generic] == ["scan"]
    # It can be split along the batch, and along nothing else.
    splittable = [dim.extent for dim in graph.operators[0].dims if dim.name not in graph.operators[0].unsplittable]
    assert splittable == [4]


def test_a_short_loop_without_weights_is_written_out() -> None:
    def apply(params: Any, x: Any) -> Any:
        state, parts = jax.lax.scan(lambda s, _: (s * 2, s), x @ params["w"], None, length=3)
        return state, parts

    params, x = {"w": zoo.f32(8, 4)}, zoo.f32(2, 8)
    graph = import_model((apply, params, x)).graph
    assert kinds(graph)["opaque"] == 0


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_that_are_scanned_backwards_have_their_weights_in_that_order(reverse: bool) -> None:
    def apply(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"], reverse=reverse)[0]

    model = import_model((apply, {"w": zoo.f32(3, 8, 8)}, zoo.f32(2, 8)))
    starts = [source.piece.start for source in model.lowered.weights if source.piece is not None]
    assert starts == ([2, 1, 0] if reverse else [0, 1, 2])
    assert model.graph.num_parameters == 3 * 64


def test_attention_of_jax_is_one_vertex() -> None:
    def apply(params: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
        return jnp.einsum("bshk,hkd->bsd", jax.nn.dot_product_attention(q, k, v, is_causal=True), params["o"])

    params = dict.fromkeys("qkv", zoo.f32(16, 4, 4)) | {"o": zoo.f32(4, 4, 16)}
    graph = import_model((apply, params, zoo.f32(2, 8, 16))).graph
    assert kinds(graph) == {"dense": 4, "attention": 1}


def test_a_group_norm_of_flax_is_one_vertex() -> None:
    linen = pytest.importorskip("flax.linen")
    module = linen.Sequential([linen.Conv(8, (3, 3)), linen.GroupNorm(4), linen.relu, linen.Conv(4, (1, 1))])
    graph = import_model((module, zoo.f32(2, 8, 8, 3))).graph
    assert kinds(graph) == {"conv2d": 2, "group_norm": 1}


def test_dropout_and_random_keys_leave_no_trace() -> None:
    def apply(params: Any, key: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w"])
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        return jnp.where(kept, hidden / 0.9, 0) @ params["v"]

    key = jax.eval_shape(lambda: jax.random.key(0))
    params = {"w": zoo.f32(8, 16), "v": zoo.f32(16, 4)}
    graph = import_model((apply, params, key, zoo.f32(6, 8))).graph
    assert [operator.name for operator in graph.operators] == ["w", "v"]


def test_turns_that_hand_nothing_on_can_be_split_among_devices() -> None:
    def apply(params: Any, x: Any) -> Any:
        return jax.lax.map(lambda row: jnp.tanh(row @ params["w"]), x)

    params, x = {"w": zoo.f32(3, 4)}, zoo.f32(20, 5, 3)
    graph = import_model((apply, params, x)).graph
    (operator,) = graph.operators
    assert graph.forward_flop(contractions_only=True) == zoo.flop(apply, params, x)
    assert [dim.extent for dim in operator.dims if dim.name not in operator.unsplittable] == [20]


def test_pooling_of_a_model_without_a_batch_is_pooling() -> None:
    """Equinox pools [channels, height, width] with dims of one element around it, and a batch is mapped over that."""
    equinox = pytest.importorskip("equinox")
    pool = equinox.nn.MaxPool2d(2, 2)
    model = import_model(
        (lambda p, x: jax.vmap(pool)(x * p["scale"]), {"scale": zoo.f32(8, 1, 1)}, zoo.f32(2, 8, 6, 6))
    )
    assert kinds(model.graph)["pool2d"] == 1
    assert not list(model.generic)


def test_layers_that_are_stacked_cost_what_they_do_one_by_one() -> None:
    def layer(x: Any, p: Any) -> tuple[Any, None]:
        return x + jax.nn.gelu(x @ p["up"]["w"] + p["up"]["b"]) @ p["down"]["w"], None

    def scanned(params: Any, x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, params)[0]

    def written(params: Any, x: Any) -> Any:
        for p in params:
            x, _ = layer(x, p)
        return x

    def shapes(*lead: int) -> Any:
        up = {"w": zoo.f32(*lead, 16, 64), "b": zoo.f32(*lead, 64)}
        return {"up": up, "down": {"w": zoo.f32(*lead, 64, 16)}}

    x = zoo.f32(8, 4, 16)
    here, there = import_model((scanned, shapes(3), x)), import_model((written, [shapes()] * 3, x))
    check_same(here.graph, there.graph)
    assert here.graph.num_parameters == there.graph.num_parameters


def test_a_vertex_tells_the_line_that_it_comes_from() -> None:
    apply, params = zoo.gpt2(layers=1)
    final = import_model((apply, params, zoo.tokens(2, 16))).traces[-1]
    lines = {node.origin.scope: node.origin.line for node in final.nodes}
    source, number = lines["h.0.attn.attention"].split(":")
    assert source == "jax_zoo.py"
    text = (Path(__file__).parent / source).read_text(encoding="utf-8").splitlines()[int(number) - 1]
    assert "bhst,bhtk->bhsk" in text


def test_attention_in_windows_is_one_vertex() -> None:
    def apply(p: Any, x: Any) -> Any:
        b, h, w, c = x.shape
        windows = x.reshape(b, h // 4, 4, w // 4, 4, c).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = ((windows @ p[name]).reshape(-1, 16, 2, c // 2).transpose(0, 2, 1, 3) for name in "qkv")
        places = jnp.arange(16)[:, None] - jnp.arange(16)[None] + 15
        scores = q @ k.swapaxes(-1, -2) + p["places"][places].transpose(2, 0, 1)[None]
        y = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(-1, 16, c) @ p["o"]
        return y.reshape(b, h // 4, w // 4, 4, 4, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)

    params = dict.fromkeys("qkvo", zoo.f32(16, 16)) | {"places": zoo.f32(31, 2)}
    x = zoo.f32(2, 8, 8, 16)
    graph = check(import_model((apply, params, x)), params, zoo.flop(apply, params, x))
    assert kinds(graph) == {"dense": 4, "attention": 1}
