"""A program for PyTorch as a rank runs it: its shards of the weights, its steps, and `main`, its command line."""

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist

from pase.common.options import PATH, ProgramCommand, option
from pase.errors import PaseError, ProgramError
from pase.sharding.boxes import Box, extents
from pase.sharding.reshard import sum_groups
from pase.sharding.traffic import Movement
from pase.targets.torch.batches import micro_batch
from pase.targets.torch.checkpoints import Opened, Part, RankCheckpoints, save_state
from pase.targets.torch.collectives import Groups, Traffic, all_reduced
from pase.targets.torch.gradients import Entry, Gradients
from pase.targets.torch.launch import Ranks, join, leave, naming_lost_ranks, run_program, tell_failure
from pase.targets.torch.parameters import add_gradient
from pase.targets.torch.pipeline import Pipeline
from pase.targets.torch.program import Program, Traced, Weight
from pase.targets.torch.states import Pieces, gather_in_place, held_whole
from pase.targets.torch.tensor import Tensor, computing_in, widened
from pase.targets.training.checkpointing import (
    Kept,
    called,
    check_fits,
    checkpoint_flags,
    stopped_text,
)
from pase.targets.training.data import (
    Array,
    DataInput,
    Evaluation,
    filled_batches,
    held_out_batches,
    joined_rows,
    read_arrays,
    write_arrays,
)
from pase.targets.training.initial import given_value, initial_value
from pase.targets.training.masks import NOTHING_DROPPED, Key, step_key
from pase.targets.training.metrics import MetricsFile
from pase.targets.training.moved import tabulated
from pase.targets.training.options import GPU, TrainingOptions, device_choice, device_options, training_options
from pase.targets.training.script import (
    Keeping,
    Report,
    StepResult,
    Steps,
    chosen_batches,
    given_values,
    reporting,
    script_flags,
)

Outputs = Mapping[str, tuple[Tensor, tuple[int, ...]]]
"""Tensors by the names of the model's outputs, and the shapes that these have."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

Build = Callable[[Program], Tensor | Outputs | tuple[Tensor, Outputs]]

Pass = tuple[Any, Any, Sequence[Any]]
"""Of a micro-batch: the loss, how many of this rank's labels are right, the values of statistics."""


@dataclass(frozen=True, slots=True, eq=False)
class _ShardMaths:
    """`Maths` on the shards of one weight; arrays that lack dims of it have one point there.

    pieces: of which one is the shard, None where it is a whole part.
    """

    weight: Weight
    groups: Groups
    pieces: Pieces | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.tensor.shape

    def sqrt(self, x: Any) -> Any:
        return x.sqrt()

    def at_least(self, x: Any, floor: float) -> Any:
        return x.clamp(min=floor)

    def mean(self, x: Any, dims: Sequence[int]) -> Any:
        tensor = self.weight.tensor
        own = tensor.shard if self.pieces is None else self.pieces.piece_shape
        brought = [dim for dim in dims if x.shape[dim] > 1 or own[dim] == 1]
        if not brought:
            return x
        total = x.sum(brought, keepdim=True)
        axes = tensor.mesh.split(tensor.names[dim] for dim in brought)
        if axes:
            total = all_reduced(total, self.groups.of(sum_groups(tensor.mesh.devices, axes)))
        if self.pieces is not None and self.pieces.dim in brought:
            total = all_reduced(total, self.pieces.group)
        return total / prod(self.shape[dim] for dim in brought)


