"""`parallelize`: a PyTorch module that computes, on every rank of a process group, its part of a model under a plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pase.errors import ProgramError
from pase.importers.difference import difference
from pase.importers.ir import Use
from pase.importers.torch.export import call_inputs
from pase.importers.torch.live import LiveModel, LiveWeight, trace_live
from pase.planning.plan import Plan
from pase.sharding.layouts import DeviceMesh, PlainDim, layout_of
from pase.sharding.reshard import reshard_steps
from pase.targets.emitter import emit
from pase.targets.torch.collectives import Groups, Take, Traffic
from pase.targets.torch.gradients import Entry, Gradients
from pase.targets.torch.launch import join, naming_lost_ranks
from pase.targets.torch.program import Program, Traced
from pase.targets.torch.reshard import reshard
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor, resolved
from pase.targets.training.masks import step_key


def parallelize(model: Any, plan: Plan, *, seed: int = 0) -> "Parallel":
    """Return a module that computes as a model does, of which each rank of the process group has its part.

    Args:
        model: The module that the plan was searched for, (module, loss) where its loss stands apart, or what it was
            searched with: (module, inputs), or (module, inputs and targets, loss). Its weights are those that training
            starts from.
        plan: For as many ranks as there are.
        seed: Of what is dropped; the same on all ranks.

    Raises:
        PaseError: The model is another one than the plan's, or the process group has another size.
    """
    ranks = join()
    if ranks.world_size != plan.num_devices:
        raise ProgramError(
            f"the plan is for {plan.num_devices} devices, and there are {ranks.world_size} processes; start as many: "
            f"torchrun --nproc-per-node {plan.num_devices} …, or search for {ranks.world_size} devices"
        )
    module, source = _source(model, plan)
    live = trace_live(source)
    found = difference(plan.graph, live.model.graph)
    if found:
        raise ProgramError(f"the plan is of another model: {found}; search a plan for this one")
    return Parallel(module, live, plan, rank=ranks.rank, seed=seed)


def _source(model: Any, plan: Plan) -> tuple[nn.Module, Any]:
    """Return the module and what it is traced with: itself, inputs, and perhaps a loss."""
    module, *given = model if isinstance(model, list | tuple) else (model,)
    if given and not (len(given) == 1 and callable(given[0])):
        return module, model
    positional, keywords, has_loss = call_inputs(plan.graph.call)
    if has_loss and not given:
        raise ProgramError("the plan was searched for a module and its loss; give both: (module, loss)")
    return module, (module, positional, keywords, *given)


# -- the program of a model


class _LiveProgram(Program):
    """A program whose weights, constants and statistics are a module's own."""

    def __init__(self, live: LiveModel, **options: Any) -> None:
        super().__init__(**options)
        self.live = live
        everywhere = DeviceMesh((("replica", self.num_devices),), tuple(range(self.num_devices)), has_replicas=True)
        self._whole = LayerMesh("the model", everywhere, self)

    def declared(self, name: str, tensor: Tensor, *, is_trained: bool) -> Any:
        """Return the value of a weight, or of a constant, of the module: this rank's part of the whole of it."""
        layer, _, own = name.rpartition("/")
        if not is_trained:
            box = tensor.layout.by_device[self.rank]
            taken = Take(shape=[dim.size for dim in tensor.dims], box=box, made=tensor.shard)
            return self.run(taken, self.argument(f"constant {name}"), "constant")
        weight = self.live.weights[layer, own]
        self.sources[name] = f"parameter {weight.parameter}"
        whole = read_weight(self.argument(self.sources[name]), weight)
        return self.moved(whole, tensor)

    def moved(self, whole: Any, tensor: Tensor) -> Any:
        """Return this rank's part of what every rank has the whole of."""
        dims = [PlainDim(dim.name, dim.size) for dim in tensor.dims]
        held = Tensor(value=whole.reshape([dim.size for dim in tensor.dims]), mesh=self._whole, dims=tensor.dims)
        steps = reshard_steps(held.layout, layout_of(tensor.mesh.devices, dims, layer=tensor.mesh.layer))
        return self.move(held, tensor.mesh, steps, made=tensor.shard)

    def whole(self, x: Tensor, dims: Sequence[Dim]) -> Tensor:
        """Return a tensor of which every rank has the whole."""
        return reshard(resolved(x), self._whole, dims)


