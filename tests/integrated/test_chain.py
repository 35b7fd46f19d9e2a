"""What is read off a graph: AlexNet's sizes worked out by hand, other networks, and what is refused."""

from pathlib import Path

import onnx
import pytest

from pase import Builder, load
from pase.errors import IntegratedError
from pase.graph.operators import conv2d, dense, pool2d
from pase.studies.integrated.chain import CONVENTIONS, Options, chain_of, with_conventions
from tests.importers.onnx_models import convolutional
from tests.integrated.networks import alexnet, alexnet_graph

# d_(i-1), d_i and |W_i| of the network of 2012 on images of 224: input after pooling, output before it.
ALEXNET = {
    "conv1": (224 * 224 * 3, 55 * 55 * 96, 11 * 11 * 3 * 96),
    "conv2": (27 * 27 * 96, 27 * 27 * 256, 5 * 5 * 48 * 256),
    "conv3": (13 * 13 * 256, 13 * 13 * 384, 3 * 3 * 256 * 384),
    "conv4": (13 * 13 * 384, 13 * 13 * 384, 3 * 3 * 192 * 384),
    "conv5": (13 * 13 * 384, 13 * 13 * 256, 3 * 3 * 192 * 256),
    "fc1": (6 * 6 * 256, 4096, 6 * 6 * 256 * 4096),
    "fc2": (4096, 4096, 4096 * 4096),
    "fc3": (4096, 1000, 4096 * 1000),
}


def test_the_sizes_of_alexnet() -> None:
    chain = alexnet()
    assert {x.name: (x.input_words, x.output_words, x.num_weights) for x in chain.layers} == ALEXNET
    assert chain.num_weights == 60_954_656
    assert chain.num_unweighed == 96 + 256 + 384 + 384 + 256 + 4096 + 4096 + 1000
    assert [x.source for x in chain.layers] == ["", *list(ALEXNET)[:-1]]
    assert chain.batch == 4
    second = chain.layers[1]
    assert (second.kernel, second.stride, second.num_groups) == ((5, 5), (1, 1), 2)
    assert (second.input_shape, second.output_shape) == ((96, 27, 27), (256, 27, 27))
    assert (second.input_row_words, second.output_row_words, second.num_rows) == (27 * 96, 27 * 256, 27)


@pytest.mark.parametrize(
    ("convention", "layer", "expected"),
    [
        ("output_before_pooling", "conv1", {"output_words": 27 * 27 * 96}),
        ("output_before_pooling", "conv5", {"output_words": 6 * 6 * 256}),
        ("output_before_pooling", "fc3", {"output_words": 1000}),
        ("input_after_pooling", "conv2", {"input_words": 55 * 55 * 96}),
        ("input_after_pooling", "conv1", {"input_words": 224 * 224 * 3}),
        ("real_extents", "conv1", {"output_words": 56 * 56 * 96, "output_row_words": 56 * 96}),
        ("grouped", "conv2", {"num_weights": 5 * 5 * 96 * 256}),
        ("grouped", "conv3", {"num_weights": 3 * 3 * 256 * 384}),
        ("biases", "fc3", {"num_weights": 4096 * 1000 + 1000}),
        ("next_input_is_output", "conv1", {"output_row_words": 27 * 96}),
        # The dense layer after it reads images of 6 x 6, flattened.
        ("next_input_is_output", "conv5", {"output_row_words": 6 * 256}),
    ],
)
def test_a_convention_changes_a_layer(convention: str, layer: str, expected: dict[str, int]) -> None:
    options = with_conventions({convention: not getattr(Options(), convention)})
    (found,) = (x for x in chain_of(alexnet_graph(), options).layers if x.name == layer)
    assert {name: getattr(found, name) for name in expected} == expected


def test_conventions_have_texts_and_unknown_ones_are_refused() -> None:
    assert len(CONVENTIONS) == len(Options.__dataclass_fields__) - 1
    assert all("; no: " in text for text in CONVENTIONS.values())
    with pytest.raises(IntegratedError, match=r"unknown convention 'group': did you mean 'grouped'"):
        with_conventions({"group": True})


def test_branches_have_the_layers_before_them_as_sources() -> None:
    chain = chain_of(load("resnet101", batch=2, arguments={"image": 64, "width": 8, "blocks": "1,1,1,1"}))
    sources = {x.name: x.source for x in chain.layers}
    assert [name for name, source in sources.items() if not source] == ["stem_conv"]
    assert sources["stage1_1_1_conv"] == sources["stage1_1_shortcut_conv"] == "stem_conv"