class RankTraining:
    """A program on this rank, that trains it one batch a step, so many micro-batches.

    is_restored: whether a checkpoint is to give it its weights; else they are those of the options' file, or drawn.
    """

    def __init__(
        self,
        build: Build | Pipeline,
        ranks: Ranks,
        options: TrainingOptions,
        *,
        micro_batches: int = 1,
        is_restored: bool = False,
    ) -> None:
        self.num_steps, self.micro_batches = 0, micro_batches
        self._build, self._ranks, self._rule, self._rank = build, ranks, options.rule, ranks.rank
        self._seed = options.seed or 0
        self._dtype = None if options.dtype == "float32" else getattr(torch, options.dtype)
        self.traffic = Traffic()
        self.groups, self._sum_groups = self._groups()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.program = self._traced(trains=True)
        if self.low == "float16":
            raise ProgramError(
                "products in float16 need a loss that is scaled, which programs do not do: make your own module "
                "parallel (pase.parallelize, torch.amp.GradScaler), search with --precision bf16-mixed, or give "
                "--dtype float64"
            )
        self._evaluated: Traced | None = None
        kept = self.program.weights.values()
        constants = [each.name for each in kept if not (each.is_trained or each.is_frozen or each.is_statistic)]
        values = None if is_restored else given_values(options.weights_path, constants)
        first = self._empty if is_restored else partial(self._first, values)
        self.shards = {weight.name: first(weight) for weight in kept}
        # What the graph is given of weights, of which gradients are made; the shards themselves but for pieces.
        self.leaves = dict(self.shards)
        for name, own in self.program.pieces.items():
            self.leaves[name], self.shards[name] = held_whole(own, self.shards[name])
            self.leaves[name] = self.leaves[name].detach()
        self._is_gathered = False
        for weight in kept:
            for tensor in (self.shards[weight.name], self.leaves[weight.name]):
                tensor.requires_grad_(weight.is_trained)
        self._state: dict[str, dict[str, Any]] = {}
        entries = {
            name: Entry(
                parameter=self.shards[name],
                local=self.shards[name],
                sum=own,
                give=self._give,
                pieces=self.program.pieces.get(name),
            )
            for name, own in self.program.sums.items()
        }
        self._gradients = Gradients(list(entries.values()), self._sum_groups, self.traffic)
        for name in entries:
            self.leaves[name].register_post_accumulate_grad_hook(partial(self.take, name))

    def step(
        self, batch: Mapping[str, Array], *, learning_rate: float | None = None, with_record: bool = False
    ) -> StepResult:
        """Train on one batch and return the loss.

        Raises ProgramError where the loss or a gradient is not finite; the step has changed nothing then. The record
        is what all ranks sent, by whose it is.
        """
        assert learning_rate is not None
        self.traffic.is_counted = with_record
        found = self.gradients(batch)
        self.traffic.is_counted = False
        result = self.descend(found, learning_rate)
        return replace(result, record=dict(self.traffic.sent)) if with_record else result

    def gradients(self, batch: Mapping[str, Array]) -> list[Pass]:
        """Go forward and backward through each micro-batch; return the loss of each, and what else `descend` is given.

        Afterwards shards have their gradients, summed over the ranks.
        """
        self._is_gathered = False
        found, count = list[Pass](), self.micro_batches
        for number in range(count):
            own = {name: micro_batch(array, number, count) for name, array in batch.items()}
            with nullcontext() if number + 1 == count else self._gradients.held():
                found.append(self._pass(own, step_key(self._seed, self.num_steps * count + number)))
        return found

    def _pass(self, batch: Mapping[str, Array], key: Key) -> Pass:
        loss, outputs, statistics = self._run(self.program, batch, key)
        with naming_lost_ranks():
            (loss / self.micro_batches).backward()
        return loss.detach(), self._correct(self.program, outputs), statistics

    def descend(self, found: Sequence[Pass], learning_rate: float) -> StepResult:
        """Update weights and statistics after `gradients`, whose results are given; errors as of `step`."""
        losses, correct, statistics = zip(*found, strict=True)
        loss = torch.stack(losses).mean()
        trained = {n: x for n, x in self.shards.items() if x.grad is not None}
        accuracy = self._check(loss, [x.grad for x in trained.values()], sum(correct))
        with torch.no_grad(), naming_lost_ranks():
            scalars = self._rule.scalars(self.num_steps + 1, learning_rate)
            for name, shard in trained.items():
                self._update(name, shard, scalars)
            for values in statistics:
                for (name, momentum), value in zip(self.program.keeps, values, strict=True):
                    self.shards[name].lerp_(value, momentum)
        self.num_steps += 1
        self._is_gathered = False
        return StepResult(loss=loss.item(), accuracy=accuracy)

    def _groups(self) -> tuple[Groups, Groups]:
        groups = Groups(self._ranks.rank, self._ranks.world_size)
        return groups, groups.beside("sums")

    def _give(self, shard: Any, gradient: Any) -> None:
        add_gradient(shard, gradient)

    @property
    def step_inputs(self) -> list[DataInput]:
        count = self.micro_batches
        return [
            replace(item, shape=(item.shape[0] * count, *item.shape[1:])) if item.shape else item
            for item in self.program.inputs.values()
        ]

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: weight.tensor.shape for name, weight in self.program.weights.items()}

    def take(self, name: str, leaf: Any) -> None:
        """Take this rank's part of a weight's gradient, which its leaf has."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            self._gradients.arrived(self.shards[name], gradient)

    def gather(self) -> None:
        """Gather the weights that stay whole, of which ranks have updated pieces."""
        held = [(own, self.leaves[name], self.shards[name]) for name, own in self.program.pieces.items() if own.is_kept]
        if not self._is_gathered:
            with torch.no_grad():
                gather_in_place(held, self.traffic)
            self._is_gathered = True

    def evaluate(self, batch: Mapping[str, Array]) -> Evaluation:
        """Return the loss and the accuracy of a batch; the forward pass alone runs, drops nothing, changes nothing."""
        traced, (loss, outputs, _) = self._computed(batch)
        counts = self._over_ranks(self._correct(traced, outputs))
        return Evaluation(loss=loss.item(), accuracy=accuracy_of(traced, counts[0]))

    def outputs(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the model computes of a batch, whole and in its own shapes, by name; it drops nothing."""
        traced, (_, shards, _) = self._computed(batch)
        found = zip(traced.results.items(), shards[: len(traced.results)], strict=True)
        return {name: _whole(tensor, shard).reshape(self.shapes[name]) for (name, tensor), shard in found}

    def _declared(self, *, trains: bool) -> Program:
        return Program(
            rank=self._rank,
            num_devices=self.groups.num_ranks,
            trains=trains,
            groups=self.groups,
            traffic=self.traffic,
            counts=True,
            is_of_one_type=self._dtype not in (None, torch.float32),
            pieces=None if trains else self.program.pieces,
        )

    def _traced(self, *, trains: bool) -> Traced:
        program = self._declared(trains=trains)
        assert not isinstance(self._build, Pipeline)
        built = self._build(program)
        self._dtype, self.low = self._dtype or getattr(torch, program.dtype), program.low
        if isinstance(built, Tensor):
            return program.traced(built)
        loss, outputs = built if isinstance(built, tuple) else (None, built)
        self.shapes = {name: shape for name, (_, shape) in outputs.items()}
        return program.traced(loss, {name: tensor for name, (tensor, _) in outputs.items()})

    def _computed(self, batch: Mapping[str, Array]) -> tuple[Traced, tuple[Any, Sequence[Any], Sequence[Any]]]:
        if self._evaluated is None:
            self._evaluated = self._traced(trains=False)
        with torch.no_grad():
            return self._evaluated, self._run(self._evaluated, batch, NOTHING_DROPPED)

    def _run(self, program: Traced, batch: Mapping[str, Array], key: Key) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Return the loss, the outputs and the values of statistics, as this rank has them."""
        self.gather()
        arguments = self.arguments(program, batch, key)
        with naming_lost_ranks(), computing_in(self.low, self._ranks.device), program.freed():
            found: tuple[Any, Sequence[Any], Sequence[Any]] = program.module(*arguments)
        return found

    def arguments(
        self, program: Traced, batch: Mapping[str, Array], key: Key, received: Mapping[str, Any] = NOTHING
    ) -> list[Any]:
        """Return what a program's graph is given; received: of the stage before."""
        found: list[Any] = []
        for name in program.arguments:
            if name in received:
                found.append(received[name])
            elif name in program.inputs:
                fed = torch.as_tensor(np.ascontiguousarray(batch[name]), device=self._ranks.device)
                found.append(fed if program.inputs[name].below else fed.to(self._dtype))
            else:
                weight, piece = program.weight_of(name), program.piece_of(name)
                held = self.leaves[weight] if weight else self.shards[piece].detach() if piece else None
                found.append(torch.as_tensor(key) if held is None else held)
        return found

    def _first(self, values: Mapping[str, Array] | None, weight: Weight) -> Any:
        """Return this rank's part of a weight's first values, drawn, or of those that are given."""
        shape = weight.tensor.shape
        if values is None or (weight.is_statistic and weight.name not in values):
            whole = initial_value(weight.name, shape, weight.deviation, self._seed, weight.mean)
        else:
            whole = given_value(weight.name, shape, values)
        part = whole[_cut(self._box(weight))]
        return torch.tensor(part, dtype=self._dtype, device=self._ranks.device)

    def _empty(self, weight: Weight) -> Any:
        return torch.zeros(extents(self._box(weight)), dtype=self._dtype, device=self._ranks.device)

    def _box(self, weight: Weight) -> Box:
        own = self.program.pieces.get(weight.name)
        layout = weight.tensor.layout if own is None else own.layout
        return layout.by_device[self._rank]

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Return this rank's parts of the weights and of what the optimizer keeps, as checkpoints have them."""
        weights, slots = self.program.weights, self._rule.slots
        return {
            "model": {name: self._part(shard, weights[name]) for name, shard in self.shards.items()},
            "optimizer": {
                name: {
                    slot: self._part(own[slot], weights[name], kept)
                    for slot, kept in slots(weights[name].tensor.shape).items()
                }
                for name, own in self._state.items()
            },
        }

    def saved_state(self) -> dict[str, Any]:
        return self.state()

    def check_finite(self) -> None:
        """Raise ProgramError on all ranks where a number that is kept is not finite on one."""
        slots = [(name, slot, own[slot]) for name, own in self._state.items() for slot in own]
        every = [*((name, "", shard) for name, shard in self.shards.items()), *slots]
        wrong = [called(name, slot) for name, slot, x in every if not x.isfinite().all()]
        of_ranks: list[Any] = [None] * self._ranks.world_size
        with naming_lost_ranks():
            dist.all_gather_object(of_ranks, wrong[:1])
        for found in of_ranks:
            if found:
                raise ProgramError(f"step {self.num_steps}: {found[0]} is not finite; no checkpoint was written")

    def restore(self, found: Opened) -> None:
        """Go on from a checkpoint of the same weights and optimiser, under whatever strategy it arose."""
        kept = {name: self._rule.slots(weight.tensor.shape) for name, weight in self.program.weights.items()}
        expected = {f"optimizer.{name}.{slot}": (name, slot) for name, own in kept.items() for slot in own}
        # Other ranks may have weights of their own.
        others = {f"optimizer.{name}" for name in self.weight_shapes.keys() - kept.keys()}
        slots = (name for name in found.saved if not name.startswith("model."))
        saved = {name for name in slots if name.rpartition(".")[0] not in others}
        if not saved <= expected.keys():
            raise ProgramError(
                f"checkpoint {found.path} has {min(saved - expected.keys())!r}; it is of another optimiser"
            )
        for name, slot in (expected[key] for key in sorted(saved)):
            self._state.setdefault(name, {})[slot] = self._slot(self.shards[name], kept[name][slot])
        found.load(self.state())
        self._is_gathered = False
        self.num_steps = found.step

    def _part(self, local: Any, weight: Weight, kept: Collection[int] | None = None) -> Part:
        """Return a part of a weight, or of what is kept of some of its dims."""
        own = [dim in kept if kept is not None else True for dim in range(len(weight.tensor.dims))]
        held = tuple((run if is_kept else (0, 1),) for run, is_kept in zip(self._box(weight), own, strict=True))
        shape = [extent if is_kept else 1 for extent, is_kept in zip(weight.tensor.shape, own, strict=True)]
        return Part.of(local, held, shape)

    def _slot(self, shard: Any, kept: Collection[int]) -> Any:
        return shard.new_zeros([extent if dim in kept else 1 for dim, extent in enumerate(shard.shape)])

    # -- steps

    def _check(self, loss: Any, gradients: Sequence[Any], correct: Any) -> float | None:
        """Return the accuracy; raise ProgramError on all ranks where the loss or a gradient is not finite on one."""
        is_finite = [x.isfinite().all() for x in (loss, *gradients)]
        counts = self._over_ranks(correct, is_finite[0], torch.stack(is_finite).all())
        if counts[2] == self._ranks.world_size:
            return accuracy_of(self.program, counts[0] / self.micro_batches)
        for shard in self.shards.values():
            shard.grad = None
        which = f"the loss is {loss.item()}" if counts[1] < self._ranks.world_size else "a gradient is not finite"
        raise ProgramError(
            f"step {self.num_steps + 1}: {which}; use a smaller learning rate, or look for it in the data; the step "
            "was not taken"
        )

    def _correct(self, traced: Traced, outputs: Sequence[Any]) -> Any:
        """Return how many of this rank's labels are right, zero where they are not counted."""
        return outputs[-1] if traced.correct else torch.zeros((), device=self._ranks.device)

    def _over_ranks(self, *counts: Any) -> list[int]:
        found = torch.stack([x.to(torch.int64) for x in counts])
        if self._ranks.world_size > 1:
            with naming_lost_ranks():
                dist.all_reduce(found)
        total: list[int] = found.tolist()
        return total

    def _update(self, name: str, shard: Any, scalars: Mapping[str, float]) -> None:
        weight = self.program.weights[name]
        maths = _ShardMaths(weight, self.groups, self.program.pieces.get(name))
        if name not in self._state:
            self._state[name] = {slot: self._slot(shard, kept) for slot, kept in self._rule.slots(maths.shape).items()}
        after, self._state[name] = self._rule.update(maths, shard, shard.grad, self._state[name], scalars)
        shard.copy_(after)
        shard.grad = None


