"""All strategies of `pase compare` on all built-in networks: how much dearer than ours each of them is."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pase import load, load_machine
from pase.analysis.baselines.compare import Comparison, Contender, compare
from pase.analysis.baselines.mcmc import Sampling
from pase.analysis.baselines.registry import BASELINES, Baseline, chosen
from pase.models import MODELS
from scripts.benchmarks.tables import markdown, publish

DEVICES = (8, 32)
MACHINE = "1080ti"
STARTS = ("data_parallel", "random")
_ROUNDING = 1e-9


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/."""
    tables = {}
    for cost_model in ("alpha_beta", "paper"):
        for devices in DEVICES:
            compared = [_compared(name, devices, cost_model) for name in MODELS]
            tables[f"{cost_model} {devices}"] = _table(compared, list(BASELINES), _cost_ratio)
            tables[f"mcmc {cost_model} {devices}"] = _table(compared, ["mcmc", *map(_from, STARTS)], _cost_ratio)
            if devices == max(DEVICES):
                tables[f"memory {cost_model} {devices}"] = _table(compared, list(BASELINES), _memory_ratio)
    publish("baselines.md", tables, write=write)


def _compared(name: str, devices: int, cost_model: str) -> Comparison:
    found = compare(
        load(name),
        devices,
        machine=load_machine(MACHINE),
        cost_model=cost_model,
        baselines=[*BASELINES.values(), *_walks()],
    )
    # What the page says must hold, or it is not written.
    assert found.contenders[0].plan.exact, name
    for contender in found.contenders:
        assert contender.plan.total_cost >= found.contenders[0].plan.total_cost * (1 - _ROUNDING), contender.name
    return found


def _walks() -> list[Baseline]:
    """Return the random search from other starts than the experts' strategies."""
    return [replace(*chosen(["mcmc"], Sampling(start=start)), name=_from(start)) for start in STARTS]


def _from(start: str) -> str:
    return f"mcmc from {start}"


def _table(compared: Sequence[Comparison], names: Sequence[str], cell: Callable[[Contender, Contender], str]) -> str:
    rows = []
    for comparison in compared:
        ours, *others = comparison.contenders
        cells = {contender.name: cell(contender, ours) for contender in others}
        rows.append([ours.plan.graph.name, *(cells.get(name, "-") for name in names)])
    return markdown(["network", *names], rows)


def _cost_ratio(contender: Contender, ours: Contender) -> str:
    return f"{contender.plan.total_cost / ours.plan.total_cost:.3f}"


def _memory_ratio(contender: Contender, ours: Contender) -> str:
    return f"{contender.memory_bytes / ours.memory_bytes:.2f}"
