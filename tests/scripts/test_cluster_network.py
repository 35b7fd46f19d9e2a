"""A cluster on one machine: what its commands are, and that links that they make have the rates asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.cluster_network import (
    ClusterError,
    Network,
    address,
    cluster,
    maker_of,
    rank_environment,
    remove_leftovers,
    set_up_commands,
    unsupported,
)

NETWORK = Network(num_ranks=4, ranks_per_node=2, rank_bits_per_s=2e8, node_bits_per_s=5e7)


def test_every_link_has_a_bucket_at_either_end() -> None:
    commands = list(set_up_commands(NETWORK, "n"))
    rates: dict[str, set[tuple[str, str]]] = {}
    for command in commands:
        if command[0] == "tc":
            rates.setdefault(command[command.index("rate") + 1], set()).add(
                (command[2], command[command.index("dev") + 1])
            )
    assert rates == {
        "50000000bit": {("n-switch", f"{end}{node}") for end in ("up", "down") for node in range(2)},
        "200000000bit": {("n-switch", f"port{rank}") for rank in range(4)}
        | {(f"n-{rank}", "eth0") for rank in range(4)},
    }


def test_ranks_are_on_the_bridges_of_their_nodes_and_these_on_the_one_in_the_middle() -> None:
    commands = list(set_up_commands(NETWORK, "n"))
    masters = {c[c.index("set") + 1]: c[c.index("master") + 1] for c in commands if "master" in c}
    assert masters == {
        **{f"port{rank}": f"node{rank // 2}" for rank in range(4)},
        **{f"up{node}": f"node{node}" for node in range(2)},
        **{f"down{node}": "core" for node in range(2)},
    }
    made = [c[-1] for c in commands if c[:3] == ("ip", "netns", "add")]
    assert made == ["n-switch", "n-0", "n-1", "n-2", "n-3"]


def test_addresses_differ() -> None:
    assert len({address(rank) for rank in range(1000)}) == 1000
    assert address(0) == "10.0.0.1"


def test_what_a_rank_is_told() -> None:
    told = rank_environment(3, NETWORK)
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("3", "4", "1", "2")
    assert (told["MASTER_ADDR"], told["GLOO_SOCKET_IFNAME"]) == (address(0), "eth0")


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("pase-cluster-12-3", 12),
        ("pase-cluster-12-switch", 12),
        ("pase-cluster-12-probe", 12),
        ("pase-cluster-12", None),
        ("other-12-3", None),
        ("pase-cluster-12-3-4", None),
    ],
)
def test_whose_a_namespace_is(name: str, maker: int | None) -> None:
    assert maker_of(name) == maker


REASON = unsupported()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=f"no network namespaces here: {REASON}")

_MEASURE = """
import os, socket, time
first, size = 1_500_000, 4_000_000
if os.environ["RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], 5000)) as server:
        connection, _ = server.accept()

    def read(left):
        while left:
            left -= len(connection.recv(min(left, 2**20)))

    # What had come before the reader was there is not timed.
    read(first)
    begin = time.perf_counter()
    read(size)
    print(8 * size / (time.perf_counter() - begin))
else:
    while True:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(b"\\0" * (first + size))
connection.close()
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize(("rank_bits_per_s", "node_bits_per_s"), [(1e8, 1e9), (1e9, 1e8)])
def test_the_slowest_link_of_a_path_has_its_rate(rank_bits_per_s: float, node_bits_per_s: float) -> None:
    network = Network(num_ranks=2, ranks_per_node=1, rank_bits_per_s=rank_bits_per_s, node_bits_per_s=node_bits_per_s)
    rates = []
    with cluster(network) as made:
        for _ in range(5):
            rate, nothing = made.run([sys.executable, "-c", _MEASURE], limit_s=60)
            assert f"{made.name}-0" in namespaces()
            assert nothing == ""
            rates.append(float(rate))
            if rates[-1] > 0.75e8:
                break
    # Of 9,000 bytes of a packet 52 are headers. No transfer is faster than the link; one of a busy machine is slower.
    assert max(rates) < 1.05e8
    assert max(rates) > 0.75e8
    assert made.name not in namespaces()


@needs_namespaces
def test_a_rank_that_fails_ends_the_others_and_everything_goes(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys, time; sys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(60)"
    network = Network(num_ranks=2, ranks_per_node=2, rank_bits_per_s=1e8, node_bits_per_s=1e8)
    with pytest.raises(ClusterError, match="rank 1 ended with status 1: no luck"), cluster(network) as made:
        made.run([sys.executable, "-c", program], limit_s=60)
    assert "no luck" in capfd.readouterr().err
    assert made.name not in namespaces()


@needs_namespaces
def test_time_is_limited() -> None:
    network = Network(num_ranks=2, ranks_per_node=2, rank_bits_per_s=1e8, node_bits_per_s=1e8)
    with pytest.raises(ClusterError, match=r"ranks 0, 1 had not ended after 0.2 s"), cluster(network) as made:
        made.run(["sleep", "60"], limit_s=0.2)


@needs_namespaces
def test_what_a_killed_process_left_is_removed() -> None:
    program = (
        "import os, signal, sys\n"
        "from scripts.benchmarks.cluster_network import Network, cluster\n"
        "with cluster(Network(num_ranks=2, ranks_per_node=2, rank_bits_per_s=1e8, node_bits_per_s=1e8)) as made:\n"
        "    print(made.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    name = killed.stdout.strip()
    assert f"{name}-1" in namespaces()
    remove_leftovers()
    assert name not in namespaces()
