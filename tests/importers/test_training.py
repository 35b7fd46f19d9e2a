"""Imported models train: losses and weights beside PyTorch's own and those of one device, under random strategies."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
torch = pytest.importorskip("torch")

from pase.errors import EmitError  # noqa: E402
from pase.graph import Graph  # noqa: E402
from pase.graph.operators import with_fan_outs  # noqa: E402
from pase.importers.frameworks import ImportedModel, import_model  # noqa: E402
from pase.importers.ir.trace import Use  # noqa: E402
from pase.importers.weights import read_as, read_weights  # noqa: E402
from pase.planning.plan import Plan  # noqa: E402
from pase.targets.execute import run_plan  # noqa: E402
from pase.targets.programs import emit  # noqa: E402
from pase.targets.training.counted import step_key  # noqa: E402
from pase.targets.training.options import Schedule, TrainingOptions  # noqa: E402
from tests.importers.torch_zoo import module  # noqa: E402
from tests.runtime.options import options  # noqa: E402
from tests.runtime.plans import make_plan, random_plan  # noqa: E402
from tests.targets.torch import lockstep  # noqa: E402
from tests.targets.torch.modules import FineTuned  # noqa: E402
from tests.targets.torch.networks import predicted  # noqa: E402
from tests.targets.torch.ranks import Pool  # noqa: E402
from tests.targets.torch.trained import builder_of, events, program_events_on  # noqa: E402

nn, F = torch.nn, torch.nn.functional
Array = np.ndarray[Any, Any]
Source = tuple[Any, dict[str, Any]]

STEPS, RATE = 3, 0.1
SAME_AS_PYTORCH, SAME_AS_EACH_OTHER = 1e-10, 1e-12


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Any) -> Any:
        batch, steps, size = x.shape
        parts = self.qkv(self.ln1(x)).split(size, 2)
        q, k, v = (part.view(batch, steps, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, steps, size))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):  # type: ignore[misc]
    """Its loss inside, its projection tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(4, 8)
        self.block = Block(8, 2)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Any, targets: Any) -> Any:
        x = self.block(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Convolutional(nn.Module):  # type: ignore[misc]
    """Normalised by the batch; groups, strides, paddings, both poolings, branches that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.narrow = nn.Conv2d(4, 4, 1)
        self.classes = nn.Linear(48, 6)

    def forward(self, images: Any, labels: Any) -> Any:
        x = F.relu(self.first(self.wide(images)))
        y = F.silu(self.second(self.grouped(x)))
        z = F.max_pool2d(F.leaky_relu(self.narrow(x), 0.2), 2)
        x = F.avg_pool2d(torch.cat([y, z], 1), 2)
        return F.cross_entropy(self.classes(F.hardtanh(x.flatten(1), -0.5, 2.0)), labels)


class Generative(nn.Module):  # type: ignore[misc]
    """Groups of channels that are normalised apart; lines, images and volumes that are made larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(2, 4), nn.GroupNorm(4, 8, affine=False)
        self.narrow = nn.Conv2d(2, 4, 3, padding=1)
        self.image = nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.line = nn.ConvTranspose1d(8, 2, 3, dilation=2, bias=False)
        self.volume = nn.ConvTranspose3d(2, 4, (2, 1, 3), stride=(1, 2, 1))

    def forward(self, x: Any, y: Any) -> Any:
        x = F.relu(self.first(self.narrow(x)))
        x = F.local_response_norm(self.second(F.silu(self.image(x))), 3, alpha=0.3)
        x = self.line(x.flatten(2)).unflatten(2, (2, 2, 17))
        return F.mse_loss(torch.tanh(self.volume(x)), y)


class Alike(nn.Module):  # type: ignore[misc]
    """Attention of one tensor to itself, as queries, keys and values; numbers stand for what is too small or large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Any, y: Any) -> Any:
        x = self.first(x)
        x = self.last(torch.softmax(x @ x.mT / 3, -1) @ x)
        return F.mse_loss(torch.where(x > 0.3, 0.5, torch.where(x < -0.1, x, 0.2)), y)


class Taken(nn.Module):  # type: ignore[misc]
    """One element and several of each row, at places that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 4)

    def forward(self, x: Any, several: Any, one: Any, y: Any) -> Any:
        x = torch.tanh(self.first(x))
        some = self.last(F.relu(x.gather(2, several)))
        return F.mse_loss(some * x.gather(2, one), y)


