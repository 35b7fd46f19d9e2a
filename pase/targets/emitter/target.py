"""`Target`: what the programs of one framework have that those of another have not; those that there are."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pase.graph.body import OWN
from pase.targets.emitter.text import Text, code

KERNELS = frozenset({"attention", "dropout", "lstm", "normalise", "softmax_loss"})
"""Steps of bodies that every target has a layer for, as they are."""

LAYERS = (
    "GATES", "arrange", "attention", "concat", "convolve", "convolve_transposed", "cut", "dims", "dropout",
    "end_to_end", "fan_out", "fn", "greatest", "last_state", "least", "log_softmax", "lookup", "lstm", "mean",
    "normalise", "padded", "pick", "piece", "pool", "product", "recurrent", "reshard", "select_rows", "softmax",
    "softmax_loss", "total", "view", "window", "without_later_keys",
)  # fmt: skip
"""Layers that every target has, with the same arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What stands around the blocks of a program.

    title: what the program is, after the model's name. usage: how it is run, from the number of devices. before, after:
    imports, before that of the layers and after it. returned: the type of what `build` returns.
    """

    title: str
    usage: Callable[[int], tuple[Text, ...]]
    before: tuple[Text, ...]
    after: tuple[Text, ...]
    returned: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework that programs are written for.

    module: of its layers. layers: their names. kernels: steps of bodies that it has a layer for, as they are. words:
    that its programs use besides and no variable is called. loss: programs that return the loss alone. with_outputs:
    those that return the model's other outputs beside it; None where programs that train return no outputs. outputs:
    those that return what the model computes. takes_uneven_parts: whether splits need not divide their dims.
    takes_types: whether they compute in the types of a plan, not in one that their command line names. stages: those
    whose layers are in stages; None where programs have no stages, micro-batches or modes of layers.
    """

    name: str
    module: Text
    layers: tuple[str, ...]
    kernels: frozenset[str]
    words: tuple[str, ...]
    loss: Form
    with_outputs: Form | None
    outputs: Form
    takes_uneven_parts: bool
    takes_types: bool
    stages: Form | None = None

    @property
    def takes_modes(self) -> bool:
        """Whether programs may have micro-batches, stages, weights in pieces and layers that are computed again."""
        return self.stages is not None


_MESH_PROGRAM = code("from pase.targets.mesh_tensorflow.runtime.program import Program")

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
        after=(_MESH_PROGRAM, code("from pase.targets.mesh_tensorflow.runtime.script import main")),
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
        after=(_MESH_PROGRAM,),
        returned=code("Outputs"),
    ),
)

_PROGRAM = code("from pase.targets.torch.program import Program")
_MAIN = code("from pase.targets.torch.script import main")
_TENSOR = code("from pase.targets.torch.tensor import Tensor")
_WITH_OUTPUTS = code("from pase.targets.torch.script import Outputs, main")


def _by_torchrun(options: Text) -> Callable[[int], tuple[Text, ...]]:
    """Return how a program with some options is run on so many devices, and what else a process may be told by."""
    return lambda num_devices: (
        code("    torchrun --nproc-per-node {} FILE {}", num_devices, options),
        code(""),
        code(
            "`python FILE` starts its {} processes on this machine itself. A process is told by torchrun, or by",
            num_devices,
        ),
        code("whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which one it is."),
    )


_TRAINS = Form(
    title="a training program for PyTorch",
    usage=_by_torchrun(code("--steps 10 [--data batches.npz] [--dtype float64] [--learning-rate 0.01]")),
    before=(),
    after=(_PROGRAM, _MAIN, _TENSOR),
    returned=code("Tensor"),
)

TORCH = Target(
    name="torch",
    module=code("pase.targets.torch.layers"),
    layers=tuple(sorted((*LAYERS, "batch_norm", "cast", "grouped", "masked_attention", "routed", "source"))),
    kernels=KERNELS | OWN | {"batch_norm", "masked_attention"},
    words=("Pipeline", "Tensor"),
    loss=_TRAINS,
    with_outputs=replace(_TRAINS, after=(_PROGRAM, _WITH_OUTPUTS, _TENSOR), returned=code("tuple[Tensor, Outputs]")),
    stages=replace(_TRAINS, after=(code("from pase.targets.torch.pipeline import Pipeline"), *_TRAINS.after)),
    takes_uneven_parts=True,
    takes_types=True,
    outputs=Form(
        title="a program for PyTorch that computes its outputs",
        usage=_by_torchrun(code("--weights weights.npz --data inputs.npz --output outputs.npz")),
        before=(),
        after=(_PROGRAM, _WITH_OUTPUTS),
        returned=code("Outputs"),
    ),
)
