"""Memory of a device: against the tensors of programs counted one by one, and against numbers worked out by hand.

Searches of several stages begin with what layers have when a micro-batch begins to go back: weights with the
optimizer's state, what the step is given, and what is kept. The peak is no less than that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import pytest

from pase import search
from pase.costs import OPTIMISER_STATE, StepMemory
from pase.costs.liveness import StepTensors, Timeline, Turn, input_spans
from pase.costs.memory import keeping, optimiser_state
from pase.errors import CostError
from pase.graph import Access, Builder, Graph, Operator, Role, SliceOf, Window, uniform
from pase.graph.functions import LOSSES
from pase.graph.operators import attention, conv2d, dense, elementwise, pool2d, with_fan_outs
from pase.machine import load_machine
from pase.planning.memory_limit import limit_of
from pase.planning.plan import Plan
from pase.planning.problems import problem_of
from pase.sharding.traffic import held_weights, layer_movements, optimiser_numbers
from pase.targets.training.optimisers import OPTIMISERS, make_rule
from tests.networks import SMALL, small_graph
from tests.plain_memory import plain_memory
from tests.runtime.networks import EXCHANGING, mixed, small, tied
from tests.runtime.plans import data_parallel_plan, make_plan, random_plan

Splits = dict[str, int]

NEEDED: dict[str, tuple[tuple[str, ...], bool]] = {
    "dense": (("x",), False), "conv2d": (("x",), False), "embedding": (("x",), False), "lstm": ((), False),
    "batch_norm": (("x",), False), "layer_norm": (("x",), False), "softmax_loss": (("x", "labels"), False),
    "attention": (("q", "k", "v"), False), "add_parameter": ((), False), "concat": ((), False),
    "dropout": ((), False), "global_pool": ((), False),
}  # fmt: skip
"""By kind, docs/method.md: what the backward pass needs of what is read, and whether it needs the result."""

LAID_IN_WINDOWS = object()


class Held(NamedTuple):
    """Bytes when a micro-batch begins to go back: of weights and the optimizer's state; of all else."""

    state: int
    kept: int

    @property
    def total(self) -> int:
        return self.state + self.kept


def strategy_memory(graph: Graph, splits: Sequence[Mapping[str, int]], *, optimiser: str = "sgd") -> Held:
    """Return what the layers of a strategy have."""
    keeps = keeping(graph)
    rows = [
        np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
        for operator, split in zip(graph.operators, splits, strict=True)
    ]
    memory = StepMemory(graph=graph, keeps=keeps, configurations=rows, optimiser=optimiser)
    layers = list(enumerate(memory.layers))
    lasting = sum(int(memory.lasting(v, layer, has_casts=True)[0]) for v, layer in layers)
    waiting = sum(int(memory.waiting(v, layer)[0]) for v, layer in layers)
    copies = sum(table.cost(0, 0) for table in memory.copies if table is not None)
    tensors = StepTensors(graph, keeps, rows)
    given = sum(int(span.size[0]) for _, span in input_spans(Timeline(tensors, [False] * len(rows))))
    return Held(state=lasting - given, kept=given + waiting + int(copies))


def device_memory(plan: Plan, *, optimiser: str = "sgd") -> Held:
    return strategy_memory(plan.graph, [layer.splits for layer in plan], optimiser=optimiser)


def needed(graph: Graph, operator: Operator) -> tuple[tuple[str, ...], bool, int]:
    """Return names of reads, whether the result, and how many more tensors of the result's shape."""
    if not trained(graph, operator.name):
        return (), False, 0
    attributes: dict[str, Any] = dict(operator.attributes)
    activation = attributes.get("activation", "")
    result, more = activation in ("relu", "tanh", "sigmoid"), int(activation == "gelu")
    if operator.is_fan_out:
        readers = [(graph[e.consumer], e.input) for e in graph.edges if e.producer == operator.name]
        return ("x",) if any(r.reads[i].tensor in needed(graph, r)[0] for r, i in readers) else (), False, 0
    if operator.kind == "pool2d":
        # The place of each maximum takes eight bytes.
        places = 8 // graph.precision.itemsize
        return (("x",), False, places) if attributes["reduction"] == "max" else ((), False, 0)
    if operator.kind == "elementwise":
        names = tuple(read.tensor for read in operator.reads)
        match attributes["function"]:
            case "add":
                return (), result, more
            case "multiply":
                return names, result, more
            case "tanh" | "relu" if not activation:
                return (), True, 0
            case function:
                return names, result, more + int(bool(activation) and function in ("tanh", "relu"))
    reads, has_result = NEEDED[operator.kind]
    return reads, has_result or result, more