class Regression(nn.Module):  # type: ignore[misc]
    """A loss of numbers, of functions of points of all sorts; a scale that is computed of a weight, as Gemma's are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 4))
        self.scale, self.gain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Any, y: Any) -> Any:
        found = torch.softmax(self.layers(x) * self.scale * (1 + self.gain).exp(), -1).clamp(0.05, 0.9)
        return F.mse_loss(found, y)


class Rotary(nn.Module):  # type: ignore[misc]
    """A decoder in the manner of Llama: rotary embeddings, grouped queries, gated products."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        angles = torch.outer(torch.arange(6.0), 0.5 ** torch.arange(2.0)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, ids: Any, targets: Any) -> Any:
        x = self.words(ids)
        y = self.norm1(x)
        q = self.q(y).view(*ids.shape, 2, 4).transpose(1, 2)
        k, v = (part.view(*ids.shape, 1, 4).transpose(1, 2) for part in self.kv(y).chunk(2, -1))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Tagger(nn.Module):  # type: ignore[misc]
    """Two LSTM layers in both directions, and a class for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.classes = nn.Embedding(12, 6), nn.Linear(16, 5)
        self.recurrent = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, ids: Any, labels: Any) -> Any:
        found, _ = self.recurrent(self.words(ids))
        return F.cross_entropy(self.classes(found).flatten(0, 1), labels.flatten())


class Translator(nn.Module):  # type: ignore[misc]
    """An encoder and a decoder that goes on from its last states, and so does a GRU from all or a piece of them."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.words, self.units = nn.Embedding(12, 6), units
        self.encoder, self.decoder = (nn.LSTM(6, 8, num_layers=2, batch_first=True) for _ in range(2))
        self.both, self.head = nn.GRU(6, units, bidirectional=True, batch_first=True), nn.Linear(8, 12)

    def forward(self, ids: Any, targets: Any) -> Any:
        x = self.words(ids)
        _, states = self.encoder(x)
        found, _ = self.decoder(self.words(targets), states)
        _, last = self.both(x, states[0] if self.units == 8 else states[0][:, :, : self.units])
        what = torch.cat([last[0], last[1]], 1).square().mean()
        return F.cross_entropy(self.head(found).flatten(0, 1), ids.flatten()) + what


def of(model: Callable[[], Any], **inputs: Any) -> Source:
    torch.manual_seed(0)
    return model().double(), inputs


def translator(units: int) -> Source:
    return of(lambda: Translator(units), ids=whole(12, 4, 3), targets=whole(12, 4, 3))


def numbers(*shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(shape).standard_normal(shape))


def whole(below: int, *shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(shape).integers(below, size=shape))


