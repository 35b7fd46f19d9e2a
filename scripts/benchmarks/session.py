"""Planning again in a `pase.Session` after one change, beside a search from the start, whose answer it must have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import pase
from pase.sharding.shards import enumerate_configurations
from scripts.benchmarks.tables import markdown, publish

RUNS = 15
SEARCHES = 5
"""Of the runs so many are searched for from the start, too, and for as many numbers of devices."""
SAME = 1e-12

Change = Callable[[pase.Session, Random], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network on 64 devices under a cost model; arguments: of its builder."""

    name: str
    model: str
    cost_model: str
    arguments: Mapping[str, int]


CASES = tuple(
    Case(name=name, model=model, cost_model=cost_model, arguments=arguments)
    for cost_model in ("paper", "alpha_beta")
    for name, model, arguments in (("Transformer", "transformer", {}), ("GPT of 96 layers", "gpt", {"layers": 96}))
)


def _pin(session: pase.Session, random: Random) -> Mapping[str, Any]:
    step = session.answer.step
    operator = random.choice(step.graph.operators)
    splits = random.choice(enumerate_configurations(operator, step.num_devices).tolist())
    text = " ".join(f"{dim}={k}" for dim, k in zip(operator.extents, splits, strict=True) if k > 1) or "not split"
    return {"constraints": {"pin": {operator.name: text}}}


def _bandwidth(session: pase.Session, random: Random) -> Mapping[str, Any]:
    return {"constraints": None, "bandwidth_bytes_per_s": 10 ** random.uniform(9.5, 11)}


def _memory(session: pase.Session, random: Random) -> Mapping[str, Any]:
    used = session.answer.plan.memory.total_bytes
    return {"bandwidth_bytes_per_s": None, "device_memory_bytes": int(used * random.uniform(1, 2))}


def _devices(session: pase.Session, random: Random) -> Mapping[str, Any]:
    """Fewer than ever before: nothing of so many is known."""
    return {"device_memory_bytes": None, "devices": session.answer.step.num_devices // 2}


CHANGES: Mapping[str, Change] = {
    "a pin": _pin,
    "bandwidth": _bandwidth,
    "memory limit, not binding": _memory,
    "devices": _devices,
}


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    rows = [row for case in CASES for row in _measured(case)]
    headers = ["network, 64 devices", "cost model", "change", "again, ms (median)", "min–max", "search, ms", "÷ search"]
    publish("benchmarks.md", {"session": markdown(headers, rows)}, write=write)


def _measured(case: Case) -> list[list[str]]:
    graph = pase.load(case.model, arguments=case.arguments)
    random, rows = Random(0), []
    session = pase.Session(graph, 64, "1080ti", cost_model=case.cost_model)
    for name, change in CHANGES.items():
        again_s, search_s = [], []
        for run in range(RUNS if name != "devices" else SEARCHES):
            changes = change(session, random)
            start_s = perf_counter()
            answer = session.replan(**changes)
            again_s.append(perf_counter() - start_s)
            if run >= SEARCHES:
                continue
            start_s = perf_counter()
            plan = pase.search(
                graph,
                answer.step.num_devices,
                machine=answer.machine,
                cost_model=case.cost_model,
                constraints=answer.constraints,
                device_memory_bytes=answer.device_memory_bytes,
            )
            search_s.append(perf_counter() - start_s)
            if abs(plan.total_cost - answer.total_cost) > SAME * plan.total_cost or plan.exact != answer.exact:
                raise SystemExit(f"{case.name}, {changes}: {answer.total_cost}; a search finds {plan.total_cost}")
        again_ms, search_ms = 1e3 * median(again_s), 1e3 * median(search_s)
        rows.append(
            [
                case.name,
                f"`{case.cost_model}`",
                name,
                f"{again_ms:.0f}",
                f"{1e3 * min(again_s):.0f}–{1e3 * max(again_s):.0f}",
                f"{search_ms:.0f}",
                f"{again_ms / search_ms:.2f}",
            ]
        )
    return rows
