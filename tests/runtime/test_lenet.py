"""LeNet-5 on 2×2 workers, as Hewett and Grady (2020) distribute it (section 5, Appendix C), beside one device."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.datasets.registry import digits
from pase.models import build
from pase.planning.plan import Plan
from pase.sharding.boxes import extents, num_points
from pase.sharding.traffic import held_weights, parameters_per_device
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.reference import reference_training
from pase.targets.mesh_tensorflow.runtime.script import train
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from pase.targets.training.optimisers import make_rule
from pase.targets.training.options import Schedule, TrainingOptions
from scripts.digits import write
from tests.runtime.options import options
from tests.runtime.plans import make_plan
from tests.runtime.training import builder_of

SPATIAL = {"h": 2, "w": 2}
AFFINE = {"n": 2, "c": 2}


@cache
def plan(batch: int) -> Plan:
    """The paper's distribution; its second pooling leaves 5 points to 2 workers, which a split that divides cannot."""
    splits = {
        **dict.fromkeys(("conv1", "pool1", "conv2"), SPATIAL),
        "pool2": {"b": 4},
        **dict.fromkeys(("fc1", "fc2", "fc3"), AFFINE),
        "softmax": {"b": 4},
    }
    return make_plan(build("lenet5", batch=batch, arguments={}), 4, splits)


def test_it_trains_like_the_sequential_one() -> None:
    given = options(4, rate=0.003, rule=make_rule("adam", {}), seed=1)
    losses = train(builder_of(emit(plan(8))), given, num_devices=4)
    assert max_relative_difference(losses, reference_training(plan(8).graph, given).losses) < 1e-12
    assert losses[-1] < losses[0]


# Table 1 of the paper: shapes on one worker. It stores weights as [outputs, inputs], programs as [inputs, outputs].
TABLE_1 = {
    "conv1/w": (6, 1, 5, 5),
    "conv1/bias": (6,),
    "conv2/w": (16, 6, 5, 5),
    "conv2/bias": (16,),
    "fc1/w": (60, 200),
    "fc1/bias": (60,),
    "fc2/w": (42, 60),
    "fc2/bias": (42,),
    "fc3/w": (5, 42),
    "fc3/bias": (5,),
}


def test_workers_hold_the_shapes_of_the_paper() -> None:
    """Each holds what the paper's worker 0 does; there the others hold no filters, and half of them no bias."""
    weights = held_weights(plan(8))
    assert [weight.name for weight in weights] == list(TABLE_1)
    for weight in weights:
        shape = TABLE_1[weight.name]
        for part in weight.parts:
            assert extents(part) == (shape[::-1] if weight.name.startswith("fc") else shape)
    assert sum(weight.size for weight in weights) == 61_706
    of_worker_0 = sum(int(np.prod(shape)) for shape in TABLE_1.values())
    assert parameters_per_device(weights) == (of_worker_0,) * 4 == (17_409,) * 4
    # The four parts of an affine layer's weights are all of it, once.
    (affine,) = [weight for weight in weights if weight.name == "fc1/w"]
    assert sum(map(num_points, affine.parts)) == affine.size == 400 * 120
    assert len(set(affine.parts)) == 4


def test_a_program_holds_the_parts_that_are_shown() -> None:
    """The values on the devices, told apart by numbering the weights."""
    with ProgramGraph().as_default():
        program = Program(num_devices=4, dtype="float64")
        loss = builder_of(emit(plan(8)))(program)
        training = Training.start(program, loss, learning_rate=0.1, seed=0)
        weights = training.weights()
        for held in held_weights(plan(8)):
            tensor = program.weights[held.name].tensor
            slices = training.session.run(training._lowering.tensors[tensor].to_laid_out_tensor().tensor_list)
            for device, value in zip(tensor.mesh.devices.devices, slices, strict=True):
                part = tuple(slice(low, high) for low, high in held.parts[device])
                np.testing.assert_array_equal(value, weights[held.name][part])
        training.close()


# -- the 8×8 digits of scikit-learn


def test_the_digits_are_what_is_said(tmp_path: Path) -> None:
    train_path, test_path = write(tmp_path / "data")
    found = {path.stem: np.load(path) for path in (train_path, test_path)}
    for name, arrays in digits().items():
        assert arrays["inputs"].shape[1:] == (1, 28, 28)
        assert (arrays["inputs"].min(), arrays["inputs"].max()) == (-1, 1)
        assert sorted(set(arrays["labels"])) == list(range(10))
        for key, array in arrays.items():
            np.testing.assert_array_equal(found[name][key], array)
    assert (len(found["train"]["labels"]), len(found["test"]["labels"])) == (1440, 357)


@pytest.mark.full
def test_it_reads_digits_as_well_as_the_sequential_one(tmp_path: Path) -> None:
    train_path, test_path = write(tmp_path)
    given = TrainingOptions(
        steps=100,
        dtype="float64",
        schedule=Schedule(peak=0.003, kind="cosine", warmup_steps=10, num_steps=100),
        rule=make_rule("adam", {}),
        data_path=train_path,
        test_data_path=test_path,
        test_every=50,
    )
    events: list[dict[str, Any]] = []
    train(builder_of(emit(plan(48))), given, num_devices=4, report=events.append)
    alone = reference_training(plan(48).graph, given)
    tests = [event for event in events if event["event"] == "tested"]
    assert [event["step"] for event in tests] == [test.step for test in alone.tests] == [50, 100]
    assert [event["accuracy"] for event in tests] == [test.accuracy for test in alone.tests]
    assert tests[-1]["accuracy"] >= 0.95
    assert tests[-1]["num_examples"] == 336
