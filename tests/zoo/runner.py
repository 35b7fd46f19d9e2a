"""Trains models of the zoo under plans on ranks, and compares them with the module that nobody changed."""

import re
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pase
from pase.analysis.baselines.rules import same_dims
from pase.errors import PaseError
from pase.graph import Graph
from pase.graph.operator import access_dims
from pase.importers.torch.live import LiveModel, trace_live
from pase.machine import override_machine
from pase.planning.plan import Plan
from pase.targets.torch.first_step import FirstStep
from pase.targets.torch.module import Parallel
from pase.targets.torch.values import from_tensors
from tests.runtime.plans import make_plan, placed, random_plan
from tests.targets.torch.equality import full, is_predicted, predicted_of, sent_by, wrong_bytes
from tests.targets.torch.lockstep import Sent
from tests.targets.torch.ranks import Pool, RanksFailedError
from tests.zoo.registry import exact, zoo

AMPLIFIED = 10.0
"""Times what the last bits of weights move a module that is within rounding: ranks add in another order throughout."""
STEPS = 3
RELATIVE = 1e-11
FLOOR = 1e-3
"""A gradient below this share of the largest one is compared as if it were as large: the rest is rounding of sums."""
NOISE = 1e-12
"""A gradient below this share of the largest one is rounding alone, as that of a bias before a normalisation is, and
AdamW makes steps of it that are as large as any other."""
NOISY = 1e-8
"""What parameters of such gradients differ by at most."""

SEARCHED, TENSOR_PARALLEL = "searched", "tensor-parallel"
PLANS = (SEARCHED, TENSOR_PARALLEL, "random 0", "random 1")
EQUAL, REFUSED, WRONG, CRASHED = "equal", "refused", "WRONG", "CRASHED"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What three steps leave: losses, gradients of the first step, and values after the last one, whole."""

    losses: list[float]
    gradients: Mapping[str, Any]
    state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a model under a plan.

    Attributes:
        kind: EQUAL, REFUSED, WRONG or CRASHED.
        message: Of the error, or what differs and by how much; "" where it is equal.
        error: The largest relative difference.
        notes: Of the parallel module.
        sent: By this rank in the first step, what can be predicted of it.
        predicted: For all ranks, None where not all of it can be.
        bytes: What ranks sent otherwise than predicted, "" for nothing.
        surplus: Bytes that they sent more than predicted, in all.
    """

    kind: str
    message: str = ""
    error: float = 0.0
    notes: tuple[str, ...] = ()
    sent: Sent = field(default_factory=dict)
    predicted: Sent | None = None
    bytes: str = ""
    surplus: int = 0


@dataclass(kw_only=True)
class Report:
    """What came of a model under all plans, by (processes, plan)."""

    name: str
    family: str
    outcomes: dict[tuple[int, str], Outcome] = field(default_factory=dict)
    cpu_s: float = 0.0

    @property
    def kind(self) -> str:
        """The worst that came of it; a model is refused where one plan is."""
        kinds = {outcome.kind for outcome in self.outcomes.values()}
        return next((kind for kind in (CRASHED, WRONG, REFUSED) if kind in kinds), EQUAL)

    def text(self) -> str:
        """Return a line, and one more for each thing that is not equal."""
        largest = max((outcome.error for outcome in self.outcomes.values()), default=0.0)
        lines = [f"{self.family}: {self.name}: {self.kind} ({largest:.0e}, {self.cpu_s:.1f} s)"]
        told = dict[tuple[str, str], list[str]]()
        for (world, plan), outcome in self.outcomes.items():
            if outcome.kind != EQUAL:
                told.setdefault((outcome.kind, outcome.message), []).append(f"{plan} on {world}")
        lines += [f"    {kind} ({', '.join(where)}): {message}" for (kind, message), where in told.items()]
        lines += [
            f"    {outcome.bytes} ({plan} on {world})"
            for (world, plan), outcome in self.outcomes.items()
            if outcome.bytes
        ]
        return "\n".join(lines)


def run(pool: Pool, names: Sequence[str], worlds: Sequence[int], plans: Sequence[str]) -> Iterator[Report]:
    """Yield a report of each model."""
    models = zoo()
    for name in names:
        report = Report(name=name, family=models[name].family)
        alone = _asked(pool, report, 1, name, ("one device",), None)
        reference = None if alone is None else alone[0]
        if report.kind == EQUAL:
            for world in worlds:
                _asked(pool, report, world, name, plans, reference if models[name].is_random else None)
        yield report


