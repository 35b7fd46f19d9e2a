"""Options and arguments that several commands share, and their common output about plans."""

import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pase.analysis.figures import CostFigures
from pase.cli.output import print_table, say, say_all, warn
from pase.common.containers import FrozenDict
from pase.common.options import PATH, POSITIVE, SECONDS, Decorator, option, options_of_all
from pase.common.words import quantity, short
from pase.costs import COST_MODELS, OPTIMISER_STATE
from pase.errors import ModelError, PlanError
from pase.graph import PRECISIONS, Graph, Scalar
from pase.importers import MODEL_SUFFIXES, is_builtin, load
from pase.importers.front_end import is_factory
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
from pase.planning.planner import AUTO_NUMBER, Progress, search, usable_bytes
from pase.planning.stages import SEARCHED_SCHEDULES
from pase.solver.ordering import ORDERINGS
from pase.views.drawing.plans import repeated_blocks

# -- shell completion


def _completed(names: Callable[[], Iterable[str]], *, files: bool = True) -> Callable[..., list[CompletionItem]]:
    """Return the completion of one of some names, or of a file."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # First, as it clears the results.
        found = [CompletionItem(incomplete, type="file")] * files
        return found + [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return complete


def _algorithms() -> Iterable[str]:
    # Imported here: every command imports this module, and few of them train.
    from pase.easgd.algorithms import ALGORITHMS

    return ALGORITHMS


complete_models = _completed(lambda: MODELS)
complete_machines = _completed(lambda: (*preset_names(), AUTO))
complete_algorithms = _completed(_algorithms, files=False)


# -- parsing


def byte_size(text: str) -> int:
    """Return a number of bytes, given with or without a unit: 800000000, 800MB, 2GiB."""
    units = {"": 1, "B": 1} | {f"{u}B": 1000 ** (i + 1) for i, u in enumerate("KMGT")}
    units |= {f"{u}IB": 1024 ** (i + 1) for i, u in enumerate("KMGT")}
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)", text, re.ASCII)
    size = int(float(found[1]) * units.get(found[2].upper(), 0)) if found else 0
    if size < 1:
        raise click.BadParameter(
            f"{text!r} is not a size; expected a number of bytes or one with a unit, such as 800MB or 2GiB"
        )
    return size


def whole_numbers(value: Any) -> tuple[int, ...]:
    """Return integers separated by commas."""
    words = [word.strip() for word in str(value).split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", word, re.ASCII) for word in words):
        raise click.BadParameter(f"{value!r} is not a list of numbers; expected one such as 1,2,4,8")
    return tuple(map(int, words))


def _count_or_auto(value: Any) -> Any:
    return value if value == AUTO_NUMBER else POSITIVE(value)


def _modes(text: str) -> tuple[str, ...]:
    found = MODES if text == "all" else tuple(name.strip() for name in text.split(",") if text)
    for name in found:
        if name not in MODES:
            raise click.BadParameter(f"{name!r} is not a mode; expected some of {', '.join(MODES)}, or all")
    return found


def key_values(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, Scalar]:
    """Return the values of a repeatable option of the form KEY=VALUE."""
    found: dict[str, Scalar] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE")
        if key in found:
            raise click.BadParameter(f"{key!r} is given twice")
        found[key] = text
    return found


def check_writable(path: Path) -> None:
    """Raise PlanError unless a file can be created at a path; called before a long search instead of after it."""
    folder = path.parent
    if path.is_dir():
        raise PlanError(f"{path} is a folder; name a file to write to")
    if not folder.is_dir():
        raise PlanError(f"{path} cannot be written: folder {folder} does not exist; make it first")
    if not os.access(path if path.exists() and not path.is_file() else folder, os.W_OK):
        raise PlanError(f"{path} cannot be written: you may not write to {folder}; name another folder")


def writable(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Return a path after `check_writable`."""
    if path is not None:
        check_writable(path)
    return path


# -- options


def choice_option(name: str, choices: Iterable[str], *names: str, **attributes: Any) -> Decorator:
    """Return an option whose value is one of some names."""
    return option(name, *names, type=click.Choice(list(choices)), **attributes)


def flag(*names: str, **attributes: Any) -> Decorator:
    """Return an option without a value."""
    return option(*names, is_flag=True, **attributes)


def schema_option(schema: Callable[[], str], what: str, name: str = "--schema") -> Decorator:
    """Return an option that prints the JSON Schema of `what` and exits."""

    def show(context: click.Context, _param: click.Parameter, wanted: bool) -> None:
        if wanted:
            say_all(schema().splitlines())
            context.exit()

    return flag(name, is_eager=True, expose_value=False, callback=show, help=f"Print the JSON Schema of {what}.")


