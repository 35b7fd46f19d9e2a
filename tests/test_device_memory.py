"""Memory of a device: against the tensors that its program lays out, and against numbers worked out by hand."""

from math import ceil, prod

import numpy as np
import pytest

from pase.costs import OPTIMISER_STATE, layer_memory, memory_bytes, memory_tables, shared_weights, strategy_memory
from pase.costs.memory import LOSS_KINDS, optimiser_state
from pase.device_memory import DeviceMemory, device_memory
from pase.emitter.kinds import KINDS
from pase.errors import CostError
from pase.graph import Access, Axis, Builder, Operator, Part, Role, Window
from pase.graph.operators import conv2d, elementwise, pool2d
from pase.machine import load_machine
from pase.plan import Plan
from pase.planning import problem_of
from pase.runtime.optimisers import OPTIMISERS, make_rule
from pase.worker_parameters import held_weights, optimiser_numbers
from tests.networks import SMALL, small_graph, small_plan
from tests.runtime.networks import small, tied
from tests.runtime.plans import make_plan, random_plan


def _points(operator: Operator, access: Access, splits: dict[str, int]) -> int:
    """Return the points of the largest part of a tensor, axis by axis."""

    def along(extent: int, axis: Axis) -> int:
        match axis:
            case str():
                return ceil(extent / splits[axis])
            case tuple():
                return prod(ceil(operator.extents[dim] / splits[dim]) for dim in axis)
            case Window():
                outs = ceil(operator.extents[axis.out] / splits[axis.out])
                kernel = ceil(operator.extents[axis.kernel] / splits[axis.kernel])
                # From the first point under the first window to the last one under the last.
                return (outs - 1) * axis.stride + (kernel - 1) * axis.dilation + 1
            case Part():
                return ceil(axis.extent / splits[axis.dim])
            case None:
                return extent

    return prod(along(extent, axis) for extent, axis in zip(access.shape, access.axes, strict=True))


def _tensor_by_tensor(plan: Plan) -> DeviceMemory:
    """Return the memory of a plan, one tensor after the other."""
    copies = {(weight.user, weight.user_read) for weight in shared_weights(plan.graph)}
    weights = gradients = activations = buffers = 0
    for operator in plan.graph.operators:
        splits, has_gradient = plan[operator.name].splits, bool(operator.parameters)
        for position, read in enumerate(operator.reads):
            points = _points(operator, read, splits)
            if read.role is Role.PARAMETER:
                gradients += points
                is_copy = (operator.name, position) in copies
                weights, buffers = weights + points * (not is_copy), buffers + points * is_copy
            elif plan.graph.has_gradient(operator, position):
                has_gradient = True
                buffers += 2 * points
            else:
                buffers += points
        if not (operator.kind in KINDS and KINDS[operator.kind].is_loss):
            written = sum(_points(operator, write, splits) for write in operator.writes)
            activations += written * (2 if has_gradient else 1)
    size = plan.graph.word_bytes
    return DeviceMemory(
        weights_bytes=weights * size,
        gradients_bytes=gradients * size,
        activations_bytes=activations * size,
        buffers_bytes=buffers * size,
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("num_devices", "seed"), [(4, 0), (6, 1), (8, 2)])
def test_it_is_that_of_all_tensors(name: str, num_devices: int, seed: int) -> None:
    plan = random_plan(small_graph(name), num_devices, seed)
    assert device_memory(plan) == plan.memory == _tensor_by_tensor(plan)


@pytest.mark.parametrize("name", [*SMALL, "tied", "lstm_lm"])
def test_the_state_of_every_optimiser_is_what_its_rule_keeps(name: str) -> None:
    graph = tied() if name == "tied" else small(name) if name == "lstm_lm" else small_graph(name)
    plan = random_plan(graph, 4, 3)
    weights = held_weights(plan)
    splits = [layer.splits for layer in plan.layers]
    assert set(OPTIMISER_STATE) == set(OPTIMISERS)
    for optimiser in OPTIMISERS:
        found = strategy_memory(graph, splits, optimiser=optimiser)
        assert found.optimiser_bytes == optimiser_numbers(weights, make_rule(optimiser, {})) * graph.word_bytes
        assert found.total_bytes == device_memory(plan).total_bytes + found.optimiser_bytes


def test_losses_are_those_that_programs_end_in() -> None:
    assert {kind for kind, entry in KINDS.items() if entry.is_loss} == LOSS_KINDS


