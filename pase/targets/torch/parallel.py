"""`parallelize`: a PyTorch module under a plan; and training of a factory's model, under a plan or in one process."""

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pase.errors import ProgramError, unknown_name
from pase.graph import Scalar
from pase.importers.frameworks import difference
from pase.importers.front_end import call_factory
from pase.importers.torch.export import call_inputs, call_of, unwrapped
from pase.importers.torch.live import LiveModel, trace_live
from pase.planning.plan import Plan, check_even
from pase.planning.plan_file import graph_hash
from pase.targets.torch.comparison import with_loss
from pase.targets.torch.devices import current_device
from pase.targets.torch.first_step import FirstStep
from pase.targets.torch.launch import join
from pase.targets.torch.module import Parallel, loss_of
from pase.targets.torch.optimizers import optimizer_of, refuse_optimizers
from pase.targets.torch.parts import check_hooks
from pase.targets.torch.placements import Held
from pase.targets.torch.replicas import DEFAULT_STEPS
from pase.targets.torch.staged import Staged
from pase.targets.torch.stepping import ModuleTraining, measured_bytes
from pase.targets.torch.tensor import computing_in
from pase.targets.torch.values import Source, from_file, from_first_rank, from_tensors, own_values, random_values
from pase.targets.torch.watch import agree, digest, versions
from pase.targets.training.counted import generator, initial_moments
from pase.targets.training.data import Array, Batches, DataInput, data_inputs, example_dims, micro_batch, read_arrays
from pase.targets.training.options import TrainingOptions
from pase.targets.training.script import Steps

VERIFIED = ("first_step", "off", "always")
"""When a module under a plan may be compared with the module itself."""


def parallelize(
    model: Any,
    plan: Plan,
    *,
    weights: Any = None,
    seed: int = 0,
    verify: str = "first_step",
    check: bool | None = None,
    reconciling_steps: int = DEFAULT_STEPS,
) -> Parallel:
    """Return a module that computes the same as a model, of which each rank of the process group has its part.

    Args:
        model: The module that the plan was searched for, (module, loss) with a separate loss, or the source of the
            search: (module, inputs), or (module, inputs and targets, loss). Training starts from its weights.
        plan: Plan for the present number of ranks.
        weights: Values of the parameters and buffers: a state_dict, or a file of safetensors or of torch.save, of which
            each rank reads its parts. Default: the module's own; random ones, independent of the strategy, if it was
            created on the device 'meta'.
        seed: Seed of dropout; the same on all ranks.
        verify: When to compare the trace with the module itself, on rank 0: losses, outputs, gradients and buffers.
            "first_step" of training, "always", which is in every step, or "off". The step raises ProgramError where
            they differ by more than rounding.
        check: `verify` before version 0.12: True for "first_step", False for "off".
        reconciling_steps: Number of steps after which ranks that compute a layer on the same data, and update its
            weights separately, copy those of the first of them; 0 for never. Nondeterministic kernels, such as those of
            GPUs, would let them drift apart.

    Raises:
        PaseError: The model differs from the plan's, would not be trained as it trains itself, or the process group has
            another size.
        RankError: On all ranks: another one failed to trace its model, or ranks have different plans, models or seeds.
    """
    ranks = join()
    hook_notes: list[str] = []
    if check is not None:
        verify = "first_step" if check else "off"

    def traced() -> tuple[tuple[nn.Module, LiveModel], Mapping[str, object]]:
        check_even(plan, "a module made parallel")
        if verify not in VERIFIED:
            raise ProgramError(unknown_name("value of verify", verify, VERIFIED))
        if reconciling_steps < 0:
            raise ProgramError(f"reconciling_steps is {reconciling_steps}; give a number of steps, or 0 for never")
        if ranks.world_size != plan.num_devices:
            raise ProgramError(
                f"the plan is for {plan.num_devices} devices, and there are {ranks.world_size} processes; start as "
                f"many: torchrun --nproc-per-node {plan.num_devices} …, or search for {ranks.world_size} devices"
            )
        module, source = _source(model, plan)
        hook_notes.extend(check_hooks(module))
        live = traced_of_plan(source, plan)
        check_types(module, plan)
        same = _same_on_all_ranks(module, plan, weights, seed, verify)
        return (module, live), {**same, "reconciling_steps=": reconciling_steps}

    module, live = agree(traced)
    refuse_optimizers()
    values, notes = _first_values(module, live, weights, seed, ranks.device)
    made = Staged if plan.num_groups > 1 else Parallel
    parallel = made(module, live, plan, rank=ranks.rank, weights=values, seed=seed, notes=[*hook_notes, *notes])
    parallel._reconciling_steps = reconciling_steps
    if verify != "off":
        _, _, _, loss = call_of(torch, _source(model, plan)[1], None)
        parallel.compare_steps(FirstStep(module, loss, live, plan).run, is_always=verify == "always")
    return parallel


