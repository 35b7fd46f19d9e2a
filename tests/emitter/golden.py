"""The golden program, and the command that makes it again: ``python -m tests.emitter.golden``."""

from pathlib import Path

from pase.planning.plan import Plan
from pase.targets.programs import emit
from tests.runtime.networks import small
from tests.runtime.plans import make_plan

GOLDEN = Path(__file__).parent / "golden_mlp.py"


def golden_plan() -> Plan:
    """A multilayer perceptron on four devices, a different strategy for each layer."""
    splits = {"fc1": {"b": 4}, "fc2": {"n": 2, "c": 2}, "fc3": {"b": 2}, "softmax": {"b": 2, "n": 2}}
    return make_plan(small("mlp"), 4, splits, {"fc2": (0, 2, 1, 3)})


if __name__ == "__main__":
    GOLDEN.write_text(emit(golden_plan()), encoding="utf-8")
