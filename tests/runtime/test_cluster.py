"""What a process is told of its cluster, checked like anything from outside; lists of hosts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.runtime.cluster import (
    VARIABLE,
    Cluster,
    cluster_of,
    kept_text,
    read_hosts,
    split_address,
)

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