def test_an_imported_model_is_read_likewise(tmp_path: Path) -> None:
    onnx.save(convolutional(17), tmp_path / "model.onnx")
    convolution, classifier = chain_of(load(str(tmp_path / "model.onnx"))).layers
    assert (convolution.is_convolution, convolution.stride, convolution.source) == (True, (2, 2), "")
    assert convolution.num_weights == 9 * convolution.input_shape[0] * convolution.output_shape[0]
    assert (classifier.is_convolution, classifier.source) == (False, convolution.name)
    assert classifier.num_weights == classifier.input_words * classifier.output_words


def test_a_shared_weight_counts_once() -> None:
    net = Builder("tied")
    x = net.add(dense, "first", net.input((4, 8)), out=(("n", 8),), shared="w")
    net.add(dense, "second", x, out=(("n", 8),), shared="w")
    assert [x.num_weights for x in chain_of(net.build()).layers] == [64, 0]


def test_a_sequence_of_dense_layers_counts_its_positions() -> None:
    net = Builder("positions")
    net.add(dense, "fc", net.input((4, 10, 8)), lead=("b", "s"), out=(("n", 6),))
    (layer,) = chain_of(net.build()).layers
    assert (layer.input_words, layer.output_words, layer.num_weights) == (80, 60, 48)


@pytest.mark.parametrize(
    ("model", "layer"),
    [("gpt", "positions"), ("bert_large", "positions")],
)
def test_other_weighted_layers_are_refused_by_name(model: str, layer: str) -> None:
    with pytest.raises(
        IntegratedError, match=rf"^layer '{layer}' holds weights and is of kind add_parameter; .* alone"
    ):
        chain_of(load(model))


def test_a_network_without_weights_is_refused() -> None:
    net = Builder("pooling")
    net.add(pool2d, "pool", net.input((2, 3, 8, 8)), kernel=2, stride=2)
    with pytest.raises(IntegratedError, match=r"^model 'pooling' has no layer with weights; expected convolutions or"):
        chain_of(net.build())


def test_a_layer_without_a_batch_is_refused() -> None:
    net = Builder("batchless")
    net.add(dense, "fc", net.input((4, 8)), lead=("s",), out=(("n", 8),))
    with pytest.raises(
        IntegratedError, match=r"^layer 'fc' has no batch dim that its 'x' of shape \(4, 8\) divides by"
    ):
        chain_of(net.build())


def test_strides_of_two_dims_are_kept_apart() -> None:
    net = Builder("oblong")
    net.add(conv2d, "conv", net.input((2, 4, 30, 20)), out=6, kernel=(5, 3), stride=(2, 1), padding=(2, 1))
    (layer,) = chain_of(net.build()).layers
    assert (layer.output_shape, layer.kernel, layer.stride) == ((6, 15, 20), (5, 3), (2, 1))
    assert (layer.input_row_words, layer.output_row_words) == (4 * 20, 6 * 20)


def test_the_layers_of_an_lstm_and_an_embedding() -> None:
    """Four gates of 12 units from 12 inputs and 12 units of the step before, in each of 4 steps."""
    graph = load("rnnlm", batch=8, arguments={"vocabulary": 24, "units": 12, "steps": 4, "layers": 2})
    chain = chain_of(graph)
    sizes = {x.name: (x.input_words, x.inner_words, x.output_words, x.num_weights) for x in chain.layers}
    assert sizes == {
        "embedding": (4, 0, 48, 24 * 12),
        "lstm/1": (48, 48, 48, 4 * 12 * (12 + 12)),
        "lstm/2": (48, 48, 48, 4 * 12 * (12 + 12)),
        "fc": (48, 0, 96, 12 * 24),
    }
    assert [(x.source, x.num_steps) for x in chain.layers] == [("", 1), ("embedding", 4), ("lstm/1", 4), ("lstm/2", 1)]
    assert [x.work_per_sample for x in chain.layers] == [2 * w * 4 for w in (288, 1152, 1152, 288)]
    assert chain.num_unweighed == 2 * 4 * 12 + 24


def test_the_papers_images_of_227_need_no_padding() -> None:
    graph = load("alexnet", batch=2, arguments={"grouped": True, "image": 227, "padding": 0})
    (first, second, *_) = chain_of(graph).layers
    assert (first.input_words, first.output_shape, second.input_shape) == (227 * 227 * 3, (96, 55, 55), (96, 27, 27))
    sizes = [(x.output_words, x.num_weights) for x in chain_of(graph).layers]
    assert sizes == [(d, w) for _, d, w in ALEXNET.values()]
