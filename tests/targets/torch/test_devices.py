"""Which device ranks compute on, and tell each other things by; the accelerators of the machine are made up."""

from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pase.errors import ProgramError
from pase.targets.torch import collectives, devices, launch


@dataclass
class Accelerators:
    """Four GPUs of this machine. current: the one that is the current device. was_set: those that were made it."""

    current: int = 0
    was_set: list[int] = field(default_factory=list)

    def set_index(self, index: int) -> None:
        self.current = index
        self.was_set.append(index)


def _no_call(*_: object) -> Any:
    raise AssertionError("a function of CUDA was called")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Accelerators:
    found = Accelerators()
    for name in ("set_device", "current_device", "device_count", "is_available"):
        monkeypatch.setattr(torch.cuda, name, _no_call)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: found.current)
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.set_index)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return found


def _in_group(monkeypatch: pytest.MonkeyPatch, backends: str, *, rank: int = 1, bound: int | None = None) -> None:
    """Be in a process group that was made by what `get_backend_config` says, bound to a device or not."""
    world = SimpleNamespace(bound_device_id=None if bound is None else torch.device("cuda", bound))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))


OWN, BOTH, GLOO, CPU_ALONE = "cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:gloo"


@pytest.mark.parametrize(
    ("backends", "asked", "expected"),
    [
        (OWN, None, "cuda:3"),
        (BOTH, None, "cuda:3"),
        (BOTH, "cpu", "cpu"),
        (GLOO, None, "cpu"),
        (GLOO, "cuda", "cuda:3"),
        (CPU_ALONE, None, "cpu"),
    ],
)
def test_a_rank_computes_where_its_group_communicates(
    machine: Accelerators, monkeypatch: pytest.MonkeyPatch, backends: str, asked: str | None, expected: str
) -> None:
    """A group that a script makes by `init_process_group()` has the first, as `get_backend_config` says it."""
    _in_group(monkeypatch, backends)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert str(launch._device(asked)) == expected
    assert machine.was_set == ([3] if expected == "cuda:3" else [])


def test_the_device_is_the_group_s_then_that_of_the_local_rank_then_the_current_one(
    machine: Accelerators, monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_group(monkeypatch, OWN)
    # Ranks that know nothing else have the devices in turns.
    assert str(launch._device(None)) == "cuda:1"
    machine.current = 2
    assert str(launch._device(None)) == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert str(launch._device(None)) == "cuda:3"
    _in_group(monkeypatch, OWN, bound=0)
    assert str(launch._device(None)) == "cuda:0"
    assert machine.was_set == [1, 2, 3, 0]


@pytest.mark.parametrize(("backends", "expected"), [(OWN, "cuda:2"), (BOTH, "cpu"), (GLOO, "cpu")])
def test_ranks_tell_each_other_things_by_the_cpu_or_by_their_own_device(
    machine: Accelerators, monkeypatch: pytest.MonkeyPatch, backends: str, expected: str
) -> None:
    _in_group(monkeypatch, backends)
    machine.current = 2
    assert str(devices.message_device()) == expected


@pytest.mark.parametrize(("local_ranks", "asked"), [(4, None), (5, None), (4, "cpu")])
def test_a_group_is_made_on_the_device_of_the_local_rank(
    machine: Accelerators, monkeypatch: pytest.MonkeyPatch, local_ranks: int, asked: str | None
) -> None:
    """With its device, NCCL connects when the group is made; without a GPU for each rank gloo does all."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **given: made.append({**given, "current": machine.current}))
    monkeypatch.setattr(dist, "is_backend_available", lambda _name: True)
    monkeypatch.setattr(launch, "_store_of_all", lambda *_: dist.HashStore())
    given = {"RANK": "2", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": str(local_ranks)}
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    launch._make_group(asked, timedelta(seconds=1))
    (own,) = made
    if (local_ranks, asked) == (4, None):
        assert (own["backend"], own["device_id"], own["current"]) == (BOTH, torch.device("cuda", 2), 2)
    else:
        assert (own["backend"], own.get("device_id"), machine.was_set) == ("gloo", None, [])


@pytest.mark.parametrize(("backends", "expected"), [(OWN, "nccl"), (BOTH, "nccl"), (GLOO, "gloo")])
def test_groups_carry_what_ranks_compute_alone(
    machine: Accelerators, monkeypatch: pytest.MonkeyPatch, backends: str, expected: str
) -> None:
    _in_group(monkeypatch, backends, rank=3)
    made: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda *given, **named: made.append((*given, named)))
    collectives.new_group((0, 1))
    assert made == [([0, 1], {"backend": expected})]
    assert not machine.was_set


def test_without_an_accelerator_nothing_of_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_device", "current_device", "device_count"):
        monkeypatch.setattr(torch.cuda, name, _no_call)
    monkeypatch.setattr(torch.accelerator, "set_device_index", _no_call)
    _in_group(monkeypatch, BOTH)
    assert str(launch._device(None)) == "cpu"
    assert launch._backend(None, 1) == {"backend": "gloo"}
    with pytest.raises(ProgramError, match="a GPU was asked for, and PyTorch finds none"):
        launch._device("cuda")


# -- the module


def _on(device: str) -> Any:
    """Return what has parameters on a device, as a module has them."""
    return SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device(device), is_meta=device == "meta")])


def test_a_module_goes_where_the_rank_computes_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _in_group(monkeypatch, OWN)
    own = torch.device("cuda", 1)
    assert devices.module_device(_on("cuda:1"), own) == (own, "")
    assert devices.module_device(_on("meta"), own) == (own, "")
    found, note = devices.module_device(_on("cpu"), own)
    assert found == own
    assert note == "parameters go from cpu to cuda:1, where this rank computes; its inputs have to be there, too"


def test_a_module_where_the_group_does_not_communicate_stays_with_a_note_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    _in_group(monkeypatch, GLOO)
    found, note = devices.module_device(_on("cuda:1"), cpu)
    assert (str(found), note) == (
        "cuda:1",
        "the module stays on cuda:1, and gloo takes what ranks send through the memory of the CPU, if it does",
    )
    _in_group(monkeypatch, CPU_ALONE)
    with pytest.raises(ProgramError, match=r"the module is on cuda:1, and the process group carries tensors of cpu:"):
        devices.module_device(_on("cuda:1"), cpu)
