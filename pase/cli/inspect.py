"""List what is available (`pase models`, `pase machines`), and show an imported model (`pase inspect`)."""

import textwrap
from typing import TYPE_CHECKING, Any

import click

from pase.cli.options import (
    arguments_option,
    batch_option,
    complete_machines,
    flag,
    json_option,
    model_argument,
    print_layers,
    schema_option,
    strict_option,
)
from pase.cli.output import print_facts, print_json, print_table, say, warn
from pase.cli.progress import READING, progress
from pase.common.documents import attributes
from pase.common.options import option
from pase.common.words import binary, percentage, quantity, visible
from pase.graph import Graph, Operator
from pase.importers import is_builtin, load
from pase.machine import Kernels, Machine, load_machine, machine_document, machine_schema, preset_names
from pase.machine.machine import BY_LEVEL, KERNELS
from pase.models import MODELS
from pase.views.drawing.plans import extents_text

if TYPE_CHECKING:
    from pase.importers.frameworks import ImportedModel

_SHOWN_VERTICES = 60
"""For larger models, repeated layers are listed once unless --all is given."""

_WIDTH = 100
"""Width in columns to which long sources are folded."""


@click.command("inspect", epilog="Example: pase inspect package.module:factory --batch 32")
@model_argument
@batch_option
@arguments_option
@strict_option
@flag("--all", "shows_all", help="List every vertex of a model whose layers repeat.")
@json_option
def inspect_command(
    model: str, batch: int | None, arguments: dict[str, Any], strict: bool, shows_all: bool, as_json: bool
) -> None:
    """Show the import of MODEL: operators after each pass, parameters, FLOP, vertices, and what is not understood."""
    found: ImportedModel | None = None
    with progress(READING):
        if is_builtin(model):
            graph = load(model, batch=batch, arguments=arguments)
        else:
            # Imported here because it loads the modules that lower graphs.
            from pase.importers.frameworks import import_model

            found = import_model(model, batch=batch, arguments=arguments, is_strict=strict)
            graph = found.graph
    if as_json:
        print_json(_document(graph, found))
    else:
        _print(graph, found, shows_all=shows_all)


def _document(graph: Graph, found: "ImportedModel | None") -> dict[str, Any]:
    scopes = found.lowered.scopes if found else {}
    imported = found and {
        "passes": [{"name": name, "operators": count} for name, count in found.num_operators.items()],
        "generic": [{"name": name, "operator": operator} for name, operator in found.generic],
        "approximations": [{"name": name, "text": text} for name, text in found.lowered.approximations],
        "differences": found.differences,
        "notes": found.traces[0].notes,
    }
    return {
        "model": graph.name,
        "parameters": graph.num_parameters,
        "contraction_flop": graph.forward_flop(contractions_only=True),
        "forward_flop": graph.forward_flop(),
        "vertices": [
            {
                **attributes(op, "name kind dims=extents unsplittable"),
                "scope": scopes.get(op.name, ""),
                "parameters": _num_parameters(op),
                "forward_flop": _flop(op),
            }
            for op in graph.operators
        ],
        "edges": [attributes(edge, "producer consumer") for edge in graph.edges],
        "generic_share": _generic_share(graph),
        **(imported or dict.fromkeys(("passes", "generic", "approximations", "differences", "notes"), ())),
    }


def _print(graph: Graph, found: "ImportedModel | None", *, shows_all: bool) -> None:
    print_layers(
        graph,
        ["<vertex", "<kind", "<iteration space", "parameters"],
        [[op.name, op.kind, extents_text(op.extents), _num_parameters(op)] for op in graph.operators],
        [operator.unsplittable for operator in graph.operators],
        shows_all=shows_all or len(graph.operators) <= _SHOWN_VERTICES,
        flag="--all",
    )
    say()
    if found is not None:
        print_table(["<step", "operators"], found.num_operators.items())
        say()
    say(graph.name)
    print_facts(
        {
            "vertices": f"{len(graph.operators):,}, {len(graph.edges):,} edges",
            "parameters": f"{graph.num_parameters:,}",
            "forward pass": quantity(graph.forward_flop(), "FLOP"),
            "  of products": quantity(graph.forward_flop(contractions_only=True), "FLOP"),
        }
    )
    if found is None:
        return
    _print_approximations(graph, found)
    print_facts({"note": found.traces[0].notes})
    for text in found.differences:
        warn(f"{text}: a defect of the importer, please report it")


def _print_approximations(graph: Graph, found: "ImportedModel") -> None:
    """Print which operators are treated generically, and their share of the work."""
    layers: dict[str, list[str]] = {}
    for name, text in found.lowered.approximations:
        layers.setdefault(text, []).append(name)
    share = _generic_share(graph)
    known = f"{share['flop']:.2%} of the FLOP, {share['elements']:.2%} of what is written"
    print_facts({"treated generically": known if layers else "nothing: every operator is known"})
    if layers:
        say()
        print_table(
            ["<not told exactly", "times", "<first", "<dims that it cannot split"],
            [
                [text, len(names), names[0], _held(graph[names[0]])]
                for text, names in sorted(layers.items(), key=lambda item: -len(item[1]))
            ],
        )


