"""`Cluster`: the processes that train together, and how a program learns of them: from its environment.

`pase launch` starts every process with the same program and arguments, and with PASE_CLUSTER in its environment: JSON
with the addresses of all tasks, the number of this one, and what to listen on. Task 0, the chief, trains; the others
serve it.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from pase.common.documents import Field
from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.checkpoint import list_checkpoints

VARIABLE = "PASE_CLUSTER"
SCHEMA_VERSION = 1
LOOPBACK = "127.0.0.1"

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_LIST_LIMIT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The tasks of a training.

    addresses: [tasks] host:port. task: this process. bind: the IP address to listen on, 0.0.0.0 or :: for all.
    local_task: number of this process among those of its machine. step_timeout_s: how long a step may take, None for
    ever. Raises RuntimeFailure for what is out of range.
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
            raise RuntimeFailure(f"the addresses {', '.join(self.addresses)} name a process twice; give each its port")
        if not 0 <= self.task < len(self.addresses):
            raise RuntimeFailure(
                f"task {self.task} is none of the {len(self.addresses)} that there are; they count from 0"
            )
        try:
            ip_address(self.bind)
        except ValueError:
            raise RuntimeFailure(
                f"the address to listen on is {self.bind!r}; expected an IP address, such as {LOOPBACK} or 0.0.0.0"
            ) from None
        is_distant = [address for address in self.addresses if not is_loopback(split_address(address)[0])]
        if is_distant and ip_address(self.bind).is_loopback:
            raise RuntimeFailure(
                f"{is_distant[0]} is another host, which cannot reach a process that listens on {self.bind}; name this "
                "host's address with --bind, and only in a network whose every user you trust"
            )

    def to_json(self) -> str:
        """Return the cluster as the environment holds it."""
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "tasks": list(self.addresses),
                "task": self.task,
                "bind": self.bind,
                "local_task": self.local_task,
                "step_timeout_s": self.step_timeout_s,
            }
        )


def cluster_of(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Return the cluster that this process belongs to, None for none; RuntimeFailure where it is not well formed."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RuntimeFailure(f"{VARIABLE} is no JSON ({error}); start the program with pase launch") from None
    field = Field(value, "", RuntimeFailure, VARIABLE)
    version = field["schema_version"].integer()
    if version != SCHEMA_VERSION:
        raise field["schema_version"].fail(f"is {version}; this version of PaSE reads {SCHEMA_VERSION}")
    timeout = field["step_timeout_s"]
    return Cluster(
        addresses=tuple(item.text() for item in field["tasks"].items()),
        task=field["task"].integer(),
        bind=field["bind"].text(),
        local_task=field["local_task"].integer(),
        step_timeout_s=None if timeout.value is None else timeout.number(above=0),
    )


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address; RuntimeFailure where it has not both."""
    found = _ADDRESS.fullmatch(address)
    if not found or not 0 < int(found[2]) < 2**16:
        raise RuntimeFailure(f"{address!r} is no address of a process; expected HOST:PORT, such as node1:4000")
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

    Raises RuntimeFailure with the line where one is none, or where the list is empty.
    """
    path = Path(text_or_path)
    if _ADDRESS.fullmatch(text_or_path.partition(",")[0].strip()) and not path.is_file():
        return tuple(_checked(item.strip(), f"host list {text_or_path}") for item in text_or_path.split(","))
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_LIST_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        raise RuntimeFailure(
            f"cannot read host list {path}: {error}; expected a file with HOST:PORT on each line, or HOST:PORT,…"
        ) from None
    addresses = _addresses(path, text.splitlines())
    if not addresses:
        raise RuntimeFailure(f"host list {path} names no host; expected HOST:PORT on each line")
    return addresses


def _addresses(path: Path, lines: Sequence[str]) -> tuple[str, ...]:
    plain = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, start=1))
    return tuple(_checked(line, f"host list {path}, line {number}") for number, line in plain if line)


def _checked(address: str, where: str) -> str:
    try:
        split_address(address)
    except RuntimeFailure as error:
        raise RuntimeFailure(f"{where}: {error}") from None
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