def output_option(text: str | None = None, **attributes: Any) -> Decorator:
    """Return --output, the path of a file to write; `text` is its help."""
    given: dict[str, Any] = {"type": PATH, "callback": writable, "help": text}
    return option("--output", "-o", **given | attributes)


def time_limit_option(text: str, **attributes: Any) -> Decorator:
    """Return --time-limit, in seconds; `text` is its help."""
    return option("--time-limit", "time_limit_s", type=SECONDS, help=text, **attributes)


def machine_option(machine: str | None, text: str, **attributes: Any) -> Decorator:
    """Return --machine; `text` is its help."""
    given: dict[str, Any] = {"default": machine, "metavar": "NAME|FILE", "shell_complete": complete_machines}
    return option("--machine", help=text, **given | attributes)


model_argument = click.argument("model", shell_complete=complete_models)
plan_argument = click.argument("plan", metavar="PLAN|MODEL", shell_complete=complete_models)
json_option = flag("--json", "as_json", help="Print one JSON object on standard output.")
all_layers_option = flag(
    "--all-layers", "shows_all", help="Print every layer, where a block that repeats is printed once."
)
batch_option = option("--batch", "-b", type=POSITIVE, help="Examples in one step [the model's own].")
arguments_option = option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="KEY=VALUE",
    callback=key_values,
    help="A parameter of the model's builder, such as layers=96; may be repeated.",
)
cost_model_option = choice_option("--cost-model", sorted(COST_MODELS), default="paper")
own_cost_model_option = choice_option("--cost-model", sorted(COST_MODELS), show_default="a plan's own, or paper")
ordering_option = choice_option("--ordering", ["auto", *ORDERINGS], default="auto")
OF_MACHINE = "machine"
"""Value of a size: what a step may use of the devices' memory, with some left to the framework."""


def _size_or_machine(text: str) -> int | str:
    return text if text == OF_MACHINE else byte_size(text)


memory_per_device_option = option(
    "--memory-per-device",
    "device_memory_bytes",
    type=_size_or_machine,
    metavar="SIZE|machine",
    help="Most that a device may need, such as 8GB, or nine tenths of what the machine's have.",
)


def device_memory_bytes(value: int | str | None, machine: Machine) -> int | None:
    """Return the limit that a value of --memory-per-device denotes."""
    return usable_bytes(machine) if isinstance(value, str) else value


keep_batch_option = flag("--keep-batch", help="Go on although the batch cannot be split.")
strict_option = flag("--strict", help="Refuse a model with an operator that nothing is known of.")


def optimiser_option(**attributes: Any) -> Decorator:
    """Return --optimizer of a search."""
    return choice_option("--optimizer", OPTIMISER_STATE, "optimiser", help="Its state counts as memory.", **attributes)


def _step_options(*, has_defaults: bool) -> Decorator:
    """Return the options of a step's structure: micro-batches, stages, their schedule, and layer modes.

    has_defaults: whether they have the defaults of a search; otherwise options that are not given are None.
    """

    def default(value: object) -> dict[str, Any]:
        return {"default": value} if has_defaults else {}

    return options_of_all(
        option("--micro-batches", type=_count_or_auto, metavar="N|auto", help="Of a step.", **default(1)),
        option("--stages", type=_count_or_auto, metavar="N|auto", help="Of a pipeline.", **default(1)),
        choice_option(
            "--schedule",
            SEARCHED_SCHEDULES,
            help="Of its stages; interleaved: each group of devices may have several, in turns. zero_bubble is of "
            "plans made by hand.",
            **default(SEARCHED_SCHEDULES[0]),
        ),
        option(
            "--modes",
            type=_modes,
            metavar="MODE,…|all",
            show_default=False,
            help=f"What layers may do with weights' state and what backward needs: {', '.join(MODES)}.",
            **default(""),
        ),
    )


step_options = _step_options(has_defaults=True)


def other_search_options(command: Any) -> Any:
    """Add search options to a command that takes plans; those that are given are passed to it as `settings`."""

    @wraps(command)
    def with_settings(*given: Any, **values: Any) -> Any:
        names = "cost_model", "micro_batches", "stages", "schedule", "modes"
        own = {name: values.pop(name) for name in names}
        settings = {name: value for name, value in own.items() if value is not None}
        return command(*given, settings=settings, **values)

    return options_of_all(own_cost_model_option, _step_options(has_defaults=False))(with_settings)


