"""`ModuleTraining`: the training steps of any PyTorch module, for `Steps`."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pase.errors import ProgramError
from pase.sharding.traffic import Movement
from pase.targets.torch.collectives import Traffic
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.messages import told_by_all
from pase.targets.torch.states import local_of
from pase.targets.training.data import Array
from pase.targets.training.script import StepResult, tabulated


class ModuleTraining:
    """Trains a module with an optimizer, one batch per step.

    Args:
        module: The module, parallel or not.
        optimizer: Optimizer of its parameters.
        accumulate: Runs the forward and backward passes of a batch and returns its loss.
        traffic: Counts the bytes that this rank sends; None for a module that sends nothing.

    Attributes:
        num_steps: Number of completed steps.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        accumulate: Callable[[Mapping[str, Array]], Any],
        *,
        traffic: Traffic | None = None,
    ) -> None:
        self.module, self.optimizer, self.num_steps = module, optimizer, 0
        self._accumulate, self._traffic = accumulate, traffic or Traffic()

    def step(
        self, batch: Mapping[str, Array], *, learning_rate: float | None = None, with_record: bool = False
    ) -> StepResult:
        """Train on one batch and return the loss.

        Raises ProgramError where the loss or a gradient is not finite; the step has changed no weight then. The record
        is what this rank sent, by whose it is.
        """
        assert learning_rate is not None
        if with_record:
            self._traffic.sent.clear()
        self._traffic.is_counted = with_record
        loss = self.gradients(batch)
        self._traffic.is_counted = False
        result = self.descend(loss, learning_rate)
        return replace(result, record=dict(self._traffic.sent)) if with_record else result

    def gradients(self, batch: Mapping[str, Array]) -> Any:
        """Go forward and backward through a batch; return its loss. Parameters have their gradients afterwards."""
        with naming_lost_ranks():
            return self._accumulate(batch)

    def descend(self, loss: Any, learning_rate: float) -> StepResult:
        """Update the weights after `gradients`, whose result is given; errors as of `step`."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
        accuracy = self._check(loss, gradients)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with naming_lost_ranks():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return StepResult(loss=loss.item(), accuracy=accuracy)

    def _check(self, loss: Any, gradients: list[Any]) -> float | None:
        """Return the accuracy; raise ProgramError on all ranks where the loss or a gradient is not finite on one."""
        is_finite = [x.isfinite().all() for x in (loss, *gradients)]
        right, *finite = over_ranks(self._right(loss), is_finite[0], torch.stack(is_finite).all())
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if finite == [num_ranks, num_ranks]:
            return self._accuracy(right)
        self.optimizer.zero_grad()
        which = f"the loss is {loss.item()}" if finite[0] < num_ranks else "a gradient is not finite"
        raise ProgramError(
            f"step {self.num_steps + 1}: {which}; use a smaller learning rate, or look for it in the data; the step "
            "was not taken"
        )

    def _right(self, loss: Any) -> Any:
        """Return the number of labels that this rank predicted correctly since the last call."""
        return torch.zeros((), device=loss.device)

    def _accuracy(self, right: int) -> float | None:
        """Return the fraction of correct labels, given their number on all ranks; None where there are no labels."""
        return None


def over_ranks(*counts: Any) -> list[int]:
    """Return the sums of counts over all ranks."""
    found = torch.stack([x.to(torch.int64) for x in counts])
    if dist.is_initialized() and dist.get_world_size() > 1:
        with naming_lost_ranks():
            dist.all_reduce(found)
    total: list[int] = found.tolist()
    return total


def measured_bytes(sent: Mapping[Movement, int]) -> dict[str, Any]:
    """Return what all ranks sent in a step, by edge and layer."""
    total = Counter[Movement]()
    for own in told_by_all(dict(sent)):
        total.update(own)
    return {"measured_bytes": sum(total.values()), **tabulated({}, total)}