def with_a_loss(by_name: bool) -> Any:
    """Return a classifier, its inputs and the targets, and a loss of both."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3))
    inputs = {"input": numbers(6, 2, 8), "targets": whole(3, 6)}
    return layers.double(), inputs if by_name else tuple(inputs.values()), nn.CrossEntropyLoss(label_smoothing=0.1)


class WithLoss(nn.Module):  # type: ignore[misc]
    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, targets: Any, **inputs: Any) -> Any:
        return self.loss(self.model(**inputs), targets)


MODELS: Mapping[str, Callable[[], Source]] = {
    "alike": lambda: of(Alike, x=numbers(4, 4, 6), y=numbers(4, 4, 4)),
    "taken": lambda: of(
        Taken, x=numbers(4, 4, 6), several=whole(8, 4, 4, 4), one=whole(8, 4, 4, 1), y=numbers(4, 4, 4)
    ),
    "rotary": lambda: of(Rotary, ids=whole(12, 4, 6), targets=whole(12, 4, 6) * 5 % 12),
    "gpt": lambda: of(Gpt, ids=whole(12, 4, 4), targets=whole(12, 4, 4) * 5 % 12),
    "fine-tuned": lambda: of(FineTuned, images=numbers(4, 2, 4, 4), labels=whole(6, 4)),
    "convolutional": lambda: of(Convolutional, images=numbers(4, 2, 8, 8), labels=whole(6, 4)),
    "regression": lambda: of(Regression, x=numbers(8, 6), y=numbers(8, 4)),
}
"""Each under one strategy beside one device."""

LARGER: Mapping[str, Callable[[], Source]] = {
    "generative": lambda: of(Generative, x=numbers(4, 2, 4, 4), y=numbers(4, 4, 3, 3, 19)),
    "tagger": lambda: of(Tagger, ids=whole(12, 4, 3), labels=whole(5, 4, 3)),
    "translator": lambda: translator(4),
}
"""Of what they are made, smaller ones train in the suite: of ONNX, of JAX, with units that are split."""


def by_pytorch(model: Any, inputs: Mapping[str, Any]) -> tuple[list[float], dict[str, Array]]:
    """Return the losses of some steps of gradient descent, and the weights after them."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        found = model(**inputs)
        loss = found[-1] if isinstance(found, tuple) else found
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    every = model.named_parameters(remove_duplicate=False)
    return losses, {name: tensor.detach().numpy().copy() for name, tensor in every}


def arrays(inputs: Mapping[str, Any]) -> dict[str, Array]:
    return {n: x.numpy() if x.is_floating_point() else x.numpy().astype(np.int32) for n, x in inputs.items()}


def double(source: Any) -> dict[str, Array]:
    """Return the weights of a model as they are: reading them rounds to float32, to which the model is set."""
    found = read_weights(source)
    model = source[0]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(tensor.float())
    return {name: array.astype(np.float64) for name, array in found.items()}


def trained(
    plan: Plan, weights: Mapping[str, Array], batch: Mapping[str, Array], *, is_counted: bool = False
) -> tuple[list[float], dict[str, Array]]:
    """Return the losses and the weights of a plan's program. is_counted: a step must send the bytes predicted."""
    build = builder_of(emit(plan, target="torch"))

    def declare(program: Any) -> dict[str, Any]:
        found = build(program)
        return {"loss": found[0] if isinstance(found, tuple) else found}

    values = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    batches = [{name: torch.from_numpy(np.array(array)) for name, array in batch.items()}] * STEPS
    keys = [torch.tensor(step_key(0, step)) for step in range(STEPS)]
    found = lockstep.trained(
        declare, plan.num_devices, values, batches, lambda ws: torch.optim.SGD(ws, lr=RATE), keys=keys
    )
    if is_counted:
        assert dict(found.sent) == predicted(plan)
        assert found.sent
    return found.losses, {name: x.numpy() for name, x in found.weights.items()}


