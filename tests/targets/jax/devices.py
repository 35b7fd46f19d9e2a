"""A process with eight virtual devices, which stays for the session: JAX computes in it what tests ask for."""

import os
import subprocess
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from pase.common.processes import dying_with_us, end_all

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA tells of moves that it makes by copies of all
    "PYTHONPATH": str(ROOT),
}


class Devices:
    """The process, which is started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, function: str, *arguments: object) -> Any:
        """Return what a function, package.module:name, gives there, or fail with its traceback."""
        if self._process is None:
            self._connection, theirs = Pipe()
            command = [sys.executable, "-W", "error", "-c", f"from {__name__} import serve; serve()"]
            self._process = subprocess.Popen(
                dying_with_us([*command, str(theirs.fileno())]),
                pass_fds=[theirs.fileno()],
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )
            theirs.close()
        self._connection.send((function, arguments))
        assert self._connection.poll(600), f"{function} takes too long"
        result, trace = self._connection.recv()
        assert not trace, trace
        return result

    def end(self) -> None:
        if self._process is not None:
            end_all([self._process])
            self._connection.close()


def serve() -> None:
    """Run what is asked for, one function after the other, until the tests are gone."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        module, _, name = function.partition(":")
        try:
            answer = getattr(import_module(module), name)(*arguments), ""
        except Exception:  # noqa: BLE001
            answer = None, traceback.format_exc()
        connection.send(answer)
