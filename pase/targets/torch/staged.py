"""A PyTorch module under a plan with a pipeline: each rank has the stages of its group, and trains by whole steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pase.errors import ProgramError
from pase.graph import Graph
from pase.importers.torch.live import LiveModel
from pase.planning.plan import Plan
from pase.planning.stages import stage_plan
from pase.sharding.boxes import Range
from pase.sharding.shards import prime_factors
from pase.targets.programs import check_trained
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.devices import current_device
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.interpreter import interpret
from pase.targets.torch.messages import told_by_all
from pase.targets.torch.module import HeldProgram, Parallel, hold_together
from pase.targets.torch.parameters import (
    Axes,
    State,
    full_state_dict,
    install,
    mesh_in_groups,
    notes_on,
    receive,
    split_axes,
    state_of,
)
from pase.targets.torch.pipeline import Copy, Pipeline, RankStage, Stages
from pase.targets.torch.placements import Need, Storage, storage
from pase.targets.torch.replicas import Replicas
from pase.targets.torch.states import Gradients, WeightSum
from pase.targets.torch.tensor import computing_in
from pase.targets.torch.values import Source
from pase.targets.torch.watch import HELD_PIPELINE, PASSES, PIPELINE


class StageModule(Parallel):
    """A stage on this rank; its parameters and buffers have the names of the whole module's."""

    def __init__(self, module: nn.Module, parallel: "Staged", number: int) -> None:
        nn.Module.__init__(self)
        plan, stages = stage_plan(parallel.plan, number), parallel._stages
        live, self._aten = _live_of(parallel._live, plan.graph), parallel._aten
        self._prepare(module, live, plan, rank=stages.rank - stages.first, seed=parallel._seed)
        self._take_place(parallel, number)

    def _take_place(self, parallel: "Staged", number: int) -> None:
        """Become a stage of a module, by its number."""
        stages = parallel._stages
        self._parallel, self._number, self._prefix = (parallel,), number, f"{number} "
        # Every rank is given all examples.
        self._direct = frozenset()
        self._traffic, self._state = parallel.traffic, parallel._state
        self._groups = stages.groups()
        self._sum_groups = self._groups.separate("sums")

    def ask(self) -> None:
        for own in self._sums.values():
            self._sum_groups.of(own.groups)

    def begun(self, inputs: Callable[[int], Mapping[str, Any]]) -> RankStage:
        """Begin a step. inputs: Returns those of a micro-batch, by its number."""
        self._mode(self._root.training)
        self._follow()
        self._gather()
        return RankStage(
            compute=partial(self._compute, inputs),
            leaves=self._leaves.all,
            collect=self._leaves.collect,
            gradients=self.gradients,
        )

    @property
    def gradients(self) -> Gradients:
        assert self._gradients is not None
        return self._gradients

    def _compute(self, inputs: Callable[[int], Mapping[str, Any]], micro_batch: int, received: Sequence[Any]) -> Any:
        parallel = self._root
        mode = self._mode(parallel.training)
        self._seed, self._step = parallel._seed, parallel._step + micro_batch
        own = inputs(micro_batch)
        values = self._values(own) | self._known(mode, own) | {f"received {i}": x for i, x in enumerate(received)}
        with naming_lost_ranks(), computing_in(mode.low, self._device), mode.traced.gathered.freed():
            made, outputs, keeps = mode.traced.module(*[get(values) for get in mode.given])
        parallel._count(mode.traced, outputs)
        self._keep(mode, keeps, values)
        return made

    @property
    def _root(self) -> "Staged":
        return self._parallel[0]

    @cached_property
    def _build(self) -> Any:
        return partial(self._root._stages.built, self._number)

    def _give(self, parameter: Any, gradient: Any) -> None:
        self._root._give(parameter, gradient)


