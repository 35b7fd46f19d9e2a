"""Which device a rank computes on, and which devices' tensors the process group carries."""

from collections.abc import Mapping

import torch
import torch.distributed as dist


def accelerator() -> str | None:
    """Return the type of this machine's accelerators ("cuda"), None where PyTorch finds none."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else str(found.type)


def carriers() -> Mapping[str, str]:
    """Return the backend that the default process group has for tensors of each type of device."""
    if not dist.is_initialized():
        return {}
    carried = {}
    for pair in dist.get_backend_config().split(","):
        kind, _, backend = pair.partition(":")
        carried[kind] = backend
    return carried


def current_device() -> torch.device:
    """Return the device of this rank whose tensors the process group carries best.

    gloo carries those of GPUs, too, but by the memory of the CPU and not in all collectives: it counts as one for CPUs.
    """
    kind = accelerator()
    if kind is None or carriers().get(kind, "gloo") == "gloo":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def message_device() -> torch.device:
    """Return the device of tensors by which ranks tell each other something: the CPU, if the group carries those."""
    return torch.device("cpu") if "cpu" in carriers() else current_device()