def accuracy_of(traced: Traced, count: float) -> float | None:
    """Return the fraction of points that are right; count: those of all ranks."""
    correct = traced.correct
    return None if correct is None else count / correct.num_holders / correct.num_points


def _cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def _whole(tensor: Tensor, shard: Any) -> Array:
    """Return the whole of a tensor of which every rank has a part."""
    parts: list[Any] = [None] * dist.get_world_size()
    with naming_lost_ranks():
        dist.all_gather_object(parts, widened(shard).cpu().numpy())
    found = np.empty(tensor.shape, parts[0].dtype)
    for device, box in tensor.layout.by_device.items():
        found[_cut(box)] = parts[device].reshape([high - low for low, high in box])
    return found


def train(
    build: Build | Pipeline,
    options: TrainingOptions,
    *,
    num_devices: int,
    micro_batches: int = 1,
    device: str | None = None,
    generator: str | None = None,
    checkpointing: RankCheckpoints | None = None,
    metrics_path: Path | None = None,
    measure: bool = False,
    report: Report | None = None,
    progress: bool = False,
) -> list[float]:
    """Train a program on this rank and return the loss of every step, before its update.

    micro_batches: of a step, each as large as the program's inputs; a batch of the data is all of them. device: "cpu"
    or "cuda". generator: ``package.module:function`` that yields the data, instead of a file of them; its module is
    executed. measure: count the bytes that ranks send in a step.

    Rank 0 reports events: ``resumed`` (step), ``built`` (build_time_s, predicted_bytes None) and those of `Steps.take`.
    """
    begin = time.perf_counter()
    ranks = _joined(num_devices, device)
    is_first = ranks.rank == 0
    shown = report if report and is_first else _silent
    # Before anything expensive: what is wrong is found out at once.
    found = checkpointing.found() if checkpointing else None
    asked, options = options, replace(options, seed=found.seed if found else options.seed or 0)
    first = found.step if found else 0
    with ExitStack() as opened:
        training = rank_training(build, ranks, options, micro_batches=micro_batches, is_restored=found is not None)
        program, inputs = training.program, training.step_inputs
        batches = chosen_batches(inputs, options.seed or 0, options.data_path, generator, first)
        test = (
            held_out_batches(list(program.inputs.values()), options.test_data_path) if options.test_data_path else None
        )
        if found:
            shapes, data = training.weight_shapes, batches.description
            check_fits(found, found.path, asked, weights=found.shapes, expected=shapes, data=data)
        metrics = None
        if metrics_path and is_first:
            resume = checkpointing is not None and checkpointing.resume is not None
            metrics = opened.enter_context(MetricsFile(metrics_path, num_steps=first, resume=resume))
        if found:
            training.restore(found.opened)
            shown({"event": "resumed", "step": found.step})
        shown({"event": "built", "build_time_s": time.perf_counter() - begin, "predicted_bytes": None})

        def save(step: int) -> Path | None:
            if checkpointing is None or not checkpointing.is_due(step, options.steps):
                return None
            training.check_finite()
            kept = Kept.of(options, step=step, seed=options.seed or 0, data=batches.description)
            return save_state(
                checkpointing.folder, training.saved_state(), step=step, extra=kept.document(), keep=checkpointing.keep
            )

        steps = Steps(
            options=options,
            first=first,
            batches=batches,
            test=test,
            num_examples=inputs[0].shape[0] if inputs else 1,
            measured=measured_bytes if measure else None,
            keeping=Keeping(save=save, newest=checkpointing.newest) if checkpointing else None,
            metrics=metrics,
            progress=progress and is_first,
        )
        return steps.take(training, shown)


