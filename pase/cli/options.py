"""Options and arguments that several commands share."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import wraps
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from pase.cli.output import say, warn
from pase.common.names import short
from pase.costs import COST_MODELS
from pase.costs.schedules import SEARCHED_SCHEDULES
from pase.errors import PlanError
from pase.graph import PRECISIONS, Graph, Scalar
from pase.importers import MODEL_SUFFIXES, is_builtin, load
from pase.machine import AUTO, DEFAULT_MACHINE, Machine, load_machine, override_machine, preset_names
from pase.models import MODELS
from pase.planning.constraints import (
    MODES,
    Constraint,
    DevicesOf,
    combined,
    constraints_schema,
    forbid,
    load_constraints,
    one_mesh,
    pin,
    tie,
)
from pase.planning.plan import Plan
from pase.planning.plan_file import read_plan
from pase.planning.planner import AUTO_NUMBER, Progress, search
from pase.solver.ordering import ORDERINGS
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK, Cluster, read_hosts
from pase.targets.mesh_tensorflow.runtime.launch import local_clusters
from pase.targets.training.options import options_of_all


def complete_models(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the built-in networks whose names begin like that; files are completed, too."""
    return _with_files([name for name in MODELS if name.startswith(incomplete)], incomplete)


def complete_machines(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the machines whose names begin like that; files are completed, too."""
    return _with_files([name for name in (*preset_names(), AUTO) if name.startswith(incomplete)], incomplete)


def complete_algorithms(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the algorithms of training across workers whose names begin like that."""
    # Here: every command has this module, and few of them train.
    from pase.easgd.algorithms import ALGORITHMS

    return [CompletionItem(name) for name in ALGORITHMS if name.startswith(incomplete)]


def _with_files(names: list[str], incomplete: str) -> list[CompletionItem]:
    # First: it empties the list of what was found.
    return [CompletionItem(incomplete, type="file"), *map(CompletionItem, names)]


CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class ByteSize(click.ParamType[int]):
    """A number of bytes, with a unit or without: 800000000, 800MB, 2GiB."""

    name = "size"

    _UNITS = {"": 1, "B": 1, **{f"{u}B": 1000 ** (i + 1) for i, u in enumerate("KMGT")}} | {
        f"{u}iB".upper(): 1024 ** (i + 1) for i, u in enumerate("KMGT")
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)", str(value), re.ASCII)
        size = int(float(found[1]) * self._UNITS.get(found[2].upper(), 0)) if found else 0
        if size < 1:
            self.fail(
                f"{value!r} is not a size; expected a number of bytes or one with a unit, such as 800MB or 2GiB",
                param,
                ctx,
            )
        return size


class WholeNumber(click.IntRange):
    """A whole number, with a message that says so."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,999}\s*", value, re.ASCII) is None:
            self.fail(f"{value!r} is not usable; expected a whole number of {self.min} or more", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArguments:
    """What names a model and the machine that it trains on."""

    model: str
    devices: int
    batch: int | None
    arguments: dict[str, Scalar]
    machine: str
    flop_per_s: float | None
    bandwidth_bytes_per_s: float | None
    precision: str | None = None

    def graph(self, *, is_strict: bool = False) -> Graph:
        """Return the model's graph in the types asked for; is_strict: refuse operators that nothing is known of."""
        graph = load(self.model, batch=self.batch, arguments=self.arguments, is_strict=is_strict)
        return graph.in_precision(self.precision)

    def loaded_machine(self) -> Machine:
        """Return the machine, with the figures that override it."""
        return override_machine(
            load_machine(self.machine),
            flop_per_s=self.flop_per_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
        )


def _key_values(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE")
        if key in found:
            raise click.BadParameter(f"{key!r} is given twice")
        found[key] = text
    return found


Decorator = Callable[[CommandT], CommandT]

model_argument = click.argument("model", shell_complete=complete_models)
plan_argument = click.argument("plan", metavar="PLAN|MODEL", shell_complete=complete_models)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
batch_option = click.option("--batch", "-b", type=WholeNumber(min=1), help="Examples in one step [the model's own].")
arguments_option = click.option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_key_values,
    help="A parameter of the model's builder, such as layers=96; may be repeated.",
)
cost_model_option = click.option(
    "--cost-model", type=click.Choice(sorted(COST_MODELS)), default="paper", show_default=True
)
ordering_option = click.option("--ordering", type=click.Choice(["auto", *ORDERINGS]), default="auto", show_default=True)


class CountOrAuto(WholeNumber):
    """A whole number of 1 or more, or "auto"."""

    def __init__(self) -> None:
        """Take numbers of 1 or more."""
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the word."""
        return value if value == AUTO_NUMBER else super().convert(value, param, ctx)


class Modes(click.ParamType[tuple[str, ...]]):
    """Modes of layers, with commas between; "all" for all of them."""

    name = "modes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return the modes."""
        if not isinstance(value, str):
            return tuple(value)
        found = MODES if value == "all" else tuple(name.strip() for name in value.split(","))
        for name in found:
            if name not in MODES:
                self.fail(f"{name!r} is no mode; expected some of {', '.join(MODES)}, or all", param, ctx)
        return found


step_options: Decorator[Any] = options_of_all(
    click.option(
        "--micro-batches", type=CountOrAuto(), metavar="N|auto", default=1, show_default=True, help="Of a step."
    ),
    click.option("--stages", type=CountOrAuto(), metavar="N|auto", default=1, show_default=True, help="Of a pipeline."),
    click.option(
        "--schedule",
        type=click.Choice(SEARCHED_SCHEDULES),
        default=SEARCHED_SCHEDULES[0],
        show_default=True,
        help="Of its stages; interleaved: each group of devices may have several, in turns.",
    ),
    click.option(
        "--modes",
        type=Modes(),
        metavar="MODE,…|all",
        default=(),
        help=f"What layers may do with weights' state and what backward needs: {', '.join(MODES)}.",
    ),
)
"""Of a step that is searched: its micro-batches, stages, their schedule, and modes of layers."""


def output_option(text: str | None = None, **others: Any) -> Decorator[Any]:
    """Return --output, the path of a file to write; text: its help."""
    return click.option("--output", "-o", type=click.Path(path_type=Path), help=text, **others)


def time_limit_option(text: str, **others: Any) -> Decorator[Any]:
    """Return --time-limit, seconds; text: its help."""
    limit = click.FloatRange(min=0, min_open=True)
    return click.option("--time-limit", "time_limit_s", type=limit, help=text, **others)


def machine_option(machine: str | None, text: str, *, shown: bool | str = True) -> Decorator[Any]:
    """Return --machine; text: its help. shown: the default that the help names, where it is another one."""
    return click.option(
        "--machine",
        default=machine,
        show_default=shown,
        metavar="NAME|FILE",
        shell_complete=complete_machines,
        help=text,
    )


def model_options(
    *, devices_required: bool, machine: str | None = DEFAULT_MACHINE, has_precision: bool = True
) -> Callable[[CommandT], CommandT]:
    """Return a decorator that adds the options of `ModelArguments`, devices first.

    machine: where none is given. has_precision: whether the types to train in can be chosen.
    """
    return options_of_all(
        click.option(
            "--devices", "-p", type=WholeNumber(min=1), required=devices_required, help="Number of devices, p."
        ),
        batch_option,
        arguments_option,
        machine_option(machine, "Preset, .toml file, or auto: the GPUs of this machine.", shown=DEFAULT_MACHINE),
        click.option(
            "--flops", "flop_per_s", type=float, metavar="FLOP/s", help="Peak of one device, instead of the machine's."
        ),
        click.option(
            "--bandwidth",
            "bandwidth_bytes_per_s",
            type=float,
            metavar="BYTES/s",
            help="Of every link, instead of the machine's.",
        ),
        *[click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Types to train in [the model's own].")]
        * has_precision,
    )


def plan_options(command: CommandT) -> CommandT:
    """Add the options of a command that takes a plan or a model: those of `ModelArguments`, none of them needed."""
    return model_options(devices_required=False, machine=None)(command)


def chosen_plan(
    plan_or_model: str, model: Mapping[str, Any], on_progress: Progress | None = None, *, keeps_machine: bool = True
) -> Plan:
    """Return the plan in a file, or the best one for a model on so many devices; model: what `plan_options` gave.

    A model without a number of devices is wrong usage. keeps_machine: whether a plan has no use for another machine.
    """
    if _is_plan(plan_or_model):
        others = ["devices", "batch", "arguments", "precision", "flop_per_s", "bandwidth_bytes_per_s"]
        if any(model[name] for name in [*others, *["machine"] * keeps_machine]):
            warn("a plan names its own model and devices: --devices, --batch, --arg and others are not used")
        return read_plan(plan_or_model)
    if model["devices"] is None:
        if is_builtin(plan_or_model) and plan_or_model not in MODELS:
            raise PlanError(
                f"there is no plan file {short(plan_or_model)!r}, and no built-in network of that name either"
            )
        raise click.UsageError(f"--devices is needed to search a strategy for model {short(plan_or_model)!r}")
    own = {field.name: model[field.name] for field in fields(ModelArguments) if field.name in model}
    chosen = ModelArguments(**{**own, "model": plan_or_model, "machine": model["machine"] or DEFAULT_MACHINE})
    return search(chosen.graph(), chosen.devices, machine=chosen.loaded_machine(), on_progress=on_progress)


def _is_plan(text: str) -> bool:
    """Return whether a word names a file that is no model's."""
    path = Path(text)
    suffix = path.suffix.lower()
    with suppress(OSError, ValueError):  # of names that no file can have
        return suffix == ".json" or (suffix not in MODEL_SUFFIXES and path.exists() and not path.is_dir())
    return False


def check_writable(path: Path) -> None:
    """Raise PlanError unless a file can be made at a path: found out before a long search, not after it."""
    folder = path.parent
    if path.is_dir():
        raise PlanError(f"{path} is a folder; name a file to write to")
    if not folder.is_dir():
        raise PlanError(f"{path} cannot be written: folder {folder} does not exist; make it first")
    if not os.access(path if path.exists() and not path.is_file() else folder, os.W_OK):
        raise PlanError(f"{path} cannot be written: you may not write to {folder}; name another folder")


def _warn_of(bind: str) -> None:
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


def _about(option: str, texts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the layers that an option's values, 'LAYERS: TEXT', speak of, the text and what messages call it."""
    for each in texts:
        layers, colon, text = map(str.strip, each.rpartition(":"))
        if not colon or not layers:
            raise click.BadParameter(f"{each!r} is not of the form 'LAYERS: …'", param_hint=option)
        yield layers, text, f"{option} {each!r}"


def _of_all_layers(text: str) -> str:
    """Return what is forbidden with its layers: modes by themselves are of all."""
    return f"*: {text}" if text and set(text.replace(",", " ").split()) <= set(MODES) else text


def _axes(text: str) -> dict[str, int]:
    found = [part.partition("=") for part in text.replace(",", " ").split()]
    if not found or not all(name and re.fullmatch(r"[1-9][0-9]{0,8}", size) for name, _, size in found):
        raise click.BadParameter(f"{text!r} is not of the form data=8,model=4", param_hint="--mesh")
    return {name: int(size) for name, _, size in found}


def _numbers(text: str, option: str) -> Iterator[int]:
    for part in text.replace(",", " ").split():
        found = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part)
        if not found:
            raise click.BadParameter(f"{part!r} is not a device; expected such as 0 2 4-7", param_hint=option)
        yield from range(int(found[1]), int(found[2] or found[1]) + 1)


def _print_schema(context: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        for line in constraints_schema().splitlines():
            say(line)
        context.exit()


def constraint_options(command: CommandT) -> CommandT:
    """Add the options that say what a strategy must keep to; the command is given them together, as `constraints`."""

    @wraps(command)
    def constrained(
        *,
        pins: Sequence[str],
        forbidden: Sequence[str],
        ties: Sequence[str],
        mesh: str | None,
        placed: Sequence[str],
        constraints: Path | None,
        **others: Any,
    ) -> Any:
        found: list[Constraint] = [
            *(load_constraints(constraints) if constraints else ()),
            *(pin(*each) for each in _about("--pin", pins)),
            *(forbid(*each) for each in _about("--forbid", map(_of_all_layers, forbidden))),
            *(tie(text, f"--tie {text!r}") for text in ties),
            *([one_mesh(_axes(mesh), f"--mesh {mesh}")] if mesh else []),
        ]
        for layers, text, where in _about("--devices-of", placed):
            found.append(DevicesOf(layers=(layers,), devices=tuple(_numbers(text, "--devices-of")), where=where))
        return command(constraints=combined(found), **others)

    options: Decorator[Any] = options_of_all(
        click.option(
            "--pin", "pins", multiple=True, metavar="'LAYERS: n=4 c=2'", help="Have this configuration, or 'zero2'."
        ),
        click.option(
            "--forbid", "forbidden", multiple=True, metavar="'LAYERS: h w'", help="Leave these dims whole, or 'zero3'."
        ),
        click.option("--tie", "ties", multiple=True, metavar="'LAYERS, LAYERS'", help="Have equal configurations."),
        click.option("--mesh", metavar="data=8,model=4", help="Split all layers along the axes of one mesh."),
        click.option("--devices-of", "placed", multiple=True, metavar="'LAYER: 0 2 1 3'", help="Of its parts."),
        click.option(
            "--constraints", type=click.Path(path_type=Path), metavar="FILE", help="All of these, from a .toml file."
        ),
        click.option(
            "--constraints-schema",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_schema,
            help="Print the JSON Schema of such files.",
        ),
    )
    return cast(CommandT, options(constrained))


def process_options(*, processes: str, hosts: str, timeout: str, least: int | None = 1) -> Decorator[Any]:
    """Return --processes, --hosts, --task, --bind and --timeout, which `chosen_clusters` reads.

    processes, hosts, timeout: their help. least: of processes; None where another check is made.
    """
    return options_of_all(
        click.option("--processes", type=click.IntRange(min=least), metavar="N", help=processes),
        click.option("--hosts", metavar="FILE|LIST", help=hosts),
        click.option("--task", type=click.IntRange(min=0), help="Which of --hosts to start here, from 0."),
        click.option(
            "--bind",
            metavar="ADDRESS",
            default=LOOPBACK,
            show_default=True,
            help="The IP address to listen on; 0.0.0.0: all.",
        ),
        click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), metavar="S", help=timeout),
    )


def chosen_clusters(
    values: Mapping[str, Any], num_tasks: Callable[[int], int] = lambda processes: processes
) -> list[Cluster]:
    """Return what each task that is to be started here is to know, from the values of `process_options`.

    num_tasks: for so many processes. What a server lets in that listens on more than this machine is warned of; options
    that do not fit together are wrong usage.
    """
    processes, hosts, task, bind = (values[name] for name in ("processes", "hosts", "task", "bind"))
    if (processes is None) == (hosts is None):
        raise click.UsageError("give --processes N for this machine, or --hosts with --task K for several")
    if (task is None) != (hosts is None):
        raise click.UsageError("--hosts and --task belong together")
    if hosts is None:
        found = local_clusters(num_tasks(processes), bind=bind, step_timeout_s=values["timeout_s"])
    else:
        found = [Cluster(addresses=read_hosts(hosts), task=task, bind=bind, step_timeout_s=values["timeout_s"])]
    _warn_of(bind)
    return found
