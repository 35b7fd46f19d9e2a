"""A program for PyTorch as a rank trains it: its shards of the weights, or those of its stages, and its steps."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pase.errors import ProgramError
from pase.sharding.boxes import Box, extents
from pase.sharding.reshard import sum_groups
from pase.targets.torch.checkpoints import Opened, Part
from pase.targets.torch.collectives import Groups, Traffic, all_reduced
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.launch import Ranks
from pase.targets.torch.messages import bytes_of_all, told_by_all
from pase.targets.torch.parameters import add_gradient
from pase.targets.torch.pipeline import Copy, Pipeline, RankStage, Stages
from pase.targets.torch.program import Program, Traced, Weight
from pase.targets.torch.states import Entry, Gradients, Pieces, gather_in_place, held_whole
from pase.targets.torch.tensor import Tensor, computing_in, widened
from pase.targets.torch.watch import BACKWARD, FORWARD, PASSES, PIPELINE
from pase.targets.training.checkpointing import called
from pase.targets.training.counted import NOTHING_DROPPED, Key, given_value, initial_value, step_key
from pase.targets.training.data import Array, DataInput, Evaluation, micro_batch
from pase.targets.training.options import TrainingOptions
from pase.targets.training.script import StepResult, given_values

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
        if not dims:
            return x
        total = x.sum(tuple(dims), keepdim=True)
        axes = tensor.mesh.split(tensor.names[dim] for dim in dims)
        if axes:
            total = all_reduced(total, self.groups.of(sum_groups(tensor.mesh.devices, axes)))
        if self.pieces is not None and self.pieces.dim in dims:
            total = all_reduced(total, self.pieces.group)
        return total / prod(self.shape[dim] for dim in dims)


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
        constants = [each.name for each in kept if each.kind == "constant"]
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
        pieces, sums = self.program.pieces, self.program.sums
        entries = [Entry(self.shards[name], own, pieces.get(name)) for name, own in sums.items()]
        self._gradients = Gradients(entries, self._sum_groups, self.traffic, self._give)
        for name in sums:
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
        PASSES.begin(FORWARD)
        loss, outputs, statistics = self._run(self.program, batch, key)
        PASSES.begin(BACKWARD)
        with naming_lost_ranks():
            (loss / self.micro_batches).backward()
        PASSES.end()
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
        held = [(own, self.leaves[name], self.shards[name]) for name, own in self.program.pieces.items() if own.is_kept]
        if not self._is_gathered:
            with torch.no_grad():
                gather_in_place(held, self.traffic)
            self._is_gathered = True

    def evaluate(self, batch: Mapping[str, Array]) -> Evaluation:
        traced, (loss, outputs, _) = self._computed(batch)
        counts = self._over_ranks(self._correct(traced, outputs))
        return Evaluation(loss=loss.item(), accuracy=accuracy_of(traced, counts[0]))

    def outputs(self, batch: Mapping[str, Array]) -> dict[str, Array]:
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
            device=self._ranks.device,
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
        self.gather()
        arguments = self.arguments(program, batch, key)
        with naming_lost_ranks(), computing_in(self.low, self._ranks.device), program.gathered.freed():
            found: tuple[Any, Sequence[Any], Sequence[Any]] = program.module(*arguments)
        return found

    def arguments(
        self, program: Traced, batch: Mapping[str, Array], key: Key, received: Mapping[str, Any] = NOTHING
    ) -> list[Any]:
        """Return what a program's graph is given; received: of the stage before."""
        found: list[Any] = []
        for argument in program.arguments:
            kind, _, name = argument.partition(" ")
            match kind:
                case "input":
                    fed = torch.as_tensor(np.ascontiguousarray(batch[name]), device=self._ranks.device)
                    found.append(fed if program.inputs[name].below else fed.to(self._dtype))
                case "weight":
                    found.append(self.leaves[name])
                case "piece":
                    found.append(self.shards[name].detach())
                case "received":
                    found.append(received[argument])
                case _:
                    assert argument == "mask_key", argument
                    found.append(torch.as_tensor(key, device=self._ranks.device))
        return found

    def _first(self, values: Mapping[str, Array] | None, weight: Weight) -> Any:
        """Return this rank's part of a weight's first values, drawn, or of those that are given."""
        shape = weight.tensor.shape
        if values is None or (weight.kind == "statistic" and weight.name not in values):
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
        for found in told_by_all(wrong[:1]):
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
    own = widened(shard).cpu().numpy()
    parts = bytes_of_all(own.tobytes())
    found = np.empty(tensor.shape, own.dtype)
    for device, box in tensor.layout.by_device.items():
        found[_cut(box)] = np.frombuffer(parts[device], own.dtype).reshape([high - low for low, high in box])
    return found


