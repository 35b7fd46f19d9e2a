"""What a process is told of its cluster, checked like anything from outside; lists of hosts; what its socket takes."""

import json
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.runtime.cluster import (
    VARIABLE,
    Cluster,
    cluster_of,
    keep_to,
    kept_text,
    packet_filter,
    read_hosts,
    split_address,
)
from tests.runtime.addresses import connects, own_address

TWO = Cluster(addresses=("127.0.0.1:4000", "127.0.0.1:4001"), task=1, local_task=1, step_timeout_s=2.5)


@pytest.mark.parametrize("cluster", [TWO, replace(TWO, step_timeout_s=None, bind="0.0.0.0")])
def test_the_environment_holds_a_cluster(cluster: Cluster) -> None:
    assert cluster_of({VARIABLE: cluster.to_json()}) == cluster


def test_without_the_variable_there_is_no_cluster() -> None:
    assert cluster_of({}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2; this version of PaSE reads 1"),
        ({"tasks": "127.0.0.1:4000"}, "tasks is '127.0.0.1:4000'; expected an array"),
        ({"tasks": []}, "task 1 is none of the 0 that there are"),
        ({"tasks": ["127.0.0.1:4000", "127.0.0.1"]}, "'127.0.0.1' is no address of a process; expected HOST:PORT"),
        ({"tasks": ["127.0.0.1:4000"] * 2}, "name a process twice"),
        ({"task": 2}, "task 2 is none of the 2 that there are; they count from 0"),
        ({"task": "1"}, "task is '1'; expected a whole number"),
        ({"bind": "everywhere"}, "the address to listen on is 'everywhere'; expected an IP address"),
        ({"step_timeout_s": -1}, "step_timeout_s is -1; expected a number above 0"),
        ({"tasks": ["127.0.0.1:4000", "10.0.0.7:4000"]}, "10.0.0.7:4000 is another host, .* --bind"),
    ],
)
def test_an_environment_that_is_wrong_says_where(changed: dict[str, Any], message: str) -> None:
    text = json.dumps({**json.loads(TWO.to_json()), **changed})
    with pytest.raises(ProgramError, match=message):
        cluster_of({VARIABLE: text})


@pytest.mark.parametrize("text", ["no JSON", "[" * 100_000])
def test_an_environment_that_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(ProgramError, match=r"PASE_CLUSTER is no JSON .*; start the program with pase launch"):
        cluster_of({VARIABLE: text})


@pytest.mark.parametrize(
    ("address", "expected"),
    [("node-1.lab:65535", ("node-1.lab", 65535)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:4000", ("::1", 4000))],
)
def test_an_address_is_a_host_and_a_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "node1", "node1:", ":4000", "node1:0", "node1:65536", "no de:1", "::1:4000"])
def test_what_is_no_address_is_an_error(address: str) -> None:
    with pytest.raises(ProgramError, match="is no address of a process; expected HOST:PORT"):
        split_address(address)


def test_a_list_of_hosts_is_a_file_or_stands_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# the cluster\nnode1:4000\n\n  node2:4000  # the fast one\n", encoding="utf-8")
    assert read_hosts(str(path)) == read_hosts("node1:4000, node2:4000") == ("node1:4000", "node2:4000")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1:4000\nnode2\n", "hosts.txt, line 2: 'node2' is no address"),
        ("# nobody\n", "hosts.txt names no host"),
        ("\xff\xfe", "'\xff\xfe' is no address"),
    ],
)
def test_a_list_of_hosts_that_is_wrong_says_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProgramError, match=message):
        read_hosts(str(path))


def test_a_list_of_hosts_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"cannot read host list .*nowhere"):
        read_hosts(str(tmp_path / "nowhere"))


def test_the_checkpoint_that_is_left_is_named(tmp_path: Path) -> None:
    assert kept_text(None) == "; no checkpoint was kept: --checkpoint DIR keeps them"
    assert kept_text(tmp_path) == f"; there is no checkpoint in {tmp_path} yet"
    for step in (9, 10):
        (tmp_path / f"step-{step:010}.safetensors").touch()
    assert f"the last checkpoint is {tmp_path}/step-0000000010.safetensors" in kept_text(tmp_path)


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