def graph_of(source: Any) -> Graph:
    return with_fan_outs(import_model(source).graph)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, (0,)) for name in MODELS if name != "rotary"),
        *(pytest.param(name, (0, 1, 2, 3), marks=pytest.mark.full) for name in (*MODELS, *LARGER)),
    ],
)
def test_losses_and_weights_are_those_of_pytorch_under_any_strategy(name: str, seeds: tuple[int, ...]) -> None:
    source = {**MODELS, **LARGER}[name]()
    model, weights = import_model(source), double(source)
    graph, batch = with_fan_outs(model.graph), arrays(source[1])
    expected, parameters = by_pytorch(*source)
    kept = {f"{layer}/{name}": use.value for (layer, name), use in model.lowered.constants.items()}
    statistics = {name: x.numpy() for name, x in source[0].named_buffers() if "running" in name}
    first, _ = trained(random_plan(graph, 1, 0), weights, batch)
    for seed in seeds:
        losses, found = trained(random_plan(graph, 4, seed), weights, batch, is_counted=not seed)
        np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)
        for weight in model.lowered.weights:
            key = f"{weight.layer}/{weight.tensor}"
            if key in found and weight.piece is None and weight.source in parameters:
                np.testing.assert_allclose(
                    found[key].ravel(), parameters[weight.source].ravel(), rtol=SAME_AS_PYTORCH, atol=SAME_AS_PYTORCH
                )
        assert {w.source for w in model.lowered.weights if f"{w.layer}/{w.tensor}" in found} >= {
            name
            for name in parameters
            if name != "words.weight"  # which is head.weight
        }
        assert statistics.keys() <= {kept[key] for key in kept.keys() & found.keys()}
        for key in kept.keys() & found.keys():
            if kept[key] in statistics:
                np.testing.assert_allclose(found[key], statistics[kept[key]], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(losses, first, rtol=SAME_AS_EACH_OTHER)


def options_of(source: Source, weights: Mapping[str, Array], folder: Path, steps: int) -> TrainingOptions:
    """Return the options of a training from these weights, on the inputs of a model; both are written to a folder."""
    paths = folder / "weights.npz", folder / "data.npz"
    for path, named in zip(paths, (weights, arrays(source[1])), strict=True):
        np.savez(path, **named)  # type: ignore[arg-type]
    schedule = Schedule(peak=RATE)
    return TrainingOptions(steps=steps, dtype="float64", weights_path=paths[0], data_path=paths[1], schedule=schedule)


def test_a_run_is_that_of_one_device(ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pase.targets.execute.program_events", program_events_on(ranks))
    source = MODELS["regression"]()
    given = options_of(source, double(source), tmp_path, 2)
    result = run_plan(random_plan(graph_of(source), 2, 1), given, measure=True)
    assert result.max_relative_difference < SAME_AS_EACH_OTHER
    assert result.losses[0] == pytest.approx(by_pytorch(*source)[0][0], rel=SAME_AS_PYTORCH)
    assert result.measured_bytes is not None
    assert result.measured_bytes >= result.predicted_bytes > 0
    assert result.accuracies == (None, None)


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("translator", {"b": 2, "e": 2}),
        *(pytest.param("tagger", splits, marks=pytest.mark.full) for splits in ({"e": 4}, {"b": 4}, {"b": 2, "e": 2})),
    ],
)
def test_the_units_of_recurrent_layers_are_split_and_gathered_in_each_step(
    name: str, splits: Mapping[str, int]
) -> None:
    source = translator(8) if name == "translator" else LARGER[name]()
    graph, weights = graph_of(source), double(source)
    plan = make_plan(graph, 4, {layer.name: splits for layer in graph.operators if layer.kind == "recurrent"})
    expected, _ = by_pytorch(*source)
    losses, _ = trained(plan, weights, arrays(source[1]))
    np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)


def test_a_layer_that_cannot_be_written_is_named() -> None:
    layer = nn.LSTM(4, 8, batch_first=True, num_layers=2, dropout=0.5)
    made = module(lambda self, x: self.layer(x)[0].mean(), layer=layer)
    # As where nothing is known of the module in training: what is, is named first.
    graph = replace(graph_of((made.double(), (numbers(2, 3, 4),))), untrained="")
    with pytest.raises(EmitError, match=r"cannot be written as a program: .*points are dropped between its layers"):
        emit(random_plan(graph, 1, 0))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_and_its_loss_are_given_apart(by_name: bool) -> None:
    source = with_a_loss(by_name)
    graph, weights = graph_of(source), double(source)
    model, inputs, loss = source
    inputs = inputs if by_name else dict(zip(("input", "targets"), inputs, strict=True))
    assert "forward" not in vars(model)
    expected, _ = by_pytorch(WithLoss(model, loss), inputs)
    losses, _ = trained(random_plan(graph, 4, 0), weights, arrays(inputs))
    np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)


