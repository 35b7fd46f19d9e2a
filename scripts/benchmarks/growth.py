"""How the time of `pase search` grows with the number of devices and with the depth of the network."""

from scripts.benchmarks.tables import ROOT, markdown, publish
from scripts.benchmarks.timing import Timing, time_bare_numpy, time_pase

DEVICES = (4, 16, 64, 256, 1024, 4096)
NETWORKS = ("alexnet", "inception_v3", "rnnlm", "transformer", "gpt", "densenet121")
LAYERS = (12, 24, 48, 96, 192)
GPT_3 = "--arg model_width=12288 --arg heads=96 --arg steps=2048"
RUNS = 3


def main(*, write: bool) -> None:
    """Print the tables, or put them and the plot into docs/."""
    unit = time_bare_numpy()
    by_devices = {
        name: [time_pase(f"search {name} --devices {p} --batch 4096 --json", RUNS) for p in DEVICES]
        for name in NETWORKS
    }
    by_layers = [time_pase(f"search gpt --devices 1024 --arg layers={n} {GPT_3} --json", RUNS) for n in LAYERS]
    rows = [[name, *(_cell(timing) for timing in timings)] for name, timings in by_devices.items()]
    tables = {
        "growth with devices": markdown(["network", *(f"p = {p}" for p in DEVICES)], rows),
        "growth with layers": markdown(
            ["layers", "time, memory", "÷ `import numpy`"],
            [
                [str(n), _cell(timing), f"{timing.median_s / unit.median_s:.1f}"]
                for n, timing in zip(LAYERS, by_layers, strict=True)
            ],
        ),
    }
    publish("benchmarks.md", tables, write=write)
    if write:
        _plot(by_devices, by_layers)


def _cell(timing: Timing) -> str:
    return f"{timing.median_s:.2f} s, {timing.peak_bytes / 1e6:.0f} MB"


def _plot(by_devices: dict[str, list[Timing]], by_layers: list[Timing]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    # The same figures give the same file: no date, and names that do not change from run to run.
    mpl.rcParams["svg.hashsalt"] = "pase"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, timings in by_devices.items():
        left.plot(DEVICES, [timing.median_s for timing in timings], marker="o", label=name)
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="whole process, s", title="batch 4096")
    left.legend()
    right.plot(LAYERS, [timing.median_s for timing in by_layers], marker="o")
    right.set(xscale="log", xlabel="layers", title="GPT of width 12,288 on 1,024 devices")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path = ROOT / "docs" / "growth.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"written to {path.relative_to(ROOT)}")
