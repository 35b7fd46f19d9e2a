"""`pase machines`: the machines that come with PaSE."""

import click

from pase.cli.options import json_option
from pase.cli.output import print_json, print_table, quantity, say
from pase.machine import load_machine, machine_document, preset_names


@click.command("machines", epilog="Example: pase machines --show 1080ti")
@click.option("--show", metavar="NAME|FILE", help="Print one machine with the source of each figure.")
@json_option
def command(show: str | None, as_json: bool) -> None:
    """List the machine presets, or show one machine with the source of each figure."""
    machines = [load_machine(name) for name in ([show] if show else preset_names())]
    if as_json:
        print_json({"machines": [machine_document(machine) for machine in machines]})
    elif show:
        (machine,) = machines
        say(f"{machine.name}: {machine.description}")
        say(f"  {machine.device.name}, {quantity(machine.device.memory_bytes, 'B')} of memory")
        for dtype, flop_per_s in machine.device.peak_flop_per_s.items():
            say(f"    {dtype:9} {quantity(flop_per_s, 'FLOP/s')}")
        say(f"    source: {machine.device.source}")
        for level in machine.levels:
            size = f"{level.num_devices} devices" if level.num_devices else "any number of devices"
            say(
                f"  {level.name}, {size}: {quantity(level.bandwidth_bytes_per_s, 'B/s')} a link, "
                f"latency {quantity(level.latency_s, 's')}"
            )
            say(f"    source: {level.source}")
    else:
        rows = [
            [
                machine.name,
                machine.device.name,
                quantity(machine.peak_flop_per_s(), "FLOP/s"),
                ", ".join(f"{lv.name} {quantity(lv.bandwidth_bytes_per_s, 'B/s')}" for lv in machine.levels),
            ]
            for machine in machines
        ]
        print_table([("name", "left"), ("device", "left"), ("float32", "right"), ("links", "left")], rows)
