"""Image networks against published parameter counts, multiply-adds and shapes.

Sources: the networks' papers; torchvision's documentation of its weights ("num_params", and "GFLOPS", which counts
multiply-adds of one image in units of 10^9, three digits after the point).
"""

from collections import Counter
from collections.abc import Mapping

import pytest

from pase.graph import Graph
from pase.models import build
from tests.networks import SMALL


def _multiply_adds(graph: Graph) -> float:
    """Return the multiply-adds of one image."""
    return graph.forward_flop(contractions_only=True) / 2 / dict(graph.arguments)["batch"]  # type: ignore[operator]


def _kinds(graph: Graph) -> Mapping[str, int]:
    return Counter(operator.kind for operator in graph.operators)


def _output(graph: Graph, name: str) -> tuple[int, ...]:
    return graph[name].writes[0].shape[1:]


def _convolution(out: int, channels: int, kernel: int, positions: int, groups: int = 1) -> int:
    """Return the multiply-adds of a square convolution with `positions` x `positions` outputs."""
    return out * channels // groups * kernel**2 * positions**2


@pytest.mark.parametrize(
    ("name", "blocks", "num_parameters", "giga_multiply_adds"),
    [
        ("alexnet", "", 61_100_840, 0.714),
        ("vgg16", "", 138_357_544, 15.470),
        ("vgg19", "", 143_667_240, 19.632),
        ("resnet101", "", 44_549_160, 7.801),
        ("resnet101", "3,4,6,3", 25_557_032, 4.089),  # ResNet-50
        ("densenet121", "", 7_978_856, 2.834),
        ("densenet121", "6,12,32,32", 14_149_480, 3.360),  # DenseNet-169
    ],
)
def test_counts_are_those_of_torchvision(
    name: str, blocks: str, num_parameters: int, giga_multiply_adds: float
) -> None:
    graph = build(name, arguments={"blocks": blocks} if blocks else {})
    assert graph.num_parameters == num_parameters
    assert round(_multiply_adds(graph) / 1e9, 3) == giga_multiply_adds


# -- AlexNet


def test_alexnet_by_hand() -> None:
    graph = build("alexnet")
    # 714.2 million multiply-adds: convolutions on 55, 27, 13, 13 and 13 positions a side, then 6·6·256 = 9216 inputs.
    assert _multiply_adds(graph) == (
        _convolution(64, 3, 11, 55)
        + _convolution(192, 64, 5, 27)
        + _convolution(384, 192, 3, 13)
        + _convolution(256, 384, 3, 13)
        + _convolution(256, 256, 3, 13)
        + 9216 * 4096
        + 4096 * 4096
        + 4096 * 1000
    )
    assert _multiply_adds(graph) == pytest.approx(714.2e6, rel=1e-4)
    assert _kinds(graph) == {"conv2d": 5, "pool2d": 3, "dense": 3, "softmax_loss": 1}


def test_alexnet_s_iteration_spaces() -> None:
    graph = build("alexnet")
    assert graph["conv1"].extents == {"b": 128, "n": 64, "h": 55, "w": 55, "c": 3, "r": 11, "s": 11}
    assert graph["pool2"].extents == {"b": 128, "c": 192, "h": 13, "w": 13, "r": 3, "s": 3}
    assert graph["fc1"].extents == {"b": 128, "n": 4096, "c": 9216}
    assert graph["softmax"].extents == {"b": 128, "n": 1000}


