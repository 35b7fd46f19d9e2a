"""Programs sum the gradient of what several layers read once, as predicted, and train like one device."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest

from pase.graph import Builder, Graph, Operator, uniform
from pase.graph.operators import concat, conv2d, dense, elementwise, global_pool, pool2d, softmax_loss, with_fan_outs
from pase.planning.plan import Plan
from pase.planning.planner import search
from pase.sharding.placement import place
from pase.sharding.traffic import Movement, Summed, bytes_by_movement, flows, layer_movements
from pase.targets.mesh_tensorflow.runtime.reference import reference_training
from tests.networks import slow_machine
from tests.runtime.networks import attentions, mixed, small, tied
from tests.runtime.plans import configurations, make_plan, random_plan
from tests.runtime.test_measure_plans import measured_training, run
from tests.runtime.training import options, parallel_losses


def inception() -> Graph:
    """A module of an Inception network: convolutions of several kernels and a pooling read one tensor."""
    net = Builder("inception")
    x = net.add(conv2d, "stem", net.input((8, 2, 8, 8)), out=8, kernel=1)
    branches = [
        net.add(conv2d, "one", x, out=4, kernel=1),
        net.add(conv2d, "three", x, out=8, kernel=3, padding=1, activation="relu"),
        net.add(conv2d, "five", x, out=4, kernel=(5, 3), padding=(2, 1), bias=False),
        net.add(pool2d, "pooled", x, kernel=3, stride=1, padding=1),
    ]
    y = net.add(concat, "join", *branches)
    halves = [net.add(conv2d, n, y, out=8, kernel=2, stride=2, bias=False) for n in ("down", "shortcut")]
    y = net.add(elementwise, "add", *halves, dims=("b", "c", "h", "w"), activation="tanh")
    y = net.add(dense, "fc", net.add(global_pool, "mean", y), out=(("n", 4),))
    net.add(softmax_loss, "loss", y)
    return net.build()


def dense_block() -> Graph:
    """Layers each of which reads the outputs of all before it, as they are: dense ones, and a sum of all."""
    net = Builder("dense_block")
    x = net.add(dense, "first", net.input((8, 4)), out=(("n", 16),))
    read = [x]
    for number in range(3):
        parts = [net.add(dense, f"d{number}_{i}", y, out=(("n", 16),)) for i, y in enumerate(read)]
        read.append(net.add(elementwise, f"s{number}", *parts, dims=("b", "n"), activation="tanh"))
    y = net.add(concat, "join", *read, dims=("b", "n"), along="n")
    net.add(softmax_loss, "loss", net.add(dense, "fc", y, reduce=("n",), out=(("v", 8),)), dims=("b", "v"))
    return net.build()


NETWORKS: dict[str, Callable[[], Graph]] = {
    "attentions": attentions,
    "dense_block": dense_block,
    "gpt": lambda: small("gpt"),
    "inception": inception,
    "mixed": mixed,
    "resnet101": lambda: small("resnet101"),
    "transformer": lambda: small("transformer"),
}


def followed(
    graph: Graph, operator: Operator, splits: dict[str, dict[str, int]], num_devices: int, reader: int
) -> None:
    """Give a fan-out the layout and the parts of one of its readers, where these fit."""
    edge = [edge for edge in graph.edges if edge.producer == operator.name][reader]
    consumer, own = graph[edge.consumer], splits[edge.consumer]
    read, (over,) = consumer.reads[edge.input], operator.partial_dims(operator.reads[0])
    found = dict.fromkeys(operator.extents, 1)
    for axis, other in zip(operator.reads[0].index_map, read.index_map, strict=False):
        name = getattr(other, "out", other)  # of a window
        if isinstance(axis, str) and isinstance(name, str) and operator.extents[axis] % own[name] == 0:
            found[axis] = own[name]
    parts = prod(own[dim] for dim in consumer.partial_dims(read))
    if num_devices % (prod(found.values()) * parts) == 0:
        splits[operator.name] = found | {over: parts}


def plan_of(model: Graph, num_devices: int, seed: int, *, is_placed: bool = True) -> Plan:
    """A random strategy whose fan-outs follow a reader, and half of the other readers that one too."""
    numbers, graph = random.Random(seed), with_fan_outs(model)
    splits = {operator.name: numbers.choice(configurations(operator, num_devices)) for operator in graph.operators}
    for operator in graph.operators:
        if operator.is_fan_out:
            readers = [graph[edge.consumer] for edge in graph.edges if edge.producer == operator.name]
            chosen = numbers.randrange(len(readers))
            for reader in readers:
                alike = reader.dims == readers[chosen].dims and reader.kind == readers[chosen].kind
                if alike and numbers.random() < 0.7:
                    splits[reader.name] = splits[readers[chosen].name]
            followed(graph, operator, splits, num_devices, chosen)
    if not is_placed:
        devices = {o.name: tuple(numbers.sample(range(num_devices), num_devices)) for o in graph.operators}
    else:
        found = place(graph, num_devices, [splits[operator.name] for operator in graph.operators])
        devices = {operator.name: of_layer for operator, of_layer in zip(graph.operators, found, strict=True)}
    return make_plan(graph, num_devices, splits, devices)


def joint_sums(plan: Plan) -> int:
    """How many readers leave the sum of a gradient, that they would have to make, to a fan-out."""
    count = 0
    for edge in plan.graph.edges:
        if plan.graph[edge.producer].is_fan_out:
            consumer = plan.graph[edge.consumer]
            read = consumer.reads[edge.input]
            parts = prod(plan[edge.consumer].splits[dim] for dim in consumer.partial_dims(read))
            own = [m for m in layer_movements(plan, consumer) if isinstance(m, Summed) and m.read == edge.input]
            count += parts > 1 and not own
    return count


def totals(found: dict[Movement, int]) -> Counter[tuple[str, str]]:
    """Bytes by ends: plans do not say in which pass a layer exchanges what."""
    total = Counter[tuple[str, str]]()
    for movement, size in found.items():
        total[movement.producer, movement.consumer] += size
    return +total


CASES = [
    *(("dense_block", p, seed) for p, seed in ((4, 0), (6, 3))),
    *(("inception", p, seed) for p, seed in ((4, 1), (8, 2))),
    ("gpt", 4, 0),
    ("attentions", 6, 2),
]
SLOW = [("dense_block", 8, 2), ("mixed", 4, 4), ("transformer", 4, 0)]
FULL = [("dense_block", 4, 1), ("inception", 4, 0), ("inception", 8, 3), ("gpt", 8, 1), ("resnet101", 4, 2)]
"""Other strategies of networks above; a residual network's fan-outs are those of the module's two halves."""


def check(plan: Plan, graph: Graph) -> None:
    """One program, in words of 8 bytes: it moves what was predicted, and its losses are those of one device."""
    wide = replace(plan, graph=plan.graph.in_precision(uniform("float64")))
    predicted = totals(bytes_by_movement(flows(wide)))
    traffic, measured, losses = measured_training(wide, keep_alive=True, steps=3, dtype="float64", rate=0.05)
    assert totals(traffic.bytes_by_movement) == predicted
    assert totals(dict(measured.by_movement)) == predicted
    assert measured.elsewhere_bytes == 0
    assert losses == pytest.approx(reference_training(graph, options(3)).losses, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "num_devices", "seed"),
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_programs_do_what_was_predicted_and_train_like_one_device(name: str, num_devices: int, seed: int) -> None:
    check(plan_of(NETWORKS[name](), num_devices, seed), NETWORKS[name]())


def test_the_strategies_that_are_tried_have_sums_that_are_made_for_others() -> None:
    found = {(name, p, seed): joint_sums(plan_of(NETWORKS[name](), p, seed)) for name, p, seed in [*CASES, *SLOW]}
    assert sum(count > 0 for count in found.values()) >= len(found) / 2, found


@pytest.mark.parametrize("seed", range(2))
def test_devices_in_any_order_train_the_same(seed: int) -> None:
    """Where parts lie on other devices than the fan-out's sum has them, each reader sums its own."""
    check(plan_of(dense_block(), 4, seed, is_placed=False), dense_block())


