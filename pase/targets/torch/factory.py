"""A model of a factory, trained on the ranks of a plan or by itself in one process, with PyTorch's own optimisers."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pase.errors import ProgramError
from pase.graph import Scalar
from pase.importers.front_end import call_factory
from pase.importers.torch.export import call_of, unwrapped
from pase.planning.plan import Plan
from pase.targets.torch.autocast import computing_in
from pase.targets.torch.launch import join, naming_lost_ranks
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.script import measured_bytes
from pase.targets.training.data import Array, Batches, DataInput, data_inputs, read_arrays
from pase.targets.training.initial import generator
from pase.targets.training.optimisers import Adam, AdamW, Momentum, Rule, Sgd, name_of
from pase.targets.training.options import TrainingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryRun:
    """What a training of a factory's model showed. measured: what ranks sent in a step, where it was asked for."""

    losses: tuple[float, ...]
    build_time_s: float
    step_time_s: float
    measured: Mapping[str, Any] | None = None


def train_factory(
    name: str,
    batch: int | None,
    arguments: Mapping[str, Scalar],
    plan: Plan,
    options: TrainingOptions,
    is_parallel: bool,
    measure: bool,
) -> FactoryRun:
    """Train the model of a factory, package.module:function, on this rank: its part under a plan, or the module alone.

    batch, arguments: what the factory is given. is_parallel: whether under the plan. measure: count what ranks send.

    Every process draws the model's weights from the same seed. Inputs are those of the options' data by their names, or
    the factory's own, made up where these hold one value throughout or none.

    Raises:
        ProgramError: the model returns no single loss, or the options ask for what it has no use for.
    """
    begin = time.perf_counter()
    join(device="cpu")
    types = plan.precision
    dtype = getattr(torch, types.parameters if options.dtype == "float32" else options.dtype)
    low = types.results if types.is_mixed and options.dtype == "float32" else ""
    if low == "float16":
        raise ProgramError(
            "products in float16 need a loss that is scaled: train the module in a loop of your own (pase.parallelize, "
            "torch.amp.GradScaler), or search with --precision bf16-mixed"
        )
    torch.manual_seed(options.seed or 0)
    # With its weights, which a search does without.
    made, took_batch = call_factory(name, batch=batch, arguments=arguments, front_ends=())
    found, positional, keywords, loss = call_of(torch, made, None if took_batch else batch)
    module = unwrapped(torch, found).to(dtype).train()
    inputs = _Inputs(plan, _named_inputs(module, positional, keywords, loss), (positional, keywords), options)
    step: Any
    if is_parallel:
        positional, keywords = inputs.of_step(0)
        step = parallelize((module, positional, keywords, *([loss] if loss else [])), plan, seed=options.seed or 0)
        parameters, traffic = list(step.parameters()), step.traffic
    else:
        step, parameters, traffic = _with_loss(module, loss), list(module.parameters()), None
    optimiser = _optimiser(options.rule, parameters, options.schedule.peak)
    built_s, losses, times = time.perf_counter() - begin, list[float](), list[float]()
    for number in range(options.steps):
        count = plan.micro_batches
        batches = [inputs.of_step(number * count + i) for i in range(count)]
        for group in optimiser.param_groups:
            group["lr"] = options.schedule.rate(number)
        begin = time.perf_counter()
        if traffic is not None:
            traffic.is_counted = measure and number == options.steps - 1
        with naming_lost_ranks():
            # A module made parallel sees to its types itself.
            if is_parallel and count > 1:
                positional, keywords = pytree.tree_map(_end_to_end, *batches)
                value = step.accumulate(*positional, **keywords)
            else:
                value = sum(_backward(step, batch, count, "" if is_parallel else low) for batch in batches)
        if not torch.isfinite(value):
            raise ProgramError(f"step {number + 1}: the loss is {value.item()}; use a smaller learning rate")
        optimiser.step()
        optimiser.zero_grad()
        losses.append(value.item())
        times.append(time.perf_counter() - begin)
    return FactoryRun(
        losses=tuple(losses),
        build_time_s=built_s,
        step_time_s=median(times[1:] or times),
        measured=measured_bytes(traffic.sent) if traffic is not None and measure else None,
    )


def _backward(step: Callable[..., Any], batch: tuple[tuple[Any, ...], dict[str, Any]], count: int, low: str) -> Any:
    """Go forward and backward with one of so many micro-batches; return its part of the mean loss."""
    positional, keywords = batch
    # A module made parallel sees to its types itself.
    with computing_in(low, torch.device("cpu")):
        value = loss_of(step(*positional, **keywords)) / count
    value.backward()
    return value.detach()