def trained(graph: Graph, name: str) -> bool:
    """Whether a layer, or any before it, has weights."""
    sources = [e.producer for e in graph.edges if e.consumer == name and is_float(graph, e.consumer, e.input)]
    return bool(graph[name].parameters) or any(trained(graph, source) for source in sources)


def is_float(graph: Graph, name: str, read: int) -> bool:
    return graph[name].reads[read].role is not Role.INDEX


def shape_of_part(operator: Operator, access: Access, splits: Splits) -> Iterator[int]:
    """Yield the extents of the largest part of a tensor, axis by axis."""
    for extent, axis in zip(access.shape, access.index_map, strict=True):
        match axis:
            case str():
                yield ceil(extent / splits[axis])
            case tuple():
                yield prod(ceil(operator.extents[dim] / splits[dim]) for dim in axis)
            case Window():
                outs = ceil(operator.extents[axis.out] / splits[axis.out])
                kernel = ceil(operator.extents[axis.kernel] / splits[axis.kernel])
                # From the first point under the first window to the last one under the last.
                yield (outs - 1) * axis.stride + (kernel - 1) * axis.dilation + 1
            case SliceOf():
                yield ceil(axis.extent / splits[axis.dim])
            case None:
                yield extent


def points(operator: Operator, access: Access, splits: Splits) -> int:
    return prod(shape_of_part(operator, access, splits))


def owners(operator: Operator, access: Access, splits: Splits) -> Any:
    """Return for each element, row by row, which part it is in; what is laid out for windows is like nothing else."""
    labels = np.zeros(access.shape, dtype=np.int64)
    for position, (extent, axis) in enumerate(zip(access.shape, access.index_map, strict=True)):
        if isinstance(axis, Window):
            reach = (operator.extents[axis.out] - 1) * axis.stride + (operator.extents[axis.kernel] - 1) * axis.dilation
            if axis.pad or reach + 1 != extent or splits[axis.out] * splits[axis.kernel] > 1:
                return LAID_IN_WINDOWS
            continue
        dims = (axis,) if isinstance(axis, str) else axis if isinstance(axis, tuple) else ()
        number = np.zeros(1, dtype=np.int64)
        for dim in dims:
            size = operator.extents[dim] // splits[dim]
            own = np.arange(operator.extents[dim]) // size
            number = (number[:, None] * splits[dim] + own[None, :]).reshape(-1)
        along = number if dims else np.zeros(extent, dtype=np.int64)
        labels = labels * (int(along.max()) + 1) + along.reshape(
            [-1 if i == position else 1 for i in range(labels.ndim)]
        )
    _, first, inverse = np.unique(labels.reshape(-1), return_index=True, return_inverse=True)
    return first[inverse]


def lie_alike(one: Any, other: Any) -> bool:
    return one is not LAID_IN_WINDOWS and other is not LAID_IN_WINDOWS and np.array_equal(one, other)


