"""What programs for Mesh-TensorFlow begin with."""

from pase.targets.emitter.target import KERNELS, LAYERS, Form, Target
from pase.targets.emitter.text import code

_PROGRAM = code("from pase.targets.mesh_tensorflow.runtime.program import Program")

MESH_TENSORFLOW = Target(
    name="mesh_tensorflow",
    module=code("pase.targets.mesh_tensorflow.runtime.layers"),
    layers=LAYERS,
    kernels=KERNELS,
    words=("mtf",),
    loss=Form(
        title="a training program for Mesh-TensorFlow",
        usage=lambda _: (
            code("    python FILE --steps 10 [--data batches.npz] [--dtype float64] [--learning-rate 0.01] [--json]"),
        ),
        before=(code("from pase.targets.mesh_tensorflow.primitives.compat import mtf"),),
        after=(_PROGRAM, code("from pase.targets.mesh_tensorflow.runtime.script import main")),
        returned=code("mtf.Tensor"),
    ),
    with_outputs=None,
    takes_uneven_parts=False,
    takes_types=False,
    outputs=Form(
        title="its forward pass, a program for Mesh-TensorFlow",
        usage=lambda _: (
            code("    python FILE --weights weights.npz --data inputs.npz --output outputs.npz [--json]"),
        ),
        before=(code("from pase.targets.mesh_tensorflow.runtime.forward_pass import Outputs, main"),),
        after=(_PROGRAM,),
        returned=code("Outputs"),
    ),
)