def check_onnx(
    nodes: list[Any],
    x: Any,
    shapes: Mapping[str, tuple[int, ...]],
    loss_of: Callable[[Mapping[str, Any], Any, Any], Any],
    constants: Mapping[str, Array] = MappingProxyType({}),
) -> None:
    """Assert that an ONNX model of the loss of four labels, given x, trains as PyTorch does.

    shapes: of its weights; constants: the other tensors that it stores. loss_of: the same loss in PyTorch, of the
    weights, x and the labels.
    """
    import onnx

    torch.manual_seed(3)
    held = {name: (torch.randn(shape) * 0.5).numpy() for name, shape in shapes.items()}
    given = {"x": x, "labels": whole(5, 4)}
    helper, kinds = onnx.helper, onnx.TensorProto
    image = helper.make_tensor_value_info("x", kinds.FLOAT, list(x.shape))
    labels = helper.make_tensor_value_info("labels", kinds.INT64, [4])
    loss = helper.make_tensor_value_info("loss", kinds.FLOAT, [])
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in {**held, **constants}.items()]
    graph = helper.make_graph(nodes, "net", [image, labels], [loss], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    w = {name: torch.from_numpy(array).double().requires_grad_() for name, array in held.items()}
    expected = []
    for _ in range(STEPS):
        loss = loss_of(w, *given.values())
        gradients = torch.autograd.grad(loss, list(w.values()))
        expected.append(loss.item())
        w = {n: (t - RATE * g).detach().requires_grad_() for (n, t), g in zip(w.items(), gradients, strict=True)}
    weights = {name: array.astype(np.float64) for name, array in read_weights(model).items()}
    losses, _ = trained(random_plan(graph_of(model), 4, 0), weights, arrays(given))
    np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)


def test_an_onnx_network_trains_as_pytorch_does() -> None:
    helper = pytest.importorskip("onnx").helper
    shapes = {"w1": (4, 2, 3, 3), "b1": (4,), "scale": (4,), "shift": (4,), "w2": (48, 5), "b2": (5,)}
    kept = {"mean": np.zeros(4, np.float32), "variance": np.ones(4, np.float32), "one": np.array([1])}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c"], pads=[1, 1, 0, 0], strides=[2, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["n"]),
        helper.make_node("Sigmoid", ["n"], ["s"]),
        helper.make_node("MaxPool", ["s"], ["m"], kernel_shape=[2, 2], strides=[1, 2]),
        helper.make_node("Flatten", ["m"], ["f"]),
        helper.make_node("Gemm", ["f", "w2", "b2"], ["y"]),
        helper.make_node("LogSoftmax", ["y"], ["log"], axis=1),
        helper.make_node("Unsqueeze", ["labels", "one"], ["places"]),
        helper.make_node("GatherElements", ["log", "places"], ["picked"], axis=1),
        helper.make_node("Neg", ["picked"], ["negative"]),
        helper.make_node("ReduceMean", ["negative"], ["loss"], keepdims=0),
    ]

    def loss_of(w: Mapping[str, Any], x: Any, labels: Any) -> Any:
        x = F.conv2d(F.pad(x, (1, 0, 1, 0)), w["w1"], w["b1"], stride=(2, 1))
        x = F.batch_norm(x, None, None, w["scale"], w["shift"], training=True)
        x = F.max_pool2d(torch.sigmoid(x), 2, (1, 2)).flatten(1)
        return F.cross_entropy(x @ w["w2"] + w["b2"], labels)

    check_onnx(nodes, numbers(4, 2, 8, 9), shapes, loss_of, kept)


def by_jax(loss: Callable[..., Any], weights: Any, *given: Array) -> list[float]:
    """Return the losses of some steps of gradient descent in JAX."""
    import jax

    @jax.jit
    def step(weights: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, *given)
        return value, jax.tree.map(lambda w, g: w - RATE * g, weights, gradients)

    losses = []
    for _ in range(STEPS):
        value, weights = step(weights)
        losses.append(float(value))
    return losses