def rank_training(
    build: Build | Pipeline,
    ranks: Ranks,
    options: TrainingOptions,
    *,
    micro_batches: int = 1,
    is_restored: bool = False,
) -> RankTraining:
    """Return what trains a program, or the stages of one, on this rank; arguments as of `RankTraining`."""
    if not isinstance(build, Pipeline):
        return RankTraining(build, ranks, options, micro_batches=micro_batches, is_restored=is_restored)
    # Stages stand above this module, and are found by name.
    made: type[RankTraining] = import_module("pase.targets.torch.staged_training").StagedTraining
    return made(build, ranks, options, micro_batches=build.micro_batches, is_restored=is_restored)


def _joined(num_devices: int, device: str | None) -> Ranks:
    ranks = join(device=device)
    if ranks.world_size != num_devices:
        raise ProgramError(
            f"the program is one of {num_devices} ranks, and {ranks.world_size} were started; start it with: torchrun "
            f"--nproc-per-node {num_devices} {Path(sys.argv[0]).name}"
        )
    return ranks


def measured_bytes(sent: Mapping[Movement, int]) -> dict[str, Any]:
    """Return what all ranks sent in a step, by edge and layer."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    with naming_lost_ranks():
        dist.all_gather_object(of_ranks, dict(sent))
    total: dict[Movement, int] = {}
    for own in of_ranks:
        for movement, num_bytes in own.items():
            total[movement] = total.get(movement, 0) + num_bytes
    return {"measured_bytes": sum(total.values()), **tabulated({}, total)}


def compute(
    build: Build, options: TrainingOptions, data: Mapping[str, Array], *, num_devices: int, device: str | None = None
) -> dict[str, Array]:
    """Return the outputs of a program for all examples of some data, a batch at a time; the last one is filled up."""
    training = RankTraining(build, _joined(num_devices, device), options)
    inputs = list(training.program.inputs.values())
    batch = max((item.shape[0] for item in inputs if item.shape), default=1)
    num_examples, batches = filled_batches(inputs, data, batch)
    found = [training.outputs(arrays) for arrays in batches]
    return {name: joined_rows(name, [of[name] for of in found], num_examples, batch) for name in training.shapes}


def _silent(_: dict[str, Any]) -> None:
    """Report nothing."""


# -- the command line


def main(
    build: Build | Pipeline, *, num_devices: int, micro_batches: int = 1, arguments: Sequence[str] | None = None
) -> None:
    """Train, or compute outputs, as the command line says; exit with status 1 and one line where that cannot be done.

    A process that no launcher started starts the ranks on this machine, and is none of them if there are several.

    build: declares the layers on a program and returns the loss, the outputs, or both; or the stages that do so.
    micro_batches: that a step of training consists of, where stages do not say it. arguments: by default those of the
    process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    values = command_of_program.read(given)
    is_rank = "RANK" in os.environ or num_devices == 1
    try:
        options = training_options(values)
        if values["output"] and options.data_path is None:
            raise ProgramError("--output needs --data PATH, the inputs to compute the outputs of")
        checkpointing = RankCheckpoints.asked(values)
        if is_rank:
            _run_rank(build, num_devices, micro_batches, values, options, checkpointing)
        else:
            run_program([sys.argv[0], *given], ranks=num_devices)
    except PaseError as error:
        # Whoever started this rank says what it hears of it.
        if not (is_rank and tell_failure(error)):
            sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(stopped_text(values["checkpoint"]))
        raise SystemExit(130) from None
    if is_rank:
        leave()


