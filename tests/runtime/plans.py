"""Plans made by hand for tests: a graph, splits and devices, without a search."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import gcd, prod

from pase.graph import Graph, Operator
from pase.machine import Machine
from pase.machine.machine import Device, Level
from pase.planning.plan import LayerPlan, Plan, SearchRecord
from pase.planning.stages import group_devices, stage_plan
from pase.sharding.placement import place

MACHINE = Machine(
    name="test",
    description="one level",
    device=Device(name="gpu", peak_flop_per_s={"float32": 1e12}, memory_bytes=2**30, source="made up"),
    levels=(Level(name="link", num_devices=0, latency_s=1e-6, bandwidth_bytes_per_s=1e9, source="made up"),),
)


def make_plan(
    graph: Graph,
    num_devices: int,
    splits: Mapping[str, Mapping[str, int]],
    devices: Mapping[str, tuple[int, ...]] | None = None,
) -> Plan:
    """splits: by layer, of the dims that are split; devices: by layer, in order where not given."""
    layers = tuple(
        LayerPlan(
            name=operator.name,
            kind=operator.kind,
            dims=dict(operator.extents),
            splits={dim: splits.get(operator.name, {}).get(dim, 1) for dim in operator.extents},
            devices=(devices or {}).get(operator.name, tuple(range(num_devices))),
            layer_cost=0.0,
            compute_cost=0.0,
            communication_cost=0.0,
            memory_bytes=0.0,
            transfers=(),
        )
        for operator in graph.operators
    )
    return Plan(
        graph=graph,
        machine=MACHINE,
        num_devices=num_devices,
        cost_model="paper",
        cost_unit="flop",
        layers=layers,
        total_cost=0.0,
        lower_bound=0.0,
        exact=True,
        baselines={},
        search=SearchRecord(ordering="none", largest_dependent_set=0, time_s=0.0, peak_memory_bytes=0),
        tool_version="0",
    )


def configurations(operator: Operator, num_devices: int) -> list[dict[str, int]]:
    """Every tuple of splits that divide their dims and whose product divides the devices."""

    def divisors() -> Iterator[list[int]]:
        for dim, extent in operator.extents.items():
            fixed = dim in operator.unsplittable
            yield [
                k
                for k in range(1, num_devices + 1)
                if extent % k == 0 and num_devices % k == 0 and not (fixed and k > 1)
            ]

    names = list(operator.extents)
    found = [dict(zip(names, factors, strict=True)) for factors in product(*divisors())]
    return [splits for splits in found if num_devices % prod(splits.values()) == 0]


def random_plan(graph: Graph, num_devices: int, seed: int) -> Plan:
    """A plan with a random configuration and random devices for each layer; most of them use all devices."""
    numbers = random.Random(seed)
    splits, devices = {}, {}
    for operator in graph.operators:
        choices = configurations(operator, num_devices)
        full = [c for c in choices if prod(c.values()) == num_devices]
        splits[operator.name] = numbers.choice(full if full and numbers.random() < 0.7 else choices)
        devices[operator.name] = tuple(numbers.sample(range(num_devices), num_devices))
    return make_plan(graph, num_devices, splits, devices)


def placed_plan(graph: Graph, num_devices: int, seed: int) -> Plan:
    """A random plan, placed as searched ones are."""
    return placed(random_plan(graph, num_devices, seed))


def placed(plan: Plan) -> Plan:
    """The plan with each layer on the devices of its stage as a search gives it these."""
    layers = list[LayerPlan]()
    for number in range(plan.num_stages):
        own = stage_plan(plan, number) if plan.num_stages > 1 else plan
        first = group_devices(plan, number).start
        for devices in place(own.graph, own.num_devices, [layer.splits for layer in own.layers]):
            layers.append(replace(plan.layers[len(layers)], devices=tuple(first + device for device in devices)))
    return replace(plan, layers=tuple(layers))


def split_along(plan: Plan, dims: Mapping[str, str]) -> Plan:
    """The plan with some layers split along one dim alone, as far as their devices divide it; dims: by layer."""

    def along(layer: LayerPlan) -> LayerPlan:
        own = dims[layer.name]
        return replace(layer, splits={**dict.fromkeys(layer.splits, 1), own: gcd(len(layer.devices), layer.dims[own])})

    return replace(plan, layers=tuple(along(layer) if layer.name in dims else layer for layer in plan.layers))


def rings_of(graph: Graph) -> list[str]:
    """The layers whose keys and values go round."""
    return [operator.name for operator in graph.operators if operator.ring is not None]


def recomputing(plan: Plan, seed: int) -> Plan:
    """The plan with some of its layers computed again for the backward pass, few or many of them."""
    numbers = random.Random(seed)
    share = numbers.choice([0.3, 0.6, 0.9, 1.0])
    layers = (replace(layer, is_recomputed=numbers.random() < share) for layer in plan.layers)
    return replace(plan, layers=tuple(layers))


def data_parallel_plan(graph: Graph, num_devices: int) -> Plan:
    """The batch split among all devices, or as many as divide it."""
    splits = {operator.name: {"b": gcd(num_devices, operator.extents.get("b", 1))} for operator in graph.operators}
    return make_plan(graph, num_devices, splits)
