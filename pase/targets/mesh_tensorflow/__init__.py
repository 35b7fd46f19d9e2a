"""The target Mesh-TensorFlow: the library that its programs run on, and what runs them."""

from importlib.util import find_spec
from typing import Any

from pase.errors import missing_extra
from pase.targets.emitter.target import KERNELS, LAYERS, Form, Target
from pase.targets.emitter.text import code


def check_packages() -> None:
    """Raise MissingExtraError where TensorFlow and Mesh-TensorFlow are not installed; nothing is imported."""
    if find_spec("tensorflow") is None or find_spec("mesh_tensorflow") is None:
        raise missing_extra("running a program needs TensorFlow and Mesh-TensorFlow", "mesh")


def _reference(*given: Any, **others: Any) -> Any:
    """Train on one device; the import of TensorFlow takes seconds, and nobody waits for it before."""
    from pase.targets.mesh_tensorflow.runtime.reference import reference_training

    return reference_training(*given, **others)


_OF_IMPORTED_MODELS = ("cut", "end_to_end", "last_state", "recurrent", "select_rows", "view")
"""Layers that programs of built networks do not need."""

MESH_TENSORFLOW = Target(
    name="mesh_tensorflow",
    module=code("pase.targets.mesh_tensorflow.runtime.layers"),
    layers=tuple(name for name in LAYERS if name not in _OF_IMPORTED_MODELS),
    kernels=KERNELS,
    loss=Form(
        title="a training program for Mesh-TensorFlow",
        usage=lambda _: (
            code("    python FILE --steps 10 [--data batches.npz] [--dtype float64] [--learning-rate 0.01] [--json]"),
        ),
        before=(code("from pase.targets.mesh_tensorflow.primitives.compat import mtf"),),
        after=(
            code("from pase.targets.mesh_tensorflow.runtime.program import Program"),
            code("from pase.targets.mesh_tensorflow.runtime.script import main"),
        ),
        returned=code("mtf.Tensor"),
    ),
    with_outputs=None,
    outputs=None,
    takes_imported=False,
    takes_uneven_parts=False,
    takes_types=False,
    check=check_packages,
    runs_on="virtual CPU devices",
    reference=_reference,
)