def _run_rank(
    build: Build | Pipeline,
    num_devices: int,
    micro_batches: int,
    values: Mapping[str, Any],
    options: TrainingOptions,
    checkpointing: RankCheckpoints | None,
) -> None:
    device = "cuda" if device_choice(values).kind == GPU else "cpu"
    if values["output"] and options.data_path:
        if isinstance(build, Pipeline):
            raise ProgramError("--output needs a program that returns outputs, and stages lead to the loss alone")
        found = compute(build, options, read_arrays(options.data_path), num_devices=num_devices, device=device)
        if dist.get_rank() == 0:
            write_arrays(values["output"], found)
        return
    train(
        build,
        options,
        num_devices=num_devices,
        micro_batches=micro_batches,
        device=device,
        generator=values["data_generator"],
        checkpointing=checkpointing,
        metrics_path=values["metrics"],
        measure=values["measure"],
        report=reporting(values),
        progress=True,
    )


@click.command(cls=ProgramCommand, help="Train this program on local processes, or as a rank of torchrun's.")
@script_flags
@option(
    "--output",
    heading="Data",
    type=PATH,
    metavar="FILE",
    help="Write the model's outputs for --data here; do not train.",
)
@device_options
@checkpoint_flags
def command_of_program(**values: Any) -> None:
    """Declare the command line of an emitted program, which `main` reads."""
