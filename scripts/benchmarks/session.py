"""Planning again in a `pase.Session` after one change, beside a search from the start, whose answer it must have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Any

import pase
from pase.planning.session import OF_SEARCH
from pase.sharding.shards import enumerate_configurations
from scripts.benchmarks.tables import markdown, publish

RUNS = 15
SEARCHES = 5
"""Of the runs so many are searched for from the start, too, and for as many numbers of devices."""
SAME, EQUAL = 1e-12, 1e-9
"""Costs of plain plans, and of steps, that differ by no more than this share of them are the same."""

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


EVERY_MODE = ("zero1", "zero2", "zero3", "recompute")

STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("all modes", {"modes": EVERY_MODE}),
    ("bandwidth", {"bandwidth_bytes_per_s": 5e10}),
    ("bandwidth as it was", {"bandwidth_bytes_per_s": None}),
    ("12 GB of a device", {"device_memory_bytes": 12 * 10**9}),
    ("no limit but the device's", {"device_memory_bytes": None}),
    ("4 micro-batches", {"micro_batches": 4}),
    ("zero2 and recompute alone", {"modes": ("zero2", "recompute")}),
    ("all weights in zero3", {"modes": ("zero3",), "constraints": {"pin": {"*": "zero3 *"}}}),
    ("2 stages", {"modes": EVERY_MODE, "constraints": None, "stages": 2}),
    ("stages and micro-batches chosen", {"stages": "auto", "micro_batches": "auto"}),
)
"""Changes of one session, one after the other."""


def main(*, write: bool) -> None:
    """Print the tables, or put them into docs/benchmarks.md."""
    rows = [row for case in CASES for row in _measured(case)]
    headers = ["network, 64 devices", "cost model", "change", "again, ms (median)", "min–max", "search, ms", "÷ search"]
    tables = {"session": markdown(headers, rows), "session steps": measured_steps()}
    publish("benchmarks.md", tables, write=write)


def measured_steps() -> str:
    """Return the table of steps of gpt on 8 V100: each change in processor time, in a new session each time."""
    graph = pase.load("gpt")
    again_s: dict[str, list[float]] = {name: [] for name, _ in STEPS}
    search_s: dict[str, list[float]] = {name: [] for name, _ in STEPS}
    costs: dict[str, str] = {}
    for _ in range(SEARCHES):
        session, settings = pase.Session(graph, 8, "v100", cost_model="step"), dict[str, Any]()
        for name, changes in STEPS:
            start_s = process_time()
            answer = session.replan(**changes)
            again_s[name].append(process_time() - start_s)
            for key in changes.keys() & set(OF_SEARCH):
                settings[key] = changes[key] or () if key == "constraints" else changes[key]
            start_s = process_time()
            plan = pase.search(graph, 8, machine=answer.machine, cost_model="step", **settings)
            search_s[name].append(process_time() - start_s)
            if abs(plan.total_cost - answer.total_cost) > EQUAL * plan.total_cost or plan.exact != answer.exact:
                raise SystemExit(f"{name}: {answer.total_cost}; a search finds {plan.total_cost}")
            certificate = "proven" if answer.exact else f"gap {answer.gap:.2%}"
            costs[name] = f"{1e3 * answer.total_cost:.1f} ms, {certificate}"
    rows = []
    for name, _ in STEPS:
        again_ms, search_ms = (1e3 * median(each[name]) for each in (again_s, search_s))
        rows.append([name, costs[name], f"{again_ms:.0f}", f"{search_ms:.0f}", f"{again_ms / search_ms:.2f}"])
    return markdown(["change, one after the other", "step", "again, ms", "search, ms", "÷ search"], rows)


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
