"""Runs modules' own graphs under random plans, the ranks simulated in one process, beside the unmodified modules.

Each of `FUZZ_MODELS` is traced once. For each plan all ranks trace their programs, and run a forward and a backward
pass with the same weights. The loss, the outputs, the gradient of every parameter and the buffers afterwards are
compared, on each rank, with those of the unmodified module in float64 (of a module that draws numbers: of the plan for
one device).
"""

import argparse
import copy
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from pase.errors import PaseError
from pase.importers.torch.live import LiveModel, trace_live
from pase.planning.plan import Plan
from pase.targets.programs import check_trained
from pase.targets.torch import aten, aten_graph, collectives, module, parameters, states
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.aten_graph import AtenGraph
from pase.targets.torch.collectives import Groups
from pase.targets.torch.draws import seeded
from pase.targets.torch.interpreter import interpret
from pase.targets.torch.module import Parallel, loss_of
from pase.targets.torch.parameters import State, owner_of, state_of
from pase.targets.torch.placements import Stored
from pase.targets.torch.values import cut
from pase.targets.training.data import example_dims
from tests.runtime.plans import make_plan
from tests.targets.torch.fuzz_models import FUZZ_MODELS, Inputs
from tests.targets.torch.lockstep import Fabric
from tests.targets.torch.plans import plan_of

RELATIVE = 1e-11
"""By how much a number may differ, relative to the largest one of the module's outputs, gradients or buffers."""

WORLDS = (2, 4)
KINDS = ("random", "random", "states", "recomputation")
"""Of plans, as `plan_of` has them, drawn evenly."""


# -- a module by itself


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step of training gives, whole: by name, None for a gradient that is not there."""

    outputs: Mapping[str, Any]
    gradients: Mapping[str, Any]
    buffers: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module that is traced, with what is the same for every plan of it."""

    name: str
    module: nn.Module
    inputs: Inputs
    live: LiveModel
    state: State

    @cached_property
    def tensors(self) -> dict[str, Any]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    @cached_property
    def expected(self) -> Step:
        if FUZZ_MODELS[self.name].is_random:
            return self._of_one_device()
        own = copy.deepcopy(self.module)
        returned = own(**self.inputs)
        loss_of(returned).backward()
        return Step(
            outputs=_named(returned),
            gradients={name: x.grad for name, x in own.named_parameters()},
            buffers={name: x.clone() for name, x in own.named_buffers()},
        )

    def _of_one_device(self) -> Step:
        (rank,) = run(self, make_plan(self.live.model.graph, 1, {}))
        outputs = {name: x.local if isinstance(x, Shard) else x for name, x in rank.outputs.items()}
        return Step(outputs=outputs, gradients=rank.gradients, buffers=rank.buffers)


@cache
def subject(name: str) -> Subject:
    """Return a module of `FUZZ_MODELS`, traced."""
    torch.manual_seed(0)
    model = FUZZ_MODELS[name]
    made = model.make().double().train()
    inputs = model.inputs()
    return Subject(name=name, module=made, inputs=inputs, live=trace_live((made, inputs)), state=state_of(made))


def _named(returned: Any) -> dict[str, Any]:
    return dict(returned) if isinstance(returned, dict) else {"loss": returned}


# -- a plan on simulated ranks


class Simulated(Parallel):
    """A module under a plan on a rank that is a thread: parameters are plain tensors, of the rank's part alone.

    Args:
        of: The module.
        shared: What ranks have in common under a plan.
        rank: Which one.
    """

    def __init__(self, of: Subject, shared: "Shared", rank: int) -> None:
        nn.Module.__init__(self)
        self._aten, self._build, self._shared = shared.layers, shared.build, shared
        self.plan, self._state = shared.plan, of.state
        self._begin(torch.device("cpu"), rank=rank, seed=0, micro_batches=1)
        self._take_model(shared.layers.translated(of.live), example_dims(self.plan.graph, of.live.call.shapes))
        self._groups = Groups(rank, self.plan.num_devices)
        self._sum_groups = self._groups.separate("sums")
        self._boxes, self._mesh, self._original = self._read(rank), None, of.state.parts[""]
        self._install(of, rank)
        self.train()

    def _install(self, of: Subject, rank: int) -> None:
        made = {}
        for key, declared in of.state.declared.items():
            if key in self._stored.stored:
                whole = of.tensors[key].detach()
                part = cut(whole, self._stored.stored[key].held[rank]).clone(memory_format=torch.contiguous_format)
                made[key] = part if declared.is_buffer else nn.Parameter(part, declared.requires_grad)
                made[key].whole = whole  # type: ignore[attr-defined]
        for name in of.state.order:
            key = of.state.first[name]
            if key in made:
                holder, last = owner_of(self, name)
                kept = holder._buffers if of.state.declared[key].is_buffer else holder._parameters
                kept[last] = made[key]

    def _known_part(self, trains: bool, *, is_fixed: bool) -> Any:
        key = trains, is_fixed
        if key not in self._shared.parts:
            self._shared.parts[key] = super()._known_part(trains, is_fixed=is_fixed)
        return self._shared.parts[key]

    def _note_backward(self, made: Any) -> None:
        """Passes are watched in processes alone."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the ranks of a plan have in common. parts: what is known before any layer, as it is made."""

    plan: Plan
    layers: AtenLayers
    build: Callable[[Any], Any]
    parts: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shard:
    """An output that ranks have between them."""

    local: Any
    stored: Stored


