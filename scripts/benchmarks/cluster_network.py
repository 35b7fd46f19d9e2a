"""A cluster on one machine: a network namespace for each rank, joined by links of a given rate.

A rank has a link to the bridge of its node, a node one to the bridge in the middle; either is a pair of virtual
interfaces, whose sending ends are held to the rate by a token bucket each. Queues before a bucket are longer than what
the connections may have under way, so that nothing is lost: a link that is taken makes others wait, no more.

All of it lies in namespaces that bear the number of the process that made them. Deleting them deletes everything.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from pase.errors import PaseError

_PREFIX = "pase-cluster"
_SWITCH = "switch"
_INTERFACE = "eth0"
_PORT = 29500
_NICE = "-15"

_MTU = 9000
_BURST_BYTES = 2 * _MTU
"""What a bucket lets through at once: next to nothing, so that short messages meet the rate too."""
_WINDOW_BYTES = 2**20
"""What a connection may have under way at most."""
_QUEUE_BYTES = 64 * 2**20
"""Before a bucket: more than all connections behind it together."""

_SETTINGS = {
    "net.ipv6.conf.all.disable_ipv6": "1",
    # Rates are those of the links, whatever was sent before: no new start after a pause, none from what is remembered.
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_no_metrics_save": "1",
    "net.ipv4.tcp_rmem": f"4096 {_WINDOW_BYTES} {_WINDOW_BYTES}",
    "net.ipv4.tcp_wmem": f"4096 {_WINDOW_BYTES} {_WINDOW_BYTES}",
}

_LAST_LINES = 12
_POLL_S = 0.05


class ClusterError(PaseError):
    """Namespaces and links cannot be made here, or what ran on them failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Ranks in nodes of some, and the bits per second and direction of a rank's link and of a node's."""

    num_ranks: int
    ranks_per_node: int
    rank_bits_per_s: float
    node_bits_per_s: float

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may have fewer ranks."""
        return -(-self.num_ranks // self.ranks_per_node)


def address(rank: int) -> str:
    """Return the address of a rank, in its namespace."""
    return f"10.0.{rank // 250}.{rank % 250 + 1}"


def set_up_commands(network: Network, name: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands that make a network's namespaces and links, in order; name: what all names begin with."""
    switch = f"{name}-{_SWITCH}"
    yield "ip", "netns", "add", switch
    yield from _bridge(switch, "core")
    for node in range(network.num_nodes):
        yield from _bridge(switch, f"node{node}")
        out, into = f"up{node}", f"down{node}"
        yield "ip", "-n", switch, "link", "add", out, "mtu", str(_MTU), "type", "veth", "peer", "name", into
        for end, bridge in ((out, f"node{node}"), (into, "core")):
            yield "ip", "-n", switch, "link", "set", end, "mtu", str(_MTU), "master", bridge, "up"
            yield _limit(switch, end, network.node_bits_per_s)
    for rank in range(network.num_ranks):
        own, port = f"{name}-{rank}", f"port{rank}"
        yield "ip", "netns", "add", own
        for key, value in _SETTINGS.items():
            yield "ip", "netns", "exec", own, "sysctl", "-qw", f"{key}={value}"
        ends = ("name", _INTERFACE, "netns", own)
        yield "ip", "-n", switch, "link", "add", port, "mtu", str(_MTU), "type", "veth", "peer", *ends
        yield "ip", "-n", switch, "link", "set", port, "master", f"node{rank // network.ranks_per_node}", "up"
        yield "ip", "-n", own, "address", "add", f"{address(rank)}/16", "dev", _INTERFACE
        yield "ip", "-n", own, "link", "set", _INTERFACE, "mtu", str(_MTU), "up"
        yield "ip", "-n", own, "link", "set", "lo", "up"
        yield _limit(own, _INTERFACE, network.rank_bits_per_s)
        yield _limit(switch, port, network.rank_bits_per_s)


def _bridge(namespace: str, name: str) -> Iterator[tuple[str, ...]]:
    yield "ip", "-n", namespace, "link", "add", name, "mtu", str(_MTU), "type", "bridge"
    yield "ip", "-n", namespace, "link", "set", name, "up"


def _limit(namespace: str, interface: str, bits_per_s: float) -> tuple[str, ...]:
    bucket = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", f"{_BURST_BYTES}b", "limit", f"{_QUEUE_BYTES}b")
    return "tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket


def unsupported() -> str:
    """Return why no cluster can be made here, "" where one can."""
    missing = [program for program in ("ip", "tc", "setpriv", "sysctl") if which(program) is None]
    if missing:
        return f"{', '.join(missing)} (iproute2, util-linux, procps) cannot be found"
    if os.geteuid() != 0:
        return "network namespaces need the rights of root"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    probes = (
        ("ip", "netns", "add", name),
        ("ip", "-n", name, "link", "add", "name", "end", "type", "veth", "peer", "name", "other"),
        ("ip", "-n", name, "link", "add", "name", "bridge", "type", "bridge"),
        _limit(name, "end", 1e8),
    )
    try:
        for probe in probes:
            _call(probe)
    except ClusterError as error:
        return str(error)
    finally:
        _delete([name])
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A network that stands. name: what its namespaces begin with."""

    network: Network
    name: str

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        limit_s: float = 600,
    ) -> tuple[str, ...]:
        """Run a command in the namespace of every rank, and return what each of them wrote to its standard output.

        Each has in its environment what `torch.distributed` looks for: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
        GLOO_SOCKET_IFNAME. They go before other processes of the machine. Where one fails, or time is up, the others
        are ended and ClusterError says which.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pase-cluster-")))
            processes = [
                stack.enter_context(self._started(rank, command, environment or {}, cwd, folder))
                for rank in range(self.network.num_ranks)
            ]
            self._wait(processes, folder, time.monotonic() + limit_s, limit_s)
            return tuple((folder / f"{rank}.out").read_text(encoding="utf-8") for rank in range(len(processes)))

    @contextmanager
    def _started(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], cwd: Path | None, folder: Path
    ) -> Iterator[subprocess.Popen[bytes]]:
        # Whoever started them may be killed: the kernel then ends them too. Before whatever else the machine does.
        tied = ("nice", "-n", _NICE, "setpriv", "--pdeathsig", "KILL", "--", *command)
        with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as errors:
            process = subprocess.Popen(
                ["ip", "netns", "exec", f"{self.name}-{rank}", *tied],
                stdout=out,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                cwd=cwd,
                env={**os.environ, **rank_environment(rank, self.network), **environment},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait(self, processes: Sequence["subprocess.Popen[bytes]"], folder: Path, end_s: float, limit_s: float) -> None:
        running = dict(enumerate(processes))
        while running:
            for rank, process in list(running.items()):
                status = process.poll()
                if status is None:
                    continue
                del running[rank]
                if status:
                    lines = (folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace").splitlines()
                    sys.stderr.write("\n".join(lines[-_LAST_LINES:]) + "\n")
                    raise ClusterError(
                        f"rank {rank} ended with status {status}: {lines[-1] if lines else 'no message'}"
                    )
            if running and time.monotonic() > end_s:
                raise ClusterError(f"ranks {', '.join(map(str, running))} had not ended after {limit_s:g} s")
            time.sleep(_POLL_S)


def rank_environment(rank: int, network: Network) -> dict[str, str]:
    """Return what `torch.distributed` looks for in the environment of a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(network.num_ranks),
        "LOCAL_RANK": str(rank % network.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(min(network.ranks_per_node, network.num_ranks)),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": _INTERFACE,
    }


@contextmanager
def cluster(network: Network) -> Iterator[Cluster]:
    """Make a network for the time of a block; what an earlier process left behind is removed first.

    Raises ClusterError where it cannot be made. However the block ends, nothing of it stays.
    """
    remove_leftovers()
    name = f"{_PREFIX}-{os.getpid()}"
    if _own(name):
        raise ClusterError("this process has a cluster already; leave it first")
    try:
        for command in set_up_commands(network, name):
            _call(command)
        yield Cluster(network=network, name=name)
    finally:
        _delete(_own(name))


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are no more, and end what still runs in them."""
    _delete([name for name in _namespaces() if (maker := maker_of(name)) and not Path(f"/proc/{maker}").exists()])


def maker_of(namespace: str) -> int | None:
    """Return the number of the process that made a namespace, None where it is none of ours."""
    found = re.fullmatch(rf"{_PREFIX}-(\d+)-(?:\d+|probe|{_SWITCH})", namespace)
    return int(found[1]) if found else None


def _own(name: str) -> list[str]:
    return [found for found in _namespaces() if found.startswith(f"{name}-")]


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _call(("ip", "netns", "list")).splitlines() if line]


def _delete(names: Sequence[str]) -> None:
    for name in names:
        # A namespace lives as long as a process in it.
        for process in _output(("ip", "netns", "pids", name)).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    for name in names:
        _output(("ip", "netns", "delete", name))


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} failed: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
