"""What ranks find of modules under plans beside the unmodified module, which each of them trains by itself, too."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import pase
from pase.graph import AllToAll
from pase.importers.torch.live import LiveModel, trace_live
from pase.machine import override_machine
from pase.planning.plan import Plan
from pase.sharding.traffic import Movement
from pase.targets.torch.module import Parallel
from pase.targets.torch.staged import Staged
from pase.targets.torch.values import from_tensors
from tests.targets.torch.lockstep import Sent, added
from tests.targets.torch.modules import MODULES, Batch, in_float64, made
from tests.targets.torch.networks import predicted
from tests.targets.torch.plans import plan_of

STEPS = 3
RELATIVE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Found:
    """What training finds: losses and norms of gradients, those of the first step, the state after the last one, whole.

    On a rank of a pipeline the gradients are those of its stages.
    """

    losses: list[float]
    norms: list[float]
    gradients: Mapping[str, Any]
    state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How a strategy differs from the unmodified module, relative; what a rank sent in a step, and all are to send.

    seed: None for the searched one. losses: the largest difference, norms of gradients included. gradients, state: by
    name.
    is_predicted: whether all that is sent can be: weights are held as the plan says, and as layers read them if there
    are micro-batches, in each of which they are summed otherwise; and the passes are no other ones (zero bubble).
    """

    seed: int | None
    losses: float
    gradients: Mapping[str, float]
    state: Mapping[str, float]
    sent: Sent
    predicted: Sent
    is_predicted: bool


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def micro_batches_of(name: str, step: int, count: int) -> list[Batch]:
    return [MODULES[name].batch(number) for number in range(step * count, (step + 1) * count)]


def of_step(batches: Sequence[Batch]) -> Batch:
    """The micro-batches of a step as one batch, the first example of each, then the second of each."""
    return {key: torch.stack([batch[key] for batch in batches], 1).flatten(0, 1) for key in batches[0]}


def stepped(module: nn.Module, name: str, batches: Sequence[Batch]) -> Any:
    """The loss of a step of so many micro-batches, whose gradients parameters have then."""
    if isinstance(module, Staged) or (isinstance(module, Parallel) and len(batches) > 1):
        return module.accumulate(**of_step(batches))
    losses = []
    for batch in batches:
        losses.append(MODULES[name].loss(module(**batch)) / len(batches))
        losses[-1].backward()
    return sum(losses)


