"""Says whether two checkouts give the same cost tables and the same optima, bit for bit.

    python -m scripts.compare_checkouts OLD NEW [--networks lenet5,gpt] [--devices 4,8] [--cost-models paper]

Each checkout is asked through its command line, in a process of its own, with this Python: for the cost tables of every
built-in network (`pase tables`), and for the plan with the least cost (`pase search --json`). Ends with status 1 where
anything differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NETWORKS = (
    "alexnet,bert_large,densenet121,googlenet,gpt,inception_v3,lenet5,mlp,resnet101,rnnlm,transformer,vgg16,vgg19"
)

_ASK = """
import contextlib, hashlib, io, json, sys
import numpy as np
from pase.cli import main

def call(*words):
    out = io.StringIO()
    sys.argv = ["pase", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    return out.getvalue()

for network, devices, model in json.load(sys.stdin):
    options = (network, "--devices", str(devices), "--cost-model", model)
    call("tables", *options, "-o", "tables.npz")
    digest = hashlib.sha256()
    with np.load("tables.npz") as arrays:
        for name in sorted(arrays):
            array = arrays[name]
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    plan = json.loads(call("search", *options, "--json"))
    print(json.dumps({
        "case": f"{network} p={devices} {model}",
        "tables": digest.hexdigest(),
        "total_cost": plan["total_cost"],
        "exact": plan["exact"],
        "splits": {layer["name"]: layer["splits"] for layer in plan["layers"]},
    }), flush=True)
"""


def _answers(checkout: Path, cases: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            input=json.dumps(cases),
            cwd=folder,
            env={"PYTHONPATH": str(checkout.resolve()), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Compare, print a line for each case, and end with status 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--devices", default="4,8,16,32,64")
    parser.add_argument("--cost-models", default="paper,alpha_beta,program")
    given = parser.parse_args()
    cases = [
        (network, int(devices), model)
        for network in given.networks.split(",")
        for devices in given.devices.split(",")
        for model in given.cost_models.split(",")
    ]
    differing = 0
    for old, new in zip(_answers(given.old, cases), _answers(given.new, cases), strict=True):
        unlike = [part for part in old if old[part] != new[part]]
        differing += bool(unlike)
        print(f"{old['case']:32} {old['total_cost']!r:>24}  {'DIFFERS: ' + ', '.join(unlike) if unlike else 'equal'}")
    print(f"{len(cases)} cases, {differing} differ")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