def read_weight(value: Any, weight: LiveWeight) -> Any:
    """Return what a layer reads of a parameter's value."""
    if weight.row is not None:
        value = value.narrow(0, weight.row, weight.shape[0])
    return read_as(value, weight.use)


def read_as(value: Any, use: Use) -> Any:
    """Return a value as a use reads it: a piece of it, in another order of its elements."""
    if use.piece is not None:
        value = value.narrow(use.piece.dim, use.piece.start, use.piece.size)
    view = use.view
    if view is None:
        return value
    factors = [factor for dim in view.dims for factor in dim]
    order = [factor.base for factor in factors if factor.base is not None]
    value = value.reshape(tuple(view.factors)).permute(order)
    value = value.reshape([1 if factor.base is None else factor.extent for factor in factors])
    return value.expand([factor.extent for factor in factors]).reshape(tuple(view.shape))


Get = Callable[[Mapping[str, Any]], Any]
"""Takes what a step computed of the module's inputs, by name, returns an argument of a rank's graph."""


@dataclass(frozen=True, kw_only=True)
class _Mode:
    """The program of training, or of evaluation: what each of its arguments is had of, and what is returned."""

    traced: Traced
    given: tuple[Get, ...]
    loss: str


class Parallel(nn.Module):
    """A model under a plan, on one rank: called as the model is, it returns what the model returns.

    Its parameters have the model's names. program: the text of what runs.
    """

    def __init__(self, module: nn.Module, live: LiveModel, plan: Plan, *, rank: int, seed: int) -> None:
        super().__init__()
        self.plan, self.program = plan, emit(plan, target="torch")
        self._live, self._rank, self._seed, self._step = live, rank, seed, 0
        self._traffic, self._groups, self._sum_groups = Traffic(), *(Groups(rank, plan.num_devices) for _ in range(2))
        self._modes: dict[bool, _Mode] = {}
        self._gradients: Gradients | None = None
        self._summed: tuple[bool, ...] = ()
        self._held = _Tree(self, module)
        # What is computed of buffers and inputs before any layer.
        uses = [item.use for item in live.inputs.values()] + [item.use for item in live.constants.values()]
        self._part = live.part([use.value for use in uses] + [o.name for o in live.outputs if not o.layer])
        super().train(module.training)
        self._mode(True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        inputs = self._live.call.bound(args, kwargs)
        mode = self._mode(self.training)
        self._follow()
        with torch.no_grad():
            values = self._part(inputs, self._held.state)
        with naming_lost_ranks():
            loss, outputs, keeps = mode.traced.module(*[get(values) for get in mode.given])
        if self.training:
            self._keep(mode.traced, keeps)
            self._step += 1
        return self._returned(mode, loss, outputs, values)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave parts of gradients where they are: the next backward pass outside adds them up with its own."""
        self._follow()
        assert self._gradients is not None
        with self._gradients.held():
            yield

    # -- programs

    def _mode(self, trains: bool) -> _Mode:
        if trains in self._modes:
            return self._modes[trains]
        program = _LiveProgram(
            self._live,
            rank=self._rank,
            num_devices=self.plan.num_devices,
            trains=trains,
            groups=self._groups,
            traffic=self._traffic,
        )
        names: dict[str, Any] = {}
        # The emitter's own text: what a plan says stands in it as literals alone.
        exec(compile(self.program, "<program of a plan>", "exec"), names)
        made = names["build"](program)
        loss, outputs = made if isinstance(made, tuple) else (made, {}) if isinstance(made, Tensor) else (None, made)
        results = {
            name: program.whole(x, [Dim(f"dim{i}", extent) for i, extent in enumerate(shape)])
            for name, (x, shape) in outputs.items()
        }
        traced = program.traced(loss, results)
        fed = {item.name: item.use for item in self._live.inputs.values()}
        given = tuple(self._source(argument, fed, traced) for argument in traced.arguments)
        at_loss = next((o.name for o in self._live.outputs if o.layer and not o.shape and o.name not in outputs), "")
        self._modes[trains] = _Mode(traced=traced, given=given, loss=at_loss)
        return self._modes[trains]

    def _source(self, argument: str, fed: Mapping[str, Use], traced: Traced) -> Get:
        """Return where an argument of a rank's graph is had of."""
        kind, _, name = argument.partition(" ")
        if argument in traced.inputs:
            use, shape = fed[argument], traced.inputs[argument].shape
            return lambda values: read_as(values[use.value], use).reshape(shape)
        if kind == "parameter":
            return lambda _: self._held.leaves[name]
        if kind == "constant":
            layer, _, own = name.rpartition("/")
            constant = self._live.constants[layer, own].use
            return lambda values: read_as(values[constant.value], constant)
        assert argument == "mask_key", argument
        return lambda _: torch.from_numpy(step_key(self._seed, self._step)).to(self._held.device)

    # -- what a step leaves

    def _follow(self) -> None:
        """Have the sums of gradients be those of the weights that are trained now."""
        flags = tuple(leaf.requires_grad for leaf in self._held.leaves.values())
        if self._gradients is not None and flags == self._summed:
            return
        if self._gradients is not None:
            self._gradients.close()
        traced = self._mode(True).traced
        entries: dict[str, Entry] = {}
        for name, own in traced.sums.items():
            layer, _, tensor = name.rpartition("/")
            parameter = self._live.weights[layer, tensor].parameter
            leaf = self._held.leaves[parameter]
            entries.setdefault(parameter, Entry(leaf=leaf, sum=own, parameter=self._held.parameters[parameter]))
        self._gradients, self._summed = Gradients([*entries.values()], self._sum_groups, self._traffic), flags

    def _keep(self, traced: Traced, keeps: Sequence[Any]) -> None:
        """Bring the kept statistics nearer to those of a step."""
        with torch.no_grad():
            for (name, momentum), value in zip(traced.keeps, keeps, strict=True):
                layer, _, own = name.rpartition("/")
                buffer = self._held.state[self._live.constants[layer, own].buffer]
                buffer.lerp_(value.reshape(buffer.shape).to(buffer.dtype), momentum)
            for owner in dict.fromkeys(self._live.statistics.values()):
                counted = self._held.state.get(f"{owner}.num_batches_tracked" if owner else "num_batches_tracked")
                if counted is not None:
                    counted.add_(1)

    def _returned(self, mode: _Mode, loss: Any, outputs: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """Return what the model returns, in its structure."""
        found = dict(zip(mode.traced.results, outputs, strict=True))
        tensors = []
        for item in self._live.outputs:
            if item.name == mode.loss:
                tensors.append(loss.reshape(item.shape))
            elif item.layer:
                tensors.append(found[item.name].reshape(item.shape) if item.name in found else None)
            else:
                tensors.append(values[item.name])
        return self._live.returned(tensors)


class _Tree:
    """The parameters and buffers of a module, under its names, in another one.

    parameters: by name. leaves: what ranks compute with, by name. state: whole tensors that `Part` reads.
    """

    def __init__(self, root: nn.Module, module: nn.Module) -> None:
        self.parameters: dict[str, Any] = {}
        self.leaves: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        made: dict[int, Any] = {}
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            own = made[id(parameter)]
            owner, last = _place(root, name)
            owner.register_parameter(last, own)
            self.parameters[name] = self.leaves[name] = self.state[name] = own
        for name, buffer in module.named_buffers(remove_duplicate=False):
            owner, last = _place(root, name)
            source = module.get_submodule(name.rpartition(".")[0])
            is_persistent = last not in source._non_persistent_buffers_set
            owner.register_buffer(last, buffer.detach().clone(), persistent=is_persistent)
            self.state[name] = getattr(owner, last)


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor of a name, and what it is called there; modules are made as needed."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        found = root._modules[part]
        assert found is not None
        root = found
    return root, last
