"""The search over micro-batches, stages and modes, beside brute force over all that it may choose."""

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pase
from pase.analysis.simulation.pipeline import simulate_stages
from pase.costs import cost_model, memory_of_layers
from pase.costs.choice_tables import ChoiceTables, KnownChoices, choice_tables
from pase.costs.memory import keeping
from pase.costs.states import STATES, ModeSpace
from pase.errors import ConfigurationError, MemoryLimitError, PlanError
from pase.graph import Builder, Graph
from pase.graph.operators import dense, elementwise, layer_norm, softmax_loss, with_fan_outs
from pase.graph.parts import cuts, micro_batch, stage, with_cuts
from pase.machine import Machine, load_machine
from pase.machine.machine import Overlap
from pase.planning import pipelines, spans, stage_problem, stage_search
from pase.planning.passes import Work
from pase.planning.pipelines import plan_of_step, solve_scheme
from pase.planning.plan import STAGES_IN_TURNS, Plan
from pase.planning.spans import Scheme, Setting, batch_of
from pase.planning.stages import group_links
from pase.planning.steps import LayerChoice
from tests.costs.test_schedules import order_of, simulated
from tests.simulation.machines import machine

Array = np.ndarray[Any, np.dtype[np.float64]]
MOST, MOST_PEAKS = 400_000, 3_000
"""Strategies of one stage that brute force goes through, and of which it works out peaks."""


def _machine(numbers: random.Random) -> Machine:
    """A machine of two levels on which computing, sending and waiting take about as long, at random."""
    overlap = Overlap(share=numbers.choice([0.3, 0.8]), source="made up")
    latency_s, flop_per_s = numbers.choice([0.0, 1e-6]), 10 ** numbers.uniform(8, 10)
    levels = (2, latency_s, 10 ** numbers.uniform(8, 9.5)), (0, latency_s, 10 ** numbers.uniform(7, 9))
    return replace(machine(*levels, flop_per_s=flop_per_s), overlap=overlap)


def _network(numbers: random.Random) -> Graph:
    """A chain of up to eight layers with residual connections, and a loss; few of its dims can be cut."""
    net = Builder("random")
    width = numbers.choice([3, 4])
    x = net.add(dense, "fc0", net.input((8, 5)), out=(("n", width),))
    for layer in range(1, numbers.choice([2, 3, 4, 5])):
        kind = numbers.choice(["dense", "norm", "add"])
        if kind == "dense":
            x = net.add(dense, f"fc{layer}", x, out=(("n", width),), activation=numbers.choice(["", "relu", "gelu"]))
        elif kind == "norm":
            x = net.add(layer_norm, f"norm{layer}", x, dims=("b", "d"))
        else:
            y = net.add(dense, f"fc{layer}", x, out=(("n", width),))
            x = net.add(elementwise, f"add{layer}", x, y, dims=("b", "n"))
    x = net.add(dense, "head", x, out=(("n", 3),))
    net.add(softmax_loss, "loss", x)
    return net.build()


def _figures(tables: ChoiceTables) -> dict[str, Array] | None:
    """What every strategy of a stage takes in each micro-batch, and once; None where there are too many."""
    counts = [len(layer) for layer in tables.layers]
    if prod(counts) > MOST:
        return None
    choices = np.indices(counts).reshape(len(counts), -1)
    own = [(layer.figures, c) for layer, c in zip(tables.layers, choices, strict=True)]
    repeated, streamed, once, summed, cover = (
        np.sum([getattr(figures, name)[c] for figures, c in own], axis=0)
        for name in ("repeated", "streamed", "once", "summed", "cover")
    )
    for (u, v), edge in zip(tables.ends, tables.edges, strict=True):
        assert not edge.is_weight
        repeated = repeated + edge.cost.values[edge.cost.row_class[choices[u]], edge.cost.col_class[choices[v]]]
    exposed = np.maximum(0.0, streamed - cover)
    o = once + np.maximum(0.0, streamed + summed - cover) - exposed
    return {"t": repeated + exposed, "o": o}


