"""The experts' strategies on networks whose right splits are known, and their costs by formulas worked out by hand."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import prod

import pytest

from pase import Graph, Machine, load, load_machine
from pase.analysis.baselines.mcmc import Walk
from pase.analysis.baselines.registry import BASELINES, meshes
from pase.analysis.baselines.rules import transformer_dims
from pase.costs import Problem
from pase.graph import Builder, Scalar
from pase.graph.operators import conv2d, dense, dropout, global_pool, softmax_loss
from pase.models import MODELS
from pase.planning.problems import problem_of
from pase.solver import solve
from tests.networks import SMALL, small_graph

MACHINE = load_machine("1080ti")
WORD = 4


@cache
def _problem(name: str, num_devices: int, arguments: tuple[tuple[str, Scalar], ...] = ()) -> Problem:
    return problem_of(load(name, arguments=dict(arguments)), num_devices, MACHINE, "paper")


def splits_of(problem: Problem, choice: tuple[int, ...] | None) -> dict[str, dict[str, int]]:
    """Return the dims of each layer that are split."""
    assert choice is not None
    return {
        operator.name: {dim: k for dim, k in problem.splits(vertex, choice[vertex]).items() if k > 1}
        for vertex, operator in enumerate(problem.graph.operators)
    }


def _chosen(problem: Problem, baseline: str, machine: Machine = MACHINE) -> dict[str, dict[str, int]]:
    return splits_of(problem, BASELINES[baseline].choose(problem, machine))


def _communication(problem: Problem, choice: tuple[int, ...] | None) -> float:
    """Return what a strategy costs beyond its computation, in bytes: the whole cost less FLOP ÷ p of a balanced one."""
    assert choice is not None
    r = MACHINE.flop_per_byte(problem.num_devices)
    free = problem_of(problem.graph, problem.num_devices, _without_links(), "paper")
    return (problem.tables.evaluate(choice) - free.tables.evaluate(choice)) / r


def _without_links() -> Machine:
    """Return a machine on which communication costs next to nothing."""
    return replace(MACHINE, levels=tuple(replace(level, bandwidth_bytes_per_s=1e300) for level in MACHINE.levels))


def _all_reduce(size_words: float, group: int) -> float:
    return 2 * (group - 1) / group * size_words * WORD


# -- to what they apply

APPLIES = {
    "owt": {"alexnet", "inception_v3", "lenet5", "vgg16", "vgg19", "googlenet", "resnet101", "densenet121"},
    "rnn": {"rnnlm"},
    "mesh_tensorflow": {"transformer", "transformer_big", "bert_large", "gpt"},
    "megatron": {"transformer", "transformer_big", "bert_large", "gpt"},
    "integrated_grid": {
        *("alexnet", "inception_v3", "lenet5", "vgg16", "vgg19", "googlenet", "resnet101", "densenet121", "mlp")
    },
    "data_parallel": set(MODELS),
    "mcmc": set(MODELS),
}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[pytest.mark.full] if model in ("vgg19", "googlenet", "transformer_big") else [])
        for model in SMALL
    ],
)
def test_experts_apply_to_the_networks_that_they_are_for(model: str) -> None:
    problem = problem_of(small_graph(model), 4, MACHINE, "paper")
    assert set(APPLIES) == set(BASELINES)
    for name in APPLIES:
        if name != "mcmc":
            choice = BASELINES[name].choose(problem, MACHINE)
            assert (choice is not None) == (model in APPLIES[name]), name


@pytest.mark.parametrize("num_devices", [1, 6, 100])
@pytest.mark.parametrize("model", ["alexnet", "rnnlm", "transformer"])
def test_any_number_of_devices_has_every_strategy(model: str, num_devices: int) -> None:
    """Where nothing divides, nothing is split; no rule makes more parts than there are devices."""
    problem = problem_of(small_graph(model), num_devices, MACHINE, "paper")
    for name in [name for name, models in APPLIES.items() if model in models]:
        choice = BASELINES[name].choose(problem, MACHINE)
        for split in splits_of(problem, choice).values():
            assert num_devices % prod(split.values()) == 0


# -- data parallelism


@pytest.mark.parametrize("num_devices", [8, 128])
@pytest.mark.parametrize("model", ["alexnet", "rnnlm"])
def test_data_parallelism_reduces_every_weight_once(model: str, num_devices: int) -> None:
    batch = (("batch", 128),)
    problem = _problem(model, num_devices, batch)
    choice = BASELINES["data_parallel"].choose(problem, MACHINE)
    assert all(split == {"b": num_devices} for split in splits_of(problem, choice).values())
    expected = _all_reduce(problem.graph.num_parameters, num_devices)
    assert _communication(problem, choice) == pytest.approx(expected, rel=1e-9)


# -- one weird trick

ALEXNET_OWT_8 = {
    **{name: {"b": 8} for name in ("conv1", "pool1", "conv2", "pool2", "conv3", "conv4", "conv5", "pool5")},
    **{name: {"n": 8} for name in ("fc1", "fc2", "fc3", "softmax")},
}


def test_one_weird_trick_on_alexnet() -> None:
    assert _chosen(_problem("alexnet", 8), "owt") == ALEXNET_OWT_8


def test_classes_that_do_not_divide_are_split_as_far_as_they_do() -> None:
    """PaSE, section IV-D: only the out-channels are split. Of 1,000 classes 8 parts are the most that 32 allows."""
    found = _chosen(_problem("alexnet", 32), "owt")
    assert [found[name] for name in ("conv5", "fc1", "fc2", "fc3", "softmax")] == [
        {"b": 32},
        {"n": 32},
        {"n": 32},
        {"n": 8},
        {"n": 8},
    ]


def test_what_one_weird_trick_costs_on_alexnet() -> None:
    """Gradients of the convolutions; inputs of dense layers gathered, and their gradients summed; softmax's sums."""
    p, batch = 8, 128
    problem = _problem("alexnet", p)
    weights = sum(
        n * (c * k * k + 1) for n, c, k in ((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))
    )
    inputs = batch * (9216 + 4096 + 4096)
    expected = (
        _all_reduce(weights, p) + (p - 1) / p * inputs * WORD + _all_reduce(inputs, p) + _all_reduce(3 * batch, p)
    )
    assert _communication(problem, BASELINES["owt"].choose(problem, MACHINE)) == pytest.approx(expected, rel=1e-9)


