"""`Cluster`: the processes that train together, how a program learns of them, and to which addresses they listen.

`pase launch` starts every process with the same program and arguments, and with PASE_CLUSTER in its environment: JSON
with the addresses of all tasks, the number of this one, and what to listen on. Task 0, the chief, trains; the others
serve it.

TensorFlow's server always listens on all addresses, and asks nobody who they are; it has no option for that. So the
kernel is asked, on the socket that it listens on. For loopback, the socket is tied to that interface, which needs no
privilege. For another address, a packet filter (classic BPF) drops what is sent to others, and every connection
inherits it; recent kernels want the capability CAP_NET_ADMIN for that. Either is done before the server begins to
serve; what is connected by then and was not to be is found and refused.
"""

import ctypes
import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Literal

from msgspec import field

from pase.common.documents import DocumentSource, open_regular
from pase.common.structs import AboveZero, Document, Whole, describes, read
from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.runtime.checkpoint import list_checkpoints

VARIABLE = "PASE_CLUSTER"
LOOPBACK = "127.0.0.1"

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_LIST_LIMIT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The tasks of a training.

    addresses: [tasks] host:port. task: this process. bind: the IP address to listen on, 0.0.0.0 or :: for all.
    local_task: number of this process among those of its machine. step_timeout_s: how long a step may take, None for
    ever. Raises ProgramError for what is out of range.
    """

    addresses: tuple[str, ...]
    task: int
    bind: str = LOOPBACK
    local_task: int = 0
    step_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            split_address(address)
        if len(set(self.addresses)) != len(self.addresses):
            raise ProgramError(f"the addresses {', '.join(self.addresses)} name a process twice; give each its port")
        if not 0 <= self.task < len(self.addresses):
            raise ProgramError(
                f"task {self.task} is none of the {len(self.addresses)} that there are; they count from 0"
            )
        try:
            ip_address(self.bind)
        except ValueError:
            raise ProgramError(
                f"the address to listen on is {self.bind!r}; expected an IP address, such as {LOOPBACK} or 0.0.0.0"
            ) from None
        is_distant = [address for address in self.addresses if not is_loopback(split_address(address)[0])]
        if is_distant and ip_address(self.bind).is_loopback:
            raise ProgramError(
                f"{is_distant[0]} is another host, which cannot reach a process that listens on {self.bind}; name this "
                "host's address with --bind, and only in a network whose every user you trust"
            )

    def to_json(self) -> str:
        """Return the cluster as the environment holds it."""
        return json.dumps(_ClusterDocument.of(self, schema_version=1).builtins())


@describes(Cluster)
class _ClusterDocument(Document):
    schema_version: Literal[1]
    addresses: tuple[str, ...] = field(name="tasks")
    task: Whole
    bind: str
    local_task: Whole
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
        raise ProgramError(f"{VARIABLE} is no JSON ({error}); start the program with pase launch") from None
    cluster: Cluster = document.value()
    return cluster


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address; ProgramError where it has not both."""
    found = _ADDRESS.fullmatch(address)
    if not found or not 0 < int(found[2]) < 2**16:
        raise ProgramError(f"{address!r} is no address of a process; expected HOST:PORT, such as node1:4000")
    return found[1].strip("[]"), int(found[2])