# -- models and plans


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArguments:
    """The model and the machine of a command; num_devices, machine: None where none is given."""

    model: str | None = None
    num_devices: int | None
    batch: int | None
    arguments: dict[str, Scalar]
    machine: str | None
    flop_per_s: float | None
    bandwidth_bytes_per_s: float | None
    precision: str | None = None

    @property
    def devices(self) -> int:
        """The number of devices; UsageError where none is given."""
        if self.num_devices is None:
            raise click.UsageError(f"--devices is needed to search a strategy for model {short(self.model or '')!r}")
        return self.num_devices

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given."""
        return not any(getattr(self, each.name) for each in fields(self))

    def graph(self, *, is_strict: bool = False) -> Graph:
        """Return the model's graph in the requested types; is_strict: reject unknown operators."""
        graph = load(self.model or "", batch=self.batch, arguments=self.arguments, is_strict=is_strict)
        return graph.in_precision(self.precision)

    def reload(self, batch: int) -> Graph:
        """Return the model's graph with another batch, as searches request it."""
        return replace(self, batch=batch).graph()

    def loaded_machine(self, known: Machine | None = None) -> Machine:
        """Return the machine with overridden figures; by default the known one, or the default machine."""
        own = load_machine(self.machine or DEFAULT_MACHINE) if self.machine or known is None else known
        return override_machine(own, flop_per_s=self.flop_per_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)


def model_options(*, devices_required: bool = False, has_precision: bool = True) -> Decorator:
    """Return the decorator that adds the options of `ModelArguments`, which the command receives as `model`.

    has_precision: whether the types to train in can be chosen.
    """
    options = options_of_all(
        option(
            "--devices", "-p", "num_devices", type=POSITIVE, required=devices_required, help="Number of devices, p."
        ),
        batch_option,
        arguments_option,
        machine_option(None, "Preset, .toml file, or auto: the GPUs of this machine.", show_default=DEFAULT_MACHINE),
        option(
            "--flops", "flop_per_s", type=float, metavar="FLOP/s", help="Peak of one device, instead of the machine's."
        ),
        option(
            "--bandwidth",
            "bandwidth_bytes_per_s",
            type=float,
            metavar="BYTES/s",
            help="Of every link, instead of the machine's.",
        ),
        *[choice_option("--precision", PRECISIONS, help="Types to train in [float32].")] * has_precision,
    )

    def decorate(command: Any) -> Any:
        @wraps(command)
        def with_model(*given: Any, **values: Any) -> Any:
            own = {each.name: values.pop(each.name) for each in fields(ModelArguments) if each.name in values}
            return command(*given, model=ModelArguments(**own), **values)

        return options(with_model)

    return decorate


def chosen_plan(
    plan_or_model: str,
    model: ModelArguments,
    on_progress: Progress | None = None,
    *,
    keeps_machine: bool = True,
    settings: Mapping[str, Any] = FrozenDict(),
) -> Plan:
    """Return the plan in a file, or the best one for a model on the given number of devices.

    A model without a number of devices is a usage error.

    Args:
        plan_or_model: A plan file, or a model.
        model: The model's options.
        on_progress: Called with progress.
        keeps_machine: Whether to warn that a plan ignores another machine.
        settings: Settings of the search.
    """
    if is_plan_file(plan_or_model):
        return given_plan(plan_or_model, model if keeps_machine else replace(model, machine=None))
    if model.num_devices is None and is_builtin(plan_or_model) and plan_or_model not in MODELS:
        raise PlanError(f"there is no plan file {short(plan_or_model)!r}, and no built-in network of that name either")
    chosen = replace(model, model=plan_or_model)
    devices = chosen.devices
    return search(
        chosen.graph(),
        devices,
        machine=chosen.loaded_machine(),
        options=settings,
        on_progress=on_progress,
        reload=chosen.reload,
    )


def given_plan(path: str, model: ModelArguments) -> Plan:
    """Return the plan in a file, and warn of options that it ignores."""
    if not model.is_empty:
        warn("a plan names its own model and devices: --devices, --batch, --arg and others are not used")
    # Imported here because searches read no plan file.
    from pase.planning.plan_file import read_plan

    return read_plan(path)


def checked_factory(name: str) -> str:
    """Return the name of a factory; ModelError for an invalid one."""
    if not is_factory(name):
        raise ModelError(
            f"{short(name)!r} is not a factory; give package.module:function, which returns a module and its inputs"
        )
    return name


def is_plan_file(text: str) -> bool:
    """Return whether a word names a file that is not a model file."""
    path = Path(text)
    suffix = path.suffix.lower()
    with suppress(OSError, ValueError):  # invalid file names
        return suffix == ".json" or (suffix not in MODEL_SUFFIXES and path.exists() and not path.is_dir())
    return False


# -- constraints


