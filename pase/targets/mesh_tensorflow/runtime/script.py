"""`main`: the command line of an emitted program."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pase.errors import PaseError, RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.checkpoint import NEWEST, Checkpointing
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster, cluster_of, kept_text
from pase.targets.mesh_tensorflow.runtime.cluster_server import (
    Watch,
    run_in_cluster,
    serve,
    start_server,
    wait_for_others,
)
from pase.targets.mesh_tensorflow.runtime.device_choice import CPU, DEFAULT_GPU_MEMORY_MIB, KINDS, DeviceChoice
from pase.targets.mesh_tensorflow.runtime.devices import Devices, local_devices, share
from pase.targets.mesh_tensorflow.runtime.flags import GROUPS, Flag, Takes, training_options
from pase.targets.mesh_tensorflow.runtime.loop import Build, train

__all__ = ["main", "train"]


def main(build: Build, *, num_devices: int, arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; exit with status 1 and one line where that cannot be done.

    build: declares the layers on a program and returns the loss. arguments: by default those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        cluster = cluster_of()
    except RuntimeFailure as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    if cluster is None:
        _train(build, num_devices, options)
    else:
        run_in_cluster(partial(_take_part, build, num_devices, options, cluster), partial(_last_checkpoint, options))


def _take_part(build: Build, num_devices: int, options: argparse.Namespace, cluster: Cluster) -> None:
    """Train as the chief of a cluster, or serve it."""
    local = local_devices(_choice(options), share(num_devices, len(cluster.addresses)), cluster.local_task)
    devices = start_server(cluster, num_devices, local)
    if cluster.task != 0:
        serve(cluster)
        return
    wait_for_others(cluster)
    watch = Watch(cluster, partial(_last_checkpoint, options))
    watch.start()
    _train(build, num_devices, options, devices, watch)
    watch.stop()


def _choice(options: argparse.Namespace) -> DeviceChoice:
    return DeviceChoice(kind=options.device, virtual=options.virtual, memory_mib=options.gpu_memory)


def _last_checkpoint(options: argparse.Namespace) -> str:
    """Return what to say of the newest checkpoint where a training ends early."""
    return kept_text(options.checkpoint)


def _train(
    build: Build,
    num_devices: int,
    options: argparse.Namespace,
    devices: Devices | None = None,
    watch: Watch | None = None,
) -> None:
    report = _json_line if options.json else _text_line
    if options.data_generator:
        module = options.data_generator.partition(":")[0]
        sys.stderr.write(f"note: --data-generator executes the code of module {module}\n")
    try:
        train(
            build,
            training_options(vars(options)),
            num_devices=num_devices,
            devices=devices or local_devices(_choice(options), num_devices),
            generator=options.data_generator,
            checkpointing=_checkpointing(options),
            metrics_path=options.metrics,
            measure=options.measure,
            keep_alive=options.keep_alive,
            report=watch.reporting(report) if watch else report,
            progress=True,
        )
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        hint = f"; go on with --checkpoint {options.checkpoint} --resume" if options.checkpoint else ""
        sys.stderr.write(f"\nstopped{hint}\n")
        raise SystemExit(130) from None


def _checkpointing(options: argparse.Namespace) -> Checkpointing | None:
    if options.checkpoint is None:
        if options.resume is not None or options.save_every is not None:
            raise RuntimeFailure("--resume and --save-every need --checkpoint DIR, the folder of the checkpoints")
        return None
    every = 100 if options.save_every is None else options.save_every
    return Checkpointing(folder=options.checkpoint, save_every=every, keep=options.keep, resume=options.resume)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train this program on virtual CPU devices, or on GPUs.")
    parser.add_argument("--steps", type=int, default=10, help="training steps in all (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="count the bytes that cross devices in a step")
    parser.add_argument(
        "--keep-alive", action="store_true", help="move all that was planned, also replicas that nobody uses"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each event")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="append a line of JSON for each step to a file")
    parser.add_argument(
        "--data-generator",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="a function that yields a dict of arrays for each step; the module's code is executed",
    )
    for heading, group in GROUPS.items():
        _add_flags(parser.add_argument_group(heading) if heading else parser, group)
    _add_devices(parser.add_argument_group("devices"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    return parser


def _add_devices(group: Any) -> None:
    group.add_argument("--device", choices=list(KINDS), default=CPU, help="(default: %(default)s, virtual ones)")
    group.add_argument("--virtual", action="store_true", help="put several devices on a GPU where there are too few")
    group.add_argument(
        "--gpu-memory",
        type=int,
        default=DEFAULT_GPU_MEMORY_MIB,
        metavar="MIB",
        help="of each of --virtual (default: %(default)s)",
    )


def _add_flags(group: Any, flags: Sequence[Flag]) -> None:
    for flag in flags:
        text = " ".join(filter(None, [flag.text, "(default: %(default)s)" if flag.shows_default else ""]))
        keywords = _KEYWORDS[flag.takes] | ({"metavar": flag.metavar} if flag.metavar else {})
        if flag.choices:
            keywords["choices"] = flag.choices
        group.add_argument(f"--{flag.name}", default=flag.default, help=text, **keywords)


_KEYWORDS: Mapping[Takes, dict[str, Any]] = MappingProxyType(
    {
        Takes.WHOLE: {"type": int},
        Takes.NUMBER: {"type": float},
        Takes.CHOICE: {},
        Takes.PATH: {"type": Path},
        # Without it: not given, so that a rule that has no such option does not object.
        Takes.NOTHING: {"action": "store_true"},
    }
)
"""How argparse is told what follows a flag."""


def _add_checkpoints(group: Any) -> None:
    group.add_argument("--checkpoint", type=Path, metavar="DIR", help="the folder to keep checkpoints in")
    group.add_argument("--save-every", type=int, metavar="N", help="steps (default: 100); the last one is saved too")
    group.add_argument("--keep", type=int, default=3, metavar="K", help="keep the last K (default: %(default)s)")
    group.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="FILE",
        help="go on from the newest checkpoint in DIR, or from a file; begin with step 1 where there is none",
    )


def _json_line(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _text_line(event: dict[str, Any]) -> None:
    match event:
        case {"event": "built", "build_time_s": seconds, "predicted_bytes": moved}:
            text = f"built in {seconds:.1f} s; {moved:,} bytes to move between devices in a step"
        case {"event": "resumed", "step": step}:
            text = f"going on after step {step}"
        case {"event": "saved", "step": step, "path": path}:
            text = f"saved step {step} in {path}"
        case {"event": "step"} if sys.stdout.isatty() and sys.stderr.isatty():
            # The line of progress says it.
            return
        case {"event": "step", "step": step, "loss": loss, "accuracy": accuracy, "time_s": seconds}:
            text = f"step {step}  loss {loss:.8g}  {_right(accuracy)}{seconds:.3f} s"
        case {"event": "tested", "step": step, "loss": loss, "accuracy": accuracy, "num_examples": examples}:
            text = f"tested after step {step}: loss {loss:.8g}  {_right(accuracy)}({examples} examples)"
        case {"event": "done", "step_time_s": seconds, "measured_bytes": None}:
            text = f"median step {seconds:.3f} s"
        case {"step_time_s": seconds, "measured_bytes": moved}:
            text = f"median step {seconds:.3f} s; {moved:,} bytes moved between devices in a step"
        case _:
            raise AssertionError(f"unknown event {event}")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _right(accuracy: float | None) -> str:
    return "" if accuracy is None else f"accuracy {accuracy:.1%}  "
