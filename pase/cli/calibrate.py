"""`pase calibrate`: the machine at hand, measured."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click

from pase.calibration.measured import (
    SAMPLES,
    MeasuredMachine,
    Rate,
    Samples,
    binary,
    calibrate,
    measured_machine,
)
from pase.cli.options import WholeNumber, check_writable, json_option, output_option
from pase.cli.output import duration, print_json, print_table, quantity, say, warn
from pase.cli.progress import progress
from pase.common.documents import write_or_fail
from pase.errors import CalibrationError, missing_extra
from pase.machine import Kernels, load_machine, machine_document, machine_text
from pase.machine.files import KERNELS
from pase.targets.training.options import GPU, KINDS, device_choice, device_options


@click.command("calibrate", epilog="Example: pase calibrate --devices 2 --quick -o machine.toml")
@click.option(
    "--devices", "-p", type=WholeNumber(min=2), help="Number of devices [GPUs found, or CPU cores, at most 8]."
)
@device_options
@click.option("--quick", is_flag=True, help="Fewer sizes, fewer runs.")
@click.option("--kernels", is_flag=True, help="Time kernels of PyTorch on one device instead, for the cost model step.")
@click.option("--machine", metavar="NAME|FILE", help="With --kernels: the machine whose links and peaks are kept.")
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
    if output:
        check_writable(output)
    begin_s = time.monotonic()
    if kernels:
        _calibrate_kernels(machine, device, output, as_json=as_json)
        return
    if machine is not None:
        raise CalibrationError("--machine is for --kernels, which keeps a machine's links; without, links are measured")
    measuring, effort = device_choice(device), "quick" if quick else "full"
    with progress() as on_progress:
        samples = calibrate(devices, measuring, effort, on_progress=on_progress)
    name = output.stem if output else "measured"
    measured = measured_machine(samples, date=datetime.now(UTC).date().isoformat(), name=name)
    text = machine_text(measured.machine)
    if output:
        write_or_fail(output, text, CalibrationError)
    time_s = time.monotonic() - begin_s
    if as_json:
        print_json(_document(measured, samples, output, time_s))
    elif output:
        _print_summary(measured, samples, time_s)
        warn(f"machine written to {output}; try: pase search alexnet -p {samples.num_devices} --machine {output}")
    else:
        click.echo(text, nl=False)


def _calibrate_kernels(base: str | None, device: Mapping[str, Any], output: Path | None, *, as_json: bool) -> None:
    if find_spec("torch") is None:
        raise missing_extra("timing kernels needs PyTorch", "torch")
    from pase.calibration.kernels import calibrated

    where = "cuda" if device_choice(device).kind == GPU else "cpu"
    with progress() as on_progress:
        found = calibrated(
            load_machine(base) if base else None, where, on_progress, name=output.stem if output else "measured"
        )
    text = machine_text(found)
    if output:
        write_or_fail(output, text, CalibrationError)
    figures = found.kernels
    assert figures is not None
    if as_json:
        samples = [asdict(sample) for sample in figures.samples]
        print_json({"machine": machine_document(found), "samples": samples, "output": str(output) if output else None})
    elif output:
        _print_kernels(figures)
        warn(f"machine written to {output}; try: pase search MODEL --machine {output} --cost-model step")
    else:
        click.echo(text, nl=False)


def _print_kernels(figures: Kernels) -> None:
    rows = []
    for what in KERNELS:
        errors = [abs(s.predicted_s / s.time_s - 1) for s in figures.samples if s.what == what]
        rows.append(
            [what, f"{len(errors)}", f"{getattr(figures, what):.0%}", f"{median(errors):.0%}", f"{max(errors):.0%}"]
        )
    print_table(["<kernels", "timed", "share of the peak", "error, median", "largest"], rows)
    say()
    say(f"  {'launch':18} {quantity(figures.launch_s, 's')}")
    half = f"{figures.half_extent:.3g} rows or columns, or a depth of {figures.half_depth:.3g}"
    say(f"  {'half of the share':18} at {half}")
    say(f"  {'error of the fit':18} {figures.error or 0:.0%} (median)")


def _document(measured: MeasuredMachine, samples: Samples, output: Path | None, time_s: float) -> dict[str, object]:
    return {
        "machine": machine_document(measured.machine),
        "link": asdict(measured.fits[0]),
        "all_reduces": [
            {**asdict(prediction), "relative_error": prediction.relative_error} for prediction in measured.all_reduces
        ],
        "all_reduce_error": measured.all_reduce_error,
        "samples": SAMPLES.write(samples),
        "time_s": time_s,
        "output": str(output) if output else None,
    }


def _print_summary(measured: MeasuredMachine, samples: Samples, time_s: float) -> None:
    (fit,), (level,) = measured.fits, measured.machine.levels
    _print_rates(samples)
    say()
    print_table(
        ["message", "copy", "fitted", "difference"],
        [
            [
                binary(copy.size_bytes),
                quantity(copy.time_s, "s"),
                quantity(fit.time_s(copy.size_bytes), "s"),
                f"{fit.time_s(copy.size_bytes) / copy.time_s - 1:+.0%}",
            ]
            for copy in samples.copies
        ],
    )
    say()
    print_table(
        ["vector", "all-reduce", "predicted", "difference"],
        [
            [
                binary(prediction.size_bytes),
                quantity(prediction.measured_s, "s"),
                quantity(prediction.predicted_s, "s"),
                f"{prediction.relative_error:+.0%}",
            ]
            for prediction in measured.all_reduces
        ],
    )
    device = measured.machine.device
    say()
    say(f"{samples.num_devices} {KINDS[samples.kind]}: {device.name}")
    for dtype, flop_per_s in device.peak_flop_per_s.items():
        say(f"  {dtype:18} {quantity(flop_per_s, 'FLOP/s')} a device")
    say(f"  {'memory':18} {quantity(device.memory_bandwidth_bytes_per_s or 0, 'B/s')} a device")
    say(f"  {'latency':18} {quantity(level.latency_s, 's')}")
    say(f"  {'bandwidth':18} {quantity(level.bandwidth_bytes_per_s, 'B/s')} a link")
    say(f"  {'error of the fit':18} {fit.relative_error:.0%} (root mean square)")
    say(f"  {'of all-reduces':18} {measured.all_reduce_error:.0%} (root mean square of what the fit predicts)")
    say(f"  {'time':18} {duration(time_s)}")


def _print_rates(samples: Samples) -> None:
    def rows(kernel: str, dtype: str, rates: Sequence[Rate], unit: str) -> list[list[str]]:
        return [[kernel, dtype, rate.shape, quantity(rate.per_s, unit)] for rate in rates]

    print_table(
        ["<kernel", "<type", "<shape", "a device"],
        [
            *(row for dtype, rates in samples.matmul.items() for row in rows("matmul", dtype, rates, "FLOP/s")),
            *(row for dtype, rates in samples.convolution.items() for row in rows("conv", dtype, rates, "FLOP/s")),
            *rows("memory", "float32", samples.stream, "B/s"),
        ],
    )
