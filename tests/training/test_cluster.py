"""What a process is told of its cluster, checked like anything from outside; what its socket takes."""

import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pase.easgd.cluster import VARIABLE, Cluster, cluster_of, keep_to_this_machine, kept_text, port_of
from pase.errors import ProgramError
from tests.training.addresses import connects, own_address

TWO = Cluster(addresses=("127.0.0.1:4000", "127.0.0.1:4001"), task=1, step_timeout_s=2.5)


@pytest.mark.parametrize("cluster", [TWO, replace(TWO, step_timeout_s=None)])
def test_the_environment_holds_a_cluster(cluster: Cluster) -> None:
    assert cluster_of({VARIABLE: cluster.to_json()}) == cluster


def test_without_the_variable_there_is_no_cluster() -> None:
    assert cluster_of({}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema_version": 1}, "schema_version is 1; this version of PaSE reads 2"),
        ({"tasks": "127.0.0.1:4000"}, "tasks is '127.0.0.1:4000'; expected an array"),
        ({"tasks": []}, "task 1 is none of the 0 that there are"),
        ({"tasks": ["127.0.0.1:4000", "127.0.0.1"]}, "'127.0.0.1' is no address of a process; expected 127.0.0.1:PORT"),
        ({"tasks": ["127.0.0.1:4000"] * 2}, "name a process twice"),
        ({"task": 2}, "task 2 is none of the 2 that there are; they count from 0"),
        ({"task": "1"}, "task is '1'; expected a whole number"),
        ({"step_timeout_s": -1}, "step_timeout_s is -1; expected a number above 0"),
        ({"tasks": ["127.0.0.1:4000", "10.0.0.7:4000"]}, "'10.0.0.7:4000' is no address of a process"),
    ],
)
def test_an_environment_that_is_wrong_says_where(changed: dict[str, Any], message: str) -> None:
    text = json.dumps({**json.loads(TWO.to_json()), **changed})
    with pytest.raises(ProgramError, match=message):
        cluster_of({VARIABLE: text})


@pytest.mark.parametrize("text", ["no JSON", "[" * 100_000])
def test_an_environment_that_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(ProgramError, match=r"PASE_CLUSTER is no JSON .*; pase train --processes sets it"):
        cluster_of({VARIABLE: text})


@pytest.mark.parametrize("address", ["", "node1", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "10.0.0.1:4000"])
def test_what_is_no_address_is_an_error(address: str) -> None:
    assert port_of("127.0.0.1:65535") == 65535
    with pytest.raises(ProgramError, match=r"is no address of a process; expected 127.0.0.1:PORT"):
        port_of(address)


def test_the_checkpoint_that_is_left_is_named(tmp_path: Path) -> None:
    assert kept_text(None) == "; no checkpoint was kept: --checkpoint DIR keeps them"
    assert kept_text(tmp_path) == f"; there is no checkpoint in {tmp_path} yet"
    for step in (9, 10):
        (tmp_path / f"step-{step:010}.safetensors").touch()
    assert f"the last checkpoint is {tmp_path}/step-0000000010.safetensors" in kept_text(tmp_path)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has these options")


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
    keep_to_this_machine(port)
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
    assert connects("127.0.0.1", port)
    assert own is None or not connects(own, port)


@linux
def test_a_server_that_does_not_listen_is_an_error() -> None:
    with pytest.raises(ProgramError, match="does not listen on port 1; choose another one"):
        keep_to_this_machine(1)


@linux
def test_somebody_who_came_before_is_refused(listener: socket.socket) -> None:
    own, port = own_address(), listener.getsockname()[1]
    if own is None:
        pytest.skip("this machine has no address but loopback")
    with (
        socket.create_connection((own, port), timeout=1),
        pytest.raises(ProgramError, match=f"somebody connected to port {port} at {own} before"),
    ):
        keep_to_this_machine(port)
