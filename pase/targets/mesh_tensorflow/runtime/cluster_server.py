"""A process's part in a cluster: TensorFlow's server, the wait for the others, and the watch over them."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Never

from pase.errors import PaseError, ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.cluster import PROBE_EVERY_S, Cluster, is_lost, is_up, keep_to, split_address
from pase.targets.mesh_tensorflow.runtime.devices import JOB, Devices, spread

START_TIMEOUT_S = 300.0
"""How long the processes of a cluster wait for one another to come up."""


def start_server(cluster: Cluster, num_devices: int, local: Devices) -> Devices:
    """Start this task's server and return the devices of the cluster.

    local: this task's share of the devices. Raises ProgramError where the port cannot be used, or where the server
    cannot be kept to the address that it is to listen on.
    """
    server = open_server(cluster, local.config())
    return spread(num_devices, len(cluster.addresses), local, server.target)


def open_server(cluster: Cluster, config: Any) -> Any:
    """Start this task's server, kept to the address that it is to listen on; it lives as long as the process.

    config: of its devices. Raises ProgramError where the port cannot be used, or the server cannot be kept.
    """
    spec = tf.train.ClusterSpec({JOB: list(cluster.addresses)})
    _, port = split_address(cluster.addresses[cluster.task])
    try:
        # Not started yet: it listens already, but answers nobody until it is known whom.
        server = tf.distribute.Server(
            spec, job_name=JOB, task_index=cluster.task, protocol="grpc", config=config, start=False
        )
    except tf.errors.OpError as error:
        raise ProgramError(
            f"task {cluster.task} cannot listen on port {port}: {_first_line(error)}; choose another port, or run again"
        ) from None
    keep_to(cluster.bind, port)
    server.start()
    return server


def serve(cluster: Cluster) -> None:
    """Serve the chief until it is gone."""
    if not is_up(cluster.addresses[0], START_TIMEOUT_S):
        raise ProgramError(f"task 0, {cluster.addresses[0]}, did not come up in {START_TIMEOUT_S:.0f} s")
    while not is_lost(cluster.addresses[0]):
        time.sleep(PROBE_EVERY_S)


def wait_for_others(cluster: Cluster) -> None:
    """Wait until all tasks are up; ProgramError that names one that is not."""
    begin = time.monotonic()
    for task, address in enumerate(cluster.addresses):
        left = START_TIMEOUT_S - (time.monotonic() - begin)
        if task != cluster.task and not is_up(address, left):
            raise ProgramError(
                f"task {task}, {address}, did not come up in {START_TIMEOUT_S:.0f} s; start it on its host with the "
                f"same command and list of hosts, and --task {task}"
            )


@dataclass(slots=True)
class Watch:
    """Task 0 watches over all others, these over task 0: TensorFlow itself would wait for ever.

    Here the process ends where one that it watches over is gone, or a step takes too long. last_checkpoint: what to say
    of the checkpoint that is left, "" for nothing.
    """

    cluster: Cluster
    last_checkpoint: Callable[[], str]
    _step_began_s: float | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Watch from now on, in a thread."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: the training is over, well or not, and the others may go."""
        self._over.set()

    def reporting(self, report: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Return a function that reports an event, and notes that the time of a step begins again."""

        def told(event: dict[str, Any]) -> None:
            self._step_began_s = None if event["event"] == "done" else time.monotonic()
            report(event)

        return told

    def _run(self) -> None:
        left = {0} if self.cluster.task != 0 else set(range(1, len(self.cluster.addresses)))
        while not self._over.wait(PROBE_EVERY_S):
            for task in sorted(left):
                if is_lost(self.cluster.addresses[task]) and not self._over.is_set():
                    left.discard(task)
                    self.lose(task, f"{self.called(task)} ended or cannot be reached")
            if self.cluster.task == 0 and self.cluster.step_timeout_s is not None:
                self.look_for_late(self.cluster.step_timeout_s)

    def called(self, task: int) -> str:
        """Return what messages call a task."""
        return f"task {task}, {self.cluster.addresses[task]},"

    def lose(self, task: int, what: str) -> None:
        """Do what is to be done without a task; what: became of it."""
        self.fail(what)

    def look_for_late(self, limit_s: float) -> None:
        """Do what is to be done where a step takes longer than a limit."""
        if self._step_began_s is not None and time.monotonic() - self._step_began_s > limit_s:
            self.fail(too_late(limit_s))

    def fail(self, problem: str) -> None:
        """End the process, unless all is over."""
        if not self._over.is_set():
            sys.stderr.write(f"error: {problem}{self.last_checkpoint()}\n")
            leave(1)


def too_late(limit_s: float) -> str:
    """Return what is said where a step takes longer than a limit."""
    return f"no step ended within {limit_s:g} s; a process may be stopped, or --timeout is too short"


def run_in_cluster(action: Callable[[], None], last_checkpoint: Callable[[], str]) -> Never:
    """Do a process's part and end the process, without TensorFlow's tidying up: it waits for processes that are gone.

    What goes wrong in TensorFlow is one line: most likely another process ended.
    """
    # Left from within the handlers: at their end the error goes, and with it the session, which waits too.
    try:
        action()
    except SystemExit as left:
        leave(left.code if isinstance(left.code, int) else int(left.code is not None))
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        leave(1)
    except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError) as error:
        sys.stderr.write(f"error: a process of the cluster is gone: {_first_line(error)}{last_checkpoint()}\n")
        leave(1)
    except KeyboardInterrupt:
        leave(130)
    except Exception:  # noqa: BLE001 the process ends here, and says why
        traceback.print_exc()
        leave(1)
    leave(0)


def leave(status: int) -> Never:
    """End the process at once, whatever its threads wait for; what was written is written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # whoever read it is gone
            status = status or 1
    os._exit(status)


def _first_line(error: Any) -> str:
    """Return the line of TensorFlow's message that says something."""
    lines = [line.strip() for line in str(error.message).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Graph execution error", "==="))]
    return said[0] if said else type(error).__name__