def trained(module: nn.Module, name: str, micro_batches: int = 1) -> Found:
    # Gradients that are zero but for rounding (of keys' biases) are not blown up by this ε.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6, foreach=True)
    losses, norms, first = [], [], dict[str, Any]()
    for step in range(STEPS):
        if isinstance(module, Parallel):
            module.traffic.is_counted = not step
        loss = stepped(module, name, micro_batches_of(name, step, micro_batches))
        grads = {key: p.grad for key, p in module.named_parameters()}
        first = first or {key: None if x is None else full(x).clone() for key, x in grads.items()}
        norms.append(float(full(clipped(module))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Found(losses=losses, norms=norms, gradients=first, state=state_of(module))


def descended(module: nn.Module, x: Any, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Take steps of gradient descent; return their losses, and the state after the last one, whole."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        loss = module(x)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: full(value).clone() for key, value in module.state_dict().items()}


def clipped(module: nn.Module) -> Any:
    """The norm of the gradients, which are scaled to that of one at most."""
    if isinstance(module, Staged):
        return module.clip_grad_norm_(1.0)
    return nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def state_of(module: nn.Module) -> dict[str, Any]:
    """The state_dict of a module, whole."""
    if isinstance(module, Staged):
        return module.full_state_dict(on_all=True)
    return {key: full(x) for key, x in module.state_dict().items()}


@cache
def traced(name: str) -> tuple[nn.Module, LiveModel, Found]:
    """Return a module, what its plans are made of, and what it finds by itself."""
    # Its package is imported before what stands in it is replaced.
    module, own = made(name), made(name)
    with in_float64():
        return module, trace_live((module, MODULES[name].batch(0))), trained(own, name)


@cache
def searched(name: str, world: int) -> Plan:
    # Devices this slow are worth using even for layers this small.
    machine = override_machine(pase.load_machine("1080ti"), flop_per_s=1e9, bandwidth_bytes_per_s=None)
    plans = [pase.search(traced(name)[1].model.graph, world, machine=machine) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plans)
    assert plans[0] is not None
    return plans[0]


def compared(rank: int, world: int, kind: str, name: str, seeds: Sequence[int | None]) -> list[Compared]:
    """Return how a module trains under plans of a kind; without a seed, under the searched one."""
    # Modules of plans before have process groups, with threads of their own, until nothing refers to them.
    gc.collect()
    graph = traced(name)[1].model.graph
    plans = {seed: searched(name, world) if seed is None else plan_of(graph, kind, world, seed) for seed in seeds}
    return [compared_under(plan, name, rank, seed) for seed, plan in plans.items()]


def compared_under(plan: Plan, name: str, rank: int, seed: int | None) -> Compared:
    """Return how a module trains under a plan, beside the unmodified one."""
    parallel = parallel_module(plan, name, rank)
    alone = _alone(name, plan.micro_batches) if plan.micro_batches > 1 else traced(name)[2]
    return _beside(plan, seed, trained(parallel, name, plan.micro_batches), alone, parallel)


def parallel_module(plan: Plan, name: str, rank: int) -> Parallel:
    """Return a module under a plan on a rank; it is traced once, whatever the plans."""
    module, live, _ = traced(name)
    values = {**dict(module.named_buffers(remove_duplicate=False)), **module.state_dict(keep_vars=True)}
    made = Staged if plan.num_groups > 1 else Parallel
    parallel = made(module, live, plan, rank=rank, weights=from_tensors(values), seed=0)
    parallel.train()
    return parallel


@cache
def _alone(name: str, micro_batches: int) -> Found:
    own = made(name)
    with in_float64():
        return trained(own, name, micro_batches)


def _beside(plan: Plan, seed: int | None, own: Found, alone: Found, parallel: Parallel) -> Compared:
    assert list(own.state) == list(alone.state)
    expected = {key: alone.gradients[key] for key in own.gradients}
    assert isinstance(parallel, Staged) or expected.keys() == alone.gradients.keys()
    without = [[name for name, x in each.items() if x is None] for each in (own.gradients, expected)]
    assert without[0] == without[1], without
    size = max(float(x.norm()) for x in alone.gradients.values() if x is not None)
    return Compared(
        seed=seed,
        losses=max(
            abs(a - b) / abs(b) for a, b in zip((*own.losses, *own.norms), (*alone.losses, *alone.norms), strict=True)
        ),
        gradients={
            key: difference(own.gradients[key], x)
            for key, x in expected.items()
            # What is far below all others is rounding alone.
            if x is not None and x.norm() > 1e-12 * size
        },
        state={key: difference(own.state[key], x) for key, x in alone.state.items()},
        sent=sent_by(parallel, plan),
        predicted=predicted_of(plan),
        is_predicted=is_predicted(plan, parallel),
    )


def is_predicted(plan: Plan, parallel: Parallel) -> bool:
    """Return whether all that ranks send can be predicted (see `Compared`)."""
    is_moved = any(reading.steps for reading in parallel._stored.readings.values())
    is_otherwise = any(" replicated, not " in note for note in parallel.notes)
    return not (is_otherwise or (is_moved and plan.micro_batches > 1) or plan.schedule == "zero_bubble")


def _told(plan: Plan, moved: Sent) -> Sent:
    """Leave out what layers send of which the data tell where it goes: predictions are of rows routed evenly.

    In a pipeline, what copies of a weight send that are held otherwise than layers read them, too.
    """
    routed = {op.name for op in plan.graph.operators if any(isinstance(x, AllToAll) for x in op.exchanges)}
    edges = {(edge.producer, edge.consumer) for edge in plan.graph.edges} | {(name, name) for name in plan.index}
    return {
        own: count
        for own, count in moved.items()
        if own.producer != own.consumer or own.consumer not in routed
        if plan.num_groups == 1 or (own.producer, own.consumer) in edges
    }


def predicted_of(plan: Plan) -> Sent:
    """Return what ranks together are predicted to send, of what `sent_by` counts."""
    return _told(plan, predicted(plan))


def sent_by(parallel: Parallel, plan: Plan) -> Sent:
    """Return what a rank sent, but for outputs that it gives whole and weights held otherwise than layers read them."""
    held = {name for name, _ in parallel.named_parameters()} | {name for name, _ in parallel.named_buffers()}
    sent = parallel.traffic.sent.items()
    own_sent = {own: n for own, n in sent if n and own.producer not in held and own.consumer != "the model"}
    return _told(plan, own_sent)


def wrong_bytes(by_rank: Sequence[Sent], expected: Sent) -> dict[Movement, tuple[int, int]]:
    """Return what ranks together sent and were to send, where these differ."""
    sent = added(by_rank)
    both = {key: (sent.get(key, 0), expected.get(key, 0)) for key in {*sent, *expected}}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def difference(found: Any, expected: Any) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def assert_close(found: Any, expected: Any, what: object) -> None:
    error = difference(found, expected)
    assert error < RELATIVE, (what, error)


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(found) == list(expected)
    for key, x in expected.items():
        assert_close(found[key], x, key)


def check(by_rank: Sequence[Sequence[Compared]]) -> None:
    """Assert that ranks find what the module by itself does, and together send what is predicted."""
    for found in zip(*by_rank, strict=True):
        for own in found:
            all_own = {**own.gradients, **own.state, "": own.losses}
            wrong = {name: x for name, x in all_own.items() if not x <= RELATIVE}
            assert not wrong, (own.seed, wrong)
        if all(own.is_predicted for own in found):
            unlike = wrong_bytes([own.sent for own in found], found[0].predicted)
            assert not unlike, (found[0].seed, unlike)
