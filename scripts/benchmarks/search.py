"""Whole-process time of `pase search` for the paper's networks, beside its Table I."""

from scripts.benchmarks.tables import markdown, publish
from scripts.benchmarks.timing import time_bare_numpy, time_pase

DEVICES = (4, 8, 16, 32, 64)

# Table I of the paper, GenerateSeq, seconds: the authors' prototype on their Xeon E5 (SandyBridge).
TABLE_I_S = {
    "alexnet": (0.226, 0.253, 0.295, 0.361, 0.475),
    "inception_v3": (14.398, 20.018, 39.791, 86.039, 196.253),
    "rnnlm": (0.057, 0.086, 0.069, 0.131, 0.215),
    "transformer": (9.752, 28.798, 130.882, 553.022, 1883.187),
}


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    unit = time_bare_numpy()
    rows = []
    for model, paper in TABLE_I_S.items():
        for devices, paper_s in zip(DEVICES, paper, strict=True):
            timing = time_pase(f"search {model} --devices {devices} --json")
            rows.append(
                [
                    model,
                    str(devices),
                    f"{timing.median_s:.2f}",
                    f"{timing.min_s:.2f}–{timing.max_s:.2f}",
                    f"{timing.median_s / unit.median_s:.1f}",
                    f"{paper_s:.2f}",
                ]
            )
    headers = ["network", "p", "whole process, s (median of 5)", "min–max", "÷ `import numpy`", "paper's search, s"]
    publish("benchmarks.md", {"search": markdown(headers, rows)}, write=write)