def given_to(model: ImportedModel, held: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of a model's program, of arrays by their names in the source."""
    return {
        f"{w.layer}/{w.tensor}": read_as(held[w.source], Use(value="", piece=w.piece)) for w in model.lowered.weights
    }


def test_a_jax_transformer_trains_as_jax_does() -> None:
    """GPT-2 as a plain function, its attention spelled out; positions are rows of a weight, its projection is tied."""
    jax = pytest.importorskip("jax")
    from tests.importers.jax_zoo import gpt2

    function, shapes = gpt2(layers=1, width=8, heads=2, vocabulary=12, positions=8)
    ids, targets = whole(12, 4, 6).numpy(), whole(12, 4, 6).numpy() * 5 % 12

    def loss(weights: Any, ids: Any, targets: Any) -> Any:
        scores = jax.nn.log_softmax(function(weights, ids))
        return -jax.numpy.take_along_axis(scores, targets[..., None], -1).mean()

    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        weights = jax.tree.map(lambda leaf: jax.numpy.asarray(random.standard_normal(leaf.shape) / 4), shapes)
        model = import_model((loss, (weights, ids, targets)))
        read = read_weights((loss, (weights, ids, targets)))
        held = {f"{jax.tree_util.keystr(path, simple=True, separator='.')}": np.asarray(leaf)
                for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}  # fmt: skip
        expected = by_jax(loss, weights, ids, targets)
    given = given_to(model, held)
    mask = np.broadcast_to(np.tril(np.ones((6, 6))), (4, 2, 6, 6))
    given |= {f"{layer}/{name}": mask for layer, name in model.lowered.constants}
    assert set(read) == set(given)
    for name, array in given.items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)
    graph = with_fan_outs(model.graph)
    batch = {"input_0": ids.astype(np.int32), "input_1": targets.astype(np.int32)}
    losses, _ = trained(random_plan(graph, 4, 0), given, batch)
    np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)


def test_an_onnx_generator_trains_as_pytorch_does() -> None:
    """Transposed convolutions, neighbouring channels and ONNX's own loss, which leaves no target out."""
    helper = pytest.importorskip("onnx").helper
    shapes = {"w1": (3, 4, 3, 2), "b1": (4,), "w2": (4, 3, 3, 4), "w3": (6, 5), "b3": (5,)}
    spread = {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 0, 1], "output_padding": [1, 0]}
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w1", "b1"], ["c"], **spread),
        helper.make_node("LRN", ["c"], ["n"], size=3, alpha=0.25, beta=0.5, bias=1.5),
        helper.make_node("ConvTranspose", ["n", "w2"], ["d"], strides=[2, 2], auto_pad="SAME_UPPER", group=2),
        helper.make_node("Relu", ["d"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["y", "labels"], ["loss"], ignore_index=-1),
    ]

    def loss_of(w: Mapping[str, Any], x: Any, labels: Any) -> Any:
        x = F.conv_transpose2d(x, w["w1"], w["b1"], stride=(2, 1), dilation=(1, 2), output_padding=(1, 0))
        x = F.local_response_norm(x[:, :, 1:, :-1], 3, alpha=0.25, beta=0.5, k=1.5)
        # 7 rows of windows of 3 and 6 columns of windows of 4 reach 15 and 14: one and two more than twice as many.
        x = F.conv_transpose2d(x, w["w2"], stride=2, groups=2)[:, :, :-1, 1:-1]
        return F.cross_entropy(torch.relu(x).mean((2, 3)) @ w["w3"] + w["b3"], labels)

    check_onnx(nodes, numbers(4, 3, 3, 5), shapes, loss_of)


