"""What hides behind the backward pass: searches under `step` beside `alpha_beta`, and what that changes."""

from collections.abc import Mapping, Sequence
from time import process_time

from pase import load
from pase.analysis.simulation.simulation import simulate
from pase.costs import CostModel, cost_model
from pase.graph import Graph
from pase.machine import load_machine
from pase.models import MODELS
from pase.planning.plan import Plan
from pase.planning.planner import search
from pase.planning.steps import plan_layers, total_cost
from pase.sharding.shards import data_parallel_splits
from scripts.benchmarks.tables import markdown, publish

MACHINES = ("1080ti", "v100")
DEVICES = (8, 64)
NETWORKS = ("alexnet", "inception_v3", "rnnlm", "transformer", "transformer_big", "bert_large", "gpt")
"""Those of the PaSE paper, and three language models."""
NUM_DEVICES = 32
SEARCHED = ("paper", "alpha_beta", "step")
FAR = 0.05
"""Of the predicted time: a simulated step that is further from it is told apart."""


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/step.md."""
    tables = {f"networks {name}": _networks(name) for name in MACHINES}
    publish("step.md", tables | {f"strategies {name}": _strategies(name) for name in MACHINES}, write=write)


def _networks(machine: str) -> str:
    """Return a row for each network and number of devices: what the search takes, and its plan beside its simulation.

    Times are those of the processor, tables and placement included, so that what else runs hardly counts.
    """
    rows = [_network(name, devices, machine) for name in sorted(MODELS) for devices in DEVICES]
    headers = [
        "network",
        "p",
        "search, `alpha_beta`, s",
        "`step`, s",
        "ratio",
        "cost by `alpha_beta`, ms",
        "T, ms",
        "hidden, ms",
        "proven",
        "simulated",
    ]
    return markdown(headers, rows)


def _network(name: str, devices: int, machine: str) -> list[str]:
    times_s, plans = [], []
    for model in ("alpha_beta", "step"):
        start_s = process_time()
        plans.append(search(load(name), devices, machine=machine, cost_model=model))
        times_s.append(process_time() - start_s)
    sums, plan = plans
    simulated = simulate(plan).step_time_s / plan.total_cost - 1
    return [
        name,
        str(devices),
        *(f"{time_s:.2f}" for time_s in times_s),
        f"{times_s[1] / times_s[0]:.1f}",
        f"{1e3 * sums.total_cost:.2f}",
        f"{1e3 * plan.total_cost:.2f}",
        f"{1e3 * plan.hidden_cost:.2f} of {1e3 * sum(layer.hideable_cost or 0.0 for layer in plan):.2f}",
        "yes" if plan.exact else f"gap {plan.gap:.2%}",
        f"{simulated:+.1%}{' *' if abs(simulated) > FAR else ''}",
    ]


def _strategies(machine: str) -> str:
    rows = [_side_by_side(name, machine) for name in NETWORKS]
    headers = [
        "network",
        "data parallel",
        *(f"searched by `{name}`" for name in SEARCHED),
        "layers other than by `paper`",
        "than by `alpha_beta`",
    ]
    return markdown(headers, rows)


def _side_by_side(name: str, machine: str) -> list[str]:
    graph = load(name)
    plans = [search(graph, NUM_DEVICES, machine=machine, cost_model=model) for model in SEARCHED]
    whole, model = plans[0].graph, cost_model("step", load_machine(machine), NUM_DEVICES)
    splits: list[Sequence[Mapping[str, int]]] = [data_parallel_splits(whole, NUM_DEVICES)]
    splits += [[layer.splits for layer in plan] for plan in plans]
    costs = [_cost(whole, model, chosen) for chosen in splits]
    beside = [f"{1e3 * cost:.2f} ({cost / costs[-1] - 1:+.1%})" for cost in costs[:-1]]
    return [name, *beside, f"{1e3 * costs[-1]:.2f}", _changed(plans[0], plans[2]), _changed(plans[1], plans[2])]


def _cost(graph: Graph, model: CostModel, splits: Sequence[Mapping[str, int]]) -> float:
    """Return T of a strategy, in seconds."""
    order = tuple(range(NUM_DEVICES))
    return total_cost(plan_layers(graph, NUM_DEVICES, model, splits, [order] * len(splits)))


def _changed(one: Plan, other: Plan) -> str:
    """Return how many layers have other configurations in two plans."""
    return f"{sum(a.splits != b.splits for a, b in zip(one, other, strict=True))} of {len(one)}"
