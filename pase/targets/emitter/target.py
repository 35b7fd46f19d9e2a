"""`Target`: what the programs of one framework have that those of another have not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pase.targets.emitter.text import Text

KERNELS = frozenset({"attention", "dropout", "lstm", "normalise", "softmax_loss"})
"""Steps of bodies that every target has a layer for, as they are."""

LAYERS = (
    "GATES", "arrange", "attention", "concat", "convolve", "convolve_transposed", "cut", "dims", "dropout",
    "end_to_end", "fan_out", "fn", "greatest", "last_state", "least", "log_softmax", "lookup", "lstm", "mean",
    "normalise", "padded", "pick", "piece", "pool", "product", "recurrent", "reshard", "select_rows", "softmax",
    "softmax_loss", "total", "view", "window", "without_later_keys",
)  # fmt: skip
"""Layers that are the same for every target, with the same arguments; a target may lack some."""


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

    module: of its layers. layers: their names. kernels: steps of bodies that it has a layer for, as they are. loss:
    programs that return the loss alone. with_outputs: those that return the model's other outputs beside it; None where
    programs that train return no outputs. outputs: those that return what the model computes; None where programs
    train alone. takes_imported: whether imported models are written, not built networks alone. takes_uneven_parts:
    whether splits need not divide their dims. takes_types: whether they compute in the types of a plan, not in one that
    their command line names. stages: those whose layers are in stages; None where programs have no stages,
    micro-batches or modes of layers. check: raises MissingExtraError where what programs run on is not installed.
    runs_on: what its devices are called where they are no GPUs. reference: takes a graph, training options and what
    hears of each step, and trains on one device without any program; None where the same program with nothing split is
    the reference. takes_factories: whether a model that a factory makes is trained by `run_factory`.
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
        """Whether programs may have micro-batches, stages, weights in pieces and layers that are computed again."""
        return self.stages is not None
