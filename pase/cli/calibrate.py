"""`pase calibrate`: measure this machine."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

import click

from pase.calibration.measured import MeasuredMachine, Samples, calibrate, measured_machine
from pase.cli.options import flag, json_option, output_option
from pase.cli.output import print_facts, print_json, print_table, say, warn
from pase.cli.progress import progress
from pase.common.documents import write_or_fail
from pase.common.options import WholeNumber, option
from pase.common.words import binary, duration, quantity
from pase.errors import CalibrationError, missing_extra
from pase.machine import Kernels, Machine, load_machine, machine_document, machine_text
from pase.machine.machine import KERNELS
from pase.targets.training.options import GPU, KINDS, device_choice, device_options


@click.command("calibrate", epilog="Example: pase calibrate --devices 2 --quick -o machine.toml")
@option("--devices", "-p", type=WholeNumber(min=2), help="Number of devices [GPUs found, or CPU cores, at most 8].")
@device_options
@flag("--quick", help="Fewer sizes, fewer runs.")
@flag("--kernels", help="Time kernels of PyTorch on one device instead, for the cost model step.")
@option("--machine", metavar="NAME|FILE", help="With --kernels: the machine whose links and peaks are kept.")
@output_option("Write the machine file here, not on standard output.")
@json_option
def calibrate_command(
    devices: int | None,
    quick: bool,
    kernels: bool,
    machine: str | None,
    output: Path | None,
    as_json: bool,
    **device: Any,
) -> None:
    """Measure this machine through TensorFlow and write it as a machine file, for --machine.

    Matrix products, convolutions, memory, copies between devices and all-reduces, over sizes, with all devices at work
    at once. With --kernels, kernels of PyTorch on one device, and the figures that fit them. Nothing else should run
    meanwhile.
    """
    begin_s, name = time.monotonic(), output.stem if output else "measured"
    show: Callable[[], None]
    if kernels:
        found = _with_kernels(machine, device, name)
        figures = found.kernels
        assert figures is not None
        document: dict[str, Any] = {"samples": [asdict(sample) for sample in figures.samples]}
        show, hint = partial(_print_kernels, figures), f"MODEL --machine {quote(str(output))} --cost-model step"
    elif machine is not None:
        raise CalibrationError("--machine is for --kernels, which keeps a machine's links; without, links are measured")
    else:
        with progress() as on_progress:
            samples = calibrate(devices, device_choice(device), "quick" if quick else "full", on_progress=on_progress)
        measured = measured_machine(samples, date=datetime.now(UTC).date().isoformat(), name=name)
        found, time_s = measured.machine, time.monotonic() - begin_s
        document = _document(measured, samples, time_s)
        show = partial(_print_summary, measured, samples, time_s)
        hint = f"alexnet -p {samples.num_devices} --machine {quote(str(output))}"
    text = machine_text(found)
    if output:
        write_or_fail(output, text, CalibrationError)
    if as_json:
        print_json({"machine": machine_document(found), **document, "output": str(output) if output else None})
    elif output:
        show()
        warn(f"machine written to {output}; try: pase search {hint}")
    else:
        click.echo(text, nl=False)


def _with_kernels(base: str | None, device: Mapping[str, Any], name: str) -> Machine:
    if find_spec("torch") is None:
        raise missing_extra("timing kernels needs PyTorch", "torch")
    from pase.calibration.kernels import calibrated

    where = "cuda" if device_choice(device).kind == GPU else "cpu"
    with progress() as on_progress:
        return calibrated(load_machine(base) if base else None, where, on_progress, name=name)


def _print_kernels(figures: Kernels) -> None:
    rows = []
    for what in KERNELS:
        errors = [abs(s.predicted_s / s.time_s - 1) for s in figures.samples if s.what == what]
        rows.append([what, len(errors), *(f"{x:.0%}" for x in (getattr(figures, what), median(errors), max(errors)))])
    print_table(["<kernels", "timed", "share of the peak", "error, median", "largest"], rows)
    say()
    print_facts(
        {
            "launch": quantity(figures.launch_s, "s"),
            "half of the share": (
                f"at {figures.half_extent:.3g} rows or columns, or a depth of {figures.half_depth:.3g}"
            ),
            "error of the fit": f"{figures.error or 0:.0%} (median)",
        },
        width=17,
    )


def _document(measured: MeasuredMachine, samples: Samples, time_s: float) -> dict[str, Any]:
    return {
        "link": asdict(measured.fits[0]),
        "all_reduces": [
            {**asdict(prediction), "relative_error": prediction.relative_error} for prediction in measured.all_reduces
        ],
        "all_reduce_error": measured.all_reduce_error,
        "samples": asdict(samples),
        "time_s": time_s,
    }


def _print_summary(measured: MeasuredMachine, samples: Samples, time_s: float) -> None:
    (fit,), (level,) = measured.fits, measured.machine.levels
    kernels = [
        *(("matmul", dtype, rate, "FLOP/s") for dtype, rates in samples.matmul.items() for rate in rates),
        *(("conv", dtype, rate, "FLOP/s") for dtype, rates in samples.convolution.items() for rate in rates),
        *(("memory", "float32", rate, "B/s") for rate in samples.stream),
    ]
    rows = [[kernel, dtype, rate.shape, quantity(rate.per_s, unit)] for kernel, dtype, rate, unit in kernels]
    print_table(["<kernel", "<type", "<shape", "a device"], rows)
    copies = [(copy.size_bytes, copy.time_s, fit.time_s(copy.size_bytes)) for copy in samples.copies]
    sums = [(each.size_bytes, each.measured_s, each.predicted_s) for each in measured.all_reduces]
    for headers, times in ((("message", "copy", "fitted"), copies), (("vector", "all-reduce", "predicted"), sums)):
        say()
        print_table(
            [*headers, "difference"],
            [
                [binary(size_bytes), quantity(own_s, "s"), quantity(fitted_s, "s"), f"{fitted_s / own_s - 1:+.0%}"]
                for size_bytes, own_s, fitted_s in times
            ],
        )
    device = measured.machine.device
    say()
    say(f"{samples.num_devices} {KINDS[samples.kind]}: {device.name}")
    peaks = {dtype: f"{quantity(rate, 'FLOP/s')} a device" for dtype, rate in device.peak_flop_per_s.items()}
    print_facts(
        {
            **peaks,
            "memory": f"{quantity(device.memory_bandwidth_bytes_per_s or 0, 'B/s')} a device",
            "latency": quantity(level.latency_s, "s"),
            "bandwidth": f"{quantity(level.bandwidth_bytes_per_s, 'B/s')} a link",
            "error of the fit": f"{fit.relative_error:.0%} (root mean square)",
            "of all-reduces": f"{measured.all_reduce_error:.0%} (root mean square of what the fit predicts)",
            "time": duration(time_s),
        },
        width=17,
    )
