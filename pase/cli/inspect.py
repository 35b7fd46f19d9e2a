"""What there is: `pase models`, `pase machines`, and `pase inspect`, what importing a model makes of it."""

import textwrap
from typing import Any

import click

from pase.cli.layer_table import print_layers
from pase.cli.options import arguments_option, batch_option, complete_machines, json_option, model_argument
from pase.cli.output import print_json, print_table, quantity, say, warn
from pase.cli.progress import READING, progress
from pase.common.names import visible
from pase.graph import Graph, Operator
from pase.importers import is_builtin, load
from pase.importers.frameworks import ImportedModel, import_model
from pase.machine import Kernels, Level, Machine, load_machine, machine_document, machine_schema, preset_names
from pase.machine.files import KERNELS
from pase.machine.machine import BY_LEVEL
from pase.models import MODELS

_SHOWN_VERTICES = 60
"""Of a model with more, layers that repeat are listed once unless --all is given."""


@click.command("inspect", epilog="Example: pase inspect package.module:factory --batch 32")
@model_argument
@batch_option
@arguments_option
@click.option("--strict", is_flag=True, help="Refuse a model with an operator that nothing is known of.")
@click.option("--all", "shows_all", is_flag=True, help="List every vertex of a model whose layers repeat.")
@json_option
def inspect_command(
    model: str, batch: int | None, arguments: dict[str, Any], strict: bool, shows_all: bool, as_json: bool
) -> None:
    """Show what is made of MODEL: operators after each pass, parameters, FLOP, vertices, and what is not understood."""
    with progress() as on_progress:
        on_progress(READING, 0.0)
        if is_builtin(model):
            graph = load(model, batch=batch, arguments=arguments)
            found = None
        else:
            found = import_model(model, batch=batch, arguments=arguments, is_strict=strict)
            graph = found.graph
    if as_json:
        print_json(_document(graph, found))
        return
    _print(graph, found, shows_all=shows_all)


def _document(graph: Graph, found: ImportedModel | None) -> dict[str, Any]:
    return {
        "model": graph.name,
        "passes": [] if found is None else [{"name": n, "operators": c} for n, c in found.num_operators.items()],
        "parameters": graph.num_parameters,
        "contraction_flop": graph.forward_flop(contractions_only=True),
        "forward_flop": graph.forward_flop(),
        "vertices": [
            {
                "name": op.name,
                "kind": op.kind,
                "scope": "" if found is None else found.lowered.scopes.get(op.name, ""),
                "dims": op.extents,
                "unsplittable": list(op.unsplittable),
                "parameters": sum(access.size for access in op.parameters),
                "forward_flop": _flop(op),
            }
            for op in graph.operators
        ],
        "edges": [{"producer": edge.producer, "consumer": edge.consumer} for edge in graph.edges],
        "generic": [] if found is None else [{"name": n, "operator": o} for n, o in found.generic],
        "approximations": [] if found is None else [{"name": n, "text": t} for n, t in found.lowered.approximations],
        "generic_share": _generic_share(graph),
        "differences": [] if found is None else list(found.differences),
        "notes": [] if found is None else list(found.traces[0].notes),
    }


def _print(graph: Graph, found: ImportedModel | None, *, shows_all: bool) -> None:
    print_layers(
        graph,
        ["<vertex", "<kind", "<iteration space", "parameters"],
        [_row(operator) for operator in graph.operators],
        [operator.unsplittable for operator in graph.operators],
        shows_all=shows_all or len(graph.operators) <= _SHOWN_VERTICES,
        flag="--all",
    )
    say()
    if found is not None:
        counts = list(found.num_operators.items())
        print_table(["<step", "operators"], [[name, f"{count:,}"] for name, count in counts])
        say()
    say(f"{graph.name}")
    say(f"  vertices                {len(graph.operators):,}, {len(graph.edges):,} edges")
    say(f"  parameters              {graph.num_parameters:,}")
    say(f"  forward pass            {quantity(graph.forward_flop(), 'FLOP')}")
    say(f"    of products           {quantity(graph.forward_flop(contractions_only=True), 'FLOP')}")
    if found is None:
        return
    _print_approximations(graph, found)
    for note in found.traces[0].notes:
        say(f"  note                    {note}")
    for text in found.differences:
        warn(f"{text}: a defect of the importer, please report it")


def _row(operator: Operator) -> list[str]:
    return [
        operator.name,
        operator.kind,
        " ".join(f"{dim.name}={dim.extent}" for dim in operator.dims),
        f"{sum(access.size for access in operator.parameters):,}",
    ]


def _print_approximations(graph: Graph, found: ImportedModel) -> None:
    """Say what was treated generically, and what share of the work is in it."""
    told: dict[str, list[str]] = {}
    for name, text in found.lowered.approximations:
        told.setdefault(text, []).append(name)
    if not told:
        say("  treated generically     nothing: every operator is known")
        return
    share = _generic_share(graph)
    say(f"  treated generically     {share['flop']:.2%} of the FLOP, {share['elements']:.2%} of what is written")
    say()
    print_table(
        ["<not told exactly", "times", "<first", "<dims that it cannot split"],
        [
            [text, str(len(names)), names[0], _held(graph[names[0]])]
            for text, names in sorted(told.items(), key=lambda item: -len(item[1]))
        ],
    )


