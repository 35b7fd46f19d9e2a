"""`Parallel`: a PyTorch module that computes a rank's part of a model under a plan."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from pase.errors import ModelError, ProgramError
from pase.importers.ir.trace import Use
from pase.importers.torch.live import LiveModel, Part
from pase.planning.plan import Plan
from pase.sharding.boxes import Box, Range, extents, whole
from pase.sharding.layouts import DeviceMesh, Layout
from pase.targets.programs import check_trained
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.collectives import Groups, Take, Traffic
from pase.targets.torch.devices import module_device
from pase.targets.torch.interpreter import interpret
from pase.targets.torch.launch import join
from pase.targets.torch.layers.movement import piece
from pase.targets.torch.parameters import (
    Leaves,
    Read,
    State,
    distributed,
    full_state_dict,
    install,
    keeping,
    mesh_of,
    needs_of,
    notes_on,
    owner_of,
    part_of,
    receive,
    state_of,
    viewed,
)
from pase.targets.torch.parts import Resembling
from pase.targets.torch.placements import Need, Reading, Storage, Stored, held_as, storage
from pase.targets.torch.program import Program, Traced
from pase.targets.torch.replicas import DEFAULT_STEPS, Replicas
from pase.targets.torch.states import Entry, Gradients, Pieces, WeightSum, gather_in_place, local_of
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor, computing_in, reshard, resolved
from pase.targets.torch.values import Source, cut
from pase.targets.torch.watch import BACKWARD, FORWARD, HELD_BACKWARD, PASSES
from pase.targets.training.counted import step_key
from pase.targets.training.data import example_dims, micro_batch

# -- the part of a batch that a rank reads


def rows_read(shape: Sequence[int], layouts: Iterable[Layout], rank: int) -> Range:
    """Return the range of rows of an input that a rank reads; all rows where it cannot be determined.

    layouts: those in which layers read the input, possibly in another shape; windows may extend past it.
    """
    boxes = []
    for layout in layouts:
        if layout.shape[:1] != tuple(shape)[:1]:
            return (0, shape[0])
        boxes.append(layout.by_device[rank][0])
    return (max(0, min(low for low, _ in boxes)), min(shape[0], max(high for _, high in boxes))) if boxes else (0, 0)


def part_in(x: Any, shape: tuple[int, ...], box: Box) -> Any:
    """Return a rank's part of an input, which may be passed completely."""
    return x[tuple(slice(low, high) for low, high in box)] if tuple(x.shape) == shape else x


def in_place(part: Any, shape: tuple[int, ...], box: Box) -> Any:
    """Return a rank's part of an input, placed in a tensor of the whole shape; the zeros around it are never read."""
    if tuple(part.shape) == shape:
        return part
    found = part.new_zeros(shape)
    found[tuple(slice(low, high) for low, high in box)] = part
    return found


class RankSampler(Sampler[list[int]]):
    """Yields, batch by batch, the numbers of the examples that a rank reads: a `batch_sampler` for `DataLoader`.

    All ranks use the same order of examples. Examples that do not fill a batch are dropped.

    Args:
        examples: The data set, or the number of examples.
        batch: Examples in a batch of all ranks together.
        rows: Rows of a batch that this rank reads.
        shuffle: Whether each epoch has another order, by the seed and `set_epoch`.
        seed: Seed; the same on all ranks.

    Raises:
        ProgramError: There are fewer examples than in a batch.
    """

    def __init__(self, examples: Sized | int, *, batch: int, rows: Range, shuffle: bool = True, seed: int = 0) -> None:
        self._count = examples if isinstance(examples, int) else len(examples)
        self._batch, self._rows, self._shuffle, self._seed, self._epoch = batch, rows, shuffle, seed, 0
        if self._count < batch:
            raise ProgramError(f"there are {self._count} examples, and a batch has {batch}; search for a smaller batch")

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._count)
        if self._shuffle:
            order = torch.randperm(self._count, generator=torch.Generator().manual_seed(self._seed + self._epoch))
        low, high = self._rows
        for begin in range(0, len(self) * self._batch, self._batch):
            yield order[begin + low : begin + high].tolist()

    def __len__(self) -> int:
        return self._count // self._batch


# -- the program of a model


