"""What a report says of other configurations, against fresh searches in which a layer is pinned to each."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pase
from pase import Plan
from pase.analysis.explanation import every_choice
from pase.planning.problems import problem_of_plan
from pase.views.reports.document import choices_document, report_document
from tests.explanation.test_explain import data_parallel_plan
from tests.hostile import hostile_plan
from tests.networks import slow_machine, small_graph

CHOICES = "pase.analysis.explanation.alternatives"
CONSTRAINED: dict[str, Any] = {"forbid": {"encoder1_ff_1": "e"}, "tie": ["encoder1_self_v, encoder1_self_k"]}


def planned(name: str, **options: Any) -> Plan:
    return pase.search(small_graph(name), 8, machine=slow_machine(), **options)


def document(plan: Plan) -> dict[str, Any]:
    found, note = choices_document(plan)
    assert found is not None, note
    return found


def said(found: dict[str, Any], layer: int) -> Iterator[tuple[list[int], float, dict[int, list[int]]]]:
    """Yield of each entry of a layer its splits, its difference and what changes, as a reader of the page has it."""
    for row, difference, number in found["lists"][found["layers"][layer]]["entries"]:
        flat = found["changes"][number]
        yield (
            list(found["splits"][row]),
            difference,
            {layer + beside: list(found["splits"][to]) for beside, to in zip(flat[::2], flat[1::2], strict=True)},
        )


def pinned(plan: Plan, layer: int, splits: list[int], **others: Any) -> float:
    """Return the least cost with one layer's configuration given, by a search of its own."""
    one = plan.layers[layer]
    pin = {one.name: " ".join(f"{dim}={factor}" for dim, factor in zip(one.dims, splits, strict=True))}
    options = {"machine": plan.machine, "cost_model": plan.cost_model}
    return pase.search(plan.graph, plan.num_devices, constraints={"pin": pin, **others}, **options).total_cost


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("alexnet", "alpha_beta"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("transformer", "paper"), ("inception_v3", "alpha_beta"))
        ),
    ],
)
def test_numbers_are_those_of_fresh_searches(name: str, model: str) -> None:
    plan = planned(name, cost_model=model)
    found = document(plan)
    draw = np.random.default_rng(1)
    for layer in draw.choice(len(plan.layers), min(3, len(plan.layers)), replace=False).tolist():
        entries = list(said(found, layer))
        assert (entries[0][0], entries[0][1:]) == (list(plan.layers[layer].splits.values()), (0.0, {}))
        for i in draw.choice(len(entries), min(3, len(entries)), replace=False).tolist():
            splits, difference, _ = entries[i]
            assert pinned(plan, layer, splits) == pytest.approx(plan.total_cost * (1 + difference), rel=3e-9)


@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        *[("transformer", CONSTRAINED), ("rnnlm", {"mesh": {"data": 4, "model": 2}})],
        pytest.param("transformer", {}, marks=pytest.mark.full),
    ],
)
def test_what_would_change_costs_what_is_said(name: str, constraints: dict[str, Any]) -> None:
    plan = planned(name, constraints=constraints)
    problem = problem_of_plan(plan)
    found = document(plan)
    num_entries = 0
    for layer in range(len(plan.layers)):
        entries = list(said(found, layer))
        assert [difference for _, difference, _ in entries] == sorted(difference for _, difference, _ in entries)
        assert len({tuple(splits) for splits, *_ in entries}) == len(entries)
        for splits, difference, changes in entries:
            strategy = [list(one.splits.values()) for one in plan.layers]
            assert layer not in changes
            assert all(strategy[other] != to for other, to in changes.items())
            for other, to in {layer: splits, **changes}.items():
                strategy[other] = to
            choice = [problem.choice(v, tuple(row)) for v, row in enumerate(strategy)]
            assert problem.tables.evaluate(choice) == pytest.approx(plan.total_cost * (1 + difference), rel=3e-9)  # type: ignore[arg-type]
            num_entries += 1
    assert num_entries > len(plan.layers)


def test_layers_of_steps_keep_their_modes() -> None:
    graph, machine = small_graph("gpt"), slow_machine()
    settings: dict[str, Any] = {"cost_model": "alpha_beta", "micro_batches": 2, "modes": ["zero2"]}
    plan = pase.search(graph, 8, machine=machine, constraints={"pin": {"*": "zero2 *"}}, **settings)
    assert plan.device_memory_bytes is not None
    found = document(plan)
    draw = np.random.default_rng(1)
    for layer in draw.choice(len(plan.layers), 3, replace=False).tolist():
        entries = list(said(found, layer))
        assert (entries[0][0], entries[0][1:]) == (list(plan.layers[layer].splits.values()), (0.0, {}))
        splits, difference, _ = entries[int(draw.integers(len(entries)))]
        one = plan.layers[layer]
        text = " ".join(f"{dim}={factor}" for dim, factor in zip(one.dims, splits, strict=True))
        pins = {"pin": {one.name: f"{text} zero2", **{o.name: "zero2 *" for o in plan if o is not one}}}
        pinned = pase.search(graph, 8, machine=machine, constraints=pins, **settings)
        assert pinned.total_cost == pytest.approx(plan.total_cost * (1 + difference), rel=3e-9)