def test_a_dense_layer_before_a_convolution_belongs_to_the_convolutional_part() -> None:
    """A gate as in squeeze-and-excitation networks; layers behind the classifier's follow it."""
    net = Builder("gated")
    x = net.add(conv2d, "conv1", net.input((8, 4, 8, 8)), out=8, kernel=3, padding=1)
    x = net.reshape(net.add(global_pool, "pool", x), (8, 8))
    x = net.reshape(net.add(dense, "gate", x, out=(("n", 64),)), (8, 1, 8, 8))
    x = net.add(conv2d, "conv2", x, out=4, kernel=3, padding=1)
    x = net.reshape(net.add(global_pool, "pool2", x), (8, 4))
    x = net.add(dense, "fc1", x, out=(("n", 16),))
    x = net.add(dropout, "drop", x, dims=("b", "n"), rate=0.5)
    x = net.add(dense, "fc2", x, out=(("n", 8),))
    net.add(softmax_loss, "softmax", x)
    problem = problem_of(net.build(), 4, MACHINE, "paper")
    found = _chosen(problem, "owt")
    assert found == {
        **{name: {"b": 4} for name in ("conv1", "pool", "gate", "conv2", "pool2")},
        **{name: {"n": 4} for name in ("fc1", "drop", "fc2", "softmax")},
    }


# -- recurrent networks


