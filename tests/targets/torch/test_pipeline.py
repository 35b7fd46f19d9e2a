"""Pipelines: modules in stages on ranks, with random configurations within these, against the unmodified module."""

import copy
import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pase
from pase.errors import ModelError, PlanError, ProgramError
from pase.graph import Graph, uniform
from pase.graph.stages import Stage, cuts, with_cuts
from pase.planning.plan import SCHEDULES, Plan
from pase.planning.stages import Action, actions, stage_plan, step_bytes
from pase.targets.emitter import emit
from pase.targets.execute import Factory, run_factory, run_plan
from pase.targets.torch.checkpoints import load_checkpoint, save_checkpoint
from pase.targets.torch.parallel import parallelize
from tests.runtime.networks import small, tied
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import options
from tests.simulation.machines import machine
from tests.targets.torch import factories
from tests.targets.torch.equality import difference, full
from tests.targets.torch.lockstep import added
from tests.targets.torch.modules import Batch, Block, Module, floats, words
from tests.targets.torch.ranks import Pool


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in ((8, 16), (16, 16), (16, 32), (32, 16), (16, 4))))

    def forward(self, x: Any, labels: Any) -> Any:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return functional.cross_entropy(self.layers[-1](x), labels)


class Gpt(nn.Module):
    """The table of the tokens is that of the projection to them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(24, 16), nn.Sequential(Block(16, 4), Block(16, 4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = functional.dropout(self.tokens(tokens), 0.0)
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


class Pictures(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.after = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.third, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 4 * 4, 4)

    def forward(self, x: Any, labels: Any) -> Any:
        x = functional.relu(self.norm(self.first(x)))
        x = functional.relu(self.after(self.second(x)))
        return functional.cross_entropy(self.head(self.third(x).flatten(1)), labels)


def _labels(count: int, seed: int) -> Any:
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed))


CASES = {
    "mlp": Module(make=Layers, batch=lambda seed: {**floats(seed, "x", 4, 8), "labels": _labels(4, seed)}),
    "gpt": Module(make=Gpt, batch=lambda seed: words(seed, "tokens", "targets", shape=(4, 8))),
    "cnn": Module(make=Pictures, batch=lambda seed: {**floats(seed, "x", 4, 3, 8, 8), "labels": _labels(4, seed)}),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().double()


def micro_batches(name: str, step: int, count: int) -> list[Batch]:
    return [CASES[name].batch(100 * step + i) for i in range(count)]


def together(batches: list[Batch]) -> Batch:
    """A step of micro-batches, example e of the i-th of m at e · m + i."""
    return {key: torch.stack([batch[key] for batch in batches], 1).flatten(0, 1) for key in batches[0]}


def staged_plan(name: str, world: int, groups: int, count: int, schedule: str, seed: int, chunks: int = 1) -> Plan:
    graph = pase.load((made(name), CASES[name].batch(0)))
    return in_stages(graph, world, groups, count, schedule, seed, chunks)


def in_stages(graph: Graph, world: int, groups: int, count: int, schedule: str, seed: int, chunks: int = 1) -> Plan:
    """A plan with random cuts, and random configurations and devices within the stages."""
    graph = with_cuts(graph)
    numbers, size = random.Random(seed), world // groups
    weighted = [i for i, operator in enumerate(graph.operators) if operator.parameters]
    possible = [at for at in cuts(graph) if weighted[0] < at <= weighted[-1]]
    at = sorted(numbers.sample(possible, groups * chunks - 1))
    layers = []
    for i, layer in enumerate(random_plan(graph, size, seed).layers):
        stage = sum(i >= cut for cut in at)
        first = stage % groups * size
        layers.append(replace(layer, stage=stage, devices=tuple(first + device for device in layer.devices)))
    return replace(
        make_plan(graph, world, {}),
        layers=tuple(layers),
        num_groups=groups,
        micro_batches=count,
        schedule=schedule,
    )


STEPS = 2


@cache
def by_itself(name: str, count: int) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, first gradients and the state in the end of the unmodified module."""
    module = made(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, first = [], dict[str, Any]()
    for step in range(STEPS):
        found = [module(**batch) for batch in micro_batches(name, step, count)]
        loss = sum(found) / count
        loss.backward()
        first = first or {key: p.grad.clone() for key, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, module.state_dict()


def parallel(name: str, plan: Plan) -> Any:
    return parallelize((made(name), CASES[name].batch(0)), plan)


def trained(module: Any, name: str, count: int, steps: range = range(STEPS)) -> tuple[list[float], dict[str, Any], Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, first = [], dict[str, Any]()
    for step in steps:
        loss = module.accumulate(**together(micro_batches(name, step, count)))
        first = first or {key: full(p.grad).clone() for key, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, optimizer


def on_rank(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    module = parallel(name, plan)
    module.traffic.is_counted = True
    losses, first, _ = trained(module, name, plan.micro_batches)
    return losses, first, module.full_state_dict(), dict(module.traffic.sent)


def assert_close(found: Any, expected: Any, what: object) -> None:
    error = difference(found, expected)
    assert error < 1e-12, (what, error)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for key, x in expected.items():
        assert_close(found[key], x, key)


QUICK = [
    ("mlp", 2, 2, 2, "gpipe", 1, 0),
    ("mlp", 4, 2, 4, "1f1b", 1, 1),
    ("mlp", 4, 4, 8, "zero_bubble", 1, 2),
    ("mlp", 2, 2, 4, "interleaved", 2, 3),
    ("gpt", 2, 2, 2, "zero_bubble", 1, 4),
    ("gpt", 4, 2, 4, "1f1b", 1, 5),
    ("gpt", 4, 2, 4, "interleaved", 2, 6),
    ("cnn", 4, 2, 2, "1f1b", 1, 7),
]

FULL = [
    (name, world, groups, count, schedule, chunks, seed)
    for seed, (name, (world, groups, chunks), (schedule, count)) in enumerate(
        product(
            CASES,
            ((2, 2, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2)),
            (("gpipe", 2), ("1f1b", 8), ("zero_bubble", 4)),
        )
    )
]


@pytest.mark.parametrize(
    ("name", "world", "groups", "count", "schedule", "chunks", "seed"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)],
)
def test_a_module_trains_in_stages(
    ranks: Pool, name: str, world: int, groups: int, count: int, schedule: str, chunks: int, seed: int
) -> None:
    """Random cuts, random configurations and devices within stages: losses, gradients, state, and bytes."""
    plan = staged_plan(name, world, groups, count, schedule, seed, chunks)
    losses, gradients, state = by_itself(name, count)
    found = ranks.run(on_rank, name, plan, world=world)
    size = max(float(x.norm()) for x in gradients.values())
    seen = set[str]()
    for found_losses, found_gradients, *_ in found:
        assert found_losses == pytest.approx(losses, rel=1e-12)
        seen |= found_gradients.keys()
        for key, gradient in found_gradients.items():
            # What is far below all others (biases before norms) is rounding alone.
            if gradients[key].norm() > 1e-12 * size:
                assert_close(gradient, gradients[key], f"gradient of {key}")
    assert seen == gradients.keys()
    assert_same_state(found[0][2], state)
    if schedule != "zero_bubble":
        sent = added([own for *_, own in found])
        predicted = {movement: STEPS * bytes_ for movement, bytes_ in step_bytes(in_float64(plan)).items()}
        ends = {layer.name for layer in plan.layers}
        read = {(edge.producer, edge.consumer) for edge in plan.graph.edges} | {(name, name) for name in ends}
        # What is held otherwise than layers read it, the tied table among it, is no edge of the graph.
        both = ({own: bytes_ for own, bytes_ in each.items() if bytes_} for each in (sent, predicted))
        counted, expected = (
            {own: n for own, n in each.items() if (own.producer, own.consumer) in read} for each in both
        )
        assert counted == expected


@pytest.mark.parametrize(("name", "world"), [("mlp", 4), pytest.param("gpt", 4, marks=pytest.mark.full)])
def test_stages_in_turns_that_a_search_finds_train_as_the_module_does(ranks: Pool, name: str, world: int) -> None:
    slow = machine((0, 1e-6, 1e9), flop_per_s=1e6)
    asked: dict[str, Any] = {"devices": world, "machine": slow, "cost_model": "alpha_beta", "schedule": "interleaved"}
    plan = pase.search((made(name), together(micro_batches(name, 0, 4))), stages=2, micro_batches=4, **asked)
    assert (plan.schedule, plan.num_groups, plan.num_stages > 2) == ("interleaved", 2, True)
    losses, _, state = by_itself(name, 4)
    found = ranks.run(on_rank, name, plan, world=world)
    assert all(own == pytest.approx(losses, rel=1e-12) for own, *_ in found)
    assert_same_state(found[0][2], state)


def in_float64(plan: Plan) -> Plan:
    return replace(plan, graph=plan.graph.in_precision(uniform("float64")))


# -- the order of passes


def of_stage(schedule: str, group: int, groups: int, count: int) -> str:
    """The passes of a group with one stage, as F0 F1 B0 …"""
    found = actions(schedule, group=group, num_groups=groups, num_stages=groups, micro_batches=count)
    return " ".join(f"{each.kind[0].upper()}{each.micro_batch}" for each in found)


def test_passes_are_in_the_order_of_the_schedules() -> None:
    """GPipe (Huang et al., figure 2), 1F1B (Narayanan et al., figure 4) and zero bubble (Qi et al., figure 2)."""
    for group in range(3):
        assert of_stage("gpipe", group, 3, 3) == "F0 F1 F2 B0 B1 B2"
    assert [of_stage("1f1b", group, 4, 4) for group in range(4)] == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [of_stage("zero_bubble", group, 2, 3) for group in range(2)] == [
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
        "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]


def test_chunks_take_micro_batches_in_rounds() -> None:
    """Narayanan et al. 2021, figure 4: two chunks on each of two groups, four micro-batches."""
    found = actions("interleaved", group=0, num_groups=2, num_stages=4, micro_batches=4)
    passes = " ".join(f"{each.kind[0].upper()}{each.stage}.{each.micro_batch}" for each in found)
    assert passes == ("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3")


@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(1, 3), st.integers(1, 12))
def test_no_schedule_waits_for_ever(schedule: str, groups: int, chunks: int, count: int) -> None:
    """Every pass is done once, each after those that it needs, whatever the numbers."""
    stages = groups * chunks
    left = [
        list(actions(schedule, group=group, num_groups=groups, num_stages=stages, micro_batches=count))
        for group in range(groups)
    ]
    done = set[tuple[str, int, int]]()
    most = dict.fromkeys(range(stages), 0)

    def is_ready(kind: str, stage: int, i: int) -> bool:
        if kind == "forward":
            return stage == 0 or ("forward", stage - 1, i) in done
        if kind == "weights":
            return ("inputs", stage, i) in done
        return ("forward", stage, i) in done and (stage == stages - 1 or (kind, stage + 1, i) in done)

    while any(left):
        before = len(done)
        for own in left:
            while own and is_ready(own[0].kind, own[0].stage, own[0].micro_batch):
                action = own.pop(0)
                done.add((action.kind, action.stage, action.micro_batch))
                ways = [
                    sum(key[:2] == (kind, action.stage) for key in done) for kind in ("forward", "backward", "inputs")
                ]
                most[action.stage] = max(most[action.stage], ways[0] - ways[1] - ways[2])
        assert len(done) > before
    kinds = 3 if schedule == "zero_bubble" else 2
    assert len(done) == kinds * stages * count
    if chunks == 1 and schedule != "gpipe":
        assert most == {stage: min(count, groups - stage) for stage in range(stages)}


def _done(rank: int, _world: int, name: str, plan: Plan) -> Any:
    module, done = parallel(name, plan), list[Action]()
    module._stages.done = done.append
    module.accumulate(**together(micro_batches(name, 0, plan.micro_batches)))
    return done == list(
        actions(plan.schedule, group=rank, num_groups=2, num_stages=2, micro_batches=plan.micro_batches)
    )


def test_ranks_do_what_the_schedule_says(ranks: Pool) -> None:
    assert all(ranks.run(_done, "mlp", staged_plan("mlp", 2, 2, 4, "1f1b", 1), world=2))


# -- what else a module does


def _saved(_rank: int, _world: int, plan: Plan, folder: str) -> Any:
    module = parallel("gpt", plan)
    optimizer = trained(module, "gpt", 2)[-1]
    save_checkpoint(folder, module, optimizer, step=STEPS)
    again = parallel("gpt", plan)
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(folder, again, other)
    loss = again.accumulate(**together(micro_batches("gpt", STEPS, 2)))
    other.step()
    return loss.item(), again.full_state_dict(on_all=True)


def _loaded(_rank: int, _world: int, plan: Plan, folder: str) -> Any:
    module = parallel("gpt", plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(folder, module, optimizer)
    losses = [module(**batch) for batch in micro_batches("gpt", STEPS, 2)]
    loss = sum(losses) / 2
    loss.backward()
    optimizer.step()
    return loss.item(), module.full_state_dict(on_all=True)


def test_a_checkpoint_of_stages_goes_on_with_and_without_them(ranks: Pool, tmp_path: Path) -> None:
    plan = staged_plan("gpt", 4, 2, 2, "1f1b", 8)
    staged = ranks.run(_saved, plan, str(tmp_path), world=4)
    alone = ranks.run(_loaded, random_plan(plan.graph, 2, 1), str(tmp_path), world=2)
    for loss, state in (*staged, *alone):
        assert loss == pytest.approx(alone[0][0], rel=1e-12)
        assert_same_state(state, alone[0][1])


def _evaluated(_rank: int, _world: int, plan: Plan) -> Any:
    module, by_hand = parallel("cnn", plan), made("cnn")
    for each in micro_batches("cnn", 0, 2):
        by_hand(**each)
    module.accumulate(**together(micro_batches("cnn", 0, 2)))
    module.eval()
    by_hand.eval()
    batch = CASES["cnn"].batch(7)
    with torch.no_grad():
        return float(module(**batch)), float(by_hand(**batch))


def test_evaluation_goes_through_the_stages(ranks: Pool) -> None:
    for found, expected in ranks.run(_evaluated, staged_plan("cnn", 2, 2, 2, "1f1b", 2), world=2):
        assert found == pytest.approx(expected, rel=1e-12)


def _clipped(_rank: int, _world: int, plan: Plan) -> Any:
    module = parallel("gpt", plan)
    with module.no_sync():
        module.accumulate(**together(micro_batches("gpt", 0, 2)))
    module.accumulate(**together(micro_batches("gpt", 1, 2)))
    norm = module.clip_grad_norm_(0.5)
    return float(norm), {key: full(p.grad).clone() for key, p in module.named_parameters()}


def test_gradients_are_left_unsummed_and_clipped_over_all_stages(ranks: Pool) -> None:
    module = made("gpt")
    for step in range(2):
        (sum(module(**batch) for batch in micro_batches("gpt", step, 2)) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
    expected = {key: p.grad for key, p in module.named_parameters()}
    for found, gradients in ranks.run(_clipped, staged_plan("gpt", 4, 2, 2, "1f1b", 3), world=4):
        assert found == pytest.approx(norm, rel=1e-12)
        for key, gradient in gradients.items():
            if expected[key].norm() > 1e-12 * norm:
                assert_close(gradient, expected[key], key)


def _loads(_rank: int, _world: int, plan: Plan) -> Any:
    module, other = parallel("gpt", plan), made("gpt")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    module.load_state_dict(other.state_dict())
    twin = copy.deepcopy(module)
    return twin.full_state_dict(on_all=True), {**other.state_dict()}


def test_a_whole_state_is_loaded(ranks: Pool) -> None:
    for found, expected in ranks.run(_loads, staged_plan("gpt", 4, 2, 2, "1f1b", 3), world=4):
        assert_same_state(found, expected)


def _first_values(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    with torch.device("meta"):
        module = CASES[name].make()
    return parallelize((module, CASES[name].batch(0)), plan, seed=3).full_state_dict(on_all=True)


def test_first_values_are_those_without_stages(ranks: Pool) -> None:
    """A module without values draws the same numbers in stages, on any rank."""
    plan = staged_plan("gpt", 4, 2, 2, "1f1b", 3)
    alone = ranks.run(_first_values, "gpt", random_plan(plan.graph, 2, 1), world=2)[0]
    for state in ranks.run(_first_values, "gpt", plan, world=4):
        assert list(state) == list(alone)
        assert all(torch.equal(x, alone[key]) for key, x in state.items())


def _refused(_rank: int, _world: int, plan: Plan) -> Any:
    module, batch = parallel("mlp", plan), CASES["mlp"].batch(0)
    with pytest.raises(ProgramError, match=r"trains by loss = module\.accumulate"):
        module(**batch)
    with pytest.raises(ModelError, match="has 4 examples; a step has 8, 2 micro-batches of 4"):
        module.accumulate(**batch)


def test_what_a_pipeline_does_not_do_is_said(ranks: Pool) -> None:
    plan = staged_plan("mlp", 2, 2, 2, "1f1b", 1)
    ranks.run(_refused, plan, world=2)
    layers = tuple(replace(layer, devices=(0,)) for layer in plan.layers)
    with pytest.raises(PlanError, match=r"is on devices \[0\]; expected those of its group, 1 to 1"):
        emit(replace(plan, layers=layers), target="torch")
    with pytest.raises(PlanError, match="for 1 groups of 2 devices; expected stages that count up from 0"):
        emit(replace(plan, num_groups=1), target="torch")
    for what, changes in (("is recomputed", {"is_recomputed": True}), ("has its weights in", {"state": "zero3"})):
        layers = (replace(plan.layers[0], **changes), *plan.layers[1:])
        with pytest.raises(PlanError, match=f"{what}.*under the schedule zero_bubble a backward pass goes through"):
            emit(replace(plan, layers=layers, schedule="zero_bubble"), target="torch")


# -- emitted programs


def test_a_stage_is_a_plan_of_its_own() -> None:
    plan = staged_plan("gpt", 4, 2, 2, "1f1b", 3)
    for number in range(2):
        own = stage_plan(plan, number)
        assert own.num_devices == 2
        assert [layer.name for layer in own] == [layer.name for layer in plan if layer.stage == number]
        assert all(sorted(layer.devices) == [0, 1] for layer in own)
        assert isinstance(own.graph, Stage)
        assert own.graph.whole is plan.graph


@pytest.mark.parametrize(
    ("name", "world", "groups", "schedule"),
    [
        ("tied", 2, 2, "gpipe"),
        pytest.param("mlp", 4, 2, "1f1b", marks=pytest.mark.full),
        pytest.param("transformer", 4, 2, "1f1b", marks=pytest.mark.full),
    ],
)
def test_an_emitted_program_trains_in_stages(name: str, world: int, groups: int, schedule: str) -> None:
    plan = in_stages(tied() if name == "tied" else small(name), world, groups, 4, schedule, 4)
    result = run_plan(plan, options(3), target="torch", measure=True)
    assert result.max_relative_difference < 1e-12
    assert result.accuracies == result.reference_accuracies
    assert result.measured_bytes == result.predicted_bytes


def _printed(program: Path, *arguments: str) -> list[float]:
    command = [sys.executable, str(program), "--dtype", "float64", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


@pytest.mark.full
def test_the_module_of_a_factory_trains_in_stages() -> None:
    name = f"{factories.__name__}:tagger"
    plan = in_stages(pase.load(name), 2, 2, 4, "1f1b", 3)
    result = run_factory(plan, Factory(name=name), options(3, rate=0.01), measure=True)
    assert result.max_relative_difference < 1e-12
    assert result.losses[2] < result.losses[0]


@pytest.mark.full
def test_an_emitted_program_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    program, kept = tmp_path / "program.py", str(tmp_path / "kept")
    program.write_text(emit(in_stages(tied(), 2, 2, 2, "1f1b", 4), target="torch"))
    _printed(program, "--steps", "2", "--checkpoint", kept, "--optimizer", "adam")
    more = _printed(program, "--steps", "4", "--checkpoint", kept, "--resume", "--optimizer", "adam")
    whole = _printed(program, "--steps", "4", "--optimizer", "adam")
    assert more == pytest.approx(whole[2:], rel=1e-12)
