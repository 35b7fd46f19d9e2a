"""`pase run`: train with a plan on virtual devices, beside the single-device program."""

from dataclasses import asdict
from pathlib import Path

import click

from pase.cli.options import ModelArguments, json_option, model_options
from pase.cli.output import duration, print_json, print_table, progress, quantity, say, warn
from pase.plan import Plan
from pase.plan_file import read_plan
from pase.runtime.execute import RunResult, run_plan
from pase.search import search

PHASES = ("forward", "backward", "update")


@click.command("run", epilog="Example: pase run alexnet --devices 8 --steps 3")
@click.argument("plan_or_model", metavar="PLAN|MODEL")
@model_options(devices_required=False)
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Training steps.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights and made-up data.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=0.01,
    show_default=True,
    help="Of gradient descent.",
)
@click.option("--data", "data_path", type=click.Path(path_type=Path), help="Training data, an .npz file [made up].")
@click.option("--measure", is_flag=True, help="Count the bytes that cross devices in a step.")
@json_option
def command(
    plan_or_model: str,
    steps: int,
    dtype: str,
    seed: int,
    learning_rate: float,
    data_path: Path | None,
    measure: bool,
    as_json: bool,
    devices: int | None,
    **model: object,
) -> None:
    """Train with PLAN, a file, or with the best strategy for MODEL on --devices, and compare with one device.

    Emits the program, runs it on virtual CPU devices, and runs the single-device program on the same weights and
    data: the losses are equal up to rounding (try --dtype float64).
    """
    with progress() as on_progress:
        plan = _plan(plan_or_model, devices, model)
        result = run_plan(
            plan,
            steps=steps,
            dtype=dtype,
            seed=seed,
            learning_rate=learning_rate,
            data_path=data_path,
            measure=measure,
            on_progress=lambda what, done, total: on_progress(what, done / total),
        )
    if as_json:
        print_json(
            {
                "losses": list(result.losses),
                "reference_losses": list(result.reference_losses),
                "max_relative_difference": result.max_relative_difference,
                "predicted_bytes": result.predicted_bytes,
                "measured_bytes": result.measured_bytes,
                "host_bytes": result.host_bytes,
                "edges": list(result.edges),
                "layers": list(result.layers),
                "predicted_memory_bytes": result.predicted_memory.total_bytes,
                "predicted_memory": asdict(result.predicted_memory),
                "peak_memory_bytes": list(result.peak_memory_bytes or []) or None,
                "build_time_s": result.build_time_s,
                "step_time_s": result.step_time_s,
            }
        )
        return
    print_table(
        [("step", "right"), ("loss", "right"), ("on one device", "right"), ("difference", "right")],
        [
            [str(step), f"{ours:.9g}", f"{reference:.9g}", f"{abs(ours - reference) / max(abs(reference), 1e-300):.1e}"]
            for step, (ours, reference) in enumerate(zip(result.losses, result.reference_losses, strict=True), start=1)
        ],
    )
    say()
    say(f"{plan.graph.name} on {plan.num_devices} virtual CPU devices, {dtype}")
    say(f"  largest difference      {result.max_relative_difference:.1e}   (relative)")
    say(f"  bytes between devices   {quantity(result.predicted_bytes, 'B')} a step predicted")
    if result.measured_bytes is not None:
        ratio = result.measured_bytes / result.predicted_bytes if result.predicted_bytes else 1.0
        say(f"                          {quantity(result.measured_bytes, 'B')} a step measured   ({ratio:.2%} of it)")
        say(f"  bytes from the host     {quantity(result.host_bytes or 0, 'B')} a step, and the loss to it")
    say(f"  memory of a device      {quantity(result.predicted_memory.total_bytes, 'B')} predicted")
    if result.peak_memory_bytes:
        low, high = (quantity(choose(result.peak_memory_bytes), "B") for choose in (min, max))
        say(f"                          {low} to {high} at most, as its allocator recorded")
    say(f"  building the program    {duration(result.build_time_s)}")
    say(f"  one step                {duration(result.step_time_s)}   (virtual devices share this machine)")
    if result.edges or result.layers:
        say()
        _print_moved(result)


def _print_moved(result: RunResult) -> None:
    """Print what crossed devices, for each edge and within each layer, the predicted bytes by phase."""
    named = [(f"{row['producer']} → {row['consumer']}", row) for row in result.edges]
    named += [(str(row["name"]), row) for row in result.layers]
    named = [(name, row) for name, row in named if row["predicted_bytes"] or row["measured_bytes"]]
    print_table(
        [
            ("edge, or sums within a layer", "left"),
            *((phase, "right") for phase in PHASES),
            ("predicted, B", "right"),
            ("measured, B", "right"),
        ],
        [
            [
                name,
                *(f"{row[phase]['predicted_bytes']:,}" for phase in PHASES),
                f"{row['predicted_bytes']:,}",
                f"{row['measured_bytes']:,}",
            ]
            for name, row in named
        ],
    )


def _plan(plan_or_model: str, devices: int | None, model: dict[str, object]) -> Plan:
    path = Path(plan_or_model)
    if path.suffix == ".json" or path.is_file():
        if devices is not None or model["batch"] is not None or model["arguments"]:
            warn("a plan names its own model and devices: --devices, --batch and --arg are not used")
        return read_plan(path)
    if devices is None:
        raise click.UsageError(f"--devices is needed to search a strategy for model {plan_or_model!r}")
    chosen = ModelArguments(model=plan_or_model, devices=devices, **model)  # type: ignore[arg-type]
    return search(chosen.graph(), devices, machine=chosen.loaded_machine())