@pytest.mark.parametrize(("num_devices", "layers", "lstm"), [
    (8, 2, {"l": 2, "b": 4}),
    (8, 4, {"l": 4, "b": 2}),
    (8, 8, {"l": 8}),
    (4, 8, {"l": 4}),
    (8, 6, {"l": 2, "b": 4}),
    (6, 3, {"l": 3, "b": 2}),
])  # fmt: skip
def test_recurrent_layers_are_a_pipeline_and_the_rest_is_data_parallel(
    num_devices: int, layers: int, lstm: Mapping[str, int]
) -> None:
    arguments = {**SMALL["rnnlm"], "batch": 48, "layers": layers}
    found = _chosen(_problem("rnnlm", num_devices, tuple(arguments.items())), "rnn")
    assert found == {**{name: {"b": num_devices} for name in ("embedding", "fc", "softmax")}, "lstm": lstm}


@pytest.mark.parametrize("layers", [0, 1])
def test_one_recurrent_layer_is_no_pipeline(layers: int) -> None:
    problem = _problem("rnnlm", 4, tuple({**SMALL["rnnlm"], "layers": layers}.items()))
    assert BASELINES["rnn"].choose(problem, MACHINE) is None


# -- Transformers


def _mesh(problem: Problem, model_ways: int) -> tuple[int, ...]:
    dims = transformer_dims(problem.graph)
    assert dims is not None
    (choice,) = meshes(problem, dims, [model_ways])
    return choice


def _transformer_layer(name: str, n: int, m: int, *attentions: str) -> dict[str, dict[str, int]]:
    by_heads = [f"{name}_{a}_{part}" for a in attentions for part in ("q", "k", "v", "attention", "o")]
    whole = [f"{name}_{part}_{what}" for part in (*attentions, "ff") for what in ("add", "norm")]
    return {
        **{layer: {"b": n, "h": m} for layer in by_heads},
        **{layer: {"b": n} for layer in whole},
        **{f"{name}_ff_{i}": {"b": n, "e": m} for i in (1, 2)},
    }


@pytest.mark.parametrize(("n", "m"), [(4, 8), (16, 2), (8, 4)])
def test_the_mesh_of_a_transformer(n: int, m: int) -> None:
    """Mesh-TensorFlow: the batch of all layers n ways; vocabulary, feed-forward hidden units and heads m ways."""
    problem = _problem("transformer", n * m, (("layers", 2),))
    expected = {name: {"b": n, "v": m} for name in ("source_embedding", "target_embedding", "fc", "softmax")}
    for i in (1, 2):
        expected |= _transformer_layer(f"encoder{i}", n, m, "self") | _transformer_layer(
            f"decoder{i}", n, m, "self", "cross"
        )
    assert splits_of(problem, _mesh(problem, m)) == expected | {
        # The gradients of what the projections read arrive in as many parts as there are groups of heads.
        operator.name: {"b": n, "g": m}
        for operator in problem.graph.operators
        if operator.is_fan_out
    }


def test_the_best_mesh_of_the_transformer_has_the_papers_sizes() -> None:
    """Table II, p = 32: attention b 16 h 2, feed forward b 16 e 2; and no other mesh is cheaper."""
    problem = _problem("transformer", 32)
    chosen = BASELINES["mesh_tensorflow"].choose(problem, MACHINE)
    found = splits_of(problem, chosen)
    assert found["encoder1_self_attention"] == {"b": 16, "h": 2}
    assert found["decoder6_ff_1"] == found["decoder6_ff_2"] == {"b": 16, "e": 2}
    costs = {m: problem.tables.evaluate(_mesh(problem, m)) for m in (1, 2, 4, 8, 16, 32)}
    assert min(costs, key=lambda m: costs[m]) == 2
    assert chosen is not None
    assert problem.tables.evaluate(chosen) == costs[2]


def test_the_best_mesh_of_the_transformer_is_a_local_minimum() -> None:
    """No change of one layer improves it, though the optimum is 6 % cheaper: what PaSE says of random searches."""
    problem = _problem("transformer", 32)
    choice = _mesh(problem, 2)
    walk = Walk(problem.tables, choice)
    for vertex, size in enumerate(problem.tables.domain_sizes):
        assert min(walk.change(vertex, index) for index in range(size)) >= -1e-9 * walk.cost
    assert solve(problem.tables).cost < 0.95 * walk.cost