@pytest.mark.parametrize("name", SMALL)
def test_tables_hold_the_memory_of_every_configuration(name: str) -> None:
    """They add up to the memory of any strategy, here of the best and of one at random."""
    problem = problem_of(small_graph(name), 8, load_machine("1080ti"), "paper")
    tables = memory_tables(problem, optimiser="adam")
    assert [len(table) for table in tables] == list(problem.tables.domain_sizes)
    rng = np.random.default_rng(0)
    best = [problem.choice(v, tuple(layer.splits.values())) for v, layer in enumerate(small_plan(name, 8).layers)]
    for choice in (best, [int(rng.integers(k)) for k in problem.tables.domain_sizes]):
        splits = [problem.splits(v, c) for v, c in enumerate(choice)]  # type: ignore[arg-type]
        whole = strategy_memory(problem.graph, splits, optimiser="adam")
        assert sum(table[c] for table, c in zip(tables, choice, strict=True)) == whole.total_bytes
    if name in ("bert_large", "densenet121", "resnet101"):
        assert len({id(table) for table in tables}) < len(tables)


def test_a_layer_that_nothing_trained_comes_before_keeps_no_gradients() -> None:
    """Two poolings alike but for that share neither tables of costs nor of memory."""
    net = Builder("pools")
    x = net.add(elementwise, "scaled", net.input((8, 4, 12, 12)), dims=("b", "c", "h", "w"))
    x = net.add(pool2d, "early", x, kernel=1, stride=1)
    x = net.add(conv2d, "conv", x, out=4, kernel=1)
    x = net.add(pool2d, "late", x, kernel=1, stride=1)
    net.add(elementwise, "last", x, dims=("b", "c", "h", "w"))
    graph = net.build()
    first, second = graph["early"], graph["late"]
    one = np.ones((1, len(first.dims)), dtype=np.int32)
    before, after = (layer_memory(graph, op, one) for op in (first, second))
    assert graph.trained == {"conv", "late", "last"}
    assert 2 * before.activations == after.activations
    assert 2 * before.buffers == after.buffers
    problem = problem_of(graph, 2, load_machine("1080ti"), "paper")
    early, late = graph.index["early"], graph.index["late"]
    assert problem.tables.vertex_table[early] != problem.tables.vertex_table[late]
    assert (2 * memory_tables(problem)[early] == memory_tables(problem)[late]).all()


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(
        CostError, match=r"unknown optimiser 'adem': did you mean .*adam.* known optimisers are adafactor"
    ):
        optimiser_state("adem")


@pytest.mark.parametrize(("num_devices", "seed"), [(4, 0), (6, 1), (12, 2)])
def test_weights_and_outputs_are_those_of_the_cost_model(num_devices: int, seed: int) -> None:
    graph = small("mlp")
    plan = random_plan(graph, num_devices, seed)
    found = device_memory(plan)
    expected = sum(
        memory_bytes(operator, np.array([list(plan[operator.name].splits.values())], dtype=np.int32), word_bytes=4)[0]
        for operator in graph.operators
        if operator.kind != "softmax_loss"
    )
    assert found.weights_bytes + found.gradients_bytes + found.activations_bytes == expected


def test_a_small_network_written_out() -> None:
    """24 points of 12 inputs, layers of 24, 24 and 12; fc2 split in b = 2, n = 2, the others not at all."""
    plan = make_plan(small("mlp"), 4, {"fc2": {"b": 2, "n": 2}})
    found = device_memory(plan)
    weights = 12 * 24 + 24 + (24 * 12 + 12) + 24 * 12 + 12
    assert found.weights_bytes == found.gradients_bytes == 4 * weights
    assert found.activations_bytes == 4 * 2 * (24 * 24 + 12 * 12 + 24 * 12)
    # The data and the labels without gradients; what fc2, fc3 and the softmax read with theirs.
    assert found.buffers_bytes == 4 * (24 * 12 + 24 + 2 * (12 * 24 + 24 * 24 + 24 * 12))
    assert found.total_bytes == 8 * weights + found.activations_bytes + found.buffers_bytes
    with_adam = strategy_memory(plan.graph, [layer.splits for layer in plan.layers], optimiser="adam")
    assert with_adam.total_bytes == found.total_bytes + 8 * weights


def test_a_shared_weight_is_held_once() -> None:
    plan = make_plan(tied(), 4, {})
    found = device_memory(plan)
    assert found.weights_bytes == 4 * (12 * 8 + 12)
    assert found.gradients_bytes == 4 * (3 * 12 * 8 + 12)
    assert device_memory(plan, word_bytes=8).total_bytes == 2 * found.total_bytes