def tensor_by_tensor(plan: Plan) -> Held:
    """Return the memory of a plan from docs/method.md, one tensor after the other."""
    graph = plan.graph
    splits = {layer.name: layer.splits for layer in plan.layers}
    weights = kept = 0
    first_user: dict[str, tuple[Operator, Access]] = {}
    for operator in graph.operators:
        own, name = splits[operator.name], operator.name
        reads, _, more = needed(graph, operator)
        is_trained = trained(graph, name)
        for i, read in enumerate(operator.reads):
            size = points(operator, read, own)
            fed = [e for e in graph.edges if (e.consumer, e.input) == (name, i)]
            if read.role is Role.PARAMETER:
                owner, owned = first_user.setdefault(read.shared or f"{name} {i}", (operator, read))
                if (owner, owned) == (operator, read):
                    weights += size
                elif not lie_alike(
                    shared_parts(owner, owned, read, splits), shared_parts(operator, read, read, splits)
                ):
                    kept += 2 * size
                continue
            if not fed:
                # What the step is given is there; as it is laid out for padded windows once more.
                is_padded = any(isinstance(axis, Window) and axis.pad for axis in read.index_map)
                kept += size * (1 + (read.tensor in reads and is_padded))
        kept += points(operator, operator.writes[0], own) * more
        for tensor in operator.intermediates:
            size = points(operator, Access(tensor="", shape=tensor.shape, index_map=tensor.index_map), own)
            kept += size * tensor.kept * is_trained
    for operator in graph.operators:
        write = operator.writes[0]
        readers = [(graph[e.consumer], e.input) for e in graph.edges if e.producer == operator.name]
        needing = [(r, i) for r, i in readers if r.reads[i].tensor in needed(graph, r)[0]]
        size = points(operator, write, splits[operator.name])
        sizes = [points(r, r.reads[i], splits[r.name]) for r, i in needing]
        if needed(graph, operator)[1] or len(needing) > 1 or operator.is_fan_out:
            there = owners(operator, write, splits[operator.name])
            theirs = [owners(r, r.reads[i], splits[r.name]) for r, i in needing]
            # What a fan-out writes is what it reads.
            kept += size * (not operator.is_fan_out) + sum(
                s for s, o in zip(sizes, theirs, strict=True) if not lie_alike(there, o)
            )
        else:
            kept += sum(sizes)
    size = graph.precision.itemsize
    return Held(state=weights * size, kept=kept * size)


def shared_parts(operator: Operator, access: Access, read: Access, splits: dict[str, Splits]) -> Any:
    """Return the parts of a shared weight in the order of the dims of `read`."""
    order = [access.index_map.index(axis) for axis in read.index_map]
    shape, axes = tuple(access.shape[i] for i in order), tuple(access.index_map[i] for i in order)
    return owners(operator, Access(tensor="", shape=shape, index_map=axes), splits[operator.name])


NETWORKS = [*(name for name in SMALL if name not in ("vgg19", "googlenet", "bert_large")), "lstm_lm"]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("num_devices", "seed"), [(6, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in ((4, 0), (8, 2)))]
)
def test_it_is_that_of_all_tensors(name: str, num_devices: int, seed: int) -> None:
    plan = random_plan(small(name), num_devices, seed)
    assert device_memory(plan) == tensor_by_tensor(plan)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_layers_of_a_plan_and_its_buffers_add_up_to_its_memory(optimiser: str) -> None:
    plan = search("alexnet", 8, optimiser=optimiser)
    assert sum(layer.memory_bytes for layer in plan) == plan.memory.kept_bytes
    assert plan.memory.kept_bytes + plan.memory.buffers_bytes == plan.memory.total_bytes


@pytest.mark.parametrize(("name", "seed"), [("gpt", 0), ("resnet101", 1)])
def test_a_fan_out_is_a_view_where_it_lies_as_what_it_reads(name: str, seed: int) -> None:
    graph = small(name)
    plan = random_plan(with_fan_outs(graph), 4, seed)
    assert len(plan.graph.operators) > len(graph.operators)
    assert device_memory(plan) == tensor_by_tensor(plan)
    # All in one layout: nothing is kept for it.
    before, after = (device_memory(data_parallel_plan(g, 4)) for g in (graph, plan.graph))
    assert after.kept == before.kept


@pytest.mark.parametrize("build", [*EXCHANGING.values(), tied])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_that_of_all_tensors_of_every_kind(build: Any, seed: int) -> None:
    plan = random_plan(build(), 6, seed)
    assert device_memory(plan) == tensor_by_tensor(plan)


