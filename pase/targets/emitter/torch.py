"""What programs for PyTorch begin with."""

from pase.graph.body import OWN
from pase.targets.emitter.target import KERNELS, LAYERS, Form, Target
from pase.targets.emitter.text import Text, code

_PROGRAM = code("from pase.targets.torch.program import Program")
_TENSOR = code("from pase.targets.torch.tensor import Tensor")
_WITH_OUTPUTS = code("from pase.targets.torch.script import Outputs, main")


def _training(num_devices: int) -> tuple[Text, ...]:
    options = code("--steps 10 [--data batches.npz] [--dtype float64] [--learning-rate 0.01]")
    return code("    torchrun --nproc-per-node {} FILE {}", num_devices, options), *_alone(num_devices)


def _computing(num_devices: int) -> tuple[Text, ...]:
    options = code("--weights weights.npz --data inputs.npz --output outputs.npz")
    return code("    torchrun --nproc-per-node {} FILE {}", num_devices, options), *_alone(num_devices)


def _alone(num_devices: int) -> tuple[Text, ...]:
    """Return what `python FILE` does, and what else a process may be told by."""
    return (
        code(""),
        code(
            "`python FILE` starts its {} processes on this machine itself. A process is told by torchrun, or by",
            num_devices,
        ),
        code("whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which one it is."),
    )


TORCH = Target(
    name="torch",
    module=code("pase.targets.torch.layers"),
    layers=tuple(sorted((*LAYERS, "batch_norm", "cast", "grouped", "masked_attention", "routed", "source"))),
    kernels=KERNELS | OWN | {"batch_norm", "masked_attention"},
    words=("Pipeline", "Tensor"),
    loss=Form(
        title="a training program for PyTorch",
        usage=_training,
        before=(),
        after=(_PROGRAM, code("from pase.targets.torch.script import main"), _TENSOR),
        returned=code("Tensor"),
    ),
    with_outputs=Form(
        title="a training program for PyTorch",
        usage=_training,
        before=(),
        after=(_PROGRAM, _WITH_OUTPUTS, _TENSOR),
        returned=code("tuple[Tensor, Outputs]"),
    ),
    stages=Form(
        title="a training program for PyTorch",
        usage=_training,
        before=(),
        after=(
            code("from pase.targets.torch.pipeline import Pipeline"),
            _PROGRAM,
            code("from pase.targets.torch.script import main"),
            _TENSOR,
        ),
        returned=code("Tensor"),
    ),
    takes_uneven_parts=True,
    takes_types=True,
    outputs=Form(
        title="a program for PyTorch that computes its outputs",
        usage=_computing,
        before=(),
        after=(_PROGRAM, _WITH_OUTPUTS),
        returned=code("Outputs"),
    ),
)