def test_recurrent_layers_of_onnx_train_as_pytorchs_do() -> None:
    """An LSTM, a GRU and a plain layer, whose gates ONNX has in an order of its own; first states are zeros or none."""
    helper = pytest.importorskip("onnx").helper
    sizes = {"l": (4, 3, 8), "g": (3, 8, 4), "r": (1, 4, 8)}
    shapes = {f"{n}w": (1, gates * units, width) for n, (gates, width, units) in sizes.items()}
    shapes |= {f"{n}u": (1, gates * units, units) for n, (gates, _, units) in sizes.items()}
    shapes |= {f"{n}b": (1, 2 * gates * units) for n, (gates, _, units) in sizes.items() if n != "r"}
    kept = {"zero": np.zeros((1, 4, 8), np.float32), "one": np.array([1]), "last": np.array(4)}
    nodes = [
        helper.make_node("LSTM", ["x", "lw", "lu", "lb", "", "zero", "zero"], ["y1"], hidden_size=8),
        helper.make_node("Squeeze", ["y1", "one"], ["x1"]),
        helper.make_node("GRU", ["x1", "gw", "gu", "gb"], ["y2"], hidden_size=4, linear_before_reset=1),
        helper.make_node("Squeeze", ["y2", "one"], ["x2"]),
        helper.make_node("RNN", ["x2", "rw", "ru"], ["y3"], hidden_size=8, activations=["Relu"]),
        helper.make_node("Squeeze", ["y3", "one"], ["x3"]),
        helper.make_node("Gather", ["x3", "last"], ["h"], axis=0),
        helper.make_node("MatMul", ["h", "w"], ["z"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["z", "labels"], ["loss"]),
    ]
    options = {"num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False, "batch_first": False}

    def of(w: Mapping[str, Any], name: str, order: list[int]) -> list[Any]:
        def turned(x: Any) -> Any:
            parts = x.chunk(len(order))
            return torch.cat([parts[i] for i in order])

        biases = w[f"{name}b"][0].chunk(2) if f"{name}b" in w else ()
        return [turned(x) for x in (w[f"{name}w"][0], w[f"{name}u"][0], *biases)]

    def loss_of(w: Mapping[str, Any], x: Any, labels: Any) -> Any:
        state = torch.zeros(1, 4, 8, dtype=torch.float64)
        x, *_ = torch.lstm(x, (state, state), of(w, "l", [0, 2, 3, 1]), has_biases=True, **options)
        x, _ = torch.gru(x, state[..., :4], of(w, "g", [1, 0, 2]), has_biases=True, **options)
        x, _ = torch.rnn_relu(x, state, of(w, "r", [0]), has_biases=False, **options)
        return F.cross_entropy(x[4] @ w["w"], labels)

    check_onnx(nodes, numbers(5, 4, 3), shapes | {"w": (8, 5)}, loss_of, kept)


def test_a_jax_generator_trains_as_jax_does() -> None:
    """Convolutions of inputs with zeros between their points, whose filters stand the other way round."""
    jax = pytest.importorskip("jax")
    lax = jax.lax
    x, labels = numbers(4, 3, 5, 2).numpy(), whole(4, 4).numpy()

    def loss(weights: Any, x: Any, labels: Any) -> Any:
        x = jax.nn.relu(lax.conv_transpose(x, weights["first"], (2, 1), "SAME", rhs_dilation=(1, 2)))
        x = lax.conv_transpose(x, weights["second"], (2, 3), "VALID").mean((1, 2))
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1).mean()

    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        shapes = {"first": (3, 2, 2, 6), "second": (2, 4, 6, 4)}
        weights = {name: jax.numpy.asarray(random.standard_normal(shape) / 2) for name, shape in shapes.items()}
        held = {name: np.asarray(array) for name, array in weights.items()}
        model = import_model((loss, (weights, x, labels)))
        expected = by_jax(loss, weights, x, labels)
    given = given_to(model, held)
    names = [leaf.value.name for leaf in model.traces[0].leaves if leaf.role == "input"]
    batch = dict(zip(names, (x, labels.astype(np.int32)), strict=True))
    losses, _ = trained(random_plan(with_fan_outs(model.graph), 4, 0), given, batch)
    np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)


def mobilenet(keras: Any, image: Any) -> Any:
    """Return two inverted residuals in the manner of MobileNetV2."""
    layers = keras.layers

    def normal(x: Any) -> Any:
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-3)(x)

    def block(x: Any, width: int, stride: int) -> Any:
        y = layers.ReLU(6.0)(normal(layers.Conv2D(2 * x.shape[-1], 1, use_bias=False)(x)))
        y = layers.DepthwiseConv2D(3, strides=stride, padding="same", use_bias=False)(y)
        y = normal(layers.Conv2D(width, 1, use_bias=False)(layers.ReLU(6.0)(normal(y))))
        return layers.Add()([x, y]) if stride == 1 else y

    x = layers.ReLU(6.0)(normal(layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False)(image)))
    x = layers.GlobalAveragePooling2D()(block(block(x, 4, 1), 8, 2))
    return keras.Model(image, layers.Dense(3, activation="softmax")(x))