@pytest.mark.parametrize("name", ["alexnet", "densenet121", "gpt", "rnnlm", "tied", "lstm_lm"])
def test_the_state_of_every_optimiser_is_what_its_rule_keeps(name: str) -> None:
    graph = tied() if name == "tied" else small(name) if name == "lstm_lm" else small_graph(name)
    plan = random_plan(graph, 4, 3)
    weights = held_weights(plan)
    splits = [layer.splits for layer in plan.layers]
    assert set(OPTIMISER_STATE) == set(OPTIMISERS)
    for optimiser in OPTIMISERS:
        found = strategy_memory(graph, splits, optimiser=optimiser)
        numbers = optimiser_numbers(weights, make_rule(optimiser, {}).slots)
        without = device_memory(plan)
        assert found == Held(state=without.state + numbers * graph.precision.itemsize, kept=without.kept)


def test_losses_are_those_that_programs_end_in() -> None:
    ends = {operator.kind for name in SMALL for operator in small_graph(name).operators if operator.is_loss}
    assert ends == set(LOSSES)


@pytest.mark.parametrize("changes", [{"kind": "own_loss"}, {"body": None}], ids=["own kind", "plan of 0.2.0"])
def test_a_loss_is_one_by_what_it_computes(changes: dict[str, Any]) -> None:
    plan = random_plan(small("mlp"), 4, 1)
    (loss,) = (operator for operator in plan.graph.operators if operator.is_loss)
    told = replace(loss, **changes)
    assert told.is_loss
    graph = replace(plan.graph, operators=(*plan.graph.operators[:-1], told))
    other = replace(plan, graph=graph)
    assert plan.graph.operators[-1] is loss
    assert device_memory(other) == device_memory(plan)
    assert [*layer_movements(other, told)] == [*layer_movements(plan, loss)]
    plain = replace(loss, kind="own", body=None)
    assert device_memory(replace(plan, graph=replace(graph, operators=(*graph.operators[:-1], plain)))) != (
        device_memory(plan)
    )