def _stages_of(
    setting: Setting, scheme: Scheme, at: Sequence[int]
) -> list[tuple[ChoiceTables, dict[str, Array] | None]]:
    """Every strategy of each stage of a graph that is cut; None where there are too many."""
    m, num = scheme.micro_batches, scheme.stages
    whole = micro_batch(setting.graph, m)
    graph = with_cuts(whole) if num > 1 else with_fan_outs(whole)
    model = cost_model(setting.cost_model, setting.machine, setting.num_devices // num, graph.precision)
    links = group_links(setting.machine, setting.num_devices, num, scheme.chunks)
    known, fixed = KnownChoices(), batch_of(setting.graph, m, has_cuts=num > 1).fixed
    found = []
    for number, (first, beyond) in enumerate(pairwise((0, *at, len(graph.operators)))):
        part = graph if num == 1 else stage(graph, first, beyond)
        own = (links[number], links[number + 1])
        asked = {"known": known, "fixed": fixed, "links": own, "micro_batches": m, "is_whole": True}
        tables = choice_tables(part, setting.num_devices // num, model, setting.space, **asked)
        found.append((tables, _figures(tables)))
    return found


class _TooManyError(Exception):
    """More peaks would have to be worked out than there is time for."""


class _Group:
    """The strategies of the stages of a group of devices: what they take, and whether their peaks are within a limit.

    moments: Of how many micro-batches of each stage something is there, pass by pass.
    """

    def __init__(self, setting: Setting, scheme: Scheme, number: int, stages: Sequence[ChoiceTables]) -> None:
        self.setting, self.m, self.stages = setting, scheme.micro_batches, stages
        groups, chunks = scheme.stages, scheme.chunks
        under_way, self.moments = np.zeros(chunks, dtype=np.int64), set[tuple[int, ...]]()
        for kind, stage_number, _ in order_of(setting.schedule, groups, number, self.m, chunks):
            under_way[stage_number // groups] += 1 if kind == "f" else -1
            self.moments.add(tuple(under_way.tolist()))
        whole = micro_batch(setting.graph, self.m)
        self.keeps = keeping(with_cuts(whole) if groups > 1 else with_fan_outs(whole))
        self.num_peaks = 0
        self.found: dict[tuple[int, int], tuple[int, int, int]] = {}

    def of_stage(self, c: int, strategy: int) -> tuple[int, int, int]:
        """The peak of a stage, and what it has between its turns: whatever is in flight, and of each micro-batch."""
        if (c, strategy) not in self.found:
            self.num_peaks += 1
            if self.num_peaks > MOST_PEAKS:
                raise _TooManyError
            tables = self.stages[c]
            choice = np.unravel_index(strategy, [len(layer) for layer in tables.layers])
            layers = [
                LayerChoice(
                    splits=dict(zip(operator.extents, splits[modes.rows[k]].tolist(), strict=True)),
                    state=STATES[modes.state[k]],
                    is_recomputed=bool(modes.again[k]),
                    stage=0,
                )
                for operator, splits, modes, k in zip(
                    tables.graph.operators, tables.configurations, tables.layers, choice, strict=True
                )
            ]
            memory = memory_of_layers(
                tables.graph,
                layers,
                optimiser=self.setting.optimiser,
                micro_batches=self.m,
                in_flight=max(each[c] for each in self.moments),
                keeps=self.keeps,
            )
            self.found[c, strategy] = memory.peak().bytes, *memory.waiting_bytes()
        return self.found[c, strategy]

    def fits(self, strategies: Sequence[int]) -> bool:
        """Whether each stage's peak is within the limit, with what the others have at any time."""
        limit = self.setting.limit_bytes
        if limit == inf:
            return True
        if any(self.of_stage(c, strategy)[0] > limit for c, strategy in enumerate(strategies)):
            return False
        each = [self.of_stage(c, strategy) for c, strategy in enumerate(strategies)]
        for c, (peak, _, _) in enumerate(each):
            others = [d for d in range(len(each)) if d != c]
            kept = max(sum(moment[d] * each[d][2] for d in others) for moment in self.moments)
            if peak + sum(each[d][1] for d in others) + kept > limit:
                return False
        return True

    def front(self, figures: Sequence[dict[str, Array]]) -> list[tuple[float, float]]:
        """The (t, o) of the strategies that fit of which none other has lower ones."""
        choices = np.indices([len(own["t"]) for own in figures]).reshape(len(figures), -1)
        t, o = (sum(own[name][c] for own, c in zip(figures, choices, strict=True)) for name in ("t", "o"))
        front: list[tuple[float, float]] = []
        for number in np.lexsort((o, t)).tolist():
            own = float(t[number]), float(o[number])
            if (not front or own[1] < front[-1][1]) and self.fits(choices[:, number].tolist()):
                front.append(own)
        return front


def _brute_force(setting: Setting, scheme: Scheme) -> float | None:
    """The least time of a scheme over all cuts and all strategies that fit; None where there are too many.

    With chunks the cuts are those that docs/method.md names, and the time is that of the longest group without waiting.
    """
    m, groups, chunks = scheme.micro_batches, scheme.stages, scheme.chunks
    places = cuts(with_cuts(micro_batch(setting.graph, m)))
    if groups == 1:
        return _brute_force_of_one_stage(setting, m)
    best = inf
    for at in combinations(places, groups - 1) if chunks == 1 else [_most_even_cuts(setting, scheme)]:
        stages = _stages_of(setting, scheme, at)
        figures = [own for _, own in stages if own is not None]
        if len(figures) < groups * chunks:
            return None
        fronts = []
        for group in range(groups):
            own = figures[group::groups]
            if prod(len(each["t"]) for each in own) > MOST:
                return None
            of_group = _Group(setting, scheme, group, [tables for tables, _ in stages[group::groups]])
            try:
                fronts.append(of_group.front(own))
            except _TooManyError:
                return None
        for each in product(*fronts):
            if chunks > 1:
                best = min(best, max(m * t + o for t, o in each))
                continue
            times = [t for t, _ in each]
            fill = sum(times) - max(times)
            best = min(best, m * max(times) + fill + max(o for _, o in each))
    return best


def _brute_force_of_one_stage(setting: Setting, m: int) -> float | None:
    """The least time of a step of one stage whose peak is within the limit."""
    tables, figures = _stages_of(setting, Scheme(stages=1, micro_batches=m), ())[0]
    if figures is None:
        return None
    costs = m * figures["t"] + figures["o"]
    group = _Group(setting, Scheme(stages=1, micro_batches=m), 0, [tables])
    try:
        return next((float(costs[n]) for n in costs.argsort(kind="stable").tolist() if group.fits([n])), inf)
    except _TooManyError:
        return None


def _random_case(seed: int, *, in_turns: bool = False) -> tuple[Setting, Scheme] | None:
    """A setting and a scheme at random, with chunks or without; None where the network has too few cuts."""
    numbers = random.Random(seed)
    graph = _network(numbers)
    states = (STATES[0], *(state for state in STATES[1:] if numbers.random() < 0.5))
    setting = Setting(
        graph=graph,
        num_devices=numbers.choice([2, 4]),
        machine=_machine(numbers),
        cost_model=numbers.choice(["alpha_beta", "step"]),
        space=ModeSpace(states=states, recompute=numbers.random() < 0.5),
        optimiser="sgd",
        limit_bytes=numbers.choice([inf, 2500.0, 1500.0, 900.0]),
    )
    stages, m, chunks = numbers.choice([1, 2, 4][: setting.num_devices // 2 + 1]), numbers.choice([1, 2, 4]), 1
    if in_turns:
        numbers = random.Random(seed)
        stages, chunks = numbers.choice([2, setting.num_devices]), numbers.choice([2, 2, 3])
        m = numbers.choice([n for n in (2, 4, 8) if n % stages == 0])
        limit = numbers.choice([inf, 4000.0, 2500.0, 1500.0, 900.0])
        setting = replace(setting, schedule="interleaved", limit_bytes=limit)
    num_places = len(cuts(with_cuts(micro_batch(graph, m)))) + 1
    scheme = Scheme(stages=stages, micro_batches=m, chunks=chunks)
    return (setting, scheme) if stages * chunks <= num_places else None


def _in_turns_s(plan: Plan) -> float:
    """When the last group of devices is through with its passes, in Megatron-LM's order, and with what it does once."""
    times = simulate_stages(plan).times_s
    ways = (Work.RECEIVE, Work.FORWARD), (Work.TAKE_BACK, Work.RECOMPUTE, Work.BACKWARD)
    forward, backward = ([sum(own[work] for work in way) for own in times] for way in ways)
    chunks, once = plan.num_stages // plan.num_groups, [own[Work.ONCE] for own in times]
    return simulated("interleaved", forward, backward, plan.micro_batches, chunks, once)[0]


@cache
def _expected(seed: int, in_turns: bool) -> tuple[Setting, Scheme, float] | None:
    """A random case and what brute force says of it; None where it says nothing."""
    case = _random_case(seed, in_turns=in_turns)
    expected = _brute_force(*case) if case else None
    return None if case is None or expected is None else (*case, expected)


def _check(seed: int, *, in_turns: bool) -> bool:
    case = _expected(seed, in_turns)
    if case is None:
        return False
    setting, scheme, expected = case
    found = solve_scheme(setting, scheme)
    assert found.bound <= expected * (1 + 1e-9)
    if not in_turns:
        assert found.cost == pytest.approx(expected, rel=1e-9), (seed, scheme)
        assert found.bound == pytest.approx(found.cost, rel=1e-8) or expected == inf
        return True
    assert (found.cost == inf) is (expected == inf)
    assert found.bound >= 0.95 * expected or expected == inf
    if found.parts:
        plan = plan_of_step(setting, found, found.bound, 0.0)
        assert found.cost == plan.total_cost == pytest.approx(_in_turns_s(plan), rel=1e-9)
        assert expected * (1 - 1e-9) <= found.cost <= 1.7 * expected
        assert plan.memory.total_bytes <= setting.limit_bytes
        assert (plan.num_stages, plan.num_groups) == (scheme.stages * scheme.chunks, scheme.stages)
    return True


@pytest.mark.parametrize(
    ("in_turns", "seeds", "least"),
    [
        (False, range(12), 6),
        (True, range(12), 6),
        pytest.param(False, range(12, 20), 4, marks=pytest.mark.full),
        pytest.param(True, range(12, 18), 3, marks=pytest.mark.full),
        pytest.param(False, range(100, 1250), 1000, marks=pytest.mark.full),
        pytest.param(True, range(100, 600), 300, marks=pytest.mark.full),
    ],
)
def test_the_search_finds_what_brute_force_does(in_turns: bool, seeds: range, least: int) -> None:
    assert sum(_check(seed, in_turns=in_turns) for seed in seeds) >= least


def _most_even_cuts(setting: Setting, scheme: Scheme) -> list[int]:
    """The k-th of n - 1 cuts is the one at which, as nearly as can be, k / n of the work is done."""
    graph = with_cuts(micro_batch(setting.graph, scheme.micro_batches))
    works = spans.works_s(graph, setting.cost_model, setting.machine)
    done = np.concatenate([[0.0], np.cumsum(works)])
    num, places, found = scheme.stages * scheme.chunks, list(cuts(graph)), list[int]()
    for k in range(1, num):
        # Each later cut needs a place behind this one.
        open_places = [
            place
            for n, place in enumerate(places)
            if place > max(found, default=0) and len(places) - 1 - n >= num - 1 - k
        ]
        found.append(min(open_places, key=lambda place: abs(done[place] - done[-1] * k / num)))
    return found


RESTRICTED: dict[str, object] = {"MIN_RESTRICTED": 0, "SLACKS": (0.02, 0.04)}
REPEATED: dict[str, object] = {"MIN_BLOCK": 1, "MIN_REPEATS": 2}


def test_interleaved_schedules_have_1f1b_among_them(tmp_path: Path) -> None:
    """Of all schemes the best is found, with one stage a group or several; the plan says of which cuts it is."""
    settings: dict[str, Any] = {"devices": 4, "machine": "v100", "cost_model": "step", "micro_batches": 4}
    plain = pase.search(_gpt(16), stages=4, **settings)
    plan = pase.search(_gpt(16), stages=4, schedule="interleaved", **settings)
    assert plan.total_cost < plain.total_cost
    assert (plan.schedule, plan.num_groups, plan.search.ordering) == ("interleaved", 4, STAGES_IN_TURNS)
    assert plan.num_stages % 4 == 0 < plan.num_stages - 4
    assert plan.lower_bound <= plan.total_cost
    alone = pase.search(_gpt(16), stages=1, schedule="interleaved", **settings)
    assert (alone.schedule, alone.num_stages) == ("", 1)
    found = simulate_stages(plan)
    assert found.step_time_s == pytest.approx(plan.total_cost, rel=1e-9) == pytest.approx(_in_turns_s(plan), rel=1e-9)
    assert plan.peak.bytes <= plan.memory.total_bytes
    plan.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    for change in ({"num_groups": 2}, {"schedule": "1f1b"}):
        (tmp_path / "changed.json").write_text(json.dumps(document | change), encoding="utf-8")
        with pytest.raises(PlanError, match=r"has \d+ stages on|must name each device 0 … 1 once"):
            pase.load_plan(tmp_path / "changed.json")
    with pytest.raises(ConfigurationError, match="schedule 'zero_bubble' is not searched, though"):
        pase.search(_gpt(16), stages=4, schedule="zero_bubble", **settings)


@pytest.mark.parametrize(
    ("in_turns", "patched"),
    [
        *((False, patched) for patched in ({}, RESTRICTED, REPEATED)),
        (True, {}),
        *(pytest.param(True, patched, marks=pytest.mark.full) for patched in (RESTRICTED, REPEATED)),
    ],
)
def test_bounds_hold_without_going_through_what_is_left(
    in_turns: bool, patched: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is enumerated; tables leave choices out; what repeats is taken apart however short it is."""
    monkeypatch.setattr(stage_search, "MAX_ENUMERATED", 0)
    for name, value in patched.items():
        for module in (pipelines, spans, stage_problem):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    num = 0
    for setting, scheme, expected in filter(None, (_expected(seed, in_turns) for seed in range(2000, 2014))):
        found = solve_scheme(setting, scheme)
        assert found.bound <= expected * (1 + 1e-9)
        assert found.cost >= expected * (1 - 1e-9)
        num += found.bound > 0.8 * expected
    assert num > 2


def _gpt(batch: int, layers: int = 2) -> Graph:
    arguments = {"layers": layers, "model_width": 64, "heads": 4, "steps": 32, "vocabulary": 96}
    return pase.load("gpt", batch=batch, arguments=arguments)


def test_without_parts_a_step_costs_what_its_layers_do() -> None:
    """One micro-batch, one stage, weights whole, nothing recomputed: the plan of the plain search."""
    graph = _gpt(8)
    for model in ("alpha_beta", "step"):
        plain = pase.search(graph, devices=4, machine="a100", cost_model=model, device_memory_bytes=10**12)
        setting = Setting(
            graph=graph,
            num_devices=4,
            machine=load_machine("a100"),
            cost_model=model,
            space=ModeSpace(),
            optimiser="sgd",
            limit_bytes=inf,
        )
        found = solve_scheme(setting, Scheme(stages=1, micro_batches=1))
        assert found.cost == pytest.approx(plain.total_cost, rel=1e-9)
        assert found.bound == pytest.approx(plain.total_cost, rel=1e-6)


def test_a_plan_of_stages_is_written_read_and_checked(tmp_path: Path) -> None:
    plan = pase.search(
        _gpt(16), devices=4, machine="v100", cost_model="step", stages=2, micro_batches=4, modes=["zero3", "recompute"]
    )
    assert (plan.num_stages, plan.num_groups, plan.micro_batches, plan.schedule) == (2, 2, 4, "1f1b")
    assert plan.graph["tokens"].extents["b"] == 4
    assert [sorted(layer.devices) for layer in plan] == [
        list(range(2 * layer.stage, 2 * layer.stage + 2)) for layer in plan
    ]
    plan.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    for change, message in (
        ({"total_cost": plan.total_cost * 1.01}, r"total_cost is .*, but the rest"),
        ({"micro_batches": 2}, r"is .*, but the rest of the file makes it"),
        ({"num_groups": 4}, r"has 2 stages on 4 groups of 4 devices"),
    ):
        (tmp_path / "changed.json").write_text(json.dumps(document | change), encoding="utf-8")
        with pytest.raises(PlanError, match=message):
            pase.load_plan(tmp_path / "changed.json")


def test_devices_and_ties_are_kept_to_in_steps_of_one_stage() -> None:
    settings: dict[str, Any] = {"devices": 4, "machine": "v100", "cost_model": "step", "modes": ["zero1"]}
    graph, order = _gpt(8), [0, 2, 1, 3]
    free = pase.search(graph, stages="auto", micro_batches="auto", **settings)
    for constraints in ({"devices": {"layer1_ff_1": order}}, {"tie": ["layer*_ff_1"]}):
        plan = pase.search(graph, stages="auto", micro_batches="auto", constraints=constraints, **settings)
        assert (plan.num_stages, plan.total_cost >= free.lower_bound) == (1, True)
        if "devices" in constraints:
            assert plan["layer1_ff_1"].devices == tuple(order)
        else:
            assert len({tuple(layer.splits.items()) for layer in plan if layer.name.endswith("_ff_1")}) == 1
        with pytest.raises(ConfigurationError, match="in steps of one stage alone; pin them instead"):
            pase.search(graph, stages=2, constraints=constraints, **settings)


@pytest.mark.parametrize("constraints", [{"pin": {"layer1_ff_1": "b=4"}}, {"mesh": {"data": 2, "model": 2}}])
def test_numbers_at_which_constraints_leave_nothing_are_not_chosen(constraints: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"devices": 4, "machine": "v100", "cost_model": "step", "constraints": constraints}
    graph, costs = _gpt(4, layers=1), []
    for stages, m in product((1, 2, 4), (1, 2, 4)):
        with suppress(ConfigurationError):
            costs.append(pase.search(graph, stages=stages, micro_batches=m, **settings).total_cost)
    assert 0 < len(costs) < 9
    chosen = pase.search(graph, stages="auto", micro_batches="auto", **settings)
    assert chosen.total_cost == pytest.approx(min(costs), rel=2e-3)
    with pytest.raises(ConfigurationError, match="leaves layer 'layer1_ff_1' no configuration"):
        pase.search(graph, stages="auto", **settings | {"constraints": {"pin": {"layer1_ff_1": "b=3"}}})


def test_what_no_step_can_be_is_refused() -> None:
    graph = _gpt(8)
    with pytest.raises(ConfigurationError, match="cannot be cut into 3 stages for 4 devices"):
        pase.search(graph, devices=4, machine="v100", cost_model="step", stages=3)
    with pytest.raises(ConfigurationError, match="a batch of 8 has no 3 equal micro-batches"):
        pase.search(graph, devices=4, machine="v100", cost_model="step", micro_batches=3)
    with pytest.raises(ConfigurationError, match="cost model 'paper' counts FLOP and bytes"):
        pase.search(graph, devices=4, machine="v100", stages=2)
    with pytest.raises(ConfigurationError, match="zero4"):
        pase.search(graph, devices=4, machine="v100", cost_model="step", modes=["zero4"])
    with pytest.raises(
        MemoryLimitError, match=r"no strategy of 'gpt' is known that fits 1e\+03 bytes on each of 4 dev"
    ):
        pase.search(graph, devices=4, machine="v100", cost_model="step", stages=2, device_memory_bytes=1000)


def test_modes_fit_what_splits_alone_do_not() -> None:
    """Weights' state in pieces and recomputation need less memory, and cost more where they are needed."""
    graph = _gpt(8)
    settings: dict[str, Any] = {"devices": 4, "machine": "v100", "cost_model": "alpha_beta", "optimiser": "adamw"}
    free = pase.search(graph, micro_batches=2, **settings)
    limit = int(0.6 * free.memory.total_bytes)
    fitting = pase.search(
        graph, micro_batches=2, modes=["zero1", "zero2", "zero3", "recompute"], device_memory_bytes=limit, **settings
    )
    assert fitting.memory.total_bytes <= limit < free.memory.total_bytes
    assert fitting.total_cost >= free.total_cost * (1 - 1e-9)
    assert any(layer.state != "replicated" or layer.is_recomputed for layer in fitting)


def test_numbers_that_are_chosen_are_the_best_of_all() -> None:
    settings: dict[str, Any] = {"devices": 2, "machine": "v100", "cost_model": "step", "modes": ["zero1"]}
    each = {
        (stages, m): pase.search(_gpt(2, layers=1), stages=stages, micro_batches=m, **settings)
        for stages in (1, 2)
        for m in (1, 2)
    }
    chosen = pase.search(_gpt(2, layers=1), stages="auto", micro_batches="auto", **settings)
    assert chosen.total_cost == pytest.approx(min(plan.total_cost for plan in each.values()), rel=2e-3)
    assert chosen.lower_bound <= min(plan.total_cost for plan in each.values()) * (1 + 1e-9)
    assert chosen.lower_bound >= min(plan.lower_bound for plan in each.values()) * (1 - 1e-9) or chosen.gap < 2e-3


def test_constraints_hold_for_the_layers_that_they_are_about_alone() -> None:
    """Stages of equal layers share their answers only where these may have the same configurations."""
    layer = "layer3_ff_1"
    settings: dict[str, Any] = {"devices": 8, "machine": "v100", "cost_model": "alpha_beta", "micro_batches": 4}
    free = pase.search(_gpt(16, layers=4), stages=4, **settings)
    dims = {"e": 2, "b": 1} if free[layer].splits["e"] == 1 else {"b": 2, "e": 1}
    text = next(f"{dim}={k}" for dim, k in dims.items() if k > 1)
    pinned = pase.search(_gpt(16, layers=4), stages=4, constraints={"pin": {layer: text}}, **settings)
    assert {dim: pinned[layer].splits[dim] for dim in dims} == dims
    others = [name for name in ("layer1_ff_1", "layer2_ff_1", "layer3_ff_1", "layer4_ff_1") if name != layer]
    assert any(pinned[name].splits == free[name].splits for name in others)


@pytest.mark.parametrize(("seeds", "least"), [(range(16), 8), pytest.param(range(16, 24), 5, marks=pytest.mark.full)])
def test_modes_of_single_layers_are_searched_as_brute_force_does(
    seeds: range, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer may have less to choose from than others: the optimum is that of what is left."""
    monkeypatch.setitem(globals(), "MOST", 20_000)
    checked = 0
    for seed in seeds:
        case = _random_case(seed)
        if case is None:
            continue
        layers = {"fc0": ModeSpace(states=("zero2",)), "head": ModeSpace()}
        setting, scheme = replace(case[0], space=ModeSpace(states=STATES, recompute=True, layers=layers)), case[1]
        expected = _brute_force(setting, scheme)
        if expected is None or expected == inf:
            continue
        found = solve_scheme(setting, scheme)
        assert found.cost == pytest.approx(expected, rel=1e-9)
        names = [operator.name for operator in with_cuts(setting.graph).operators]
        modes = {
            name: (STATES[state], again)
            for part in found.parts
            for (first, beyond) in part.chunks
            for name, state, again in zip(names[first:beyond], part.states, part.again, strict=True)
        }
        assert modes["fc0"] in (("zero2", False), ("replicated", False))
        assert modes["head"] == ("replicated", False)
        checked += 1
    assert checked >= least


def test_what_is_forbidden_is_in_no_layer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"devices": 4, "machine": "v100", "cost_model": "alpha_beta", "optimiser": "adamw"}
    free = pase.search(_gpt(8), micro_batches=2, **settings)
    limit = int(0.7 * free.memory.total_bytes)
    settings |= {"micro_batches": 2, "modes": ["zero2", "zero3", "recompute"], "device_memory_bytes": limit}
    plan = pase.search(
        _gpt(8), constraints={"forbid": {"*": "zero3 recompute"}, "pin": {"layer2_ff_1": "zero2"}}, **settings
    )
    assert not any(layer.state == "zero3" or layer.is_recomputed for layer in plan)
    assert plan["layer2_ff_1"].state == "zero2"
    plan.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    document["constraints"]["forbid"]["*"] = "zero2"
    (tmp_path / "changed.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(PlanError, match="that leaves layer 'layer2_ff_1' no state of its weights"):
        pase.load_plan(tmp_path / "changed.json")
    del document["constraints"]["pin"]
    (tmp_path / "changed.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(PlanError, match="state is 'zero2', which the plan's constraints do not allow"):
        pase.load_plan(tmp_path / "changed.json")


def test_modes_that_are_not_there_to_choose_from_are_told() -> None:
    settings: dict[str, Any] = {"devices": 2, "machine": "v100", "cost_model": "alpha_beta"}
    for modes in ([], ["zero1"]):
        with pytest.raises(
            ConfigurationError, match=r"pin.layer1_ff_1: that leaves .* no state of its weights; it has"
        ):
            pase.search(_gpt(4), constraints={"pin": {"layer1_ff_1": "zero2"}}, modes=modes, **settings)


@pytest.mark.parametrize("kind", ["threads", "dask"])
def test_jobs_and_executors_find_the_same(kind: str) -> None:
    settings: dict[str, Any] = {"devices": 2, "machine": "v100", "cost_model": "alpha_beta", "stages": "auto"}
    with ExitStack() as stack:
        if kind == "threads":
            executor: Any = stack.enter_context(ThreadPoolExecutor(2))
        else:
            distributed = pytest.importorskip("distributed")
            cluster = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
            executor = stack.enter_context(distributed.Client(**cluster)).get_executor()
        together = pase.search(_gpt(2, layers=1), micro_batches="auto", jobs=2, executor=executor, **settings)
    alone = pase.search(_gpt(2, layers=1), micro_batches="auto", **settings)
    assert together == replace(alone, search=together.search)


def test_a_step_without_parts_is_a_plan_as_any_other(tmp_path: Path) -> None:
    """Where nothing is gained by stages, micro-batches and modes, the plan is read and explained as others are."""
    settings: dict[str, Any] = {"devices": 4, "machine": "a100", "cost_model": "step"}
    plan = pase.search(_gpt(8), stages="auto", micro_batches=1, modes=["zero3"], **settings)
    assert not plan.has_parts
    plain = pase.search(_gpt(8), device_memory_bytes=10**12, **settings)
    assert plan.total_cost == pytest.approx(plain.total_cost, rel=1e-9)
    assert plan.hidden_cost == pytest.approx(plain.hidden_cost, rel=1e-6)
    plan.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "settings",
    [
        {"modes": ["zero1"]},
        {"modes": ["recompute"]},
        {"micro_batches": 2},
        {"micro_batches": "auto"},
        {"stages": "auto"},
    ],
)
@pytest.mark.parametrize("model", ["alpha_beta", "step"])
def test_a_single_layer_has_steps_as_others_have(settings: dict[str, Any], model: str) -> None:
    """A product of 8 × 4 by 4 × 4 and a bias, forward and for its weights alone backward, on half of the examples."""
    net = Builder("one")
    net.add(dense, "fc", net.input((8, 4)), out=(("n", 4),))
    flop_per_s, latency_s = 1e9, 1.0
    cluster = machine((0, latency_s, 1e9), flop_per_s=flop_per_s)
    plan = pase.search(net.build(), devices=2, machine=cluster, cost_model=model, **settings)
    # Halves of the output's dim need no messages.
    products, bias = 2 * 2 * 8 * 4 * 2, 8 * 2
    assert plan.total_cost == pytest.approx((products + bias) / flop_per_s)
    assert plan.exact


@pytest.mark.parametrize("m", [1, 2, 4])
def test_a_weight_that_layers_of_a_stage_share_is_sent_with_every_micro_batch(m: int) -> None:
    """Of 64 × 32 numbers a device has all rows of 8 columns, needs 16 whole rows, and sends their gradient back."""
    arguments = {"layers": 1, "model_width": 32, "heads": 4, "steps": 8, "vocabulary": 64}
    plan = pase.search(
        pase.load("gpt", batch=4 * m, arguments=arguments),
        devices=4,
        machine=machine((0, 0.0, 1e9)),
        cost_model="alpha_beta",
        micro_batches=m,
        constraints={"pin": {"tokens": "d=4", "fc": "v=4"}},
    )
    (shared,) = [each for each in plan["fc"].transfers if each.producer == "tokens"]
    num_bytes = 4 * (16 * 32 - 16 * 8)
    assert (shared.forward_bytes, shared.backward_bytes) == (m * num_bytes, m * num_bytes)
    assert shared.cost == pytest.approx(m * 2 * num_bytes / 1e9)