def _end_to_end(*micro_batches: Any) -> Any:
    """Return an input of a step; what has no examples is the same in all micro-batches."""
    first = micro_batches[0]
    return torch.cat(micro_batches) if isinstance(first, torch.Tensor) and first.dim() else first


def loss_of(returned: Any) -> Any:
    """Return the one number among the tensors that a model returns; ProgramError where there is not one."""
    tensors = [x for x in pytree.tree_leaves(returned) if isinstance(x, torch.Tensor)]
    numbers = [x for x in tensors if x.numel() == 1 and x.is_floating_point()]
    if len(numbers) != 1:
        raise ProgramError(
            f"{len(numbers)} of the {len(tensors)} tensors that the model returns are single numbers; expected one, "
            "the loss: return it alone or besides the outputs, or have the factory return (model, inputs, loss)"
        )
    return numbers[0].reshape(())


def _with_loss(module: Any, loss: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a module that is called with its inputs and, last of them, the targets of its loss."""
    if loss is None:
        called: Callable[..., Any] = module
        return called

    def step(*given: Any, **named: Any) -> Any:
        if not named:
            return loss(module(*given[:-1]), given[-1])
        last = "targets" if "targets" in named else list(named)[-1]
        targets = named.pop(last)
        return loss(module(*given, **named), targets)

    return step


def check_rule(rule: Rule) -> None:
    """Raise ProgramError where PyTorch has no optimiser of an update rule."""
    _optimiser(rule, [torch.zeros(1)], 1.0)


def _optimiser(rule: Rule, parameters: Sequence[Any], rate: float) -> Any:
    """Return PyTorch's own optimiser of an update rule; ProgramError where it has none."""
    match rule:
        case Sgd():
            return torch.optim.SGD(parameters, lr=rate, weight_decay=rule.weight_decay)
        case Momentum():
            own = {"momentum": rule.momentum, "nesterov": rule.nesterov, "weight_decay": rule.weight_decay}
            return torch.optim.SGD(parameters, lr=rate, **own)
        case Adam():
            return torch.optim.Adam(parameters, lr=rate, betas=(rule.beta1, rule.beta2), eps=rule.epsilon)
        case AdamW():
            own = {"eps": rule.epsilon, "weight_decay": rule.weight_decay}
            return torch.optim.AdamW(parameters, lr=rate, betas=(rule.beta1, rule.beta2), **own)
    raise ProgramError(f"a PyTorch module is not trained with {name_of(rule)} here; use sgd, momentum, adam or adamw")


def _named_inputs(
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


class _Inputs:
    """What a module is called with in each step: its example's structure, with other tensors.

    named: leaves of the example by name. example: the positional and the keyword inputs.
    """

    def __init__(self, plan: Plan, named: Sequence[tuple[str, Any]], example: Any, options: TrainingOptions) -> None:
        self._dtype, seed = getattr(torch, options.dtype), options.seed or 0
        self._leaves, self._structure = pytree.tree_flatten(example)
        self._names = {i: name for i, (name, leaf) in enumerate(named) if isinstance(leaf, torch.Tensor)}
        below = {item.name: item.below for item in data_inputs(plan.graph).values()}
        items = []
        for i, name in self._names.items():
            leaf = self._leaves[i]
            bound = 0 if leaf.is_floating_point() else below.get(name) or 2**31 - 1
            items.append(DataInput(name=name, shape=tuple(leaf.shape), below=bound))
        self._batches = None
        if options.data_path is not None:
            self._batches = Batches(items, seed=seed, arrays=read_arrays(options.data_path))
        self._own = {
            item.name: _made_up(self._leaves[i], item, below.get(item.name, 0), seed)
            for i, item in zip(self._names, items, strict=True)
        }

    def of_step(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword inputs of a step, counted from 0."""
        arrays: Mapping[str, Any] = self._own if self._batches is None else self._batches.batch(step)
        leaves = list(self._leaves)
        for i, name in self._names.items():
            value = torch.as_tensor(np.ascontiguousarray(arrays[name]))
            leaves[i] = value.to(self._dtype) if leaves[i].is_floating_point() else value.to(leaves[i].dtype)
        positional, keywords = pytree.tree_unflatten(leaves, self._structure)
        return tuple(positional), dict(keywords)


def _made_up(example: Any, item: DataInput, below: int, seed: int) -> Array:
    """Return an example's values; where it has none, or one alone, numbers drawn for the input's name."""
    values = None if example.is_meta else example.detach().cpu().numpy()
    if values is not None and values.size and (values != values.flat[0]).any():
        return np.asarray(values)
    if item.below == 0:
        return generator(f"data/{item.name}", seed).standard_normal(item.shape, np.float32)
    if below:
        return generator(f"data/{item.name}", seed).integers(below, size=item.shape, dtype=np.int32)
    return np.zeros(item.shape, np.int32) if values is None else np.asarray(values)
