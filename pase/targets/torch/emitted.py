"""`Emitted`, `EmittedStages`: modules of emitted programs, whose weights are parameters under the program's names.

A program's declarations play the role of a traced module in `Parallel` and `Staged`: inputs by name, and tensors that
the same code holds as parameters and buffers and the same steps train.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from pase.errors import ProgramError
from pase.importers.ir.trace import Use
from pase.importers.torch.live import LiveInput, Part
from pase.targets.torch.collectives import Groups
from pase.targets.torch.launch import Ranks
from pase.targets.torch.messages import told_by_all
from pase.targets.torch.module import HeldProgram, Parallel
from pase.targets.torch.parameters import Declared, Read, State, install, mesh_of, notes_on
from pase.targets.torch.pipeline import Pipeline
from pase.targets.torch.placements import Held
from pase.targets.torch.program import Correct, Program, Traced, Weight
from pase.targets.torch.replicas import Replicas
from pase.targets.torch.staged import Staged, StageModule
from pase.targets.torch.tensor import Tensor
from pase.targets.torch.values import Source, cut
from pase.targets.training.counted import given_value, initial_value
from pase.targets.training.data import Array, DataInput
from pase.targets.training.options import TrainingOptions
from pase.targets.training.script import given_values

Outputs = Mapping[str, tuple[Tensor, tuple[int, ...]]]
"""Tensors by the names of the model's outputs, and the shapes that these have."""

Build = Callable[[Program], Tensor | Outputs | tuple[Tensor, Outputs]]


# -- declarations of a program