def test_constraints_of_the_plan_hold() -> None:
    plan = planned("transformer", constraints=CONSTRAINED)
    found = document(plan)
    layers = {name: plan.index[name] for name in ("encoder1_ff_1", "encoder1_self_v", "encoder1_self_k")}
    e = list(plan["encoder1_ff_1"].dims).index("e")
    assert {splits[e] for splits, *_ in said(found, layers["encoder1_ff_1"])} == {1}
    for splits, difference, changes in list(said(found, layers["encoder1_self_v"]))[:4]:
        assert changes.get(layers["encoder1_self_k"], splits) == splits
        cost = pinned(plan, layers["encoder1_self_v"], splits, **CONSTRAINED)
        assert cost == pytest.approx(plan.total_cost * (1 + difference), rel=3e-9)


@pytest.mark.parametrize(("most", "max_cells"), [(3, 10**9), (40, 20_000)])
def test_what_is_not_listed_costs_more(most: int, max_cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("transformer")
    monkeypatch.setattr(f"{CHOICES}.MOST_CELLS", max_cells)
    whole = every_choice(plan, most=10**6)
    found = every_choice(plan, most=most)
    problem = problem_of_plan(plan)
    # With little room, strategies far from the optimum are not looked at.
    assert (sum(len(layer.choices) for layer in whole) < sum(problem.tables.domain_sizes)) == (max_cells < 10**9)
    for v, (layer, everything) in enumerate(zip(found, whole, strict=True)):
        assert layer.choices == everything.choices[:most]
        assert layer.num_configurations == problem.tables.domain_sizes[v]
        if len(everything.choices) > most:
            assert layer.beyond == everything.choices[most].difference
    v = max(range(len(found)), key=lambda v: problem.tables.domain_sizes[v])
    listed = {choice.splits for choice in found[v].choices}
    others = [row for row in problem.configurations[v].tolist() if tuple(row) not in listed]
    for splits in others[:: max(1, len(others) // 4)]:
        assert pinned(plan, v, splits) >= (plan.total_cost + found[v].beyond) * (1 - 1e-9)


def test_repeated_layers_share_what_is_said() -> None:
    graph = pase.load(
        "gpt", arguments={"batch": 16, "vocabulary": 64, "steps": 8, "model_width": 16, "heads": 4, "layers": 12}
    )
    plan = pase.search(graph, 8, machine=slow_machine())
    found = document(plan)
    assert len(found["layers"]) == len(plan.layers) > 140
    assert len(found["lists"]) < len(plan.layers) / 2
    assert max(map(len, (one["entries"] for one in found["lists"]))) <= 40


def test_where_it_is_not_known_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("mlp")
    limited = planned("mlp", device_memory_bytes=int(0.9 * plan.memory.total_bytes))
    worse = data_parallel_plan("mlp", 8, "paper")
    for other, text in ((limited, "within a memory limit"), (worse, "not the cheapest: something costs less")):
        (told,) = report_document({"": other}, explains=False, interactive=True)["plans"]
        assert told["choices"] is None
        assert text in told["choices_note"]
    monkeypatch.setattr(f"{CHOICES}.MOST_CELLS", 0)
    monkeypatch.setattr(f"{CHOICES}.LIMITS", (9.0, 1.0))
    assert choices_document(plan) == (
        None,
        "what other configurations would cost is not known: the problem is too large for min-marginals",
    )
    (told,) = report_document({"": plan}, explains=False)["plans"]
    assert (told["choices"], told["choices_note"]) == (None, "")


class Clock:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_what_the_time_limit_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("alexnet")
    whole = every_choice(plan)
    none, note = choices_document(plan, time_limit_s=1e-9)
    assert none is None
    assert "the time limit of 1e-09 s was reached before it was worked out of any layer; give more time" in note
    missing = []
    for limit in (3.0, 7.0, 1000.0):
        # Tables and marginals are made in no time at all: their clock is another one, far behind this one's limit.
        monkeypatch.setattr(f"{CHOICES}.perf_counter", Clock())
        monkeypatch.setattr("pase.costs.edges.perf_counter", lambda: 0.0)
        found = every_choice(plan, time_limit_s=limit)
        assert all(one is None or one == other for one, other in zip(found, whole, strict=True))
        missing.append(sum(one is None for one in found))
        monkeypatch.setattr(f"{CHOICES}.perf_counter", Clock())
        (told,) = report_document({"": plan}, explains=False, interactive=True, time_limit_s=limit)["plans"]
        assert [number is None for number in told["choices"]["layers"]] == [one is None for one in found]
        said = f"not known of {missing[-1]} of {len(plan.layers)} layers, which were not reached within the time limit"
        assert (said in told["choices_note"]) == (told["choices_note"] != "") == (missing[-1] > 0)
    assert len(plan.layers) > missing[0] > missing[1] > missing[2] == 0


def test_the_same_plan_gives_the_same() -> None:
    plan = hostile_plan()
    assert choices_document(plan) == choices_document(plan)
