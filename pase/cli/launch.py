"""`pase launch`: train with an emitted program in several processes, of this machine or of several hosts."""

from ipaddress import ip_address

import click

from pase.cli.output import warn
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK, Cluster, read_hosts
from pase.targets.mesh_tensorflow.runtime.launch import launch_here, launch_task


@click.command(
    "launch",
    context_settings={"allow_interspersed_args": False},
    epilog="Example: pase launch --processes 2 -- train.py --steps 20",
)
@click.option(
    "--processes", type=click.IntRange(min=1), help="Processes of this machine; they share the devices evenly."
)
@click.option("--hosts", metavar="FILE|LIST", help="HOST:PORT of each task, one a line, or with commas between.")
@click.option("--task", type=click.IntRange(min=0), help="Which of --hosts to start here, from 0.")
@click.option(
    "--bind", metavar="ADDRESS", default=LOOPBACK, show_default=True, help="The IP address to listen on; 0.0.0.0: all."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="End the job where a step takes longer than S seconds [never].",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    program: tuple[str, ...],
    processes: int | None,
    hosts: str | None,
    task: int | None,
    bind: str,
    timeout_s: float | None,
) -> int:
    """Run PROGRAM, a file that pase emit wrote, in several processes.

    The devices are spread over them in equal blocks; the losses are those of one process. Task 0 trains and writes.
    When a process dies, the job ends. TensorFlow's server has no authentication, whoever reaches it can run anything
    as you: it takes what is sent to --bind, and no more.
    """
    if (processes is None) == (hosts is None):
        raise click.UsageError("give --processes N for this machine, or --hosts with --task K for several")
    if (task is None) != (hosts is None):
        raise click.UsageError("--hosts and --task belong together")
    if hosts is None:
        assert processes is not None
        warn_of(bind)
        return launch_here(program, num_processes=processes, bind=bind, step_timeout_s=timeout_s)
    assert task is not None
    cluster = Cluster(addresses=read_hosts(hosts), task=task, bind=bind, step_timeout_s=timeout_s)
    warn_of(bind)
    return launch_task(program, cluster)


def warn_of(bind: str) -> None:
    """Warn where a server is to listen on more than this machine."""
    try:
        is_loopback = ip_address(bind).is_loopback
    except ValueError:  # which the cluster says itself
        return
    if not is_loopback:
        warn(
            f"TensorFlow's server will listen on {bind} and has no authentication: whoever can reach it can run "
            "anything as you; use it in a network whose every user you trust"
        )
