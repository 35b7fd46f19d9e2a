"""`Target`: the properties in which the programs of one framework differ from those of others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pase.targets.emitter.text import Text

KERNELS = frozenset({"attention", "dropout", "lstm", "normalise", "softmax_loss"})
"""Body steps for which every target has a layer."""

LAYERS = (
    "GATES", "arrange", "attention", "concat", "convolve", "convolve_transposed", "cut", "dims", "dropout",
    "end_to_end", "fan_out", "fn", "greatest", "last_state", "least", "log_softmax", "lookup", "lstm", "mean",
    "normalise", "padded", "pick", "piece", "pool", "product", "recurrent", "reshard", "select_rows", "softmax",
    "softmax_loss", "total", "view", "window", "without_later_keys",
)  # fmt: skip
"""Layers with the same arguments in every target; a target may lack some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The parts of a program around its blocks.

    Attributes:
        title: Description of the program, after the model's name.
        usage: How to run it, given the number of devices.
        before, after: Imports before that of the layers, and after it.
        returned: Type of the result of `build`.
    """

    title: str
    usage: Callable[[int], tuple[Text, ...]]
    before: tuple[Text, ...]
    after: tuple[Text, ...]
    returned: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework that programs are emitted for.

    Attributes:
        module: Module of its layers.
        layers: Names of its layers.
        kernels: Body steps that it has a layer for.
        loss: Form of programs that return only the loss.
        with_outputs: Form of training programs that also return the model's other outputs; None if not supported.
        outputs: Form of programs that return the model's outputs; None if not supported.
        takes_imported: Whether programs of imported models are emitted, not only of built networks.
        takes_uneven_parts: Whether splits need not divide their dims.
        takes_types: Whether programs compute in the types of the plan, not in a type given on their command line.
        stages: Form of programs whose layers are in stages; None if programs have no stages, micro-batches or layer
            modes.
        check: Raises MissingExtraError where the framework is not installed.
        runs_on: Name of its devices where they are not GPUs.
        reference: Trains on one device without any program, given a graph, training options and a callback for each
            step; None where the same program with nothing split is the reference.
        takes_factories: Whether `run_factory` trains a model that a factory makes.
    """

    name: str
    module: Text
    layers: tuple[str, ...]
    kernels: frozenset[str]
    loss: Form
    with_outputs: Form | None
    outputs: Form | None
    takes_uneven_parts: bool
    takes_types: bool
    check: Callable[[], None]
    runs_on: str
    reference: Callable[..., Any] | None = None
    stages: Form | None = None
    takes_imported: bool = True
    takes_factories: bool = False

    @property
    def takes_modes(self) -> bool:
        """Whether programs may have micro-batches, stages, sharded weights and recomputed layers."""
        return self.stages is not None