def test_small_tables_are_no_vocabulary_and_a_prime_one_is_not_split() -> None:
    bert = splits_of(_problem("bert_large", 8), _mesh(_problem("bert_large", 8), 4))
    assert (bert["tokens"], bert["segments"]) == ({"b": 2, "v": 2}, {"b": 2})  # 30,522 = 2 · 15,261; 2 segments
    assert (bert["head_dense"], bert["head_norm"], bert["fc"]) == ({"b": 2}, {"b": 2}, {"b": 2, "v": 2})
    gpt = splits_of(_problem("gpt", 8), _mesh(_problem("gpt", 8), 4))
    assert gpt["tokens"] == gpt["fc"] == gpt["softmax"] == {"b": 2}  # 50,257 is prime
    assert gpt["layer12_self_q"] == {"b": 2, "h": 4}


@pytest.mark.parametrize("ways", [2, 4])
def test_a_transformer_layer_sums_four_activations(ways: int) -> None:
    """As Shoeybi et al. count (section 3): what the output projection and the second feed-forward layer make, forward;
    what the three projections read, and what the first feed-forward layer reads, backward.
    """
    shape = {"vocabulary": 64, "steps": 32, "model_width": 64, "heads": 4, "batch": 8}
    costs = []
    for layers in (1, 2):
        problem = _problem("gpt", ways, (*shape.items(), ("layers", layers)))
        costs.append(_communication(problem, _mesh(problem, ways)))
    assert costs[1] - costs[0] == pytest.approx(4 * _all_reduce(8 * 32 * 64, ways), rel=1e-9)


def test_megatron_stays_within_a_node_and_divides_all_heads() -> None:
    """12 heads: 8 ways are too many, and 4 devices of a node are a bound of their own. A batch of one forces it."""
    arguments = (("layers", 1), ("batch", 1))
    problem = _problem("gpt", 8, arguments)
    assert _chosen(problem, "megatron")["layer1_self_q"] == {"h": 4}
    small_nodes = replace(MACHINE, levels=(replace(MACHINE.levels[0], num_devices=2), *MACHINE.levels[1:]))
    assert _chosen(problem, "megatron", small_nodes)["layer1_self_q"] == {"h": 2}
    # Mesh-TensorFlow's experts know no nodes, and what 8 ways do not divide is split 4 ways.
    assert splits_of(problem, _mesh(problem, 8))["layer1_self_q"] == {"h": 4}
    assert splits_of(problem, _mesh(problem, 8))["layer1_ff_1"] == {"e": 8}


def test_megatron_is_never_cheaper_than_the_best_mesh() -> None:
    """Its strategies are some of the meshes."""
    for p in (4, 64):
        problem = _problem("transformer", p, (("layers", 2),))
        costs = [
            problem.tables.evaluate(choice)
            for name in ("megatron", "mesh_tensorflow", "data_parallel")
            if (choice := BASELINES[name].choose(problem, MACHINE)) is not None
        ]
        assert costs[0] >= costs[1]
        assert costs[2] >= costs[1]


def test_layers_are_told_by_what_they_do_not_by_their_names() -> None:
    """The same network under other names, of layers and of dims, is split the same way."""
    for name, model in (("owt", "alexnet"), ("mesh_tensorflow", "transformer"), ("rnn", "rnnlm")):
        graph = small_graph(model)
        problem, other = (problem_of(g, 8, MACHINE, "paper") for g in (graph, _renamed(graph)))
        first, second = _chosen(problem, name), _chosen(other, name)
        assert [*first.values()] == [*second.values()]
        assert first.keys().isdisjoint(second)


def _renamed(graph: Graph) -> Graph:
    names = {operator.name: f"x{i}" for i, operator in enumerate(graph.operators)}
    return replace(
        graph,
        operators=tuple(replace(operator, name=names[operator.name]) for operator in graph.operators),
        edges=tuple(
            replace(edge, producer=names[edge.producer], consumer=names[edge.consumer]) for edge in graph.edges
        ),
    )
