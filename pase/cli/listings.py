"""`pase models`: the built-in networks."""

import textwrap

import click

from pase.cli.options import complete_machines, json_option
from pase.cli.output import print_json, print_table, quantity, say
from pase.common.names import visible
from pase.machine import Level, Machine, load_machine, machine_document, machine_schema, preset_names
from pase.models import MODELS


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
    say(f"  memory     {_memory(device.memory_bytes)}{_memory_bandwidth(machine)}")
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


def _say_folded(text: str, *, later: str) -> None:
    """Print a text, folded; later: what its lines but the first begin with."""
    # What folding takes for white space might be a command to the terminal.
    for line in textwrap.wrap(visible(text), _WIDTH, subsequent_indent=later, break_on_hyphens=False):
        say(line)


def _memory(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB"


def _memory_bandwidth(machine: Machine) -> str:
    bandwidth = machine.device.memory_bandwidth_bytes_per_s
    return "" if bandwidth is None else f", {quantity(bandwidth, 'B/s')}"


def _size(level: Level) -> str:
    return f"{level.num_devices} devices" if level.num_devices else "any number of devices"
