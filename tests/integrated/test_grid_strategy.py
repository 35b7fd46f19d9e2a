"""A grid as a strategy: which dims it splits, and that it is costed, chosen and run like any other."""

from itertools import product

import pytest

from pase import Builder, Graph, load
from pase.analysis.baselines.registry import grid_strategy, integrated_grid
from pase.costs import Problem, build_problem, cost_model
from pase.errors import IntegratedError
from pase.graph.operators import conv2d, dense
from pase.machine import Machine, load_machine
from pase.planning.problems import data_parallel_choice
from pase.planning.steps import plan_layers, total_cost
from pase.solver import solve
from pase.studies.integrated.chain import chain_of
from pase.studies.integrated.equations import Role
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.runtime.reference import reference_training
from pase.targets.mesh_tensorflow.runtime.script import train
from pase.targets.programs import emit
from tests.networks import small_graph
from tests.runtime.options import options
from tests.runtime.plans import make_plan
from tests.runtime.training import builder_of

MACHINE = load_machine("1080ti")
ROWS_AND_WEIGHTS = {"conv1": Role.DOMAIN, "conv2": Role.DOMAIN} | dict.fromkeys(("fc1", "fc2", "fc3"), Role.MODEL)


def split(graph: Graph, pr: int, pc: int, roles: dict[str, Role] | None = None) -> dict[str, dict[str, int]]:
    strategy = grid_strategy(graph, pr * pc, pr, pc, roles=roles)
    named = zip(graph.operators, strategy, strict=True)
    assert all(
        list(factors) == list(operator.extents) for operator, factors in zip(graph.operators, strategy, strict=True)
    )
    return {operator.name: {dim: k for dim, k in factors.items() if k > 1} for operator, factors in named}


def problem(graph: Graph, num_devices: int, machine: Machine = MACHINE) -> Problem:
    return build_problem(graph, num_devices, cost_model("paper", machine, num_devices))


def test_weights_are_shared_by_rows_and_the_batch_by_columns() -> None:
    graph = load("alexnet", batch=64)
    found = split(graph, 4, 2)
    weighted = [layer.name for layer in chain_of(graph).layers]
    assert all(found[name] == {"b": 2, "n": 4} for name in weighted)
    assert all(found[name] == {"b": 2, "c": 4} for name in ("pool1", "pool2", "pool5"))
    assert found["softmax"] == {"b": 2, "n": 4}


def test_dense_layers_alone_leave_the_convolutions_to_the_batch() -> None:
    graph = load("alexnet", batch=64)
    found = split(graph, 4, 2, dict.fromkeys(("fc1", "fc2", "fc3"), Role.MODEL))
    assert {found[name]["b"] for name in ("conv1", "pool1", "conv5", "pool5")} == {8}
    assert found["fc1"] == {"b": 2, "n": 4}


def test_rows_of_images_are_split_where_they_divide() -> None:
    found = split(load("lenet5", batch=8), 2, 2, ROWS_AND_WEIGHTS)
    assert found["conv1"] == found["pool1"] == found["conv2"] == {"b": 2, "h": 2}
    assert found["pool2"] == {"b": 2}  # 5 rows
    assert found["fc1"] == {"b": 2, "n": 2}
    # 28 rows over 8: the largest divisor of 8 that divides 28 is 4; 10 rows over 8: 2.
    found = split(load("lenet5", batch=8), 8, 1, ROWS_AND_WEIGHTS)
    assert (found["conv1"], found["pool1"], found["conv2"]) == ({"h": 4}, {"h": 2}, {"h": 2})
    assert (found["fc1"], found["fc2"], found["fc3"]) == ({"n": 8}, {"n": 4}, {"n": 2})


def test_groups_are_split_before_their_channels() -> None:
    net = Builder("grouped")
    net.add(conv2d, "conv", net.input((8, 12, 6, 6)), out=12, kernel=3, padding=1, groups=2)
    assert split(net.build(), 4, 2)["conv"] == {"b": 2, "g": 2, "n": 2}