def _about(option: str, texts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield, for the values 'LAYERS: TEXT' of an option, the layers, the text and the name for messages."""
    for each in texts:
        layers, colon, text = map(str.strip, each.rpartition(":"))
        if not colon or not layers:
            raise click.BadParameter(f"{each!r} is not of the form 'LAYERS: …'", param_hint=option)
        yield layers, text, f"{option} {each!r}"


def _of_all_layers(text: str) -> str:
    """Return the text with its layers: modes without layers apply to all."""
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


def constraint_options(command: Any) -> Any:
    """Add the options for constraints on a strategy, which the command receives together as `constraints`."""

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

    options = options_of_all(
        option(
            "--pin", "pins", multiple=True, metavar="'LAYERS: n=4 c=2'", help="Have this configuration, or 'zero2'."
        ),
        option(
            "--forbid", "forbidden", multiple=True, metavar="'LAYERS: h w'", help="Leave these dims whole, or 'zero3'."
        ),
        option("--tie", "ties", multiple=True, metavar="'LAYERS, LAYERS'", help="Have equal configurations."),
        option("--mesh", metavar="data=8,model=4", help="Split all layers along the axes of one mesh."),
        option("--devices-of", "placed", multiple=True, metavar="'LAYER: 0 2 1 3'", help="Of its parts."),
        option("--constraints", type=PATH, metavar="FILE", help="All of these, from a .toml file."),
        schema_option(constraints_schema, "such files", "--constraints-schema"),
    )
    return options(constrained)


# -- plans, and tables with a row for each layer, in which a block that repeats stands once


def headline(plan: Plan, machine: Machine | None = None) -> str:
    """Describe what is planned on which devices; `machine` replaces the plan's."""
    machine = machine or plan.machine
    return f"{plan.graph.name} on {plan.num_devices} × {machine.device.name} ({machine.name})"


def overlapped_text(plan: Plan, figures: CostFigures) -> str:
    """Describe the share of a plan's communication that overlaps with compute, "" for none."""
    if not figures.overlapped:
        return ""
    overlapped, overlappable = (quantity(cost, plan.cost_unit) for cost in (figures.overlapped, figures.overlappable))
    mean = ", mean over all devices" if plan.num_groups > 1 else ""
    return f"{overlapped} of {overlappable} of communication that can overlap with compute{mean}"


def costs_note(plan: Plan, figures: CostFigures, *, has_shares: bool = True) -> str:
    """Return a note on the meaning of the costs and shares in a table of layers, "" if none is needed."""
    notes = []
    if plan.micro_batches > 1:
        notes.append(f"Iteration spaces are of one of {plan.micro_batches} micro-batches, costs of all of them.")
    if plan.num_groups > 1:
        shares = ", shares those of the time of all devices" if has_shares else ""
        notes.append(f"Costs are those on the devices of a layer's stage{shares}.")
    if figures.overlapped:
        shares = ", shares do not" if has_shares else ""
        notes.append(f"Costs include communication that overlaps with compute{shares}.")
    return " ".join(notes)


def total_cost_text(plan: Plan) -> str:
    """Return a plan's cost and, if it is in FLOP, the corresponding seconds at the peak of its machine."""
    cost = quantity(plan.total_cost, plan.cost_unit)
    if plan.cost_unit != "FLOP":
        return cost
    return f"{cost}, {quantity(plan.total_cost / plan.machine.peak_flop_per_s(), 's')} at a device's peak"


def times_text(count: int) -> str:
    """Return a number of repetitions for a table."""
    return f"× {count}"


def print_layers(
    graph: Graph,
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    alike: Sequence[Hashable],
    *,
    shows_all: bool,
    flag: str = "--all-layers",
) -> None:
    """Print a table with a row for each layer of a graph, its name first.

    Consecutive repeated blocks are printed once, indented below their number, if all cells except names, and their
    entries of `alike`, are equal.

    Args:
        graph: The graph.
        headers: Headers of the columns.
        rows: Row of each layer.
        alike: [layers] further values that must be equal.
        shows_all: Print every row.
        flag: Option that sets `shows_all`, for the note.
    """
    signatures = [(sign, *row[1:]) for sign, row in zip(alike, rows, strict=True)]
    blocks = () if shows_all else repeated_blocks(graph, signatures)
    shown: list[Sequence[object]] = []
    at = 0
    for block in blocks:
        shown += [*rows[at : block.first], [times_text(block.count), *[""] * (len(headers) - 1)]]
        shown += [[f"  {name}", *others] for name, *others in rows[block.first : block.first + block.period]]
        at = block.end
    print_table(headers, [*shown, *rows[at:]])
    if blocks:
        say()
        say(
            "× n: the block of layers below it comes n times in a row, with what one of them costs; "
            f"{flag} prints each."
        )
