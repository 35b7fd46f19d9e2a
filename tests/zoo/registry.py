"""What a model of the zoo is: a factory of a module that returns its loss, and how inputs are drawn for it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import nn

from tests.importers.architectures import stand_in_for_torchvision
from tests.targets.torch.modules import in_float64

Draw = Callable[[torch.Generator], Any]
"""Draws an input of a batch."""

Made = TypeVar("Made", bound=type[nn.Module])

FAMILIES = (
    "losses",
    "selfsupervised",
    "reinforcement",
    "generative",
    "recurrences",
    "graphs",
    "images",
    "functions",
    "huggingface",
    "denoisers",
    "pictures",
)
"""Modules of this package that have a `zoo`, in the order in which they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the zoo.

    Attributes:
        name: Unique in the zoo.
        family: Of which it is.
        make: Returns the module, whose forward returns a loss, or an output with one.
        inputs: How each keyword argument of a call is drawn.
        is_random: Whether the module draws random numbers in training.
        package: That it needs beside PyTorch.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Draw]
    is_random: bool = False
    package: str = "torch"

    def module(self) -> nn.Module:
        """Return the module in float64, for training.

        Vectors are moved from their first values: a bias that stays at 0 but for rounding has no relative error.
        """
        torch.manual_seed(0)
        module = self.make().double().train()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim == 1 and parameter.is_floating_point():
                    parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
        return module

    def batch(self, step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(17 + step)
        return {name: draw(generator) for name, draw in self.inputs.items()}


class Family:
    """Models by name, added by decorators."""

    def __init__(self, name: str, package: str = "torch") -> None:
        self.name, self.package, self.models = name, package, dict[str, Model]()

    def add(
        self, name: str, make: Callable[[], nn.Module], /, *, is_random: bool = False, **inputs: Draw
    ) -> Callable[[], nn.Module]:
        """Add a model, whose factory is returned."""
        assert name not in self.models, name
        self.models[name] = Model(
            name=name, family=self.name, make=make, inputs=inputs, is_random=is_random, package=self.package
        )
        return make

    def of(self, name: str, /, *, is_random: bool = False, **inputs: Draw) -> Callable[[Made], Made]:
        """Return a decorator of a class of modules that are made without arguments."""

        def decorated(made: Made) -> Made:
            self.add(name, made, is_random=is_random, **inputs)
            return made

        return decorated


def zoo() -> dict[str, Model]:
    """Return all models whose packages are installed, by name."""
    stand_in_for_torchvision()
    models = dict[str, Model]()
    for name in FAMILIES:
        family = import_module(f"tests.zoo.{name}").zoo
        if find_spec(family.package) is None:
            continue
        assert not models.keys() & family.models.keys(), models.keys() & family.models.keys()
        models |= family.models
    return models


@contextmanager
def exact(model: Model) -> Iterator[None]:
    """Have a model's package compute in float64 what it computes in float32 itself."""
    # What stands in the package's files is replaced: they are to be loaded.
    model.make()
    with in_float64():
        yield


# -- inputs


def floats(*shape: int, scale: float = 1.0) -> Draw:
    return lambda numbers: scale * torch.randn(shape, generator=numbers, dtype=torch.float64)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Draw:
    return lambda numbers: low + (high - low) * torch.rand(shape, generator=numbers, dtype=torch.float64)


def whole(*shape: int, low: int = 0, high: int) -> Draw:
    """Whole numbers from low to high, which is left out."""
    return lambda numbers: torch.randint(low, high, shape, generator=numbers)


def coins(*shape: int, share: float = 0.5) -> Draw:
    """Zeros and ones, as numbers."""
    return lambda numbers: (torch.rand(shape, generator=numbers) < share).double()


def masks(*shape: int, share: float = 0.5) -> Draw:
    return lambda numbers: torch.rand(shape, generator=numbers) < share


def lengths(*counts: int) -> Draw:
    """Numbers that are the same in every batch."""
    return lambda _: torch.tensor(counts)