def test_what_does_not_divide_is_split_less() -> None:
    net = Builder("odd")
    net.add(dense, "fc", net.input((9, 10)), out=(("n", 15),))
    assert split(net.build(), 2, 3)["fc"] == {"b": 3}
    assert split(net.build(), 3, 2)["fc"] == {"n": 3}


@pytest.mark.parametrize(("pr", "pc"), [(4, 4), (1, 4), (0, 8)])
def test_a_grid_of_other_devices_is_refused(pr: int, pc: int) -> None:
    with pytest.raises(IntegratedError, match=rf"^a grid of {pr}x{pc} has {pr * pc} processes, not 8; choose factors"):
        grid_strategy(load("lenet5"), 8, pr, pc)


@pytest.mark.parametrize(
    "name",
    [
        *("alexnet", "lenet5", "mlp"),
        *(pytest.param(each, marks=pytest.mark.full) for each in ("vgg16", "resnet101", "densenet121", "inception_v3")),
    ],
)
@pytest.mark.parametrize("num_devices", [4, 6])
def test_every_grid_is_in_the_search_space_and_the_best_is_chosen(name: str, num_devices: int) -> None:
    space = problem(small_graph(name), num_devices)
    graph = space.graph
    names = {layer.name: layer.is_convolution for layer in chain_of(graph).layers}
    everywhere = dict.fromkeys(names, Role.MODEL)
    late = {layer: Role.MODEL for layer, is_convolution in names.items() if not is_convolution}
    mixed = {layer: Role.DOMAIN if is_convolution else Role.MODEL for layer, is_convolution in names.items()}
    costs = []
    grids = [(r, num_devices // r) for r in range(1, num_devices + 1) if num_devices % r == 0]
    for (pr, pc), roles in product(grids, (everywhere, late, mixed)):
        strategy = grid_strategy(graph, num_devices, pr, pc, roles=roles)
        choice = [space.choice(v, tuple(factors.values())) for v, factors in enumerate(strategy)]
        assert None not in choice, (pr, pc)
        if roles is not mixed:  # these are tried wherever images have rows enough
            costs.append(space.tables.evaluate(tuple(c for c in choice if c is not None)))
    chosen = integrated_grid(space, MACHINE)
    assert chosen is not None
    cost = space.tables.evaluate(chosen)
    assert solve(space.tables).cost * (1 - 1e-9) <= cost <= min(costs)
    assert cost <= space.tables.evaluate(data_parallel_choice(space))


def test_a_large_network_gains_by_a_grid() -> None:
    graph = load("alexnet")
    space = problem(graph, 16)
    chosen = integrated_grid(space, MACHINE)
    assert chosen is not None
    assert space.tables.evaluate(chosen) < space.tables.evaluate(data_parallel_choice(space)) / 2
    splits = [space.splits(vertex, index) for vertex, index in enumerate(chosen)]
    layers = plan_layers(graph, 16, cost_model("paper", MACHINE, 16), splits)
    assert total_cost(layers) == pytest.approx(space.tables.evaluate(chosen))


@pytest.mark.parametrize("name", ["transformer", "rnnlm"])
def test_other_networks_have_none(name: str) -> None:
    assert integrated_grid(problem(small_graph(name), 4), MACHINE) is None


@pytest.mark.parametrize("roles", [None, ROWS_AND_WEIGHTS], ids=["weights", "rows"])
def test_it_trains_like_one_device(roles: dict[str, Role] | None) -> None:
    graph = load("lenet5", batch=8)
    strategy = grid_strategy(graph, 4, 2, 2, roles=roles)
    plan = make_plan(graph, 4, {o.name: factors for o, factors in zip(graph.operators, strategy, strict=True)})
    given = options(2)
    losses = train(builder_of(emit(plan)), given, num_devices=4)
    assert max_relative_difference(losses, reference_training(graph, given).losses) < 1e-12