def traced_of_plan(source: Any, plan: Plan) -> LiveModel:
    """Return the trace of a plan's module; ProgramError where the module differs from the plan's.

    source: the module and its call, as for `trace_live`.
    """
    live = trace_live(source)
    found = difference(plan.graph, live.model.graph)
    if found:
        raise ProgramError(f"the plan is of another model: {found}; search a plan for this one")
    return live


def _same_on_all_ranks(module: nn.Module, plan: Plan, weights: Any, seed: int, verify: str) -> dict[str, object]:
    """Return the values that must be equal on all ranks, by their names in messages."""
    parameters = [
        (name, tuple(x.shape), str(x.dtype), x.requires_grad, x.is_meta) for name, x in module.named_parameters()
    ]
    return {
        **versions(),
        "the model": graph_hash(plan.graph),
        "the parameters of the module": digest(parameters),
        "training mode": module.training,
        "the splits": digest([(layer.name, dict(layer.splits)) for layer in plan.layers]),
        "the order of devices": digest([layer.devices for layer in plan.layers]),
        "modes or stages": digest([(layer.state, layer.is_recomputed, layer.stage) for layer in plan.layers]),
        "micro-batches": plan.micro_batches,
        "the schedule": f"{plan.num_groups} {plan.schedule}",
        "the precision": plan.precision.name,
        "the seed": seed,
        "weights=": type(weights).__name__,
        "verify=": verify,
    }


def check_types(module: nn.Module, plan: Plan) -> None:
    """Raise ProgramError where a module's parameters are wider than those of the plan, which is of a low type."""
    held = getattr(torch, plan.precision.parameters)
    if held.itemsize >= torch.float32.itemsize:
        return
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != held:
            raise ProgramError(
                f"the plan is of {plan.precision.name}, with weights in {plan.precision.parameters}, and parameter "
                f"{name!r} is {str(parameter.dtype).removeprefix('torch.')}: give module.to({held}), or search with "
                "another precision"
            )


def _first_values(
    module: nn.Module, live: LiveModel, weights: Any, seed: int, device: object
) -> tuple[Source, list[str]]:
    """Return the source of the initial values of parameters and buffers, and notes."""
    kept = module.state_dict(keep_vars=True)
    tensors = {**dict(module.named_buffers(remove_duplicate=False)), **kept}
    own, notes = from_first_rank(tensors, device), list[str]()
    given = None
    if weights is not None:
        given = from_tensors(weights) if isinstance(weights, Mapping) else from_file(weights)
    left = [name for name, tensor in tensors.items() if tensor.is_meta and (given is None or name not in kept)]
    drawn = own
    if left:
        drawn, notes = own_values(module, left, seed, random_values(_moments(live), seed))

    def values(names: Sequence[str], shape: tuple[int, ...], held: Held) -> Any:
        # Non-persistent buffers are always the module's own.
        if given is not None and any(name in kept for name in names):
            return given(names, shape, held)
        return (drawn if tensors[names[0]].is_meta else own)(names, shape, held)

    return values, notes


def _moments(live: LiveModel) -> dict[str, tuple[float, float]]:
    graph = live.model.graph
    return {
        live.weights[layer, tensor].parameter: initial_moments(graph[layer], access)
        for layer, tensor in live.weights
        for access in graph[layer].parameters
        if access.tensor == tensor
    }


def _source(model: Any, plan: Plan) -> tuple[nn.Module, Any]:
    """Return the module and the source of its trace: itself, inputs, and optionally a loss."""
    module, *given = model if isinstance(model, list | tuple) else (model,)
    if given and not (len(given) == 1 and callable(given[0])):
        return module, model
    positional, keywords, has_loss = call_inputs(plan.graph.call)
    if has_loss and not given:
        raise ProgramError("the plan was searched for a module and its loss; give both: (module, loss)")
    return module, (module, positional, keywords, *given)


