"""`check_on_rank`: compare, on a rank, a module under a plan with the module itself, in every type and mode.

Every rank also runs the unmodified module, with the setup of `comparison.py` for both, and compares everything that it
has of the module under the plan: outputs, gradients, buffers, and the changes made by two optimizer steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pase.errors import PaseError, ProgramError
from pase.graph import rounding
from pase.graph.precision import FLOAT32
from pase.importers.front_end import call_factory, first_line
from pase.importers.torch.export import call_of, unwrapped
from pase.importers.torch.live import LiveModel
from pase.importers.torch.training import held_instead, restored
from pase.planning.plan import Plan
from pase.targets.differences import RankCheck, Run
from pase.targets.torch.comparison import (
    Computed,
    compared,
    gradients_of,
    outputs_of,
    places_of,
    repeatable,
    step,
    tensors_held,
    whole,
    with_loss,
)
from pase.targets.torch.launch import join
from pase.targets.torch.located import differing_layers
from pase.targets.torch.messages import told_by, told_by_all
from pase.targets.torch.module import Parallel, loss_of
from pase.targets.torch.parallel import Inputs, check_types, named_inputs, traced_of_plan
from pase.targets.torch.parts import check_hooks
from pase.targets.torch.staged import Staged
from pase.targets.torch.tensor import computing_in
from pase.targets.torch.values import from_tensors

STEPS = 2
_SHARE_CHANGED = 0.01
"""Of the weights, by the first step: so much that a later step computes with other ones."""

_AMPLIFIED = 1024.0
"""How many times a module may enlarge the rounding of float64, before it is taken for something else."""

_OF_OWN_ROUNDING = 8.0
"""Factor on a module's own distance to its float64 values, to allow for its rounding."""

MODES = ("training", "evaluation")


class _WithoutDrops(Parallel):
    """A module under a plan, without dropout."""

    _drops_nothing = True


class _StagedWithoutDrops(Staged):
    """A module under a plan with a pipeline, without dropout."""

    _drops_nothing = True


def check_alone(source: Any, plan: Plan, seed: int) -> RankCheck:
    """Return what `check_on_rank` does in this process, for a plan of one device.

    Raises:
        ProgramError: This process is one of several ranks; or as `check_on_rank`.
    """
    was_in_group = dist.is_initialized()
    if join(device="cpu").world_size > 1:
        raise ProgramError(
            f"this process is one of {dist.get_world_size()} ranks; a check starts its own: call it in one process"
        )
    try:
        return check_on_rank(source, plan, seed)
    finally:
        if not was_in_group:
            dist.destroy_process_group()


def check_on_rank(source: Any, plan: Plan, seed: int) -> RankCheck:
    """Return the differences between a module under a plan and the module itself; all ranks call it.

    Args:
        source: The module and its call, as for `parallelize`; or the arguments of `call_factory` to make it: name,
            batch and arguments.
        plan: Plan for the present number of ranks.
        seed: Seed of the weights that a factory draws, and of inputs without values.

    Raises:
        ProgramError: The module itself fails, or has no values.
        RankError: A rank failed.
    """
    ranks = join(device="cpu")
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return _checked_on(ranks.rank, source, plan, seed)


