"""What the server's socket takes: the filter against a machine that interprets it, the kernel against itself."""

import socket
import struct
import sys
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.runtime.cluster import keep_to, packet_filter
from tests.runtime.addresses import connects, own_address

NETWORK_HEADER = -0x100000
"""Where the kernel's documentation says that offsets from the IP header begin, as a signed number."""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has these options")


def passes(program: bytes, packet: bytes) -> bool:
    """Run a packet filter on an IP packet: an interpreter of the few instructions that it may hold."""
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = position = 0
    while True:
        operation, jump_true, jump_false, value = code[position]
        position += 1
        offset = struct.unpack("=i", struct.pack("=I", value))[0] - NETWORK_HEADER
        match operation:
            case 0x20:
                accumulator = int.from_bytes(packet[offset : offset + 4], "big")
            case 0x30:
                accumulator = packet[offset]
            case 0x54:
                accumulator &= value
            case 0x15:
                position += jump_true if accumulator == value else jump_false
            case 0x06:
                return bool(value)
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")


def packet_to(address: str) -> bytes:
    """An IP header, from somewhere that must not matter."""
    to = ip_address(address)
    if to.version == 4:
        return bytes([0x45, *[0x11] * 11]) + ip_address("127.0.0.1").packed + to.packed
    return bytes([0x60, *[0x11] * 7]) + ip_address("::1").packed + to.packed


ADDRESSES = st.one_of(
    st.ip_addresses().map(str),
    st.sampled_from(["127.0.0.1", "127.255.0.3", "128.0.0.1", "10.0.0.7", "10.0.0.8", "::1", "::2", "fd00::7", "::"]),
)


@given(address=ADDRESSES, others=st.lists(ADDRESSES, max_size=3))
def test_the_filter_lets_pass_what_is_in_its_networks(address: str, others: list[str]) -> None:
    networks = [ip_network("127.0.0.0/8"), ip_network("::1/128"), *map(ip_network, others)]
    to = ip_address(address)
    assert passes(packet_filter(networks), packet_to(address)) == any(to in network for network in networks)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that listens as TensorFlow's server does: on every address, of both versions of IP."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as opened:
        yield opened


@linux
def test_a_server_is_kept_to_loopback(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    own = own_address()
    assert own is None or connects(own, port)
    keep_to("127.0.0.1", port)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
    assert connects("127.0.0.1", port)
    assert own is None or not connects(own, port)


@linux
def test_a_server_is_kept_to_an_address_or_not_started(listener: socket.socket) -> None:
    own, port = own_address(), listener.getsockname()[1]
    try:
        keep_to("192.0.2.77", port)
    except ProgramError as error:
        assert "needs the capability CAP_NET_ADMIN" in str(error)  # noqa: PT017 either is right
        return
    assert connects("127.0.0.1", port)
    assert own is None or not connects(own, port)


def test_a_server_for_everybody_is_left_alone(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    keep_to("0.0.0.0", port)
    own = own_address()
    assert own is None or connects(own, port)


@linux
def test_a_server_that_does_not_listen_is_an_error() -> None:
    with pytest.raises(ProgramError, match="does not listen on port 1; choose another one"):
        keep_to("127.0.0.1", 1)


@linux
def test_somebody_who_came_before_is_refused(listener: socket.socket) -> None:
    own, port = own_address(), listener.getsockname()[1]
    if own is None:
        pytest.skip("this machine has no address but loopback")
    with (
        socket.create_connection((own, port), timeout=1),
        pytest.raises(ProgramError, match=f"somebody connected to port {port} at {own} before"),
    ):
        keep_to("127.0.0.1", port)
