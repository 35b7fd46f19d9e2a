"""Emitted programs run in this process, many strategies after one another."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pase.graph import uniform
from pase.planning.plan import Plan
from pase.sharding.traffic import Movement, bytes_by_movement, flows
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.runtime.measure import Crossed, crossed
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult
from pase.targets.mesh_tensorflow.runtime.script import train
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from pase.targets.training.data import Array, Batches
from scripts.benchmarks.trials import weight_differences
from tests.runtime.options import options

TOLERANCE = 1e-12


def builder_of(source: str) -> Callable[[Any], Any]:
    """The function `build` of an emitted program."""
    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(source, "<emitted>", "exec"), namespace)
    build = namespace["build"]
    assert callable(build)
    return build


def parallel_losses(
    plan: Plan, *, steps: int = 5, seed: int = 0, rate: float = 0.05, data: Path | None = None
) -> list[float]:
    """Losses of a plan's program in float64."""
    given = options(steps, rate=rate, seed=seed, data_path=data)
    return train(builder_of(emit(plan, target="mesh_tensorflow")), given, num_devices=plan.num_devices)


@contextmanager
def started(
    plan: Plan, *, seed: int = 0, rate: float = 0.05, dtype: str = "float64", **others: Any
) -> Iterator[tuple[Training, Batches]]:
    """A plan's program, ready to train, and its data; others: of `Training.start`."""
    with ProgramGraph().as_default():
        program = Program(num_devices=plan.num_devices, dtype=dtype)
        loss = builder_of(emit(plan, target="mesh_tensorflow"))(program)
        training = Training.start(program, loss, learning_rate=rate, seed=seed, **others)
        try:
            yield training, Batches(program.inputs, seed=seed)
        finally:
            training.close()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a program did. traffic: planned for each step. measured: counted in the last one."""

    losses: list[float]
    weights: dict[str, Array]
    traffic: Traffic
    measured: Crossed


def trained(plan: Plan, *, steps: int = 3, **others: Any) -> Trained:
    """Train a plan's program; others: as `started` has them."""
    with started(plan, **others) as (training, batches):
        found = [training.step(batches.batch(i), with_record=i == steps - 1) for i in range(steps)]
        record, graph = found[-1].record, training.session.graph
        measured = crossed(record, graph, training.traffic)
        losses = [step.loss for step in found]
        return Trained(losses=losses, weights=training.weights(), traffic=training.traffic, measured=measured)


def that_move(found: Mapping[Movement, int]) -> dict[Movement, int]:
    """What moves at all."""
    return {movement: size for movement, size in found.items() if size}


def by_ends(found: Mapping[Movement, int]) -> Counter[tuple[str, str]]:
    """Bytes from layer to layer: plans do not say in which pass a layer exchanges what."""
    total = Counter[tuple[str, str]]()
    for movement, size in found.items():
        total[movement.producer, movement.consumer] += size
    return +total


def check_bytes(plan: Plan, found: Trained | None = None, *, phases: bool = False) -> None:
    """A program every slice of which is kept moves what was predicted. phases: pass by pass."""
    found = found or trained(plan, steps=1, dtype="float32", keep_alive=True)
    predicted = bytes_by_movement(flows(plan))
    planned, measured = found.traffic.bytes_by_movement, dict(found.measured.by_movement)
    assert by_ends(planned) == by_ends(measured) == by_ends(predicted)
    assert not phases or that_move(planned) == that_move(measured) == predicted
    assert found.measured.elsewhere_bytes == 0
    assert found.measured.total_bytes == found.traffic.total_bytes == sum(predicted.values())


def in_float64(plan: Plan) -> Plan:
    """The plan of numbers of 8 bytes."""
    return replace(plan, graph=plan.graph.in_precision(uniform("float64")))


def check(plan: Plan, expected: ReferenceResult, *, rate: float = 0.05, seed: int = 0, phases: bool = False) -> Trained:
    """One program: its losses and weights are those of one device, and it moves what was predicted."""
    wide = in_float64(plan)
    found = trained(wide, steps=len(expected.losses), seed=seed, rate=rate, keep_alive=True)
    check_bytes(wide, found, phases=phases)
    check_training(found, expected)
    return found


def check_training(found: Trained, expected: ReferenceResult) -> None:
    """Losses and weights are those of one device; a program has a dim for groups."""
    assert max_relative_difference(found.losses, expected.losses) < TOLERANCE
    assert set(found.weights) == set(expected.weights)
    weights = {name: found.weights[name].reshape(array.shape) for name, array in expected.weights.items()}
    differences = weight_differences(weights, expected.weights)
    worst = max(differences, key=lambda name: differences[name][0])
    assert differences[worst][0] < TOLERANCE, worst
