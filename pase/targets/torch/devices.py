"""Compute device of a rank, and the device types whose tensors the process group carries."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from pase.errors import ProgramError


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


def module_device(module: nn.Module, device: torch.device) -> tuple[torch.device, str]:
    """Return the device on which a rank computes its part of a module, and a note where that needs one, or "".

    Args:
        module: As it was given.
        device: That of the rank, whose tensors the process group carries best.

    Raises:
        ProgramError: The module is on an accelerator, and the process group carries no tensors of it.
    """
    own = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), device)
    if own == device or device.type != "cpu":
        note = f"parameters go from {own} to {device}, where this rank computes; its inputs have to be there, too"
        return device, "" if own == device else note
    backends = carriers()
    backend = backends.get(own.type, "")
    if not backend and dist.get_world_size() > 1:
        raise ProgramError(
            f"the module is on {own}, and the process group carries tensors of {', '.join(backends)}: make it without "
            f"a backend, as init_process_group(), or with one for {own.type}, or move the module to the CPU"
        )
    note = f"the module stays on {own}, and {backend} takes what ranks send through the memory of the CPU, if it does"
    return own, note if dist.get_world_size() > 1 else ""


def message_device() -> torch.device:
    """Return the device of tensors by which ranks tell each other something: the CPU, if the group carries those."""
    return torch.device("cpu") if "cpu" in carriers() else current_device()
