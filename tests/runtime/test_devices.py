"""Names and session configurations of devices, of every kind."""

from typing import Any

import pytest

from pase.errors import ProgramError
from pase.sharding.layouts import HOST
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.devices import (
    HOST_PLACE,
    Devices,
    gpus,
    local_devices,
    physical_gpus,
    place,
    virtual_cpus,
)
from pase.targets.mesh_tensorflow.runtime.script import main, train
from pase.targets.training.options import DeviceChoice, TrainingOptions
from tests.emitter.golden_mlp import build


def test_the_first_virtual_cpu_is_the_host() -> None:
    devices = virtual_cpus(3)
    assert devices.names == ("/device:CPU:1", "/device:CPU:2", "/device:CPU:3")
    assert [devices.name(number) for number in (HOST, 0, 2)] == ["/device:CPU:0", "/device:CPU:1", "/device:CPU:3"]
    config = devices.config()
    assert dict(config.device_count) == {"CPU": 4, "GPU": 0}
    assert not config.allow_soft_placement


def test_tensorflow_has_the_devices_that_are_named() -> None:
    devices = virtual_cpus(3)
    with tf.Graph().as_default(), tf.Session(config=devices.config()) as session:
        found = {place(device.name) for device in session.list_devices()}
    assert {*map(place, devices.names), HOST_PLACE} == found


def test_gpus_have_the_cpu_as_their_host() -> None:
    devices = gpus(2, range(4), first=2)
    assert devices.names == ("/device:GPU:0", "/device:GPU:1")
    assert devices.host == "/device:CPU:0"
    config = devices.config()
    assert dict(config.device_count) == {"CPU": 1, "GPU": 2}
    assert config.gpu_options.visible_device_list == "2,3"
    assert config.gpu_options.allow_growth
    assert config.allow_soft_placement  # what has no kernel there is done on the host
    assert not config.gpu_options.experimental.virtual_devices


@pytest.mark.parametrize(
    ("num_devices", "num_physical", "on_each"), [(4, 1, [4]), (4, 3, [2, 1, 1]), (5, 2, [3, 2]), (8, 2, [4, 4])]
)
def test_virtual_gpus_share_the_physical_ones(num_devices: int, num_physical: int, on_each: list[int]) -> None:
    devices = gpus(num_devices, range(num_physical), virtual=True, memory_mib=300)
    assert len(devices.names) == num_devices
    config = devices.config()
    assert config.gpu_options.visible_device_list == ",".join(map(str, range(num_physical)))
    limits = [list(gpu.memory_limit_mb) for gpu in config.gpu_options.experimental.virtual_devices]
    assert limits == [[300.0] * count for count in on_each]


def test_enough_gpus_are_not_divided() -> None:
    assert gpus(2, range(2), virtual=True) == gpus(2, range(2))


@pytest.mark.parametrize(
    ("physical", "message"),
    [
        ((), "4 GPUs are needed and TensorFlow found none; leave out --device to use virtual CPUs"),
        ((0, 1), "4 GPUs are needed and TensorFlow found 2; search a plan for 2 devices, or .* with --virtual"),
    ],
)
def test_too_few_gpus_are_an_error(physical: tuple[int, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        gpus(4, physical)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"virtual": True}, "--virtual is for GPUs, and CPU devices are virtual as they are"),
        ({"kind": "GPU", "virtual": True, "memory_mib": 0}, "is to have 0 MiB of memory; give 1 or more"),
    ],
)
def test_a_choice_that_makes_no_sense_is_an_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        DeviceChoice(**values)


@pytest.mark.parametrize("devices", [virtual_cpus(4), gpus(4, range(4))])
def test_numbers_are_the_inverse_of_names(devices: Devices) -> None:
    numbers = devices.numbers
    for number in (HOST, *range(4)):
        found = place(devices.name(number))
        assert found is not None
        assert numbers[found] == number
    assert len(numbers) == 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/device:CPU:0", ("CPU", 0)),
        ("/job:localhost/replica:0/task:0/device:CPU:12", ("CPU", 12)),
        ("/job:worker/replica:0/task:3/device:GPU:1", ("GPU", 1)),
        ("/job:worker/task:3/device:gpu:1", ("GPU", 1)),
        ("/device:GPU:0/stream:all", None),
        ("", None),
    ],
)
def test_the_place_in_a_name(name: str, expected: tuple[str, int] | None) -> None:
    assert place(name) == expected


@pytest.mark.skipif(bool(physical_gpus()), reason="there is a GPU")
@pytest.mark.parametrize("more", [[], ["--virtual"]])
def test_a_program_that_finds_no_gpu_says_so(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(build, num_devices=4, arguments=["--device", "GPU", *more])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: 4 GPUs are needed and TensorFlow found none; leave out --device")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not physical_gpus(), reason="there is no GPU")
def test_gpus_train_like_cpus() -> None:
    options = TrainingOptions(steps=3, dtype="float64")
    choice = DeviceChoice(kind="GPU", virtual=True, memory_mib=512)
    on_gpus = train(build, options, num_devices=4, devices=local_devices(choice, 4))
    assert on_gpus == pytest.approx(train(build, options, num_devices=4), rel=1e-12)