def test_alexnet_in_two_towers() -> None:
    """Krizhevsky et al. 2012: "60 million parameters"; 60,965,224 are those of Caffe's bvlc_alexnet."""
    graph = build("alexnet", arguments={"grouped": "true"})
    assert graph.num_parameters == 60_965_224
    # The paper's section 3.5: kernels of 11x11x3, 5x5x48, 3x3x256, 3x3x192 and 3x3x192; 253,440, 186,624, 64,896,
    # 64,896, 43,264 neurons in the convolutions. (It counts the first as 253,440; 55·55·96 are 290,400.)
    kernels = [graph[f"conv{i}"].reads[1].shape[1:] for i in range(1, 6)]
    assert kernels == [(3, 11, 11), (48, 5, 5), (256, 3, 3), (192, 3, 3), (192, 3, 3)]
    neurons = [graph[f"conv{i}"].writes[0].size // 128 for i in range(1, 6)]
    assert neurons == [290_400, 186_624, 64_896, 64_896, 43_264]
    # Multiply-adds of the five convolutions as in the Eyeriss paper's table of AlexNet (Chen et al. 2016): 105 M,
    # 224 M, 150 M, 112 M and 75 M.
    millions = [round(graph[f"conv{i}"].work_points(graph[f"conv{i}"].work[0]) / 128e6) for i in range(1, 6)]
    assert millions == [105, 224, 150, 112, 75]


# -- LeNet-5


def test_lenet5_by_hand() -> None:
    """LeCun et al. 1998: C1 has 156 trainable parameters, C5 48,120, F6 10,164; C3 with all connections has 2,416."""
    graph = build("lenet5")
    counts = {
        operator.name: sum(access.size for access in operator.parameters)
        for operator in graph.operators
        if operator.parameters
    }
    assert counts == {"conv1": 156, "conv2": 2_416, "fc1": 48_120, "fc2": 10_164, "fc3": 850}
    assert graph.num_parameters == 61_706
    assert _multiply_adds(graph) == 28**2 * 6 * 25 + 10**2 * 16 * 6 * 25 + 400 * 120 + 120 * 84 + 84 * 10
    assert [_output(graph, name) for name in ("conv1", "pool1", "conv2", "pool2")] == [
        (6, 28, 28),
        (6, 14, 14),
        (16, 10, 10),
        (16, 5, 5),
    ]


# -- VGG


def test_vgg_has_sixteen_or_nineteen_layers_with_weights() -> None:
    """Simonyan and Zisserman 2014, tables 1 and 2: configurations D and E, 138 and 144 million parameters."""
    graphs = [build("vgg16"), build("vgg19")]
    for graph, convolutions in zip(graphs, (13, 16), strict=True):
        assert _kinds(graph) == {"conv2d": convolutions, "pool2d": 5, "dense": 3, "softmax_loss": 1}
        outputs = [_output(graph, f"pool{i}") for i in range(1, 6)]
        assert outputs == [(64, 112, 112), (128, 56, 56), (256, 28, 28), (512, 14, 14), (512, 7, 7)]
    # Its size in You et al. 2017, section 6.1.2: 575 MB.
    assert round(4 * graphs[1].num_parameters / 1e6) == 575
    # Three convolutions more than VGG-16: 256 channels on 56x56, 512 on 28x28 and on 14x14.
    more = _convolution(256, 256, 3, 56) + _convolution(512, 512, 3, 28) + _convolution(512, 512, 3, 14)
    assert _multiply_adds(graphs[1]) - _multiply_adds(graphs[0]) == more


# -- GoogLeNet

MODULES = ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")


def test_googlenet_s_vertices_and_depth() -> None:
    """Szegedy et al. 2015, section 5: 22 layers deep when only layers with parameters are counted."""
    graph = build("googlenet")
    assert _kinds(graph) == {"conv2d": 57, "pool2d": 13, "concat": 9, "global_pool": 1, "dense": 1, "softmax_loss": 1}
    depth: dict[str, int] = {}
    for operator in graph.operators:
        before = [depth[edge.producer] for edge in graph.edges if edge.consumer == operator.name]
        depth[operator.name] = max(before, default=0) + bool(operator.parameters)
    assert depth["softmax"] == 22


def test_googlenet_s_sizes_are_those_of_the_paper() -> None:
    """Szegedy et al. 2015, table 1, "output size"."""
    graph = build("googlenet")
    outputs = [_output(graph, name) for name in ("conv1", "pool1", "conv2", "pool2", "pool3", "pool4", "global_pool")]
    assert outputs == [(64, 112, 112), (64, 56, 56), (192, 56, 56), (192, 28, 28), (480, 14, 14), (832, 7, 7), (1024,)]
    channels = [_output(graph, f"inception_{name}_concat")[0] for name in MODULES]
    assert channels == [256, 480, 512, 512, 512, 528, 832, 832, 1024]


def test_googlenet_s_counts() -> None:
    graph = build("googlenet")
    # Caffe's bvlc_googlenet without its two auxiliary classifiers; table 1 has 6.8 million without biases.
    assert graph.num_parameters == 6_998_552
    weights = sum(access.size for o in graph.operators for access in o.parameters if len(access.shape) > 1)
    assert weights == 6_990_272
    # Section 4: "1.5 billion multiply-adds at inference time" is what it was designed for.
    assert round(_multiply_adds(graph) / 1e9, 1) == 1.6
    # Table 1's "ops", in millions. It has 34 for the first convolution, which are those of 2.7 K weights, not of its
    # 7·7·3·64 = 9.4 K; and 54 for 5a, whose row gives 51.
    millions = {
        name: sum(o.work_points(o.work[0]) for o in graph.operators if o.kind == "conv2d" and f"_{name}_" in o.name)
        / 128e6
        for name in MODULES
    }
    printed = {"3a": 128, "3b": 304, "4a": 73, "4b": 88, "4c": 100, "4d": 119, "4e": 170, "5a": 51, "5b": 71}
    assert millions == pytest.approx(printed, abs=0.7)


# -- InceptionV3


def test_inception_v3_has_218_vertices_and_the_softmax() -> None:
    """PaSE section III-C counts 218, as Keras' network has without its input and with ReLUs folded in."""
    graph = build("inception_v3")
    assert _kinds(graph) == {
        "conv2d": 94,
        "batch_norm": 94,
        "pool2d": 13,
        "concat": 15,
        "global_pool": 1,
        "dense": 1,
        "softmax_loss": 1,
    }
    reductions = Counter(o.attribute("reduction", "") for o in graph.operators if o.kind == "pool2d")
    assert reductions == {"max": 4, "mean": 9}


def test_inception_v3_s_counts_are_torchvision_s_without_the_auxiliary_head() -> None:
    graph = build("inception_v3")
    # torchvision documents 27,161,264 with the auxiliary head: 1x1 to 128 and 5x5 to 768 channels, each with a scale
    # and a shift, and a fully connected layer from 768 to 1000.
    auxiliary = (768 * 128 + 2 * 128) + (128 * 768 * 25 + 2 * 768) + (768 * 1000 + 1000)
    assert graph.num_parameters == 27_161_264 - auxiliary == 23_834_568
    # Keras documents 23,851,784: no scales, but two moving statistics for each channel of a normalisation.
    channels = sum(o.extents["c"] for o in graph.operators if o.kind == "batch_norm")
    assert graph.num_parameters - channels + 2 * channels == 23_851_784
    # torchvision's "GFLOPS": 5.713; the paper's section 1 says "5 billion multiply-adds".
    assert round(_multiply_adds(graph) / 1e9, 3) == 5.713


def test_inception_v3_s_sizes_are_those_of_the_paper() -> None:
    """Szegedy et al. 2015, table 1: 35x35x288 before, 17x17x768 and 8x8x1280 after a reduction, 8x8x2048 at the end."""
    graph = build("inception_v3")
    assert [_output(graph, name) for name in ("stem_pool2", "a3_concat", "b_concat", "c4_concat")] == [
        (192, 35, 35),
        (288, 35, 35),
        (768, 17, 17),
        (768, 17, 17),
    ]
    assert [_output(graph, name) for name in ("d_concat", "e2_concat", "global_pool")] == [
        (1280, 8, 8),
        (2048, 8, 8),
        (2048,),
    ]


def test_inception_v3_is_sparse_with_a_few_vertices_of_high_degree() -> None:
    """PaSE section III-C: 12 vertices have a degree of 5 or more, the others less."""
    degrees = [len(neighbours) for neighbours in build("inception_v3").neighbours]
    assert sum(degree >= 5 for degree in degrees) == 12


# -- ResNet-101


def test_resnet101_s_vertices() -> None:
    graph = build("resnet101")
    # 1 + 3·33 layers with weights and 4 shortcuts, each with its normalisation; 33 sums.
    assert _kinds(graph) == {
        "conv2d": 104,
        "batch_norm": 104,
        "elementwise": 33,
        "pool2d": 1,
        "global_pool": 1,
        "dense": 1,
        "softmax_loss": 1,
    }
    # He et al. 2015, table 1.
    outputs = [_output(graph, f"stage{stage}_{block}_add") for stage, block in ((1, 3), (2, 4), (3, 23), (4, 3))]
    assert outputs == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]