class Staged(Parallel):
    """A model under a plan with a pipeline, on one rank, which only has the parameters of its stages.

    It is trained by `accumulate`. Called without gradients, it returns the loss of one micro-batch.
    """

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
        nn.Module.__init__(self)
        if plan.precision.results == "float16":
            raise ProgramError(
                "products in float16 need a loss that is scaled, which pipelines do not do; search with another "
                "precision (bf16-mixed), or without stages"
            )
        self._aten = AtenLayers(live, plan)
        if module.training:
            check_trained(live.model.graph, self._aten.problem)
        pipeline = Pipeline(
            stages=tuple(partial(interpret, stage) for stage in self._aten.program.functions),
            schedule=plan.schedule,
            micro_batches=plan.micro_batches,
            num_groups=plan.num_groups,
        )
        self._prepare(module, live, plan, rank=rank, seed=seed)
        self._state = state_of(module)
        self._boxes = self._read(rank)

        def begun(number: int) -> HeldProgram:
            self._own[number] = StageModule(module, self, number)
            return self._own[number]._declared(True)

        programs = self._declare(pipeline, begun, rank, plan.num_devices)
        self._install(programs, weights, (*live.notes, *self._device_notes, *self._aten.notes, *notes))
        self.train(module.training)

    def _declare(
        self, pipeline: Pipeline, begun: Callable[[int], HeldProgram], rank: int, num_ranks: int
    ) -> list[HeldProgram]:
        """Declare the stages of this rank's group, and trace them; return their programs.

        begun: Begins a stage, by its number, and returns the program that it is declared on.
        """
        self._is_held, self._own, self._left = False, dict[int, StageModule](), dict[str, Any]()
        self._stages = Stages(
            pipeline=pipeline, rank=rank, num_ranks=num_ranks, traffic=self._traffic, device=self._device
        )
        declared = self._stages.declare(begun)
        programs = {number: program for number, (program, _) in declared.items()}
        self._holders = self._declared_by(programs)
        for program in programs.values():
            read = program.reads().items()
            program.copied |= {name for name, own in read if self._state.first[own.parameter] in self._shared}
        self._storage = hold_together(list(programs.values()), self._stored_by)
        for number, (program, made) in declared.items():
            self._own[number]._modes[True] = self._own[number]._traced(program, made)
        self._copied = self._stages.link_copies(self._copies(programs))
        return list(programs.values())

    def _declared_by(self, programs: Mapping[int, HeldProgram]) -> Mapping[str, tuple[int, ...]]:
        """Return the groups of ranks that have each parameter and each buffer, once the stages are declared."""
        return _holders(self._live, self.plan, self._state)

    def _install(self, programs: Sequence[HeldProgram], weights: Source, notes: Sequence[str]) -> None:
        """Make the process groups that steps need, and the parameters and buffers."""
        every, uneven = zip(*told_by_all(split_axes(self._stored)), strict=True)
        split = set[Axes]().union(*every), set[Axes]().union(*uneven)
        self._mesh = mesh_in_groups(self._stored.sizes, *split, self._stages.pipeline.num_groups, self._device.type)
        sums: dict[str, WeightSum] = {}
        for stage in self._own.values():
            stage.ask()
            sums = {**stage._sums, **sums}
        self._replicas = Replicas(self._stored, sums, self._stages.groups().separate("sums"))
        self._stages.connect()
        states = [note for program in programs for note in program.notes]
        self.notes = (*notes, *notes_on(self._state, self._stored), *states)
        install(self, self._state, self._stored, self._mesh, weights, device=self._device)

    # -- steps

    @torch._disable_dynamo
    def accumulate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Go forward and backward through the micro-batches of a step, and return its loss, as `Parallel` does.

        All ranks have the loss. Every rank is given all examples.
        """
        self._check_trained()
        count = self._micro_batches
        if self.training and self._compares is not None:
            # Its copy of the inputs is freed before the step.
            self._compare(*next(self._live.call.split(args, kwargs, [0], self._micro_batch)))
        PASSES.begin(HELD_PIPELINE if self._is_held else PIPELINE)
        loss = self._stages.train(self._begun_on(partial(self._inputs_of, args, kwargs), count))
        if self.training:
            self._step += count
        if not self._is_held:
            self._add_up()
        known = self._stages.known(loss)
        PASSES.end()
        return known

    @torch._disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one micro-batch, as the model returns it, without gradients."""
        if torch.is_grad_enabled():
            raise ProgramError(
                "a module in a pipeline trains by loss = module.accumulate(…), which goes backward, too; to evaluate "
                "it, call it under torch.no_grad()"
            )
        if len(self._live.outputs) > 1:
            raise ProgramError(
                f"the module returns {len(self._live.outputs)} tensors, and the stages of a pipeline hand on what "
                "leads to the loss alone; return the loss, or evaluate under a plan without stages"
            )
        inputs = self._live.call.bound(args, kwargs)
        loss = self._stages.evaluate(self._begun_on(lambda _: inputs, 1))
        self._step += self.training
        return self._returned_loss(self._stages.known(loss))

    def _returned_loss(self, loss: Any) -> Any:
        """Return the module's result, given its loss, on all ranks."""
        return self._live.returned([loss.reshape(self._live.outputs[0].shape)])

    def reconcile(self) -> None:
        super().reconcile()
        for stage in self._own.values():
            stage._gathered = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def _inputs_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """Return a copy of the inputs of one micro-batch of a step, by name."""
        ((own, named),) = self._live.call.split(args, kwargs, [number], self._micro_batch)
        inputs: Mapping[str, Any] = self._live.call.bound(own, named)
        return inputs

    def _begun_on(self, inputs: Callable[[int], Mapping[str, Any]], count: int) -> dict[int, RankStage]:
        """Start a step of `count` micro-batches; inputs: returns those of one, by its number, when it starts."""
        for number in range(count):
            own = inputs(number)
            self._check_inputs(own)
            self._check_lookups(own)
        self._names = {id(self._tensor(name)): name for name in self._stored.stored}
        is_first = any(self.training not in stage._modes for stage in self._own.values())
        self._reconcile_in_time()
        begun = {number: stage.begun(inputs) for number, stage in self._own.items()}
        if is_first:
            self._stages.connect()
        return begun

    # -- gradients

    def _give(self, parameter: Any, gradient: Any) -> None:
        name = self._names[id(parameter)]
        if name not in self._copied:
            receive(parameter, gradient)
        elif name in self._left:
            self._left[name] = self._left[name] + gradient
        else:
            self._left[name] = gradient

    def _add_up(self) -> None:
        """Add up the gradients of weights over the ranks of each stage, those of copies over all that have one."""
        for stage in self._own.values():
            stage.gradients.flush()
        left, self._left = self._left, {}
        for name, gradient in self._stages.copies_summed(left).items():
            receive(self._tensor(name), gradient)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all stages is at most a given one; return the original norm.

        All ranks call it: `torch.nn.utils.clip_grad_norm_` would only use the parameters of this rank's stages.
        """
        own = {name: p for name, p in self.named_parameters() if p.grad is not None}
        counted = [p.grad for name, p in own.items() if self.owns(name)]
        norm = torch.nn.utils.get_total_norm(counted) if counted else torch.zeros(())
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        square = norm.to(self._device, torch.float64) ** 2 / self._stages.size
        with naming_lost_ranks():
            dist.all_reduce(square)
        total = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(own.values(), max_norm, total)
        return total

    def _rows(self, _rank: int) -> Range:
        """Return the examples of a batch that a rank is given: all, whose first layers other ranks may have."""
        return (0, self._batch)

    # -- parameters and buffers

    @cached_property
    def _shared(self) -> list[str]:
        """The parameters of which this group of ranks has a copy, and others have, too."""
        group, declared = self._stages.group, self._state.declared
        return [
            name
            for name, own in self._holders.items()
            if len(own) > 1 and group in own and not declared[name].is_buffer
        ]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all parameters and buffers of the model, in order, those of other ranks included."""
        return self._state.order

    def owns(self, name: str) -> bool:
        """Return whether this rank's group is the first of those that have a parameter or a buffer."""
        return self._holders[self._state.first[name]][0] == self._stages.group

    def _stored_by(self, needs: Mapping[str, Sequence[Need]]) -> Storage:
        """Return the storage for this rank's group, given its stages' needs."""
        size = self._stages.size
        shapes = self._state.shapes
        names = [name for name, own in self._holders.items() if self._stages.group in own]
        parts = []
        for some, apart in (([n for n in names if n not in self._shared], True), (self._shared, False)):
            parts.append(
                storage(
                    {name: shapes[name] for name in some},
                    {name: needs[name] for name in some if name in needs},
                    size,
                    apart=apart,
                    sizes=prime_factors(size) or (1,),
                )
            )
        return Storage(
            sizes=parts[0].sizes,
            stored={name: own for part in parts for name, own in part.stored.items()},
            readings={name: own for part in parts for name, own in part.readings.items()},
        )

    def _copies(self, programs: Mapping[int, Any]) -> dict[str, Copy]:
        """Return the parameters that other stages may read, too, as this group holds them."""
        readers = {
            self._stored.readings[f"{number} {name}"].parameter: weight.tensor.mesh.layer
            for number, program in programs.items()
            for name, weight in program.weights.items()
            if weight.is_trained
        }
        return {
            name: Copy(readers[name], self._stored.stored[name].layout()) for name in self._shared if name in readers
        }

    def full_state_dict(self, *, on_all: bool = False) -> dict[str, Any]:
        rank, own = self._stages.rank, full_state_dict(self, on_all=True)
        tellers = {name: group * self._stages.size for name, (group, *_) in self._holders.items()}
        mine = {name: x for name, x in own.items() if tellers[self._state.first[name]] == rank}
        told = told_by_all({name: (x.shape, x.dtype) for name, x in mine.items()})
        known = {name: own for each in told for name, own in each.items()}
        found: dict[str, Any] = {}
        made: dict[str, Any] = {}
        for name in (name for name in self._state.order if name in known):
            key = self._state.first[name]
            if key not in made:
                made[key] = self._sent(own.get(name), tellers[key], *known[name], on_all=on_all)
            found[name] = made[key]
        return found if on_all or rank == 0 else {}

    def _sent(self, x: Any, teller: int, shape: Any, dtype: Any, *, on_all: bool) -> Any:
        """Return a tensor of one rank on rank 0, or on all, in the memory of the CPU."""
        rank = self._stages.rank
        if rank != teller:
            x = torch.empty(shape, dtype=dtype)
        where = current_device()
        # As bytes: not all backends know all types.
        moved = x.to(where).contiguous()
        flat = moved.reshape(-1).view(torch.uint8)
        with naming_lost_ranks():
            if on_all:
                dist.broadcast(flat, src=teller)
            elif teller and rank == teller:
                dist.send(flat, 0)
            elif teller and rank == 0:
                dist.recv(flat, teller)
        return moved.to("cpu")


