"""Random plans of every kind, for modules of `MODULES`."""

from dataclasses import replace
from math import gcd
from random import Random

from pase.costs import STATES
from pase.graph import AllToAll, Graph
from pase.graph.operators.products import with_rings
from pase.graph.parts import cuts, with_cuts
from pase.planning.plan import SCHEDULES, Plan
from tests.runtime.plans import make_plan, placed, random_plan, rings_of, split_along


def with_states(plan: Plan, *states: str) -> Plan:
    """The same plan with a state for each layer, or one for all."""
    own = states * len(plan.layers) if len(states) == 1 else states
    return replace(plan, layers=tuple(replace(layer, state=s) for layer, s in zip(plan.layers, own, strict=True)))


def in_modes(plan: Plan, seed: int, *, states: tuple[str, ...] = STATES, again: float = 0.5) -> Plan:
    """The plan with a random state for each layer, and layers that are computed again with a probability."""
    numbers = Random(seed)
    layers = (
        replace(layer, state=numbers.choice(states), is_recomputed=numbers.random() < again) for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def in_stages(graph: Graph, world: int, groups: int, count: int, schedule: str, seed: int, chunks: int = 1) -> Plan:
    """A plan with random cuts, and random configurations and devices within the stages."""
    graph = with_cuts(graph)
    numbers, size = Random(seed), world // groups
    weighted = [i for i, operator in enumerate(graph.operators) if operator.parameters]
    possible = [at for at in cuts(graph) if weighted[0] < at <= weighted[-1]]
    at = sorted(numbers.sample(possible, groups * chunks - 1))
    layers = []
    for i, layer in enumerate(random_plan(graph, size, seed).layers):
        stage = sum(i >= cut for cut in at)
        first = stage % groups * size
        layers.append(replace(layer, stage=stage, devices=tuple(first + device for device in layer.devices)))
    own = {"num_groups": groups, "micro_batches": count, "schedule": schedule}
    return replace(make_plan(graph, world, {}), layers=tuple(layers), **own)


KINDS = ("random", "micro-batches", "recomputation", "states", *SCHEDULES, "experts", "rings", "all")


def plan_of(graph: Graph, kind: str, world: int, seed: int) -> Plan:
    """A random plan of a kind: a schedule is one of stages. Half of them have devices in any order."""
    numbers, is_all = Random(f"{kind} {world} {seed}"), kind == "all"
    if is_all or kind == "rings":
        graph = with_rings(graph)
    schedule = numbers.choice((*SCHEDULES, "")) if is_all else kind
    count = numbers.choice((2, 3, 4)) if is_all or schedule in SCHEDULES or kind == "micro-batches" else 1
    if schedule in SCHEDULES:
        num_stages = 4 if schedule == "interleaved" else numbers.choice((2, 4))
        groups = numbers.choice([k for k in (2, 4) if gcd(num_stages, world) % k == 0])
        plan = in_stages(graph, world, groups, count, schedule, seed, num_stages // groups)
    else:
        plan = replace(random_plan(with_cuts(graph), world, seed), micro_batches=count)
    dims = {}
    if kind in ("states", "all") and numbers.random() < 0.5:
        dims |= {op.name: "b" for op in graph.operators if "b" in op.extents and "b" not in op.unsplittable}
    for op in graph.operators if kind in ("experts", "all") else ():
        for exchange in op.exchanges:
            if isinstance(exchange, AllToAll) and numbers.random() < 0.7:
                dims[op.name] = exchange.over[0]
    plan = split_along(plan, dims | dict.fromkeys(rings_of(graph), "s"))
    if kind in ("states", "recomputation", "all"):
        states = STATES[:1] if kind == "recomputation" else STATES
        again = 0.0 if kind == "states" else numbers.choice((0.3, 0.6, 1.0))
        if schedule == "zero_bubble":
            # What goes back twice, for inputs and for weights, keeps what it needs, and weights whole.
            states, again = ("zero1", "zero2"), 0.0
        plan = in_modes(plan, seed, states=states, again=again)
    return placed(plan) if numbers.random() < 0.5 else plan