def _asked(
    pool: Pool, report: Report, world: int, name: str, plans: Sequence[str], reference: Training | None
) -> list[Any] | None:
    """Add outcomes of plans on so many ranks; return what the first of them trained, on one rank."""
    try:
        by_rank = pool.run(_on_rank, name, plans, reference, world=world, timeout_s=300.0, grace_s=5.0)
    except RanksFailedError as error:
        last = error.args[0].strip().splitlines()[-1]
        report.outcomes[world, "all plans"] = Outcome(kind=CRASHED, message=f"ranks: {last}")
        return None
    for number, plan in enumerate(plans):
        outcomes = [found[0][number] for found in by_rank]
        order = (CRASHED, WRONG, REFUSED, EQUAL)
        worst = min(outcomes, key=lambda outcome: order.index(outcome.kind))
        told, surplus = _wrong_bytes(outcomes)
        report.outcomes[world, plan] = replace(worst, bytes=told, surplus=surplus)
    report.cpu_s += sum(found[2] for found in by_rank)
    return [by_rank[0][1]]


def _wrong_bytes(outcomes: Sequence[Outcome]) -> tuple[str, int]:
    """Return what ranks sent otherwise than predicted, in words, and how many bytes more in all."""
    expected = outcomes[0].predicted
    if expected is None or any(outcome.predicted is None for outcome in outcomes):
        return "", 0
    wrong = wrong_bytes([outcome.sent for outcome in outcomes], expected)
    if not wrong:
        return "", 0
    first, (sent, told) = next(iter(wrong.items()))
    surplus = sum(pair[0] - pair[1] for pair in wrong.values())
    text = (
        f"bytes: {len(wrong)} movements differ, by {surplus} B of {sum(expected.values())} B; the first: "
        f"{first.phase.value} of {first.producer} to {first.consumer}: {sent} B, predicted {told} B"
    )
    return text, surplus


# -- on ranks


def _on_rank(_rank: int, world: int, name: str, plans: Sequence[str], reference: Training | None) -> Any:
    """Return outcomes, what was trained on one rank, and CPU seconds."""
    begin_s = time.process_time()
    outcomes, trained = list[Outcome](), None
    with warnings.catch_warnings(action="ignore"), exact(zoo()[name]):
        for plan in plans:
            outcome, trained = _outcome(name, world, plan, reference)
            outcomes.append(outcome)
    return outcomes, trained if world == 1 else None, time.process_time() - begin_s


def _outcome(name: str, world: int, kind: str, reference: Training | None) -> tuple[Outcome, Training | None]:
    try:
        live = _traced(name)[1]
        plan = _plan(live.model.graph, world, kind)
        parallel = _parallel(name, plan)
        trained = _trained(parallel, name)
    except PaseError as error:
        return Outcome(kind=REFUSED, message=_one_line(str(error))), None
    # Whatever the library or the module raises is what the run is to find.
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {error}"
        return Outcome(kind=CRASHED, message=_one_line(message)), None
    notes = tuple(dict.fromkeys(parallel.notes))
    if reference is None and zoo()[name].is_random:
        # Each step was compared with the module, with the same random numbers.
        unchecked = [note for note in notes if "not compared" in note]
        return Outcome(kind=CRASHED if unchecked else EQUAL, message="; ".join(unchecked), notes=notes), trained
    problem, error = differing(trained, reference or _alone(name))
    if problem and error < AMPLIFIED * _moved_by_an_ulp(name):
        # The module itself is moved as much by the last bits of its weights.
        problem = ""
    outcome = Outcome(
        kind=WRONG if problem else EQUAL,
        message=problem,
        error=error,
        notes=notes,
        sent=sent_by(parallel, plan),
        predicted=predicted_of(plan) if is_predicted(plan, parallel) else None,
    )
    return outcome, trained


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:400]


# The plans of a model follow one another: a rank keeps the last one.
@lru_cache(maxsize=1)
def _traced(name: str) -> tuple[nn.Module, LiveModel]:
    model = zoo()[name]
    module = model.module()
    return module, trace_live((module, model.batch(0)))


@lru_cache(maxsize=1)
def _alone(name: str) -> Training:
    return _trained(zoo()[name].module(), name)


@lru_cache(maxsize=1)
def _moved_by_an_ulp(name: str) -> float:
    """Return what the last bit of each weight, up or down at random, changes of what the module itself trains."""
    module = zoo()[name].module()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                way = torch.randint(0, 2, parameter.shape, generator=generator).double() * 2 - 1
                parameter.mul_((1 + way * torch.finfo(torch.float64).eps).to(parameter.dtype))
    return differing(_trained(module, name), _alone(name))[1]


def _parallel(name: str, plan: Plan) -> Parallel:
    module, live = _traced(name)
    values = {**dict(module.named_buffers(remove_duplicate=False)), **module.state_dict(keep_vars=True)}
    parallel = Parallel(module, live, plan, rank=dist.get_rank(), weights=from_tensors(values), seed=0)
    parallel.train()
    if plan.num_devices == 1:
        # Others have the seed alone of the random numbers of one device: all of its steps are compared.
        parallel.compare_steps(FirstStep(module, None, live, plan).run, is_always=zoo()[name].is_random)
    return parallel


