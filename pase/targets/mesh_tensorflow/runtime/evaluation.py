"""How good a network is on data that it is not trained on: the mean over all whole batches, without an update."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.data import Array, Batches, DataInput, read_arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """loss: the mean. accuracy: the fraction of points whose label has the largest logit; None where there is none."""

    loss: float
    accuracy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvaluation:
    """The evaluation after a step, counted from 1, on a number of examples."""

    step: int
    loss: float
    accuracy: float | None
    num_examples: int


def held_out_batches(inputs: Iterable[DataInput], path: Path) -> Batches:
    """Return the batches of the data to test on; RuntimeFailure where they do not fit the inputs."""
    return Batches(inputs, seed=0, arrays=read_arrays(path), called="the test data")


def evaluated(batches: Batches, evaluate: Callable[[Mapping[str, Array]], Evaluation], *, step: int) -> StepEvaluation:
    """Return the mean over all whole batches; rows that fill none are left out, a program's batch being fixed.

    Raises RuntimeFailure where the loss is not finite.
    """
    results = [evaluate(batches.batch(number)) for number in range(batches.num_batches)]
    loss = float(np.mean([result.loss for result in results]))
    if not np.isfinite(loss):
        raise RuntimeFailure(
            f"after step {step} the loss on the test data is {loss}; use a smaller learning rate, or look for it in "
            "the data"
        )
    accuracies = [result.accuracy for result in results if result.accuracy is not None]
    return StepEvaluation(
        step=step,
        loss=loss,
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        num_examples=batches.num_examples,
    )