def _held(operator: Operator) -> str:
    """Return the dims that cannot be split, and could be if more were known."""
    dims = (dim for dim in operator.dims if dim.name in operator.unsplittable and dim.extent > 1)
    return " ".join(f"{dim.name}={dim.extent}" for dim in dims) or "none"


def _generic_share(graph: Graph) -> dict[str, float]:
    """Return the share of the FLOP and of the written elements that vertices have which are not told exactly."""
    opaque = [op for op in graph.operators if op.kind == "opaque"]
    return {
        "flop": _share(sum(map(_flop, opaque)), sum(map(_flop, graph.operators))),
        "elements": _share(sum(map(_written, opaque)), sum(map(_written, graph.operators))),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
            {
                "models": [
                    {
                        "name": entry.name,
                        "description": entry.description,
                        "default_batch": entry.default_batch,
                        "parameters": dict(entry.parameters),
                    }
                    for entry in MODELS.values()
                ]
            }
        )
        return
    rows = [
        [
            entry.name,
            entry.description,
            str(entry.default_batch),
            " ".join(f"{name}={_text(value)}" for name, value in entry.parameters.items() if name != "batch"),
        ]
        for entry in MODELS.values()
    ]
    print_table(["<name", "<network", "batch", "<--arg"], rows)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_WIDTH = 100
"""Sources are long: they are folded to this many columns."""


@click.command("machines", epilog="Example: pase machines --show 1080ti")
@click.option(
    "--show",
    metavar="NAME|FILE",
    shell_complete=complete_machines,
    help="Print one machine with the source of each figure.",
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of machine files.")
@json_option
def machines_command(show: str | None, schema: bool, as_json: bool) -> None:
    """List the machine presets, or show one machine with the source of each figure."""
    if schema:
        if show:
            raise click.UsageError("--schema is of all machine files; give --show or --schema")
        for line in machine_schema().splitlines():
            say(line)
        return
    machines = [load_machine(name) for name in ([show] if show else preset_names())]
    if as_json:
        print_json({"machines": [machine_document(machine) for machine in machines]})
    elif show:
        _print_machine(machines[0])
    else:
        _print_list(machines)


def _print_list(machines: list[Machine]) -> None:
    print_table(
        ["<name", "<device", "float32", "memory", "<links"],
        [
            [
                machine.name,
                machine.device.name,
                quantity(machine.peak_flop_per_s(), "FLOP/s"),
                _memory(machine.device.memory_bytes),
                ", ".join(f"{level.name} {quantity(level.bandwidth_bytes_per_s, 'B/s')}" for level in machine.levels),
            ]
            for machine in machines
        ],
    )


def _print_machine(machine: Machine) -> None:
    device = machine.device
    _say_folded(f"{machine.name}: {machine.description}", later="  ")
    say()
    say(f"device   {device.name}")
    bandwidth = device.memory_bandwidth_bytes_per_s
    at = "" if bandwidth is None else f", {quantity(bandwidth, 'B/s')}"
    say(f"  memory     {_memory(device.memory_bytes)}{at}")
    for dtype, flop_per_s in device.peak_flop_per_s.items():
        say(f"  {dtype:10} {quantity(flop_per_s, 'FLOP/s')}")
    _say_folded(f"  source: {device.source}", later="    ")
    below = "device"
    for level in machine.levels:
        say()
        say(f"level    {level.name}, {_size(level)}")
        say(f"  bandwidth  {quantity(level.bandwidth_bytes_per_s, 'B/s')} each way, the link of one {below}")
        say(f"  latency    {quantity(level.latency_s, 's')}")
        _say_folded(f"  source: {level.source}", later="    ")
        below = level.name
    if machine.collectives != BY_LEVEL:
        say()
        say(f"sums     {machine.collectives}")
    if machine.overlap:
        say()
        say(f"overlap  {machine.overlap.share:.3g} of the backward pass hides sums")
        _say_folded(f"  source: {machine.overlap.source}", later="    ")
    if machine.kernels:
        _print_kernels(machine.kernels)


def _print_kernels(figures: Kernels) -> None:
    shares = {what: f"{getattr(figures, what):.3g}" for what in KERNELS}
    say()
    _say_folded(
        "kernels  " + ", ".join(f"{what} {share}" for what, share in shares.items()) + " of the peak", later="  "
    )
    say(f"  half at    {figures.half_extent:.3g} rows or columns, depth {figures.half_depth:.3g}, in {figures.dtype}")
    say(f"  launch     {quantity(figures.launch_s, 's')}")
    if figures.error is not None:
        say(f"  error      {figures.error:.1%}, the median of {len(figures.samples)} samples")
    _say_folded(f"  source: {figures.source}", later="    ")


def _say_folded(text: str, *, later: str) -> None:
    """Print a text, folded; later: what its lines but the first begin with."""
    # What folding takes for white space might be a command to the terminal.
    for line in textwrap.wrap(visible(text), _WIDTH, subsequent_indent=later, break_on_hyphens=False):
        say(line)


def _memory(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB"


def _size(level: Level) -> str:
    return f"{level.num_devices} devices" if level.num_devices else "any number of devices"
