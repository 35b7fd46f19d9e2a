"""A process's part in a cluster: TensorFlow's server, the wait for the others, and the end."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Never

from pase.easgd.cluster import Cluster, is_up, keep_to_this_machine, port_of
from pase.errors import PaseError, ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import tf

JOB = "worker"
"""The one job of a cluster."""

START_TIMEOUT_S = 300.0
"""How long the processes of a cluster wait for one another to come up."""


def open_server(cluster: Cluster, config: Any) -> Any:
    """Start this task's server, kept to this machine; it lives as long as the process.

    config: of its devices. Raises ProgramError where the port cannot be used, or the server cannot be kept.
    """
    spec = tf.train.ClusterSpec({JOB: list(cluster.addresses)})
    port = port_of(cluster.addresses[cluster.task])
    try:
        # Not started yet: it listens already, but answers nobody until it is known whom.
        server = tf.distribute.Server(
            spec, job_name=JOB, task_index=cluster.task, protocol="grpc", config=config, start=False
        )
    except tf.errors.OpError as error:
        raise ProgramError(
            f"task {cluster.task} cannot listen on port {port}: {_first_line(error)}; choose another port, or run again"
        ) from None
    keep_to_this_machine(port)
    server.start()
    return server


def wait_for_others(cluster: Cluster) -> None:
    """Wait until all tasks are up; ProgramError that names one that is not."""
    begin = time.monotonic()
    for task, address in enumerate(cluster.addresses):
        left = START_TIMEOUT_S - (time.monotonic() - begin)
        if task != cluster.task and not is_up(address, left):
            raise ProgramError(
                f"task {task}, {address}, did not come up in {START_TIMEOUT_S:.0f} s; start the training again"
            )


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