def _plan(graph: Graph, world: int, kind: str) -> Plan:
    """Return the plan of a kind, the same on all ranks."""
    plans: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            plans = [_plan_alone(graph, world, kind)]
        # The others are to have it, too.
        except Exception as error:  # noqa: BLE001
            plans = [error]
    dist.broadcast_object_list(plans)
    if isinstance(plans[0], Exception):
        raise plans[0]
    plan: Plan = plans[0]
    return plan


def _plan_alone(graph: Graph, world: int, kind: str) -> Plan:
    if world == 1:
        return pase.search(graph, 1)
    if kind == SEARCHED:
        # Devices this slow are worth using even for layers this small.
        machine = override_machine(pase.load_machine("1080ti"), flop_per_s=1e9, bandwidth_bytes_per_s=None)
        return pase.search(graph, world, machine=machine)
    if kind == TENSOR_PARALLEL:
        return tensor_parallel(graph, world)
    return random_plan(graph, world, int(kind.removeprefix("random ")))


def tensor_parallel(graph: Graph, num_devices: int) -> Plan:
    """Return a plan that splits features of weights, and all that has the same ones; never the batch.

    Of two products one after the other the first is split by columns, the second by rows.
    """
    classes, chosen = same_dims(graph), set[int]()
    splits = dict[str, dict[str, int]]()
    for operator in graph.operators:
        own = {access_dim for access in operator.parameters for access_dim in access_dims(access)}
        divisible = [
            dim
            for dim, extent in operator.extents.items()
            if dim != "b" and dim not in operator.unsplittable and extent % num_devices == 0
        ]
        shared = [dim for dim in divisible if classes[operator.name, dim] in chosen]
        free = [dim for dim in divisible if dim in own]
        if not shared and free:
            chosen.add(classes[operator.name, free[0]])
            shared = free
        splits[operator.name] = dict.fromkeys(shared[:1], num_devices)
    return placed(make_plan(graph, num_devices, splits))


def _trained(module: nn.Module, name: str) -> Training:
    """Train for three steps and return what that leaves."""
    torch.manual_seed(5)
    # The ε leaves gradients that are zero but for rounding as small as they are.
    optimizer = torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad], lr=1e-3, eps=1e-6, foreach=True
    )
    losses, gradients = list[float](), dict[str, Any]()
    for step in range(STEPS):
        if isinstance(module, Parallel):
            module.traffic.is_counted = not step
        found = module(**zoo()[name].batch(step))
        loss = found if isinstance(found, torch.Tensor) else found["loss"]
        loss.backward()
        if not step:
            gradients = {key: _whole(parameter.grad) for key, parameter in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(full(loss.detach())))
    return Training(losses=losses, gradients=gradients, state={k: _whole(x) for k, x in module.state_dict().items()})


def _whole(x: Any) -> Any:
    return None if x is None else full(x).detach().clone()


def differing(found: Training, expected: Training) -> tuple[str, float]:
    """Return what differs beyond rounding and by how much, "" for nothing; and the largest relative difference."""
    errors = dict[str, float]()
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        errors[f"loss of step {step + 1}"] = _relative(_number(mine), _number(theirs), 0.0)
    sizes = [float(x.abs().max()) for x in expected.gradients.values() if x is not None and x.numel()]
    largest_gradient = max(sizes, default=0.0)
    floor = FLOOR * largest_gradient
    noisy = {
        f"value of {name}"
        for name, x in expected.gradients.items()
        if x is not None and float(x.abs().max()) <= NOISE * largest_gradient
    }
    for what, mine_by_name, theirs_by_name, least in (
        ("gradient", found.gradients, expected.gradients, floor),
        ("value", found.state, expected.state, 0.0),
    ):
        if mine_by_name.keys() != theirs_by_name.keys():
            return f"{what}s have other names: {sorted(mine_by_name.keys() ^ theirs_by_name.keys())[:4]}", float("inf")
        for name, theirs in theirs_by_name.items():
            errors[f"{what} of {name}"] = _relative(mine_by_name[name], theirs, least)
    largest = max((error for what, error in errors.items() if what not in noisy), default=0.0)
    # Not a number is no less than the tolerance.
    wrong = {what: error for what, error in errors.items() if not error <= (NOISY if what in noisy else RELATIVE)}
    if not wrong:
        return "", largest
    first = next(iter(wrong))
    losses = f"losses {found.losses}, expected {expected.losses}" if "loss" in first else f"{wrong[first]:.1e}"
    return f"{len(wrong)} of {len(errors)} differ, the first: {first}: {losses}", largest


def _number(x: float) -> Any:
    return torch.tensor(x, dtype=torch.float64)


def _relative(found: Any, expected: Any, least: float) -> float:
    """Return the largest difference as a share of the largest value, or of the least size that one counts as."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if found.shape != expected.shape or found.dtype.is_floating_point != expected.dtype.is_floating_point:
        return float("inf")
    if not expected.numel():
        return 0.0
    if expected.dtype.is_complex:
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.double(), expected.double()
    if torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected)):
        return 0.0
    size = max(float(expected.abs().max()), least, 1e-300)
    return float((found - expected).abs().max()) / size
