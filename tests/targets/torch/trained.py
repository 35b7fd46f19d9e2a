"""Functions that ranks of a pool run: emitted programs for PyTorch, trained and computed."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pase.planning.plan import Plan
from pase.targets.torch.script import command_of_program, compute, train
from pase.targets.training.data import Array
from pase.targets.training.options import TrainingOptions, training_options
from tests.targets.torch.ranks import Pool


def builder_of(source: str) -> Any:
    """The function `build` of an emitted program, or its stages."""
    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(source, "<emitted>", "exec"), namespace)
    for line in source.splitlines():
        if line.startswith("    stages = "):
            exec(line.replace("stages", "build", 1).strip(), namespace)
    return namespace["build"]


def events(
    rank: int, world: int, source: str, options: TrainingOptions, measure: bool = False, micro_batches: int = 1
) -> list[dict[str, Any]]:
    """What a rank reports of a training, its losses at last."""
    found: list[dict[str, Any]] = []
    losses = train(
        builder_of(source),
        options,
        num_devices=world,
        micro_batches=micro_batches,
        measure=measure,
        report=found.append,
    )
    return [*found, {"event": "losses", "losses": losses}]


def between_layers(done: Mapping[str, Any], plan: Plan) -> int:
    """Return the bytes that were measured, but for weights that ranks hold otherwise than layers read them."""
    rows = [row for row in done["edges"] if row["producer"] in plan.index]
    return sum(row["measured_bytes"] for row in (*rows, *done["layers"]))


def program_events_on(ranks: Pool) -> Callable[[str, list[str]], list[dict[str, Any]]]:
    """Return what `pase.targets.execute.program_events` does, with the ranks of a pool instead of processes anew."""

    def program_events(source: str, arguments: list[str]) -> list[dict[str, Any]]:
        values = command_of_program.read(arguments)
        (world,) = re.findall(r"main\(build, num_devices=(\d+)", source)
        return ranks.run(events, source, training_options(values), values["measure"], world=int(world))[0]

    return program_events


def outputs(rank: int, world: int, source: str, options: TrainingOptions, data: dict[str, Array]) -> dict[str, Array]:
    """The outputs of a program for some data."""
    return compute(builder_of(source), options, data, num_devices=world)


def refused(rank: int, world: int, source: str, options: TrainingOptions, num_devices: int) -> None:
    """Train a program of another number of ranks."""
    train(builder_of(source), options, num_devices=num_devices, metrics_path=Path("never"))