# -- a model of a factory


def train_factory(
    name: str,
    batch: int | None,
    arguments: Mapping[str, Scalar],
    plan: Plan,
    options: TrainingOptions,
    is_parallel: bool,
    measure: bool,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Train the model of a factory, package.module:function, on this rank: its part under a plan, or the module alone.

    Returns the events of an emitted program: ``built``, and those of `Steps.take`. Every process draws the model's
    weights from the same seed. Inputs are those of the options' data by their names, or the factory's own, synthetic
    where these are constant or have no values.

    Args:
        name: Name of the factory.
        batch, arguments: Arguments of the factory.
        plan: The plan.
        options: Training options.
        is_parallel: Whether to train under the plan.
        measure: Whether to count the bytes that ranks send.
        device: Device type of a rank, "cpu" or "cuda".

    Raises:
        ProgramError: The model does not return a single loss, or does not support an option.
    """
    begin = time.perf_counter()
    own = join(device=device).device
    types = plan.precision
    dtype = getattr(torch, types.parameters if options.dtype == "float32" else options.dtype)
    low = types.results if types.is_mixed and options.dtype == "float32" else ""
    if low == "float16":
        raise ProgramError(
            "products in float16 need a loss that is scaled: train the module in a loop of your own (pase.parallelize, "
            "torch.amp.GradScaler), or search with --precision bf16-mixed"
        )
    torch.manual_seed(options.seed or 0)
    # With its weights, unlike in a search.
    made, took_batch = call_factory(name, batch=batch, arguments=arguments, front_ends=())
    found, positional, keywords, loss = call_of(torch, made, None if took_batch else batch)
    module: nn.Module = unwrapped(torch, found).to(dtype).train()
    if not is_parallel or own != current_device():
        # A module that is made parallel goes where the process group carries tensors best, part by part.
        module.to(own)
    data = None if options.data_path is None else read_arrays(options.data_path)
    inputs = Inputs(
        plan,
        named_inputs(module, positional, keywords, loss),
        (positional, keywords),
        dtype=getattr(torch, options.dtype),
        seed=options.seed or 0,
        data=data,
    )
    step = with_loss(module, loss)
    if is_parallel:
        positional, keywords = inputs.of_micro_batch()
        model = (module, positional, keywords, *([loss] if loss else []))
        module = parallelize(model, plan, seed=options.seed or 0)

    def accumulate(arrays: Mapping[str, Array]) -> Any:
        positional, keywords = pytree.tree_map_only(torch.Tensor, lambda x: x.to(own), inputs.nested(arrays))
        if isinstance(module, Parallel):
            # It sees to its types, and its micro-batches, itself.
            return loss_of(module.accumulate(*positional, **keywords))
        with computing_in(low, own):
            value = loss_of(step(*positional, **keywords))
        value.backward()
        return value.detach()

    optimizer = optimizer_of(options.rule, list(module.parameters()), options.schedule.peak)
    traffic = module.traffic if isinstance(module, Parallel) else None
    training = ModuleTraining(module, optimizer, accumulate, traffic=traffic)
    steps = Steps(
        options=options,
        batches=inputs,
        num_examples=inputs.num_examples,
        measured=measured_bytes if measure and is_parallel else None,
    )
    events = [{"event": "built", "build_time_s": time.perf_counter() - begin, "predicted_bytes": None}]
    steps.take(training, events.append)
    return events


def named_inputs(
    module: Any, positional: tuple[Any, ...], keywords: Mapping[str, Any], loss: object
) -> list[tuple[str, Any]]:
    """Return the leaves of a module's inputs, in order, by the names of the parameters of its forward pass."""
    known = [*inspect.signature(module.forward).parameters]
    names = [known[i] if i < len(known) else f"input_{i}" for i in range(len(positional))]
    if loss is not None and not keywords:
        names[-1] = "targets"
    found = []
    for name, value in [*zip(names, positional, strict=True), *keywords.items()]:
        leaves = pytree.tree_leaves(value)
        found += [(name if len(leaves) == 1 else f"{name}_{i}", leaf) for i, leaf in enumerate(leaves)]
    return found


class Inputs:
    """Arguments of a module in each step: its example's structure, with other tensors.

    Args:
        plan: Plan that the module is trained under.
        named: Leaves of the example, a micro-batch, by name.
        example: The positional and the keyword inputs.
        dtype: Type of float inputs; None for their own.
        seed: Seed of synthetic data.
        data: Arrays by the names of the inputs; None for the example's own values.
        makes_up: Whether to draw synthetic data for inputs that are constant, or have no values.
    """

    def __init__(
        self,
        plan: Plan,
        named: Sequence[tuple[str, Any]],
        example: Any,
        *,
        dtype: torch.dtype | None,
        seed: int,
        data: Mapping[str, Array] | None = None,
        makes_up: bool = True,
    ) -> None:
        self._dtype = dtype
        self._leaves, self._structure = pytree.tree_flatten(example)
        self._names = {i: name for i, (name, leaf) in enumerate(named) if isinstance(leaf, torch.Tensor)}
        below = {item.name: item.below for item in data_inputs(plan.graph).values()}
        shapes = [tuple(self._leaves[i].shape) for i in self._names]
        self._count, self._dims = (
            plan.micro_batches,
            dict(zip(self._names, example_dims(plan.graph, shapes), strict=True)),
        )
        items = []
        for (i, name), shape in zip(self._names.items(), shapes, strict=True):
            leaf, dim = self._leaves[i], self._dims[i]
            bound = 0 if leaf.is_floating_point() else below.get(name) or 2**31 - 1
            of_step = tuple(extent * (self._count if place == dim else 1) for place, extent in enumerate(shape))
            items.append(DataInput(name=name, shape=of_step, below=bound))
        self._batches = None if data is None else Batches(items, seed=seed, arrays=data)
        self._own = {}
        for i, item in zip(self._names, items, strict=True):
            values = _of_step(self._leaves[i], item)
            if values is None or (makes_up and _is_constant(values)):
                values = _made_up(item, below.get(item.name, 0), seed, values)
            self._own[item.name] = values

    @property
    def num_examples(self) -> int:
        return next((own.shape[0] for own in self._own.values() if own.ndim), 1)

    def batch(self, step: int) -> Mapping[str, Array]:
        """Return the arrays of a step, by name."""
        return self._own if self._batches is None else self._batches.batch(step)

    def nested(self, arrays: Mapping[str, Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arrays as the module is called with them: by position, and by name."""
        leaves = list(self._leaves)
        for i, name in self._names.items():
            value = torch.as_tensor(np.ascontiguousarray(arrays[name]))
            dtype = self._dtype if leaves[i].is_floating_point() and self._dtype else leaves[i].dtype
            # The module may write into its inputs.
            leaves[i] = value.to(dtype, copy=True)
        return self._nested(leaves)

    def of_step(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the module's arguments in a step."""
        return self.nested(self.batch(step))

    def of_micro_batch(self, step: int = 0, number: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the module's arguments in a micro-batch of a step."""
        leaves, _ = pytree.tree_flatten(self.of_step(step))
        for i, dim in self._dims.items():
            leaves[i] = micro_batch(leaves[i], number, self._count, dim)
        return self._nested(leaves)

    def _nested(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, keywords = pytree.tree_unflatten(leaves, self._structure)
        return tuple(positional), dict(keywords)


def _of_step(example: Any, item: DataInput) -> Array | None:
    """Return an example's values, for each micro-batch; None where it has none."""
    if example.is_meta:
        return None
    values = example.detach().cpu()
    # NumPy has no such type.
    values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.tile(values, [size // max(extent, 1) for size, extent in zip(item.shape, values.shape, strict=True)])


def _is_constant(values: Array) -> bool:
    return not values.size or not bool((values != values.flat[0]).any())


def _made_up(item: DataInput, below: int, seed: int, values: Array | None) -> Array:
    """Return synthetic numbers; integers without a known bound keep the example's values."""
    if item.below == 0:
        return generator(f"data/{item.name}", seed).standard_normal(item.shape, np.float32)
    if below:
        return generator(f"data/{item.name}", seed).integers(below, size=item.shape, dtype=np.int32)
    return np.zeros(item.shape, np.int32) if values is None else values