# -- stages


class StagedTraining(RankTraining):
    """A program in stages on this rank. stages: those that it has a part of. programs: of each, by number.

    program: what these have together, and the inputs of all stages.
    """

    stages: Stages
    programs: dict[int, Traced]

    def _groups(self) -> tuple[Groups, Groups]:
        assert isinstance(self._build, Pipeline)
        ranks = self._ranks
        self.stages = Stages(
            pipeline=self._build,
            rank=ranks.rank,
            num_ranks=ranks.world_size,
            traffic=self.traffic,
            device=ranks.device,
        )
        self._rank = ranks.rank - self.stages.first
        groups = self.stages.groups()
        return groups, groups.beside("sums")

    def _traced(self, *, trains: bool) -> Traced:
        stages = self.stages
        if trains:
            declared = stages.declare(lambda _: self._declared(trains=True))
        else:
            declared = {}
            for number in stages.numbers:
                program = self._declared(trains=False)
                declared[number] = program, stages.built(number, program)
        for program, _ in declared.values():
            self._dtype, self.low = self._dtype or getattr(torch, program.dtype), program.low
        if trains:
            self._tell_copies([program for program, _ in declared.values()])
        traced = {number: program.traced(made) for number, (program, made) in declared.items()}
        own = list(traced.values())
        if trains:
            self.programs, self._evaluating = traced, {}
            self._link(own)
        else:
            self._evaluating = traced
        stages.connect()
        return self._together(own)

    def _tell_copies(self, programs: Sequence[Program]) -> None:
        """Have programs know the weights that other groups of ranks have, too; all ranks call it."""
        of_ranks = told_by_all({name for program in programs for name in program.weights})
        groups = of_ranks[:: self.stages.size]
        for program in programs:
            program.copied |= {name for name in program.weights if sum(name in own for own in groups) > 1}

    def _link(self, own: Sequence[Traced]) -> None:
        """Ask for the process groups that steps need, and know of the weights of all ranks."""
        names = [name for program in own for name in program.weights]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ProgramError(
                f"weight {twice!r} is of several stages of one group of ranks, which emitted programs cannot hold: "
                "make the module parallel (pase.parallelize), or search with one stage a group"
            )
        weights = {name: weight for program in own for name, weight in program.weights.items()}
        for program in own:
            for each in program.sums.values():
                self._sum_groups.of(each.groups)
        for weight in weights.values():
            tensor = weight.tensor
            # Update rules may take means over any dims.
            axes = sorted(tensor.mesh.split(tensor.names))
            for some in chain.from_iterable(combinations(axes, count + 1) for count in range(len(axes))):
                self.groups.of(sum_groups(tensor.mesh.devices, some))
        trained = {name: weight.tensor for name, weight in weights.items() if weight.is_trained}
        copies = {name: Copy(tensor.mesh.layer, tensor.layout) for name, tensor in trained.items()}
        self._copied = self.stages.link_copies(copies)
        self._left: dict[str, Any] = {}
        told = told_by_all({name: weight.tensor.shape for name, weight in weights.items()})
        self._weight_shapes: dict[str, tuple[int, ...]] = {name: shape for each in told for name, shape in each.items()}
        owners = {name: rank for rank in reversed(range(len(told))) for name in told[rank]}
        self._saved = {name for name in weights if owners[name] == self.stages.first}

    def _together(self, own: Sequence[Traced]) -> Traced:
        """Return what stages have together, with the inputs of all ranks' and what the last one counts."""
        counted = own[-1].correct
        about = counted and replace(counted, count=None)
        told = told_by_all(({name: x for program in own for name, x in program.inputs.items()}, about))
        inputs = {name: item for of_rank, _ in told for name, item in of_rank.items()}
        return replace(
            own[0],
            inputs=inputs,
            weights={name: weight for program in own for name, weight in program.weights.items()},
            keeps=tuple(keep for program in own for keep in program.keeps),
            sums={name: each for program in own for name, each in program.sums.items()},
            pieces={name: each for program in own for name, each in program.pieces.items()},
            correct=next((correct for _, correct in told if correct), None),
        )

    # -- steps

    def gradients(self, batch: Mapping[str, Array]) -> list[Pass]:
        times = self.micro_batches
        keys = [step_key(self._seed, self.num_steps * times + i) for i in range(times)]
        batches = [{name: micro_batch(x, i, times) for name, x in batch.items()} for i in range(times)]
        self._is_gathered = False
        PASSES.begin(PIPELINE)
        loss = self.stages.known(self.stages.train(self._begun(self.programs, batches, keys)))
        self._gradients.flush()
        left, self._left = self._left, {}
        for name, gradient in self.stages.copies_summed(left).items():
            add_gradient(self.shards[name], gradient)
        PASSES.end()
        statistics = [[x for number in self.programs for x in self._statistics[number, i]] for i in range(times)]
        return [(loss, self._counted(i), statistics[i]) for i in range(times)]

    def evaluate(self, batch: Mapping[str, Array]) -> Evaluation:
        if self._evaluated is None:
            self._evaluated = self._traced(trains=False)
        loss = self.stages.known(self.stages.evaluate(self._begun(self._evaluating, [batch], [NOTHING_DROPPED])))
        counts = self._over_ranks(self._counted(0))
        return Evaluation(loss=loss.item(), accuracy=accuracy_of(self._evaluated, counts[0]))

    def _begun(
        self, programs: Mapping[int, Traced], batches: Sequence[Mapping[str, Array]], keys: Sequence[Key]
    ) -> dict[int, RankStage]:
        """Return the stages of a step on this rank; they leave values of statistics, and counts of labels."""
        self.gather()
        self._statistics: dict[tuple[int, int], Sequence[Any]] = {}
        self._counts: dict[int, Any] = {}

        def compute(number: int, i: int, received: Sequence[Any]) -> Any:
            program, named = programs[number], {f"received {place}": x for place, x in enumerate(received)}
            arguments = self.arguments(program, batches[i], keys[i], named)
            with naming_lost_ranks(), computing_in(self.low, self.stages.device), program.gathered.freed():
                made, outputs, self._statistics[number, i] = program.module(*arguments)
            if program.correct:
                self._counts[i] = outputs[-1].detach()
            return made

        def leaves(names: Iterable[str]) -> list[Any]:
            return [self.leaves[name] for name in names]

        def collect(names: Iterable[str]) -> None:
            for name in names:
                self.take(name, self.leaves[name])

        return {
            number: RankStage(
                compute=partial(compute, number),
                leaves=partial(leaves, program.sums),
                collect=partial(collect, program.sums),
                gradients=self._gradients,
            )
            for number, program in programs.items()
        }

    def _counted(self, micro_batch: int) -> Any:
        """Return how many of this rank's labels of a micro-batch are right, zero where others count them."""
        return self._counts.get(micro_batch, torch.zeros((), device=self._ranks.device))

    def _give(self, shard: Any, gradient: Any) -> None:
        name = next((name for name in self._copied if self.shards[name] is shard), None)
        if name is None:
            add_gradient(shard, gradient)
        else:
            self._left[name] = gradient

    # -- weights

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._weight_shapes

    def saved_state(self) -> dict[str, Any]:
        return {kind: {n: x for n, x in own.items() if n in self._saved} for kind, own in self.state().items()}


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
    return StagedTraining(build, ranks, options, micro_batches=build.micro_batches, is_restored=is_restored)
