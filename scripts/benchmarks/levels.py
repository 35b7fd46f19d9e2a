"""What a machine's levels change: strategies chosen for nodes of eight beside those chosen for a flat machine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from pase import load
from pase.costs import AlphaBetaCostModel, cost_model
from pase.costs.collectives import Link
from pase.graph import Graph
from pase.machine import Machine, load_machine
from pase.planning.plan import LayerPlan
from pase.planning.planner import SearchOptions, search
from pase.planning.steps import plan_layers, total_cost
from scripts.benchmarks.tables import markdown, publish

NETWORKS = ("alexnet", "inception_v3", "rnnlm", "transformer", "bert_large", "gpt")
NUM_DEVICES = 32
MACHINES = ("1080ti", "v100")

_FREE = Link(latency_s=0.0, s_per_byte=0.0)


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/machines.md."""
    tables = {f"levels {name}": _table(load_machine(name)) for name in MACHINES}
    publish("machines.md", tables | {"placed": _placed_table()}, write=write)


def flat(machine: Machine) -> Machine:
    """Return the machine with every two devices joined as those of one node are."""
    return replace(machine, name=f"{machine.name} (flat)", levels=(replace(machine.levels[0], num_devices=0),))


def _table(machine: Machine) -> str:
    options = SearchOptions(cost_model="alpha_beta")
    model = cost_model("alpha_beta", machine, NUM_DEVICES)
    assert isinstance(model, AlphaBetaCostModel)
    rows = []
    for name in NETWORKS:
        graph = load(name)
        ours = search(graph, NUM_DEVICES, machine=machine, options=options)
        other = search(graph, NUM_DEVICES, machine=flat(machine), options=options)
        splits = [[layer.splits for layer in plan.layers] for plan in (ours, other)]
        times = [f"{1e3 * time_s:.2f}" for chosen in splits for time_s in _by_level(ours.graph, model, chosen)]
        price = total_cost(_costed(ours.graph, model, splits[1])) / ours.total_cost - 1
        rows.append([name, *times, f"{price:+.1%}"])
    parts = ("computing", "in nodes", "between nodes")
    headers = ["network", *(f"{who}: {part}, ms" for who in ("levels", "flat") for part in parts), "price of flat"]
    return markdown(headers, rows)


def _by_level(graph: Graph, model: AlphaBetaCostModel, splits: Sequence[Mapping[str, int]]) -> tuple[float, ...]:
    """Return the seconds of computing, and what each level's links add to it while those further in are free.

    They add up to the whole: collectives would spare a level that alone is not free, and take another way.
    """
    whole = [
        total_cost(_costed(graph, replace(model, links=(_FREE,) * free + model.links[free:]), splits))
        for free in range(len(model.links) + 1)
    ]
    return (whole[-1], *(cost - without for cost, without in pairwise(whole)))


def _costed(graph: Graph, model: AlphaBetaCostModel, splits: Sequence[Mapping[str, int]]) -> tuple[LayerPlan, ...]:
    order = tuple(range(NUM_DEVICES))
    return plan_layers(graph, NUM_DEVICES, model, splits, [order] * len(splits))


def _placed_table() -> str:
    """Return how much more a step costs between the devices on which layers are placed."""
    rows = []
    for name in NETWORKS:
        row = [name]
        for machine in map(load_machine, MACHINES):
            for num_devices in (16, 32, 64):
                plan = search(load(name), num_devices, machine=machine, options=SearchOptions(cost_model="alpha_beta"))
                row.append(f"{plan.placed_cost / plan.total_cost - 1:+.1%}")
        rows.append(row)
    return markdown(["network", *(f"{name}, p = {p}" for name in MACHINES for p in (16, 32, 64))], rows)
