"""Keeping TensorFlow's server to one address: it always listens on all of them, and asks nobody who they are.

The server has no option for the address, so the kernel is asked, on the socket that it listens on. For loopback, the
socket is tied to that interface, which needs no privilege. For another address, a packet filter (classic BPF) drops
what is sent to others, and every connection inherits it; recent kernels want the capability CAP_NET_ADMIN for that.
Either is done before the server begins to serve; what is connected by then and was not to be is found and refused.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK

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

    address: 0.0.0.0 or :: for no limit. Raises RuntimeFailure where that cannot be had, rather than serve everybody.
    """
    wanted = ip_address(address)
    if wanted.is_unspecified:
        return
    networks = (*_LOOPBACK, ip_network(wanted))
    hint = "; with --bind 0.0.0.0 it serves whoever can reach this machine, who may then run anything on it"
    if not sys.platform.startswith("linux"):
        raise RuntimeFailure(f"TensorFlow's server can be kept to an address on Linux alone{hint}")
    try:
        own = _own_sockets()
        listening = [entry for entry in _sockets() if entry.port == port and entry.state == _LISTENING]
        handles = [own[entry.inode] for entry in listening if entry.inode in own]
        if not handles:
            raise RuntimeFailure(f"TensorFlow's server does not listen on port {port}; choose another one")
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
        raise RuntimeFailure(
            f"to keep TensorFlow's server to {address} needs the capability CAP_NET_ADMIN; run with it, or listen on "
            f"{LOOPBACK}{hint}"
        ) from None
    except OSError as error:
        raise RuntimeFailure(f"TensorFlow's server cannot be kept to {address}: {error}{hint}") from None
    if others:
        raise RuntimeFailure(f"somebody connected to port {port} at {others[0].address} before it was closed to others")


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
