"""`main`: the command line of an emitted program."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pase.errors import PaseError, RuntimeFailure
from pase.runtime.loop import Build, train
from pase.runtime.optimisers import OPTIMISERS, make_rule
from pase.runtime.resume import NEWEST, Checkpointing
from pase.runtime.schedules import SCHEDULES, Schedule

__all__ = ["main", "train"]


def main(build: Build, *, num_devices: int, arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; exit with status 1 and one line where that cannot be done.

    build: declares the layers on a program and returns the loss. arguments: by default those of the process.
    """
    options = _parser().parse_args(arguments)
    report = _json_line if options.json else _text_line
    if options.data_generator:
        module = options.data_generator.partition(":")[0]
        sys.stderr.write(f"note: --data-generator executes the code of module {module}\n")
    try:
        train(
            build,
            num_devices=num_devices,
            steps=options.steps,
            dtype=options.dtype,
            seed=options.seed,
            learning_rate=options.learning_rate,
            schedule=_schedule(options),
            rule=make_rule(options.optimizer, {name: getattr(options, name) for name in _RULE_OPTIONS}),
            data_path=options.data,
            generator=options.data_generator,
            checkpointing=_checkpointing(options),
            metrics_path=options.metrics,
            measure=options.measure,
            keep_alive=options.keep_alive,
            report=report,
            progress=True,
        )
    except PaseError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        hint = f"; go on with --checkpoint {options.checkpoint} --resume" if options.checkpoint else ""
        sys.stderr.write(f"\nstopped{hint}\n")
        raise SystemExit(130) from None


_RULE_OPTIONS = ("momentum", "nesterov", "weight_decay", "beta1", "beta2", "epsilon")


def _schedule(options: argparse.Namespace) -> Schedule:
    if options.steps < 1 or not options.learning_rate > 0:
        raise RuntimeFailure(
            f"steps is {options.steps} and the learning rate {options.learning_rate}; both must be above 0"
        )
    return Schedule(
        peak=options.learning_rate,
        kind=options.schedule,
        warmup_steps=options.warmup_steps,
        num_steps=options.steps if options.schedule_steps is None else options.schedule_steps,
        final=options.final_learning_rate,
        decay_every=options.decay_every,
        decay_factor=options.decay_factor,
    )


def _checkpointing(options: argparse.Namespace) -> Checkpointing | None:
    if options.checkpoint is None:
        if options.resume is not None or options.save_every is not None:
            raise RuntimeFailure("--resume and --save-every need --checkpoint DIR, the folder of the checkpoints")
        return None
    every = 100 if options.save_every is None else options.save_every
    return Checkpointing(folder=options.checkpoint, save_every=every, keep=options.keep, resume=options.resume)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train this program on virtual CPU devices.")
    parser.add_argument("--steps", type=int, default=10, help="training steps in all (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--seed", type=int, help="of the initial weights and of synthetic data (default: 0)")
    parser.add_argument("--measure", action="store_true", help="count the bytes that cross devices in a step")
    parser.add_argument(
        "--keep-alive", action="store_true", help="move all that was planned, also replicas that nobody uses"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each event")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="append a line of JSON for each step to a file")
    _add_data(parser.add_argument_group("data"))
    _add_optimiser(parser.add_argument_group("optimiser"))
    _add_rate(parser.add_argument_group("learning rate"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    return parser


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="an .npz file, or a directory of .npy files, with an array [N, ...] for each input; synthetic otherwise",
    )
    group.add_argument(
        "--data-generator",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="a function that yields a dict of arrays for each step; the module's code is executed",
    )


def _add_optimiser(group: Any) -> None:
    group.add_argument("--optimizer", choices=list(OPTIMISERS), default="sgd", help="(default: %(default)s)")
    group.add_argument("--momentum", type=float, help="of momentum (default: 0.9)")
    group.add_argument("--nesterov", action="store_true", default=None, help="of momentum: look ahead")
    group.add_argument("--weight-decay", type=float, help="sgd, momentum: of an L2 term (default: 0); adamw: 0.01")
    group.add_argument("--beta1", type=float, help="of adam and adamw (default: 0.9)")
    group.add_argument("--beta2", type=float, help="of adam and adamw (default: 0.999)")
    group.add_argument("--epsilon", type=float, help="of adam and adamw (default: 1e-8)")


def _add_rate(group: Any) -> None:
    group.add_argument("--learning-rate", type=float, default=0.01, help="its peak (default: %(default)s)")
    group.add_argument("--schedule", choices=list(SCHEDULES), default="constant", help="(default: %(default)s)")
    group.add_argument("--warmup-steps", type=int, default=0, metavar="N", help="rise to the peak over N steps")
    group.add_argument("--schedule-steps", type=int, metavar="N", help="where a cosine ends (default: --steps)")
    group.add_argument("--final-learning-rate", type=float, default=0.0, metavar="RATE", help="where a cosine ends")
    group.add_argument("--decay-every", type=int, default=1000, metavar="N", help="steps of --schedule step")
    group.add_argument("--decay-factor", type=float, default=0.1, help="of --schedule step (default: %(default)s)")


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
        case {"event": "step", "step": step, "loss": loss, "time_s": seconds}:
            text = f"step {step}  loss {loss:.8g}  {seconds:.3f} s"
        case {"event": "done", "step_time_s": seconds, "measured_bytes": None}:
            text = f"median step {seconds:.3f} s"
        case {"step_time_s": seconds, "measured_bytes": moved}:
            text = f"median step {seconds:.3f} s; {moved:,} bytes moved between devices in a step"
        case _:
            raise AssertionError(f"unknown event {event}")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
