"""The PyTorch target: runs a plan on local ranks, as a module or as an emitted program."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from pase.errors import missing_extra
from pase.graph.functions import OWN_FUNCTIONS
from pase.targets.emitter.target import KERNELS, LAYERS, Form, Target
from pase.targets.emitter.text import Text, code


def check_torch() -> None:
    """Raise MissingExtraError where PyTorch is not installed; nothing is imported."""
    if find_spec("torch") is None:
        raise missing_extra("running a program for PyTorch needs PyTorch", "torch")


_PROGRAM = code("from pase.targets.torch.program import Program")
_MAIN = code("from pase.targets.torch.script import main")
_TENSOR = code("from pase.targets.torch.tensor import Tensor")
_WITH_OUTPUTS = code("from pase.targets.torch.script import Outputs, main")


def _by_torchrun(options: Text) -> Callable[[int], tuple[Text, ...]]:
    """Return a function from the number of devices to the torchrun command and other ways to start a program."""
    return lambda num_devices: (
        code("    torchrun --nproc-per-node {} FILE {}", num_devices, options),
        code(""),
        code(
            "`python FILE` starts its {} processes on this machine itself. torchrun may start them instead, or any",
            num_devices,
        ),
        code("launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."),
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
    kernels=KERNELS | OWN_FUNCTIONS | {"batch_norm", "masked_attention"},
    loss=_TRAINS,
    with_outputs=replace(_TRAINS, after=(_PROGRAM, _WITH_OUTPUTS, _TENSOR), returned=code("tuple[Tensor, Outputs]")),
    stages=replace(_TRAINS, after=(code("from pase.targets.torch.pipeline import Pipeline"), *_TRAINS.after)),
    takes_uneven_parts=True,
    takes_types=True,
    takes_factories=True,
    check=check_torch,
    runs_on="local processes",
    outputs=Form(
        title="a program for PyTorch that computes its outputs",
        usage=_by_torchrun(code("--weights weights.npz --data inputs.npz --output outputs.npz")),
        before=(),
        after=(_PROGRAM, _WITH_OUTPUTS),
        returned=code("Outputs"),
    ),
)
