"""Emitted programs run in this process, many strategies after one another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pase.planning.plan import Plan
from pase.targets.emitter import emit
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.script import train
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.training.data import Array, Batches
from pase.targets.training.options import Schedule, TrainingOptions

Weights = dict[str, Array]


def builder_of(source: str) -> Callable[[Any], Any]:
    """The function `build` of an emitted program."""
    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(source, "<emitted>", "exec"), namespace)
    build = namespace["build"]
    assert callable(build)
    return build


def options(steps: int, *, rate: float = 0.05, dtype: str = "float64", **others: Any) -> TrainingOptions:
    """Options of a training in float64 with a constant learning rate."""
    return TrainingOptions(steps=steps, dtype=dtype, schedule=Schedule(peak=rate), **others)


def parallel_losses(
    plan: Plan, *, steps: int = 5, seed: int = 0, rate: float = 0.05, data: Path | None = None
) -> list[float]:
    """Losses of a plan's program in float64."""
    return train(
        builder_of(emit(plan)),
        options(steps, rate=rate, seed=seed, data_path=data),
        num_devices=plan.num_devices,
    )


def parallel_training(plan: Plan, *, steps: int, seed: int = 0, rate: float = 0.05) -> tuple[list[float], Weights]:
    """Losses of a plan's program in float64, and its weights after the last step."""
    with ProgramGraph().as_default():
        program = Program(num_devices=plan.num_devices, dtype="float64")
        loss = builder_of(emit(plan))(program)
        batches = Batches(program.inputs, seed=seed)
        training = Training.start(program, loss, learning_rate=rate, seed=seed)
        losses = [training.step(batches.batch(step)).loss for step in range(steps)]
        weights = training.weights()
        training.close()
    return losses, weights