class DeclaredProgram(HeldProgram):
    """A program whose weights, constants and statistics are tensors of their own, under their own names."""

    def declared(self, name: str, tensor: Tensor, kind: str) -> Any:
        if kind == "trained":
            self.sources[name] = f"shard {name}"
        return self.argument(f"shard {name}")

    def _read(self, name: str, is_trained: bool) -> Read | None:
        return Read(parameter=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredCall:
    """The call of a program's module, with its inputs by name; shapes: of these, in a micro-batch."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def bound(self, _args: tuple[Any, ...], kwargs: Mapping[str, Any], *_parts: Any) -> dict[str, Any]:
        return dict(kwargs)

    def split(
        self,
        _args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        numbers: Iterable[int],
        part: Callable[[str, Any, int], Any],
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for number in numbers:
            yield (), {name: part(name, x, number) for name, x in kwargs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredModel:
    """A program's counterpart of `LiveModel`: only inputs, which layers read as they are given."""

    call: DeclaredCall
    inputs: Mapping[tuple[str, int], LiveInput]
    constants: Mapping[Any, Any] = field(default_factory=dict)
    statistics: Mapping[Any, Any] = field(default_factory=dict)
    outputs: tuple[Any, ...] = ()
    lookups: tuple[Any, ...] = ()

    @classmethod
    def of(cls, inputs: Iterable[DataInput]) -> "DeclaredModel":
        items = list(inputs)
        return cls(
            call=DeclaredCall(names=tuple(x.name for x in items), shapes=tuple(x.shape for x in items)),
            inputs={
                (x.name, 0): LiveInput(name=x.name, use=Use(value=x.name), inputs=(x.name,), is_given=True)
                for x in items
            },
        )

    def part(self, names: Iterable[str], *, device: object = None) -> Part:
        """Return a part that passes inputs through."""
        given = tuple(names)
        return Part(graph=_as_given, inputs=given, state=(), names=given)


def _as_given(*values: Any) -> tuple[Any, ...]:
    return values


def _state(weights: Mapping[str, tuple[tuple[int, ...], str]], dtype: torch.dtype) -> State:
    """Return the parameters and buffers of a program. weights: shape and kind of each, by name."""
    declared = {
        name: Declared(
            names=(name,),
            shape=shape,
            dtype=dtype,
            requires_grad=kind == "trained",
            is_buffer=kind in ("constant", "statistic"),
        )
        for name, (shape, kind) in weights.items()
    }
    return State(declared=declared, order=tuple(declared))


def _told(weights: Mapping[str, Weight]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (weight.tensor.shape, weight.kind) for name, weight in weights.items()}


def _first_values(weights: Mapping[str, Weight], options: TrainingOptions, *, is_restored: bool) -> Source:
    """Return the initial values of weights: those of the options' file, or drawn.

    is_restored: whether a checkpoint will provide them. Raises ProgramError where a program has constants and no file
    is given.
    """
    constants = [weight.name for weight in weights.values() if weight.kind == "constant"]
    given = None if is_restored else given_values(options.weights_path, constants)

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> torch.Tensor:
        weight = weights.get(names[0])
        if weight is None or is_restored:
            return torch.zeros([sum(high - low for low, high in runs) for runs in held])
        if given is None or (weight.kind == "statistic" and weight.name not in given):
            whole: Array = initial_value(weight.name, shape, weight.deviation, options.seed or 0, weight.mean)
        else:
            whole = np.array(given_value(weight.name, shape, given))
        return cut(torch.from_numpy(whole), held).clone(memory_format=torch.contiguous_format)

    return values


# -- modules


class _OfProgram(Parallel):
    """Differences of emitted programs' modules from traced ones.

    Attributes:
        program_inputs: Inputs of a micro-batch, by name; those of all stages.
        correct: Number of correct labels; None where the loss has no labels.
        dtype: Type of its weights.
    """

    program_inputs: Mapping[str, DataInput]
    correct: Correct | None = None
    dtype: torch.dtype
    _is_of_one_type = False
    _right: Any = None

    def fed(self, batch: Mapping[str, Array]) -> dict[str, Any]:
        """Convert a batch to the arguments of a call: tensors on its device, floats in its type."""
        found = {}
        for name, item in self.program_inputs.items():
            x = torch.as_tensor(np.ascontiguousarray(batch[name]), device=self._device)
            found[name] = x if item.below else x.to(self.dtype)
        return found

    @property
    def micro_batches(self) -> int:
        """How many a step has."""
        return self._micro_batches

    @property
    def step_inputs(self) -> list[DataInput]:
        """The inputs of a step, of all its micro-batches."""
        count = self.micro_batches
        return [
            replace(item, shape=(item.shape[0] * count, *item.shape[1:])) if item.shape else item
            for item in self.program_inputs.values()
        ]

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, those of other ranks included."""
        return self._state.shapes

    def take_right(self) -> Any:
        """Return how many labels calls found right on this rank since this was called last."""
        right, self._right = self._right, None
        return torch.zeros((), device=self._device) if right is None else right

    def accuracy(self, right: int, calls: int) -> float | None:
        """Return the fraction of labels that are right, of how many all ranks found in some calls."""
        found = self.correct
        return None if found is None else right / calls / found.num_holders / found.num_points

    def _declared(self, trains: bool) -> Any:
        return DeclaredProgram(
            self._state,
            self._storage,
            prefix=self._prefix,
            rank=self._rank,
            num_devices=self._groups.num_ranks,
            trains=trains,
            groups=self._groups,
            traffic=self._traffic,
            counts=True,
            is_of_one_type=self._is_of_one_type,
            pieces=self._pieces,
            device=self._device,
        )

    def _begin_program(self, options: TrainingOptions, ranks: Ranks, micro_batches: int) -> None:
        """Initialise everything that is known before any layer is declared."""
        self._begin(ranks.device, rank=ranks.rank, seed=options.seed or 0, micro_batches=micro_batches)
        self._state = _state({}, torch.float32)
        self._is_of_one_type = options.dtype != "float32"

    def _take_program(self, options: TrainingOptions, inputs: Mapping[str, DataInput], *programs: Program) -> None:
        """Take the inputs of a program whose layers are declared, and its types; ProgramError for float16."""
        if any(program.low == "float16" for program in programs):
            raise ProgramError(
                "products in float16 need a loss that is scaled, which programs do not do: make your own module "
                "parallel (pase.parallelize, torch.amp.GradScaler), search with --precision bf16-mixed, or give "
                "--dtype float64"
            )
        self.dtype = getattr(torch, options.dtype if self._is_of_one_type else programs[0].dtype)
        self._take_inputs(inputs)

    def _take_inputs(self, inputs: Mapping[str, DataInput]) -> None:
        self.program_inputs = inputs
        self._take_model(DeclaredModel.of(inputs.values()), [0 if item.shape else None for item in inputs.values()])

    def _take_correct(self, correct: Correct | None) -> None:
        self.correct = correct and replace(correct, count=None)

    def _count(self, traced: Traced, outputs: Sequence[Any]) -> None:
        if traced.correct is not None:
            count = outputs[-1].detach()
            self._right = count if self._right is None else self._right + count

    def _returned(self, mode: Any, loss: Any, outputs: Sequence[Any], values: Mapping[str, Any]) -> Any:
        self._count(mode.traced, outputs)
        known = None if loss is None else loss.reshape(())
        if self.training:
            return known, {}
        found = zip(mode.traced.results, outputs, strict=False)
        return known, {name: self._output(x, self._shown[name], mode.placed[name]) for name, x in found}

    def _check_trained(self) -> None:
        """Do nothing: an emitted program trains as written."""

    def _known_part(self, trains: bool, *, is_fixed: bool) -> Part:
        return Part(graph=_as_given, inputs=(), state=(), names=())

    def _updates(self, trains: bool) -> Mapping[str, str]:
        return {}

    def _detached(self, trains: bool) -> frozenset[int]:
        return frozenset()

    def _results(self, program: Any, loss: Any, outputs: Outputs) -> Any:
        self._shown = {name: shape for name, (_, shape) in outputs.items()}
        if program.trains:
            # A training step computes outputs without using them.
            return dict.fromkeys(outputs), {name: x for name, (x, _) in outputs.items()}
        return super()._results(program, loss, outputs)


class Emitted(_OfProgram):
    """A program on this rank, called with its inputs by name: it returns the loss, or None, and outputs by name.

    In training it returns no outputs.

    Args:
        build: Declares the layers of the program.
        ranks: The process group.
        options: Of the training: type, seed and weights.
        micro_batches: Of a step.
        is_restored: Whether a checkpoint is to give it its weights; else they are those of the options' file, or drawn.
    """

    def __init__(
        self,
        build: Build,
        ranks: Ranks,
        options: TrainingOptions,
        *,
        micro_batches: int = 1,
        is_restored: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self._begin_program(options, ranks, micro_batches)
        self._groups = Groups(ranks.rank, ranks.world_size)
        self._sum_groups = self._groups.separate("sums")
        self._build = build
        program = self._declared(True)
        made = build(program)
        self._take_program(options, program.inputs, program)
        program.state = self._state = _state(_told(program.weights), self.dtype)
        values = _first_values(program.weights, options, is_restored=is_restored)
        self._modes[True] = self._traced(program, made)
        self._take_correct(self._modes[True].traced.correct)
        self._boxes = self._read(ranks.rank)
        self._replicas = Replicas(self._stored, self._sums, self._sum_groups)
        self._mesh = mesh_of(self._stored, self._device.type)
        self.notes = (*notes_on(self._state, self._stored), *self._state_notes)
        install(self, self._state, self._stored, self._mesh, values, device=self._device)


class EmittedStage(_OfProgram, StageModule):
    """A stage of a program on this rank; its weights have the names of the whole program's."""

    def __init__(self, parallel: "EmittedStages", number: int) -> None:
        nn.Module.__init__(self)
        stages = parallel._stages
        rank, micro_batches = stages.rank - stages.first, parallel.micro_batches
        self._begin(parallel._device, rank=rank, seed=parallel._seed, micro_batches=micro_batches)
        self._take_place(parallel, number)
        self._is_of_one_type = parallel._is_of_one_type


class EmittedStages(_OfProgram, Staged):
    """The stages of a program that this rank has a part of; see `Emitted`. It trains by `accumulate`."""

    _own: dict[int, Any]

    def __init__(
        self, pipeline: Pipeline, ranks: Ranks, options: TrainingOptions, *, is_restored: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self._begin_program(options, ranks, pipeline.micro_batches)
        self._options = options

        def begun(number: int) -> HeldProgram:
            self._own[number] = EmittedStage(self, number)
            program: HeldProgram = self._own[number]._declared(True)
            return program

        programs = self._declare(pipeline, begun, ranks.rank, ranks.world_size)
        counted = [self._own[number]._modes[True].traced.correct for number in self._stages.numbers]
        told = told_by_all(counted[-1] and replace(counted[-1], count=None))
        self._take_correct(next((correct for correct in told if correct), None))
        self._boxes = self._read(ranks.rank)
        weights = {name: weight for program in programs for name, weight in program.weights.items()}
        self._install(programs, _first_values(weights, options, is_restored=is_restored), ())

    def _declared_by(self, programs: Mapping[int, Any]) -> Mapping[str, tuple[int, ...]]:
        told = told_by_all({number: (_told(own.weights), dict(own.inputs)) for number, own in programs.items()})
        stages = sorted({number: stage for own in told for number, stage in own.items()}.items())
        inputs = {name: item for _, (_, items) in stages for name, item in items.items()}
        self._take_program(self._options, inputs, *programs.values())
        # In the order of the layers, as a program without stages has them.
        self._state = _state({name: own for _, (weights, _) in stages for name, own in weights.items()}, self.dtype)
        for number, program in programs.items():
            stage = self._own[number]
            program.state = stage._state = self._state
            stage._take_inputs(inputs)
            # Every rank is given all examples.
            stage._direct = frozenset()
        holders: dict[str, set[int]] = {name: set() for name in self._state.order}
        for number, (weights, _) in stages:
            for name in weights:
                holders[name].add(number % self._stages.pipeline.num_groups)
        return {name: tuple(sorted(own)) for name, own in holders.items()}

    def _returned_loss(self, loss: Any) -> Any:
        return loss, {}