# -- what stages have


def _live_of(live: LiveModel, graph: Graph) -> LiveModel:
    """Return a stage's part of a traced module, given its graph; other outputs than the loss are dropped."""

    def own(named: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: x for key, x in named.items() if (key if isinstance(key, str) else key[0]) in graph.index}

    return replace(
        live,
        constants=own(live.constants),
        inputs=own(live.inputs),
        statistics=own(live.statistics),
        outputs=(),
        lookups=(),
    )


def _holders(live: LiveModel, plan: Plan, state: State) -> dict[str, tuple[int, ...]]:
    """Return the groups of ranks that have each parameter and each buffer: all, where no stage reads it."""
    found: dict[str, set[int]] = {name: set() for name in state.declared}
    for number in range(plan.num_stages):
        graph = stage_plan(plan, number).graph
        own = _live_of(live, graph)
        read = {live.weights[op.name, a.tensor].parameter for op in graph.operators for a in op.parameters}
        uses = [each.use.value for each in own.constants.values()] + [each.use.value for each in own.inputs.values()]
        counted = (f"{owner}.num_batches_tracked".removeprefix(".") for owner in own.statistics.values())
        for name in (*read, *live.part(uses).state, *(name for name in counted if name in state.first)):
            found[state.first[name]].add(number % plan.num_groups)
    return {name: tuple(sorted(own)) or tuple(range(plan.num_groups)) for name, own in found.items()}