@pytest.mark.parametrize("name", ["alexnet", "bert_large", "densenet121", "rnnlm"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_no_turn_has_more_than_the_peak(name: str, optimiser: str) -> None:
    """Of all strategies in each turn, and where no bucket of gradients is under way as much in that of the peak."""
    problem = problem_of(small_graph(name), 8, load_machine("1080ti"), "paper")
    limit = limit_of(problem, 0, optimiser)
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(3):
        choice = [int(rng.integers(k)) for k in problem.tables.domain_sizes]
        splits = [problem.splits(v, c) for v, c in enumerate(choice)]
        peak = limit.peak(choice)
        assert peak.bytes == plain_memory(problem.graph, splits, optimiser).peak().bytes
        assert peak.bytes > strategy_memory(problem.graph, splits, optimiser=optimiser).total
        for turn in [peak.turn, *(Turn("product", v) for v in range(0, len(choice), 7)), Turn("update", -1)]:
            there = limit.relaxed(problem.tables, {turn: 1}).usage(choice)
            assert there <= peak.bytes
            differences += [peak.bytes - there] * (turn == peak.turn)
    assert min(differences) == 0
    if name in ("bert_large", "densenet121"):
        usage = limit.usage(Turn("update", -1)).layers
        assert len({id(own) for own in usage}) < len(usage)


def test_a_layer_that_nothing_trained_comes_before_keeps_nothing() -> None:
    """Two poolings alike but for that."""
    net = Builder("pools")
    x = net.add(elementwise, "scaled", net.input((8, 4, 12, 12)), dims=("b", "c", "h", "w"), function="tanh")
    x = net.add(pool2d, "early", x, kernel=1, stride=1)
    x = net.add(conv2d, "conv", x, out=4, kernel=1, bias=False)
    x = net.add(pool2d, "late", x, kernel=1, stride=1)
    net.add(elementwise, "last", x, dims=("b", "c", "h", "w"))
    found = device_memory(make_plan(net.build(), 2, {}))
    tensor = 4 * 8 * 4 * 12 * 12
    # What the step is given and what the convolution reads; what the later pooling reads, and eight bytes for each
    # point that it writes.
    assert found.kept == 5 * tensor
    assert found.state == 4 * 4 * 4


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(
        CostError, match=r"unknown optimiser 'adem': did you mean .*adam.* known optimisers are adafactor"
    ):
        optimiser_state("adem")


def test_a_small_network_written_out() -> None:
    """24 points of 12 inputs, layers of 24, 24 and 12 with relu but the last; fc2 split in b = 2, n = 2, others not."""
    plan = make_plan(small("mlp"), 4, {"fc2": {"b": 2, "n": 2}})
    found = device_memory(plan)
    weights = 12 * 24 + 24 + (24 * 12 + 12) + 24 * 12 + 12
    assert found.state == 4 * weights
    # The data, fc1's result and fc2's copy of half of it, fc2's result and fc3's copy of all of it, logits, labels,
    # and a number for each point.
    kept = 24 * 12 + 24 * 24 + 12 * 24 + 12 * 12 + 24 * 24 + 24 * 12 + 24 + 24
    assert found.kept == 4 * kept
    with_adam = strategy_memory(plan.graph, [layer.splits for layer in plan.layers], optimiser="adam")
    assert with_adam.total == found.total + 8 * weights


def test_what_several_read_in_one_layout_is_kept_once() -> None:
    def network(first: int, second: int) -> int:
        net = Builder("readers")
        x = net.add(dense, "x", net.input((8, 4)), out=(("n", 16),), bias=False)
        left = net.add(dense, "left", x, out=(("n", 6),), bias=False)
        right = net.add(dense, "right", x, out=(("n", 6),), bias=False)
        net.add(elementwise, "sum", left, right, dims=("b", "n"))
        splits = {"x": {"b": 2}, "left": {"b": first}, "right": {"b": second}, "sum": {"b": 2}}
        return device_memory(make_plan(net.build(), 2, splits)).kept

    data, tensor = 4 * 4 * 4, 4 * 4 * 16
    assert network(2, 2) == data + tensor
    assert network(2, 1) == data + tensor + 2 * tensor
    assert network(1, 1) == data + tensor + 4 * tensor


@pytest.mark.parametrize("is_fused", [False, True])
def test_attention_keeps_its_softmax_unless_it_is_fused(is_fused: bool) -> None:
    net = Builder("attention")
    lead = {"lead": ("b", "s"), "reduce": ("d",), "bias": False}
    q, k, v = (
        net.add(dense, name, net.input((2, 16, 8)), out=(("h", 4), ("k", 3)), **lead) for name in ("q", "k", "v")
    )
    y = net.add(attention, "attention", q, k, v, is_fused=is_fused)
    net.add(dense, "o", y, lead=("b", "s"), reduce=("h", "k"), out=(("n", 5),), bias=False)
    found = device_memory(make_plan(net.build(), 1, {}))
    data, head_wide = 2 * 16 * 8, 2 * 16 * 4 * 3
    # Data thrice; q, k, v, and the result, which o reads; a number or a row of the softmax for each query.
    own = 2 * 4 * 16 * (1 if is_fused else 16)
    assert found.kept == 4 * (3 * data + 4 * head_wide + own)


def test_a_shared_weight_is_held_once() -> None:
    found = device_memory(make_plan(tied(), 4, {}))
    assert found.state == 4 * (12 * 8 + 12)
    copied = device_memory(make_plan(tied(), 4, {"second": {"v": 4}}))
    # A quarter of the table, and its gradient.
    assert copied.kept == found.kept + 4 * 2 * 3 * 8
    plan = make_plan(tied(), 4, {})
    wide = replace(plan, graph=plan.graph.in_precision(uniform("float64")))
    # Whole numbers, what the table is looked up by and the labels, keep their type.
    assert device_memory(wide).total == 2 * found.total - 4 * 3 * (4 * 6)


def test_pieces_of_every_shape_are_counted() -> None:
    """Windows, reshapes both ways, means and maxima; every function of points."""
    plan = random_plan(mixed(), 6, 5)
    assert device_memory(plan) == tensor_by_tensor(plan)