def _held(operator: Operator) -> str:
    """Return the dims that are not split only because the operator is not understood."""
    held = {dim.name: dim.extent for dim in operator.dims if dim.name in operator.unsplittable and dim.extent > 1}
    return extents_text(held) or "none"


def _generic_share(graph: Graph) -> dict[str, float]:
    """Return the share of the FLOP and of the written elements in vertices that are not understood exactly."""
    found = {}
    for name, amount in (("flop", _flop), ("elements", _written)):
        whole = sum(map(amount, graph.operators))
        found[name] = sum(amount(op) for op in graph.operators if op.kind == "opaque") / whole if whole else 0.0
    return found


def _num_parameters(operator: Operator) -> int:
    return sum(access.size for access in operator.parameters)


def _flop(operator: Operator) -> float:
    return sum(work.flop_per_point * operator.work_points(work) for work in operator.work)


def _written(operator: Operator) -> float:
    return float(sum(access.size for access in operator.writes))


@click.command("models", epilog="Example: pase models")
@json_option
def models_command(as_json: bool) -> None:
    """List the built-in networks, their default batch and the parameters that --arg reaches."""
    if as_json:
        print_json(
            {"models": [attributes(entry, "name description default_batch parameters") for entry in MODELS.values()]}
        )
        return
    rows = []
    for entry in MODELS.values():
        values = {name: value for name, value in entry.parameters.items() if name != "batch"}
        arguments = " ".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in values.items())
        rows.append([entry.name, entry.description, str(entry.default_batch), arguments])
    print_table(["<name", "<network", "batch", "<--arg"], rows)


@click.command("machines", epilog="Example: pase machines --show 1080ti")
@option(
    "--show",
    metavar="NAME|FILE",
    shell_complete=complete_machines,
    help="Print one machine with the source of each figure.",
)
@schema_option(machine_schema, "machine files")
@json_option
def machines_command(show: str | None, as_json: bool) -> None:
    """List the machine presets, or show one machine with the source of each figure."""
    machines = [load_machine(name) for name in ([show] if show else preset_names())]
    if as_json:
        print_json({"machines": [machine_document(machine) for machine in machines]})
    elif show:
        _print_machine(machines[0])
    else:
        print_table(
            ["<name", "<device", "float32", "memory", "<links"],
            [
                [
                    machine.name,
                    machine.device.name,
                    quantity(machine.peak_flop_per_s(), "FLOP/s"),
                    binary(machine.device.memory_bytes),
                    ", ".join(
                        f"{level.name} {quantity(level.bandwidth_bytes_per_s, 'B/s')}" for level in machine.levels
                    ),
                ]
                for machine in machines
            ],
        )


def _print_machine(machine: Machine) -> None:
    device = machine.device
    _say_folded(f"{machine.name}: {machine.description}", later="  ")
    bandwidth = device.memory_bandwidth_bytes_per_s
    at = "" if bandwidth is None else f", {quantity(bandwidth, 'B/s')}"
    peaks = {dtype: quantity(flop_per_s, "FLOP/s") for dtype, flop_per_s in device.peak_flop_per_s.items()}
    _print_part("device", device.name, {"memory": f"{binary(device.memory_bytes)}{at}", **peaks}, device.source)
    below = "device"
    for level in machine.levels:
        facts = {
            "bandwidth": f"{quantity(level.bandwidth_bytes_per_s, 'B/s')} each way, the link of one {below}",
            "latency": quantity(level.latency_s, "s"),
        }
        size = f"{level.num_devices} devices" if level.num_devices else "any number of devices"
        _print_part("level", f"{level.name}, {size}", facts, level.source)
        below = level.name
    if machine.collectives != BY_LEVEL:
        _print_part("sums", machine.collectives, {}, "")
    if machine.overlap:
        share = f"{machine.overlap.share:.3g} of the backward pass overlaps with all-reduces"
        _print_part("overlap", share, {}, machine.overlap.source)
    if machine.kernels:
        _print_part(*_kernels(machine.kernels))


def _kernels(figures: Kernels) -> tuple[str, str, dict[str, str], str]:
    shares = ", ".join(f"{what} {getattr(figures, what):.3g}" for what in KERNELS)
    facts = {
        "half at": f"{figures.half_extent:.3g} rows or columns, depth {figures.half_depth:.3g}, in {figures.dtype}",
        "launch": quantity(figures.launch_s, "s"),
    }
    if figures.error is not None:
        facts["error"] = f"{percentage(figures.error)}, the median of {len(figures.samples)} samples"
    return "kernels", f"{shares} of the peak", facts, figures.source


def _print_part(title: str, text: str, facts: dict[str, str], source: str) -> None:
    """Print one part of a machine, with its source."""
    say()
    _say_folded(f"{title:<7}  {text}", later="  ")
    print_facts(facts, width=9)
    if source:
        _say_folded(f"  source: {source}", later="    ")


def _say_folded(text: str, *, later: str) -> None:
    """Print a text, folded; `later` is the indentation of all lines but the first."""
    # Characters that folding treats as white space might be commands to the terminal.
    for line in textwrap.wrap(visible(text), _WIDTH, subsequent_indent=later, break_on_hyphens=False):
        say(line)