@dataclass(frozen=True, kw_only=True)
class OnRank:
    """What a rank finds; outputs that it has a part of are a `Shard`, gradients and buffers are its parts."""

    stored: Mapping[str, Stored]
    outputs: Mapping[str, Any]
    gradients: Mapping[str, Any]
    buffers: Mapping[str, Any]


@contextmanager
def simulation(num_ranks: int) -> Iterator[Fabric]:
    """Have ranks be threads of this process, whose parameters are plain tensors; cache what no plan changes."""
    found = Fabric(num_ranks)
    with pytest.MonkeyPatch.context() as patched:
        for where in (collectives, states):
            patched.setattr(where, "dist", found)
        patched.setattr(module, "distributed", lambda local, stored, _mesh: Shard(local, stored))
        # What is computed of buffers before any layer is computed of what these hold first: steps are single.
        patched.setattr(module, "_whole", lambda tensor: getattr(tensor, "whole", tensor))
        patched.setattr(parameters, "_put", _put)
        for where in (aten, aten_graph):
            patched.setattr(where, "seeded", _seeded)
        patched.setattr(aten, "AtenGraph", _graph)
        patched.setattr(aten_graph, "rule_of", RULE_OF)
        yield found


_DRAWING = threading.Lock()


def _seeded(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return an operator that draws; threads have one generator."""
    drawn = seeded(function, number)

    def alone(*args: Any, **kwargs: Any) -> Any:
        with _DRAWING:
            return drawn(*args, **kwargs)

    alone.__name__ = alone.__qualname__ = drawn.__name__
    return alone


def _put(parameter: Any, piece: Any) -> Any:
    """Have a parameter hold its piece where that is in the whole, as a DTensor would."""
    parameter.data = piece.view(parameter.shape)
    return parameter.data


_GRAPHS: dict[int, AtenGraph] = {}


def _graph(live: Any, captured: Any) -> AtenGraph:
    """Return what is known of a captured graph, which is the same for all plans; subjects are kept."""
    if id(captured) not in _GRAPHS:
        _GRAPHS[id(captured)] = AtenGraph(live, captured)
    return _GRAPHS[id(captured)]


RULE_OF = cache(aten_graph.rule_of)


def run(of: Subject, plan: Plan, mutation: "Mutation | None" = None) -> list[OnRank]:
    """Return what each rank finds in a step under a plan; PaseError where the plan is refused."""
    with simulation(plan.num_devices) as between, mutation() if mutation else nullcontext():
        layers = AtenLayers(of.live, plan)
        check_trained(of.live.model.graph, layers.problem)
        shared = Shared(plan=plan, layers=layers, build=partial(interpret, *layers.program.functions))

        def of_rank(rank: int) -> OnRank:
            parallel = Simulated(of, shared, rank)
            returned = parallel(**of.inputs)
            loss_of(returned).backward()
            return OnRank(
                stored=parallel._stored.stored,
                outputs=_named(returned),
                gradients={name: x.grad for name, x in parallel.named_parameters()},
                buffers=dict(parallel.named_buffers()),
            )

        return between.run(of_rank)


# -- what is left out to see that it is detected


Mutation = Callable[[], Any]
"""Makes a context in which the backward or the forward pass lacks something."""


def _patching(where: Any, name: str, make: Callable[[Any], Any]) -> Mutation:
    @contextmanager
    def mutated() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(where, name, make(getattr(where, name)))
            yield

    return mutated


def _with_rules(**changes: Any) -> Mutation:
    return _patching(aten_graph, "rule_of", lambda rule_of: lambda node: replace(rule_of(node), **changes))


def _unreduced(self: Any, bucket: Any) -> None:
    """Give parameters this rank's part of the sum."""
    for place in sorted(bucket.arrived):
        entry = bucket.entries[place]
        gradient = bucket.arrived[place]
        self.give(entry.parameter, gradient.reshape(-1)[: entry.local.numel()].view(entry.local.shape))
    bucket.arrived.clear()


MUTATIONS: Mapping[str, Mutation] = {
    "spread": _patching(collectives._GradientSum, "backward", lambda _: staticmethod(lambda _ctx, dy: (dy, None))),
    "sum": _patching(collectives._Sum, "forward", lambda _: staticmethod(lambda _ctx, x, _adder: x.view_as(x))),
    "move": _patching(
        collectives._Move, "backward", lambda back: staticmethod(lambda ctx, dy: (0 * back(ctx, dy)[0], None))
    ),
    "bias": _with_rules(once=()),
    "mean": _with_rules(is_mean=False),
    "gradients": _patching(states.Gradients, "_launch", lambda _: _unreduced),
    "whole": _with_rules(whole=frozenset()),
    "draws": _patching(Parallel, "_draw_key", lambda _: property(lambda self: torch.tensor([self._rank, 0]))),
}
"""By name, what `--leave-out` takes."""


# -- comparisons


def differences(of: Subject, ranks: Sequence[OnRank]) -> list[str]:
    """Return what ranks find otherwise than the module by itself."""
    found: list[str] = []
    expected = of.expected
    for kind in ("outputs", "gradients", "buffers"):
        wholes: Mapping[str, Any] = getattr(expected, kind)
        size = max((float(x.detach().abs().max()) for x in wholes.values() if x is not None), default=0.0)
        missing = {key: torch.ones_like(x, dtype=torch.bool) for key, x in wholes.items() if x is not None}
        for number, rank in enumerate(ranks):
            own: Mapping[str, Any] = getattr(rank, kind)
            if kind != "gradients" and set(own) != set(wholes):
                found.append(f"rank {number} has the {kind} {sorted(own)}, not {sorted(wholes)}")
            for name, x in own.items():
                whole = wholes[name]
                held = _held(of, kind, name, x, rank, number)
                if x is None or whole is None:
                    if x is not whole:
                        found.append(f"{kind} {name}: rank {number} has {x}, not {whole}")
                    continue
                local = x.local if isinstance(x, Shard) else x
                part = whole.detach() if held is None else cut(whole.detach(), held)
                if tuple(local.shape) != tuple(part.shape):
                    found.append(
                        f"{kind} {name}: rank {number} has the shape {tuple(local.shape)}, not {tuple(part.shape)}"
                    )
                    continue
                error = float((local.detach() - part).abs().max()) if part.numel() else 0.0
                if not error <= RELATIVE * size:
                    found.append(f"{kind} {name}: rank {number} is off by {error:.2g} of {size:.2g}")
                _mark(missing[name], held)
        found += [f"{kind} {name}: no rank has all of it" for name, left in missing.items() if left.any()]
    return found


def _held(of: Subject, kind: str, name: str, x: Any, rank: OnRank, number: int) -> Any:
    """Return which part of a tensor a rank has, None for all of it."""
    if isinstance(x, Shard):
        return x.stored.held[number]
    return None if kind == "outputs" else rank.stored[of.state.first[name]].held[number]


def _mark(missing: Any, held: Any) -> None:
    """Note that some rank has a part."""
    if held is None:
        missing[...] = False
        return
    places = [torch.tensor([i for low, high in runs for i in range(low, high)], dtype=torch.long) for runs in held]
    if places:
        missing[torch.meshgrid(*places, indexing="ij")] = False
    else:
        missing[...] = False


# -- many plans


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What becomes of a plan. refused: why it is not run. wrong: what differs, or how it crashed."""

    name: str
    seed: int
    plan: Plan
    refused: str = ""
    wrong: tuple[str, ...] = ()


def drawn(of: Subject, seed: int, worlds: Sequence[int] = WORLDS) -> Plan:
    """Return the random plan of a seed."""
    numbers = Random(f"{of.name} {seed}")
    return plan_of(of.live.model.graph, numbers.choice(KINDS), numbers.choice(list(worlds)), seed)


def outcome(of: Subject, seed: int, plan: Plan, mutation: Mutation | None = None) -> Outcome:
    """Run a plan and compare it."""
    refused, wrong = "", list[str]()
    try:
        ranks = run(of, plan, mutation)
    except PaseError as error:
        refused = str(error)
    # Whatever ends a plan that was not refused is wrong.
    except Exception as error:  # noqa: BLE001
        wrong.append(f"{type(error).__name__}: {error}")
    else:
        wrong += differences(of, ranks)
    return Outcome(name=of.name, seed=seed, plan=plan, refused=refused, wrong=tuple(wrong))


def needed(found: Outcome, mutation: Mutation | None = None) -> Plan:
    """Return a plan that is wrong, too, with as few layers split as can be found by taking each one's splits away."""
    of, plan = subject(found.name), found.plan
    for place, layer in enumerate(plan.layers):
        if any(parts > 1 for parts in layer.splits.values()):
            plain = replace(layer, splits=dict.fromkeys(layer.splits, 1))
            fewer = replace(plan, layers=(*plan.layers[:place], plain, *plan.layers[place + 1 :]))
            plan = fewer if outcome(of, found.seed, fewer, mutation).wrong else plan
    return plan


def told(plan: Plan) -> str:
    """Return the layers' splits and modes."""
    lines = []
    for layer in plan.layers:
        splits = {dim: parts for dim, parts in layer.splits.items() if parts > 1}
        if splits:
            mode = f" {layer.state}{' recomputed' if layer.is_recomputed else ''}"
            lines.append(f"    {layer.name}: {splits} on {layer.devices}{mode}")
    return "\n".join(lines) or "    nothing is split"


def fuzz(
    names: Sequence[str], plans: int, seed: int = 0, worlds: Sequence[int] = WORLDS, mutation: Mutation | None = None
) -> Iterator[Outcome]:
    """Yield what becomes of plans, of each of some modules in turn."""
    for number in range(plans):
        of = subject(names[number % len(names)])
        own = seed + number // len(names)
        yield outcome(of, own, drawn(of, own, worlds), mutation)


def main() -> None:
    """Run random plans, print what is wrong and a table; end with status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.targets.torch.plan_fuzz", description=__doc__)
    parser.add_argument("--plans", type=int, default=2000, metavar="N", help="plans, over all models [2000]")
    parser.add_argument("--models", default=",".join(FUZZ_MODELS), help="names, separated by commas [all]")
    parser.add_argument("--seed", type=int, default=0, help="the first one [0]")
    parser.add_argument("--world", default="2,4", help="numbers of ranks, of which one is drawn [2,4]")
    parser.add_argument("--leave-out", choices=MUTATIONS, metavar="KIND", help=f"one of {', '.join(MUTATIONS)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, worlds = options.models.split(","), [int(world) for world in options.world.split(",")]
    mutation = MUTATIONS[options.leave_out] if options.leave_out else None
    for name in names:
        subject(name).expected  # noqa: B018
    begin = time.process_time()
    found: list[Outcome] = []
    for number, own in enumerate(fuzz(names, options.plans, options.seed, worlds, mutation)):
        found.append(own)
        if own.wrong and mutation is not None:
            print(f"{options.leave_out} is found by plan {number + 1}: {own.name}, seed {own.seed}: {own.wrong[0]}")
            return
        if own.wrong:
            print(f"WRONG {own.name}, seed {own.seed}, {own.plan.num_devices} ranks:", *own.wrong[:6], sep="\n    ")
            print("  needs:", told(needed(own)), sep="\n", flush=True)
    print(table_of(found, time.process_time() - begin))
    sys.exit(mutation is not None or any(own.wrong for own in found))


def table_of(found: Sequence[Outcome], seconds: float) -> str:
    """Return how many plans of each module were refused or wrong, and why they were refused."""
    lines = [f"{'model':12} {'plans':>6} {'refused':>8} {'wrong':>6}"]
    for name in (*dict.fromkeys(own.name for own in found), ""):
        of = [own for own in found if name in ("", own.name)]
        refused, wrong = sum(bool(own.refused) for own in of), sum(bool(own.wrong) for own in of)
        lines.append(f"{name or 'all':12} {len(of):6} {refused:8} {wrong:6}")
    reasons = Counter(re.sub(r"'[^']*'|\d+", "…", own.refused) for own in found if own.refused)
    lines += [f"refused {count}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join([*lines, f"{seconds:.1f} CPU seconds, {len(found) / max(seconds, 1e-9):.1f} plans each"])


if __name__ == "__main__":
    main()