def test_three_projections_sum_their_gradient_once() -> None:
    """b · s · d words over 2 devices, where the release summed them three times."""
    graph = with_fan_outs(small("gpt"))
    heads = {name: {"h": 2} for name in ("layer1_self_q", "layer1_self_k", "layer1_self_v", "layer1_self_attention")}
    plan = make_plan(graph, 2, heads | {"layer1_self_norm_fan_out": {"g": 2}})
    _, measured = run(plan, keep_alive=True)
    batch, steps, width = graph["layer1_self_norm"].writes[0].shape
    backward = {
        movement.consumer: size
        for movement, size in measured.by_movement.items()
        if movement.phase == "backward" and movement.producer == movement.consumer
    }
    assert backward["layer1_self_norm_fan_out"] == 2 * 4 * batch * steps * width
    assert not {"layer1_self_q", "layer1_self_k", "layer1_self_v"} & set(backward)


@pytest.mark.parametrize("split", [{"b": 2}, {"b": 2, "s": 2}, {"s": 2, "d": 2}])
def test_a_tied_weight_is_summed_once(split: dict[str, int]) -> None:
    """By its first user, for all three: 12 by 8 words, each part over the devices that have parts of its gradient."""
    plan = make_plan(tied(), 4, dict.fromkeys(("first", "second", "fc"), split))
    _, measured = run(plan, keep_alive=True)
    own = {
        movement.consumer: size
        for movement, size in measured.by_movement.items()
        if movement.producer == movement.consumer in ("first", "second", "fc") and movement.phase == "backward"
    }
    group = prod(parts for dim, parts in split.items() if dim in ("b", "s"))
    num_groups = 4 // group
    assert own["first"] == num_groups * 2 * (group - 1) * 4 * 12 * 8 // split.get("d", 1)
    assert "second" not in own
    assert own.get("fc", 0) == 0 or "d" in split
    expected = reference_training(tied(), options(3)).losses
    assert parallel_losses(plan, steps=3) == pytest.approx(expected, rel=1e-12)
    assert sum(totals(bytes_by_movement(flows(plan))).values()) == sum(measured.by_movement.values())


@pytest.mark.parametrize("seed", range(3))
def test_users_of_a_tied_weight_lie_as_they_may(seed: int) -> None:
    plan = random_plan(tied(), 4, seed)
    traffic, measured = run(plan, keep_alive=True)
    assert totals(traffic.bytes_by_movement) == totals(bytes_by_movement(flows(plan)))
    assert totals(dict(measured.by_movement)) == totals(traffic.bytes_by_movement)


@pytest.mark.parametrize("name", ["dense_block", "gpt"])
def test_what_the_tables_promise_is_what_is_placed(name: str) -> None:
    """Of the cheapest strategy every reader for which the tables charge no sum leaves it to the fan-out."""
    plan = search(NETWORKS[name](), 8, machine=slow_machine())
    promised = 0
    for edge in plan.graph.edges:
        consumer = plan.graph[edge.consumer]
        if plan.graph[edge.producer].is_fan_out:
            (transfer,) = [t for t in plan[edge.consumer].transfers if t.input == edge.input]
            parts = prod(plan[edge.consumer].splits[dim] for dim in consumer.partial_dims(consumer.reads[edge.input]))
            promised += parts > 1 and transfer.cost == 0
    assert joint_sums(plan) == promised > 0
