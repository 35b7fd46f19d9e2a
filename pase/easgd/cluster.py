"""`Cluster`: the processes of this machine that train together, and how a process learns of them.

`launch.supervise` starts every process with the same command, and with PASE_CLUSTER in its environment: JSON with the
addresses of all tasks, the number of this one, and how long a step may take. Task 0 has the coordinator.

TensorFlow's server always listens on all addresses, and asks nobody who they are; it has no option for that. So the
kernel ties the socket that it listens on to the loopback interface, which needs no privilege, before the server begins
to serve; what is connected by then from elsewhere is found and refused.
"""

import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from msgspec import field

from pase.common.documents import DocumentSource
from pase.common.structs import AboveZero, Document, Whole, describes, read
from pase.easgd.checkpoint import list_checkpoints
from pase.errors import ProgramError

VARIABLE = "PASE_CLUSTER"
LOOPBACK = "127.0.0.1"

_ADDRESS = re.compile(r"127\.0\.0\.1:(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The tasks of a training, all on this machine.

    addresses: [tasks] 127.0.0.1:port. task: this process. step_timeout_s: how long a step may take, None for ever.
    Raises ProgramError for what is out of range.
    """

    addresses: tuple[str, ...]
    task: int
    step_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            port_of(address)
        if len(set(self.addresses)) != len(self.addresses):
            raise ProgramError(f"the addresses {', '.join(self.addresses)} name a process twice; give each its port")
        if not 0 <= self.task < len(self.addresses):
            raise ProgramError(
                f"task {self.task} is none of the {len(self.addresses)} that there are; they count from 0"
            )

    def to_json(self) -> str:
        """Return the cluster as the environment holds it."""
        return json.dumps(_ClusterDocument.of(self, schema_version=2).builtins())


@describes(Cluster)
class _ClusterDocument(Document):
    schema_version: Literal[2]
    addresses: tuple[str, ...] = field(name="tasks")
    task: Whole
    step_timeout_s: AboveZero | None


def cluster_of(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Return the cluster that this process belongs to, None for none; ProgramError where it is not well formed."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    try:
        document = read(
            _ClusterDocument, text.encode("utf-8", "surrogateescape"), DocumentSource(ProgramError, VARIABLE)
        )
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{VARIABLE} is no JSON ({error}); pase train --processes sets it") from None
    cluster: Cluster = document.value()
    return cluster


def port_of(address: str) -> int:
    """Return the port of a process's address; ProgramError where it is none of loopback."""
    found = _ADDRESS.fullmatch(address)
    if not found or not 0 < int(found[1]) < 2**16:
        raise ProgramError(f"{address!r} is no address of a process; expected {LOOPBACK}:PORT, such as {LOOPBACK}:4000")
    return int(found[1])


def kept_text(folder: Path | None) -> str:
    """Return what to add to the message of a training that ended early: which checkpoint is left in a folder."""
    if folder is None:
        return "; no checkpoint was kept: --checkpoint DIR keeps them"
    try:
        listed = list_checkpoints(folder)
    except OSError as error:
        return f"; its checkpoints cannot be listed: {error}"
    if not listed:
        return f"; there is no checkpoint in {folder} yet"
    return f"; the last checkpoint is {listed[0][1]}: go on from it with --resume"


_LOOPBACK_DEVICE = b"lo\0"
_LISTENING, _ESTABLISHED = "0A", "01"


def keep_to_this_machine(port: int) -> None:
    """Have this process's server on a port take only what this machine sends to itself.

    Raises ProgramError where that is impossible, rather than serve everybody.
    """
    if not sys.platform.startswith("linux"):
        raise ProgramError("TensorFlow's server can be kept to this machine on Linux alone; leave out --processes")
    try:
        own = _own_sockets()
        listening = [entry for entry in _sockets() if entry.port == port and entry.state == _LISTENING]
        handles = [own[entry.inode] for entry in listening if entry.inode in own]
        if not handles:
            raise ProgramError(f"TensorFlow's server does not listen on port {port}; choose another one")
        for handle in handles:
            with socket.socket(fileno=os.dup(handle)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
        others = [
            entry
            for entry in _sockets()
            if entry.port == port and entry.state == _ESTABLISHED and not ip_address(entry.address).is_loopback
        ]
    except OSError as error:
        raise ProgramError(
            f"TensorFlow's server cannot be kept to this machine: {error}; leave out --processes"
        ) from None
    if others:
        raise ProgramError(f"somebody connected to port {port} at {others[0].address} before it was closed to others")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Socket:
    address: str
    port: int
    state: str
    inode: str


def _sockets() -> Iterator[_Socket]:
    """Yield the TCP sockets of this machine."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            address, _, port = local.rpartition(":")
            yield _Socket(address=_readable(address), port=int(port, 16), state=state, inode=rest[5])


def _readable(hexadecimal: str) -> str:
    """Return the IP address that the kernel writes as words in its own byte order."""
    words = [int(hexadecimal[i : i + 8], 16) for i in range(0, len(hexadecimal), 8)]
    found = ip_address(struct.pack(f"={len(words)}I", *words))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _own_sockets() -> dict[str, int]:
    """Return this process's sockets by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed meanwhile, as the one with which this folder is listed
            continue
        if target.startswith("socket:["):
            found[target[len("socket:[") : -1]] = int(entry.name)
    return found


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
        with socket.create_connection((LOOPBACK, port_of(address)), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