# -- DenseNet-121


def test_densenet121_s_vertices() -> None:
    graph = build("densenet121")
    layers = 6 + 12 + 24 + 16
    # 121 layers with weights: 1 + 2·58 + 3 transitions convolve, the last is fully connected.
    assert _kinds(graph) == {
        "conv2d": 120,
        "batch_norm": 121,
        "concat": layers,
        "pool2d": 4,
        "global_pool": 1,
        "dense": 1,
        "softmax_loss": 1,
    }
    # Huang et al. 2016, table 1; channels: 64 + 6·32 = 256, halved, + 12·32 = 512, and so on.
    outputs = [_output(graph, f"block{block}_{last}_concat") for block, last in ((1, 6), (2, 12), (3, 24), (4, 16))]
    assert outputs == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (1024, 7, 7)]


def test_densenet121_joins_every_output_with_every_later_one() -> None:
    """A block of L layers has L (L + 1) / 2 connections besides each layer's own (Huang et al. 2016, section 1)."""
    dense = build("densenet121")
    into_concats = sum(edge.consumer.endswith("_concat") for edge in dense.edges)
    assert into_concats == sum(layers + layers * (layers + 1) // 2 for layers in (6, 12, 24, 16))
    chained = build("densenet121", arguments={"chained": True})
    assert sum(edge.consumer.endswith("_concat") for edge in chained.edges) == 2 * (6 + 12 + 24 + 16)
    assert chained.num_parameters == dense.num_parameters
    assert chained.forward_flop() == dense.forward_flop()


# -- MLP, and the parameters that make networks small


def test_mlp_by_hand() -> None:
    graph = build("mlp", arguments={"inputs": 20, "hidden": 30, "layers": 4, "classes": 5})
    assert [graph[f"fc{i}"].extents for i in range(1, 5)] == [
        {"b": 128, "n": 30, "c": 20},
        {"b": 128, "n": 30, "c": 30},
        {"b": 128, "n": 30, "c": 30},
        {"b": 128, "n": 5, "c": 30},
    ]
    assert graph.num_parameters == 20 * 30 + 30 + 2 * (30 * 30 + 30) + 30 * 5 + 5
    assert _multiply_adds(graph) == 20 * 30 + 2 * 30 * 30 + 30 * 5
    activations = [graph[f"fc{i}"].attribute("activation", "") for i in range(1, 5)]
    assert activations == ["relu", "relu", "relu", ""]


@pytest.mark.parametrize(
    "name",
    [
        *["alexnet", "googlenet", "resnet101"],
        *(pytest.param(name, marks=pytest.mark.full) for name in ["vgg16", "vgg19", "inception_v3"]),
    ],
)
def test_width_divides_every_layer_s_channels(name: str) -> None:
    whole, narrow = build(name), build(name, arguments={"width": 4})
    for before, after in zip(whole.operators, narrow.operators, strict=True):
        if after.kind == "conv2d":
            assert before.extents["n"] == 4 * after.extents["n"]
    # All but the first convolution and the last layer shrink by 16.
    assert _multiply_adds(whole) / _multiply_adds(narrow) == pytest.approx(16, rel=0.3)


def test_classes_change_the_last_layer_alone() -> None:
    names = ("alexnet", "vgg16", "vgg19", "googlenet", "inception_v3", "resnet101", "densenet121", "lenet5", "mlp")
    for name in names:
        graph = build(name, arguments=SMALL[name] | {"classes": 7})
        assert graph["softmax"].extents["n"] == 7
        whole = build(name, arguments=SMALL[name])
        changed = [a.name for a, b in zip(graph.operators, whole.operators, strict=True) if a != b]
        assert changed == [graph.operators[-2].name, "softmax"]