@pytest.mark.filterwarnings(
    # Keras' own, when it reads the values of its variables.
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
def test_a_keras_network_trains_as_keras_does() -> None:
    """Two inverted residuals in the manner of MobileNetV2."""
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    try:
        image = keras.Input((8, 8, 3), batch_size=4, name="image")
        model = mobilenet(keras, image)
        model.compile("sgd", loss="sparse_categorical_crossentropy")
        for variable in model.variables:
            variable.assign(variable.numpy().astype(np.float32))
        images, labels = numbers(*image.shape).numpy(), whole(3, 4).numpy().astype(np.int32)
        imported = import_model(model)
        graph = with_fan_outs(imported.graph)
        weights = {name: array.astype(np.float64) for name, array in read_weights(model).items()}
        expected = by_keras(model, images, labels)
        kept = {v.path: np.asarray(v.value) for v in model.non_trainable_variables if "seed" not in v.path}
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    (targets,) = {item.name for o in graph.operators if o.body for item in o.body.inputs} - {"image"}
    losses, found = trained(random_plan(graph, 4, 0), weights, {"image": images, targets: labels})
    np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)
    statistics = {f"{layer}/{name}": use.value for (layer, name), use in imported.lowered.constants.items()}
    statistics = {name: path for name, path in statistics.items() if path in kept and name in found}
    assert len(statistics) == len(kept)
    for name, path in statistics.items():
        np.testing.assert_allclose(found[name], kept[path], rtol=SAME_AS_PYTORCH, atol=SAME_AS_PYTORCH)


def by_keras(model: Any, images: Array, labels: Array) -> list[float]:
    import keras
    import tensorflow as tf

    found = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True))
            loss = keras.ops.mean(losses)
        variables = [variable.value for variable in model.trainable_variables]
        for variable, gradient in zip(model.trainable_variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
        found.append(float(loss))
    return found


def test_weights_that_are_not_given_are_drawn(ranks: Pool) -> None:
    """Under every strategy the same ones."""
    graph = graph_of(MODELS["regression"]())
    alone, ours = (
        ranks.run(events, emit(random_plan(graph, world, 0)), options(2), world=world)[0][-1]["losses"]
        for world in (1, 2)
    )
    np.testing.assert_allclose(ours, alone, rtol=SAME_AS_EACH_OTHER)
    assert ours[1] < ours[0]


class Dropping(nn.Module):  # type: ignore[misc]
    """Points are dropped between layers, of a sum that is read twice, and of what attention weighs by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.queries, self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.quarter, self.other = nn.Dropout(0.25), nn.Dropout(0.5)

    def forward(self, x: Any, y: Any) -> Any:
        x = self.quarter(torch.relu(self.first(x)))
        scores = self.queries(x) @ self.keys(x).mT / 3
        x = x + self.other(torch.softmax(scores, -1)) @ self.values(x)
        return F.mse_loss(self.last(self.quarter(x)), y)


def test_points_are_dropped_as_in_built_in_networks() -> None:
    """The same points under every strategy, others in every step."""
    source = of(Dropping, x=numbers(4, 4, 6), y=numbers(4, 4, 4))
    graph, weights, batch = graph_of(source), double(source), arrays(source[1])
    plan = random_plan(graph, 1, 0)
    expected, held = trained(plan, weights, batch)
    program = emit(plan)
    assert program.count("= dropout(") + program.count("(dropout(") == 3
    losses, found = trained(random_plan(graph, 4, 0), weights, batch)
    np.testing.assert_allclose(losses, expected, rtol=SAME_AS_EACH_OTHER)
    for name, array in held.items():
        np.testing.assert_allclose(found[name], array, rtol=SAME_AS_EACH_OTHER, atol=SAME_AS_EACH_OTHER)
    without = source[0].eval()
    assert abs(without(**source[1]).item() - expected[0]) > 0.01
