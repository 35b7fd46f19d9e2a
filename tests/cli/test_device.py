"""`pase run --device`: the choice of devices reaches the program, and what it says is what is shown."""

import pytest

from pase.targets.mesh_tensorflow.runtime.devices import physical_gpus
from tests.cli.conftest import Command

MODEL = ["mlp", "--devices", "4", "--batch", "8", "--arg", "hidden=16", "--steps", "1"]


@pytest.mark.skipif(bool(physical_gpus()), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(pase: Command) -> None:
    finished = pase("run", *MODEL, "--device", "GPU")
    assert (finished.status, finished.out) == (1, "")
    assert finished.err.startswith("pase: 4 GPUs are needed and TensorFlow found none; leave out --device")
    assert len(finished.err.splitlines()) == 1


def test_cpus_are_virtual_as_they_are(pase: Command) -> None:
    finished = pase("run", *MODEL, "--virtual")
    assert (finished.status, finished.out) == (1, "")
    assert finished.err.startswith("pase: --virtual is of GPUs, and CPU devices are virtual as they are; leave it out")


@pytest.mark.parametrize("arguments", [["--device", "TPU"], ["--device", "GPU", "--gpu-memory", "0"]])
def test_wrong_usage(arguments: list[str], pase: Command) -> None:
    finished = pase("run", *MODEL, *arguments)
    assert (finished.status, finished.out) == (2, "")
    assert f"Invalid value for '{arguments[-2]}'" in finished.err