class HeldProgram(Program):
    """A program whose weights are parameters and buffers of a module.

    Attributes:
        state: State of the module.
        storage: Storage of its parameters and buffers; None until `hold_together`, which also decides which weights are
            sharded.
        prefix: Prefix of the names of its weights there.
        takes: For each constant that is not one of these, by name, the slice that its argument is.
    """

    def __init__(self, state: State, storage: Storage | None, *, prefix: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.state, self.storage, self.prefix = state, storage, prefix
        self.takes: dict[str, Take] = {}
        everywhere = DeviceMesh((("replica", self.num_devices),), tuple(range(self.num_devices)), has_replicas=True)
        self._everywhere = LayerMesh("the model", everywhere, self)

    def bind(self) -> None:
        """Compute each shard that a layer reads from this rank's shard of a parameter or a buffer.

        Slices that are views are inserted before their first users: the backward pass visits nodes in reverse order,
        and has a weight's gradient once it has passed the first one. Transfers between ranks are inserted before
        everything else.
        """
        stored, places = self.hold(), {node: place for place, node in enumerate(self._graph.nodes)}
        for name in self.reads():
            if name not in (self.pieces or {}):
                reading, shard = stored.readings[f"{self.prefix}{name}"], f"shard {name}"
                is_moved = bool(reading.steps) or reading.view is not None
                users = [] if is_moved else sorted(self._arguments[shard].users, key=places.__getitem__)
                self.bound(shard, partial(self._part, stored, name), users)

    def hold(self) -> Storage:
        """Return the storage of the parameters and buffers; all layers have been called."""
        if self.storage is None:
            hold_together([self], lambda needs: storage(self.state.shapes, needs, self.num_devices))
        assert self.storage is not None
        return self.storage

    def needs(self) -> dict[str, list[Need]]:
        """Return the slices of each parameter and buffer that its layers need; for sharded weights these shards."""
        prefix = self.prefix
        reads = {f"{prefix}{name}": read for name, read in self.reads().items()}
        pieces = {f"{prefix}{name}": own for name, own in (self.pieces or {}).items()}
        return needs_of(self.state, {name: self.weights[name.removeprefix(prefix)] for name in reads}, reads, pieces)

    def alone(self, needs: Mapping[str, Sequence[Need]]) -> list[str]:
        """Return its trained weights that are the only user of a parameter, unsliced and without changes."""
        shapes, declared = self.state.shapes, self.state.declared
        own = [
            needed[0].weight.removeprefix(self.prefix)
            for name, needed in needs.items()
            if len(needed) == 1 and needed[0].box == whole(shapes[name]) and needed[0].view is None
            if declared[name].requires_grad and not declared[name].is_buffer
        ]
        return [name for name in own if name in self.sources]

    def placed(self, x: Tensor, shape: tuple[int, ...]) -> Stored | None:
        """Return the placement of a tensor on the ranks in DTensor's terms; None where it has none."""
        return held_as(Need(weight="", box=whole(shape), layout=x.layout), shape, self.hold().sizes)

    def reads(self) -> dict[str, Read]:
        read = {name: self._read(name, weight.is_trained) for name, weight in self.weights.items()}
        return {name: own for name, own in read.items() if own is not None}

    def whole(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return reshard(resolved(x), self._everywhere, [Dim(f"dim{i}", extent) for i, extent in enumerate(shape)])

    def _part(self, stored: Storage, name: str) -> Any:
        reading, weight = stored.readings[f"{self.prefix}{name}"], self.weights[name]
        source = f"held {reading.parameter}"
        if weight.is_trained:
            self.sources[name] = source
        return part_of(stored, reading, self.argument(source), weight.tensor)

    def _read(self, name: str, is_trained: bool) -> Read | None:
        """Return how a weight reads the module; None for other tensors."""
        raise NotImplementedError


class LiveProgram(HeldProgram):
    """A program whose weights, constants and statistics are those of a traced module."""

    def __init__(
        self, live: LiveModel, state: State, storage: Storage | None, *, layers: AtenLayers, **options: Any
    ) -> None:
        super().__init__(state, storage, **options)
        self.live, self.layers = live, layers

    def weight(self, *args: Any, is_frozen: bool = False, **named: Any) -> Tensor:
        """Return a parameter of the module; its own flag determines whether it is trained."""
        return super().weight(*args, **named)

    def declared(self, name: str, tensor: Tensor, kind: str) -> Any:
        is_trained = kind == "trained"
        if is_trained or (kind == "statistic" and self._read(name, is_trained) is not None):
            if is_trained:
                self.sources[name] = f"shard {name}"
            return self.argument(f"shard {name}")
        box = tensor.layout.by_device[self.rank]
        self.takes[name] = Take(shape=tensor.shape, box=box, made=tensor.shard)
        return self.argument(f"constant {name}")

    def aten(self, mesh: LayerMesh, name: str, sources: Mapping[int, Tensor], others: Mapping[str, Tensor]) -> Tensor:
        """Return a layer's output, computed by nodes of the module's own graph.

        Args:
            mesh: Mesh of the layer.
            name: Name of the layer.
            sources: Its inputs, by the number of the read.
            others: Additional inputs, by the layers that write them.
        """
        return self.layers.run(self, mesh, name, sources, others)

    def update(self, results: Mapping[str, Tensor]) -> None:
        """Have a step write the buffers that nodes of the module's own graph write.

        Args:
            results: What layers write, by their names.
        """
        # Outside of any layer: new values of buffers are not recomputed for the backward pass.
        self._graph.layer = ""
        for name, value in self.layers.update(self, self._everywhere, results):
            self._keeps[name] = value, None

    def returned(self, number: int, layer: str, x: Tensor) -> Tensor:
        """Return an output of the module, by its number, that has a layer's points in another order than the layer."""
        self._graph.layer = ""
        return self.layers.returned(self, self._everywhere, number, {layer: x})

    @property
    def draw_key(self) -> Any:
        """The key of a step's random numbers, on the CPU, for the operators that draw some."""
        return self.argument("draw_key")

    def known(self, name: str, dims: tuple[Dim, ...], *, is_index: bool) -> Tensor:
        """Return a value of the module computed from only its inputs and buffers; every rank has all of it."""
        value = self.argument(f"known {name}").reshape([dim.size for dim in dims])
        return Tensor(value=value, mesh=self._everywhere, dims=dims, is_index=is_index)

    def _read(self, name: str, is_trained: bool) -> Read | None:
        layer, _, own = name.rpartition("/")
        if is_trained:
            weight = self.live.weights[layer, own]
            rows = None if weight.row is None else (weight.row, weight.row + weight.shape[0])
            return Read(parameter=weight.parameter, rows=rows, piece=weight.use.piece, view=weight.use.view)
        constant = self.live.constants[layer, own]
        is_kept = layer in self.live.statistics and constant.buffer
        return Read(parameter=constant.buffer, piece=constant.use.piece, view=constant.use.view) if is_kept else None


def hold_together(programs: Sequence[HeldProgram], stored_by: Callable[[Mapping[str, list[Need]]], Storage]) -> Storage:
    """Return the common storage of all tensors that programs of this rank read, and give it to the programs.

    programs: all of whose layers have been called. stored_by: computes it from the needs of each parameter.
    """

    def needs() -> dict[str, list[Need]]:
        found: dict[str, list[Need]] = {}
        for program in programs:
            for name, own in program.needs().items():
                found.setdefault(name, []).extend(own)
        return found

    whole_needs = needs()
    pieces = [program.cut(program.alone(whole_needs)) for program in programs]
    lost = True
    while lost:
        for program, own in zip(programs, pieces, strict=True):
            program.pieces = own
        found, lost = stored_by(needs()), False
        for program, own in zip(programs, pieces, strict=True):
            for name in [name for name in own if found.readings[f"{program.prefix}{name}"].steps]:
                lost = True
                program.notes.append(
                    f"weight {name!r} is replicated, not {own.pop(name).state}: no DTensor placement expresses "
                    "which rank has which shard"
                )
    for program, own in zip(programs, pieces, strict=True):
        program.pieces = {name: replace(each, sizes=found.sizes) for name, each in own.items()}
        program.storage = found
    return found


def read_as(value: Any, use: Use) -> Any:
    """Return a value as a use reads it: a slice of it, in another order of its elements."""
    if use.piece is not None:
        value = value.narrow(use.piece.dim, use.piece.start, use.piece.size)
    return value if use.view is None else viewed(value, use.view)


# -- the module


Get = Callable[[Mapping[str, Any]], Any]
"""Maps values computed from the module's inputs, by name, to an argument of a rank's graph."""


Compare = Callable[["Parallel", Mapping[str, Any], Callable[[Mapping[str, Any]], Any], torch.device], list[str]]
"""Maps a parallel module, its first step's inputs, a function that makes calls, and its device to notes."""


@dataclass(frozen=True, kw_only=True)
class _Mode:
    """The program of training, or of evaluation.

    Attributes:
        traced: Program of this rank.
        known: Computes values from inputs and buffers before any layer.
        fixed: Computes values from only buffers, which are cached in `fixed_values` until a buffer changes.
        updates: For each buffer, by name, the known value that it has after a call.
        given: Source of each argument of the program.
        keeps: Handler of each value of a statistic or a buffer that layers compute.
        loss: Name of the output that is the loss, "" for none.
        placed: Placement of each output; None for a replicated one.
        low: Type of products where it differs from that of weights, or "".
        detached: Numbers of the returned tensors without a gradient.
    """

    traced: Traced
    known: Part
    fixed: Part
    fixed_values: "_Fixed"
    updates: Mapping[str, str]
    given: tuple[Get, ...]
    keeps: tuple[Callable[[Any], None], ...]
    loss: str
    placed: Mapping[str, Stored | None]
    low: str
    detached: frozenset[int]


class Parallel(Resembling):
    """A model under a plan, on one rank: it is called like the model, and returns the model's result.

    Its parameters and buffers have the model's names; parameters are DTensors, or plain tensors where the plan splits
    none of them.

    Attributes:
        plan: The plan.
        notes: Assumptions, and parameters that are stored otherwise than layers read them.
    """

    _live: Any
    """The `LiveModel`, or what an emitted program has in its place."""
    _part: Part
    _replicas: Replicas | None
    _drops_nothing = False
    """Whether dropout keeps every point, with its usual scale."""

    def __init__(
        self,
        module: nn.Module,
        live: LiveModel,
        plan: Plan,
        *,
        rank: int,
        weights: Source,
        seed: int,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._aten = AtenLayers(live, plan)
        if module.training:
            check_trained(live.model.graph, self._aten.problem)
        self._prepare(module, live, plan, rank=rank, seed=seed)
        self._groups = Groups(rank, plan.num_devices)
        self._sum_groups = self._groups.separate("sums")
        self._state = state_of(module)
        self._boxes = self._read(rank)
        self._replicas = Replicas(self._stored, self._sums, self._sum_groups)
        self._mesh = mesh_of(self._stored, self._device.type)
        held = notes_on(self._state, self._stored)
        self.notes = (*live.notes, *self._device_notes, *held, *self._state_notes, *self._aten.notes, *notes)
        # Last, since names of the model may be those of our attributes.
        install(self, self._state, self._stored, self._mesh, weights, device=self._device)
        self.train(module.training)

    def _prepare(self, module: nn.Module, live: LiveModel, plan: Plan, *, rank: int, seed: int) -> None:
        """Initialise the computations outside of the program: of inputs, before any layer, and state between steps."""
        self.plan = plan
        device, note = module_device(module, join().device)
        self._device_notes = (note,) if note else ()
        self._begin(device, rank=rank, seed=seed, micro_batches=plan.micro_batches)
        self._take_model(self._aten.translated(live), example_dims(plan.graph, live.call.shapes))

    def _begin(self, device: Any, *, rank: int, seed: int, micro_batches: int) -> None:
        """Initialise the parts common to all programs: device, and state between steps."""
        self._rank, self._seed, self._step, self._micro_batches = rank, seed, 0, micro_batches
        self._traffic, self._prefix, self._device = Traffic(), "", device
        self._leaves = Leaves(receive=self._received)
        self._gradients: Gradients | None = None
        self._sums_trains = True
        self._compares: Compare | None = None
        self._compares_always = False
        self._replicas = None
        self._reconciling_steps = DEFAULT_STEPS
        self._pieces: Mapping[str, Pieces] | None = None
        self._gathered: Any = None
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._modes: dict[bool, _Mode] = {}
        self._storage: Storage | None = None

    def _take_model(self, live: Any, dims: Sequence[int | None]) -> None:
        """Initialise the computation on inputs before any layer.

        Args:
            live: What layers read from inputs, buffers and constants.
            dims: Dim of the examples of each input; None for one without.
        """
        self._live, device = live, self._device
        # Running statistics are read from their buffers.
        computed = [c for (layer, _), c in live.constants.items() if not (c.buffer and layer in live.statistics)]
        known, fixed = [c.use for c in computed], [c.use.value for c in computed if c.is_fixed]
        self._fixed, self._fixed_values = live.part(fixed, device=device), _Fixed()
        own = [use.value for use in (*known, *(item.use for item in live.inputs.values())) if use.value not in fixed]
        self._part = live.part(own + [o.name for o in live.outputs if not o.layer], device=device)
        self._looked_up = live.part([lookup.value for lookup in live.lookups], device=device)
        self._direct = _direct(live, self._looked_up)
        self._shapes = dict(zip(live.call.names, live.call.shapes, strict=True))
        self._dims = dict(zip(live.call.names, dims, strict=True))

    def train(self, mode: bool = True) -> "Parallel":
        """Set the module and all of its parts to training or to evaluation; parts compute in the traced mode."""
        for part in self.modules():
            part.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode, values, arguments = self._begun(args, kwargs, is_compiled=torch.compiler.is_compiling())
        with computing_in(mode.low, self._device), mode.traced.gathered.freed():
            found = mode.traced.module(*arguments)
        return self._ended(mode, values, *found)

    @torch._disable_dynamo
    def _begun(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_compiled: bool
    ) -> tuple[_Mode, Mapping[str, Any], list[Any]]:
        """Return the program, the values known before any layer, and the arguments of the rank's graph."""
        if self.training and torch.is_grad_enabled():
            self._check_trained()
            self._compare(args, kwargs)
            if is_compiled:
                self._mode(True).traced.gathered.check_compiled()
        boxes, call = self._boxes, self._live.call
        given = call.bound(args, kwargs, {name: extents(box) for name, box in boxes.items()})
        self._check_inputs(given)
        inputs = {
            name: (part_in if name in self._direct else in_place)(given[name], shape, boxes[name])
            for name, shape in zip(call.names, call.shapes, strict=True)
        }
        self._check_lookups(inputs)
        mode = self._mode(self.training)
        self._follow()
        if self.training:
            PASSES.begin(FORWARD)
        self._reconcile_in_time()
        self._gather()
        values = self._values(inputs) | self._known(mode, inputs)
        return mode, values, [get(values) for get in mode.given]

    def _check_trained(self) -> None:
        """Raise EmitError where the module would not be trained as it trains itself."""
        check_trained(self._live.model.graph, self._aten.problem)

    def reconcile(self) -> None:
        """Make replicas of weights that ranks update separately equal to the last bit; all ranks call it.

        Training steps do so regularly, see `parallelize`.
        """
        if self._replicas is not None:
            self._replicas.make_equal(self._tensor)
            # Shards within gathered weights may have changed.
            self._gathered = None

    def _reconcile_in_time(self) -> None:
        period = self._reconciling_steps * self._micro_batches
        if self.training and torch.is_grad_enabled() and period and self._step and not self._step % period:
            self.reconcile()

    def compare_steps(self, compare: Compare | None, *, is_always: bool = False) -> None:
        """Have the first step of training compared with the module itself, or all of them; None for no more of it."""
        self._compares, self._compares_always = compare, is_always

    def _compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        compare = self._compares
        if compare is None:
            return
        if not self._compares_always:
            self._compares = None
        call = self._live.call
        given = call.bound(args, kwargs, {name: extents(box) for name, box in self._boxes.items()})

        def called(inputs: Mapping[str, Any]) -> Any:
            return next(call.split(args, kwargs, [0], lambda name, _x, _number: inputs[name]))

        # A part of the model may have the same name.
        notes = (*self.__dict__["notes"], *compare(self, given, called, self._device))
        self.__dict__["notes"] = tuple(dict.fromkeys(notes))

    @torch._disable_dynamo
    def _ended(
        self, mode: _Mode, values: Mapping[str, Any], loss: Any, outputs: Sequence[Any], keeps: Sequence[Any]
    ) -> Any:
        self._keep(mode, keeps, values)
        if self.training:
            self._step += 1
            PASSES.end()
            self._note_backward((loss, *outputs))
        return self._returned(mode, loss, outputs, values)

    def _note_backward(self, made: Iterable[Any]) -> None:
        """Have it noted that a backward pass begins, when the first of these tensors has its gradient."""
        engine, noted = torch.autograd.Variable._execution_engine, set[int]()
        assert self._gradients is not None
        # A model's result may outlive the model.
        of_model = ref(self._gradients)

        def note(_: Any) -> None:
            task = torch._C._current_graph_task_id()
            if task not in noted:
                noted.add(task)
                gradients = of_model()
                PASSES.begin(HELD_BACKWARD if gradients is not None and gradients.is_held else BACKWARD)
                # After queued callbacks: gradients that are reduced at the end of the pass.
                engine.queue_callback(lambda: engine.queue_callback(PASSES.end))

        for x in made:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(note)

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward and backward passes of a step's micro-batches, and return its loss.

        The gradient, which is added to the parameters' `grad`, is that of the mean of the micro-batches' losses, and is
        reduced over ranks once. Where a loss is a mean over examples with equally many targets, that mean is the loss
        of all of them together.

        Args:
            args: Arguments of the model, with `plan.micro_batches` times as many examples; or a rank's own part of
                them, as given by `inputs` and `sampler`. Inputs without examples are the same for all micro-batches.
            kwargs: Likewise, by name.

        Returns:
            The mean of the losses, detached.

        Raises:
            ModelError: An input has another number of examples.
            ProgramError: The model does not return a single loss.
        """
        count, losses = self._micro_batches, []
        for number, (own, named) in enumerate(self._live.call.split(args, kwargs, range(count), self._micro_batch)):
            with nullcontext() if number + 1 == count else self.no_sync():
                loss = loss_of(self(*own, **named))
                (loss / count).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _micro_batch(self, name: str, x: Any, number: int) -> Any:
        """Return a micro-batch, by its number, of an input."""
        count, dim = self._micro_batches, self._dims[name]
        if dim is None or not isinstance(x, torch.Tensor) or x.ndim <= dim:
            return x
        whole_size, own_size = (count * size[dim] for size in (self._shapes[name], extents(self._boxes[name])))
        if x.shape[dim] not in (whole_size, own_size):
            also = "" if own_size == whole_size else f", or {own_size}, what this rank reads of them"
            raise ModelError(
                f"input {name!r} has {x.shape[dim]} examples; a step has {whole_size}, {count} micro-batches of "
                f"{self._shapes[name][dim]}{also}"
            )
        # The model's own computations on its inputs may assume contiguous tensors.
        return micro_batch(x, number, count, dim).contiguous()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients partial: the next backward pass outside of this context reduces them with its own."""
        self._follow()
        assert self._gradients is not None
        with self._gradients.held():
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parallel":
        # An averaged copy of the weights has parameters of its own. Knowledge of the model, and process groups, are
        # shared.
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._modes, twin._owners, twin._gradients, twin._fixed_values = {}, {}, None, _Fixed()
        twin._leaves, twin._gathered = Leaves(receive=twin._received, pieces=self._leaves.pieces), None
        for name in ("_parameters", "_buffers", "_modules"):
            twin.__dict__[name] = deepcopy(self.__dict__[name], memo)
        return twin

    def inputs(self, rank: int | None = None) -> dict[str, Box]:
        """Return the box that a rank, by default this one, reads of each input of a step, by name.

        A call may pass the whole batch to every rank, or its own part. A model with computations on its inputs before
        its first layer (shifted labels, masks) needs all of them on every rank.
        """
        count = self._micro_batches
        found = {name: list(box) for name, box in self._read(self._rank if rank is None else rank).items()}
        for name, dim in self._dims.items():
            if dim is not None:
                found[name][dim] = (found[name][dim][0] * count, found[name][dim][1] * count)
        return {name: tuple(box) for name, box in found.items()}

    def _read(self, rank: int) -> dict[str, Box]:
        """Return the box that a rank reads of each input of a micro-batch, by name."""
        rows, batch = self._rows(rank), self._batch
        return {
            name: (rows, *whole(shape)[1:]) if shape[:1] == (batch,) else whole(shape)
            for name, shape in self._shapes.items()
        }

    def sampler(
        self, examples: Sized | int, *, rank: int | None = None, shuffle: bool = True, seed: int = 0
    ) -> RankSampler:
        """Return a `batch_sampler` with the examples that a rank, by default this one, reads in each step.

        examples: the data set, or the number of examples. seed: the same on all ranks.
        """
        low, high = self._rows(self._rank if rank is None else rank)
        count = self._micro_batches
        rows = (low * count, high * count)
        return RankSampler(examples, batch=self._batch * count, rows=rows, shuffle=shuffle, seed=seed)

    @property
    def _batch(self) -> int:
        return next((shape[0] for shape in self._live.call.shapes if shape), 1)

    def _rows(self, rank: int) -> Range:
        """Return the examples of a batch that a rank reads, of any input."""
        live, mode, batch = self._live, self._mode(True), self._batch
        traced = mode.traced
        own = list(live.inputs.values())
        computed = [c for c in live.constants.values() if c.inputs] + [i for i in own if i.inputs and not i.is_given]
        if computed or any(output.inputs for output in live.outputs) or mode.known.inputs:
            return (0, batch)
        shapes = {item.name: traced.inputs[item.name].shape for item in own if item.name in traced.taken}
        found = [rows_read(shape, traced.taken[name], rank) for name, shape in shapes.items() if shape[:1] == (batch,)]
        if len(found) < len(shapes) or not found:
            return (0, batch)
        return min(low for low, _ in found), max(high for _, high in found)

    def full_state_dict(self, *, on_all: bool = False) -> dict[str, Any]:
        return full_state_dict(self, on_all=on_all)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` where modules are that are called as attributes of ours."""
        return {name: "_by_name" for name, module in self._modules.items() if getattr(self, name) is not module}

    @property
    def _by_name(self) -> SimpleNamespace:
        return SimpleNamespace(**self._modules)

    @property
    def mask_state(self) -> dict[str, int]:
        """State of dropout's random masks: the seed, and the number of completed steps; not part of a state_dict.

        `save_checkpoint` and `load_checkpoint` preserve it; other checkpoint code must save and restore it.
        """
        return {"seed": self._seed, "step": self._step}

    @mask_state.setter
    def mask_state(self, state: Mapping[str, int]) -> None:
        self._seed, self._step = state["seed"], state["step"]

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    # -- programs

    @property
    def _stored(self) -> Storage:
        assert self._storage is not None
        return self._storage

    @cached_property
    def program(self) -> str:
        """What runs, as the text of a program."""
        return self._aten.program.text()

    @cached_property
    def _build(self) -> Callable[[Program], Any]:
        return partial(interpret, *self._aten.program.functions)

    @cached_property
    def _sums(self) -> dict[str, WeightSum]:
        """The sums of gradients in training."""
        return self._sums_in(True)

    def _sums_in(self, trains: bool) -> dict[str, WeightSum]:
        """Return the all-reduces of gradients by parameter; in training, normalisation over split dims has its own."""
        found: dict[str, WeightSum] = {}
        for name, own in self._mode(trains).traced.sums.items():
            parameter = self._reading(name).parameter
            before = found.get(parameter)
            # Several weights may be parts of one parameter, whose gradient is reduced once.
            found[parameter] = own if before is None else replace(before, points=before.points + own.points)
        return found

    def _mode(self, trains: bool) -> _Mode:
        if trains not in self._modes:
            program = self._declared(trains)
            self._modes[trains] = self._traced(program, self._build(program))
        return self._modes[trains]

    def _declared(self, trains: bool) -> LiveProgram:
        program = LiveProgram(
            self._live,
            self._state,
            self._storage,
            layers=self._aten,
            prefix=self._prefix,
            rank=self._rank,
            num_devices=self.plan.num_devices,
            trains=trains,
            groups=self._groups,
            traffic=self._traffic,
            pieces=self._pieces,
            device=self._device,
        )
        program.drops_nothing = self._root._drops_nothing
        return program

    def _traced(self, program: Any, made: Any) -> _Mode:
        """Return the mode to run; made: results of the functions that declare the layers."""
        loss, outputs = made if isinstance(made, tuple) else (made, {}) if isinstance(made, Tensor) else (None, made)
        if self._pieces is None:
            self._storage, self._pieces, self._state_notes = program.hold(), program.pieces, program.notes
            self._leaves.pieces = {self._reading(name).parameter: own for name, own in (program.pieces or {}).items()}
        placed, results = self._results(program, loss, outputs)
        traced = program.traced(loss, results)
        fed = {item.name: item.use for item in self._live.inputs.values()}
        places = traced.module.graph.find_nodes(op="placeholder")
        given = tuple(
            self._source(argument, fed, traced, program.takes) if place.users else _unread
            for argument, place in zip(traced.arguments, places, strict=True)
        )
        numbers = {own.name: own.output.name for own in self._live.outputs if own.output and not own.shape}
        at_loss = next((name for name, made in numbers.items() if made not in outputs), "")
        keeps = tuple(self._kept(name, momentum) for name, momentum in traced.keeps)
        return _Mode(
            traced=traced,
            known=self._known_part(program.trains, is_fixed=False),
            fixed=self._known_part(program.trains, is_fixed=True),
            fixed_values=_Fixed(),
            updates=self._updates(program.trains),
            given=given,
            keeps=keeps,
            loss=at_loss,
            placed=placed,
            low=program.low,
            detached=self._detached(program.trains),
        )

    def _detached(self, trains: bool) -> frozenset[int]:
        """Return the numbers of the tensors that the module returns which have no gradient."""
        return self._aten.detached(trains=trains)

    def _results(self, program: Any, loss: Any, outputs: Mapping[str, Any]) -> Any:
        """Return the placement of each output, None for replicated ones; and the outputs."""
        outputs = {name: (self._output_of(program, name, x), shape) for name, (x, shape) in outputs.items()}
        # A loss computed outside of the model needs the replicated output.
        placed = {name: None if loss is None else program.placed(x, shape) for name, (x, shape) in outputs.items()}
        return placed, {n: x if placed[n] else program.whole(x, shape) for n, (x, shape) in outputs.items()}

    def _output_of(self, program: LiveProgram, name: str, x: Tensor) -> Tensor:
        """Return an output of the model, by the program's name, from its layer's result."""
        for number, output in enumerate(self._live.outputs):
            if output.output and output.output.name == name:
                if output.is_moved:
                    return program.returned(number, output.layer, x)
                return x if output.part is None else piece(x, output.part.dim, output.part.offset, output.part.extent)
        return x

    def _known_part(self, trains: bool, *, is_fixed: bool) -> Part:
        """Return the graph of values that layers read from only inputs and buffers, or from only buffers."""
        return self._aten.part(self.plan.index, trains=trains, is_fixed=is_fixed, device=self._device)

    def _updates(self, trains: bool) -> Mapping[str, str]:
        """Return which of these values buffers have after a call, by the names of the buffers."""
        return self._aten.known_updates(trains=trains)

    def _source(self, argument: str, fed: Mapping[str, Use], traced: Traced, takes: Mapping[str, Take]) -> Get:
        """Return the source of an argument of a rank's graph."""
        kind, _, name = argument.partition(" ")
        if kind == "input":
            use, shape = fed[name], traced.inputs[name].shape
            takers = traced.takes.get(name, ())
            shapes = {shape[:1], *(take.shape[:1] for take in takers)}
            if use.value in self._direct and shapes == {(self._batch,)}:
                return lambda values: self._in_rows(values[use.value], self._boxes[use.value][0], shape, takers)
            return lambda values: read_as(values[use.value], use).reshape(shape)
        if kind == "held":
            return lambda _: self._leaf(name)
        if kind == "shard":
            parameter = self._reading(name).parameter
            return lambda _: self._leaf(parameter)
        if kind == "piece":
            parameter, shape = self._reading(name).parameter, traced.pieces[name].piece_shape
            return lambda _: local_of(self._tensor(parameter)).detach().reshape(shape)
        if kind == "constant":
            layer, _, own = name.rpartition("/")
            constant, take = self._live.constants[layer, own].use, takes[name]
            if constant.value in self._fixed.names:
                return lambda values: self._fixed_values.part(
                    name, lambda: take(read_as(values[constant.value], constant))
                )
            return lambda values: take(read_as(values[constant.value], constant))
        if kind in ("known", "received"):
            return lambda values: values[argument]
        if argument == "draw_key":
            return lambda _: self._draw_key
        assert argument == "mask_key", argument
        # On the device, without a copy from the CPU.
        return lambda _: torch.stack([torch.full((), int(word), device=self._device) for word in self._key_words])

    @staticmethod
    def _in_rows(x: Any, rows: Range, shape: tuple[int, ...], takes: Iterable[Take]) -> Any:
        """Return some rows of an input in the shape in which the program reads it, and pass them to its slices.

        Args:
            x: The rows, in the shape of the module.
            rows: Their range.
            shape: Shape in which the program reads the whole input.
            takes: Slices of it for layers.
        """
        for take in takes:
            take.rows = rows
        return x.reshape((rows[1] - rows[0], *shape[1:]))

    # -- parameters and buffers

    @property
    def _root(self) -> "Parallel":
        return self

    def _count(self, traced: Traced, outputs: Sequence[Any]) -> None:
        """Record further counts of a program: none, for a traced module."""

    def _give(self, parameter: Any, gradient: Any) -> None:
        """Add this rank's part of a gradient to a parameter's."""
        receive(parameter, gradient)

    def _tensor(self, name: str) -> Any:
        found = self._owners.get(name)
        if found is None:
            found = self._owners[name] = owner_of(self._root, name)
        module, last = found
        parameter = module._parameters.get(last)
        return module._buffers[last] if parameter is None else parameter

    def _reading(self, name: str) -> Reading:
        return self._stored.readings[f"{self._prefix}{name}"]

    def _leaf(self, name: str) -> Any:
        return self._leaves.of(name, self._tensor(name))

    def _values(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values computed from inputs and buffers before any layer, by name."""
        with torch.no_grad():
            fixed = self._fixed_values.of(self._fixed, {name: self._tensor(name) for name in self._fixed.state})
            return fixed | self._part(inputs, {name: _whole(self._tensor(name)) for name in self._part.state})

    def _known(self, mode: _Mode, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that layers read from only inputs and buffers, by the names of the arguments."""
        with torch.no_grad():
            found = mode.fixed_values.of(mode.fixed, {name: self._tensor(name) for name in mode.fixed.state})
            state = {name: _whole(self._tensor(name)) for name in mode.known.state}
            found = found | mode.known(inputs, state, self._draw_key if mode.known.draws else None)
        return {f"known {name}": value for name, value in found.items()}

    @property
    def _draw_key(self) -> Any:
        return torch.from_numpy(self._key_words)

    @property
    def _key_words(self) -> Any:
        """Two numbers that random numbers of a step go by, the same on all ranks."""
        return step_key(self._seed, self._step)

    def _check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise ProgramError for an input of which a gradient is wanted that it would not get, or not all of."""
        for name, x in inputs.items():
            if not (isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()):
                continue
            is_split = dist.get_world_size() > 1
            if is_split or name not in self._direct:
                why = "each process would have a part of it" if is_split else "it would get none"
                raise ProgramError(
                    f"input {name!r} requires a gradient, which a module under a plan does not compute: {why}. Give "
                    f"{name}.detach(), or what it is computed by as a part of the module"
                )

    def _check_lookups(self, inputs: Mapping[str, Any]) -> None:
        """Raise ModelError for labels and row numbers that are out of bounds, which a rank's steps do not detect."""
        values = self._looked_up(inputs, {})
        for lookup in self._live.lookups:
            found = values[lookup.value]
            is_known = (found >= 0) & (found < lookup.stop)
            if lookup.ignored is not None:
                is_known |= found == lookup.ignored
            also = "" if lookup.ignored is None else f" or {lookup.ignored}"
            expected = f"expected 0 to {lookup.stop - 1}{also}"
            if found.device.type == "cuda":
                # Without waiting for the device.
                torch._assert_async(is_known.all(), f"{lookup.what} is given a number that is out of range; {expected}")
            elif type(found) is torch.Tensor and not found.is_meta and not is_known.all():
                raise ModelError(f"{lookup.what} is given {found[~is_known][0].item()}, out of range; {expected}")

    def _received(self, parameter: Any, gradient: Any) -> None:
        assert self._gradients is not None
        self._gradients.arrived(parameter, gradient)

    def _follow(self) -> None:
        """Have the sums of gradients be those of the mode and of the parameters that are there, and trained, now."""
        before = self._leaves.num_made
        trains = self._root.training if torch.is_grad_enabled() or self._gradients is None else self._sums_trains
        sums = self._sums if trains else {**self._sums, **self._sums_in(False)}
        for name in sums:
            self._leaf(name)
        if self._gradients is not None and trains != self._sums_trains and self._gradients.is_waiting:
            raise ProgramError(
                "gradients that no_sync() has left unsummed are of another mode: go backward outside it before "
                "train() or eval() is called"
            )
        if self._gradients is None or trains != self._sums_trains or self._leaves.num_made > before:
            pieces = self._leaves.pieces
            entries = [Entry(self._tensor(name), own, pieces.get(name)) for name, own in sums.items()]
            self._gradients = Gradients(entries, self._sum_groups, self._traffic, self._give)
            self._sums_trains = trains

    def _gather(self) -> None:
        """All-gather the weights that stay gathered while ranks update shards, if these may have changed.

        Neither `.data` nor fused multi-tensor operations report that they change a tensor. Evaluation therefore always
        gathers; a training step does, unless only backward passes of its own step have preceded it.
        """
        held = list(self._leaves.kept())

        def versions() -> Any:
            tensors = (*map(self._tensor, self._leaves.pieces), *(piece for _, _, piece in held))
            assert self._gradients is not None
            return self._gradients, self._gradients.num_passes, [tensor._version for tensor in tensors]

        is_training = self.training and torch.is_grad_enabled()
        if held and not (is_training and self._gathered == versions()):
            with torch.no_grad():
                gather_in_place(held, self._traffic)
            self._gathered = versions() if is_training else None

    def _kept(self, name: str, momentum: float | None) -> Callable[[Any], None]:
        if momentum is None:
            return partial(self._become, name)
        reading = self._reading(name)
        keep = keeping(self._stored, reading, self._groups)
        return lambda value: keep(local_of(self._tensor(reading.parameter)), value, momentum)

    def _become(self, name: str, value: Any) -> None:
        """Give a buffer, or a frozen parameter, a value that every rank has all of."""
        tensor = self._tensor(name)
        local_of(tensor).copy_(cut(value.reshape(tensor.shape), self._stored.stored[name].held[self._rank]))

    def _keep(self, mode: _Mode, values: Sequence[Any], known: Mapping[str, Any]) -> None:
        """Store the values that a call leaves in buffers.

        Args:
            mode: Mode of training or evaluation.
            values: Values that layers computed, in the order of the mode's `keeps`.
            known: Values known before any layer.
        """
        with torch.no_grad():
            for keep, value in zip(mode.keeps, values, strict=True):
                keep(value)
            for name, argument in mode.updates.items():
                self._become(name, known[argument])
            if not self._root.training or mode.updates:
                return
            owners = {own for layer, own in self._live.statistics.items() if layer not in self._aten.layers}
            for owner in sorted(owners):
                counted = owner_of(self._root, f"{owner}.num_batches_tracked")[0]._buffers.get("num_batches_tracked")
                if counted is not None:
                    counted.add_(1)

    def _returned(self, mode: _Mode, loss: Any, outputs: Sequence[Any], values: Mapping[str, Any]) -> Any:
        found = dict(zip(mode.traced.results, outputs, strict=True))
        tensors = []
        for item in self._live.outputs:
            if item.name == mode.loss:
                tensors.append(loss.reshape(item.shape))
            elif item.output:
                own = item.output.name
                tensors.append(self._output(found[own], item.shape, mode.placed[own]))
            else:
                tensors.append(values[item.name])
        for i in mode.detached if len(tensors) > 1 else ():
            tensors[i] = tensors[i].detach()
        return self._live.returned(tensors)

    def _output(self, value: Any, shape: tuple[int, ...], placed: Stored | None) -> Any:
        if placed is None:
            return value.reshape(shape)
        local = [sum(high - low for low, high in runs) for runs in placed.held[self._rank]]
        return distributed(value.reshape(local), placed, self._mesh)


def _unread(_: Mapping[str, Any]) -> None:
    """Return nothing, for an unused argument."""


def _direct(live: LiveModel, looked_up: Part) -> frozenset[str]:
    """Return the inputs that only layers read, without changes, so that a rank only needs its part."""
    computed = {name for constant in live.constants.values() for name in constant.inputs}
    computed.update(name for output in live.outputs for name in output.inputs)
    for item in live.inputs.values():
        is_as_it_is = item.is_given and item.inputs == (item.use.value,)
        if not is_as_it_is or not (item.use.view is None or item.use.view.is_reshape):
            computed.update(item.inputs)
    return frozenset(live.call.names) - computed - {*looked_up.inputs}


@dataclass(slots=True)
class _Fixed:
    """Cache of values computed from only buffers, valid until one of these changes.

    key: state of the buffers. parts: parts of the values that the rank's graph reads, by name.
    """

    key: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)

    def of(self, part: Part, state: Mapping[str, Any]) -> dict[str, Any]:
        key = tuple((id(tensor), tensor._version) for tensor in state.values())
        if key != self.key:
            # Later steps may be differentiated.
            with torch.inference_mode(False), torch.no_grad():
                self.values = part({}, {name: _whole(tensor) for name, tensor in state.items()})
            self.key, self.parts = key, {}
        return self.values

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.parts:
            with torch.inference_mode(False), torch.no_grad():
                self.parts[name] = make()
        return self.parts[name]


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(returned: Any) -> Any:
    """Return the one number among the tensors that a model returns; ProgramError where there is not one."""
    tensors = [x for x in pytree.tree_leaves(returned) if isinstance(x, torch.Tensor)]
    numbers = [x for x in tensors if x.numel() == 1 and x.is_floating_point()]
    if len(numbers) != 1:
        raise ProgramError(
            f"{len(numbers)} of the {len(tensors)} tensors that the model returns are single numbers; expected one, "
            "the loss: return it alone or with the outputs, or have the factory return (model, inputs, loss)"
        )
    return numbers[0].reshape(())
