"""`ProgramTraining`: training, testing and outputs of an emitted program on a rank."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pase.errors import ProgramError
from pase.targets.torch.checkpoints import Opened, load_opened
from pase.targets.torch.emitted import Build, Emitted, EmittedStages
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.launch import Ranks
from pase.targets.torch.messages import told_by_all
from pase.targets.torch.module import loss_of
from pase.targets.torch.optimizers import optimizer_of
from pase.targets.torch.pipeline import Pipeline
from pase.targets.torch.states import local_of
from pase.targets.torch.stepping import ModuleTraining, over_ranks
from pase.targets.torch.tensor import widened
from pase.targets.training.checkpointing import called
from pase.targets.training.data import Array, Evaluation
from pase.targets.training.options import TrainingOptions


class ProgramTraining(ModuleTraining):
    """Trains the module of a program with an optimizer."""

    module: Emitted | EmittedStages

    def __init__(self, module: Emitted | EmittedStages, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer, self._accumulated, traffic=module.traffic)

    def evaluate(self, batch: Mapping[str, Array]) -> Evaluation:
        """Return the loss and the accuracy of a batch without side effects."""
        loss, _ = self._computed(batch)
        (right,) = over_ranks(self._right(loss))
        return Evaluation(loss=loss.item(), accuracy=self.module.accuracy(right, 1))

    def outputs(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return the full outputs of a batch, by name; all ranks call it."""
        _, found = self._computed(batch)
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
        return {name: widened(x).cpu().numpy() for name, x in whole.items()}

    def check_finite(self) -> None:
        """Raise ProgramError on all ranks where a persistent tensor is not finite on one."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        every = [(name, "", x) for name, x in self.module.state_dict().items()]
        for parameter, slots in self.optimizer.state.items():
            every += [(names[parameter], slot, x) for slot, x in slots.items()]
        wrong = [called(name, slot) for name, slot, x in every if not local_of(x).isfinite().all()]
        for found in told_by_all(wrong[:1]):
            if found:
                raise ProgramError(f"step {self.num_steps}: {found[0]} is not finite; no checkpoint was written")

    def restore(self, opened: Opened) -> None:
        """Resume from a checkpoint of the same weights and optimizer, saved under any strategy."""
        groups = [{name: x for name, x in group.items() if name != "params"} for group in self.optimizer.param_groups]
        # Checkpoints up to 0.11 did not record it.
        masks = {"seed": self.module.mask_state["seed"], "step": opened.step * self.module.micro_batches}
        self.module.mask_state = masks
        load_opened(opened, self.module, self.optimizer)
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            # Those of the command line.
            group.update(options)
        self.num_steps = opened.step

    def _accumulated(self, batch: Mapping[str, Array]) -> Any:
        return loss_of(self.module.accumulate(**self.module.fed(batch)))

    def _computed(self, batch: Mapping[str, Array]) -> Any:
        self.module.eval()
        with torch.no_grad(), naming_lost_ranks():
            found = self.module(**self.module.fed(batch))
        self.module.train()
        return found

    def _right(self, loss: Any) -> Any:
        return self.module.take_right()

    def _accuracy(self, right: int) -> float | None:
        return self.module.accuracy(right, self.module.micro_batches)


def program_training(
    build: Build | Pipeline,
    ranks: Ranks,
    options: TrainingOptions,
    *,
    micro_batches: int = 1,
    is_restored: bool = False,
) -> ProgramTraining:
    """Return the training of a program, or of its stages, on this rank.

    Args:
        build: Declares the layers of the program; or its stages.
        ranks: The process group.
        options: Training options.
        micro_batches: Micro-batches of a step, where stages do not specify them.
        is_restored: Whether a checkpoint provides the weights; else they are those of the options' file, or drawn.
    """
    module: Emitted | EmittedStages
    if isinstance(build, Pipeline):
        module = EmittedStages(build, ranks, options, is_restored=is_restored)
    else:
        module = Emitted(build, ranks, options, micro_batches=micro_batches, is_restored=is_restored)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return ProgramTraining(module, optimizer_of(options.rule, trained, options.schedule.peak))
