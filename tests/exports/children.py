"""Programs of a framework as processes of their own, which learn of plans what the exported modules say alone."""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pase.planning.plan import Plan
from pase.views.exports import export

ROOT = Path(__file__).parents[2]


def run_child(framework: str, plans: Mapping[str, Plan], folder: Path, num_devices: int) -> None:
    """Run jax_child.py or torch_child.py on some plans' graphs and exported modules, which are written to a folder."""
    for name, plan in plans.items():
        (folder / f"{name}.graph").write_bytes(pickle.dumps(plan.graph))
        (folder / f"{name}.py").write_text(export(plan, framework).text, encoding="utf-8")
    child = Path(__file__).with_name(f"{framework}_child.py")
    result = subprocess.run(
        [sys.executable, "-W", "error", str(child), str(folder), str(num_devices)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-4000:]
