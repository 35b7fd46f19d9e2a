"""Weights in pieces, recomputation, micro-batches and stages at once, against the unmodified module."""

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import pase
from pase.costs import STATES
from pase.errors import PlanError
from pase.graph.stages import with_cuts
from pase.planning.plan import Plan
from pase.planning.stages import step_bytes
from pase.sharding.traffic import held_weights, optimiser_numbers
from pase.targets.emitter import emit_forward
from pase.targets.execute import run_plan
from pase.targets.jax.parallel import Parallel
from pase.targets.torch.parallel import parallelize
from pase.targets.training.optimisers import make_rule
from tests.runtime.networks import small
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import options
from tests.targets.torch.equality import full
from tests.targets.torch.lockstep import added
from tests.targets.torch.ranks import Pool
from tests.targets.torch.test_pipeline import (
    CASES,
    STEPS,
    assert_close,
    assert_same_state,
    by_itself,
    in_float64,
    in_stages,
    made,
    parallel,
    trained,
)
from tests.targets.torch.test_states import DEPTH, NUMBERS, WIDTH, Deep, _peak, _sent, data_parallel, plain, plain_batch


def in_modes(plan: Plan, seed: int, *, states: tuple[str, ...] = STATES, again: float = 0.5) -> Plan:
    """The plan with a random state for each layer, and layers that are computed again with a probability."""
    numbers = random.Random(seed)
    layers = (
        replace(layer, state=numbers.choice(states), is_recomputed=numbers.random() < again) for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def mixed_plan(name: str, world: int, stages: int, count: int, schedule: str, seed: int) -> Plan:
    """A random plan, or, of every second seed, one whose layers split examples alone, in random modes."""
    graph = with_cuts(pase.load((made(name), CASES[name].batch(0))))
    if stages > 1:
        plan = in_stages(graph, world, 2, count, schedule, seed, stages // 2)
    else:
        plan = replace(random_plan(graph, world, seed), micro_batches=count)
    if seed % 2:
        layers = (
            replace(layer, splits={dim: len(layer.devices) if dim == "b" else 1 for dim in layer.splits})
            for layer in plan.layers
        )
        plan = replace(plan, layers=tuple(layers))
    if schedule == "zero_bubble":
        return in_modes(plan, seed, states=("zero1", "zero2"), again=0.0)
    return in_modes(plan, seed)


def on_rank(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    module = parallel(name, plan)
    module.traffic.is_counted = True
    losses, first, _ = trained(module, name, plan.micro_batches)
    return losses, first, module.full_state_dict(), dict(module.traffic.sent), module.notes


QUICK = [
    ("mlp", 2, 1, 1, "", 1),
    ("gpt", 2, 1, 2, "", 3),
    ("gpt", 4, 1, 4, "", 4),
    ("cnn", 4, 1, 2, "", 5),
    ("mlp", 4, 2, 4, "1f1b", 6),
    ("mlp", 4, 2, 2, "gpipe", 7),
    ("gpt", 2, 2, 2, "1f1b", 8),
    ("gpt", 4, 2, 4, "1f1b", 9),
    ("gpt", 4, 2, 2, "1f1b", 10),
    ("cnn", 4, 2, 2, "gpipe", 11),
    ("mlp", 4, 4, 4, "interleaved", 13),
    ("mlp", 4, 2, 4, "zero_bubble", 15),
]

FULL = [
    (
        ("mlp", "gpt", "cnn")[seed % 3],
        2 + 2 * (seed % 5 > 0),
        1 + (seed % 4 > 0),
        (1, 2, 4)[seed // 3 % 3],
        ("1f1b", "gpipe")[seed % 2],
        100 + seed,
    )
    for seed in range(30)
]


@pytest.mark.parametrize(
    ("name", "world", "stages", "count", "schedule", "seed"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)],
)
def test_a_module_trains_in_all_modes_at_once(
    ranks: Pool, name: str, world: int, stages: int, count: int, schedule: str, seed: int
) -> None:
    plan = mixed_plan(name, world, stages, count, schedule, seed)
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
    if schedule != "zero_bubble" and not any(" replicated, not " in note for *_, own in found for note in own):
        sent = added([own for *_, own, _ in found])
        predicted = {movement: STEPS * bytes_ for movement, bytes_ in step_bytes(in_float64(plan)).items()}
        read = {(edge.producer, edge.consumer) for edge in plan.graph.edges} | {(n, n) for n in plan.index}
        both = {own: (sent.get(own, 0), predicted.get(own, 0)) for own in {*sent, *predicted}}
        wrong = {own: pair for own, pair in both.items() if pair[0] != pair[1] and (own.producer, own.consumer) in read}
        assert not wrong


# -- weights in pieces of layers that are computed again


def again(plan: Plan) -> Plan:
    return replace(plan, layers=tuple(replace(layer, is_recomputed=True) for layer in plan.layers))


@pytest.mark.parametrize("world", [2, 4])
def test_weights_are_gathered_once_more(ranks: Pool, world: int) -> None:
    """In a run of all layers, of three micro-batches."""
    plan = again(data_parallel(plain(), plain_batch(), world, "zero3"))
    for found in ranks.run(_sent, plan, 3, world=world):
        for layer, numbers in NUMBERS.items():
            one = 8 * numbers * (world - 1) // world
            assert found[layer, "forward"] == 2 * 3 * one
            assert found.get((layer, "backward"), 0) == (0 if layer == "first" else 3 * one)


def test_a_run_keeps_no_weight_that_is_gathered(ranks: Pool) -> None:
    """All layers are one run: the peak is that of pieces and of the weights of a layer and of the next one."""
    plan = again(data_parallel(Deep(WIDTH, DEPTH), {"x": torch.randn(4, WIDTH)}, 4, "zero3"))
    one = 4 * WIDTH * WIDTH
    assert min(ranks.run(_peak, plan, world=4)) / one <= DEPTH / 2 + 9


def test_an_optimizer_keeps_as_much_as_is_told() -> None:
    for state in STATES:
        plan = data_parallel(plain(), plain_batch(), 4, state)
        numbers = sum(NUMBERS.values()) // (1 if state == "replicated" else 4) + 3
        assert optimiser_numbers(held_weights(plan), make_rule("adam", {}).slots) == 2 * numbers


@pytest.mark.full
def test_a_compiled_module_trains_in_modes(ranks: Pool) -> None:
    plan = again(data_parallel(plain(), plain_batch(), 2, "zero3"))
    module = plain()
    loss = module(**plain_batch(1))
    loss.backward()
    for found, gradients in ranks.run(_compiled, plan, world=2):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        for gradient, parameter in zip(gradients, module.parameters(), strict=True):
            assert_close(gradient, parameter.grad, "gradient")


def _compiled(_rank: int, _world: int, plan: Plan) -> Any:
    module = parallelize((plain(), plain_batch()), plan)
    with warnings.catch_warnings():
        # PyTorch's compiler itself looks for gradients of what is no leaf, and makes objects of functions.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|.*should not be instantiated")
        loss = torch.compile(module, backend="aot_eager")(**plain_batch(1))
        loss.backward()
    return loss.item(), [full(parameter.grad).clone() for parameter in module.parameters()]


# -- emitted programs


@pytest.mark.parametrize(
    ("name", "world", "stages", "count", "seed"),
    [
        ("mlp", 4, 2, 2, 3),
        pytest.param("mlp", 2, 1, 4, 1, marks=pytest.mark.full),
        pytest.param("transformer", 4, 2, 2, 5, marks=pytest.mark.full),
    ],
)
def test_an_emitted_program_trains_in_all_modes(name: str, world: int, stages: int, count: int, seed: int) -> None:
    graph = small(name)
    if stages > 1:
        plan = in_stages(graph, world, stages, count, "1f1b", seed)
    else:
        plan = replace(make_plan(graph, world, {o.name: {"b": world} for o in graph.operators}), micro_batches=count)
    result = run_plan(in_modes(plan, seed), options(3), target="torch", measure=True)
    assert result.max_relative_difference < 1e-12
    assert result.measured_bytes == result.predicted_bytes > 0


# -- other targets


@pytest.mark.parametrize(
    ("changes", "of_layer", "match"),
    [
        ({}, {"state": "zero1"}, r"holds the weights of layer 'fc1' in pieces \(zero1\)"),
        ({}, {"is_recomputed": True}, "recomputes layer 'fc1'"),
        ({"micro_batches": 2}, {}, "has 2 micro-batches in a step"),
        ({"num_groups": 2, "micro_batches": 1}, {"stage": 1}, "has 2 stages"),
    ],
)
def test_other_targets_refuse(changes: dict[str, Any], of_layer: dict[str, Any], match: str) -> None:
    plan = random_plan(small("mlp"), 2, 1)
    layers = (replace(plan["fc1"], **of_layer), *plan.layers[1:])
    plan = replace(plan, layers=layers, **changes)
    with pytest.raises(PlanError, match=f"the plan {match}; a program for mesh_tensorflow takes no such plan"):
        pase.emit(plan, target="mesh_tensorflow")
    with pytest.raises(PlanError, match=f"the plan {match}; a forward pass for mesh_tensorflow takes no such plan"):
        emit_forward(plan)
    pytest.importorskip("jax")
    with pytest.raises(PlanError, match=f"the plan {match}; JAX takes no such plan"):
        Parallel(lambda x: x, plan, mesh=None)
