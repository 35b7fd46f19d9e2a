"""Optimizers for sharded parameters: PyTorch's own, and built-in rules that it lacks or cannot apply to shards."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pase.errors import ProgramError
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.parameters import reduced_like, splitting_axes
from pase.targets.torch.states import local_of
from pase.targets.training.optimisers import Adam, AdamW, Rule, Sgd, make_rule, options_of

Parameters = Iterable[Any]
"""Parameters, or groups of parameters as `torch.optim.Optimizer` takes them."""


def optimizer_of(rule: Rule, parameters: Sequence[Any], rate: float) -> torch.optim.Optimizer:
    """Return an optimizer for a rule: PyTorch's, or a `RuleOptimizer` where it has none.

    Args:
        parameters: Parameters, of which a rank may have none.
        rule: The rule, with its options.
        rate: Learning rate of the first step.
    """
    groups = [{"params": list(parameters)}]
    match rule:
        case Sgd():
            return torch.optim.SGD(groups, lr=rate, weight_decay=rule.weight_decay)
        case AdamW():
            betas, decay = (rule.beta1, rule.beta2), rule.weight_decay
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=rule.epsilon, weight_decay=decay)
        case Adam():
            return torch.optim.Adam(groups, lr=rate, betas=(rule.beta1, rule.beta2), eps=rule.epsilon)
    return RuleOptimizer(groups, rule, rate)


class RuleOptimizer(torch.optim.Optimizer):
    """Updates parameters by a rule that PyTorch lacks, sharded parameters like unsharded ones.

    State of a sharded parameter is sharded equally, and means over split dims are all-reduced. All ranks with shards of
    a parameter call `step` together.

    Args:
        params: Parameters, or groups of them.
        rule: A rule of `pase.targets.training.optimisers`; its options are those of a group.
        lr: Learning rate.
    """

    def __init__(self, params: Parameters, rule: Rule, lr: float) -> None:
        self._rule = type(rule)
        super().__init__(params, {"lr": lr, **options_of(rule)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self._rule(**{name: group[name] for name in self._rule.__dataclass_fields__})
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, rule, group["lr"])
        return loss

    def _update(self, parameter: Any, rule: Rule, rate: float) -> None:
        state, shape = self.state[parameter], tuple(parameter.shape)
        if not state:
            state["step"] = torch.zeros(())
            for slot, kept in rule.slots(shape).items():
                state[slot] = reduced_like(parameter, [n if dim in kept else 1 for dim, n in enumerate(shape)])
        state["step"] += 1
        slots = {slot: local_of(state[slot]) for slot in rule.slots(shape)}
        weight, scalars = local_of(parameter), rule.scalars(int(state["step"]), rate)
        after, slots_after = rule.update(_ShardMaths(parameter), weight, local_of(parameter.grad), slots, scalars)
        weight.copy_(after)
        for slot, value in slots_after.items():
            slots[slot].copy_(value)


class Adafactor(RuleOptimizer):
    """Adafactor (Shazeer and Stern 2018) for the parameters of any module, split or not.

    Args:
        params: Parameters, or groups of them.
        lr: The greatest relative step size.
        options: `epsilon1`, `epsilon2`, `clip` and `decay` of `pase.targets.training.optimisers.Adafactor`.

    Raises:
        ProgramError: An option is unknown or out of range.
    """

    def __init__(self, params: Parameters, lr: float = 0.01, **options: float) -> None:
        super().__init__(params, make_rule("adafactor", options), lr)


@dataclass(frozen=True, slots=True, eq=False)
class _ShardMaths:
    """`Maths` on the shards of one parameter; arrays that lack dims of it have one point there."""

    parameter: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    def sqrt(self, x: Any) -> Any:
        return x.sqrt()

    def at_least(self, x: Any, floor: float) -> Any:
        return x.clamp(min=floor)

    def mean(self, x: Any, dims: Sequence[int]) -> Any:
        if not dims:
            return x
        total = x.sum(tuple(dims), keepdim=True)
        for axis in splitting_axes(self.parameter, dims):
            with naming_lost_ranks():
                dist.all_reduce(total, group=self.parameter.device_mesh.get_group(axis))
        return total / prod(self.shape[dim] for dim in dims)


# -- what PyTorch does not do


@cache
def refuse_optimizers() -> None:
    """Make unsupported PyTorch optimizers raise an error before they step on sharded parameters."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not isinstance(optimizer, torch.optim.Adafactor):
        return
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if isinstance(parameter, DTensor) and not all(own.is_replicate() for own in parameter.placements):
            raise ProgramError(
                "torch.optim.Adafactor takes means over rows and columns in place, which PyTorch does not do for split "
                f"parameters, here one of shape {list(parameter.shape)} as {parameter.placements}: use "
                "pase.targets.torch.optimizers.Adafactor, which takes them over all ranks, or torch.optim.AdamW"
            )