def is_loopback(host: str) -> bool:
    """Whether a host is this one by its very name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def read_hosts(text_or_path: str) -> tuple[str, ...]:
    """Return the addresses that a list names: a file with one a line and comments from #, or with commas between.

    Raises ProgramError with the line where one is none, or where the list is empty.
    """
    path = Path(text_or_path)
    if _ADDRESS.fullmatch(text_or_path.partition(",")[0].strip()) and not path.is_file():
        return tuple(_checked(item.strip(), f"host list {text_or_path}") for item in text_or_path.split(","))
    try:
        with open_regular(path) as stream:
            text = stream.read(_LIST_LIMIT_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ProgramError(
            f"cannot read host list {path}: {error}; expected a file with HOST:PORT on each line, or HOST:PORT,…"
        ) from None
    addresses = _addresses(path, text.splitlines())
    if not addresses:
        raise ProgramError(f"host list {path} names no host; expected HOST:PORT on each line")
    return addresses


def _addresses(path: Path, lines: Sequence[str]) -> tuple[str, ...]:
    plain = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, start=1))
    return tuple(_checked(line, f"host list {path}, line {number}") for number, line in plain if line)


def _checked(address: str, where: str) -> str:
    try:
        split_address(address)
    except ProgramError as error:
        raise ProgramError(f"{where}: {error}") from None
    return address


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


Network = IPv4Network | IPv6Network

_LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
_LOOPBACK_DEVICE = b"lo\0"
_LISTENING, _ESTABLISHED = "0A", "01"

_SO_ATTACH_FILTER, _SO_LOCK_FILTER = 26, 44
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000
"""Offsets from here on count from the IP header."""
_DESTINATION = {4: 16, 6: 24}
"""Offset of the destination in the header of each version of IP."""
_ALL, _NONE = 0xFFFFFFFF, 0


def keep_to(address: str, port: int) -> None:
    """Have this process's server on a port take only what is sent to an address, or by this machine to itself.

    address: 0.0.0.0 or :: for no limit. Raises ProgramError where that cannot be had, rather than serve everybody.
    """
    wanted = ip_address(address)
    if wanted.is_unspecified:
        return
    networks = (*_LOOPBACK, ip_network(wanted))
    hint = "; with --bind 0.0.0.0 it serves whoever can reach this machine, who may then run anything on it"
    if not sys.platform.startswith("linux"):
        raise ProgramError(f"TensorFlow's server can be kept to an address on Linux alone{hint}")
    try:
        own = _own_sockets()
        listening = [entry for entry in _sockets() if entry.port == port and entry.state == _LISTENING]
        handles = [own[entry.inode] for entry in listening if entry.inode in own]
        if not handles:
            raise ProgramError(f"TensorFlow's server does not listen on port {port}; choose another one")
        for handle in handles:
            with socket.socket(fileno=os.dup(handle)) as listener:
                if wanted.is_loopback:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
                else:
                    _attach(listener, packet_filter(networks))
        others = [
            entry
            for entry in _sockets()
            if entry.port == port and entry.state == _ESTABLISHED and not _is_in(entry.address, networks)
        ]
    except PermissionError:
        raise ProgramError(
            f"to keep TensorFlow's server to {address} needs the capability CAP_NET_ADMIN; run with it, or listen on "
            f"{LOOPBACK}{hint}"
        ) from None
    except OSError as error:
        raise ProgramError(f"TensorFlow's server cannot be kept to {address}: {error}{hint}") from None
    if others:
        raise ProgramError(f"somebody connected to port {port} at {others[0].address} before it was closed to others")


def packet_filter(networks: Sequence[Network]) -> bytes:
    """Return a program for the kernel that lets packets to some networks pass and drops all others."""
    blocks = [block for network in networks for block in _block(network)]
    return b"".join([*blocks, _instruction(_RETURN, _NONE)])


def _block(network: Network) -> Iterator[bytes]:
    """Yield instructions that let packets to a network pass, and go on after them with others."""
    words = struct.iter_unpack("!II", _interleaved(network.network_address.packed, network.netmask.packed))
    used = [(index, value, mask) for index, (value, mask) in enumerate(words) if mask]
    left = 3 * len(used) + 1
    yield _instruction(_LOAD_BYTE, _NETWORK_HEADER)
    yield _instruction(_AND, 0xF0)
    yield _instruction(_JUMP_IF_EQUAL, network.version << 4, otherwise=left)
    for index, value, mask in used:
        left -= 3
        yield _instruction(_LOAD_WORD, _NETWORK_HEADER + _DESTINATION[network.version] + 4 * index)
        yield _instruction(_AND, mask)
        yield _instruction(_JUMP_IF_EQUAL, value, otherwise=left)
    yield _instruction(_RETURN, _ALL)


def _interleaved(first: bytes, second: bytes) -> bytes:
    return b"".join(first[i : i + 4] + second[i : i + 4] for i in range(0, len(first), 4))


def _instruction(code: int, value: int, *, otherwise: int = 0) -> bytes:
    """Return an instruction. otherwise: how many to skip where a comparison does not hold."""
    return struct.pack("=HBBI", code, 0, otherwise, value)


def _attach(listener: socket.socket, program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
    listener.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


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


def _is_in(address: str, networks: Sequence[Network]) -> bool:
    found = ip_address(address)
    return any(found in network for network in networks)


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
