"""A program in stages as a rank trains it: its shards of the weights of its stages, by whole steps of micro-batches."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
import torch.distributed as dist

from pase.errors import ProgramError
from pase.sharding.reshard import sum_groups
from pase.targets.torch.batches import micro_batch
from pase.targets.torch.collectives import Groups
from pase.targets.torch.launch import naming_lost_ranks
from pase.targets.torch.parameters import add_gradient
from pase.targets.torch.pipeline import Copy, Pipeline, Stages
from pase.targets.torch.program import Program, Traced
from pase.targets.torch.script import Pass, RankTraining, accuracy_of
from pase.targets.torch.tensor import computing_in
from pase.targets.training.data import Array, Evaluation
from pase.targets.training.masks import NOTHING_DROPPED, Key, step_key


@dataclass(slots=True, eq=False)
class _Stage:
    """A stage on this rank in a step. batches, keys: of the micro-batches. statistics, counts: that these leave."""

    training: "StagedTraining"
    program: Traced
    batches: Sequence[Mapping[str, Array]]
    keys: Sequence[Key]
    statistics: dict[int, Sequence[Any]]
    counts: dict[int, Any]

    def compute(self, micro_batch: int, received: Sequence[Any]) -> Any:
        """Return what the next stage reads, or the loss."""
        named = {f"received {number}": x for number, x in enumerate(received)}
        training, batch, key = self.training, self.batches[micro_batch], self.keys[micro_batch]
        arguments = training.arguments(self.program, batch, key, named)
        with naming_lost_ranks(), computing_in(training.low, training.stages.device), self.program.freed():
            made, outputs, self.statistics[micro_batch] = self.program.module(*arguments)
        if self.program.correct:
            self.counts[micro_batch] = outputs[-1].detach()
        return made

    def held(self) -> AbstractContextManager[None]:
        """Leave this rank's parts of the weights' gradients where they are for so long."""
        return self.training.held()

    def leaves(self) -> list[Any]:
        """Return the tensors whose gradients are those of the weights."""
        return [self.training.leaves[name] for name in self.program.sums]

    def collect(self) -> None:
        """Take the gradients that these have."""
        self.training.collect(self.program.sums)


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
        """Return what this rank's stages have together; all ranks call it."""
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
        of_ranks: list[Any] = [None] * self._ranks.world_size
        with naming_lost_ranks():
            dist.all_gather_object(of_ranks, {name for program in programs for name in program.weights})
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
        told: list[Any] = [None] * self._ranks.world_size
        with naming_lost_ranks():
            dist.all_gather_object(told, {name: weight.tensor.shape for name, weight in weights.items()})
        self._weight_shapes: dict[str, tuple[int, ...]] = {name: shape for each in told for name, shape in each.items()}
        owners = {name: rank for rank in reversed(range(len(told))) for name in told[rank]}
        self._saved = {name for name in weights if owners[name] == self.stages.first}

    def _together(self, own: Sequence[Traced]) -> Traced:
        """Return what stages have together, with the inputs of all ranks' and what the last one counts."""
        counted = own[-1].correct
        told: list[Any] = [None] * self._ranks.world_size
        about = counted and replace(counted, count=None)
        with naming_lost_ranks():
            dist.all_gather_object(told, ({name: x for program in own for name, x in program.inputs.items()}, about))
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
        """Take a step's micro-batches forward and backward, as `RankTraining` does; all have the mean loss."""
        times = self.micro_batches
        keys = [step_key(self._seed, self.num_steps * times + i) for i in range(times)]
        batches = [{name: micro_batch(x, i, times) for name, x in batch.items()} for i in range(times)]
        self._is_gathered = False
        stages = self._begun(self.programs, batches, keys)
        loss = self.stages.known(self.stages.train(stages))
        self._gradients.flush()
        left, self._left = self._left, {}
        for name, gradient in self.stages.copies_summed(left).items():
            add_gradient(self.shards[name], gradient)
        return [
            (loss, self._counted(stages, i), [x for stage in stages.values() for x in stage.statistics[i]])
            for i in range(times)
        ]

    def evaluate(self, batch: Mapping[str, Array]) -> Evaluation:
        """Return the loss and the accuracy of a batch; the forward passes alone run, drop nothing, change nothing."""
        if self._evaluated is None:
            self._evaluated = self._traced(trains=False)
        stages = self._begun(self._evaluating, [batch], [NOTHING_DROPPED])
        loss = self.stages.known(self.stages.evaluate(stages))
        counts = self._over_ranks(self._counted(stages, 0))
        return Evaluation(loss=loss.item(), accuracy=accuracy_of(self._evaluated, counts[0]))

    def held(self) -> AbstractContextManager[None]:
        """Leave this rank's parts of the weights' gradients where they are for so long."""
        return self._gradients.held()

    def collect(self, names: Iterable[str]) -> None:
        """Take the gradients that leaves of weights have, while no backward pass is at work."""
        with self._gradients.finished():
            for name in names:
                self.take(name, self.leaves[name])

    def _begun(
        self, programs: Mapping[int, Traced], batches: Sequence[Mapping[str, Array]], keys: Sequence[Key]
    ) -> dict[int, _Stage]:
        self.gather()
        return {number: _Stage(self, program, batches, keys, {}, {}) for number, program in programs.items()}

    def _counted(self, stages: Mapping[int, _Stage], micro_batch: int) -> Any:
        """Return how many of this rank's labels of a micro-batch are right, zero where others count them."""
        own = next((stage.counts[micro_batch] for stage in stages.values() if stage.counts), None)
        return torch.zeros((), device=self._ranks.device) if own is None else own

    def _give(self, shard: Any, gradient: Any) -> None:
        name = next((name for name in self._copied if self.shards[name] is shard), None)
        if name is None:
            add_gradient(shard, gradient)
        else:
            self._left[name] = gradient

    # -- weights

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights, by name, those of other ranks included."""
        return self._weight_shapes

    def saved_state(self) -> dict[str, Any]:
        """Return what of the state this rank saves: of copies the first group's."""
        return {kind: {n: x for n, x in own.items() if n in self._saved} for kind, own in self.state().items()}
