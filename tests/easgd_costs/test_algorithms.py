"""The registry beside that of the trainings, and the messages of networks."""

import pytest

from pase import Builder, load, load_machine
from pase.easgd.algorithms import ALGORITHMS as TRAINED
from pase.errors import MachineError, TrainingError
from pase.graph.operators import softmax_loss
from pase.models import MODELS
from pase.studies.easgd_costs import (
    ALGORITHMS,
    Computation,
    computation_of,
    platform_of,
    step_flop,
    weights_of,
)


def test_names_are_those_that_train_and_the_one_that_is_not_overlapped() -> None:
    assert set(ALGORITHMS) == {*TRAINED, "original-easgd-star"}
    for name, trained in TRAINED.items():
        costed = ALGORITHMS[name]
        assert costed.exchange.value == trained.exchange.value
        assert costed.place.value == trained.place.value
        assert costed.title == trained.title


@pytest.mark.parametrize(
    ("name", "num_arrays"),
    [
        ("vgg19", 19),
        ("alexnet", 8),
        ("lenet5", 5),
        # 57 convolutions and the classifier.
        ("googlenet", 58),
        # A scale and a shift go together: 104 convolutions, as many normalisations, the classifier.
        ("resnet101", 104 + 104 + 1),
    ],
)
def test_one_array_for_each_kernel_with_its_bias(name: str, num_arrays: int) -> None:
    graph = load(name)
    found = weights_of(graph)
    assert found.num_arrays == num_arrays == found.num_messages(packed=False)
    assert found.num_bytes == 4 * graph.num_parameters
    assert found.num_messages(packed=True) == 1


def test_a_weight_that_two_layers_share_goes_once() -> None:
    tied, untied = (
        load("transformer", arguments={"layers": 1, "vocabulary": 50, "tied": tied, "steps": 4})
        for tied in (True, False)
    )
    # Source, target and projection share one matrix.
    assert weights_of(untied).num_arrays - weights_of(tied).num_arrays == 2
    assert weights_of(tied).num_bytes == 4 * tied.num_parameters


def test_a_network_without_weights_is_refused() -> None:
    net = Builder("nothing")
    net.add(softmax_loss, "softmax", net.input((4, 8)))
    with pytest.raises(TrainingError, match="model 'nothing' has no weights, so there is nothing to exchange"):
        weights_of(net.build())


def test_a_step_of_dense_layers_in_flop_by_hand() -> None:
    """Two FLOP a multiply-add forward, as many for each gradient; the first layer's input needs none."""
    graph = load("mlp", batch=2, arguments={"inputs": 3, "hidden": 5, "layers": 2, "classes": 4})
    products = 2 * 2 * (2 * 3 * 5) + 3 * 2 * (2 * 5 * 4)
    assert products <= step_flop(graph) <= 1.6 * products  # biases, ReLU and softmax besides


def test_the_step_of_a_large_network_is_three_times_its_forward_pass() -> None:
    graph = load("vgg19", batch=4)
    forward = graph.forward_flop(contractions_only=True)
    first = 2 * 4 * 64 * 27 * 224**2  # its gradient of the images is not needed
    assert step_flop(graph) == pytest.approx(3 * forward - first, rel=0.01)
    knl = load_machine("knl-fdr")
    found = computation_of(graph, knl)
    assert (found.time_s, found.has_update) == (step_flop(graph) / 6.0928e12, False)
    assert "peak of Intel Xeon Phi 7250" in found.source


def test_a_cluster_has_one_link_and_updates_at_the_speed_of_its_memory() -> None:
    graph = load("vgg19", batch=1)
    weights, knl = weights_of(graph), load_machine("knl-fdr")
    found = platform_of(knl, 64, weights, computation_of(graph, knl))
    assert found.worker_link == found.host_link
    assert (found.worker_link.latency_s, found.worker_link.s_per_byte, found.data_s) == (0.7e-6, 0.2e-9, 0)
    assert found.worker_pass_s == found.host_pass_s == weights.num_bytes / 475e9
    measured = Computation(time_s=2.0, source="given", has_update=True)
    assert platform_of(knl, 64, weights, measured).worker_pass_s == 0
    assert platform_of(knl, 64, weights, measured).host_pass_s == weights.num_bytes / 475e9
    with pytest.raises(MachineError, match="is 9688, at the outermost level 'aries', and 10000 were asked for"):
        platform_of(load_machine("cori-knl"), 10000, weights, measured)


def test_every_built_in_network_has_weights() -> None:
    assert {"googlenet", "vgg19"} <= set(MODELS)
