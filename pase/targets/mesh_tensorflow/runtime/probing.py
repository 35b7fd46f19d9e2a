"""Whether a task of a cluster is there: whether something listens at its address."""

import socket
import time

from pase.targets.mesh_tensorflow.runtime.cluster import split_address

PROBE_EVERY_S = 1.0
"""How often a task is asked whether it is still there."""

_PROBE_TIMEOUT_S = 3.0
_LOST_AFTER = 4
"""A process that does not answer so many times one after another is gone."""


def is_up(address: str, timeout_s: float) -> bool:
    """Whether something listens at an address, waiting for it."""
    end = time.monotonic() + timeout_s
    while not answers(address):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def is_lost(address: str) -> bool:
    """Whether nothing listens at an address, asked until that is no accident."""
    for _ in range(_LOST_AFTER):
        if answers(address):
            return False
        time.sleep(PROBE_EVERY_S)
    return True


def answers(address: str) -> bool:
    """Whether something listens at an address."""
    try:
        with socket.create_connection(split_address(address), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
