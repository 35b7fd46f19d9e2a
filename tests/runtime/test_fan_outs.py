"""Programs sum the gradient of what several layers read once, as predicted, and train like one device."""

import random
from collections.abc import Callable
from functools import cache
from math import prod

import pytest

from pase.graph import Graph, Operator
from pase.graph.operators import with_fan_outs
from pase.planning.plan import Plan
from pase.planning.planner import search
from pase.sharding.placement import place
from pase.sharding.traffic import Summed, layer_movements
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult, reference_training
from tests.networks import slow_machine
from tests.runtime.networks import attentions, dense_block, inception, mixed, small, tied
from tests.runtime.options import options
from tests.runtime.plans import configurations, make_plan, random_plan
from tests.runtime.training import check, check_bytes, trained

NETWORKS: dict[str, Callable[[], Graph]] = {
    "attentions": attentions,
    "dense_block": dense_block,
    "gpt": lambda: small("gpt"),
    "inception": inception,
    "mixed": mixed,
    "resnet101": lambda: small("resnet101"),
    "tied": tied,
    "transformer": lambda: small("transformer"),
}


@cache
def reference(name: str) -> ReferenceResult:
    return reference_training(NETWORKS[name](), options(3))


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


CASES = [
    *(("dense_block", 6, 3), ("inception", 4, 1), ("attentions", 6, 2)),
]
FULL = [
    *(("dense_block", 4, 0), ("inception", 8, 2), ("gpt", 4, 0)),
    *(("dense_block", 8, 2), ("mixed", 4, 4), ("transformer", 4, 0), ("dense_block", 4, 1), ("inception", 4, 0)),
    *(("inception", 8, 3), ("gpt", 8, 1), ("resnet101", 4, 2)),
]
"""Other strategies of networks above; a residual network's fan-outs are those of the module's two halves."""


@pytest.mark.parametrize(
    ("name", "num_devices", "seed"),
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_programs_do_what_was_predicted_and_train_like_one_device(name: str, num_devices: int, seed: int) -> None:
    check(plan_of(NETWORKS[name](), num_devices, seed), reference(name))


def test_the_strategies_that_are_tried_have_sums_that_are_made_for_others() -> None:
    found = {(name, p, seed): joint_sums(plan_of(NETWORKS[name](), p, seed)) for name, p, seed in [*CASES, *FULL]}
    assert sum(count > 0 for count in found.values()) >= len(found) / 2, found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_devices_in_any_order_train_the_same(seed: int) -> None:
    """Where parts lie on other devices than the fan-out's sum has them, each reader sums its own."""
    check(plan_of(dense_block(), 4, seed, is_placed=False), reference("dense_block"))


def test_three_projections_sum_their_gradient_once() -> None:
    """b · s · d words over 2 devices, where the release summed them three times."""
    graph = with_fan_outs(small("gpt"))
    heads = {name: {"h": 2} for name in ("layer1_self_q", "layer1_self_k", "layer1_self_v", "layer1_self_attention")}
    plan = make_plan(graph, 2, heads | {"layer1_self_norm_fan_out": {"g": 2}})
    measured = trained(plan, steps=1, dtype="float32", keep_alive=True).measured
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
    measured = check(plan, reference("tied")).measured
    own = {
        movement.consumer: size
        for movement, size in measured.by_movement.items()
        if movement.producer == movement.consumer in ("first", "second", "fc") and movement.phase == "backward"
    }
    group = prod(parts for dim, parts in split.items() if dim in ("b", "s"))
    num_groups = 4 // group
    assert own["first"] == num_groups * 2 * (group - 1) * 8 * 12 * 8 // split.get("d", 1)
    assert "second" not in own
    assert own.get("fc", 0) == 0 or "d" in split


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_users_of_a_tied_weight_lie_as_they_may(seed: int) -> None:
    check_bytes(random_plan(tied(), 4, seed))


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