def _checked_on(rank: int, source: Any, plan: Plan, seed: int) -> RankCheck:
    batch = None
    is_factory = isinstance(source[0], str)
    if is_factory:
        name, batch, arguments = source
        source, took_batch = call_factory(name, batch=batch, arguments=arguments, front_ends=())
        batch = None if took_batch else batch
    module, positional, keywords, loss = call_of(torch, source, batch)
    module = unwrapped(torch, module)
    check_hooks(module)
    for name, tensor in tensors_held(module).items():
        if tensor.is_meta:
            raise ProgramError(f"{name!r} was made without values (on the device 'meta'); give a module that has them")
    checked = _Check(module, (positional, keywords), loss, plan, rank, seed, makes_up=is_factory)
    with restored(torch, module):
        checked.run()
    return checked.found


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Results of a module.

    Attributes:
        forward: Results of a forward pass without gradients, in evaluation; None in training.
        steps: Results of each step.
        narrow: Float types other than float64 in the computation.
    """

    forward: Computed | None
    steps: list[Computed]
    narrow: frozenset[torch.dtype] = frozenset()


class _Check:
    def __init__(
        self, module: nn.Module, example: Any, loss: Any, plan: Plan, rank: int, seed: int, *, makes_up: bool
    ) -> None:
        self._module, self._example, self._loss, self._plan = module, example, loss, plan
        self._rank, self._seed, self._makes_up = rank, seed, makes_up
        self._values = {name: x.detach().clone() for name, x in tensors_held(module).items()}
        self._rates: dict[str, float] = {}
        self.found = RankCheck(names=tuple(self._values))

    def run(self) -> None:
        """Compare in float64, and in the module's own types."""
        kinds = {x.dtype for x in self._values.values() if x.is_floating_point()}
        exact: dict[str, _Steps] = {}
        own = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        is_mixed = self._plan.precision.is_mixed
        types: list[tuple[str, torch.dtype | None]] = [("float64", torch.float64)]
        self._has_own_types = is_mixed or bool(kinds - {torch.float64})
        if self._has_own_types:
            types.append((self._plan.precision.name if is_mixed else own, None))
        for name, dtype in types:
            alone: dict[str, _Steps] = {}
            try:
                with _computing(dtype):
                    alone = {mode: self._by_itself(dtype, mode) for mode in MODES}
            # The module's own code may raise anything, in types that it was not written for.
            except Exception as error:
                if dtype is None or len(types) == 1:
                    raise ProgramError(f"the module itself cannot be trained here: {first_line(error)}") from error
                self.found.not_compared.append(f"{name}: the module itself does not run in it ({first_line(error)})")
                continue
            self._compare_in(name, dtype, alone, exact)
            exact = alone

    def _compare_in(
        self, name: str, dtype: torch.dtype | None, alone: Mapping[str, _Steps], exact: Mapping[str, _Steps]
    ) -> None:
        """Compare all modes in some types; exact: results of the module itself with less rounding, if available."""
        plan = self._plan
        if dtype is not None:
            plan = replace(plan, graph=plan.graph.in_precision(FLOAT32))
        with _computing(dtype):
            live, problem = self._tried(lambda: self._traced(plan, dtype))
        for mode in MODES:
            run = Run(devices=plan.num_devices, dtype=name, mode=mode)
            found = None
            if live is not None:
                with _computing(dtype):
                    found, problem = self._tried(partial(self._under_plan, run, plan, live, dtype))
            if found is None:
                self.found.refused[run] = problem
                continue
            assert live is not None
            is_wrong = self._compare(run, plan, live, found, alone[mode], exact.get(mode))
            if mode == "evaluation" and plan.num_groups == 1 and any(self._of_all(is_wrong)):
                with _computing(dtype):
                    self._locate(run, plan, live, dtype, _explained(run, plan, alone[mode]))

    def _traced(self, plan: Plan, dtype: torch.dtype | None) -> LiveModel:
        positional, keywords = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: _converted(x, dtype), self._example
        )
        with self._held(dtype):
            if dtype is None:
                check_types(self._module, plan)
            source = (self._module, positional, keywords, *([self._loss] if self._loss else []))
            return traced_of_plan(source, plan)

    def _tried(self, function: Callable[[], Any]) -> tuple[Any, str]:
        """Return a function's result on this rank, or None and the reason of a rank that rejects it; collective."""
        try:
            found, problem = function(), ""
        except PaseError as error:
            found, problem = None, str(error)
        if dist.get_world_size() > 1:
            problem = next(filter(None, told_by_all(problem)), "")
        return (None if problem else found), problem

    # -- comparisons

    def _by_itself(self, dtype: torch.dtype | None, mode: str) -> _Steps:
        low = self._plan.precision.results if dtype is None and self._plan.precision.is_mixed else ""
        call, count = with_loss(self._module, self._loss), self._plan.micro_batches
        inputs = self._inputs(dtype)
        given = [[inputs.of_micro_batch(number, i) for i in range(count)] for number in range(STEPS)]

        first = inputs.of_micro_batch()

        def called(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
            with computing_in(low, torch.device("cpu")):
                return call(*positional, **keywords)

        with self._held(dtype) as held, repeatable() as repeated:
            self._set(self._module, mode)

            def computed(number: int) -> Computed:
                if count == 1:
                    return step(lambda: called(*given[number][0]), held, lambda: tensors_held(self._module))
                losses = []
                for positional, keywords in given[number]:
                    loss = loss_of(called(positional, keywords))
                    (loss / count).backward()
                    losses.append(loss.detach())
                return Computed(
                    loss=torch.stack(losses).mean(),
                    outputs={},
                    gradients=gradients_of(held),
                    held=tensors_held(self._module),
                )

            forward = _forward(lambda: called(*first)) if mode == "evaluation" else None
            steps = self._trained(mode, computed, self._module)
            return _Steps(forward=forward, steps=steps, narrow=frozenset(repeated.narrow))

    def _under_plan(self, run: Run, plan: Plan, live: LiveModel, dtype: torch.dtype | None) -> _Steps:
        mode = run.mode
        made = _StagedWithoutDrops if plan.num_groups > 1 else _WithoutDrops
        with self._held(dtype):
            self._set(self._module, mode)
            values = from_tensors(tensors_held(self._module))
            parallel = made(self._module, live, plan, rank=self._rank, weights=values, seed=self._seed)
        self._set(parallel, mode)
        self.found.held |= tensors_held(parallel).keys()
        inputs = self._inputs(dtype)
        positional, keywords = inputs.of_micro_batch()

        def computed(number: int) -> Computed:
            args, kwargs = inputs.of_step(number)
            if plan.micro_batches == 1 and plan.num_groups == 1:
                held = tensors_held(parallel)
                return step(lambda: parallel(*args, **kwargs), held, lambda: tensors_held(parallel))
            loss = parallel.accumulate(*args, **kwargs)
            held = tensors_held(parallel)
            return Computed(
                loss=loss,
                outputs={},
                gradients=gradients_of(held),
                held={name: whole(x.detach()) for name, x in held.items()},
            )

        forward, problem = None, ""
        with repeatable():
            if mode == "evaluation":
                forward, problem = self._tried(lambda: _forward(lambda: parallel(*positional, **keywords)))
            steps = self._trained(mode, computed, parallel)
        if problem:
            self.found.not_compared.append(f"{run.text}, forward pass: {problem}")
        if dtype is None or not self._has_own_types:
            self.found.notes += [note for note in parallel.notes if note not in self.found.notes]
        return _Steps(forward=forward, steps=steps)

    def _trained(self, mode: str, computed: Callable[[int], Computed], module: nn.Module) -> list[Computed]:
        """Return the results of a module in some steps of SGD with momentum, including parameter changes."""
        optimizer, steps = None, []
        for number in range(STEPS):
            module.zero_grad()
            found = computed(number)
            found = replace(
                found,
                outputs={name: x.detach().clone() for name, x in found.outputs.items()},
                gradients={name: x.detach().clone() for name, x in found.gradients.items()},
                held={name: x.detach().clone() for name, x in found.held.items()},
            )
            if optimizer is None:
                optimizer = torch.optim.SGD(module.parameters(), lr=self._rate(mode, found), momentum=0.9)
            optimizer.step()
            after = {name: whole(x.detach()) for name, x in module.named_parameters(remove_duplicate=False)}
            changes = {name: x - found.held[name] for name, x in after.items()}
            steps.append(replace(found, changes=changes))
        return steps

    def _rate(self, mode: str, first: Computed) -> float:
        """Return the learning rate of a mode, one for all types and ranks. first: The module's own first step."""
        if mode not in self._rates:
            rate = _rate(first)
            self._rates[mode] = told_by(0, rate) if dist.get_world_size() > 1 else rate
        return self._rates[mode]

    def _compare(
        self, run: Run, plan: Plan, live: LiveModel, found: _Steps, alone: _Steps, exact: _Steps | None
    ) -> bool:
        """Add what differs in a run; return whether something does in the forward pass without gradients."""
        explained = _explained(run, plan, alone)
        places = places_of(live)
        pairs: list[tuple[int, Computed | None, Computed | None, Computed | None]]
        pairs = [(0, found.forward, alone.forward, exact.forward if exact else None)]
        pairs += [
            (number + 1, found.steps[number], alone.steps[number], exact.steps[number] if exact else None)
            for number in range(STEPS)
        ]
        missing = dict[str, None]()
        for number, ours, theirs, precise in pairs:
            if ours is None or theirs is None:
                continue
            theirs = _of_names(theirs, ours.held)
            precise = None if precise is None else _of_names(precise, ours.held)
            differences, count, lost = compared(ours, theirs, explained, places, precise, _OF_OWN_ROUNDING)
            self.found.compared[run] = self.found.compared.get(run, 0) + count
            missing |= dict.fromkeys(lost)
            self.found.differences += [replace(each, run=run, step=number, rank=self._rank) for each in differences]
        if missing:
            self.found.not_compared.append(
                f"{run.text}: the module under the plan does not return {', '.join(missing)}"
            )
        return any(each.run == run and each.step == 0 for each in self.found.differences)

    def _locate(self, run: Run, plan: Plan, live: LiveModel, dtype: torch.dtype | None, explained: float) -> None:
        """Add the layers at which a difference in evaluation begins."""
        positional, keywords = self._inputs(dtype).of_micro_batch()
        with self._held(dtype) as held:
            self._module.eval()
            weights = from_tensors(tensors_held(self._module))
            with repeatable():
                layers, problem = self._tried(
                    lambda: differing_layers(
                        self._module,
                        live,
                        plan,
                        (positional, keywords),
                        rank=self._rank,
                        weights=weights,
                        held=held,
                        explained=explained,
                    )
                )
        if problem:
            self.found.not_compared.append(f"{run.text}, layers: {problem}")
        elif not any(self._of_all(bool(layers))):
            self.found.notes.append(
                "in evaluation every layer computes what was traced of it: what differs is the trace of the module "
                "(torch.export), or is made of the layers' results"
            )
        self.found.differences += [replace(each, run=run, rank=self._rank) for each in layers or ()]

    @staticmethod
    def _of_all(is_so: bool) -> list[bool]:
        """Return the flags of all ranks; all of them call it."""
        return told_by_all(is_so) if dist.get_world_size() > 1 else [is_so]

    # -- the module, its values and inputs

    @contextmanager
    def _held(self, dtype: torch.dtype | None) -> Iterator[dict[str, Any]]:
        """Temporarily replace the module's tensors by copies of the initial values in some type."""
        module, values = self._module, self._values
        with (
            restored(torch, module),
            held_instead(torch, module, lambda name, _: _converted(values[name], dtype)) as held,
        ):
            yield held

    def _inputs(self, dtype: torch.dtype | None) -> Inputs:
        positional, keywords = self._example
        named = named_inputs(self._module, positional, keywords, self._loss)
        return Inputs(self._plan, named, self._example, dtype=dtype, seed=self._seed, makes_up=self._makes_up)

    @staticmethod
    def _set(module: nn.Module, mode: str) -> None:
        """Set a module to a mode; in training, parts that were in evaluation remain so."""
        if mode == "evaluation":
            module.eval()
        elif not module.training:
            module.train()


def _forward(call: Callable[[], Any]) -> Computed:
    with torch.no_grad():
        return Computed(loss=None, outputs=outputs_of(call()), gradients={}, held={})


def _converted(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a copy of a tensor, in a type if it holds floats."""
    x = x.detach().clone()
    if dtype is None or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.to(dtype.to_complex() if x.is_complex() else dtype)


@contextmanager
def _computing(dtype: torch.dtype | None) -> Iterator[None]:
    """Have modules make tensors in a type."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _rate(found: Computed) -> float:
    """Return a learning rate by which a step changes the weights by a small share of their size."""
    weights = sum(float(found.held[name].abs().pow(2).sum()) for name in found.gradients)
    gradients = sum(float(x.abs().pow(2).sum()) for x in found.gradients.values())
    return _SHARE_CHANGED * (weights / gradients) ** 0.5 if weights > 0 and gradients > 0 else _SHARE_CHANGED


def _explained(run: Run, plan: Plan, alone: _Steps) -> float:
    """Return the relative difference that rounding explains."""
    layers, types = len(plan.layers), plan.precision
    narrow = [str(kind).removeprefix("torch.") for kind in alone.narrow]
    if not narrow:
        return _AMPLIFIED * rounding("float64", "float64", layers)
    limit = max(rounding(name, "float32", layers) for name in narrow)
    return limit if run.dtype == "float64" else max(limit, rounding(types.results, types.parameters, layers))


def _of_names(computed: Computed, names: Mapping[str, Any]) -> Computed:
    """Restrict a step's results to the parameters and buffers that a rank has."""
    if not names:
        return computed
    return replace(
        computed,
        gradients={name: x for name, x in computed.gradients.items() if name in names},
        held={name: x for name, x in computed.held.items() if name in names},
        changes={name: x for name, x in computed.changes.items() if name in names},
    )
